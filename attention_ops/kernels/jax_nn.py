"""`jax.nn.dot_product_attention` in XLA operations, given our masks in its own terms."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Float

from attention_ops.masks import Causal, Mask, Window


def xla_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K D"],
    *,
    mask: Mask | None,
    scale: float,
) -> Float[Array, "B T H D"]:
    """Attention by XLA's implementation, for masks of positions from offset 0. Float32 products run at full precision."""
    options = {} if mask is None else native_options(mask, query.shape[1], key.shape[1])
    with jax.default_matmul_precision("highest"):
        return jax.nn.dot_product_attention(query, key, value, scale=scale, implementation="xla", **options)


def native_options(mask: Mask, T: int, S: int) -> dict[str, Any]:
    """Return the keyword arguments of `jax.nn.dot_product_attention` that say what a conjunction of causal and windows says."""
    options: dict[str, Any] = {}
    left: int | None = None
    right: int | None = None
    for part in mask.conjuncts():
        if isinstance(part, Causal):
            options["is_causal"] = True
        elif isinstance(part, Window):
            left, right = _narrower(left, part.left), _narrower(right, part.right)
        else:
            raise TypeError(f"{part} has no form in jax.nn; allowed are causal masks and windows")
    if left is not None or right is not None:
        options["local_window_size"] = (S + T if left is None else left, S + T if right is None else right)
    return options


def _narrower(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)
