"""One tile of attention inside a Pallas kernel for GPUs: loads, logits, and what of them is visible.

A kernel holds references to arrays in memory, and every load is a block of a power of two. What lies beyond the ends of an array
is masked at the load, so that no array is padded or copied.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from attention_ops.kernels.pallas_gpu_blocks import padded
from attention_ops.kernels.tile_work import TileWork
from attention_ops.masks import And, Dense, Lengths, Mask, Not, Or, Positional, Segments

NEG_INF = float("-inf")
LOG2E = math.log2(math.e)


class Operands(NamedTuple):
    """What every kernel reads; the same tree holds the arrays, their block specs, and in the kernel their references."""

    query: Any
    key: Any
    value: Any
    bias: Any
    mask: Any
    work: Any


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What is compiled in.

    Attributes:
        blind_rows: a query may see no key; its row of query and of the output's cotangent must then be zeroed.
        hidden_keys: a key may be seen by no query, and hold anything.
        by_data: skip the tiles that only run-time data leaves empty.
    """

    B: int
    T: int
    S: int
    H: int
    K: int
    D: int
    Dv: int
    scale: float
    soft_cap: float | None
    has_bias: bool
    blind_rows: bool
    hidden_keys: bool
    by_data: bool

    @property
    def groups(self) -> int:
        return self.H // self.K

    @property
    def unit(self) -> float:
        """Logits are kept times this. Base 2 saves a product per logit, but would overflow for a bias near the lowest float32."""
        return 1.0 if self.has_bias else LOG2E

    def exp(self, logits: jax.Array) -> jax.Array:
        """Return e to the logits, which are in our unit."""
        return jnp.exp2(logits if self.unit == LOG2E else logits * LOG2E)


# ---------------------------------------------------------------- masks whose arrays are references


def prepared(mask: Mask | None, T: int, S: int) -> Mask | None:
    """Return the mask with arrays that a kernel can read: int32 [1] or [B], ids int32, booleans as run-time data."""

    def prepare(leaf: Mask) -> Mask:
        if isinstance(leaf, Dense):
            return _indexable(leaf.as_data())
        if not isinstance(leaf, Positional | Segments | Lengths):
            return _indexable(Dense(leaf.dense(T, S)))
        return jax.tree_util.tree_map(lambda x: jnp.atleast_1d(x).astype(jnp.int32), leaf)

    return None if mask is None else mask.map_leaves(prepare)


def _indexable(mask: Dense) -> Dense:
    """Return the mask so that Pallas indexes it with 64 bits where 31 are too few; it does so for arrays beyond 4 GiB."""
    array: Any = mask.array
    return mask if not 2**31 <= array.size <= 2**32 else _unchecked(array.astype(jnp.int16))


def _unchecked(array: Any) -> Dense:
    mask = object.__new__(Dense)
    object.__setattr__(mask, "array", array)
    return mask


class Tiles:
    """The tiles of one batch row and query head. `row_axis` is 0 for tiles [rows, cols] and 1 for tiles [cols, rows]."""

    def __init__(
        self, geometry: Geometry, block_q: int, block_kv: int, mask: Any, bias: Any, batch: Any, head: Any, row_axis: int = 0
    ):
        self.geometry, self.block_q, self.block_kv, self.row_axis = geometry, block_q, block_kv, row_axis
        self.mask, self.bias, self.batch, self.head = mask, bias, batch, head
        self.short_rows, self.short_cols = geometry.T % block_q != 0, geometry.S % block_kv != 0

    def rows(self, i: Any) -> jax.Array:
        return i * self.block_q + self.down(_iota(self.block_q))

    def cols(self, j: Any) -> jax.Array:
        return j * self.block_kv + self.across(_iota(self.block_kv))

    def down(self, per_row: jax.Array) -> jax.Array:
        """Shape a vector over the rows so that it broadcasts to a tile."""
        return per_row[:, None] if self.row_axis == 0 else per_row[None, :]

    def across(self, per_col: jax.Array) -> jax.Array:
        """Shape a vector over the columns so that it broadcasts to a tile."""
        return per_col[None, :] if self.row_axis == 0 else per_col[:, None]

    def logits(self, query: jax.Array, key: jax.Array, i: Any, j: Any, partial: bool) -> tuple[Any, Any, Any]:
        """Return the logits of a tile in the geometry's unit, the derivative of the soft cap or None, and what is visible.

        Hidden logits are not yet masked. What is visible broadcasts to the tile, and is None when all of it is.
        """
        g = self.geometry
        raw = product(query, key, 1, 1) if self.row_axis == 0 else product(key, query, 1, 1)
        slope = None
        if g.soft_cap is None:
            logits = raw * (g.scale * g.unit)
        else:
            squashed = jnp.tanh(raw * (g.scale / g.soft_cap))
            logits, slope = squashed * (g.soft_cap * g.unit), 1.0 - squashed * squashed
        shown = []
        if self.bias is not None:
            bias = self._plane(self.bias, i, j).astype(jnp.float32)
            logits = logits + bias
            shown.append(bias != NEG_INF)
        if not partial:
            return logits, slope, None
        if self.mask is not None:
            shown.append(self._visible(self.mask, i, j))
        if self.short_rows:
            shown.append(self.rows(i) < g.T)
        if self.short_cols:
            shown.append(self.cols(j) < g.S)
        return logits, slope, functools.reduce(operator.and_, shown) if shown else None

    def seen(self, visible: jax.Array) -> jax.Array:
        """Return which keys some row of a tile sees, [block_kv or 1, 1]. Tiles are [rows, cols]."""
        some = visible[0] if visible.shape[0] == 1 else jnp.max(visible.astype(jnp.int32), axis=0) > 0
        return some[:, None]

    def _visible(self, mask: Any, i: Any, j: Any) -> jax.Array:
        visible = functools.partial(self._visible, i=i, j=j)
        match mask:
            case And():
                return functools.reduce(operator.and_, map(visible, mask.parts))
            case Or():
                return functools.reduce(operator.or_, map(visible, mask.parts))
            case Not():
                return jnp.logical_not(visible(mask.part))
            case Segments():
                q = self.down(self._vector(mask.q, i, self.block_q, self.geometry.T))
                return (q == self.across(self._vector(mask.kv, j, self.block_kv, self.geometry.S))) & (q >= 0)
            case Lengths():
                sides = ((mask.q, self.rows(i)), (mask.kv, self.cols(j)))
                return functools.reduce(operator.and_, [at < self._number(n) for n, at in sides if n is not None])
            case Dense():
                plane = self._plane(mask.array, i, j)
                return plane if plane.dtype == jnp.bool_ else plane != 0
            case Positional():
                numbers = {name: self._number(getattr(mask, name)) for name in mask.__match_args__}
                mask = dataclasses.replace(mask, **numbers)
                return mask.allowed(self.rows(i) + mask.stated_offset, self.cols(j))
        raise TypeError(f"{type(mask).__name__} is not a mask that `prepared` returns")

    def _number(self, value: Any) -> Any:
        """Return a number that is static, or one for all batch rows, or one for each."""
        return value if value is None or isinstance(value, int) else value[within(self.batch, value.shape[0])]

    def _vector(self, ref: Any, block: Any, size: int, length: int) -> jax.Array:
        """Return ids of one block; -1 beyond the end."""
        start = block * size
        at = ref.at[within(self.batch, ref.shape[0]), pl.ds(start, size)]
        return plgpu.load(at, mask=start + _iota(size) < length, other=-1) if length % size else plgpu.load(at)

    def _plane(self, ref: Any, i: Any, j: Any) -> jax.Array:
        """Return the part of an array [b, h, t, s] that broadcasts to tile (i, j); 0 beyond the ends."""
        g = self.geometry
        lead = (within(self.batch, ref.shape[0]), within(self.head, ref.shape[1]))
        by_row, by_col = ref.shape[2] == g.T and g.T > 1, ref.shape[3] == g.S and g.S > 1
        rows = pl.ds(i * self.block_q, self.block_q) if by_row else i * 0
        cols = pl.ds(j * self.block_kv, self.block_kv) if by_col else j * 0
        inside = []
        if by_row and self.short_rows:
            edge = i * self.block_q + _iota(self.block_q) < g.T
            inside.append(edge[:, None] if by_col else edge)
        if by_col and self.short_cols:
            edge = j * self.block_kv + _iota(self.block_kv) < g.S
            inside.append(edge[None, :] if by_row else edge)
        at = ref.at[(*lead, rows, cols)]
        if inside:
            shape = tuple(n for n, there in ((self.block_q, by_row), (self.block_kv, by_col)) if there)
            mask = jnp.broadcast_to(functools.reduce(operator.and_, inside), shape)
            plane = plgpu.load(at, mask=mask, other=jnp.zeros((), ref.dtype))
        else:
            plane = plgpu.load(at)
        if by_row and by_col:
            return plane if self.row_axis == 0 else plane.T
        if by_row:
            return self.down(plane)
        return self.across(plane) if by_col else jnp.full((1, 1), plane)


def within(index: Any, size: int) -> Any:
    """Return an index into an axis that may be broadcast; traced even where it is 0, as the interpreter wants it."""
    return index if size > 1 else index * 0


def _iota(size: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, (size,), 0)


def product(a: jax.Array, b: jax.Array, contract_a: int, contract_b: int) -> jax.Array:
    """Multiply two matrices with float32 sums; float32 operands are not rounded to TF32."""
    return jax.lax.dot_general(
        a,
        b,
        (((contract_a,), (contract_b,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def load_rows(ref: Any, batch: Any, head: Any, start: Any, size: int, length: int, dim: int) -> jax.Array:
    """Return rows from `start` of one batch row and head of a reference [B, length, heads, padded dim]; 0 beyond its ends."""
    width = ref.shape[-1]
    inside = []
    if length % size:
        inside.append((start + _iota(size) < length)[:, None])
    if dim < width:
        inside.append((_iota(width) < dim)[None, :])
    at = ref.at[batch, pl.ds(start, size), head, :]
    if not inside:
        return plgpu.load(at)
    mask = jnp.broadcast_to(functools.reduce(operator.and_, inside), (size, width))
    return plgpu.load(at, mask=mask, other=jnp.zeros((), ref.dtype))


def store_rows(ref: Any, x: jax.Array, start: Any, length: int, dim: int) -> None:
    """Store a block [size, padded dim] whose first row is row `start` of `length`."""
    size, width = x.shape
    inside = []
    if length % size:
        inside.append((start + _iota(size) < length)[:, None])
    if dim < width:
        inside.append((_iota(width) < dim)[None, :])
    mask = jnp.broadcast_to(functools.reduce(operator.and_, inside), x.shape) if inside else None
    plgpu.store(ref, x.astype(ref.dtype), mask=mask)


def load_vector(ref: Any, batch: Any, head: Any, start: Any, size: int, fill: float) -> jax.Array:
    """Return numbers from `start` of one batch row and head of a reference [B, H, length]; `fill` beyond its end."""
    at, length = ref.at[batch, head, pl.ds(start, size)], ref.shape[-1]
    return plgpu.load(at, mask=start + _iota(size) < length, other=fill) if length % size else plgpu.load(at)


def store_plane(ref: Any, x: jax.Array, at: tuple[Any, Any], lengths: tuple[int, int], summed: tuple[bool, bool]) -> None:
    """Store tile `at` of an array [t, s] without the axes that are `summed`."""
    kept = [axis for axis in (0, 1) if not summed[axis]]
    inside = []
    for place, axis in enumerate(kept):
        size = x.shape[place]
        if lengths[axis] % size:
            edge = at[axis] * size + _iota(size) < lengths[axis]
            inside.append(edge if len(kept) == 1 else edge[:, None] if place == 0 else edge[None, :])
    mask = jnp.broadcast_to(functools.reduce(operator.and_, inside), x.shape) if inside else None
    plgpu.store(ref, x.astype(ref.dtype), mask=mask)


def last_tile(length: int, block: int) -> int:
    """Return the index of the last tile: under a causal mask the last rows have most to do, so they start first."""
    return -(-length // block) - 1


def edges(work: TileWork, batch: Any, head: Any, outer: Any) -> tuple[Any, Any, Any, Any]:
    """Return the bounds of the runs of one outer tile."""
    lead = (within(batch, work.bounds.shape[0]), within(head, work.bounds.shape[1]), outer)
    return tuple(work.bounds[(*lead, n)] for n in range(4))  # type: ignore[return-value]


def inner_tile(work: TileWork, batch: Any, head: Any, outer: Any, place: Any) -> Any:
    """Return the inner tile at a place of the runs."""
    if work.order is None:
        return place
    return work.order[within(batch, work.order.shape[0]), within(head, work.order.shape[1]), outer, place]


def whole(x: Any) -> pl.BlockSpec:
    """Return the block spec of an array that every program may read anywhere."""
    rank = x.ndim
    return pl.BlockSpec(x.shape, lambda *_: (0,) * rank)


def rows_of(x: Any) -> pl.BlockSpec:
    """Return the block spec of an array [B, length, heads, dim], read anywhere, whose rows are padded to a power of two."""
    return pl.BlockSpec((*x.shape[:3], padded(x.shape[3])), lambda *_: (0, 0, 0, 0))


def specs(operands: Operands) -> Operands:
    """Return the block specs of the operands."""
    shared = jax.tree_util.tree_map(whole, operands)
    query, key, value = map(rows_of, operands[:3])
    return shared._replace(query=query, key=key, value=value)
