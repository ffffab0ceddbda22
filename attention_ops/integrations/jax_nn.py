"""`dot_product_attention` with the signature of `jax.nn.dot_product_attention`, its implementation chosen by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attention_ops.api import attention
from attention_ops.arrays import array_of
from attention_ops.integrations.binding import array, broadcasting, named, renamed, with_scale

CUDNN = "cudnn_flash/cuda"
"""What "cudnn" alone means: the cuDNN route or an error, as in jax.nn. The name "cudnn_flash" falls back."""

_NAMES = {
    "softmax_scale": "scale",
    "causal": "is_causal",
    "q_lengths": "query_seq_lengths",
    "kv_lengths": "key_value_seq_lengths",
    "sliding_window": "local_window_size",
    "return_logsumexp": "return_residual",
}
"""Options here, and what jax.nn calls them."""


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | Sequence[str] | None = None,
    return_residual: bool = False,
) -> Float[Array, "*B T N H"] | tuple[Float[Array, "*B T N H"], Float[Array, "*B T N"]]:
    """Attention with the arguments of `jax.nn.dot_product_attention`. See docs/from_jax_nn.md for where answers differ.

    Args:
        query: [B, T, N, H], or [T, N, H].
        key, value: [B, S, K, H], or [S, K, H]; K divides N. The value may have a head dim of its own.
        bias, mask: broadcast to [B, N, T, S] from the right: [N, T, S], [T, S] and [S] are taken too.
        scale: default H ** -0.5. May be traced; it is then multiplied into the query.
        is_causal: row i attends columns 0 to i, also where T and S differ (top-left).
        query_seq_lengths, key_value_seq_lengths: integers [B].
        local_window_size: (left, right) keys around column i for row i, itself not counted; an int is both.
        implementation: None (what `attention` would choose), "xla", "cudnn" (that kernel or an error), any operation's name, or
            a sequence of names tried in order.
        return_residual: also return the logsumexp, [B, T, N] or [T, N], in the dtype of the key.

    Raises:
        TypeError, ValueError: the call itself is wrong.
        UnknownOperationError: no operation has that name.
        NoRouteError: the implementation cannot take the call; every reason is given.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((4, 2, 8))
    >>> dot_product_attention(x, x, x, is_causal=True, implementation="flash").shape
    (4, 2, 8)
    """
    if implementation is not None:
        named(implementation)
    given = array("query", query)
    query, scale = with_scale(_batched("query", given), scale)
    key, value = _batched("key", key), _batched("value", value)
    B, T, N, _ = query.shape
    logits = B, N, T, key.shape[1]
    with renamed(_NAMES):
        out = attention(
            query,
            key,
            value,
            impl=CUDNN if implementation == "cudnn" else implementation,
            bias=None if bias is None else broadcasting("bias", _bias(bias), logits),
            mask=None if mask is None else broadcasting("mask", array("mask", mask), logits),
            softmax_scale=scale,
            causal=is_causal,
            query_offset=0,
            q_lengths=query_seq_lengths,
            kv_lengths=key_value_seq_lengths,
            sliding_window=local_window_size,
            return_logsumexp=return_residual,
        )
    output = out.attention_outputs.reshape(*given.shape[:-1], value.shape[-1])
    if out.logsumexp is None:
        return output
    return output, out.logsumexp.reshape(given.shape[:-1]).astype(key.dtype)


def _batched(name: str, value: Any) -> Array:
    value = array(name, value)
    if value.ndim == 4:
        return value
    if value.ndim == 3:
        return value[None]
    raise ValueError(f"{name} has shape {tuple(value.shape)}; allowed are [batch, length, heads, dim] and [length, heads, dim]")


def _bias(bias: Any) -> Array:
    """Return the bias as floats: jax.nn adds integers too."""
    bias = array_of("bias", bias)  # not yet one of JAX, which would truncate integers of 64 bits
    return array("bias", bias.astype(np.float32) if jnp.issubdtype(bias.dtype, jnp.integer) else bias)
