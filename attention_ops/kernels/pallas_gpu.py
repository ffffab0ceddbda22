"""Attention as Pallas kernels for GPUs (Triton): forward, and by custom derivative the kernels of `pallas_gpu_backward`.

One program of the forward owns the query rows of one tile of one head, and visits the key tiles that its list of work names:
full ones without mask arithmetic, partial ones with. Keys and values of a shared head are read where they are, not repeated, and
arrays keep their layout. Sources: Milakov and Gimelshein 2018 (online softmax), Dao 2023 (FlashAttention-2).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from attention_ops.kernels import pallas_gpu_backward as backward
from attention_ops.kernels.interpreter import is_interpreted
from attention_ops.kernels.pallas_gpu_blocks import KERNELS, Blocks, choose, padded
from attention_ops.kernels.pallas_gpu_tiles import (
    LOG2E,
    NEG_INF,
    Geometry,
    Operands,
    Tiles,
    edges,
    inner_tile,
    last_tile,
    load_rows,
    prepared,
    product,
    specs,
    store_rows,
    whole,
)
from attention_ops.kernels.tile_work import hidden_from_all, tile_work
from attention_ops.masks import Mask, Tiling


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a call compiles in: its geometry, the tiles of each kernel, and whether they are interpreted."""

    geometry: Geometry
    forward: Blocks
    query: Blocks
    key_value: Blocks
    interpret: bool


class PallasOutput(NamedTuple):
    output: Float[Array, "B T H Dv"]
    logsumexp: Float[Array, "B T H"]


def pallas_gpu_attention(
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
    shared_memory: int,
) -> PallasOutput:
    """Return the output in the dtype of the query and the logsumexp, without sinks, in float32.

    Inputs are float32, bfloat16 or float16, head dims at most 256; sums and softmax are in float32, and products of float32 are
    not rounded to TF32. Differentiable in query, key, value, bias and sinks. Beyond inputs and outputs it takes O(B * H * T), and
    the list of work where the visible tiles of a row do not follow each other. `skip_by_data` is as in `blockwise_attention`.
    `shared_memory` is what one program of the device may use, in bytes; block sizes are fitted to it, see `choose`.
    """
    (B, T, H, D), (_, S, K, _), Dv = query.shape, key.shape, value.shape[3]
    if 0 in (B, T, S):
        return PallasOutput(jnp.zeros((B, T, H, Dv), query.dtype), jnp.full((B, T, H), NEG_INF, jnp.float32))
    blind, hidden = (True, True) if bias is not None else hidden_from_all(mask, T, S)
    geometry = Geometry(B, T, S, H, K, D, Dv, scale, soft_cap, bias is not None, blind, hidden, skip_by_data)
    blocks = (choose(kernel, T, S, D, Dv, query.dtype.itemsize, shared_memory, block_q, block_kv) for kernel in KERNELS)
    settings = Settings(geometry, *blocks, interpret=is_interpreted())
    output, logsumexp = _attend(settings, query, key, value, mask, bias, sinks)  # type: ignore[misc]
    return PallasOutput(output, logsumexp.swapaxes(1, 2))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(settings: Settings, query: Any, key: Any, value: Any, mask: Any, bias: Any, sinks: Any) -> Any:
    return _forward(settings, query, key, value, mask, bias, sinks)


def _attend_fwd(settings: Settings, query: Any, key: Any, value: Any, mask: Any, bias: Any, sinks: Any) -> Any:
    output, logsumexp = _forward(settings, query, key, value, mask, bias, sinks)
    return (output, logsumexp), (query, key, value, mask, bias, sinks, output, logsumexp)


def _attend_bwd(settings: Settings, residuals: Any, cotangents: Any) -> Any:
    """Prepare what the kernels share, per row: the logsumexp, `delta`, and the keys' share of a softmax with sinks."""
    query, key, value, mask, bias, sinks, output, logsumexp = residuals
    d_output, d_logsumexp = cotangents
    g = settings.geometry
    empty = logsumexp == NEG_INF
    if g.blind_rows:
        by_row = empty.swapaxes(1, 2)[..., None]
        query, d_output = (jnp.where(by_row, jnp.zeros((), x.dtype), x) for x in (query, d_output))
    delta = jnp.einsum(
        "bthd,bthd->bht", d_output.astype(jnp.float32), output.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    kept = d_sinks = None
    if sinks is not None:
        by_head = sinks.astype(jnp.float32)[:, None, :]
        total = jnp.logaddexp(logsumexp, jax.nn.logsumexp(by_head, axis=-1))
        total = jnp.where(total == float("-inf"), 0.0, total)  # neither keys nor sinks: every share is 0
        shares = jnp.exp(by_head - total[..., None])
        d_sinks = -jnp.sum(shares * delta[..., None], axis=(0, 2)).astype(sinks.dtype)
        kept = jnp.exp(logsumexp - total)
        delta = delta * kept
    delta = delta - jnp.where(empty, 0.0, d_logsumexp)
    anchor = jnp.where(empty, jnp.inf, logsumexp) * g.unit
    rows = backward.Rows(d_output.astype(value.dtype), anchor, delta, kept)
    mask = prepared(mask, g.T, g.S)
    call = functools.partial(backward.Call, g, query, key, value, mask, bias, rows, settings.interpret)
    d_query = call(settings.query).query_gradient()
    d_key, d_value = call(settings.key_value).key_value_gradients()
    d_bias = None if bias is None else call(settings.query).bias_gradient()
    return d_query, d_key, d_value, None, d_bias, d_sinks


_attend.defvjp(_attend_fwd, _attend_bwd)


# ---------------------------------------------------------------- the forward kernel


def _forward(
    settings: Settings, query: Any, key: Any, value: Any, mask: Any, bias: Any, sinks: Any
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
    """Return the output and the logsumexp of the keys."""
    g, blocks = settings.geometry, settings.forward
    tiling = Tiling(g.T, g.S, blocks.q, blocks.kv)
    operands = Operands(query, key, value, bias, prepared(mask, g.T, g.S), tile_work(mask, tiling, g.by_data, g.has_bias))
    total_of_sinks = None if sinks is None else jax.nn.logsumexp(sinks.astype(jnp.float32), axis=-1)
    last = last_tile(g.T, blocks.q)
    width = padded(g.Dv)
    return pl.pallas_call(
        functools.partial(_forward_kernel, geometry=g, blocks=blocks),
        grid=(tiling.grid[0], g.H, g.B),
        in_specs=[specs(operands), None if sinks is None else whole(total_of_sinks)],
        out_specs=[
            pl.BlockSpec((None, blocks.q, None, width), lambda i, h, b: (b, last - i, h, 0)),
            pl.BlockSpec((None, None, blocks.q), lambda i, h, b: (b, h, last - i)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((g.B, g.T, g.H, g.Dv), query.dtype),
            jax.ShapeDtypeStruct((g.B, g.H, g.T), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=settings.interpret,
        name="attention_forward",
    )(operands, total_of_sinks)


def _forward_kernel(
    operands: Operands, total_of_sinks: Any, output_ref: Any, logsumexp_ref: Any, *, geometry: Geometry, blocks: Blocks
) -> None:
    g = geometry
    i, h, b = last_tile(g.T, blocks.q) - pl.program_id(0), pl.program_id(1), pl.program_id(2)
    kv_head = h // g.groups if g.groups > 1 else h
    tiles = Tiles(g, blocks.q, blocks.kv, operands.mask, operands.bias, b, h)
    query = load_rows(operands.query, b, h, i * blocks.q, blocks.q, g.T, g.D)

    def visit(place: Any, state: Any, partial: bool) -> Any:
        output, highest, total = state
        j = inner_tile(operands.work, b, h, i, place)
        key = load_rows(operands.key, b, kv_head, j * blocks.kv, blocks.kv, g.S if partial else blocks.kv, g.D)
        value = load_rows(operands.value, b, kv_head, j * blocks.kv, blocks.kv, g.S if partial else blocks.kv, g.Dv)
        logits, _, visible = tiles.logits(query, key, i, j, partial)
        if visible is not None:
            logits = jnp.where(visible, logits, NEG_INF)
            if g.hidden_keys:
                value = jnp.where(tiles.seen(visible), value, jnp.zeros((), value.dtype))
        new = jnp.maximum(highest, jnp.max(logits, axis=1))
        anchor = jnp.where(new == NEG_INF, 0.0, new) if visible is not None else new
        weights = g.exp(logits - anchor[:, None])
        keep = g.exp(highest - anchor)
        output = output * keep[:, None] + product(weights.astype(value.dtype), value, 1, 0)
        return output, new, total * keep + jnp.sum(weights, axis=1)

    state = (
        jnp.zeros((blocks.q, padded(g.Dv)), jnp.float32),
        jnp.full((blocks.q,), NEG_INF, jnp.float32),
        jnp.zeros((blocks.q,), jnp.float32),
    )
    output, highest, total = operands.work.loop(visit, edges(operands.work, b, h, i), state)
    empty = total == 0.0
    divisor = jnp.where(empty, 1.0, total)
    logsumexp = jnp.where(empty, NEG_INF, highest * (1.0 / g.unit) + jnp.log(divisor))
    output = output / divisor[:, None]
    if total_of_sinks is not None:
        output = output * _share_of_keys(logsumexp, total_of_sinks[h])[:, None]
    store_rows(output_ref, output, i * blocks.q, g.T, g.Dv)
    inside = i * blocks.q + jax.lax.broadcasted_iota(jnp.int32, (blocks.q,), 0) < g.T
    plgpu.store(logsumexp_ref, logsumexp, mask=inside if g.T % blocks.q else None)


def _share_of_keys(logsumexp: Any, sink: Any) -> Any:
    """Return the part of the softmax that the keys keep beside a sink; 0 for a row with no allowed key."""
    return jnp.where(logsumexp == float("-inf"), 0.0, 1.0 / (1.0 + jnp.exp2((sink - logsumexp) * LOG2E)))
