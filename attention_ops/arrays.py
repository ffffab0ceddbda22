"""What callers hand in as arrays."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def array_of(name: str, value: Any, hint: str = "") -> Any:
    """Return an array of JAX, a number of numpy or a `jax.ShapeDtypeStruct` as it is, of anything else what numpy makes of it.

    A list that holds traced numbers, and what has `__jax_array__`, become arrays of JAX.

    Raises:
        TypeError: numpy makes no numbers or booleans of it; the message names the argument and ends with `hint`.
    """
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct | np.generic):
        return value
    if hasattr(type(value), "__jax_array__"):  # a parameter of Flax or Keras, which stays on its devices
        return jnp.asarray(value)
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # of ragged lists, and tensors that numpy cannot read
        try:
            array = np.asarray(value)
        except jax.errors.TracerArrayConversionError:
            return jnp.asarray(value)
        is_known = array.dtype == np.bool_ or jnp.issubdtype(array.dtype, jnp.number)
        if is_known and array.dtype not in (np.longdouble, np.clongdouble):
            return array
    found = f"{type(value).__name__}{f' of {value.dtype}' if hasattr(value, 'dtype') else ''}"
    raise TypeError(f"{name} must be an array, found {found}, of which numpy makes no numbers that JAX has{hint}")
