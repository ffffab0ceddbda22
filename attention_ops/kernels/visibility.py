"""Queries and keys that see nothing: zeroed, so that what they hold, NaN included, reaches nothing."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool


def visibility(allowed: Bool[Array, "b h T S"], K: int) -> tuple[Array, Array]:
    """Return which queries see a key [b, T, h, 1], and which keys of a key/value head are seen [b, S, K|1, 1]."""
    b, h, T, S = allowed.shape
    by_head = allowed.reshape(b, K, h // K, T, S) if h > 1 else allowed[:, None]
    return jnp.any(allowed, 3).swapaxes(1, 2)[..., None], jnp.any(by_head, (2, 3)).swapaxes(1, 2)[..., None]


def zeroed(query: Array, key: Array, value: Array, sees: Array, seen: Array) -> tuple[Array, Array, Array]:
    """Return the arrays with 0 in the queries that see no key and in the keys and values that no query sees."""
    return jnp.where(sees, query, 0), jnp.where(seen, key, 0), jnp.where(seen, value, 0)
