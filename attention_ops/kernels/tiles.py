"""What a blockwise kernel works through: tile geometry, lists of visible tiles, layout, and the logits of one tile."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float

from attention_ops.kernels.tile_work import tile_kinds
from attention_ops.masks import Mask, Tile, Tiling, slice_within, starts_within
from attention_ops.varying import varying_like

NEG_INF = float("-inf")
_HIGHEST = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a call in tiles. A unit of work is `heads` key/value heads of one batch row, with their G query heads each.

    B may be a symbolic dimension of `jax.export`.
    """

    B: Any
    T: int
    S: int
    K: int
    G: int
    block_q: int
    block_kv: int
    heads: int

    @staticmethod
    def of(query: tuple[Any, ...], key: tuple[Any, ...], block_q: int, block_kv: int, most_cells: int) -> Shape:
        """Return the sizes for arrays [B, T, H, D] and [B, S, K, D], with heads taken together up to `most_cells` logits."""
        B, T, H, _ = query
        _, S, K, _ = key
        G = H // K
        block_q, block_kv = min(block_q, T), min(block_kv, S)
        cells = G * block_q * block_kv
        heads = max((n for n in range(1, K + 1) if K % n == 0 and n * cells <= most_cells), default=1)
        return Shape(B, T, S, K, G, block_q, block_kv, heads)

    @property
    def tiling(self) -> Tiling:
        return Tiling(self.T, self.S, self.block_q, self.block_kv)

    @property
    def grid(self) -> tuple[int, int]:
        return self.tiling.grid

    @property
    def padded(self) -> tuple[int, int]:
        rows, cols = self.grid
        return rows * self.block_q, cols * self.block_kv

    @property
    def units(self) -> int:
        return self.K // self.heads

    @property
    def query_heads(self) -> int:
        return self.heads * self.G


# ---------------------------------------------------------------- work lists


class Work(NamedTuple):
    """For each (batch, unit, outer tile): the inner tiles to visit, and how many.

    Neighbours that are both visible are visited as one tile twice as long. `order` holds the first tiles of pairs that are full,
    then those of other pairs, then tiles that stand alone; `counts` says where each of the three ends, `exists` whether there
    is any of the three, as far as it is known while compiling, `whole` that all that stand alone are full. Without pairs
    (`width` 1) the first are the full tiles, the last the others.
    """

    order: Any
    counts: Any
    exists: tuple[bool, bool, bool]
    whole: bool
    width: int

    def loop(self, visit: Callable[..., Any], batch: Any, unit: Any, outer: Any, state: Any) -> Any:
        """Run `visit(inner, state, tiles=, partial=)`; `tiles` is 2 for a pair, `partial` says that not all need be visible."""
        index = (_within(batch, self.order.shape[0]), _within(unit, self.order.shape[1]), outer)
        order, counts = varying_like((self.order[index], self.counts[index]), state)
        start: Any = 0
        for kind, (tiles, partial) in enumerate(((self.width, False), (self.width, True), (1, not self.whole))):
            if self.exists[kind]:

                def step(n: Array, state: Any, tiles: int = tiles, partial: bool = partial) -> Any:
                    return visit(order[n], state, tiles=tiles, partial=partial)

                state = jax.lax.fori_loop(start, counts[kind], step, state)
                start = counts[kind]
        return state


def _within(index: Any, size: Any) -> Any:
    return 0 if size == 1 else index


def kinds_per_unit(shape: Shape, mask: Mask | None, has_bias: bool, by_data: bool) -> tuple[Any, Any]:
    """Return (may, must) per tile as [b, units, nq, nk]; numpy where everything that counts is static, else traced."""
    may, must = tile_kinds(mask, shape.tiling, by_data, never_full=has_bias)
    return _per_unit(may, shape, False), _per_unit(must, shape, True)


def _per_unit(kinds: Any, shape: Shape, every: bool) -> Any:
    b, h, *grid = kinds.shape
    if h == 1:
        return kinds
    kinds = kinds.reshape(b, shape.units, shape.query_heads, *grid)
    return kinds.all(axis=2) if every else kinds.any(axis=2)


def work_list(may: Any, must: Any, pairs: bool = True) -> Work:
    """List the tiles along the last axis to visit, for each index of the others; without `pairs` all stand alone."""
    static = isinstance(may, np.ndarray) and isinstance(must, np.ndarray)
    xp = np if static else jnp
    may, must = xp.broadcast_arrays(may, must)
    full = may & must
    if pairs:
        first, second = _paired(may, xp)
        after = xp.concatenate([full[..., 1:], full[..., :1]], axis=-1)
        kind = xp.where(first, xp.where(full & after, 0, 1), xp.where(may & ~second, 2, 3))
    else:
        kind = xp.where(full, 0, xp.where(may, 2, 3))
    order = xp.argsort(kind, axis=-1, stable=True).astype(np.int32)
    # Of a list of one tile XLA knows the tile, and moves its logits out of the loop: computed for every row, visited or not.
    order = xp.concatenate([order, order[..., :1]], axis=-1)
    counts = xp.stack([(kind <= n).sum(axis=-1) for n in range(3)], axis=-1).astype(np.int32)
    has_pairs = pairs and may.shape[-1] > 1
    exists, whole = (has_pairs or not pairs, has_pairs, True), False
    if static:
        order = order[..., : max(2, int(counts.max(initial=0)))]
        exists = tuple(bool(np.any(kind == n)) for n in range(3))
        whole = bool(np.all(full[kind == 2]))
    elif isinstance(must, np.ndarray) and not must.any():
        exists = (False, *exists[1:])
    return Work(jnp.asarray(order), jnp.asarray(counts), exists, whole, 2 if pairs else 1)  # type: ignore[arg-type]


def _paired(visible: Any, xp: Any) -> tuple[Any, Any]:
    """Return the first and the second tile of each pair: every two neighbours from the start of a run of visible tiles."""
    index = xp.arange(visible.shape[-1])
    hidden = xp.where(visible, -1, index)
    last_hidden = np.maximum.accumulate(hidden, axis=-1) if xp is np else jax.lax.cummax(hidden, axis=hidden.ndim - 1)
    is_even = (index - last_hidden) % 2 == 1
    has_next = xp.concatenate([visible[..., 1:], visible[..., :1] & False], axis=-1)
    return visible & is_even & has_next, visible & ~is_even


def units(shape: Shape) -> tuple[Array, Array]:
    """Return the indices (batch, unit) of all units of work."""
    if is_symbolic_dim(shape.B):
        index = jnp.arange(shape.B * shape.units, dtype=jnp.int32)
        return index // shape.units, index % shape.units
    grid = np.indices((shape.B, shape.units), dtype=np.int32)
    return tuple(jnp.asarray(axis.reshape(-1)) for axis in grid)  # type: ignore[return-value]


# ---------------------------------------------------------------- layout


def queries_of_unit(x: Any, shape: Shape, batch: Any, unit: Any, fill: float = 0.0) -> Array:
    """Return [heads, G, rows, d] of [B, T, H, d], rows padded to whole tiles with `fill`."""
    x = _heads_of(x, batch, unit, shape.query_heads)
    x = jnp.pad(x, ((0, 0), (0, shape.padded[0] - shape.T), (0, 0)), constant_values=fill)
    return x.reshape(shape.heads, shape.G, *x.shape[1:])


def keys_of_unit(x: Any, shape: Shape, batch: Any, unit: Any) -> Array:
    """Return [heads, cols, d] of [B, S, K, d], cols padded to whole tiles."""
    x = _heads_of(x, batch, unit, shape.heads)
    return jnp.pad(x, ((0, 0), (0, shape.padded[1] - shape.S), (0, 0)))


def _heads_of(x: Array, batch: Any, unit: Any, heads: int) -> Array:
    """Return [heads, length, d] of [B, length, all heads, d]. A unit at a time, so that the copies stay in a cache."""
    _, length, _, d = x.shape
    if heads <= 4:
        parts = [slice_within(x, (batch, 0, unit * heads + n, 0), (1, length, 1, d)).reshape(1, length, d) for n in range(heads)]
        return jnp.concatenate(parts)
    return slice_within(x, (batch, 0, unit * heads, 0), (1, length, heads, d))[0].transpose(1, 0, 2)


def bits(x: Array) -> Array:
    """Return 16-bit floats as integers: XLA on CPU widens the floats to copy them."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def from_bits(x: Array, dtype: np.dtype) -> Array:
    """Return an array that `bits` was given."""
    return jax.lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x


def query_tile(x: Any, shape: Shape, i: Any, tiles: int = 1) -> Array:
    """Return [heads, G * tiles * block_q, d] of the queries of a unit, from query tile i."""
    rows = tiles * shape.block_q
    tile = slice_within(x, (0, 0, i * shape.block_q, 0), (shape.heads, shape.G, rows, x.shape[-1]))
    return tile.reshape(shape.heads, shape.G * rows, x.shape[-1])


def key_tile(x: Any, shape: Shape, j: Any, tiles: int = 1) -> Array:
    """Return [heads, tiles * block_kv, d] of the keys of a unit, from key tile j."""
    return slice_within(x, (0, j * shape.block_kv, 0), (shape.heads, tiles * shape.block_kv, x.shape[-1]))


def put_unit(whole: Array, part: Float[Array, "length heads d"], batch: Any, unit: Any) -> Array:
    """Put the heads of a unit, their padding cut off, in their place in [B, length, all heads, d]."""
    _, length, _, _ = whole.shape
    part = part[None, :length].astype(whole.dtype)
    starts = starts_within(whole.shape, (batch, 0, unit * part.shape[2], 0))
    return jax.lax.dynamic_update_slice(whole, part, starts)


def from_query_tiles(x: Float[Array, "nq heads r d"], shape: Shape) -> Float[Array, "rows n d"]:
    """Return the rows of all tiles, each with the query heads of the unit."""
    tiles, d = x.shape[0], x.shape[-1]
    x = x.reshape(tiles, shape.heads, shape.G, shape.block_q, d)
    return x.transpose(0, 3, 1, 2, 4).reshape(tiles * shape.block_q, shape.query_heads, d)


def from_key_tiles(x: Float[Array, "nk heads c d"]) -> Float[Array, "cols heads d"]:
    """Return the columns of all tiles."""
    return x.transpose(0, 2, 1, 3).reshape(-1, x.shape[1], x.shape[3])


def dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Contract one axis of each, with the leading axis as batch, at full precision, summed in float32 or wider."""
    axes = (((contract[0],), (contract[1],)), ((0,), (0,)))
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jax.lax.dot_general(a, b, axes, precision=_HIGHEST, preferred_element_type=wide)


# ---------------------------------------------------------------- one tile


class Tiler:
    """The logits of a tile, and what of it is visible. `scale` is what the queries have not been multiplied by yet.

    Tiles are [heads, G * rows, cols]; backward [heads, cols, G * rows], with the rows from the last to the first. The products
    backward then sum over the last axis of their first operand, which XLA on CPU does twice as fast as over the first.
    """

    def __init__(
        self,
        shape: Shape,
        mask: Mask | None,
        bias: Array | None,
        soft_cap: float | None,
        *,
        scale: float = 1.0,
        is_backward: bool = False,
    ):
        self.shape, self.soft_cap, self.scale, self.is_backward = shape, soft_cap, scale, is_backward
        rows, cols = shape.padded
        self.mask = None if mask is None else mask.padded(rows, cols)
        self.bias = None if bias is None else _pad_bias(bias, shape)

    def at(self, batch: Any, unit: Any, i: Any, j: Any, q_tiles: int = 1, kv_tiles: int = 1) -> Tile:
        s = self.shape
        rows, cols = q_tiles * s.block_q, kv_tiles * s.block_kv
        return Tile(batch, unit * s.query_heads, i * s.block_q, j * s.block_kv, heads=s.query_heads, rows=rows, cols=cols)

    def visible(self, at: Tile) -> Array | None:
        """Return [heads|1, G|1, rows|1, cols|1], or None when all of a partial tile is visible."""
        s, parts = self.shape, []
        if self.mask is not None:
            parts.append(self._grouped(self.mask.tile(at)))
        if self.bias is not None:
            parts.append(self._bias_tile(at) != NEG_INF)
        if s.padded[1] != s.S:
            parts.append((jnp.arange(at.cols) + at.col < s.S)[None, None, None])
        if s.padded[0] != s.T:  # rows of padding see nothing: a key only they could see may hold NaN
            parts.append((jnp.arange(at.rows) + at.row < s.T)[None, None, :, None])
        return functools.reduce(jnp.logical_and, parts) if parts else None

    def _grouped(self, tile: Array) -> Array:
        s = self.shape
        return tile[:, None] if tile.shape[0] == 1 else tile.reshape(s.heads, s.G, *tile.shape[1:])

    def _bias_tile(self, at: Tile) -> Array:
        assert self.bias is not None
        return self._grouped(bias_tile(self.bias, at))

    def logits(self, query: Array, key: Array, at: Tile) -> tuple[Array, Array | None]:
        """Return the biased logits, and the derivative of the soft cap."""
        logits = dot(key, query, (2, 2)) if self.is_backward else dot(query, key, (2, 2))
        if self.scale != 1.0:
            logits = logits * self.scale
        slope = None
        if self.soft_cap is not None:
            squashed = jnp.tanh(logits / self.soft_cap)
            logits, slope = self.soft_cap * squashed, 1.0 - squashed * squashed
        if self.bias is not None:
            bias = self._bias_tile(at).astype(logits.dtype)
            bias = jnp.where(bias == NEG_INF, 0.0, bias)
            logits = self._apply(lambda logits, bias: logits + bias, logits, bias, at)
        return logits, slope

    def hide(self, visible: Array, x: Array, fill: float, at: Tile) -> Array:
        """Put `fill` where a tile is not visible."""
        return self._apply(lambda x, visible: jnp.where(visible, x, fill), x, visible, at)

    def _apply(self, function: Callable[[Array, Array], Array], x: Array, other: Array, at: Tile) -> Array:
        """Apply to a tile and what masks and biases give: [heads|1, G|1, rows|1, cols|1]."""
        s = self.shape
        if self.is_backward:
            wide, other = (s.heads, at.cols, s.G, at.rows), other.transpose(0, 3, 1, 2)[..., ::-1]
        else:
            wide = (s.heads, s.G, at.rows, at.cols)
        return function(x.reshape(wide), other).reshape(x.shape)

    def rows_first(self, x: Array, at: Tile) -> Float[Array, "heads G rows cols"]:
        """Return a tile in the layout of masks and biases."""
        s = self.shape
        if self.is_backward:
            return x.reshape(s.heads, at.cols, s.G, at.rows).transpose(0, 2, 3, 1)[:, :, ::-1]
        return x.reshape(s.heads, s.G, at.rows, at.cols)

    def without_unseen_keys(self, x: Array, is_finite: Array, at: Tile) -> Array:
        """Zero the rows of a key tile that no query of the tile sees, unless all of it is finite.

        The weights of hidden keys are 0, and 0 times NaN is NaN.
        """
        return _cleaned(x, is_finite, lambda: jnp.any(self._some(at), axis=(1, 2)))

    def without_blind_queries(self, x: Array, is_finite: Array, at: Tile) -> Array:
        """Zero the rows of a query tile that see no key of the tile, unless all of it is finite."""
        return _cleaned(x, is_finite, lambda: self._seeing_queries(at))

    def _seeing_queries(self, at: Tile) -> Array:
        rows = jnp.any(self._some(at), axis=3)[..., ::-1]
        return jnp.broadcast_to(rows, (rows.shape[0], self.shape.G, at.rows)).reshape(rows.shape[0], -1)

    def _some(self, at: Tile) -> Array:
        visible = self.visible(at)
        assert visible is not None
        return visible


def _cleaned(x: Array, is_finite: Array, keep: Callable[[], Array]) -> Array:
    return jax.lax.cond(is_finite, lambda x: x, lambda x: jnp.where(keep()[..., None], x, 0), x)


def finite_tiles(x: Float[Array, "*heads n d"], block: int) -> Array:
    """Return whether all is finite in each tile, [n], of the queries or the keys of a unit."""
    zeros = x.reshape(-1, x.shape[-2] // block, block * x.shape[-1]).astype(jnp.float32) * 0
    return jnp.isfinite(zeros.sum(axis=-1)).all(axis=0)


def all_of(flags: Array, first: Any, tiles: int) -> Array:
    """Return whether the flags of `tiles` neighbours from `first` are all set."""
    return flags[first] if tiles == 1 else flags[first] & flags[first + 1]


def _pad_bias(bias: Array, shape: Shape) -> Array:
    widths = [(0, 0), (0, 0)]
    for axis, (length, padded) in enumerate(zip((shape.T, shape.S), shape.padded, strict=True), start=2):
        widths.append((0, padded - length if bias.shape[axis] == length and length > 1 else 0))
    return jnp.pad(bias, widths)


def _bias_window(bias: Array, at: Tile) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Return where a tile lies in a bias: starts and sizes, 0 and 1 on the axes it broadcasts."""
    starts = starts_within(bias.shape, (at.batch, at.head, at.row, at.col))
    return starts, (1, *map(min, bias.shape[1:], (at.heads, at.rows, at.cols)))


def bias_tile(bias: Array, at: Tile) -> Array:
    """Return [heads|1, rows|1, cols|1] of a bias."""
    starts, sizes = _bias_window(bias, at)
    return jax.lax.dynamic_slice(bias, starts, sizes)[0]


def add_bias_tile(d_bias: Array, d_logits: Float[Array, "heads G rows cols"], at: Tile) -> Array:
    """Add one tile's gradient to that of the bias, summed over the axes the bias broadcasts."""
    starts, sizes = _bias_window(d_bias, at)
    tile = d_logits.reshape(1, at.heads, at.rows, at.cols)
    over = tuple(axis for axis in range(1, 4) if sizes[axis] == 1 and tile.shape[axis] != 1)
    tile = jnp.sum(tile, axis=over, keepdims=True)
    return jax.lax.dynamic_update_slice(d_bias, jax.lax.dynamic_slice(d_bias, starts, sizes) + tile, starts)
