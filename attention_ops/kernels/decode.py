"""Attention of a few query rows against a long cache: reads keys and values once, as they lie, in steps that fit a cache.

With one to eight queries the products are narrow and the time is that of reading. A step therefore takes all heads at once and
moves none to the front: the logits are one matrix product of the keys [cols, K * D] with the queries on the diagonal of a matrix
[K * D, H * T] that is zero elsewhere, K times the operations; the values are weighted and summed element by element.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attention_ops.kernels import tiles as t
from attention_ops.kernels.tiles import NEG_INF, Shape
from attention_ops.masks import Mask, Tile, slice_within
from attention_ops.varying import varying_like

ROWS = 32
"""Up to this many query rows per key/value head, G * T, a call is one of decoding."""
STEP = 1 << 20
"""Numbers of the keys, cols * K * D, that a step reads: 4 MiB in float32, the best of 512 to 2048 keys at K 8, D 64."""
_NARROW = 8
"""Up to this many query rows per key/value head that costs less than moving the heads to the front."""


def is_decoding(T: int, S: int, groups: int) -> bool:
    return T * groups <= ROWS and 4 * T * groups < S


def decode(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K Dv"],
    *,
    mask: Mask | None,
    bias: Array | None,
    scale: float,
    soft_cap: float | None,
    block_kv: int,
    skip_by_data: bool,
    dtype: np.dtype,
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B T H"], Float[Array, "B T H"]]:
    """Return in `dtype` the output, the highest logit and the sum of exponentials relative to it: -inf and 1 for a row of no key.

    Arguments are those of `blockwise_attention`.
    """
    (B, T, H, D), (_, S, K, Dv) = query.shape, value.shape
    shape = Shape(B, T, S, K, H // K, T, min(block_kv, S), heads=K)
    work = t.work_list(*t.kinds_per_unit(shape, mask, bias is not None, skip_by_data), pairs=False)
    step = _Step(shape, mask, bias, scale, soft_cap)
    queries = query.reshape(B, T, K, shape.G, D).transpose(0, 2, 3, 1, 4).reshape(B, K, shape.G * T, D)
    product = _Product(shape.G * T <= _NARROW, scale, dtype)

    def row(_: None, batch: Array) -> tuple[None, tuple[Array, Array, Array]]:
        def visit(j: Array, state: tuple[Array, Array, Array], tiles: int, partial: bool) -> tuple[Array, Array, Array]:
            output, highest, total = state
            at = step.at(batch, j)
            # Read anew in each place: the copy that a branch would ask for costs more than all the rest.
            read_key, read_value = (functools.partial(step.read, x, at) for x in (key, value))
            logits, seen = step.finish(product.logits(queries[batch], read_key), at, j, partial)
            new = jnp.maximum(highest, jnp.max(logits, axis=0))
            anchor = jnp.where(new == NEG_INF, 0, new)
            weights, keep = jnp.exp(logits - anchor), jnp.exp(highest - anchor)
            weighted = product.weighted(weights, read_value, seen)
            return output * keep[..., None] + weighted, new, total * keep + jnp.sum(weights, axis=0)

        rows = (K, shape.G * T)
        state = jnp.zeros((*rows, Dv), dtype), jnp.full(rows, NEG_INF, dtype), jnp.zeros(rows, dtype)
        output, highest, total = work.loop(visit, batch, 0, 0, varying_like(state, query))
        total = jnp.where(total == 0, 1, total)
        return None, (output / total[..., None], highest, total)

    _, (output, highest, total) = jax.lax.scan(row, None, varying_like(jnp.arange(B, dtype=jnp.int32), query))
    output = output.reshape(B, H, T, Dv).transpose(0, 2, 1, 3)
    highest, total = (x.reshape(B, H, T).transpose(0, 2, 1) for x in (highest, total))
    return output, highest, total


class _Step:
    """One step of block_kv keys. The last one ends at S and hides what the one before has read, so nothing is padded."""

    def __init__(self, shape: Shape, mask: Mask | None, bias: Array | None, scale: float, soft_cap: float | None):
        self.shape, self.mask, self.bias, self.soft_cap = shape, mask, bias, soft_cap

    def at(self, batch: Any, j: Any) -> Tile:
        s = self.shape
        col = jnp.minimum(j * s.block_kv, s.S - s.block_kv)
        return Tile(batch, 0, 0, col, heads=s.query_heads, rows=s.T, cols=s.block_kv)

    def read(self, x: Array, at: Tile) -> Array:
        """Return [block_kv, K, d] of [B, S, K, d]."""
        sizes = (1, at.cols, *x.shape[2:])
        return slice_within(x, (at.batch, at.col, 0, 0), sizes)[0]

    def finish(self, logits: Float[Array, "cols K R"], at: Tile, j: Any, partial: bool) -> tuple[Array, Array | None]:
        """Return the logits capped, biased and hidden, and what of them is visible, as [cols|1, K|1, R|1] or None for all."""
        s, parts = self.shape, []
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        if self.bias is not None:
            bias = self._columns(t.bias_tile(self.bias, at))
            parts.append(bias != NEG_INF)
            logits = logits + jnp.where(bias == NEG_INF, 0, bias.astype(logits.dtype))
        if partial and self.mask is not None:
            parts.append(self._columns(self.mask.tile(at)))
        if partial and s.padded[1] != s.S:
            parts.append((jnp.arange(at.cols) + at.col >= j * s.block_kv)[:, None, None])
        if not parts:
            return logits, None
        seen = functools.reduce(jnp.logical_and, parts)
        return jnp.where(seen, logits, NEG_INF), seen

    def _columns(self, tile: Array) -> Array:
        """[H|1, T|1, cols|1] to [cols|1, K|1, R|1]."""
        s = self.shape
        heads, rows, cols = tile.shape
        if heads == 1 and rows == 1:
            return tile.reshape(1, 1, cols).transpose(2, 0, 1)
        tile = jnp.broadcast_to(tile, (s.query_heads if heads > 1 else s.G, s.T, cols))
        return tile.reshape(-1, s.G * s.T, cols).transpose(2, 0, 1)


@dataclasses.dataclass(frozen=True)
class _Product:
    """The two products of a step. Keys and values are read anew wherever they are used: a copy costs more than the rest."""

    is_narrow: bool
    scale: float
    dtype: np.dtype

    def logits(self, q: Float[Array, "K R D"], read_key: Callable[[], Array]) -> Float[Array, "cols K R"]:
        K, R, D = q.shape

        def by_head() -> Array:
            return t.dot(_heads_first(read_key(), self.dtype), scaled, (2, 2)).transpose(1, 0, 2)

        scaled = q.astype(self.dtype) * self.scale
        if not self.is_narrow:
            return by_head()
        wide = jnp.zeros((K, D, K, R), self.dtype).at[jnp.arange(K), :, jnp.arange(K)].set(scaled.transpose(0, 2, 1))
        flat = t.dot(read_key().astype(self.dtype).reshape(1, -1, K * D), wide.reshape(1, K * D, K * R), (2, 1))
        logits = flat.reshape(-1, K, R)
        # A key of one head that is NaN or Inf would reach the logits of all heads: zeros of the matrix times it.
        return jax.lax.cond(jnp.isfinite(logits).all(), lambda: logits, by_head)

    def weighted(
        self, weights: Float[Array, "cols K R"], read_value: Callable[[], Array], seen: Array | None
    ) -> Float[Array, "K R Dv"]:
        """Return the sum over keys of weights times values. Values that nothing sees may be NaN: 0 times them is left out."""
        found = self._weighted(weights, read_value())
        if seen is None:
            return found

        def without_unseen() -> Array:
            return self._weighted(weights, jnp.where(jnp.any(seen, axis=2)[..., None], read_value(), 0))

        return jax.lax.cond(jnp.isfinite(found).all(), lambda: found, without_unseen)

    def _weighted(self, weights: Array, v: Float[Array, "cols K Dv"]) -> Array:
        R = weights.shape[2]
        if not self.is_narrow:
            return t.dot(weights.transpose(1, 2, 0), _heads_first(v, self.dtype), (2, 1))
        # XLA does not vectorise the sum for one row: ten times slower than for two.
        rows = weights if R > 1 else jnp.concatenate([weights, jnp.zeros_like(weights)], axis=2)
        return jnp.sum(rows[..., None] * v.astype(self.dtype)[:, :, None], axis=0)[:, :R]


def _heads_first(x: Float[Array, "cols K d"], dtype: np.dtype) -> Float[Array, "K cols d"]:
    return jax.lax.optimization_barrier(x.transpose(1, 0, 2)).astype(dtype)
