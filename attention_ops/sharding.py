"""One call over a device mesh: batch rows and heads are split, each device runs the route on its own part.

Attention does not mix batch rows or heads, so no device talks to another. Key and value sequences stay whole.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attention_ops.masks import Dense, Mask, Segments
from attention_ops.metadata import OperationMetadata
from attention_ops.request import AttentionOutput, AttentionRequest, RequestSpec

DEFAULT_AXES = {"batch_axis": ("dp", "fsdp"), "head_axis": ("tp",)}
"""The mesh axes that split batch and heads when `partition_axis` is None: those of eformer's PartitionAxis."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The mesh axes over which batch rows and heads are split, and in how many parts."""

    batch: tuple[str, ...]
    heads: tuple[str, ...]
    batch_parts: int
    head_parts: int

    def __str__(self) -> str:
        return f"batch over {list(self.batch)} in {self.batch_parts}, heads over {list(self.heads)} in {self.head_parts}"


@functools.lru_cache(maxsize=256)
def layout(metadata: OperationMetadata) -> Layout:
    """Return how the mesh of the metadata splits a call.

    Raises:
        ValueError: `partition_axis` names an axis the mesh does not have.
    """
    sizes = dict(metadata.mesh.shape)
    batch, heads = (_axes(metadata.partition_axis, name, sizes) for name in ("batch_axis", "head_axis"))
    return Layout(batch, heads, math.prod(sizes[axis] for axis in batch), math.prod(sizes[axis] for axis in heads))


def _axes(partition_axis: Any, name: str, sizes: dict[str, int]) -> tuple[str, ...]:
    """Return the mesh axes for one logical axis; axes stated by hand must exist, defaults that do not are left out."""
    if isinstance(partition_axis, Mapping):
        unknown = set(partition_axis) - set(DEFAULT_AXES)
        if unknown:
            raise ValueError(f"partition_axis has no key {sorted(unknown)[0]!r}; allowed are {', '.join(DEFAULT_AXES)}")
        axes = _tuple(partition_axis.get(name))
        for axis in axes:
            if axis not in sizes:
                raise ValueError(f"partition_axis.{name} names {axis!r}; the mesh has {', '.join(sizes)}")
        return axes
    axes = DEFAULT_AXES[name] if partition_axis is None else _tuple(getattr(partition_axis, name))
    return tuple(axis for axis in axes if axis in sizes)


def _tuple(axes: Any) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def local_spec(spec: RequestSpec, metadata: OperationMetadata) -> RequestSpec:
    """Return the spec one device sees. Rules are asked about this one.

    Raises:
        ValueError: the batch or the heads do not divide; the message has both numbers.
    """
    if metadata.mesh is None:
        return spec
    split = layout(metadata)
    for name, size, parts, axes in (
        ("batch size", spec.B, split.batch_parts, split.batch),
        ("query heads", spec.H, split.head_parts, split.heads),
        ("key/value heads", spec.K, split.head_parts, split.heads),
    ):
        if size % parts:
            raise ValueError(
                f"{name} {size} cannot be split over the mesh axes {list(axes)} of {parts} devices; "
                f"use a size that {parts} divides, or leave the axis out of partition_axis"
            )
    B, H, K = spec.B // split.batch_parts, spec.H // split.head_parts, spec.K // split.head_parts
    bias = spec.bias_shape
    if bias is not None:
        bias = (min(bias[0], B), min(bias[1], H), bias[2], bias[3])
    mask = None if spec.mask is None else _shardable(spec.mask).abstract().map_leaves(lambda leaf: _local_mask(leaf, B, H))
    return dataclasses.replace(spec, B=B, H=H, K=K, bias_shape=bias, mask=mask)


def _shardable(mask: Mask) -> Mask:
    """Return the mask with static arrays that differ by batch row or head made run-time data, which can be split."""
    return mask.map_leaves(
        lambda leaf: leaf.as_data() if isinstance(leaf, Dense) and leaf.is_static and leaf.array.shape[:2] != (1, 1) else leaf
    )


def _local_mask(leaf: Mask, B: int, H: int) -> Mask:
    largest = {"batch": B, "heads": H}

    def shrink(x: Any) -> Any:
        shape = tuple(min(n, largest.get(axis, n)) for axis, n in zip(_axis_names(leaf, x), x.shape, strict=True))
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree_util.tree_map(shrink, leaf)


def _axis_names(leaf: Mask, array: Any) -> tuple[str, ...]:
    """Name the axes of an array of a mask: batch and heads are the ones that can be split."""
    if isinstance(leaf, Dense):
        return ("batch", "heads", "rows", "cols")
    if isinstance(leaf, Segments):
        return ("batch", "length")
    return ("batch",)[: array.ndim]


def run_sharded(
    run: Callable[[AttentionRequest], AttentionOutput], request: AttentionRequest, metadata: OperationMetadata
) -> AttentionOutput:
    """Run a route on every device's part of the request."""
    split, spec = layout(metadata), request.spec
    local = local_spec(spec, metadata)

    def specs_of(leaf: Mask) -> Mask:
        return jax.tree_util.tree_map(lambda x: _spec_of(x.shape, _axis_names(leaf, x), split), leaf)

    mask = None if request.mask is None else _shardable(request.mask)
    heads_last = P(_name(split.batch), None, _name(split.heads), None)
    arrays = (request.query, request.key, request.value, mask, request.bias, request.sinks, request.dropout_key)
    in_specs = (
        heads_last,
        heads_last,
        heads_last,
        None if mask is None else mask.map_leaves(specs_of),
        None if request.bias is None else _spec_of(request.bias.shape, ("batch", "heads", "rows", "cols"), split),
        None if request.sinks is None else P(_name(split.heads), None),
        None if request.dropout_key is None else P(),
    )
    heads_first = P(_name(split.batch), _name(split.heads), None, None)
    out_specs: Any = AttentionOutput(
        attention_outputs=heads_last,  # type: ignore[arg-type]
        attention_weights=heads_first if spec.want_weights else None,  # type: ignore[arg-type]
        logsumexp=P(_name(split.batch), None, _name(split.heads)) if spec.want_logsumexp else None,  # type: ignore[arg-type]
    )

    def on_one_device(*arrays: Any) -> AttentionOutput:
        query, key, value, mask, bias, sinks, dropout_key = arrays
        if dropout_key is not None:
            for axis in (*split.batch, *split.heads):
                dropout_key = jax.random.fold_in(dropout_key, jax.lax.axis_index(axis))
        return run(AttentionRequest(query, key, value, mask, bias, sinks, dropout_key, local))

    split_run = jax.shard_map(on_one_device, mesh=metadata.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return split_run(*_placed(arrays, in_specs, metadata.mesh))


def _placed(arrays: Any, specs: Any, mesh: Any) -> Any:
    """Place the arrays as the specs say where the mesh has explicit axes; with automatic ones shard_map does it."""
    if not any(kind == AxisType.Explicit for kind in mesh.axis_types):
        return arrays
    return jax.tree_util.tree_map(lambda array, spec: jax.reshard(array, NamedSharding(mesh, spec)), arrays, specs)


def _spec_of(shape: tuple[int, ...], names: tuple[str, ...], split: Layout) -> P:
    """Return the spec of an array whose broadcast axes, of length 1, are on every device."""
    axes = {"batch": _name(split.batch), "heads": _name(split.heads)}
    return P(*(axes.get(name) if size > 1 else None for name, size in zip(names, shape, strict=True)))


def _name(axes: tuple[str, ...]) -> Any:
    return axes or None
