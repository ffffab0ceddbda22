"""The errors and warnings of attention_ops. Caller errors of a built-in kind (shape, dtype) are ValueError and TypeError."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class AttentionOpsError(Exception):
    """Base of the errors that are this library's own."""


class UnknownOperationError(AttentionOpsError, KeyError):
    """No operation of that name is registered."""

    def __str__(self) -> str:  # KeyError would show the repr of its argument
        return str(self.args[0])


class DuplicateOperationError(AttentionOpsError, ValueError):
    """The name, or an alias, already belongs to another operation."""


class NoRouteError(AttentionOpsError, RuntimeError):
    """No route takes the request: the message, and `decisions`, have every candidate with all its reasons."""

    def __init__(self, message: str, decisions: tuple[Any, ...] = ()):
        super().__init__(message, decisions)
        self.decisions = decisions

    def __str__(self) -> str:
        return str(self.args[0])


class DerivativeError(AttentionOpsError, TypeError):
    """The planned route cannot be differentiated in this way; the message has what it can do, and an operation that can."""


class ConfigError(AttentionOpsError, ValueError):
    """A configuration file or value cannot be used."""


class FallbackWarning(UserWarning):
    """A named operation could not honour a request and another route runs instead."""


_COMPARED = 100
"""Characters of a name that are compared with others: the work grows with the square of the length."""


def closest_first(name: str, names: Iterable[str]) -> list[str]:
    """Return `names` with those most like `name` in front."""
    name = name[:_COMPARED]
    return sorted(names, key=lambda other: (-difflib.SequenceMatcher(None, name, other).ratio(), other))


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"`, or nothing when no name is near."""
    near = difflib.get_close_matches(name[:_COMPARED], list(names), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
