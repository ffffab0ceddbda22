"""Requests said in text: shapes, and the options of a call as `name=value`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax

from attention_ops import masks
from attention_ops.cli.expression import parse as parse_mask
from attention_ops.errors import did_you_mean

_TRUE, _FALSE, _NONE = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null", "")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The letters that shapes may use."""

    B: int
    T: int
    S: int
    H: int
    K: int
    D: int
    Dv: int

    @classmethod
    def of(cls, query: Any, key: Any, value: Any) -> Sizes:
        (B, T, H, D), (_, S, K, _) = query.shape, key.shape
        return cls(B, T, S, H, K, D, value.shape[3])


def arrays(shape: tuple[int, ...], kv: tuple[int, ...] | None, dtype: str) -> tuple[Any, Any, Any]:
    """Return query, key and value as shapes. `kv` is (S, K) or (S, K, Dv); without it they are those of the query."""
    B, T, H, D = shape
    S, K, Dv = (T, H, D) if kv is None else (*kv, D)[:3]
    query, key, value = (jax.ShapeDtypeStruct(dims, dtype) for dims in ((B, T, H, D), (B, S, K, D), (B, S, K, Dv)))
    return query, key, value


def options(settings: Iterable[str], sizes: Sizes, dtype: str) -> dict[str, Any]:
    """Return call options from `name=value`; arrays become shapes. ValueError says what is wrong with a setting.

    >>> options(["causal=true", "sliding_window=511,0", "softmax_aux=H"], Sizes(1, 8, 8, 4, 2, 16, 16), "bfloat16")
    {'causal': True, 'sliding_window': (511, 0), 'softmax_aux': ShapeDtypeStruct(shape=(4,), dtype=float32)}
    """
    said: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = (part.strip() for part in setting.partition("="))
        if name not in SAYABLE:
            raise ValueError(_unknown(name))
        if name in said:
            raise ValueError(f"{name} is set twice; keep one")
        kind = SAYABLE[name]
        if not equals and kind is not FLAG:
            raise ValueError(f"{setting!r} has no value; write {name}={kind.example}")
        try:
            unset = kind is not FLAG and text.lower() in _NONE
            said[name] = None if unset else kind.read(text if equals else "true", sizes, dtype)
        except ValueError as error:
            allowed = f"; allowed is {kind.allowed}, for example {name}={kind.example}" if kind.allowed else ""
            raise ValueError(f"{name}={text}: {error}{allowed}") from None
    if said.get("dropout_prob") and said.get("deterministic") is False:  # a text has no key to give, and its value is no fact
        said.setdefault("dropout_rng", jax.ShapeDtypeStruct((2,), "uint32"))
    return said


def _unknown(name: str) -> str:
    if name == "mask_info":
        return "mask_info holds arrays and cannot be said in text; say mask= and q_segment_ids= for what is in it"
    return f"unknown attention option {name!r}.{did_you_mean(name, SAYABLE)} Options: {', '.join(SAYABLE)}"


# ---------------------------------------------------------------- kinds of values


@dataclasses.dataclass(frozen=True)
class Kind:
    """How the value of an option is said. `allowed` is empty where the errors of `read` say it."""

    allowed: str
    example: str
    read: Callable[[str, Sizes, str], Any]


def _flag(text: str, sizes: Sizes, dtype: str) -> bool:
    if text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    raise ValueError(f"found {text!r}")


def _number(text: str, sizes: Sizes, dtype: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"{text!r} is no number")
    return number


def _window(text: str, sizes: Sizes, dtype: str) -> int | tuple[int | None, ...]:
    sides = tuple(None if side.strip().lower() in _NONE else _whole(side) for side in text.split(","))
    if len(sides) > 2:
        raise ValueError(f"found {len(sides)} numbers")
    return sides if len(sides) == 2 else sides[0]  # type: ignore[return-value]  # one None alone was read as "not set"


def _offset(text: str, sizes: Sizes, dtype: str) -> Any:
    if text in ("traced", "per-row"):
        return jax.ShapeDtypeStruct(() if text == "traced" else (sizes.B,), "int32")
    return _whole(text)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text.strip()!r} is no whole number") from None


def _mask(text: str, sizes: Sizes, dtype: str) -> masks.Mask:
    if _is_shape(text):
        return masks.Dense(jax.ShapeDtypeStruct(_shape(text, sizes), "bool"))
    try:
        return parse_mask(text, sizes.T, sizes.S)
    except ValueError as error:
        raise ValueError(f"{error}; or the shape of a boolean array, for example 1,1,T,S") from None


def _is_shape(text: str) -> bool:
    letters = {field.name for field in dataclasses.fields(Sizes)}
    return all(part.strip() in letters or part.strip().isdecimal() for part in text.split(","))


def _shape(text: str, sizes: Sizes) -> tuple[int, ...]:
    """Return the shape said by numbers and by letters that stand for the sizes of the request."""
    known = dataclasses.asdict(sizes)
    shape = []
    for part in (part.strip() for part in text.split(",")):
        if part not in known and not part.isdecimal():
            raise ValueError(f"{part!r} is no size")
        shape.append(known[part] if part in known else int(part))
    return tuple(shape)


def _array(default: str = "") -> Callable[[str, Sizes, str], Any]:
    """Read `B,H,T,S` or `B,H,T,S:float32`. With a default dtype of "" the array has that of the query."""

    def read(text: str, sizes: Sizes, dtype: str) -> Any:
        shape, _, own = text.partition(":")
        try:
            return jax.ShapeDtypeStruct(_shape(shape, sizes), own.strip() or default or dtype)
        except TypeError:
            raise ValueError(f"{own.strip()!r} is no dtype") from None

    return read


def _integers(letters: str) -> Callable[[str, Sizes, str], Any]:
    def read(text: str, sizes: Sizes, dtype: str) -> Any:
        return jax.ShapeDtypeStruct(_shape(letters if text.lower() in _TRUE[:3] else text, sizes), "int32")

    return read


def _key(text: str, sizes: Sizes, dtype: str) -> Any:
    return jax.ShapeDtypeStruct((2,), "uint32") if _flag(text, sizes, dtype) else None


FLAG = Kind("true or false", "true", _flag)
_SIZES = "sizes in numbers and in the letters B, T, S, H, K, D, Dv"
SAYABLE: dict[str, Kind] = {
    "causal": FLAG,
    "sliding_window": Kind("the keys before and after the query, none for no limit, or one number for both", "511,0", _window),
    "query_offset": Kind("a whole number, traced (known only at run time), or per-row", "4095", _offset),
    "mask": Kind("", "1,1,T,S", _mask),
    "bias": Kind(f"{_SIZES}, and a dtype after a colon", "1,1,T,S:float32", _array()),
    "q_segment_ids": Kind("yes, or B,T", "yes", _integers("B,T")),
    "kv_segment_ids": Kind("yes, or B,S", "yes", _integers("B,S")),
    "q_lengths": Kind("yes, or B", "yes", _integers("B")),
    "kv_lengths": Kind("yes, or B", "yes", _integers("B")),
    "softmax_aux": Kind(_SIZES, "H", _array("float32")),
    "softmax_scale": Kind("a number, or none", "0.125", _number),
    "logits_soft_cap": Kind("a number above 0, or none", "30.0", _number),
    "dropout_prob": Kind("a number from 0 to below 1", "0.1", _number),
    "dropout_rng": Kind("yes", "yes", _key),
    "deterministic": FLAG,
    "return_weights": FLAG,
    "return_logsumexp": FLAG,
    "differentiable": FLAG,
}
"""Every option of a call but `mask_info`, and how it is said."""
