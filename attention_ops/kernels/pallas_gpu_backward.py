"""The gradients of `pallas_gpu`: each kernel recomputes the weights of its tiles from the logsumexp.

The gradient of the query is summed by programs that own query rows, those of key and value by programs that own keys and go
through the query heads that share them, that of a bias by programs that own a tile of the bias: no atomic additions, so the same
inputs give the same bits. Source: Dao 2023 (FlashAttention-2: logsumexp and delta as residuals).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from attention_ops.kernels.pallas_gpu_blocks import Blocks, padded
from attention_ops.kernels.pallas_gpu_tiles import (
    Geometry,
    Operands,
    Tiles,
    edges,
    inner_tile,
    last_tile,
    load_rows,
    load_vector,
    product,
    rows_of,
    specs,
    store_plane,
    store_rows,
    whole,
    within,
)
from attention_ops.kernels.tile_work import tile_kinds, tile_work
from attention_ops.masks import Tiling


class Rows(NamedTuple):
    """What the kernels read of each query row.

    Attributes:
        d_output: cotangent of the output [B, T, H, Dv].
        anchor: logsumexp of the keys in the unit of the logits, [B, H, T]; inf for a row with none, whose weights are then 0.
        delta: what is subtracted from d_output . value, [B, H, T].
        kept: the keys' share of a softmax with sinks, [B, H, T], or None.
    """

    d_output: Any
    anchor: Any
    delta: Any
    kept: Any

    @property
    def specs(self) -> Rows:
        rest = jax.tree_util.tree_map(whole, self)
        return rest._replace(d_output=rows_of(self.d_output))


class _Row(NamedTuple):
    """The same for the rows of one tile."""

    d_output: Any
    anchor: Any
    delta: Any
    kept: Any


@dataclasses.dataclass(frozen=True)
class Call:
    """One backward pass: its arrays, and the tiles of a kernel."""

    geometry: Geometry
    query: Any
    key: Any
    value: Any
    mask: Any
    bias: Any
    rows: Rows
    interpret: bool
    blocks: Blocks

    @property
    def tiling(self) -> Tiling:
        return Tiling(self.geometry.T, self.geometry.S, self.blocks.q, self.blocks.kv)

    def _operands(self, work: Any) -> Operands:
        return Operands(self.query, self.key, self.value, self.bias, self.mask, work)

    def _run(self, kernel: Any, name: str, grid: Any, work: Any, out_specs: Any, out_shape: Any) -> Any:
        operands = self._operands(work)
        return pl.pallas_call(
            functools.partial(kernel, geometry=self.geometry, blocks=self.blocks),
            grid=grid,
            in_specs=[specs(operands), self.rows.specs],
            out_specs=out_specs,
            out_shape=out_shape,
            compiler_params=plgpu.CompilerParams(num_warps=self.blocks.warps, num_stages=self.blocks.stages),
            interpret=self.interpret,
            name=name,
        )(operands, self.rows)

    def query_gradient(self) -> jax.Array:
        """Return the gradient of the query, [B, T, H, D]."""
        g, (rows, _) = self.geometry, self.tiling.grid
        width = padded(g.D)
        return self._run(
            _query_kernel,
            "attention_d_query",
            (rows, g.H, g.B),
            tile_work(self.mask, self.tiling, g.by_data, g.has_bias),
            pl.BlockSpec((None, self.blocks.q, None, width), lambda i, h, b: (b, rows - 1 - i, h, 0)),
            jax.ShapeDtypeStruct(self.query.shape, self.query.dtype),
        )

    def key_value_gradients(self) -> tuple[jax.Array, jax.Array]:
        """Return the gradients of key [B, S, K, D] and value [B, S, K, Dv]."""
        g, (_, cols) = self.geometry, self.tiling.grid
        widths = padded(g.D), padded(g.Dv)
        return self._run(
            _key_value_kernel,
            "attention_d_key_value",
            (cols, g.K, g.B),
            tile_work(self.mask, self.tiling, g.by_data, g.has_bias, by_column=True),
            [pl.BlockSpec((None, self.blocks.kv, None, width), lambda j, k, b: (b, j, k, 0)) for width in widths],
            [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (self.key, self.value)],
        )

    def bias_gradient(self) -> jax.Array:
        """Return the gradient of the bias in its own shape: a program sums all that its tile of the bias was broadcast to."""
        g = self.geometry
        may, _ = tile_kinds(self.mask, self.tiling, g.by_data, True)
        b, h, t, s = self.bias.shape
        rows, cols = (n if length > 1 else 1 for n, length in zip(self.tiling.grid, (t, s), strict=True))
        block = (self.blocks.q if t > 1 else None, self.blocks.kv if s > 1 else None)
        return self._run(
            _bias_kernel,
            "attention_d_bias",
            (cols, rows, b * h),
            jnp.asarray(may, jnp.int32),
            pl.BlockSpec((None, None, *block), lambda j, i, n: (n // h, n % h, i, j)),
            jax.ShapeDtypeStruct(self.bias.shape, self.bias.dtype),
        )


def _rows_of_tile(rows: Rows, batch: Any, head: Any, i: Any, g: Geometry, blocks: Blocks) -> _Row:
    start = i * blocks.q
    return _Row(
        load_rows(rows.d_output, batch, head, start, blocks.q, g.T, g.Dv),
        load_vector(rows.anchor, batch, head, start, blocks.q, float("inf")),
        load_vector(rows.delta, batch, head, start, blocks.q, 0.0),
        None if rows.kept is None else load_vector(rows.kept, batch, head, start, blocks.q, 0.0),
    )


class _TileGradient(NamedTuple):
    """Of one tile: its weights times the keys' share, and the gradients of its logits with bias, and before cap and scale."""

    weights: Any
    d_logits: Any
    d_raw: Any
    visible: Any


def _tile_gradient(tiles: Tiles, query: Any, key: Any, value: Any, row: _Row, i: Any, j: Any, partial: bool) -> _TileGradient:
    """Return the gradients of a tile; what is hidden is 0, whatever keys and values hold there."""
    logits, slope, visible = tiles.logits(query, key, i, j, partial)
    weights = tiles.geometry.exp(logits - tiles.down(row.anchor))
    d_weights = product(row.d_output, value, 1, 1) if tiles.row_axis == 0 else product(value, row.d_output, 1, 1)
    kept = None if row.kept is None else tiles.down(row.kept)
    d_weights = (d_weights if kept is None else d_weights * kept) - tiles.down(row.delta)
    d_logits = weights * d_weights
    d_raw = d_logits if slope is None else d_logits * slope
    weights = weights if kept is None else weights * kept
    if visible is not None:
        weights, d_logits, d_raw = (jnp.where(visible, x, 0.0) for x in (weights, d_logits, d_raw))
    return _TileGradient(weights, d_logits, d_raw, visible)


def _product_of_gradient(d_raw: Any, x: Any) -> Any:
    """Multiply by queries or keys in their dtype; in float16, which may not hold the gradient, relative to each row's largest."""
    if x.dtype != jnp.float16:
        return product(d_raw.astype(x.dtype), x, 1, 0)
    largest = jnp.max(jnp.abs(d_raw), axis=1)[:, None]
    unit = jnp.where(largest > 0, largest, 1.0)
    return product((d_raw / unit).astype(x.dtype), x, 1, 0) * unit


def _query_kernel(operands: Operands, rows: Rows, d_query_ref: Any, *, geometry: Geometry, blocks: Blocks) -> None:
    g = geometry
    i, h, b = last_tile(g.T, blocks.q) - pl.program_id(0), pl.program_id(1), pl.program_id(2)
    kv_head = h // g.groups if g.groups > 1 else h
    tiles = Tiles(g, blocks.q, blocks.kv, operands.mask, operands.bias, b, h)
    query = load_rows(operands.query, b, h, i * blocks.q, blocks.q, g.T, g.D)
    row = _rows_of_tile(rows, b, h, i, g, blocks)

    def visit(place: Any, d_query: Any, partial: bool) -> Any:
        j = inner_tile(operands.work, b, h, i, place)
        length = g.S if partial else blocks.kv
        key = load_rows(operands.key, b, kv_head, j * blocks.kv, blocks.kv, length, g.D)
        value = load_rows(operands.value, b, kv_head, j * blocks.kv, blocks.kv, length, g.Dv)
        found = _tile_gradient(tiles, query, key, value, row, i, j, partial)
        if found.visible is not None and g.hidden_keys:
            key = jnp.where(tiles.seen(found.visible), key, jnp.zeros((), key.dtype))
        return d_query + _product_of_gradient(found.d_raw, key)

    d_query = jnp.zeros((blocks.q, padded(g.D)), jnp.float32)
    d_query = operands.work.loop(visit, edges(operands.work, b, h, i), d_query)
    store_rows(d_query_ref, d_query * g.scale, i * blocks.q, g.T, g.D)


def _key_value_kernel(
    operands: Operands, rows: Rows, d_key_ref: Any, d_value_ref: Any, *, geometry: Geometry, blocks: Blocks
) -> None:
    """Tiles here are [keys, rows], so that the weights go into their product as they are."""
    g = geometry
    j, kv_head, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    key = load_rows(operands.key, b, kv_head, j * blocks.kv, blocks.kv, g.S, g.D)
    value = load_rows(operands.value, b, kv_head, j * blocks.kv, blocks.kv, g.S, g.Dv)

    def head(n: Any, state: Any) -> Any:
        h = kv_head * g.groups + n
        tiles = Tiles(g, blocks.q, blocks.kv, operands.mask, operands.bias, b, h, row_axis=1)

        def visit(place: Any, state: Any, partial: bool) -> Any:
            d_key, d_value = state
            i = inner_tile(operands.work, b, h, j, place)
            query = load_rows(operands.query, b, h, i * blocks.q, blocks.q, g.T, g.D)
            row = _rows_of_tile(rows, b, h, i, g, blocks)
            found = _tile_gradient(tiles, query, key, value, row, i, j, partial)
            d_value = d_value + product(found.weights.astype(value.dtype), row.d_output, 1, 0)
            return d_key + _product_of_gradient(found.d_raw, query), d_value

        return operands.work.loop(visit, edges(operands.work, b, h, j), state)

    state = tuple(jnp.zeros((blocks.kv, padded(dim)), jnp.float32) for dim in (g.D, g.Dv))
    d_key, d_value = jax.lax.fori_loop(0, g.groups, head, state) if g.groups > 1 else head(0, state)
    store_rows(d_key_ref, d_key * g.scale, j * blocks.kv, g.S, g.D)
    store_rows(d_value_ref, d_value, j * blocks.kv, g.S, g.Dv)


def _bias_kernel(operands: Operands, rows: Rows, d_bias_ref: Any, *, geometry: Geometry, blocks: Blocks) -> None:
    """Sum the gradient of the biased logits over every batch row, head and tile that reads this tile of the bias."""
    g, may, shape = geometry, operands.work, operands.bias.shape
    first_j, first_i, lead = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    starts = (lead // shape[1], lead % shape[1], first_i, first_j)
    counts = (g.B, g.H, *Tiling(g.T, g.S, blocks.q, blocks.kv).grid)
    summed = tuple(size == 1 for size in shape[2:])

    def through(axis: int, index: tuple[Any, ...], total: Any) -> Any:
        """Go through the axes that the bias broadcasts, and stay where the program is on the others."""
        if axis == 4:
            b, h, i, j = index
            return tile(b, h, i, j, total)
        if shape[axis] > 1 or counts[axis] == 1:
            return through(axis + 1, (*index, starts[axis]), total)
        return jax.lax.fori_loop(0, counts[axis], lambda at, total: through(axis + 1, (*index, at), total), total)

    def tile(b: Any, h: Any, i: Any, j: Any, total: Any) -> Any:
        def visit(_: Any, total: Any) -> Any:
            tiles = Tiles(g, blocks.q, blocks.kv, operands.mask, operands.bias, b, h)
            kv_head = h // g.groups if g.groups > 1 else h
            query = load_rows(operands.query, b, h, i * blocks.q, blocks.q, g.T, g.D)
            key = load_rows(operands.key, b, kv_head, j * blocks.kv, blocks.kv, g.S, g.D)
            value = load_rows(operands.value, b, kv_head, j * blocks.kv, blocks.kv, g.S, g.Dv)
            row = _rows_of_tile(rows, b, h, i, g, blocks)
            d_logits = _tile_gradient(tiles, query, key, value, row, i, j, partial=True).d_logits
            return total + jnp.sum(d_logits, axis=tuple(axis for axis in (0, 1) if summed[axis]))

        visits = may[within(b, may.shape[0]), within(h, may.shape[1]), i, j]
        return jax.lax.fori_loop(0, visits, visit, total)

    block = tuple(size for size, one in zip((blocks.q, blocks.kv), summed, strict=True) if not one)
    total = through(0, (), jnp.zeros(block, jnp.float32))
    store_plane(d_bias_ref, total, (first_i, first_j), (g.T, g.S), summed)
