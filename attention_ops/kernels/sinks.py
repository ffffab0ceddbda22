"""Attention sinks, added to a softmax that was taken over the keys alone."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def shares(
    anchor: Float[Array, "B T H"], total: Float[Array, "*B_T_H"], sinks: Float[Array, "H n"]
) -> tuple[Float[Array, "B T H"], Float[Array, "B T H n"]]:
    """Return the parts of the softmax of the keys and of each sink, where the exponentials of the keys sum to total * e**anchor.

    With the highest logit as anchor both are off by a rounding or two; with the logsumexp, and a total of 1, by what the
    logsumexp was rounded. The keys of a row with no allowed key have none: its anchor is -inf.
    """
    sinks = sinks.astype(anchor.dtype)[None, None]
    highest = jax.lax.stop_gradient(jnp.maximum(anchor, jnp.max(sinks, axis=-1)))
    highest = jnp.where(highest == -jnp.inf, 0, highest)
    of_keys, of_sinks = total * jnp.exp(anchor - highest), jnp.exp(sinks - highest[..., None])
    whole = of_keys + jnp.sum(of_sinks, axis=-1)
    whole = jnp.where(whole == 0, 1, whole)
    return of_keys / whole, of_sinks / whole[..., None]


@functools.partial(jax.custom_jvp, nondiff_argnums=(4,))
def output_with_sinks(
    output: Float[Array, "B T H Dv"],
    anchor: Float[Array, "B T H"],
    total: Float[Array, "*B_T_H"],
    sinks: Float[Array, "H n"],
    dtype: Any,
) -> Array:
    """Return the attention output with the sinks in the denominator, rounded to `dtype`; anchor and total are those of `shares`.

    The derivative by a sink is minus its share of the softmax times the output *as returned*: its gradient is a sum in which much
    cancels, and a caller can only check it against the output in hand.
    """
    return (output * shares(anchor, total, sinks)[0][..., None]).astype(dtype)


@output_with_sinks.defjvp
def _output_with_sinks_jvp(dtype: Any, primals: Any, tangents: Any) -> tuple[Array, Array]:
    output, anchor, total, sinks = primals
    d_output, d_anchor, d_total, d_sinks = tangents
    rounded = output_with_sinks(output, anchor, total, sinks, dtype)
    kept, of_sinks = shares(anchor, total, sinks)
    by_sinks = jnp.sum(of_sinks * d_sinks.astype(anchor.dtype)[None, None], axis=-1)
    by_keys = (1 - kept) * (d_anchor + d_total / jnp.where(total == 0, 1, total))
    tangent = (d_output + output * by_keys[..., None]) * kept[..., None]
    tangent = tangent - rounded.astype(anchor.dtype) * by_sinks[..., None]
    return rounded, tangent.astype(dtype)
