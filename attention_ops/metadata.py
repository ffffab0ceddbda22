"""What stays the same from call to call: dtypes, block sizes, mesh, backend, and the policy for fallbacks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from attention_ops.device import BACKENDS
from attention_ops.errors import did_you_mean

FallbackPolicy = Literal["warn", "silent", "error"]
OnIndivisible = Literal["replicate", "error"]
FLOATS = (np.dtype("float16"), np.dtype(jnp.bfloat16), np.dtype("float32"), np.dtype("float64"))
"""The dtypes that attention is computed in."""
BACKEND_NAMES = tuple(dict.fromkeys(name for chain in BACKENDS.values() for name in chain))

DEFAULT_AXES = {"batch_axis": ("dp", "fsdp"), "head_axis": ("tp",), "sequence_axis": ("sp",)}
"""The mesh axes that split batch, heads and sequence when `partition_axis` is None: those of eformer's PartitionAxis."""


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Rows of query and columns of key that a blockwise kernel handles at a time. None lets the kernel choose."""

    q: int | None = None
    kv: int | None = None

    def __post_init__(self) -> None:
        for name in ("q", "kv"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"block_sizes.{name} is {value!r}; allowed is an integer of 1 or more, or None to choose")


@dataclasses.dataclass(frozen=True)
class OperationMetadata:
    """Settings of an operation. Frozen and hashable; change one with `dataclasses.replace`.

    Attributes:
        runtime_dtype: query, key and value are cast to it and the output has it. None keeps the dtype of the inputs.
        softmax_dtype: dtype of logits, softmax and sums; float32 or wider. None is float32, float64 for float64 inputs.
        block_sizes: `BlockSizes`, a pair (q, kv), or a mapping with those keys. Default: chosen by the kernel.
        mesh: a `jax.sharding.Mesh` over which batch, heads and sequence are split. None runs where the arrays are.
        partition_axis: eformer's `PartitionAxis`, or a mapping of `batch_axis`, `head_axis` and `sequence_axis` to mesh axes.
        on_indivisible: what to do where a mesh axis does not divide what it is to split: "replicate", with a note in the plan,
            or "error".
        backend: which forward to look for, one of cpu, cuda, rocm, gpu, tpu, native. None is where the arrays are.
        fallback: "warn" once per distinct plan when a named operation cannot take a request, "silent", or "error".
        operation_configs: settings of single operations by name, for example an ejkernel config. Values must be hashable.
    """

    runtime_dtype: Any = None
    softmax_dtype: Any = None
    block_sizes: BlockSizes = BlockSizes()
    mesh: Any = None
    partition_axis: Any = None
    on_indivisible: OnIndivisible = "replicate"
    backend: str | None = None
    fallback: FallbackPolicy = "warn"
    operation_configs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        put = functools.partial(object.__setattr__, self)
        put("runtime_dtype", _float_dtype("runtime_dtype", self.runtime_dtype))
        put("softmax_dtype", _softmax_dtype(self.softmax_dtype))
        put("block_sizes", _block_sizes(self.block_sizes))
        put("operation_configs", _frozen("operation_configs", self.operation_configs))
        if not isinstance(self.mesh, Mesh | AbstractMesh | None):
            raise TypeError(
                f"mesh is {self.mesh!r}; allowed are a jax.sharding.Mesh or AbstractMesh, and None; jax.make_mesh makes one of "
                "the sizes and names of its axes"
            )
        if self.mesh is not None and self.mesh.empty:
            raise ValueError(
                "mesh has no axes, as jax.sharding.get_abstract_mesh() outside of jax.set_mesh; allowed are None and a mesh of "
                "devices, which jax.make_mesh makes"
            )
        put("partition_axis", _partition_axis(self.partition_axis))
        if self.backend is not None and self.backend not in BACKEND_NAMES:
            raise ValueError(f"backend is {self.backend!r}; allowed are None, {', '.join(BACKEND_NAMES)}")
        for name, kind in (("fallback", FallbackPolicy), ("on_indivisible", OnIndivisible)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed are {', '.join(get_args(kind))}")

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:  # hashes of texts differ between processes
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @classmethod
    def from_config(cls, config: Any) -> OperationMetadata:
        """Read the fields of the same names from a config: a mapping, or any object with those attributes."""
        known = {field.name for field in dataclasses.fields(cls)}
        if isinstance(config, Mapping):
            for key in config:
                if key not in known:
                    raise TypeError(
                        f"metadata has no field {key!r}.{did_you_mean(str(key), known)} Fields: {', '.join(sorted(known))}"
                    )
            return cls(**config)
        found = {name: getattr(config, name, None) for name in known}
        return cls(**{name: value for name, value in found.items() if value is not None})


class _FrozenMapping(Mapping[str, Any]):
    """A mapping that cannot be changed and can be hashed."""

    __slots__ = ("_hash", "_items")

    def __init__(self, items: Mapping[str, Any]):
        self._items = {key: tuple(value) if isinstance(value, list) else value for key, value in items.items()}
        self._hash = hash(frozenset(self._items.items()))

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Any:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and dict(self) == dict(other)

    def __repr__(self) -> str:
        return repr(self._items)

    def __reduce__(self) -> tuple[Any, ...]:
        return _FrozenMapping, (dict(self._items),)


def _frozen(name: str, value: Any) -> _FrozenMapping:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping from names to settings, found {type(value).__name__}")
    try:
        return _FrozenMapping(value)
    except TypeError as error:
        raise TypeError(
            f"{name} is {dict(value)}; allowed are values that can be hashed, as a frozen dataclass: {error}"
        ) from None


def _partition_axis(value: Any) -> Any:
    """Return the value, a mapping frozen, if each of its logical axes goes to mesh axes."""
    if value is None:
        return None
    is_mapping = isinstance(value, Mapping)
    if not is_mapping and not all(hasattr(value, name) for name in DEFAULT_AXES):
        raise TypeError(
            f"partition_axis is {value!r}; allowed are None, eformer's PartitionAxis, and a mapping of {', '.join(DEFAULT_AXES)} "
            "to mesh axes"
        )
    for key in value if is_mapping else ():
        if key not in DEFAULT_AXES:
            raise ValueError(
                f"partition_axis has no key {key!r}.{did_you_mean(str(key), DEFAULT_AXES)} Allowed: {', '.join(DEFAULT_AXES)}"
            )
    for name in DEFAULT_AXES:
        axes = value.get(name) if is_mapping else getattr(value, name)
        names = () if axes is None else axes
        if not isinstance(names, Sequence) or not all(isinstance(axis, str) for axis in names):
            raise TypeError(
                f"partition_axis.{name} is {axes!r}; allowed are the name of a mesh axis, a sequence of names, and None"
            )
    return _frozen("partition_axis", value) if is_mapping else value


def _float_dtype(name: str, dtype: Any) -> np.dtype | None:
    if dtype is None:
        return None
    allowed = f"allowed are {', '.join(map(str, FLOATS))}"
    try:
        resolved = jnp.dtype(dtype)
    except TypeError:
        raise TypeError(f"{name} is {dtype!r}, which is no dtype; {allowed}") from None
    if resolved not in FLOATS:
        raise TypeError(f"{name} is {resolved}; {allowed}")
    if resolved == jnp.float64 and jax.dtypes.canonicalize_dtype(resolved) != resolved:
        raise TypeError(f"{name} is float64, which JAX would truncate to float32; set JAX_ENABLE_X64=1 first")
    return resolved


def _softmax_dtype(dtype: Any) -> np.dtype | None:
    resolved = _float_dtype("softmax_dtype", dtype)
    if resolved is not None and resolved not in (np.float32, np.float64):
        raise ValueError(f"softmax_dtype is {resolved}; allowed are float32 and float64: softmax sums need at least float32")
    return resolved


def _block_sizes(value: Any) -> BlockSizes:
    if value is None:
        return BlockSizes()
    if isinstance(value, BlockSizes):
        return value
    if isinstance(value, Mapping):
        unknown = set(value) - {"q", "kv"}
        if unknown:
            raise TypeError(f"block_sizes has no field {sorted(unknown)[0]!r}; allowed are q and kv")
        return BlockSizes(**value)
    if isinstance(value, tuple | list) and len(value) == 2:
        return BlockSizes(*value)
    raise TypeError(f"block_sizes is {value!r}; allowed are BlockSizes(q, kv), a pair, or a mapping with q and kv")


def as_metadata(metadata: Any) -> OperationMetadata:
    """Return the metadata that a caller's `metadata=` stands for: None is the default."""
    if metadata is None:
        return _DEFAULT
    if not isinstance(metadata, OperationMetadata):
        found = type(metadata).__name__
        raise TypeError(f"metadata must be an OperationMetadata, found {found}; OperationMetadata.from_config reads a mapping")
    return metadata


_DEFAULT = OperationMetadata()
