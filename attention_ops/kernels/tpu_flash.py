"""Flash attention on TPU: JAX's kernels, `jax.experimental.pallas.ops.tpu.flash_attention`, and ejkernel's for windows.

JAX's add a bias, which splash's cannot, and know segment ids and the causal triangle. They add it before they scale, take lengths
that their blocks divide only and one head of keys per head of queries, and give some mean of the values for a row with no
allowed key. What surrounds them makes up for that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attention_ops.kernels.interpreter import is_interpreted
from attention_ops.kernels.sinks import output_with_sinks
from attention_ops.kernels.splash import block_sizes, loses_bits, scaled, tracing, whole_lanes, without_unseen
from attention_ops.kernels.splash_masks import Layout, segment_ids
from attention_ops.kernels.visibility import visibility, zeroed
from attention_ops.masks import Causal, Mask, Window

KERNELS = "jax.experimental.pallas.ops.tpu.flash_attention"
_EVERYWHERE = ("q", "k", "v", "ab", "segment_ids", "causal", "sm_scale", "block_k_major", "block_k", "debug")
_BACKWARD = (*_EVERYWHERE, "l", "m", "do", "di", "block_q_major", "mask_value")
PRIVATE = {
    "_flash_attention_impl": (*_EVERYWHERE, "save_residuals", "block_b", "block_q"),
    "_flash_attention_bwd_dq": _BACKWARD,
    "_flash_attention_bwd_dkv": (*_BACKWARD, "block_q"),
}
"""The functions that are called there, with their parameters: private, for the cotangent of the logsumexp, as in `splash`."""

TILE_BYTES = 1 << 20
"""What a tile of float32 may take, for head dims of 128 and less for wider ones: see `splash.TILE_BYTES`. A bias, its gradient
and the logits are such tiles."""
_HIDDEN = float(np.finfo(np.float32).min)
_LOWEST = -3.395e38
"""A bias below it counts as this: lower than what bfloat16 and float32 masks made of finite numbers hold, above `_HIDDEN`."""
_EMPTY = -1e38
"""Where JAX's kernel hides a key it adds -2.4e38; the logsumexp of a row without others is below this."""


class FlashOutput(NamedTuple):
    output: Float[Array, "B T H Dv"]
    logsumexp: Float[Array, "B T H"]


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What is compiled in."""

    causal: bool
    scale: float
    block_q: int
    block_kv: int
    interpret: bool

    @contextlib.contextmanager
    def tracing(self, dtype: Any) -> Iterator[None]:
        """Trace kernels inside that have no argument for the interpreter: `splash.tracing`, and for the interpreter if so set."""
        from jax.experimental.pallas import tpu

        plain: Any = True  # the interpreter that vmaps, as with pallas_call(interpret=True)
        with tracing(dtype), tpu.force_tpu_interpret_mode(plain) if self.interpret else contextlib.nullcontext():
            yield


def flash_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K Dv"],
    *,
    mask: Mask | None,
    bias: Float[Array, "b h t s"] | None,
    sinks: Float[Array, "H n"] | None,
    scale: float,
    block_q: int | None,
    block_kv: int | None,
) -> FlashOutput:
    """Return the output in the dtype of the query, bfloat16 or float32, and the logsumexp without sinks in float32.

    With a bias any mask is taken, and both become one float32 array [B, H, T, S]. Without, a mask is a conjunction of
    `Causal(0)`, lengths and one pair of segment ids, K is H, and no such array exists. Differentiable in all but the mask.
    """
    B, T, H, D = query.shape
    (S, K), Dv, dtype = key.shape[1:3], value.shape[-1], query.dtype
    split = bias is not None and loses_bits(scale, dtype)
    width = whole_lanes(max(2 * D if split else D, Dv))
    block_q, block_kv = block_sizes(T, S, width, 4 if bias is not None else dtype.itemsize, block_q, block_kv)
    layout = Layout(B, T, S, block_q, block_kv, folded=False)
    parts = () if mask is None else mask.conjuncts()
    logits_bias = ids = sees = None
    if bias is not None:
        allowed = bias != -jnp.inf if mask is None else (bias != -jnp.inf) & mask.dense(T, S)
        allowed = jnp.broadcast_to(allowed, (*allowed.shape[:2], T, S))
        sees, seen = visibility(allowed, K)
        query, key = scaled(*(x := zeroed(query, key, value, sees, seen))[:2], scale, split)
        value, scale = x[2], 1.0
        logits_bias = _grouped(_logits_bias(allowed, bias, layout, B, H), K)
        sees = _grouped(_padded(jnp.broadcast_to(sees, (B, T, H, 1)), layout.padded[0]).swapaxes(1, 2), K)[..., 0]
    else:
        if mask is not None:
            query, key, value = without_unseen(mask, layout, query, key, value)
        ids = _ids([part for part in parts if not isinstance(part, Causal)], layout)
    causal = bias is None and any(isinstance(part, Causal) for part in parts)
    folded = [
        _padded(x, n, width).swapaxes(1, 2)
        for x, n in zip((query, key, value), (layout.padded[0], *layout.padded[1:] * 2), strict=True)
    ]
    settings = _Settings(causal, scale, block_q, block_kv, is_interpreted())
    output, logsumexp = _attend(settings, _grouped(folded[0], K), *folded[1:], logits_bias, ids, sees)  # type: ignore[misc]
    output = output.reshape(B, H, -1, width).swapaxes(1, 2)[:, :T, :, :Dv]
    logsumexp = logsumexp.reshape(B, H, -1).swapaxes(1, 2)[:, :T]
    if sinks is not None:
        output = output_with_sinks(output.astype(jnp.float32), logsumexp, jnp.ones(()), sinks, dtype)
    return FlashOutput(output, logsumexp)


def _padded(x: Array, length: int, width: int | None = None) -> Array:
    """[B, n, heads, d] with n grown to `length`, and d to `width`."""
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, (width or x.shape[3]) - x.shape[3])))


def _grouped(x: Array, K: int) -> Array:
    """[B, H, rows, d] to [B, K, groups * rows, d]: the query heads of one key head under each other."""
    return x.reshape(x.shape[0], K, -1, x.shape[3])


def _logits_bias(allowed: Array, bias: Array, layout: Layout, B: int, H: int) -> Array:
    """Return one float32 array [B, H, padded T, padded S] of bias and mask."""
    joined = jnp.where(allowed, jnp.maximum(bias.astype(jnp.float32), _LOWEST), _HIDDEN)
    joined = jnp.broadcast_to(joined, (B, H, layout.T, layout.S))
    widths = [(0, 0), (0, 0), (0, layout.padded[0] - layout.T), (0, layout.padded[1] - layout.S)]
    return jnp.pad(joined, widths, constant_values=_HIDDEN)


def _ids(parts: list[Mask], layout: Layout) -> Any:
    """Return segment ids for lengths, segments and the padding of the keys; None where there is nothing to say."""
    from jax.experimental.pallas.ops.tpu import flash_attention as kernels

    if not parts and layout.padded[1] == layout.S:
        return None
    q, kv = segment_ids(parts, layout)
    return kernels.SegmentIds(q.reshape(layout.samples, -1), kv.reshape(layout.samples, -1))


# ---------------------------------------------------------------- JAX's kernels


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(settings: _Settings, query: Any, key: Any, value: Any, bias: Any, ids: Any, sees: Any) -> Any:
    """Return output [B, heads, rows, d] and logsumexp [B, heads, rows]; 0 and -inf for a row with no allowed key."""
    return _attend_fwd(settings, query, key, value, bias, ids, sees)[0]


def _attend_fwd(settings: _Settings, query: Any, key: Any, value: Any, bias: Any, ids: Any, sees: Any) -> Any:
    from jax.experimental.pallas.ops.tpu import flash_attention as kernels

    with settings.tracing(query.dtype):
        output, total, highest = kernels._flash_attention_impl(
            query,
            key,
            value,
            bias,
            ids,
            save_residuals=True,
            causal=settings.causal,
            sm_scale=settings.scale,
            block_b=1,
            block_q=settings.block_q,
            block_k_major=settings.block_kv,
            block_k=settings.block_kv,
            debug=False,
        )
    logsumexp = highest + jnp.log(total)
    empty = logsumexp < _EMPTY if sees is None else ~sees
    output = jnp.where(empty[..., None], 0, output)
    residuals = query, key, value, bias, ids, empty, output, total, highest
    return (output, jnp.where(empty, -jnp.inf, logsumexp)), residuals


def _attend_bwd(settings: _Settings, residuals: Any, cotangents: Any) -> Any:
    from jax.experimental.pallas.ops.tpu import flash_attention as kernels

    query, key, value, bias, ids, empty, output, total, highest = residuals
    d_output, d_logsumexp = cotangents
    d_output = jnp.where(empty[..., None], 0, d_output)
    delta = jnp.sum(output.astype(jnp.float32) * d_output.astype(jnp.float32), -1) - jnp.where(empty, 0, d_logsumexp)
    arrays = (query, key, value, bias, ids, total, highest, d_output, delta)
    options = {
        "block_q_major": settings.block_q,
        "block_k_major": settings.block_kv,
        "block_k": settings.block_kv,
        "sm_scale": settings.scale,
        "causal": settings.causal,
        "mask_value": kernels.DEFAULT_MASK_VALUE,
        "debug": False,
    }
    with settings.tracing(query.dtype):
        d_key, d_value = kernels._flash_attention_bwd_dkv(*arrays, block_q=settings.block_q, **options)
        d_query, d_bias = kernels._flash_attention_bwd_dq(*arrays, **options)
    return d_query, d_key, d_value, d_bias, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


# ---------------------------------------------------------------- ejkernel's


def window_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T H D"],
    value: Float[Array, "B T H D"],
    *,
    mask: Mask,
    scale: float,
    block_q: int | None,
    block_kv: int | None,
) -> Float[Array, "B T H D"]:
    """Return the output under causal masks and windows from offset 0, by ejkernel's kernels, which skip what they hide.

    They return no logsumexp, so no row may be empty: queries and keys are as many.
    """
    T, D, width = query.shape[1], query.shape[3], whole_lanes(query.shape[3])
    block = min(block_sizes(T, T, width, query.dtype.itemsize, block_q, block_kv))
    layout = Layout(query.shape[0], T, T, block, block, folded=False)
    left = right = T
    for part in mask.conjuncts():
        if isinstance(part, Window):
            left = left if part.left is None else min(left, part.left)
            right = right if part.right is None else min(right, part.right)
        else:
            right = 0
    settings = _Settings(right == 0, scale, block, block, is_interpreted())
    padded = [_padded(x, layout.padded[0], width) for x in (query, key, value)]
    return _attend_window(settings, (left, right), *padded, segment_ids([], layout))[:, :T, :, :D]  # type: ignore[misc]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend_window(settings: _Settings, window: tuple[int, int], query: Any, key: Any, value: Any, ids: Any) -> Any:
    return _attend_window_fwd(settings, window, query, key, value, ids)[0]


def _attend_window_fwd(settings: _Settings, window: tuple[int, int], query: Any, key: Any, value: Any, ids: Any) -> Any:
    from ejkernel.kernels._pallas.tpu.flash_attention import flash_attention as kernel
    from ejkernel.ops import BwdParams, FwdParams

    blocks = {"q_blocksize": settings.block_q, "kv_blocksize": settings.block_kv, "num_stages": 2, "num_warps": 4}
    q_ids, kv_ids = (x.reshape(query.shape[0], -1) for x in ids)
    run = functools.partial(
        kernel,
        causal=settings.causal,
        sliding_window=window,
        softmax_scale=settings.scale,
        q_segment_ids=q_ids,
        kv_segment_ids=kv_ids,
        fwd_params=FwdParams(**blocks),
        bwd_params=BwdParams(**blocks),
    )
    with settings.tracing(query.dtype):
        return jax.vjp(run, query, key, value)


def _attend_window_bwd(settings: _Settings, window: tuple[int, int], pull_back: Any, d_output: Any) -> Any:
    with settings.tracing(d_output.dtype):
        return *pull_back(d_output), None


_attend_window.defvjp(_attend_window_fwd, _attend_window_bwd)
