"""Attention with the whole [T, S] logits in memory: the plainest form of the law."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


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
    """Return output, softmax and logsumexp, all in `softmax_dtype`; every product runs in it too, at full precision.

    Costs 2 * B * H * T * S * (D + Dv) flops and about three [B, H, T, S] arrays. K and V are not repeated for grouped heads.
    """
    B, T, H, _ = query.shape
    S, K = key.shape[1], key.shape[2]
    G = H // K
    query, key, value = (x.astype(softmax_dtype) for x in (query, key, value))
    if bias is not None:
        blocked = bias == -jnp.inf
        allowed = ~blocked if allowed is None else allowed & ~blocked
        bias = jnp.where(blocked, 0, bias).astype(softmax_dtype)
    if allowed is not None:
        query, key, value = _without_unseen(query, key, value, allowed, K)

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

    weights, logsumexp = _softmax(logits, sinks)
    kept = weights
    if dropout_key is not None:
        keep = jax.random.bernoulli(dropout_key, 1.0 - dropout_probability, weights.shape)
        kept = jnp.where(keep, weights / (1.0 - dropout_probability), 0.0)
    output = jnp.einsum("bkgts,bskd->btkgd", kept.reshape(B, K, G, T, S), value, precision=jax.lax.Precision.HIGHEST).reshape(
        B, T, H, -1
    )
    return DenseOutput(output, weights, logsumexp.swapaxes(1, 2))


def _without_unseen(
    query: Array, key: Array, value: Array, allowed: Bool[Array, "b h T S"], K: int
) -> tuple[Array, Array, Array]:
    """Zero the keys no query may attend and the queries that may attend no key: NaN there must reach nothing."""
    b, h = allowed.shape[:2]
    by_kv_head = allowed.reshape(b, K, h // K, *allowed.shape[2:]) if h > 1 else allowed[:, None]
    seen = jnp.any(by_kv_head, axis=(2, 3)).swapaxes(1, 2)[..., None]
    sees = jnp.any(allowed, axis=3).swapaxes(1, 2)[..., None]
    return jnp.where(sees, query, 0), jnp.where(seen, key, 0), jnp.where(seen, value, 0)


def _softmax(logits: Float[Array, "B H T S"], sinks: Float[Array, "H n"] | None) -> tuple[Array, Array]:
    """Return the softmax, with the sinks in its denominator, and the logsumexp without them."""
    highest = jnp.max(logits, axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(logits.dtype)[None, :, None, :]
        highest = jnp.maximum(highest, jnp.max(sinks, axis=-1, keepdims=True))
    highest = jax.lax.stop_gradient(jnp.where(highest == -jnp.inf, 0, highest))
    unnormalised = jnp.exp(logits - highest)
    total = jnp.sum(unnormalised, axis=-1, keepdims=True)
    empty = total == 0
    denominator = total if sinks is None else total + jnp.sum(jnp.exp(sinks - highest), axis=-1, keepdims=True)
    weights = unnormalised / jnp.where(denominator == 0, 1, denominator)
    logsumexp = jnp.where(empty, -jnp.inf, highest + jnp.log(jnp.where(empty, 1, total)))
    return weights, logsumexp[..., 0]
