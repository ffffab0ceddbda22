"""Ids, lengths and positions of any integer dtype, brought into int32: what JAX and its kernels compute with.

What int32 cannot hold is not truncated. A number far beyond every sequence is as good as one at `FAR`, and of ids only their
equality counts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_ops.arrays import array_of

FAR = 2**29
"""Beyond every position of a sequence. Sums of a few numbers of at most this size stay within 32 bits."""


def position(name: str, value: Any) -> Any:
    """Return a position, or an array or a `jax.ShapeDtypeStruct` of positions, `near`; TypeError for what are no integers."""
    if value is None or (isinstance(value, int | float | str) and not isinstance(value, np.generic)):
        found, is_integer = type(value).__name__, isinstance(value, int) and not isinstance(value, bool)
    else:
        value = array_of(name, value)
        found, is_integer = value.dtype, jnp.issubdtype(value.dtype, jnp.integer)
    if not is_integer:
        raise TypeError(f"{name} must be an integer or an integer array, found {found}; cast an array with .astype('int32')")
    value = near(value)
    # In int32 a number that stands for "no limit" overflows in a sum.
    return value.clip(-FAR, FAR) if isinstance(value, jax.Array | np.ndarray) else value


def near(value: Any) -> Any:
    """Return an integer between -FAR and FAR, or an array in int32. Only arrays of wider dtypes are brought into that range."""
    if not hasattr(value, "dtype") or isinstance(value, np.integer):
        return max(-FAR, min(int(value), FAR))
    if value.dtype == np.int32:
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, np.int32)
    if not np.can_cast(value.dtype, np.int32):
        value = value.clip(-FAR if jnp.issubdtype(value.dtype, jnp.signedinteger) else 0, FAR)
    return value.astype(np.int32)


def data(value: Any) -> Any:
    """Return an array, in int32, as run-time data: not one of numpy."""
    value = near(value)
    return jnp.asarray(value) if isinstance(value, np.ndarray) else value


def ids(q: Any, kv: Any) -> tuple[Any, Any]:
    """Return two arrays of ids in int32: a pair is equal where it was, an id negative where it was, or where no key has it.

    What int32 can hold is kept. Otherwise ids become their places among the sorted ids of the keys: O(n log n).
    """
    both = tuple(_narrowed(x) for x in (q, kv))
    if all(np.can_cast(x.dtype, np.int32) for x in both):
        return tuple(data(x) for x in both)  # type: ignore[return-value]
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in both):
        return tuple(jax.ShapeDtypeStruct(x.shape, np.int32) for x in both)  # type: ignore[return-value]
    on_host = all(isinstance(x, np.ndarray) for x in both)
    has_64_bits = on_host or any(x.dtype.itemsize == 8 and not isinstance(x, np.ndarray) for x in both)
    xp, wide = np if on_host else jnp, np.dtype(np.uint64 if has_64_bits else np.uint32)
    (q_ids, q_real), (kv_ids, kv_real) = (_unsigned(x, wide) for x in both)
    keys = xp.sort(kv_ids.ravel())

    def place(ids: Any, real: Any) -> Any:
        first, after = (xp.searchsorted(keys, ids.ravel(), side=side).reshape(ids.shape) for side in ("left", "right"))
        return jnp.asarray(xp.where(real & (first < after), first, -1), jnp.int32)

    return place(q_ids, q_real), place(kv_ids, kv_real)


def _narrowed(x: Any) -> Any:
    """Return a numpy array in int32 if that holds it: its content is known, and numpy's own integers have 64 bits."""
    limits = np.iinfo(np.int32)
    fits = isinstance(x, np.ndarray) and x.size and limits.min <= x.min() and x.max() <= limits.max
    return x.astype(np.int32) if fits else x


def _unsigned(x: Any, wide: np.dtype) -> tuple[Any, Any]:
    """Return ids without a sign, and which are real. One of the host that `wide` cannot hold is equal to none that it can."""
    xp, real = jnp, x >= 0
    if isinstance(x, np.ndarray):
        xp, real = np, real & (x <= np.iinfo(wide).max)
    return xp.where(real, x, xp.zeros((), x.dtype)).astype(wide), real
