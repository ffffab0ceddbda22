"""Attention tile by tile: online softmax forward, backward by recomputation, memory linear in T and S.

The work is a list of the tiles (block_q query rows by block_kv key columns) that the mask leaves visible, made while compiling
from what is static, or at run time from what is not. Full tiles skip all mask arithmetic. Loops have run-time trip counts,
so compile time does not depend on the number of tiles.

Sources: Milakov and Gimelshein 2018 (online softmax), Dao 2023 (FlashAttention-2: one pass backward with delta). Unlike there the
residuals of a row are its highest logit and its sum of exponentials, not the logsumexp: that is rounded at its own size, which
is an error of every weight of the row.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attention_ops.kernels import tiles as t
from attention_ops.kernels.decode import STEP, decode, is_decoding
from attention_ops.kernels.sinks import shares
from attention_ops.kernels.tiles import NEG_INF, Shape, Tiler
from attention_ops.masks import Mask, starts_within
from attention_ops.varying import varying_like

_FORWARD_CELLS, _BACKWARD_CELLS = 1 << 19, 1 << 18
"""Tiles of several heads are taken together up to so many logits: large products are faster than small ones, in a cache."""


@dataclasses.dataclass(frozen=True)
class BlockwiseSettings:
    """What is compiled in."""

    scale: float
    soft_cap: float | None
    block_q: int | None
    block_kv: int | None
    skip_by_data: bool
    softmax_dtype: np.dtype

    def shape(self, query: tuple[Any, ...], key: tuple[Any, ...], *, is_backward: bool = False) -> Shape:
        (_, T, H, D), (_, S, K, _) = query, key
        sizes = block_sizes(T, S, H, K, D, self.block_q, self.block_kv, is_backward=is_backward)
        return Shape.of(query, key, *sizes, _BACKWARD_CELLS if is_backward else _FORWARD_CELLS)


def block_sizes(
    T: int, S: int, H: int, K: int, D: int, block_q: int | None, block_kv: int | None, *, is_backward: bool = False
) -> tuple[int, int]:
    """Choose tile sizes, evened out so that little is padding.

    About 512 rows of one key/value head by 256 columns, 512 backward or if there is one such head; while decoding all rows, and
    columns of about 2**20 numbers.
    """
    G = max(H // max(K, 1), 1)
    columns = 512 if is_backward or K <= 1 else 256
    if is_decoding(T, S, G) and not is_backward:
        columns = max(STEP // max(K * D, 1), 128)
    return block_q or _even(T, max(512 // G, 64)), block_kv or _even(S, columns)


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
    settings = BlockwiseSettings(scale, soft_cap, block_q, block_kv, skip_by_data, softmax_dtype)
    output, logsumexp = _attend(settings, query, key, value, mask, bias, sinks)  # type: ignore[misc]
    return BlockwiseOutput(output, logsumexp)


def blockwise_cost(
    B: int, T: int, S: int, H: int, K: int, D: int, Dv: int, visible: float, block_q: int | None, block_kv: int | None
) -> tuple[int, int]:
    """Return flops and temporary bytes of the forward when tiles holding the share `visible` of T * S are visited."""
    block_q, block_kv = block_sizes(T, S, H, K, D, block_q, block_kv)
    tile = (H // K) * block_q * block_kv * 4
    return int(2 * B * H * T * S * (D + Dv) * visible), 4 * B * (T * H * (D + Dv + 2) + S * K * (D + Dv)) + 3 * tile


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(settings: BlockwiseSettings, query: Any, key: Any, value: Any, mask: Any, bias: Any, sinks: Any) -> Any:
    output, highest, total = _forward(settings, query, key, value, mask, bias, sinks, query.dtype)
    return output, highest + jnp.log(total)


def _attend_fwd(settings: BlockwiseSettings, query: Any, key: Any, value: Any, mask: Any, bias: Any, sinks: Any) -> Any:
    wide, highest, total = _forward(settings, query, key, value, mask, bias, sinks, settings.softmax_dtype)
    output = wide.astype(query.dtype)
    # What rounding to 16 bits took from the output, in 16 bits: delta is that of the output before it.
    lost = (wide - output.astype(wide.dtype)).astype(output.dtype) if output.dtype.itemsize == 2 else None
    return (output, highest + jnp.log(total)), (query, key, value, mask, bias, sinks, output, lost, highest, total)


# ---------------------------------------------------------------- forward


def _forward(
    settings: BlockwiseSettings, query: Any, key: Any, value: Any, mask: Any, bias: Any, sinks: Any, output_dtype: np.dtype
) -> tuple[Array, Array, Array]:
    """Return the output and, in the softmax dtype and of the keys alone, the highest logit and the sum of exponentials.

    The sum is relative to the highest logit; a row that sees nothing has -inf and 1. All are in public layout.
    """
    dtype = settings.softmax_dtype
    if is_decoding(query.shape[1], key.shape[1], query.shape[2] // key.shape[2]):
        output, highest, total = decode(
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            scale=settings.scale,
            soft_cap=settings.soft_cap,
            block_kv=settings.shape(query.shape, key.shape).block_kv,
            skip_by_data=settings.skip_by_data,
            dtype=dtype,
        )
    else:
        kept_dtype = dtype if sinks is not None else output_dtype
        output, highest, total = _tile_by_tile(settings, query, key, value, mask, bias, kept_dtype)
    if sinks is not None:
        output = output * shares(highest, total, sinks)[0][..., None]
    return output.astype(output_dtype), highest, total


def _tile_by_tile(
    settings: BlockwiseSettings, query: Any, key: Any, value: Any, mask: Any, bias: Any, output_dtype: np.dtype
) -> tuple[Array, Array, Array]:
    """Return what `_forward` does, without sinks."""
    shape, dtype = settings.shape(query.shape, key.shape), settings.softmax_dtype
    work = t.work_list(*t.kinds_per_unit(shape, mask, bias is not None, settings.skip_by_data))
    # bfloat16 is multiplied as it is. The scale would round it, so it waits for the logits: free inside the exponential.
    is_narrow = query.dtype == jnp.bfloat16 and dtype == jnp.float32
    operand_dtype = query.dtype if is_narrow else dtype
    in_exponent = is_narrow and settings.scale >= np.finfo(dtype).tiny and bias is None and settings.soft_cap is None
    factor = settings.scale if in_exponent else 1.0
    tiler = Tiler(shape, mask, bias, settings.soft_cap, scale=settings.scale if is_narrow and not in_exponent else 1.0)
    Dv = value.shape[-1]

    def unit(carry: tuple[Array, ...], index: tuple[Array, Array]) -> tuple[tuple[Array, ...], None]:
        batch, heads = index
        queries = t.queries_of_unit(t.bits(query), shape, batch, heads)
        keys, values = (t.keys_of_unit(t.bits(x), shape, batch, heads) for x in (key, value))
        finite = t.finite_tiles(t.from_bits(values, value.dtype), shape.block_kv)

        def rows_of_tiles(_: None, i: Array) -> tuple[None, tuple[Array, ...]]:
            q = t.from_bits(t.query_tile(queries, shape, i), query.dtype).astype(operand_dtype)
            q = q if is_narrow else q * settings.scale

            def visit(j: Array, state: tuple[Array, Array, Array], tiles: int, partial: bool) -> tuple[Array, Array, Array]:
                output, highest, total = state
                at = tiler.at(batch, heads, i, j, kv_tiles=tiles)
                k, v = (t.from_bits(t.key_tile(x, shape, j, tiles), key.dtype).astype(operand_dtype) for x in (keys, values))
                logits, _ = tiler.logits(q, k, at)
                seen = tiler.visible(at) if partial else None
                if seen is not None:
                    logits = tiler.hide(seen, logits, NEG_INF, at)
                    v = tiler.without_unseen_keys(v, t.all_of(finite, j, tiles), at)
                new = jnp.maximum(highest, jnp.max(logits, axis=-1) * factor)
                anchor = jnp.where(new == NEG_INF, 0, new) if partial else new
                weights = jnp.exp(logits * factor - anchor[..., None])
                keep = jnp.exp(highest - anchor)
                total = total * keep + jnp.sum(weights, axis=-1)
                return output * keep[..., None] + t.dot(weights.astype(operand_dtype), v, (2, 1)), new, total

            rows = q.shape[:2]
            state = jnp.zeros((*rows, Dv), dtype), jnp.full(rows, NEG_INF, dtype), jnp.zeros(rows, dtype)
            output, highest, total = work.loop(visit, batch, heads, i, varying_like(state, query))
            total = jnp.where(total == 0, 1, total)
            return None, (output / total[..., None], highest[..., None], total[..., None])

        rows = varying_like(jnp.arange(shape.grid[0], dtype=jnp.int32), query)
        _, found = jax.lax.scan(rows_of_tiles, None, rows)
        found = (t.from_query_tiles(x, shape) for x in found)
        return tuple(t.put_unit(whole, x, batch, heads) for whole, x in zip(carry, found, strict=True)), None

    rows = query.shape[:3]
    start = jnp.zeros((*rows, Dv), output_dtype), *(jnp.zeros((*rows, 1), dtype) for _ in range(2))
    (output, highest, total), _ = jax.lax.scan(unit, *varying_like((start, t.units(shape)), query))
    return output, highest[..., 0], total[..., 0]


# ---------------------------------------------------------------- backward


def _attend_bwd(settings: BlockwiseSettings, residuals: Any, cotangents: Any) -> Any:
    query, key, value, mask, bias, sinks, output, lost, highest, total = residuals
    d_output, d_logsumexp = (jnp.asarray(x) for x in cotangents)  # a caller may hand in numpy arrays
    dtype = settings.softmax_dtype
    shape = settings.shape(query.shape, key.shape, is_backward=True)
    empty = highest == NEG_INF
    by_output = functools.partial(_sum_of_products, d_output, empty=empty, dtype=dtype)
    delta = by_output(output)
    d_sinks, kept = None, 1 / total
    if sinks is not None:
        of_keys, of_sinks = shares(highest, total, sinks)
        # By the output as it was returned: much of the sum cancels, and a caller can only check it against that.
        d_sinks = -jnp.sum(of_sinks * delta[..., None], axis=(0, 1)).astype(sinks.dtype)
        kept = kept * of_keys
    if lost is not None:
        delta = delta + by_output(lost)
    delta = delta * kept - jnp.where(empty, 0, d_logsumexp / total)
    anchor = jnp.where(empty, jnp.inf, highest)
    gradients = _backward_tiles(settings, shape, query, key, value, mask, bias, d_output, kept, delta, anchor)
    d_query, d_key, d_value, d_bias = gradients
    if bias is not None:
        d_bias = d_bias[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)
    return d_query, d_key, d_value, None, d_bias, d_sinks


def _sum_of_products(d_output: Array, output: Array, *, empty: Array, dtype: np.dtype) -> Float[Array, "B T H"]:
    """Return d_output . output; 0 in empty rows, whatever d_output holds there."""
    return jnp.sum(jnp.where(empty[..., None], 0, d_output.astype(dtype) * output.astype(dtype)), axis=-1)


def _backward_tiles(
    settings: BlockwiseSettings,
    shape: Shape,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    bias: Any,
    d_output: Array,
    kept: Array,
    delta: Array,
    anchor: Array,
) -> tuple[Array, Array, Array, Any]:
    """Return the gradients of query, key and value in public layout, and of the padded bias.

    Key tiles outside, query tiles inside: the gradients of key and value are carried by the inner loop, that of the query
    is added to in place. The weights are kept * e**(logits - anchor), and delta has been multiplied by kept. Rows that see
    nothing have an anchor of inf. All rows are taken from the last to the first: where a mask is causal the later ones see more
    keys and give less to each, and a sum that begins with its small terms is the more exact.
    """
    dtype = settings.softmax_dtype
    may, must = t.kinds_per_unit(shape, mask, bias is not None, settings.skip_by_data)
    work = t.work_list(may.swapaxes(-1, -2), must.swapaxes(-1, -2))
    tiler = Tiler(shape, mask, bias, settings.soft_cap, is_backward=True)

    def unit(carry: tuple[Any, ...], index: tuple[Array, Array]) -> tuple[tuple[Any, ...], None]:
        batch, heads = index

        def queries_of(x: Array, fill: float = 0.0) -> Array:
            rows = t.from_bits(t.queries_of_unit(t.bits(x), shape, batch, heads, fill), x.dtype).astype(dtype)
            return rows[:, :, ::-1]

        def keys_of(x: Array) -> Array:
            return t.from_bits(t.keys_of_unit(t.bits(x), shape, batch, heads), x.dtype).astype(dtype)

        queries, keys, values = queries_of(query) * settings.scale, keys_of(key), keys_of(value)
        deltas, anchors = queries_of(delta[..., None]), queries_of(anchor[..., None], fill=float("inf"))
        d_outputs = jnp.where(anchors == jnp.inf, 0, queries_of(d_output) * queries_of(kept[..., None]))
        finite_keys, finite_queries = t.finite_tiles(keys, shape.block_kv), t.finite_tiles(queries, shape.block_q)

        def column(carry: Any, j: Array) -> Any:
            k, v = (t.key_tile(x, shape, j) for x in (keys, values))
            k_transposed = jax.lax.optimization_barrier(k.swapaxes(1, 2))

            def visit(i: Array, state: Any, tiles: int, partial: bool) -> Any:
                d_queries, d_bias, d_key, d_value = state
                at = tiler.at(batch, heads, i, j, q_tiles=tiles)
                place = shape.grid[0] - tiles - i
                q, do, delta, anchor = (t.query_tile(x, shape, place, tiles) for x in (queries, d_outputs, deltas, anchors))
                seen, kk = tiler.visible(at) if partial else None, k
                if seen is not None:
                    kk = tiler.without_unseen_keys(k, finite_keys[j], at)
                    q = tiler.without_blind_queries(q, t.all_of(finite_queries, place, tiles), at)
                logits, slope = tiler.logits(q, kk, at)
                weights = jnp.exp(logits - anchor.swapaxes(1, 2))
                d_logits = t.dot(v, do, (2, 2)) - delta.swapaxes(1, 2)
                if seen is not None:
                    weights = tiler.hide(seen, weights, 0.0, at)
                    d_logits = tiler.hide(seen, d_logits, 0.0, at)
                d_logits = weights * d_logits
                if d_bias is not None:
                    d_bias = t.add_bias_tile(d_bias, tiler.rows_first(d_logits, at), at)
                if slope is not None:
                    d_logits = d_logits * slope
                d_value = d_value + t.dot(weights, do, (2, 1))
                d_key = d_key + t.dot(d_logits, q, (2, 1))
                kk = k_transposed if seen is None else jax.lax.optimization_barrier(kk.swapaxes(1, 2))
                d_queries = _add_rows(d_queries, t.dot(kk, d_logits, (2, 1)), place * shape.block_q)
                return d_queries, d_bias, d_key, d_value

            d_queries, d_bias = carry
            zeros = jnp.zeros_like(k), jnp.zeros_like(v)
            d_queries, d_bias, d_key, d_value = work.loop(visit, batch, heads, j, (d_queries, d_bias, *zeros))
            return (d_queries, d_bias), (d_key, d_value)

        d_query, d_key, d_value, d_bias = carry
        start = jnp.zeros((shape.heads, query.shape[-1], shape.G, shape.padded[0]), dtype)
        cols = jnp.arange(shape.grid[1], dtype=jnp.int32)
        start, cols = varying_like((start, cols), query)
        (d_queries, d_bias), (d_keys, d_values) = jax.lax.scan(column, (start, d_bias), cols)
        d_queries = d_queries[..., ::-1].transpose(3, 0, 2, 1).reshape(shape.padded[0], shape.query_heads, -1) * settings.scale
        d_query = t.put_unit(d_query, d_queries, batch, heads)
        d_key, d_value = (
            t.put_unit(whole, t.from_key_tiles(x), batch, heads) for whole, x in ((d_key, d_keys), (d_value, d_values))
        )
        return (d_query, d_key, d_value, d_bias), None

    d_bias = None if tiler.bias is None else jnp.zeros(tiler.bias.shape, dtype)
    start = (*(jnp.zeros(x.shape, x.dtype) for x in (query, key, value)), d_bias)
    gradients, _ = jax.lax.scan(unit, *varying_like((start, t.units(shape)), query))
    return gradients


def _add_rows(x: Float[Array, "heads d G rows"], tile: Float[Array, "heads d n"], row: Any) -> Array:
    """Add the gradient of a query tile, in place where XLA can."""
    heads, d, G, _ = x.shape
    starts = starts_within(x.shape, (0, 0, 0, row))
    tile = tile.reshape(heads, d, G, -1)
    return jax.lax.dynamic_update_slice(x, jax.lax.dynamic_slice(x, starts, tile.shape) + tile, starts)


_attend.defvjp(_attend_fwd, _attend_bwd)
