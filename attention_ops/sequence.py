"""Attention whose keys lie in parts on the devices of a mesh axis: parts that travel in a ring, or results that are merged.

Both run any route on one part at a time and put the results together by their logsumexp, so they need nothing of the route
but that it returns one. All functions run inside `jax.shard_map`, on local arrays. A bias and the arrays of dense masks have the
rows of the local queries; of the keys they have all columns in a ring, else those of the local keys.

Sources: Liu et al. 2023 (ring attention), Milakov and Gimelshein 2018 (merging by the logsumexp).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention_ops.masks import Dense, Mask, Tiling, starts_within

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
    part = None if mask is None else mask.cut(0, T, col, S, in_arrays=(0, 0))
    found = attend(query, key, value, part, bias)
    logsumexp = jax.nn.logsumexp(jax.lax.all_gather(found.logsumexp, axes), axis=0)
    share = _share(found.logsumexp, logsumexp)
    output = jax.lax.psum(found.output.astype(share.dtype) * share[..., None], axes)
    return Found(output.astype(found.output.dtype), logsumexp)


def _share(part: Array, whole: Array) -> Array:
    """Return the share of a part in the softmax: 0 where the part has no key."""
    return jnp.where(part == NEG_INF, 0.0, jnp.exp(part - jnp.where(whole == NEG_INF, 0.0, whole)))


# ---------------------------------------------------------------- ring


class _Ring(NamedTuple):
    """A ring, and where the pieces of a device's part of the sequence stand: one after the other, or one from each end.

    In zigzag order device i of n has piece i and piece 2n - 1 - i, so that under a causal mask all have the same to do.
    """

    attend: Attend
    axes: Axes
    devices: int
    zigzag: bool

    @property
    def pieces(self) -> int:
        return 2 if self.zigzag else 1

    def starts(self, device: Any, length: int) -> tuple[Any, ...]:
        """Return the positions at which the pieces of a device begin, each of `length`."""
        last = 2 * self.devices - 1 - device
        return (device * length, last * length) if self.zigzag else (device * length,)

    def passed_on(self, x: Any) -> Any:
        """Give every device what the one before it had."""
        steps = [(device, (device + 1) % self.devices) for device in range(self.devices)]
        return jax.tree_util.tree_map(lambda x: jax.lax.ppermute(x, self.axes, steps), x)

    def into_order(self, x: Array, axis: int = 1) -> Array:
        """Take an axis from positions in order to the order of the ring: two permutes of half a part each."""
        if not self.zigzag:
            return x
        even, odd = (jax.lax.ppermute(half, self.axes, self._moves(n)) for n, half in enumerate(jnp.split(x, 2, axis)))
        return self._swapped(even, odd, axis)

    def rows_into_order(self, x: Any) -> Any:
        """Do that with the rows of [b, h, T or 1, S or 1]."""
        return x if x.shape[2] == 1 else self.into_order(x, axis=2)

    def out_of_order(self, x: Array) -> Array:
        """Undo `into_order`."""
        if not self.zigzag:
            return x
        swapped = self._swapped(*jnp.split(x, 2, axis=1), axis=1)
        halves = (
            jax.lax.ppermute(half, self.axes, [(b, a) for a, b in self._moves(n)])
            for n, half in enumerate(jnp.split(swapped, 2, axis=1))
        )
        return jnp.concatenate(tuple(halves), axis=1)

    def _moves(self, half: int) -> list[tuple[int, int]]:
        """Return where the first (0) or second (1) half of every device goes. Pieces of one half all go to different devices."""
        pieces = [2 * device + half for device in range(self.devices)]
        return [(n, piece if piece < self.devices else 2 * self.devices - 1 - piece) for n, piece in enumerate(pieces)]

    def _swapped(self, a: Array, b: Array, axis: int) -> Array:
        """Join two pieces, on devices of an odd number the second before the first."""
        is_odd = jax.lax.axis_index(self.axes) % 2 == 1
        return jnp.concatenate((jnp.where(is_odd, b, a), jnp.where(is_odd, a, b)), axis)


def ring(attend: Attend, axes: Axes, query: Any, key: Any, value: Any, mask: Mask | None, bias: Any, *, zigzag: bool) -> Found:
    """Attend all keys with the local queries while the parts of the keys go round: memory of one part, n - 1 hops.

    Pieces that the mask hides from all local queries are passed on without being attended. The backward goes round too and
    attends every piece again, so a call keeps no more than its inputs, its output and the logsumexp. `zigzag` attends in an
    order that gives all devices the same work under a causal mask; the arrays come and go with positions in order.
    """
    ring = _Ring(attend, axes, jax.lax.axis_size(axes), zigzag)
    query, key, value = (ring.into_order(x) for x in (query, key, value))
    bias = None if bias is None else ring.rows_into_order(bias)
    if mask is not None:
        mask = mask.map_leaves(
            lambda leaf: Dense(ring.rows_into_order(leaf.array)) if isinstance(leaf, Dense) and not leaf.is_static else leaf
        )
    output, logsumexp = _ring(ring, query, key, value, mask, bias)  # type: ignore[misc]
    return Found(ring.out_of_order(output), ring.out_of_order(logsumexp))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: _Ring, query: Any, key: Any, value: Any, mask: Any, bias: Any) -> Any:
    return _forward(ring, query, key, value, mask, bias)


class _Pair(NamedTuple):
    """One piece of the queries and one of the keys: which they are, and where they stand."""

    row_piece: int
    col_piece: int
    T: int
    S: int
    row: Any
    col: Any

    def rows(self, x: Array) -> Array:
        return jax.lax.slice_in_dim(x, self.row_piece * self.T, (self.row_piece + 1) * self.T, axis=1)

    def cols(self, x: Array) -> Array:
        return jax.lax.slice_in_dim(x, self.col_piece * self.S, (self.col_piece + 1) * self.S, axis=1)

    def attended(self, ring: _Ring, query: Any, key: Any, value: Any, mask: Mask | None, bias: Any) -> Found:
        part = None if mask is None else self.of_mask(mask)
        of_bias = bias_part(bias, self.row_piece * self.T, self.T, self.col, self.S)
        return ring.attend(self.rows(query), self.cols(key), self.cols(value), part, of_bias)

    def of_mask(self, mask: Mask) -> Mask:
        return mask.cut(self.row, self.T, self.col, self.S, in_arrays=(self.row_piece * self.T, self.col))

    def if_visible(self, mask: Mask | None, seen: Callable[[], Any], otherwise: Any) -> Any:
        """Return `seen()` if the mask shows something of the pair: a real branch on each device."""
        if mask is None:
            return seen()
        may, _ = self.of_mask(mask).bounds(Tiling(self.T, self.S, self.T, self.S), jnp)
        return jax.lax.cond(jnp.any(jnp.asarray(may)), seen, lambda: otherwise)


def _pairs(ring: _Ring, query: Any, key: Any, source: Any) -> list[_Pair]:
    """Return the pairs of the local queries and the keys that began on device `source`."""
    T, S = query.shape[1] // ring.pieces, key.shape[1] // ring.pieces
    rows, cols = ring.starts(jax.lax.axis_index(ring.axes), T), ring.starts(source, S)
    return [_Pair(i, j, T, S, row, col) for i, row in enumerate(rows) for j, col in enumerate(cols)]


def _forward(ring: _Ring, query: Any, key: Any, value: Any, mask: Any, bias: Any) -> tuple[Array, Array]:
    here = jax.lax.axis_index(ring.axes)

    def attend(state: Any, key: Any, value: Any, source: Any) -> Any:
        state = list(state)
        for pair in _pairs(ring, query, key, source):
            output, logsumexp = state[pair.row_piece]

            def seen(pair: _Pair = pair, output: Any = output, logsumexp: Any = logsumexp) -> Any:
                found = pair.attended(ring, query, key, value, mask, bias)
                whole = jnp.logaddexp(logsumexp, found.logsumexp)
                new = found.output.astype(output.dtype) * _share(found.logsumexp, whole)[..., None]
                return output * _share(logsumexp, whole)[..., None] + new, whole

            state[pair.row_piece] = pair.if_visible(mask, seen, (output, logsumexp))
        return tuple(state)

    def hop(carry: Any, step: Any) -> Any:
        state, key, value = carry
        following = ring.passed_on((key, value))  # before the part is attended, so that it travels meanwhile
        state = attend(state, key, value, (here - step) % ring.devices)
        return (state, *following), None

    shapes = jax.eval_shape(lambda: _pairs(ring, query, key, here)[0].attended(ring, query, key, value, mask, bias))
    dtype = shapes.logsumexp.dtype
    empty = jnp.zeros(shapes.output.shape, dtype), jnp.full(shapes.logsumexp.shape, NEG_INF, dtype)
    steps = jnp.arange(ring.devices - 1, dtype=jnp.int32)
    (state, key, value), _ = jax.lax.scan(hop, ((empty,) * ring.pieces, key, value), steps)
    outputs, statistics = zip(*attend(state, key, value, (here + 1) % ring.devices), strict=True)
    return jnp.concatenate(outputs, axis=1).astype(shapes.output.dtype), jnp.concatenate(statistics, axis=1)


def _ring_fwd(ring: _Ring, query: Any, key: Any, value: Any, mask: Any, bias: Any) -> Any:
    output, logsumexp = _forward(ring, query, key, value, mask, bias)
    return (output, logsumexp), (query, key, value, mask, bias, output, logsumexp)


def _ring_bwd(ring: _Ring, residuals: Any, cotangents: Any) -> Any:
    query, key, value, mask, bias, output, logsumexp = residuals
    d_output, d_logsumexp = cotangents
    dtype = logsumexp.dtype
    here = jax.lax.axis_index(ring.axes)
    d_output = jnp.asarray(d_output, dtype)
    through_sum = jnp.sum(d_output * output.astype(dtype), axis=-1) - d_logsumexp

    def add(gradients: Any, key: Any, value: Any, source: Any) -> Any:
        for pair in _pairs(ring, query, key, source):

            def seen(pair: _Pair = pair, gradients: Any = gradients) -> Any:
                found, pull_back = jax.vjp(
                    lambda query, key, value, bias: pair.attended(ring, query, key, value, mask, bias), query, key, value, bias
                )
                share = _share(found.logsumexp, pair.rows(logsumexp))
                of_output = jnp.where(share[..., None] == 0, 0, pair.rows(d_output) * share[..., None])
                own = jnp.sum(of_output * found.output.astype(dtype), axis=-1)
                of_logsumexp = jnp.where(share == 0, 0, own - share * pair.rows(through_sum))
                new = pull_back(Found(of_output.astype(found.output.dtype), of_logsumexp))
                return jax.tree_util.tree_map(lambda old, new: old + new.astype(old.dtype), gradients, new)

            gradients = pair.if_visible(mask, seen, gradients)
        return gradients

    def hop(carry: Any, step: Any) -> Any:
        gradients, key, value = carry
        following = ring.passed_on((key, value))
        d_query, d_key, d_value, d_bias = add(gradients, key, value, (here - step) % ring.devices)
        d_key, d_value = ring.passed_on((d_key, d_value))
        return ((d_query, d_key, d_value, d_bias), *following), None

    start = jax.tree_util.tree_map(lambda x: jnp.zeros(x.shape, dtype), (query, key, value, bias))
    steps = jnp.arange(ring.devices, dtype=jnp.int32)
    (gradients, _, _), _ = jax.lax.scan(hop, (start, key, value), steps)
    gradients = jax.tree_util.tree_map(lambda x, like: x.astype(like.dtype), gradients, (query, key, value, bias))
    d_query, d_key, d_value, d_bias = gradients
    return d_query, d_key, d_value, None, d_bias


_ring.defvjp(_ring_fwd, _ring_bwd)
