"""Attention tile by tile: online softmax forward, backward by recomputation, memory linear in T and S.

The work is a list of the tiles (block_q query rows by block_kv key columns) that the mask leaves visible, made while compiling
from what is static, or at run time from what is not. Full tiles skip all mask arithmetic. Loops have run-time trip counts,
so compile time does not depend on the number of tiles.

Sources: Milakov and Gimelshein 2018 (online softmax), Dao 2023 (FlashAttention-2: logsumexp and delta as residuals).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attention_ops.masks import And, Mask, Positional, Tile, Tiling, starts_within

NEG_INF = float("-inf")
_HIGHEST = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class BlockwiseSettings:
    """What is compiled in."""

    scale: float
    soft_cap: float | None
    block_q: int
    block_kv: int
    skip_by_data: bool
    softmax_dtype: np.dtype


def block_sizes(T: int, S: int, groups: int, block_q: int | None, block_kv: int | None) -> tuple[int, int]:
    """Choose tile sizes: about 512 rows of one key/value head by 512 columns, evened out so that little is padding."""
    return block_q or _even(T, max(512 // groups, 64)), block_kv or _even(S, 512)


def _even(length: int, largest: int) -> int:
    if length <= largest:
        return max(length, 1)
    blocks = -(-length // largest)
    return -(-length // (blocks * 8)) * 8


class BlockwiseOutput(NamedTuple):
    output: Float[Array, "B T H Dv"]
    logsumexp: Float[Array, "B T H"]


def blockwise_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K Dv"],
    *,
    mask: Mask | None,
    bias: Float[Array, "b h t s"] | None,
    sinks: Float[Array, "H n"] | None,
    scale: float,
    soft_cap: float | None,
    block_q: int | None,
    block_kv: int | None,
    skip_by_data: bool,
    softmax_dtype: np.dtype,
) -> BlockwiseOutput:
    """Return the output in the dtype of the query and the logsumexp, without sinks, in the softmax dtype.

    Differentiable in query, key, value, bias and sinks. Temporary memory is O(B * H * T): no [T, S] array exists, a bias is read
    by tiles and never broadcast. `skip_by_data` also skips tiles that segment ids, lengths, traced offsets or boolean arrays
    leave empty; without it only those that static positions do. Block sizes of None are chosen by `block_sizes`.
    """
    T, H, S, K = query.shape[1], query.shape[2], key.shape[1], key.shape[2]
    block_q, block_kv = block_sizes(T, S, H // K, block_q, block_kv)
    settings = BlockwiseSettings(scale, soft_cap, block_q, block_kv, skip_by_data, softmax_dtype)
    output, logsumexp = _attend(settings, query, key, value, mask, bias, sinks)  # type: ignore[misc]
    return BlockwiseOutput(output, logsumexp)


def blockwise_cost(
    B: int, T: int, S: int, H: int, K: int, D: int, Dv: int, visible: float, block_q: int | None, block_kv: int | None
) -> tuple[int, int]:
    """Return flops and temporary bytes of the forward when tiles holding the share `visible` of T * S are visited."""
    block_q, block_kv = block_sizes(T, S, H // K, block_q, block_kv)
    tile = (H // K) * block_q * block_kv * 4
    return int(2 * B * H * T * S * (D + Dv) * visible), 4 * B * (T * H * (D + Dv + 1) + S * K * (D + Dv)) + 3 * tile


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(settings: BlockwiseSettings, query: Any, key: Any, value: Any, mask: Any, bias: Any, sinks: Any) -> Any:
    output, logsumexp, _ = _forward(settings, query, key, value, mask, bias, sinks)
    return output, logsumexp


def _attend_fwd(settings: BlockwiseSettings, query: Any, key: Any, value: Any, mask: Any, bias: Any, sinks: Any) -> Any:
    output, logsumexp, total = _forward(settings, query, key, value, mask, bias, sinks)
    return (output, logsumexp), (query, key, value, mask, bias, sinks, output, logsumexp, total)


# ---------------------------------------------------------------- geometry and work lists


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Sizes of a call in tiles. A unit of work is `heads` key/value heads of one batch row, with their G query heads each."""

    B: int
    T: int
    S: int
    K: int
    G: int
    block_q: int
    block_kv: int
    heads: int

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


def _shape(settings: BlockwiseSettings, query: tuple[int, ...], key: tuple[int, ...]) -> _Shape:
    B, T, H, _ = query
    _, S, K, _ = key
    G = H // K
    block_q, block_kv = min(settings.block_q, T), min(settings.block_kv, S)
    cells = G * block_q * block_kv
    heads = max((n for n in range(1, K + 1) if K % n == 0 and n * cells <= _TILE_CELLS), default=1)
    return _Shape(B, T, S, K, G, block_q, block_kv, heads)


_TILE_CELLS = 1 << 18


class _Work(NamedTuple):
    """For each (batch, unit, outer tile): the inner tiles to visit, full ones first, and how many are full and visible.

    `has_full` and `has_partial` are False when it is known while compiling that there are none.
    """

    order: Any
    full: Any
    visible: Any
    has_full: bool
    has_partial: bool

    def at(self, batch: Any, unit: Any, outer: Any) -> tuple[Any, Any, Any]:
        index = (_clip(batch, self.order.shape[0]), _clip(unit, self.order.shape[1]), outer)
        return self.order[index], self.full[index], self.visible[index]

    def loop(self, visit: Any, full: Array, visible: Array, state: Any) -> Any:
        """Visit the full tiles, then the partial ones."""
        if self.has_full:
            state = jax.lax.fori_loop(0, full, functools.partial(visit, partial=False), state)
        if self.has_partial:
            state = jax.lax.fori_loop(full, visible, functools.partial(visit, partial=True), state)
        return state


def _clip(index: Any, size: int) -> Any:
    return 0 if size == 1 else index


def _block_kinds(shape: _Shape, mask: Mask | None, has_bias: bool, by_data: bool) -> tuple[Any, Any]:
    """Return (may, must) per tile as [b, units, nq, nk]; numpy where everything that counts is static, else traced."""
    may = must = np.ones((1, 1, *shape.grid), bool)
    parts = () if mask is None else mask.conjuncts()
    useful = tuple(part for part in parts if by_data or (isinstance(part, Positional) and part.is_static))
    if useful:
        chosen = And(useful)
        may, must = chosen.bounds(shape.tiling, np if chosen.is_static else jnp)
    if has_bias or len(useful) < len(parts):
        must = np.zeros((1, 1, *shape.grid), bool)
    if shape.padded[1] != shape.S:
        must = must & (np.arange(shape.grid[1]) < shape.grid[1] - 1)
    return _per_unit(may, shape, False), _per_unit(must, shape, True)


def _per_unit(kinds: Any, shape: _Shape, every: bool) -> Any:
    kinds = (np if isinstance(kinds, np.ndarray) else jnp).broadcast_to(kinds, (*kinds.shape[:2], *shape.grid))
    b, h, *grid = kinds.shape
    if h == 1:
        return kinds
    kinds = kinds.reshape(b, shape.units, shape.query_heads, *grid)
    return kinds.all(axis=2) if every else kinds.any(axis=2)


def _work(may: Any, must: Any) -> _Work:
    static = isinstance(may, np.ndarray) and isinstance(must, np.ndarray)
    xp = np if static else jnp
    rank = xp.where(may & must, 0, xp.where(may, 1, 2))
    order = xp.argsort(rank, axis=-1, stable=True).astype(np.int32)
    full = (rank == 0).sum(axis=-1).astype(np.int32)
    visible = (rank < 2).sum(axis=-1).astype(np.int32)
    if static:
        order = order[..., : max(1, int(visible.max(initial=0)))]
    has_full = bool(np.any(must)) if isinstance(must, np.ndarray) else True
    has_partial = bool(np.any(rank == 1)) if static else True
    return _Work(jnp.asarray(order), jnp.asarray(full), jnp.asarray(visible), has_full, has_partial)


# ---------------------------------------------------------------- layout


def _tiles(x: Any, shape: _Shape, block: int, count: int, fill: float = 0.0) -> Array:
    """[B, length, heads, d] to [B, K, G, count, block, d], padded with `fill`; G is 1 for keys and values."""
    B, length, heads, d = x.shape
    x = jnp.pad(x, ((0, 0), (0, count * block - length), (0, 0), (0, 0)), constant_values=fill)
    return x.reshape(B, count, block, shape.K, heads // shape.K, d).transpose(0, 3, 4, 1, 2, 5)


def _query_tiles(x: Any, shape: _Shape, fill: float = 0.0) -> Array:
    """[B, T, H, d] to [B, units, nq, heads, G * block_q, d]."""
    rows = shape.grid[0]
    tiles = _tiles(x, shape, shape.block_q, rows, fill)
    d = x.shape[-1]
    tiles = tiles.reshape(shape.B, shape.units, shape.heads, shape.G, rows, shape.block_q, d)
    return tiles.transpose(0, 1, 4, 2, 3, 5, 6).reshape(shape.B, shape.units, rows, shape.heads, shape.G * shape.block_q, d)


def _key_tiles(x: Any, shape: _Shape, transpose: bool = False) -> Array:
    """[B, S, K, d] to [B, units, nk, heads, block_kv, d], or with the last two swapped."""
    cols = shape.grid[1]
    tiles = _tiles(x, shape, shape.block_kv, cols)[:, :, 0]
    tiles = tiles.reshape(shape.B, shape.units, shape.heads, cols, shape.block_kv, x.shape[-1])
    return tiles.transpose(0, 1, 3, 2, 5, 4) if transpose else tiles.transpose(0, 1, 3, 2, 4, 5)


def _from_query_tiles(x: Array, shape: _Shape) -> Array:
    """[B, units, nq, heads, G * block_q, d] to [B, T, H, d]."""
    rows, d = shape.grid[0], x.shape[-1]
    x = x.reshape(shape.B, shape.units, rows, shape.heads, shape.G, shape.block_q, d)
    x = x.transpose(0, 2, 5, 1, 3, 4, 6).reshape(shape.B, rows * shape.block_q, shape.K * shape.G, d)
    return x[:, : shape.T]


def _from_key_tiles(x: Array, shape: _Shape) -> Array:
    """[B, units, nk, heads, block_kv, d] to [B, S, K, d]."""
    cols, d = shape.grid[1], x.shape[-1]
    x = x.transpose(0, 2, 4, 1, 3, 5).reshape(shape.B, cols * shape.block_kv, shape.K, d)
    return x[:, : shape.S]


# ---------------------------------------------------------------- one tile


class _Tiler:
    """The logits of one tile, and what of it is visible."""

    def __init__(self, settings: BlockwiseSettings, shape: _Shape, mask: Mask | None, bias: Array | None):
        self.settings, self.shape = settings, shape
        rows, cols = shape.padded
        self.mask = None if mask is None else mask.padded(rows, cols)
        self.bias = None if bias is None else _pad_bias(bias, shape)
        self.crops = shape.padded[1] != shape.S

    def _at(self, batch: Any, unit: Any, i: Any, j: Any) -> Tile:
        s = self.shape
        return Tile(
            batch, unit * s.query_heads, i * s.block_q, j * s.block_kv, heads=s.query_heads, rows=s.block_q, cols=s.block_kv
        )

    def visible(self, batch: Any, unit: Any, i: Any, j: Any) -> Array | None:
        """Return [heads|1, G|1, block_q|1, block_kv|1], or None when all of a partial tile is visible."""
        at, parts = self._at(batch, unit, i, j), []
        if self.mask is not None:
            parts.append(self._grouped(self.mask.tile(at)))
        if self.bias is not None:
            parts.append(self._bias_tile(at) != NEG_INF)
        if self.crops:
            parts.append((jnp.arange(self.shape.block_kv) + at.col < self.shape.S)[None, None, None])
        if self.shape.padded[0] != self.shape.T:  # rows of padding see nothing: a key only they could see may hold NaN
            parts.append((jnp.arange(self.shape.block_q) + at.row < self.shape.T)[None, None, :, None])
        return functools.reduce(jnp.logical_and, parts) if parts else None

    def _grouped(self, tile: Array) -> Array:
        s = self.shape
        return tile[:, None] if tile.shape[0] == 1 else tile.reshape(s.heads, s.G, *tile.shape[1:])

    def _bias_tile(self, at: Tile) -> Array:
        bias = self.bias
        assert bias is not None
        starts, sizes = _bias_window(bias, at)
        return self._grouped(jax.lax.dynamic_slice(bias, starts, sizes)[0])

    def logits(self, query: Array, key: Array, batch: Any, unit: Any, i: Any, j: Any) -> tuple[Array, Array | None]:
        """Return the biased logits [heads, G * block_q, block_kv] of scaled queries, and the derivative of the soft cap."""
        logits = _dot(query, key, (2, 1))
        slope = None
        if self.settings.soft_cap is not None:
            squashed = jnp.tanh(logits / self.settings.soft_cap)
            logits, slope = self.settings.soft_cap * squashed, 1.0 - squashed * squashed
        if self.bias is not None:
            bias = self._bias_tile(self._at(batch, unit, i, j)).astype(logits.dtype)
            bias = jnp.where(bias == NEG_INF, 0.0, bias)
            logits = (logits.reshape(self.wide) + bias).reshape(logits.shape)
        return logits, slope

    @property
    def wide(self) -> tuple[int, int, int, int]:
        s = self.shape
        return s.heads, s.G, s.block_q, s.block_kv

    def hide(self, visible: Array, logits: Array, fill: float) -> Array:
        return jnp.where(visible, logits.reshape(self.wide), fill).reshape(logits.shape)

    def seen(self, visible: Array) -> tuple[Array, Array]:
        """Return which keys some query of a tile sees [heads|1, block_kv|1], which queries see a key [heads|1, G * block_q|1]."""
        keys = jnp.any(visible, axis=(1, 2))
        rows = jnp.any(visible, axis=3)
        rows = jnp.broadcast_to(rows, (rows.shape[0], self.shape.G, self.shape.block_q))
        return keys, rows.reshape(rows.shape[0], -1)


def _pad_bias(bias: Array, shape: _Shape) -> Array:
    widths = [(0, 0), (0, 0)]
    for axis, (length, padded) in enumerate(zip((shape.T, shape.S), shape.padded, strict=True), start=2):
        widths.append((0, padded - length if bias.shape[axis] == length and length > 1 else 0))
    return jnp.pad(bias, widths)


def _bias_window(bias: Array, at: Tile) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Return where a tile lies in a bias: starts and sizes, 0 and 1 on the axes it broadcasts."""
    starts = starts_within(bias.shape, (at.batch, at.head, at.row, at.col))
    return starts, tuple(min(n, size) for n, size in zip(bias.shape, (1, at.heads, at.rows, at.cols), strict=True))


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    return jax.lax.dot_general(
        a, b, (((contract[0],), (contract[1],)), ((0,), (0,))), precision=_HIGHEST, preferred_element_type=a.dtype
    )


# ---------------------------------------------------------------- forward


def _forward(
    settings: BlockwiseSettings, query: Any, key: Any, value: Any, mask: Any, bias: Any, sinks: Any
) -> tuple[Array, Array, Array]:
    """Return output, logsumexp of the keys, and logsumexp of keys and sinks, in public layout."""
    shape, dtype = _shape(settings, query.shape, key.shape), settings.softmax_dtype
    work = _work(*_block_kinds(shape, mask, bias is not None, settings.skip_by_data))
    tiler = _Tiler(settings, shape, mask, bias)
    queries, keys, values = _query_tiles(query, shape), _key_tiles(key, shape, transpose=True), _key_tiles(value, shape)

    def unit(_: None, index: tuple[Array, Array, Array]) -> tuple[None, tuple[Array, Array]]:
        batch, unit_index, i = index
        order, full, visible = work.at(batch, unit_index, i)
        q = queries[batch, unit_index, i].astype(dtype) * settings.scale
        state = (
            jnp.zeros((*q.shape[:2], value.shape[-1]), dtype),
            jnp.full(q.shape[:2], NEG_INF, dtype),
            jnp.zeros(q.shape[:2], dtype),
        )

        def visit(n: Array, state: tuple[Array, Array, Array], partial: bool) -> tuple[Array, Array, Array]:
            output, highest, total = state
            j = order[n]
            k, v = (x[batch, unit_index, j].astype(dtype) for x in (keys, values))
            logits, _ = tiler.logits(q, k, batch, unit_index, i, j)
            seen = tiler.visible(batch, unit_index, i, j) if partial else None
            if seen is not None:
                logits = tiler.hide(seen, logits, NEG_INF)
                v = jnp.where(tiler.seen(seen)[0][..., None], v, 0)
            new = jnp.maximum(highest, jnp.max(logits, axis=-1))
            anchor = jnp.where(new == NEG_INF, 0, new) if partial else new
            weights = jnp.exp(logits - anchor[..., None])
            keep = jnp.exp(highest - anchor)
            total = total * keep + jnp.sum(weights, axis=-1)
            return output * keep[..., None] + _dot(weights, v, (2, 1)), new, total

        output, highest, total = work.loop(visit, full, visible, state)
        empty = total == 0
        logsumexp = jnp.where(empty, NEG_INF, highest + jnp.log(jnp.where(empty, 1, total)))
        return None, (output / jnp.where(empty, 1, total)[..., None], logsumexp)

    _, (output, logsumexp) = jax.lax.scan(unit, None, _units(shape, shape.grid[0]))
    lead = (shape.B, shape.units, shape.grid[0])
    output = _from_query_tiles(output.reshape(*lead, *output.shape[1:]), shape)
    logsumexp = _from_query_tiles(logsumexp.reshape(*lead, *logsumexp.shape[1:], 1), shape)[..., 0]
    total = logsumexp
    if sinks is not None:
        total = jnp.logaddexp(logsumexp, jax.nn.logsumexp(sinks.astype(dtype), axis=-1))
        output = output * jnp.exp(logsumexp - total)[..., None]
    return output.astype(query.dtype), logsumexp, total


def _units(shape: _Shape, outer: int) -> tuple[Array, Array, Array]:
    """Return the indices (batch, unit, outer tile) of all units of work."""
    grid = np.indices((shape.B, shape.units, outer), dtype=np.int32)
    return tuple(jnp.asarray(axis.reshape(-1)) for axis in grid)  # type: ignore[return-value]


# ---------------------------------------------------------------- backward


def _attend_bwd(settings: BlockwiseSettings, residuals: Any, cotangents: Any) -> Any:
    query, key, value, mask, bias, sinks, output, logsumexp, total = residuals
    d_output, d_logsumexp = cotangents
    dtype = settings.softmax_dtype
    shape = _shape(settings, query.shape, key.shape)
    empty = logsumexp == NEG_INF
    d_output = jnp.where(empty[..., None], 0, d_output).astype(dtype)
    delta = jnp.sum(d_output * output.astype(dtype), axis=-1)
    d_sinks = None
    if sinks is not None:
        sink_weights = jnp.exp(sinks.astype(dtype) - total[..., None])
        d_sinks = -jnp.sum(sink_weights * delta[..., None], axis=(0, 1)).astype(sinks.dtype)
        kept = jnp.exp(logsumexp - total)  # of the softmax by the keys; the tiles recompute it without the sinks
        d_output, delta = d_output * kept[..., None], delta * kept
    delta = delta - jnp.where(empty, 0, d_logsumexp)
    anchor = jnp.where(empty, jnp.inf, logsumexp)
    d_query, d_key, d_value, d_bias = _backward_tiles(settings, shape, query, key, value, mask, bias, d_output, delta, anchor)
    return (
        d_query.astype(query.dtype),
        d_key.astype(key.dtype),
        d_value.astype(value.dtype),
        None,
        None if bias is None else d_bias[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype),
        d_sinks,
    )


def _backward_tiles(
    settings: BlockwiseSettings,
    shape: _Shape,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    bias: Any,
    d_output: Array,
    delta: Array,
    anchor: Array,
) -> tuple[Array, Array, Array, Any]:
    """Return the gradients of query, key and value in public layout, and of the padded bias.

    Key tiles outside, query tiles inside: the gradients of key and value stay in registers of the inner loop, that of the query
    is added to in place.
    """
    dtype = settings.softmax_dtype
    may, must = _block_kinds(shape, mask, bias is not None, settings.skip_by_data)
    work = _work(may.swapaxes(-1, -2), must.swapaxes(-1, -2))
    tiler = _Tiler(settings, shape, mask, bias)
    queries, keys, values = _query_tiles(query, shape), _key_tiles(key, shape), _key_tiles(value, shape)
    d_outputs = _query_tiles(d_output, shape)
    deltas = _query_tiles(delta[..., None], shape)[..., 0]
    anchors = _query_tiles(anchor[..., None], shape, fill=float("inf"))[..., 0]
    d_bias = None if tiler.bias is None else jnp.zeros(tiler.bias.shape, dtype)

    def row(d_bias: Any, index: tuple[Array, Array]) -> Any:
        batch, unit_index = index

        def column(carry: Any, j: Array) -> Any:
            order, full, visible = work.at(batch, unit_index, j)
            k, v = (x[batch, unit_index, j].astype(dtype) for x in (keys, values))

            def visit(n: Array, state: Any, partial: bool) -> Any:
                d_queries, d_bias, d_key, d_value = state
                i = order[n]
                q = queries[batch, unit_index, i].astype(dtype) * settings.scale
                do = d_outputs[batch, unit_index, i]
                seen, kk, vv = tiler.visible(batch, unit_index, i, j) if partial else None, k, v
                if seen is not None:
                    seen_keys, seen_rows = tiler.seen(seen)
                    kk, vv = (jnp.where(seen_keys[..., None], x, 0) for x in (k, v))
                    q = jnp.where(seen_rows[..., None], q, 0)
                logits, slope = tiler.logits(q, kk.swapaxes(1, 2), batch, unit_index, i, j)
                weights = jnp.exp(logits - anchors[batch, unit_index, i][..., None])
                if seen is not None:
                    weights = tiler.hide(seen, weights, 0.0)
                d_logits = weights * (_dot(do, vv, (2, 2)) - deltas[batch, unit_index, i][..., None])
                if d_bias is not None:
                    d_bias = _add_bias_tile(d_bias, d_logits.reshape(tiler.wide), tiler._at(batch, unit_index, i, j))
                if slope is not None:
                    d_logits = d_logits * slope
                d_value = d_value + _dot(weights, do, (1, 1))
                d_key = d_key + _dot(d_logits, q, (1, 1))
                d_queries = d_queries.at[i].add(_dot(d_logits, kk, (2, 1)))
                return d_queries, d_bias, d_key, d_value

            d_queries, d_bias = carry
            zeros = jnp.zeros_like(k), jnp.zeros_like(v)
            d_queries, d_bias, d_key, d_value = work.loop(visit, full, visible, (d_queries, d_bias, *zeros))
            return (d_queries, d_bias), (d_key, d_value)

        start = jnp.zeros(queries.shape[2:], dtype)
        cols = jnp.arange(shape.grid[1], dtype=jnp.int32)
        (d_queries, d_bias), (d_keys, d_values) = jax.lax.scan(column, (start, d_bias), cols)
        return d_bias, (d_queries * settings.scale, d_keys, d_values)

    pairs = np.indices((shape.B, shape.units), dtype=np.int32).reshape(2, -1)
    d_bias, gradients = jax.lax.scan(row, d_bias, (jnp.asarray(pairs[0]), jnp.asarray(pairs[1])))
    d_queries, d_keys, d_values = (x.reshape(shape.B, shape.units, *x.shape[1:]) for x in gradients)
    return _from_query_tiles(d_queries, shape), _from_key_tiles(d_keys, shape), _from_key_tiles(d_values, shape), d_bias


def _add_bias_tile(d_bias: Array, d_logits: Float[Array, "heads G rows cols"], at: Tile) -> Array:
    """Add one tile's gradient to that of the bias, summed over the axes the bias broadcasts."""
    starts, sizes = _bias_window(d_bias, at)
    tile = d_logits.reshape(1, at.heads, at.rows, at.cols)
    over = tuple(axis for axis in range(1, 4) if sizes[axis] == 1 and tile.shape[axis] != 1)
    tile = jnp.sum(tile, axis=over, keepdims=True)
    return jax.lax.dynamic_update_slice(d_bias, jax.lax.dynamic_slice(d_bias, starts, sizes) + tile, starts)


_attend.defvjp(_attend_fwd, _attend_bwd)
