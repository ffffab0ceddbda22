"""What is wrong with a config, in sentences: the file, line and key, what was found, what is allowed, and the fix."""

from __future__ import annotations

import dataclasses
import os
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from attention_ops.errors import ConfigError, closest_first, did_you_mean


class _Short(reprlib.Repr):
    """Short forms. Python does not write an integer of more than some thousand digits."""

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        return f"a whole number of {bits} bits" if bits > 1000 else super().repr_int(x, level)


_repr = _Short()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60


_EXPONENT = re.compile(r"([-+]?\d+)(\.\d*)?[eE]([-+]?)(\d+)")
"""A number that YAML 1.1 reads as text, for want of a dot or of the exponent's sign."""
_UNKNOWN = ("extra_forbidden", "invalid_key")  # pydantic's names for a key of no field, and a key that is no text


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a config came from. Heads every message: `configs/x.yaml:7: layer_types.local.causal: `."""

    where: str
    lines: Mapping[tuple[str, ...], int] = dataclasses.field(default_factory=dict)

    def at(self, path: Iterable[Any], sentence: str, line: int | None = None) -> str:
        keys = tuple(map(str, path))
        if line is None:  # of the key itself, or of the nearest key around it
            line = next((self.lines[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in self.lines), None)
        text = "".join(f"[{key}]" if key.isdigit() else f".{key}" for key in keys).removeprefix(".")
        return f"{self.where}{f':{line}' if line else ''}: {f'{text}: ' if text else ''}{sentence}"


def shown(value: Any) -> str:
    """Return a short form of a value and its type, for "found ..."."""
    return "null" if value is None else f"{_repr.repr(value)} ({type(value).__name__})"


def indivisible(name: str, heads: int) -> str:
    """Return the rest of the sentence about a number of kv heads that does not divide `heads`, the value of `name`."""
    near = [n for n in range(1, heads + 1) if heads % n == 0] if heads <= 4096 else [1, heads]
    return f"which does not divide {name} {heads}; allowed: {', '.join(map(str, near))}"


def file_name(argument: str, path: Any, allowed: str) -> str:
    """Return the path as text, or raise what is wrong with it as the value of an argument."""
    if not isinstance(path, str | os.PathLike) or not isinstance(name := os.fspath(path), str):
        raise TypeError(f"{argument}: found {shown(path)}; allowed is {allowed}")
    try:
        held = b"\0" in os.fsencode(name) and "a null character"
    except UnicodeEncodeError:
        held = "half of a pair of surrogates"
    if held:
        raise ConfigError(f"{argument}: found {shown(name)}, which holds {held}, as no file's name does; allowed is {allowed}")
    return name


@dataclasses.dataclass(frozen=True)
class Schema:
    """The fields that describe what each key may hold: at the top level, and in an entry of `layer_types`."""

    top: Mapping[str, Any]
    layer: Mapping[str, Any]

    def keys_at(self, loc: tuple[Any, ...]) -> tuple[str, ...]:
        if len(loc) == 1:
            return tuple(self.top)
        return ("q", "kv") if loc[0] == "block_sizes" else tuple(self.layer)

    def nearest(self, loc: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*loc[:-1], closest_first(str(loc[-1]), self.keys_at(loc))[0])


def sentences(errors: Iterable[Mapping[str, Any]], data: Mapping[str, Any], place: Place, schema: Schema) -> list[str]:
    """Return a line for each of pydantic's errors, and one only for what several of them say."""
    found = [(_keys(error), error) for error in errors]
    renamed = {schema.nearest(loc) for loc, error in found if error["type"] in _UNKNOWN}
    lines: dict[tuple[Any, ...], str] = {}
    for loc, error in found:
        said = {*lines, *renamed} if error["type"] == "missing" else {*lines}
        inherited = len(loc) == 3 and loc[2] not in (data["layer_types"][loc[1]] or {})
        if loc not in said and not (inherited and loc[2:] in said):
            lines[loc] = place.at(loc, _sentence(error, loc, schema))
    return list(lines.values())


def _keys(error: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the keys to the culprit, without pydantic's steps into unions and lists."""
    loc = tuple(part for part in error["loc"] if part != "[key]")
    return loc[: {"layer_types": 3, "block_sizes": 2}.get(loc[0], 1)] if loc else ()


def _sentence(error: Mapping[str, Any], loc: tuple[Any, ...], schema: Schema) -> str:
    kind, found, leaf = error["type"], shown(error["input"]), loc[-1] if loc else None
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if kind in _UNKNOWN or (len(loc) == 2 and loc[0] == "block_sizes" and leaf not in schema.keys_at(loc)):
        return (
            f"is no key of a config; the nearest is {schema.nearest(loc)[-1]!r}. Allowed here: {', '.join(schema.keys_at(loc))}"
        )
    if not loc or (loc[0] == "layer_types" and len(loc) == 2):
        fix = "" if not loc or isinstance(leaf, str) else f"; quote the kind: '{leaf}'"
        return f"found {found}; allowed is a mapping of keys to values, named by text{fix}"
    if len(loc) == 2:
        return f"found {found}; allowed is a whole number of 1 or more, or null: the kernel chooses"
    field = schema.top[str(leaf)]
    example = f"; for example {leaf}: {field.examples[0]}" if field.examples else ""
    words = [word.strip(",:") for word in field.description.split()]
    hint = did_you_mean(str(error["input"]), words) if kind == "literal_error" else ""
    bound = f", below {error['ctx']['lt']}" if kind == "less_than" else ""
    number = _EXPONENT.fullmatch(error["input"]) if kind == "float_type" and isinstance(error["input"], str) else None
    if number and not (number[2] and number[3]):
        hint = f" YAML 1.1 reads it as text; write {number[1]}{number[2] or '.0'}e{number[3] or '+'}{number[4]}"
    said = "is missing" if kind == "missing" else f"found {found}"
    return f"{said}; allowed is {field.description}{bound}{example}{hint and '.' + hint}"
