"""Attention on TPU by JAX's splash kernels: `jax.experimental.pallas.ops.tpu.splash_attention`.

The kernels are JAX's, forward and backward; what surrounds them is ours. JAX's own entry point offers no derivative of the
logsumexp, gives some mean of the values for a row with no allowed key, lets NaN behind a mask through, takes lengths that its
blocks divide only, and one schedule for all samples. It leaves the scale to the caller: see `scaled`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attention_ops.kernels.interpreter import is_interpreted
from attention_ops.kernels.sinks import output_with_sinks
from attention_ops.kernels.splash_masks import (
    LANES,
    Layout,
    RuntimePart,
    StaticPart,
    lower,
    runtime_visibility,
    schedule,
    static_tiles,
)
from attention_ops.kernels.visibility import zeroed
from attention_ops.masks import Mask

KERNELS = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel"
_EVERYWHERE = (
    "q",
    "k",
    "v",
    "segment_ids",
    "sinks",
    "is_mqa",
    "mask_value",
    "attn_logits_soft_cap",
    "mask_function",
    "interpret",
)
_BACKWARD = (*_EVERYWHERE, "logsumexp", "do", "di", "bq", "bkv", "mask_info", "q_layout", "k_layout", "v_layout")
PRIVATE = {
    "_splash_attention_forward": (
        *_EVERYWHERE,
        "fwd_mask_info",
        "block_sizes",
        "residual_checkpoint_name",
        "save_residuals",
    ),
    "_splash_attention_bwd_dq": _BACKWARD,
    "_splash_attention_bwd_dkv": (*_BACKWARD, "bkv_compute", "use_fused_bwd_kernel"),
}
"""The functions that are called there, with their parameters. JAX keeps them private, but has no other way to its kernels with a
cotangent of the logsumexp."""

TILE_BYTES = 2 << 20
"""What a tile of logits may take, counted in the dtype of the query, for head dims of 128; less for wider ones in proportion.

The kernels then stay below 16 MiB of vector memory, the default limit of XLA; found by compiling them for TPU v5e.
"""
_HIDDEN = -0.7 * float(np.finfo(np.float32).max)
_TAME = 1e18
"""Numbers below it can be multiplied and summed over a head dim in float32 without overflow."""


class SplashOutput(NamedTuple):
    output: Float[Array, "B T H Dv"]
    logsumexp: Float[Array, "B T H"]


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What is compiled in."""

    static: StaticPart
    soft_cap: float | None
    interpret: bool


def block_sizes(
    T: int, S: int, head_dim: int, itemsize: int, block_q: int | None = None, block_kv: int | None = None
) -> tuple[int, int]:
    """Choose tile sizes, multiples of 128: 512 by 512, less where TILE_BYTES say so, evened out so that little is padding.

    `head_dim` is the widest one in memory, padding included. A size that is given is kept, but no longer than the sequence.
    """
    cells = TILE_BYTES * LANES // (itemsize * head_dim)
    q, kv = block_q or 512, block_kv or 512
    while q * kv > cells and max(q if block_q is None else 0, kv if block_kv is None else 0) > LANES:
        if block_q is None and (q >= kv or block_kv is not None):
            q //= 2
        else:
            kv //= 2
    return (
        _even(T, q) if block_q is None else min(block_q, whole_lanes(T)),
        _even(S, kv) if block_kv is None else min(block_kv, whole_lanes(S)),
    )


def _even(length: int, largest: int) -> int:
    blocks = -(-length // largest)
    return whole_lanes(-(-length // blocks))


def whole_lanes(size: int) -> int:
    return -(-size // LANES) * LANES


def splash_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K Dv"],
    *,
    mask: Mask | None,
    sinks: Float[Array, "H n"] | None,
    scale: float,
    soft_cap: float | None,
    block_q: int | None,
    block_kv: int | None,
) -> SplashOutput:
    """Return the output in the dtype of the query, bfloat16 or float32, and the logsumexp without sinks in float32.

    Differentiable in query, key, value and sinks. Tiles that the mask leaves empty are skipped, forward and backward, by static
    masks and by run-time data. Float32 products run at full precision. K and V are not repeated for grouped heads.
    """
    B, T, H, D = query.shape
    S, Dv, dtype = key.shape[1], value.shape[-1], query.dtype
    split = loses_bits(scale, dtype)
    width = whole_lanes(max(2 * D if split else D, Dv))
    sizes = block_sizes(T, S, width, dtype.itemsize, block_q, block_kv)
    static, runtime = lower(mask, B, T, S, *sizes)
    if mask is not None:
        query, key, value = without_unseen(mask, static.layout, query, key, value)
    query, key = scaled(query, key, scale, split)
    folded = [_fold(x, static, side) for x, side in ((query, 0), (key, 1), (value, 1))]
    settings = _Settings(static, soft_cap, is_interpreted())
    output, logsumexp = _attend(settings, *folded, runtime)  # type: ignore[misc]
    output = _unfold(output, static, B, T, H)[..., :Dv]
    logsumexp = _unfold(logsumexp[..., None], static, B, T, H)[..., 0]
    if sinks is not None:
        output = output_with_sinks(output.astype(jnp.float32), logsumexp, jnp.ones(()), sinks, dtype)
    return SplashOutput(output, logsumexp)


# ---------------------------------------------------------------- arrays for the kernel


def loses_bits(scale: float, dtype: Any) -> bool:
    """Whether a number of `dtype` times the scale is not one of `dtype`: in bfloat16, unless the scale is a power of two."""
    return dtype == jnp.bfloat16 and abs(math.frexp(scale)[0]) not in (0.0, 0.5)


def scaled(query: Array, key: Array, scale: float, split: bool) -> tuple[Array, Array]:
    """Return queries and keys whose product is the scaled one.

    The kernel multiplies what it gets, so the scale goes into the query. Where that would round every element, what was rounded
    off is carried in a second part of the head dim (`split`). Head dims 16, 64 and 256 have scales that round nothing; for 128
    give a `softmax_scale` that is a power of two, the rest multiplied into the weights of the query, to save the second part.
    """
    exact = query.astype(jnp.float32) * scale
    rounded = exact.astype(query.dtype)
    if not split:
        return rounded, key
    rest = (exact - rounded.astype(jnp.float32)).astype(query.dtype)
    return jnp.concatenate([rounded, rest], -1), jnp.concatenate([key, key], -1)


def _fold(x: Array, static: StaticPart, side: int) -> Array:
    """[B, n, heads, d] to [heads, B * padded n, padded d], or [B * heads, padded n, padded d] if batch rows are heads."""
    B, n, heads, d = x.shape
    size = static.layout.padded[side]
    x = jnp.pad(x, ((0, 0), (0, size - n), (0, 0), (0, whole_lanes(d) - d)))
    if static.layout.folded:
        return x.transpose(0, 2, 1, 3).reshape(B * heads, size, -1)
    return x.transpose(2, 0, 1, 3).reshape(heads, B * size, -1)


def _unfold(x: Array, static: StaticPart, B: int, T: int, H: int) -> Array:
    """The reverse of `_fold`, for queries; the head dim stays padded."""
    if static.layout.folded:
        return x.reshape(B, H, -1, x.shape[-1]).transpose(0, 2, 1, 3)[:, :T]
    return x.reshape(H, B, -1, x.shape[-1]).transpose(1, 2, 0, 3)[:, :T]


def without_unseen(mask: Mask, layout: Layout, query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """Zero the queries that see no key and the keys and values that nothing sees, as the kernel multiplies them by 0.

    Of run-time data, finding them takes as many boolean operations as the mask has cells, though never a [T, S] array. That is
    only done where something that could leak is there: NaN, Inf or huge numbers.
    """
    (B, T, H, _), (S, K) = query.shape, key.shape[1:3]
    if mask.is_static:
        planned = static_tiles(mask, layout)
        if planned.sees.all() and planned.seen.all():
            return query, key, value
        return zeroed(query, key, value, *_by_head(jnp.asarray(planned.sees), jnp.asarray(planned.seen), K))
    arrays = [jax.lax.stop_gradient(x) for x in (query, key, value)]
    tame = functools.reduce(jnp.logical_and, (jnp.max(jnp.abs(x.astype(jnp.float32))) < _TAME for x in arrays))
    look = functools.partial(runtime_visibility, mask, B, H, T, S, LANES)
    everything = tuple(jnp.ones(x.shape, bool) for x in jax.eval_shape(look))
    sees, seen = jax.lax.cond(tame, lambda: everything, look)
    return zeroed(query, key, value, *_by_head(sees, seen, K))


def _by_head(sees: Array, seen: Array, K: int) -> tuple[Array, Array]:
    """[b, h, T] to [b, T, h, 1]; [b, h, S] to [b, S, K|1, 1]."""
    b, h, S = seen.shape
    if h > 1:
        seen = seen.reshape(b, K, h // K, S).any(2)
    return sees.swapaxes(1, 2)[..., None], seen.swapaxes(1, 2)[..., None]


# ---------------------------------------------------------------- the kernels


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(settings: _Settings, query: Any, key: Any, value: Any, runtime: Any) -> Any:
    """Return output [H, rows, Dv] and logsumexp [H, rows] of folded arrays; 0 and -inf for a row with no allowed key."""
    return _attend_fwd(settings, query, key, value, runtime)[0]


def _attend_fwd(settings: _Settings, query: Any, key: Any, value: Any, runtime: RuntimePart) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    layout = settings.static.layout
    with tracing(query.dtype):
        output, (logsumexp,) = kernels._splash_attention_forward(
            _mask_info(settings, runtime, transposed=False),
            query,
            key,
            value,
            _ids(runtime),
            None,
            mask_value=_HIDDEN,
            is_mqa=False,
            block_sizes=kernels.BlockSizes(layout.block_q, layout.block_kv),
            residual_checkpoint_name=None,
            save_residuals=True,
            mask_function=settings.static.function,
            attn_logits_soft_cap=settings.soft_cap,
            interpret=settings.interpret,
        )
    empty = logsumexp < _HIDDEN / 2
    output = jnp.where(empty[..., None], 0, output)
    logsumexp = jnp.where(empty, -jnp.inf, logsumexp)
    return (output, logsumexp), (query, key, value, runtime, output, logsumexp)


def _attend_bwd(settings: _Settings, residuals: Any, cotangents: Any) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    query, key, value, runtime, output, logsumexp = residuals
    d_output, d_logsumexp = cotangents
    empty = logsumexp == -jnp.inf
    d_output = jnp.where(empty[..., None], 0, d_output)
    delta = jnp.sum(output.astype(jnp.float32) * d_output.astype(jnp.float32), -1) - jnp.where(empty, 0, d_logsumexp)
    layout, layouts = settings.static.layout, kernels.QKVLayout.HEAD_DIM_MINOR
    anchor = jnp.where(empty, jnp.inf, logsumexp)
    arrays = (query, key, value, _ids(runtime), None, anchor, d_output, delta)
    options = {
        "bq": layout.block_q,
        "bkv": layout.block_kv,
        "is_mqa": False,
        "mask_value": _HIDDEN,
        "attn_logits_soft_cap": settings.soft_cap,
        "q_layout": layouts,
        "k_layout": layouts,
        "v_layout": layouts,
        "mask_function": settings.static.function,
        "interpret": settings.interpret,
    }
    with tracing(query.dtype):
        d_query = kernels._splash_attention_bwd_dq(*arrays, mask_info=_mask_info(settings, runtime, transposed=False), **options)
        _, d_key, d_value = kernels._splash_attention_bwd_dkv(
            *arrays,
            bkv_compute=layout.block_kv,
            use_fused_bwd_kernel=False,
            mask_info=_mask_info(settings, runtime, transposed=True),
            **options,
        )
    return d_query, d_key, d_value, None


_attend.defvjp(_attend_fwd, _attend_bwd)


@contextlib.contextmanager
def tracing(dtype: Any) -> Iterator[None]:
    """Trace a kernel of JAX inside.

    Products run at full precision in float32; the matrix unit has no other for bfloat16, which it takes as it is. Python integers
    are 32 bits wide, as the kernels expect, under JAX_ENABLE_X64 too.
    """
    precision = "highest" if dtype == jnp.float32 else "default"
    with jax.default_matmul_precision(precision), jax.enable_x64(False):
        yield


def _mask_info(settings: _Settings, runtime: RuntimePart, transposed: bool) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as infos

    plan = schedule(settings.static, runtime, transposed)
    data, block, mask, tiles = (None if x is None else jnp.asarray(x) for x in plan)
    return infos.MaskInfo(data, mask, block, tiles, runtime.numbers)


def _ids(runtime: RuntimePart) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    return None if runtime.q_ids is None else kernels.SegmentIds(runtime.q_ids, runtime.kv_ids)
