"""One call over a device mesh: batch rows, heads and the sequence are split, each device runs the route on its own part.

Attention does not mix batch rows or heads. Over a sequence axis there are four ways:

- "gather": every device has its part of the queries and all keys. The default.
- "merge": every device has all queries and its part of the keys; the results are merged by their logsumexp. Taken where the
  queries are too few to be split, which is decoding with a cache in parts.
- "ring": every device has its part of both, and the keys go round.
- "ulysses": the sequence axis splits the heads instead; queries, keys and outputs change places before and after.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attention_ops import sequence
from attention_ops.features import Feature
from attention_ops.kernels.sinks import output_with_sinks
from attention_ops.masks import Causal, Chunked, Dense, Mask, Positional, Segments, Window
from attention_ops.metadata import DEFAULT_AXES, OperationMetadata
from attention_ops.request import AttentionOutput, AttentionRequest, RequestSpec


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a mesh splits one call.

    Attributes:
        batch, heads, sequence: the mesh axes that split each; those that do not divide are left out.
        batch_parts, head_parts, sequence_parts: in how many parts.
        has_own_keys: whether the key/value heads are split like the query heads; else each device takes those it needs of all.
        way: over the sequence, "gather", "merge", "ring" or "ulysses"; "" where it is whole.
        zigzag: whether a ring attends two pieces of the sequence on each device, one from each end.
        notes: what is replicated, and what that costs.
        refusals: why the way that was asked for cannot be gone.
    """

    batch: tuple[str, ...]
    heads: tuple[str, ...]
    sequence: tuple[str, ...]
    batch_parts: int
    head_parts: int
    sequence_parts: int
    has_own_keys: bool
    way: str
    zigzag: bool = False
    notes: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()

    @property
    def query_axes(self) -> tuple[str, ...]:
        return self.sequence if self.way in ("gather", "ring") else ()

    @property
    def key_axes(self) -> tuple[str, ...]:
        return self.sequence if self.way in ("merge", "ring") else ()

    @property
    def pieces(self) -> int:
        """In how many pieces a sequence is attended that the mesh splits."""
        return self.sequence_parts * (2 if self.zigzag else 1)

    def __str__(self) -> str:
        text = f"batch over {list(self.batch)} in {self.batch_parts}, heads over {list(self.heads)} in {self.head_parts}"
        return f"{text}, sequence over {list(self.sequence)} in {self.sequence_parts} ({self._way()})" if self.way else text

    def _way(self) -> str:
        return _WAYS[self.way] + (", two pieces to a device, one from each end" if self.zigzag else "")


_WAYS = {
    "gather": "gather: all keys on every device",
    "merge": "merge: keys in parts, results merged by their logsumexp",
    "ring": "ring: keys go round",
    "ulysses": "ulysses: its axes split the heads, by all-to-all",
}


def is_local(mesh: Any) -> bool:
    """Whether the code being traced already runs on one device's part: inside a `jax.shard_map` over an axis of the mesh."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return bool(set(manual) & set(mesh.axis_names))


def over_context(metadata: OperationMetadata, is_traced: bool) -> OperationMetadata:
    """Return the metadata with a mesh that a call can run over: an abstract one stands for that of `jax.set_mesh`, if alike.

    Raises:
        ValueError: the mesh has no devices, or is another than the one around the call.
    """
    mesh = metadata.mesh
    if mesh is None:
        return metadata
    context = jax.sharding.get_abstract_mesh()
    if context.empty:
        if isinstance(mesh, AbstractMesh) and not is_traced:
            raise ValueError(
                f"metadata.mesh is {mesh}, which has no devices to run on and is for planning; give the mesh that jax.make_mesh "
                "makes, or call inside jax.set_mesh with that"
            )
        return metadata
    if _axes_and_types(mesh) != _axes_and_types(context):
        raise ValueError(
            f"metadata.mesh is {mesh}, but the mesh around the call, of jax.set_mesh or jax.shard_map, is {context}; allowed is "
            "one of the same axes, sizes and types: give one of them to both, or call outside of it"
        )
    return dataclasses.replace(metadata, mesh=context) if isinstance(mesh, AbstractMesh) else metadata


def _axes_and_types(mesh: Any) -> tuple[Any, ...]:
    return tuple(mesh.shape.items()), mesh.axis_types


def elsewhere(error: ValueError, arrays: Sequence[tuple[str, Any]], mesh: Any) -> ValueError | None:
    """Return JAX's error of arrays that are committed to other devices than those of the mesh in words of the call, or None."""
    if not str(error).startswith("Received incompatible devices") or "context mesh" in str(error) or not isinstance(mesh, Mesh):
        return None
    devices = list(mesh.devices.flat)
    placed = [(name, x) for name, x in arrays if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.committed]
    others = [(name, x.sharding) for name, x in placed if x.devices() != set(devices)] or [(n, x.sharding) for n, x in placed]
    name, where = (*others, ("an array of the call", "other devices"))[0]
    return ValueError(
        f"{name} is committed to {where}, and metadata.mesh has the devices {devices}; allowed are arrays on these, in their "
        "order, and uncommitted ones: jax.device_put(array, NamedSharding(mesh, PartitionSpec()))"
    )


def sequence_devices(metadata: OperationMetadata) -> int:
    """Return over how many devices the mesh could split a sequence."""
    if metadata.mesh is None:
        return 1
    sizes = dict(metadata.mesh.shape)
    return math.prod(sizes[axis] for axis in _axes(metadata.partition_axis, "sequence_axis", sizes))


@functools.lru_cache(maxsize=1024)
def layout(spec: RequestSpec, metadata: OperationMetadata, way: str = "gather") -> Layout:
    """Return how the mesh of the metadata splits a call, going the `way` over the sequence if it can be gone.

    Raises:
        ValueError: `partition_axis` names an axis the mesh does not have, or one twice; something does not divide and the
            metadata ask for an error.
    """
    sizes = dict(metadata.mesh.shape)
    batch, heads, axes = found = [_axes(metadata.partition_axis, name, sizes) for name in DEFAULT_AXES]
    _check_each_is_named_once(found)
    notes: list[str] = []

    def divided(what: str, size: int, axes: tuple[str, ...]) -> tuple[str, ...]:
        kept: tuple[str, ...] = ()
        for axis in axes:
            parts = math.prod(sizes[name] for name in kept) * sizes[axis]
            if size % parts == 0:
                kept = (*kept, axis)
            else:
                _replicate(metadata, notes, what, size, axis, sizes[axis])
        return kept

    batch, heads = divided("batch size", spec.B, batch), divided("query heads", spec.H, heads)
    axes = tuple(axis for axis in axes if sizes[axis] > 1)
    n, refusals = math.prod(sizes[axis] for axis in axes), ()
    if n == 1:
        axes, way = (), ""
    elif way == "ulysses":
        refusals = _refuse_ulysses(spec, math.prod(sizes[axis] for axis in heads), n)
        heads = heads if refusals else (*heads, *axes)
    else:
        way, refusals = _way(spec, way, n)
        if not way:
            for axis in axes:
                _replicate(metadata, notes, f"query length {spec.T} and key length", spec.S, axis, sizes[axis])
            axes, n = (), 1
    head_parts = math.prod(sizes[axis] for axis in heads)
    has_own_keys = spec.K % head_parts == 0
    if not has_own_keys:
        _replicate(metadata, notes, "key/value heads", spec.K, ", ".join(heads), head_parts, "each takes the heads it reads")
    batch_parts = math.prod(sizes[axis] for axis in batch)
    zigzag = way == "ring" and _is_uneven(spec, n)
    return Layout(batch, heads, axes, batch_parts, head_parts, n, has_own_keys, way, zigzag, tuple(notes), refusals)


def _is_uneven(spec: RequestSpec, n: int) -> bool:
    """Whether positions in order would give the last of n devices most of the work, and two pieces for each are possible.

    To put a bias of every head and row in that order would cost more than it saves: two or four bytes are moved for 2 * (D + Dv)
    operations a batch row, and an H100 does 2,200 in the time that one byte takes by NVLink.
    """
    if spec.bias_shape is not None and min(spec.bias_shape[1:3]) > 1:
        return False
    leaves = () if spec.mask is None else spec.mask.conjuncts()
    is_causal = any(isinstance(leaf, Causal) for leaf in leaves) and not any(isinstance(leaf, Window) for leaf in leaves)
    is_cut = any(isinstance(leaf, Chunked) and (spec.S // (2 * n)) % leaf.size for mask in leaves for leaf in mask.leaves())
    return is_causal and not is_cut and spec.T == spec.S and spec.T % (2 * n) == 0


def _replicate(
    metadata: OperationMetadata,
    notes: list[str],
    what: str,
    size: int,
    axis: str,
    parts: int,
    cost: str = "each does the work of all",
) -> None:
    if metadata.on_indivisible == "error":
        raise ValueError(
            f"{what} {size} cannot be split over the mesh axis {axis!r} of {parts} devices; use a size that {parts} divides, "
            'leave the axis out of partition_axis, or set on_indivisible="replicate"'
        )
    notes.append(f"{what} {size} is not split over {axis!r} of {parts} devices, which does not divide it: replicated, {cost}")


def _refuse_ulysses(spec: RequestSpec, head_parts: int, n: int) -> tuple[str, ...]:
    parts = head_parts * n
    return () if spec.H % parts == 0 else (f"ulysses needs query heads that {parts} devices divide, found {spec.H}",)


def _way(spec: RequestSpec, way: str, n: int) -> tuple[str, tuple[str, ...]]:
    """Return the way over a sequence axis of n devices that can be gone, "" for none, and why a ring cannot."""
    in_parts = _obstacles(spec, n)
    if spec.T % n == 0:
        refusals = tuple(f"a ring of {n} devices {obstacle}" for obstacle in in_parts) if way == "ring" else ()
        return ("gather" if refusals else way), refusals
    return ("", ()) if in_parts else ("merge", ())


def _obstacles(spec: RequestSpec, n: int) -> list[str]:
    """Say why the keys cannot be attended in n parts."""
    found = []
    if spec.S % n:
        found.append(f"needs a key length that {n} divides, found {spec.S}")
    if spec.dropout:
        found.append("cannot draw dropout, which the merged softmax would have to undo")
    if spec.want_weights:
        found.append("cannot return the attention weights, which no device has")
    for leaf in () if spec.mask is None else spec.mask.leaves():
        if isinstance(leaf, Chunked) and (spec.S // n) % leaf.size:
            found.append(f"would cut the mask's chunks of {leaf.size} keys into parts of {spec.S // n}")
    return found


def _axes(partition_axis: Any, name: str, sizes: dict[str, int]) -> tuple[str, ...]:
    """Return the mesh axes for one logical axis; axes stated by hand must exist, defaults that do not are left out."""
    if isinstance(partition_axis, Mapping):
        axes = _tuple(partition_axis.get(name))
        for axis in axes:
            if axis not in sizes:
                raise ValueError(f"partition_axis.{name} names {axis!r}; the mesh has {', '.join(sizes)}")
        return axes
    axes = DEFAULT_AXES[name] if partition_axis is None else _tuple(getattr(partition_axis, name))
    return tuple(axis for axis in axes if axis in sizes)


def _check_each_is_named_once(found: list[tuple[str, ...]]) -> None:
    owner: dict[str, str] = {}
    for name, axes in zip(DEFAULT_AXES, found, strict=True):
        for axis in axes:
            if axis in owner:
                raise ValueError(
                    f"partition_axis names the mesh axis {axis!r} in {owner[axis]} and again in {name}; allowed is once: "
                    "leave it out of one of them"
                )
            owner[axis] = name


def _tuple(axes: Any) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


# ---------------------------------------------------------------- one device's part


def local_spec(spec: RequestSpec, metadata: OperationMetadata, way: str = "gather") -> RequestSpec:
    """Return the spec one device sees. Rules are asked about this one.

    Raises:
        ValueError: as `layout`.
    """
    return spec if metadata.mesh is None else _local_spec(spec, layout(spec, metadata, way))


@functools.lru_cache(maxsize=1024)
def _local_spec(spec: RequestSpec, split: Layout) -> RequestSpec:
    B, H = spec.B // split.batch_parts, spec.H // split.head_parts
    K = spec.K // split.head_parts if split.has_own_keys else _needed_heads(spec, H)
    T = spec.T // split.pieces if split.query_axes else spec.T
    S = spec.S // split.pieces if split.key_axes else spec.S
    bias = spec.bias_shape
    if bias is not None:
        bias = (min(bias[0], B), min(bias[1], H), min(bias[2], T), min(bias[3], S))
    mask = None if spec.mask is None else _shardable(spec.mask, split).abstract().map_leaves(lambda leaf: _local_mask(leaf, B, H))
    features = spec.features
    if mask is not None and split.way in _CUTS:
        index = jax.ShapeDtypeStruct((), jnp.int32)
        mask = jax.eval_shape(
            lambda mask, at: mask.cut(at, T, at, S) if split.way != "gather" else mask.cut(at, T, 0, S), mask, index
        )
        mask = mask.abstract()
        features |= {Feature.OFFSET} if any(isinstance(leaf, Positional) for leaf in mask.leaves()) else frozenset()
    if K == H:
        features -= {Feature.GQA}
    local = dataclasses.replace(spec, B=B, T=T, S=S, H=H, K=K, bias_shape=bias, mask=mask, features=features)
    if split.way not in _MERGES:
        return local
    features = (features | {Feature.LOGSUMEXP}) - {Feature.SINKS}
    # In float16 the cotangent of a part, which is multiplied by its share of the softmax, would underflow.
    dtype = np.dtype(np.float32) if spec.dtype == np.float16 else spec.dtype
    return dataclasses.replace(local, dtype=dtype, features=features, sinks=0, want_logsumexp=True)


_CUTS = ("gather", "merge", "ring")
_MERGES = ("merge", "ring")


def _needed_heads(spec: RequestSpec, H: int) -> int:
    """Return how many key/value heads H neighbouring query heads get: the one they share, else one each."""
    return 1 if spec.groups % H == 0 else H


def _shardable(mask: Mask, split: Layout) -> Mask:
    """Return the mask with static arrays that are split made run-time data, which can be."""

    def is_split(leaf: Dense) -> bool:
        return any(_spec_of(leaf.array.shape, _LOGITS, split))

    return mask.map_leaves(lambda leaf: leaf.as_data() if isinstance(leaf, Dense) and leaf.is_static and is_split(leaf) else leaf)


def _local_mask(leaf: Mask, B: int, H: int) -> Mask:
    largest = {"batch": B, "heads": H}

    def shrink(x: Any) -> Any:
        shape = tuple(min(n, largest.get(axis, n)) for axis, n in zip(_axis_names(leaf, x), x.shape, strict=True))
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree_util.tree_map(shrink, leaf)


_LOGITS = ("batch", "heads", "rows", "cols")


def _axis_names(leaf: Mask, array: Any) -> tuple[str, ...]:
    """Name the axes of an array of a mask; a length is on every device."""
    if isinstance(leaf, Dense):
        return _LOGITS
    if isinstance(leaf, Segments):
        return ("batch", "length")
    return ("batch",)[: array.ndim]


def array_specs(spec: RequestSpec, split: Layout) -> dict[str, tuple[tuple[int, ...], P]]:
    """Return the whole shape and the `PartitionSpec` of query, key, value, output and bias while they are attended."""
    batch, heads = _name(split.batch), _name(split.heads)
    queries = P(batch, _name(split.query_axes), heads, None)
    keys = P(batch, _name(split.key_axes), heads if split.has_own_keys else None, None)
    found = {
        "query": ((spec.B, spec.T, spec.H, spec.D), queries),
        "key": ((spec.B, spec.S, spec.K, spec.D), keys),
        "value": ((spec.B, spec.S, spec.K, spec.Dv), keys),
        "output": ((spec.B, spec.T, spec.H, spec.Dv), queries),
    }
    if spec.bias_shape is not None:
        found["bias"] = spec.bias_shape, _spec_of(spec.bias_shape, _LOGITS, split)
    return found


@dataclasses.dataclass(frozen=True)
class Transfer:
    """What each device receives from others in the forward, beside moving inputs that lie elsewhere: bytes, in how many steps."""

    what: str
    bytes: int
    steps: int


def transfers(spec: RequestSpec, split: Layout) -> tuple[Transfer, ...]:
    """Return the communication over the sequence axes, for inputs and outputs that lie in parts of the sequence."""
    n, item = split.sequence_parts, spec.dtype.itemsize
    B, H, K = spec.B // split.batch_parts, spec.H, spec.K
    heads = split.head_parts if split.way != "ulysses" else split.head_parts // n
    H, K = H // heads, K // heads if split.has_own_keys else K
    keys = B * spec.S * K * (spec.D + spec.Dv) * item // n
    if split.way == "gather":
        return (Transfer("keys and values, gathered", keys * (n - 1), 1),)
    if split.way == "ring":
        around = (Transfer("keys and values, one part a hop", keys * (n - 1), n - 1),)
        own = B * spec.T * H * (spec.D + spec.Dv) * item // n + keys
        if not split.zigzag:
            return around
        ordered = (Transfer("queries, keys, values and outputs, into zigzag order and back", own, 2),)
        if rows := _bytes_with_rows(spec, split):
            ordered = (*ordered, Transfer("rows of the bias and of boolean masks, into zigzag order", rows, 1))
        return (*ordered, *around)
    if split.way == "merge":
        rows, statistic = B * spec.T * H, spec.softmax_dtype.itemsize
        summed = Transfer("outputs, summed", 2 * rows * spec.Dv * statistic * (n - 1) // n, 1)
        return Transfer("logsumexp, gathered", rows * statistic * (n - 1), 1), summed
    if split.way == "ulysses":
        moved = B * spec.T * H * (spec.D + spec.Dv) * item // n * (n - 1) // n if spec.T % n == 0 else 0
        keys = keys * (n - 1) // n if split.has_own_keys else keys * (n - 1)
        own = (Transfer("queries and outputs, heads for sequence", moved, 2),) if moved else ()
        return (*own, Transfer("keys and values", keys, 1))
    return ()


def _bytes_with_rows(spec: RequestSpec, split: Layout) -> int:
    """Return the bytes of one device's part of the bias and the dense masks that differ by query row."""
    leaves = () if spec.mask is None else spec.mask.leaves()
    arrays = [(leaf.array.shape, 1) for leaf in leaves if isinstance(leaf, Dense)]
    if spec.bias_shape is not None and spec.bias_dtype is not None:
        arrays.append((spec.bias_shape, spec.bias_dtype.itemsize))
    parts = (split.batch_parts, split.head_parts, split.sequence_parts, 1)
    shares = ((shape, item, [n for n, size in zip(parts, shape, strict=True) if size > 1]) for shape, item in arrays)
    return sum(math.prod(shape) * item // math.prod(divided) for shape, item, divided in shares if shape[2] > 1)


# ---------------------------------------------------------------- running


def run_sharded(
    run: Callable[[AttentionRequest], AttentionOutput], request: AttentionRequest, metadata: OperationMetadata, way: str
) -> AttentionOutput:
    """Run a route on every device's part of the request."""
    spec = request.spec
    split, local = layout(spec, metadata, way), local_spec(spec, metadata, way)

    def specs_of(leaf: Mask) -> Mask:
        return jax.tree_util.tree_map(lambda x: _spec_of(x.shape, _axis_names(leaf, x), split), leaf)

    mask = None if request.mask is None else _shardable(request.mask, split)
    batch, heads = _name(split.batch), _name(split.heads)
    placed = {name: place for name, (_, place) in array_specs(spec, split).items()}
    queries, keys = placed["query"], placed["key"]
    arrays = (request.query, request.key, request.value, mask, request.bias, request.sinks, request.dropout_key)
    in_specs = (
        queries,
        keys,
        keys,
        None if mask is None else mask.map_leaves(specs_of),
        placed.get("bias"),
        None if request.sinks is None else P(heads, None),
        None if request.dropout_key is None else P(),
    )
    out_specs: Any = AttentionOutput(
        attention_outputs=queries,  # type: ignore[arg-type]
        attention_weights=P(batch, heads, _name(split.query_axes), None) if spec.want_weights else None,  # type: ignore[arg-type]
        logsumexp=P(batch, _name(split.query_axes), heads) if spec.want_logsumexp else None,  # type: ignore[arg-type]
    )

    def on_one_device(*arrays: Any) -> AttentionOutput:
        query, key, value, mask, bias, sinks, dropout_key = arrays
        if dropout_key is not None:
            for axis in (*split.batch, *split.heads, *split.query_axes):
                dropout_key = jax.random.fold_in(dropout_key, jax.lax.axis_index(axis))
        if not split.has_own_keys:
            key, value = (_heads_read(x, spec, local, split) for x in (key, value))
        if split.way in _MERGES:
            return _in_parts(run, query, key, value, mask, bias, sinks, split, spec, local)
        if split.way == "gather":
            row = jax.lax.axis_index(split.sequence) * local.T
            mask = None if mask is None else mask.cut(row, local.T, 0, local.S, in_arrays=(0, 0))
        return run(AttentionRequest(query, key, value, mask, bias, sinks, dropout_key, local))

    split_run = jax.shard_map(on_one_device, mesh=metadata.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    if split.way != "ulysses":
        return split_run(*_placed(arrays, in_specs, metadata.mesh))
    before = P(batch, _name(split.sequence), _name(tuple(axis for axis in split.heads if axis not in split.sequence)), None)
    query, key, value = (_moved(x, before, metadata.mesh) for x in arrays[:3])
    output = split_run(*_placed((query, key, value, *arrays[3:]), in_specs, metadata.mesh))
    return dataclasses.replace(output, attention_outputs=_moved(output.attention_outputs, before, metadata.mesh))


def _heads_read(x: Any, spec: RequestSpec, local: RequestSpec, split: Layout) -> Any:
    """Return the key/value heads that this device's query heads read, of all heads."""
    first = jax.lax.axis_index(split.heads) * local.H
    if local.K == 1:
        return jax.lax.dynamic_slice_in_dim(x, first // spec.groups, 1, axis=2)
    return jnp.take(x, (first + jnp.arange(local.H)) // spec.groups, axis=2)


def _in_parts(
    run: Callable[[AttentionRequest], AttentionOutput],
    query: Any,
    key: Any,
    value: Any,
    mask: Mask | None,
    bias: Any,
    sinks: Any,
    split: Layout,
    spec: RequestSpec,
    local: RequestSpec,
) -> AttentionOutput:
    """Attend keys that lie in parts; the sinks join at the end, once."""

    def attend(query: Any, key: Any, value: Any, mask: Mask | None, bias: Any) -> sequence.Found:
        query, key, value = (x.astype(local.dtype) for x in (query, key, value))
        output = run(AttentionRequest(query, key, value, mask, bias, None, None, local))
        assert output.logsumexp is not None
        return sequence.Found(output.attention_outputs, output.logsumexp)

    way = functools.partial(sequence.ring, zigzag=split.zigzag) if split.way == "ring" else sequence.merged
    output, logsumexp = way(attend, split.sequence, query, key, value, mask, bias)
    if sinks is not None:
        output = output_with_sinks(output.astype(logsumexp.dtype), logsumexp, jnp.ones(()), sinks, spec.dtype)
    return AttentionOutput(output.astype(spec.dtype), logsumexp=logsumexp if spec.want_logsumexp else None)


def _placed(arrays: Any, specs: Any, mesh: Any) -> Any:
    """Place the arrays as the specs say over the mesh's explicit axes; over automatic ones shard_map does it."""
    if AxisType.Explicit not in mesh.axis_types:
        return arrays
    return jax.tree_util.tree_map(lambda array, spec: jax.reshard(array, _over(AxisType.Explicit, spec, mesh)), arrays, specs)


def _moved(array: Any, spec: P, mesh: Any) -> Any:
    """Place one array, under either kind of axes; where its length does not divide, leave it."""
    length, parts = array.shape[1], math.prod(mesh.shape[axis] for axis in _tuple(spec[1]))
    heads = math.prod(mesh.shape[axis] for axis in _tuple(spec[2]))
    if length % parts or array.shape[2] % heads:
        return array
    if AxisType.Auto in mesh.axis_types:
        array = jax.lax.with_sharding_constraint(array, _over(AxisType.Auto, spec, mesh))
    return _placed(array, spec, mesh)


def _over(kind: AxisType, spec: P, mesh: Any) -> NamedSharding:
    """Return the part of a spec that names axes of that type."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return NamedSharding(mesh, P(*(tuple(axis for axis in _tuple(axes) if kinds[axis] == kind) or None for axes in spec)))


def _spec_of(shape: tuple[int, ...], names: tuple[str, ...], split: Layout) -> P:
    """Return the spec of an array whose broadcast axes, of length 1, are on every device.

    Rows are split like the queries. Columns are split where each device keeps its keys: in a ring it comes to need all.
    """
    axes = {"batch": _name(split.batch), "heads": _name(split.heads), "rows": _name(split.query_axes)}
    axes["cols"] = _name(split.key_axes) if split.way == "merge" else None
    return P(*(axes.get(name) if size > 1 else None for name, size in zip(names, shape, strict=True)))


def _name(axes: tuple[str, ...]) -> Any:
    return axes or None
