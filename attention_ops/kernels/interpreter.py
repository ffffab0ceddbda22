"""Whether Pallas kernels run in their interpreter: on a machine without the device they are written for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

_INTERPRETED = jax.make_user_context(False)  # a part of the key under which JAX keeps traced programs


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Trace Pallas kernels for their interpreter inside: slow, and the same arithmetic on any device."""
    with _INTERPRETED(True):
        yield


def is_interpreted() -> bool:
    """Return whether a kernel that is traced now is to be interpreted."""
    return bool(_INTERPRETED.value)
