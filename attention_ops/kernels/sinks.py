"""Attention sinks, added to a softmax that was taken over the keys alone."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def share_of_keys(logsumexp: Float[Array, "B T H"], sinks: Float[Array, "H n"]) -> Float[Array, "B T H"]:
    """Return the part of the softmax that the keys keep; 0 for a row with no allowed key."""
    return jax.nn.sigmoid(logsumexp - jax.nn.logsumexp(sinks.astype(logsumexp.dtype)[None, None], axis=-1))


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def output_with_sinks(
    output: Float[Array, "B T H Dv"], logsumexp: Float[Array, "B T H"], sinks: Float[Array, "H n"], dtype: Any
) -> Array:
    """Return the attention output with the sinks in the denominator, rounded to `dtype`.

    The derivative by a sink is minus its share of the softmax times the output *as returned*: its gradient is a sum in which much
    cancels, and a caller can only check it against the output in hand.
    """
    return (output * share_of_keys(logsumexp, sinks)[..., None]).astype(dtype)


@output_with_sinks.defjvp
def _output_with_sinks_jvp(dtype: Any, primals: Any, tangents: Any) -> tuple[Array, Array]:
    output, logsumexp, sinks = primals
    d_output, d_logsumexp, d_sinks = tangents
    rounded = output_with_sinks(output, logsumexp, sinks, dtype)
    kept = share_of_keys(logsumexp, sinks)
    sinks, d_sinks = (x.astype(logsumexp.dtype)[None, None] for x in (sinks, d_sinks))
    total = jnp.logaddexp(logsumexp, jax.nn.logsumexp(sinks, axis=-1))
    by_sinks = jnp.sum(jnp.exp(sinks - total[..., None]) * d_sinks, axis=-1)
    tangent = (d_output + output * ((1 - kept) * d_logsumexp)[..., None]) * kept[..., None]
    tangent = tangent - rounded.astype(logsumexp.dtype) * by_sinks[..., None]
    return rounded, tangent.astype(dtype)
