"""Attention with the whole [T, S] logits in memory: the plainest form of the law."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention_ops.kernels.sinks import output_with_sinks, shares
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
    # From the last row to the first: where a mask is causal the later ones see more keys and give less to each, and a gradient
    # of keys and values that is summed from its small terms on is the more exact.
    query, allowed, bias = query[:, ::-1], _rows_reversed(allowed), _rows_reversed(bias)
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

    weights, logsumexp, *anchored = _softmax(logits)
    kept = weights
    if dropout_key is not None:
        keep = jax.random.bernoulli(dropout_key, 1.0 - dropout_probability, weights.shape)[:, :, ::-1]
        kept = jnp.where(keep, weights / (1.0 - dropout_probability), 0.0)
    output = _weighted_sum(kept.reshape(B, K, G, T, S), value).reshape(B, T, H, -1)
    logsumexp, highest, total = (x.swapaxes(1, 2) for x in (logsumexp, *anchored))
    if sinks is None:
        output = output.astype(dtype)
    else:
        weights = weights * shares(highest, total, sinks)[0].swapaxes(1, 2)[..., None]
        output = output_with_sinks(output, highest, total, sinks, dtype)
    if allowed is not None:  # a row that sees nothing has no gradient, whatever its cotangent
        output = jnp.where(highest[..., None] == -jnp.inf, 0, output)
    return DenseOutput(output[:, ::-1], weights[:, :, ::-1], logsumexp[:, ::-1])


def _rows_reversed(x: Array | None) -> Array | None:
    return None if x is None else x[:, :, ::-1]


_LONG, _PART = 1 << 12, 1 << 10


def _weighted_sum(weights: Float[Array, "B K G T S"], value: Float[Array, "B S K Dv"]) -> Float[Array, "B T K G Dv"]:
    """Sum the values by weight. Over many keys in parts, added at the end: one long sum rounds what is small beside it."""
    product, S = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST), value.shape[1]
    if S < _LONG:
        return product("bkgts,bskd->btkgd", weights, value)
    parts = S // _PART
    size = S // parts
    in_parts = product(
        "bkgtns,bnskd->nbtkgd",
        weights[..., : parts * size].reshape(*weights.shape[:-1], parts, size),
        value[:, : parts * size].reshape(value.shape[0], parts, size, *value.shape[2:]),
    )
    rest = product("bkgts,bskd->btkgd", weights[..., parts * size :], value[:, parts * size :])
    return jnp.sum(in_parts, axis=0) + rest


def _softmax(logits: Float[Array, "B H T S"]) -> tuple[Array, Array, Array, Array]:
    """Return the softmax over the last axis, 0 for a row of -inf; and [B, H, T]: logsumexp, highest logit, sum relative to it."""
    highest = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    unnormalised = jnp.exp(logits - jnp.where(highest == -jnp.inf, 0, highest))
    total = jnp.sum(unnormalised, axis=-1, keepdims=True)
    empty = total == 0
    safe = jnp.where(empty, 1, total)
    logsumexp = jnp.where(empty, -jnp.inf, highest + jnp.log(safe))
    return unnormalised / safe, logsumexp[..., 0], highest[..., 0], total[..., 0]
