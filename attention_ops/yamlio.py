"""YAML as plain data: read with limits and line numbers, written back in the same shape. Imported by config.py only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import yaml

from attention_ops.config_errors import Place, shown
from attention_ops.errors import ConfigError, closest_first

MAX_BYTES = 1_000_000
"""Largest file that is read. A config is a page of text."""
MAX_VALUES = 20_000
"""Most values a file may hold once its aliases are written out."""
MAX_DIGITS = 100
"""Most characters of a number."""

_TAG = "tag:yaml.org,2002:"
_PLAIN = {_TAG + name for name in ("str", "int", "float", "bool", "null", "map", "seq", "merge")}
_KEYS = {_TAG + name for name in ("str", "int", "merge")}
_READ = {_TAG + "int": "no whole number", _TAG + "float": "no number", _TAG + "bool": "neither true nor false"}
_CONSTRUCTOR = yaml.constructor.SafeConstructor()


def read(path: str) -> tuple[dict[Any, Any], Place]:
    """Return the mapping in a YAML file, and the place that knows its lines. Anything but plain data is a ConfigError."""
    place = Place(path)
    try:
        data, lines = _parse(_text(path, place), place)
    except RecursionError:
        raise ConfigError(place.at((), "is nested too deeply; a config has four levels at most")) from None
    if data is None:
        raise ConfigError(place.at((), "is empty; a config has lines of `key: value`, for example name: my_model"))
    if not isinstance(data, dict):
        raise ConfigError(place.at((), f"found {shown(data)}; allowed is a mapping: lines of `key: value`"))
    return data, Place(place.where, lines)


def _text(path: str, place: Place) -> str:
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        folder, name = os.path.split(path)
        files = sorted(os.listdir(folder or ".")) if os.path.isdir(folder or ".") else []
        near = closest_first(name, [file for file in files if file.endswith((".yaml", ".yml"))])[:3]
        hint = f"; nearest in that folder: {', '.join(near)}" if near else ""
        raise ConfigError(place.at((), f"no such file{hint}")) from None
    except OSError as error:
        raise ConfigError(place.at((), f"cannot be read: {error.strerror or error}")) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(place.at((), f"has more than {MAX_BYTES} bytes, the limit; a config is a page of text"))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        sentence = f"is not UTF-8 text (byte {error.start}); a config is a text file in YAML"
        raise ConfigError(place.at((), sentence, line)) from None


def _parse(text: str, place: Place) -> tuple[Any, dict[tuple[str, ...], int]]:
    lines: dict[tuple[str, ...], int] = {}
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None, lines
        _inspect(node, (), lines, {}, place)
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        raise ConfigError(place.at((), f"is not YAML: {error.problem or error.context}", line)) from None
    except yaml.reader.ReaderError as error:
        sentence, line = str(error).splitlines()[0].partition(";")[0], text.count("\n", 0, error.position) + 1
        raise ConfigError(place.at((), f"is not YAML: {sentence}", line)) from None


def _inspect(
    node: yaml.Node, path: tuple[str, ...], lines: dict[tuple[str, ...], int], sizes: dict[int, int | None], place: Place
) -> int:
    """Return how many values `node` holds with its aliases written out; refuse what is not plain data."""

    def refusal(sentence: str, at: yaml.Node = node) -> ConfigError:
        return ConfigError(place.at(path, sentence, at.start_mark.line + 1))

    if id(node) in sizes:
        size = sizes[id(node)]
        if size is None:
            raise refusal("an alias contains itself; write the value out")
        return size
    if node.tag not in _PLAIN:
        tag = node.tag.replace(_TAG, "!!")
        raise refusal(
            f"found a value of type {tag}; allowed are text, numbers, true, false, null, lists and mappings: "
            f"remove the tag, or quote what is text"
        )
    if isinstance(node, yaml.ScalarNode) and (problem := _scalar_problem(node)):
        raise refusal(problem)
    sizes[id(node)], size, keys = None, 1, set()
    children: list[Any] = node.value if isinstance(node, yaml.CollectionNode) else []
    for number, child in enumerate(children):
        key, value = child if isinstance(node, yaml.MappingNode) else (None, child)
        if key is not None and (not isinstance(key, yaml.ScalarNode) or key.tag not in _PLAIN):
            raise refusal("a key is not plain text; allowed are lines of `key: value`", key)
        if key is not None and (problem := _key_problem(key)):
            raise refusal(problem, key)
        name = str(number) if key is None else key.value
        if name in keys:
            raise refusal(f"the key {name!r} is given twice; keep one", key or node)
        keys.add(name)
        lines.setdefault((*path, name), (key or value).start_mark.line + 1)
        size += _inspect(value, (*path, name), lines, sizes, place)
        if size > MAX_VALUES:
            raise refusal(f"holds more than {MAX_VALUES} values with its aliases written out; a config is a page of text")
    sizes[id(node)] = size
    return size


def _scalar_problem(node: yaml.ScalarNode) -> str:
    """Return what is wrong with a value that no collection is, or nothing."""
    if node.tag not in _READ:
        return _text_problem(node.value)
    if len(node.value) > MAX_DIGITS:
        return f"is a number of {len(node.value)} characters, more than {MAX_DIGITS}; write a smaller one, or quote what is text"
    try:
        _CONSTRUCTOR.yaml_constructors[node.tag](_CONSTRUCTOR, node)
    except (ValueError, KeyError):  # a tag was written beside it
        return f"{shown(node.value)} is {_READ[node.tag]}; remove the tag {node.tag.replace(_TAG, '!!')}, or correct the value"
    return ""


def _text_problem(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"{shown(text)} holds half of a pair of surrogates, which is no character; write the character itself"
    return ""


def _key_problem(key: yaml.ScalarNode) -> str:
    if key.tag not in _KEYS:
        return f"YAML reads the key {key.value!r} as {key.tag.removeprefix(_TAG)}, not as text; quote it"
    return _scalar_problem(key)


def dump(data: Mapping[str, Any]) -> str:
    """Return `data` as YAML, keys in their order, lists and small mappings on one line."""
    settings: dict[str, Any] = {"Dumper": _Dumper, "sort_keys": False, "width": 110, "allow_unicode": True}
    return "".join(
        yaml.dump({key: item}, default_flow_style=None if isinstance(item, dict | list) else False, **settings)
        for key, item in _plain(data).items()
    )


class _Dumper(yaml.SafeDumper):
    """Escapes the line breaks that only Unicode has: PyYAML writes them as they are, and reads them as spaces."""


def _represent(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    if problem := _text_problem(text):
        raise ConfigError(problem)
    return dumper.represent_scalar(f"{_TAG}str", text, style='"' if {*text} & {*"\x85\u2028\u2029"} else None)


_Dumper.add_representer(str, _represent)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
