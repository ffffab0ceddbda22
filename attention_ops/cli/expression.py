"""Masks written as text: `causal & window(511, 0)`. The text is parsed, never evaluated."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from attention_ops import masks
from attention_ops.errors import did_you_mean

MAX_CHARACTERS = 2000
_LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Form:
    """One mask of the language: how it is written, the names of its arguments, and how it is made for T rows and S columns."""

    written: str
    arguments: tuple[str, ...]
    make: Callable[..., masks.Mask]
    required: int = 0
    open_ended: bool = False  # whether an argument may be none


_AS_LEFT: Any = object()


def _window(T: int, S: int, left: int | None, right: int | None = _AS_LEFT) -> masks.Mask:
    return masks.Window(left, left if right is _AS_LEFT else right)


def _lengths(T: int, S: int, q: int | None = None, kv: int | None = None) -> masks.Mask:
    for name, found, size in (("q", q, T), ("kv", kv, S)):
        if found is not None and found > size:
            raise ValueError(f"{name} is {found}, more than the {size} there are")
    return masks.Lengths(*(None if found is None else jnp.asarray([found], jnp.int32) for found in (q, kv)))


def _segments(T: int, S: int, *sizes: int) -> masks.Mask:
    if T != S:
        raise ValueError(f"segments need as many queries as keys, found {T} and {S}")
    if sum(sizes) > T:
        raise ValueError(f"the segments have {sum(sizes)} positions, more than the {T} there are")
    ids = np.repeat(np.arange(len(sizes)), sizes)
    return masks.Segments(jnp.asarray(np.pad(ids, (0, T - len(ids)), constant_values=-1)[None], jnp.int32))


FORMS = {
    "causal": Form("causal", (), lambda T, S: masks.Causal()),
    "window": Form("window(left, right)", ("left", "right"), _window, required=1, open_ended=True),
    "prefix": Form("prefix(n)", ("n",), lambda T, S, n: masks.PrefixLM(n), required=1),
    "chunked": Form("chunked(size)", ("size",), lambda T, S, size: masks.Chunked(size), required=1),
    "lengths": Form("lengths(q, kv)", ("q", "kv"), _lengths, required=1, open_ended=True),
    "segments": Form("segments(n, n, ...)", (), _segments, required=1),
}
ALLOWED = f"Allowed: {', '.join(form.written for form in FORMS.values())}, joined by & | ~ and parentheses; none is no limit"


def parse(text: str, T: int, S: int) -> masks.Mask:
    """Return the mask a text describes, for T queries and S keys. A ValueError names the token that is wrong and its place.

    >>> str(parse("causal & (window(511, 0) | ~chunked(64))", 1024, 1024))
    'causal & (window(511, 0) | ~(chunked(64)))'
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"the mask has {len(text)} characters, more than {MAX_CHARACTERS}, the limit")
    text = " ".join(text.split())
    if "\0" in text:  # Python before 3.11.4 says nothing of where
        raise ValueError(f"{text!r} is no mask: a null character at character {text.index(chr(0)) + 1}. {ALLOWED}")
    try:
        return _Reader(text, T, S).mask(ast.parse(text, mode="eval").body)
    except SyntaxError as error:
        place = min(error.offset or len(text), len(text))  # an offset of 0 is the end
        raise ValueError(f"{text!r} is no mask: {error.msg} at character {place}. {ALLOWED}") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"the mask is nested too deeply. {ALLOWED}") from None


class _Reader:
    def __init__(self, text: str, T: int, S: int):
        self.text, self.T, self.S = text, T, S

    def mask(self, node: ast.expr) -> masks.Mask:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
            return self.mask(node.left) & self.mask(node.right)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return self.mask(node.left) | self.mask(node.right)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            return ~self.mask(node.operand)
        if isinstance(node, ast.Name):
            return self.leaf(node, node, [], {})
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            named: dict[str, int | None] = {}
            for keyword in node.keywords:
                if keyword.arg in named:
                    raise self.error(node, f"has {keyword.arg} twice; keep one")
                named[keyword.arg or "**"] = self.number(keyword.value)
            return self.leaf(node, node.func, [self.number(argument) for argument in node.args], named)
        raise self.operator_error(node) or self.error(node, "is no mask")

    def leaf(self, node: ast.expr, head: ast.Name, given: list[int | None], named: dict[str, int | None]) -> masks.Mask:
        if head.id not in FORMS:
            raise self.error(head, f"is no mask.{did_you_mean(head.id, FORMS)}")
        form = FORMS[head.id]
        if None in (*given, *named.values()) and not form.open_ended:
            raise self.error(node, f"has none for a number; write {form.written}")
        wrong = next((name for name in named if name not in form.arguments[len(given) :]), None)
        most = None if form.written.endswith("...)") else len(form.arguments)
        if wrong or len(given) + len(named) < form.required or (most is not None and len(given) > most):
            raise self.error(node, f"has {f'the argument {wrong!r}' if wrong else 'the wrong arguments'}; write {form.written}")
        try:
            return form.make(self.T, self.S, *given, **named)
        except (TypeError, ValueError) as error:
            raise self.error(node, f"cannot be: {error}") from None

    def number(self, node: ast.expr) -> int | None:
        if isinstance(node, ast.Constant) and node.value is None:
            return None
        if isinstance(node, ast.Name) and node.id == "none":
            return None
        negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
        value: Any = node.operand if negative else node  # type: ignore[attr-defined]
        if not isinstance(value, ast.Constant) or type(value.value) is not int:
            raise self.error(node, "is no whole number, nor none")
        if value.value > _LARGEST:
            raise self.error(node, f"is more than {_LARGEST}, the largest number")
        if negative:
            raise self.error(node, "is below 0; sizes and lengths are 0 or more")
        return value.value

    def operator_error(self, node: ast.expr) -> ValueError | None:
        """Return the error of Python's `and`, `or` or `not`, which are not the operators of masks."""
        if isinstance(node, ast.BoolOp):
            word, symbol = ("and", "&") if isinstance(node.op, ast.And) else ("or", "|")
            start = self._characters(node.values[0].end_col_offset or 0)
            return self._error(word, start + self.text[start:].index(word), f"is no operator here; write {symbol}")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self._error("not", self._characters(node.col_offset), "is no operator here; write ~")
        return None

    def error(self, node: ast.expr, problem: str) -> ValueError:
        token = ast.get_source_segment(self.text, node) or self.text
        return self._error(token, self._characters(node.col_offset), problem)

    def _characters(self, count: int) -> int:
        """Return how many characters the first `count` bytes are: `ast` counts bytes."""
        return len(self.text.encode()[:count].decode(errors="ignore"))

    def _error(self, token: str, start: int, problem: str) -> ValueError:
        inside = "" if token == self.text else f" of {self.text!r}"
        stop = "" if problem.endswith("?") else "."
        return ValueError(f"{token!r}, at character {start + 1}{inside}, {problem}{stop} {ALLOWED}")
