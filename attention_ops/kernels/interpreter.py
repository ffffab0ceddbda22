"""Whether Pallas kernels run in their interpreter: on a machine without the device they are written for."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_INTERPRETED = contextvars.ContextVar("attention_ops_interpreted", default=False)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Trace Pallas kernels for their interpreter inside: slow, and the same arithmetic on any device."""
    token = _INTERPRETED.set(True)
    try:
        yield
    finally:
        _INTERPRETED.reset(token)


def is_interpreted() -> bool:
    """Return whether a kernel that is traced now is to be interpreted."""
    return _INTERPRETED.get()
