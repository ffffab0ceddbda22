"""Attention with the whole [T, S] logits in memory: the plainest form of the law."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention_ops.kernels.sinks import output_with_sinks, share_of_keys
from attention_ops.kernels.visibility import visibility, zeroed


class DenseOutput(NamedTuple):
    output: Float[Array, "B T H Dv"]
    weights: Float[Array, "B H T S"]
    logsumexp: Float[Array, "B T H"]


def dense_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K Dv"],
    *,
    allowed: Bool[Array, "b h T S"] | None,
    bias: Float[Array, "bias_B bias_H bias_T bias_S"] | None,
    sinks: Float[Array, "H n"] | None,
    scale: float,
    soft_cap: float | None,
    dropout_probability: float,
    dropout_key: Array | None,
    softmax_dtype: jnp.dtype,
) -> DenseOutput:
    """Return the output in the dtype of the query, softmax and logsumexp in `softmax_dtype`.

    Every product runs in `softmax_dtype` too, at full precision.

    Costs 2 * B * H * T * S * (D + Dv) flops and about three [B, H, T, S] arrays. K and V are not repeated for grouped heads.
    """
    B, T, H, _ = query.shape
    S, K = key.shape[1], key.shape[2]
    G, dtype = H // K, query.dtype
    query, key, value = (x.astype(softmax_dtype) for x in (query, key, value))
    if bias is not None:
        blocked = bias == -jnp.inf
        allowed = ~blocked if allowed is None else allowed & ~blocked
        bias = jnp.where(blocked, 0, bias).astype(softmax_dtype)
    if allowed is not None:
        query, key, value = zeroed(query, key, value, *visibility(allowed, K))

    logits = jnp.einsum("btkgd,bskd->bkgts", query.reshape(B, T, K, G, -1), key, precision=jax.lax.Precision.HIGHEST).reshape(
        B, H, T, S
    )
    logits = logits * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    if bias is not None:
        logits = logits + bias
    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)

    weights, logsumexp = _softmax(logits)
    kept = weights
    if dropout_key is not None:
        keep = jax.random.bernoulli(dropout_key, 1.0 - dropout_probability, weights.shape)
        kept = jnp.where(keep, weights / (1.0 - dropout_probability), 0.0)
    output = jnp.einsum("bkgts,bskd->btkgd", kept.reshape(B, K, G, T, S), value, precision=jax.lax.Precision.HIGHEST).reshape(
        B, T, H, -1
    )
    logsumexp = logsumexp.swapaxes(1, 2)
    if sinks is None:
        return DenseOutput(output.astype(dtype), weights, logsumexp)
    share = share_of_keys(logsumexp, sinks).swapaxes(1, 2)[..., None]
    return DenseOutput(output_with_sinks(output, logsumexp, sinks, dtype), weights * share, logsumexp)


def _softmax(logits: Float[Array, "B H T S"]) -> tuple[Array, Array]:
    """Return softmax and logsumexp over the last axis; 0 and -inf for a row of -inf."""
    highest = jnp.max(logits, axis=-1, keepdims=True)
    highest = jax.lax.stop_gradient(jnp.where(highest == -jnp.inf, 0, highest))
    unnormalised = jnp.exp(logits - highest)
    total = jnp.sum(unnormalised, axis=-1, keepdims=True)
    empty = total == 0
    safe = jnp.where(empty, 1, total)
    return unnormalised / safe, jnp.where(empty, -jnp.inf, highest + jnp.log(safe))[..., 0]
