"""Attention whose keys lie in parts on the devices of a mesh axis: parts that travel in a ring, or results that are merged.

Both run any route on one part at a time and put the results together by their logsumexp, so they need nothing of the route
but that it returns one. All functions run inside `jax.shard_map`, on local arrays.

Sources: Liu et al. 2023 (ring attention), Milakov and Gimelshein 2018 (merging by the logsumexp).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention_ops.masks import Mask, Tiling, starts_within

Axes = tuple[str, ...]
NEG_INF = float("-inf")


class Found(NamedTuple):
    """What a route returns for one part of the keys."""

    output: Float[Array, "B T H Dv"]
    logsumexp: Float[Array, "B T H"]


Attend = Callable[[Any, Any, Any, Mask | None, Any], Found]
"""(query, key, value, mask, bias) of one part to its result; the gradient is that of the route."""


def bias_part(bias: Any, row: Any, T: int, col: Any, S: int) -> Any:
    """Return [b, h, T or 1, S or 1] of a bias."""
    if bias is None:
        return None
    sizes = (*bias.shape[:2], *(min(n, size) for n, size in zip(bias.shape[2:], (T, S), strict=True)))
    return jax.lax.dynamic_slice(bias, starts_within(bias.shape, (0, 0, row, col)), sizes)


def merged(attend: Attend, axes: Axes, query: Any, key: Any, value: Any, mask: Mask | None, bias: Any) -> Found:
    """Attend the local part of the keys with all queries, and merge over the axes: one all-gather of the logsumexp, one sum."""
    T, S = query.shape[1], key.shape[1]
    col = jax.lax.axis_index(axes) * S
    part = None if mask is None else mask.cut(0, T, col, S)
    found = attend(query, key, value, part, bias_part(bias, 0, T, col, S))
    logsumexp = jax.nn.logsumexp(jax.lax.all_gather(found.logsumexp, axes), axis=0)
    share = _share(found.logsumexp, logsumexp)
    output = jax.lax.psum(found.output.astype(share.dtype) * share[..., None], axes)
    return Found(output.astype(found.output.dtype), logsumexp)


def _share(part: Array, whole: Array) -> Array:
    """Return the share of a part in the softmax: 0 where the part has no key."""
    return jnp.where(part == NEG_INF, 0.0, jnp.exp(part - jnp.where(whole == NEG_INF, 0.0, whole)))


# ---------------------------------------------------------------- ring


class _Ring(NamedTuple):
    attend: Attend
    axes: Axes
    devices: int

    def at(self, query: Any, key: Any) -> tuple[int, int, Any]:
        """Return the local lengths and which part of the queries is here."""
        return query.shape[1], key.shape[1], jax.lax.axis_index(self.axes)

    def passed_on(self, x: Any) -> Any:
        """Give every device what the one before it had."""
        steps = [(device, (device + 1) % self.devices) for device in range(self.devices)]
        return jax.tree_util.tree_map(lambda x: jax.lax.ppermute(x, self.axes, steps), x)


def ring(attend: Attend, axes: Axes, query: Any, key: Any, value: Any, mask: Mask | None, bias: Any) -> Found:
    """Attend all keys with the local queries while the parts of the keys go round: memory of one part, n - 1 hops.

    Parts that the mask hides from all local queries are passed on without being attended. The backward goes round too and
    attends every part again, so a call keeps no more than its inputs, its output and the logsumexp.
    """
    return Found(*_ring(_Ring(attend, axes, jax.lax.axis_size(axes)), query, key, value, mask, bias))  # type: ignore[misc]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: _Ring, query: Any, key: Any, value: Any, mask: Any, bias: Any) -> Any:
    return _forward(ring, query, key, value, mask, bias)


def _part(ring: _Ring, query: Any, key: Any, mask: Mask | None, source: Any) -> tuple[Mask | None, Any]:
    """Return the mask of the part of the keys that began on device `source`, and whether it shows anything."""
    T, S, here = ring.at(query, key)
    if mask is None:
        return None, True
    part = mask.cut(here * T, T, source * S, S)
    may, _ = part.bounds(Tiling(T, S, T, S), jnp)
    return part, jnp.any(jnp.asarray(may))


def _attended(ring: _Ring, query: Any, key: Any, value: Any, part: Mask | None, bias: Any, source: Any) -> Found:
    T, S, here = ring.at(query, key)
    return ring.attend(query, key, value, part, bias_part(bias, here * T, T, source * S, S))


def _forward(ring: _Ring, query: Any, key: Any, value: Any, mask: Any, bias: Any) -> tuple[Array, Array]:
    here = jax.lax.axis_index(ring.axes)

    def attend(state: Any, key: Any, value: Any, source: Any) -> Any:
        part, visible = _part(ring, query, key, mask, source)

        def seen() -> Any:
            output, logsumexp = state
            found = _attended(ring, query, key, value, part, bias, source)
            whole = jnp.logaddexp(logsumexp, found.logsumexp)
            new = found.output.astype(output.dtype) * _share(found.logsumexp, whole)[..., None]
            return output * _share(logsumexp, whole)[..., None] + new, whole

        return seen() if visible is True else jax.lax.cond(visible, seen, lambda: state)

    def hop(carry: Any, step: Any) -> Any:
        state, key, value = carry
        following = ring.passed_on((key, value))  # before the part is attended, so that it travels meanwhile
        state = attend(state, key, value, (here - step) % ring.devices)
        return (state, *following), None

    shapes = jax.eval_shape(lambda: _attended(ring, query, key, value, _part(ring, query, key, mask, here)[0], bias, here))
    dtype, whole = shapes.logsumexp.dtype, shapes.logsumexp.shape
    state = jnp.zeros(shapes.output.shape, dtype), jnp.full(whole, NEG_INF, dtype)
    (state, key, value), _ = jax.lax.scan(hop, (state, key, value), jnp.arange(ring.devices - 1, dtype=jnp.int32))
    output, logsumexp = attend(state, key, value, (here + 1) % ring.devices)
    return output.astype(shapes.output.dtype), logsumexp


def _ring_fwd(ring: _Ring, query: Any, key: Any, value: Any, mask: Any, bias: Any) -> Any:
    output, logsumexp = _forward(ring, query, key, value, mask, bias)
    return (output, logsumexp), (query, key, value, mask, bias, output, logsumexp)


def _ring_bwd(ring: _Ring, residuals: Any, cotangents: Any) -> Any:
    query, key, value, mask, bias, output, logsumexp = residuals
    d_output, d_logsumexp = cotangents
    dtype = logsumexp.dtype
    here = jax.lax.axis_index(ring.axes)
    d_output = d_output.astype(dtype)
    through_sum = jnp.sum(d_output * output.astype(dtype), axis=-1) - d_logsumexp

    def add(gradients: Any, key: Any, value: Any, source: Any) -> Any:
        part, visible = _part(ring, query, key, mask, source)

        def seen() -> Any:
            run = functools.partial(_attended, ring, part=part, source=source)
            found, pull_back = jax.vjp(lambda q, k, v, b: run(q, k, v, bias=b), query, key, value, bias)
            share = _share(found.logsumexp, logsumexp)
            of_output = jnp.where(share[..., None] == 0, 0, d_output * share[..., None])
            own = jnp.sum(of_output * found.output.astype(dtype), axis=-1)
            of_logsumexp = jnp.where(share == 0, 0, own - share * through_sum)
            new = pull_back(Found(of_output.astype(found.output.dtype), of_logsumexp))
            return jax.tree_util.tree_map(lambda old, new: old + new.astype(old.dtype), gradients, new)

        return seen() if visible is True else jax.lax.cond(visible, seen, lambda: gradients)

    def hop(carry: Any, step: Any) -> Any:
        (d_query, d_key, d_value, d_bias), key, value = carry
        following = ring.passed_on((key, value))
        d_query, d_key, d_value, d_bias = add((d_query, d_key, d_value, d_bias), key, value, (here - step) % ring.devices)
        d_key, d_value = ring.passed_on((d_key, d_value))
        return ((d_query, d_key, d_value, d_bias), *following), None

    start = jax.tree_util.tree_map(lambda x: jnp.zeros(x.shape, dtype), (query, key, value, bias))
    steps = jnp.arange(ring.devices, dtype=jnp.int32)
    (gradients, _, _), _ = jax.lax.scan(hop, (start, key, value), steps)
    gradients = jax.tree_util.tree_map(lambda x, like: x.astype(like.dtype), gradients, (query, key, value, bias))
    d_query, d_key, d_value, d_bias = gradients
    return d_query, d_key, d_value, None, d_bias


_ring.defvjp(_ring_fwd, _ring_bwd)
