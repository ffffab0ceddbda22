"""`jax.nn.dot_product_attention`, given our masks in its own terms."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention_ops.kernels.visibility import visibility, zeroed
from attention_ops.masks import Causal, Lengths, Mask, Window


def xla_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K D"],
    *,
    mask: Mask | None,
    scale: float,
) -> Float[Array, "B T H D"]:
    """Attention by XLA's implementation, for masks of positions from offset 0. Float32 products run at full precision."""
    with jax.default_matmul_precision("highest"):
        return _call("xla", query, key, value, mask, None, None, scale)


def cudnn_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K D"],
    *,
    mask: Mask | None,
    bias: Float[Array, "b h t s"] | None,
    scale: float,
) -> Float[Array, "B T H D"]:
    """Attention by the cuDNN kernel. Causal, window and lengths go in natively; any other mask as an array [b, h, T, S].

    cuDNN hides a key by adding a large negative number: it gives some mean of the values for an empty row, and lets NaN behind
    a mask through. Rows and keys that see nothing are therefore zeroed around it.
    """
    T, S, K = query.shape[1], key.shape[1], key.shape[2]
    parts = () if mask is None else mask.conjuncts()
    if bias is not None or not all(isinstance(part, Causal | Window | Lengths) for part in parts):
        allowed, bias = _dense(mask, bias, T, S)
        sees, seen = visibility(allowed, K)
        output = _call("cudnn", *zeroed(query, key, value, sees, seen), None, bias, allowed, scale)
        return jnp.where(sees, output, 0)
    if T == S and not any(isinstance(part, Lengths) for part in parts):
        return _call("cudnn", query, key, value, mask, None, None, scale)
    sees, seen = _visibility_of_intervals(parts, T, S)
    output = _call("cudnn", *zeroed(query, key, value, sees, seen), mask, None, None, scale)
    return jnp.where(sees, output, 0)


def _call(
    implementation: Literal["xla", "cudnn"],
    query: Array,
    key: Array,
    value: Array,
    mask: Mask | None,
    bias: Array | None,
    allowed: Array | None,
    scale: float,
) -> Array:
    options = {} if mask is None else native_options(mask, query.shape[0], query.shape[1], key.shape[1])
    return jax.nn.dot_product_attention(query, key, value, bias, allowed, scale=scale, implementation=implementation, **options)


def native_options(mask: Mask, B: int, T: int, S: int) -> dict[str, Any]:
    """Return the keyword arguments of `jax.nn.dot_product_attention` that say what a conjunction of masks says."""
    options: dict[str, Any] = {}
    left: int | None = None
    right: int | None = None
    for part in mask.conjuncts():
        if isinstance(part, Causal):
            options["is_causal"] = True
        elif isinstance(part, Window):
            left, right = _narrower(left, part.left), _narrower(right, part.right)
        elif isinstance(part, Lengths):
            for name, lengths in (("query_seq_lengths", part.q), ("key_value_seq_lengths", part.kv)):
                if lengths is not None:
                    whole = jnp.broadcast_to(lengths, (B,)).astype(jnp.int32)
                    options[name] = jnp.maximum(jnp.minimum(whole, options.get(name, whole)), 1)
        else:
            raise TypeError(f"{part} has no native form")
    if right == 0:
        options["is_causal"] = True
    if left is not None or right is not None:
        options["local_window_size"] = (S + T if left is None else left, S + T if right is None else right)
    return options


def _narrower(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _dense(mask: Mask | None, bias: Array | None, T: int, S: int) -> tuple[Bool[Array, "b h T S"], Array | None]:
    """Return one boolean array of mask and -inf in the bias, and the bias without -inf."""
    allowed = jnp.ones((1, 1, T, S), bool) if mask is None else mask.dense(T, S)
    if bias is None:
        return allowed, None
    bias = jnp.broadcast_to(bias, (*bias.shape[:2], T, S))
    return allowed & (bias != -jnp.inf), jnp.where(bias == -jnp.inf, 0, bias)


def _visibility_of_intervals(parts: tuple[Mask, ...], T: int, S: int) -> tuple[Array, Array]:
    """The same for masks under which a query sees one interval of keys: causal, window, lengths; O(T + S)."""
    left, right, q_end, k_end = T + S, T + S, jnp.asarray(T), jnp.asarray(S)
    for part in parts:
        if isinstance(part, Causal):
            right = 0
        elif isinstance(part, Window):
            left = left if part.left is None else min(left, part.left)
            right = right if part.right is None else min(right, part.right)
        elif isinstance(part, Lengths):
            q_end = q_end if part.q is None else jnp.minimum(q_end, part.q)
            k_end = k_end if part.kv is None else jnp.minimum(k_end, part.kv)
    rows, cols, q_end, k_end = jnp.arange(T), jnp.arange(S), q_end.reshape(-1, 1), k_end.reshape(-1, 1)
    sees = (rows < q_end) & (jnp.maximum(rows - left, 0) <= jnp.minimum(rows + right, k_end - 1))
    seen = (cols < k_end) & (jnp.maximum(cols - right, 0) <= jnp.minimum(cols + left, q_end - 1))
    return sees[..., None, None], seen[..., None, None]
