"""Cases: one call each, with its data and its law.

A case is a name. `causal+gqa/tiles/bfloat16/nan` is: the ingredients causal and gqa, the sizes called tiles, a dtype, and hidden
keys and rows filled with NaN. Any combination of known words is a case, so whatever failed can be run again by its name.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from attention_ops.errors import did_you_mean
from attention_ops.features import Feature
from attention_ops.selftest import reference
from attention_ops.selftest.ingredients import INGREDIENTS, Draft, Ingredient

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Sizes before the ingredients change them, and block sizes to force, if any."""

    B: int
    T: int
    S: int
    H: int
    D: int
    blocks: tuple[int | None, int | None] = (None, None)


GEOMETRIES = {
    "small": Geometry(2, 19, 19, 6, 16),
    "tiles": Geometry(2, 37, 53, 6, 16, (8, 16)),  # blocks divide neither length
    "square": Geometry(2, 45, 45, 6, 16, (16, 8)),
    "ragged": Geometry(2, 22, 19, 6, 16, (16, 16)),
    "one_head": Geometry(2, 12, 12, 1, 8),
    "odd": Geometry(2, 19, 19, 3, 13),  # the default scale is that of 13, whatever it is padded to
    "wide": Geometry(1, 24, 24, 2, 80),
    "decode": Geometry(3, 1, 75, 6, 16, (None, 16)),
    "decode_long": Geometry(1, 1, 1100, 2, 16),
    "long": Geometry(1, 525, 525, 4, 32),  # more than one tile at the default block sizes
    "deep": Geometry(1, 128, 128, 2, 128),
    "aligned": Geometry(2, 128, 128, 4, 64),  # for routes with rules about lengths and head dims
    "aligned_wide": Geometry(1, 256, 256, 4, 128),
}
_FALLBACK_GEOMETRIES = ("small", "square", "aligned", "aligned_wide")

VARIANTS = {
    "nan": "hidden keys and rows hold NaN, Inf and huge numbers",
    "large": "logits four times as large, up to about 50",
    "cancel": "cotangents chosen so that the gradient of the sinks is a sum that nearly cancels",
}
MODES = {
    "bare": "asks for nothing but the output",
    "forward": "differentiable=False",
    "eager": "not under jit",
    "vmap": "query and bias mapped, the rest not",
    "vmap_grad": "vmap of the gradient, all arrays mapped",
    "remat": "under jax.checkpoint",
}


class UnknownCaseError(ValueError):
    """A case name has a word that no table holds."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One call to check: ingredients in table order, and how it is made."""

    parts: tuple[str, ...] = ()
    geometry: str = "small"
    dtype: str = "float32"
    variant: str = ""
    mode: str = ""

    @functools.cached_property
    def name(self) -> str:
        words = ("+".join(self.parts) or "plain", self.geometry, self.dtype, self.variant, self.mode)
        return "/".join(word for word in words if word)

    @property
    def ingredients(self) -> tuple[Ingredient, ...]:
        return tuple(INGREDIENTS[part] for part in self.parts)

    @property
    def features(self) -> frozenset[Feature]:
        """The features its ingredients are cases of."""
        return frozenset(item.feature for item in self.ingredients if item.feature is not None)

    @property
    def sizes(self) -> Geometry:
        return GEOMETRIES[self.geometry]

    @property
    def samples(self) -> int:
        return 2 if self.mode in ("vmap", "vmap_grad") else 1

    def problem(self, seed: int = 0, sample: int = 0) -> Problem:
        """Draw the data. The same seed gives the same data, whatever else is run; variants and modes share it."""
        return _drawn(self, seed, sample)

    def elsewhere(self) -> Iterator[Case]:
        """Yield the case, then the same at other sizes and dtypes, for a route whose rules refuse these."""
        yield self
        dtypes = dict.fromkeys((self.dtype, *DTYPES))
        for dtype, geometry in itertools.product(dtypes, _FALLBACK_GEOMETRIES):
            if (geometry, dtype) != (self.geometry, self.dtype):
                yield dataclasses.replace(self, geometry=geometry, dtype=dtype)

    def _draft(self, rng: np.random.Generator) -> Draft:
        draft = self._start(rng)
        for item in self.ingredients:
            if item.resize is not None:
                item.resize(draft)
        for item in sorted(self.ingredients, key=lambda item: item.feature is not Feature.OFFSET):
            item.add(draft)
        if draft.positional and draft.T not in (1, draft.S):
            draft.options.setdefault("query_offset", 0)
        return draft

    def _start(self, rng: np.random.Generator) -> Draft:
        g = self.sizes
        return Draft(rng, dtype_of(self.dtype), g.B, g.T, g.S, g.H, g.H, g.D, g.D)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The data of a case. `options` is what the call gets; `law` the same for the reference, a Mask as its boolean array."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    options: Mapping[str, Any]
    law: Mapping[str, Any]
    d_output: np.ndarray
    d_logsumexp: np.ndarray
    d_weights: np.ndarray

    @property
    def shapes(self) -> str:
        arrays = {"query": self.query, "key": self.key, "value": self.value} | {
            name: value for name, value in self.law.items() if isinstance(value, np.ndarray) and value.ndim
        }
        return ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())


def wide_dtypes() -> tuple[str, ...]:
    """Return the dtypes that there are beyond DTYPES: float64 where JAX_ENABLE_X64 is set."""
    return ("float64",) if jax.dtypes.canonicalize_dtype(np.float64) == np.float64 else ()


def dtype_of(name: str) -> np.dtype:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@functools.lru_cache(maxsize=128)
def _drawn(case: Case, seed: int, sample: int) -> Problem:
    name = dataclasses.replace(case, variant="", mode="").name
    draft = case._draft(np.random.default_rng([seed, zlib.crc32(name.encode()), sample]))
    B, T, S, H, K, D, Dv = draft.B, draft.T, draft.S, draft.H, draft.K, draft.D, draft.Dv
    query = draft.normal(B, T, H, D, scale=12.0 if case.variant == "large" else 3.0)
    key = draft.normal(B, S, K, D)
    head = np.arange(K)[:, None]
    value = draft.normal(B, S, K, Dv) + 0.25 * head
    if Feature.DROPOUT in case.features:  # the output then shows each weight by itself
        value = np.broadcast_to(np.eye(S, Dv)[None, :, None, :] * (1 + 0.25 * head), value.shape)
    law = dict(draft.options) if draft.law is None else {**draft.options, "mask": draft.law}
    d_output = draft.normal(B, T, H, Dv, center=0.5)
    d_logsumexp, d_weights = (draft.normal(*x).astype(reference.softmax_dtype(draft.dtype)) for x in ((B, T, H), (B, H, T, S)))
    query, key, value, d_output = (x.astype(draft.dtype) for x in (query, key, value, d_output))
    if case.variant == "nan":
        query, key, value = _poisoned(query, key, value, reference.visible(B, H, T, S, law))
    return Problem(query, key, value, draft.options, law, d_output, d_logsumexp, d_weights)


_POISON = (np.nan, np.inf, -np.inf, 3e4)


def _poisoned(query: np.ndarray, key: np.ndarray, value: np.ndarray, allowed: np.ndarray) -> tuple[np.ndarray, ...]:
    """Fill the keys that no query may attend, and the queries that may attend no key."""
    B, H, T, S = allowed.shape
    K = key.shape[2]
    unseen = ~np.any(allowed.reshape(B, K, H // K, T, S), axis=(2, 3)).swapaxes(1, 2)
    blind = ~np.any(allowed, axis=3).swapaxes(1, 2)
    filled = []
    for array, dead in ((query, blind), (key, unseen), (value, unseen)):
        array = array.copy()
        array[dead] = np.resize(np.asarray(_POISON), (int(dead.sum()), 1)).astype(array.dtype)
        filled.append(array)
    return tuple(filled)


# ---------------------------------------------------------------- names


def parse(name: str) -> Case:
    """Return the case of that name.

    Raises:
        UnknownCaseError: a word is unknown; the message has those that are known.
    """
    head, *words = name.split("/")
    parts = () if head == "plain" else tuple(head.split("+"))
    for part in parts:
        if part not in INGREDIENTS:
            hint, known = did_you_mean(part, INGREDIENTS), ", ".join(INGREDIENTS)
            raise UnknownCaseError(
                f"no case ingredient is named {part!r} in {name!r}.{hint} Allowed: plain, or with + between {known}"
            )
    found: dict[str, str] = {}
    tables = (("geometry", GEOMETRIES), ("dtype", (*DTYPES, *wide_dtypes())), ("variant", VARIANTS), ("mode", MODES))
    for word in words:
        field = next((field for field, table in tables if word in table and field not in found), None)
        if field is None:
            left = [word for field, table in tables if field not in found for word in table]
            hint, allowed = did_you_mean(word, left), ", ".join(left) or "nothing more"
            raise UnknownCaseError(
                f"{word!r} in {name!r} is no size, dtype, variant or mode that is left.{hint} Allowed: {allowed}"
            )
        found[field] = word
    return make(parts, **found)


def make(parts: Iterable[str], geometry: str = "small", dtype: str = "float32", variant: str = "", mode: str = "") -> Case:
    """Return a case, its ingredients in the order of the table."""
    chosen = set(parts)
    return Case(tuple(name for name in INGREDIENTS if name in chosen), geometry, dtype, variant, mode)
