"""The table of cases: which calls prove a route that declares certain features. The tests use the same table."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from attention_ops.features import Feature
from attention_ops.selftest.cases import DTYPES, GEOMETRIES, MODES, Case, make, parse, wide_dtypes
from attention_ops.selftest.ingredients import INGREDIENTS

ALONE = (
    "causal",
    "window",
    "segments",
    "lengths",
    "mask",
    "bias",
    "sinks",
    "soft_cap",
    "gqa",
    "value_dim",
    "dropout",
    "offset",
)
"""One ingredient per feature."""

PAIRED = (
    ("causal+offset_rows+segments+lengths+mask_shared+sinks+value_dim", "tiles", "float32"),
    ("causal+window+mask_samples+bias_heads+soft_cap+gqa", "tiles", "bfloat16"),
    ("window_open+kv_lengths+mask_heads+bias_keys+sinks_many+value_narrow", "tiles", "float16"),
    ("window_int+offset_traced+segments_mixed+mask_2d+sinks_shared+soft_cap+mqa", "tiles", "float32"),
    ("segments+q_lengths+mask_keys+bias_float32+soft_cap+gqa+value_dim", "tiles", "bfloat16"),
    ("causal+offset+segments+mask_prefix+bias_shared+gqa", "tiles", "float32"),
)
"""Every pair of features is in one of these; without what a route does not declare they still cover the pairs it does."""

OTHERS = (
    ("mask_static+bias_2d+sinks", "square", "float32"),
    ("mask_or+bias_blocks+soft_cap", "tiles", "float16"),
    ("mask_not+bias_head_keys+gqa", "square", "float32"),
    ("causal+window_left+mask_chunked+scale", "tiles", "bfloat16"),
    ("causal+offset_negative", "small", "float32"),
    ("causal+kv_lengths+gqa", "decode", "float32"),
    ("gqa+mask+bias_blocks", "decode", "float32"),
    ("mask_late", "decode", "float32"),
    ("mask_late", "decode_long", "float32"),
    ("causal", "one_head", "float32"),
    ("plain", "odd", "float32"),
    ("causal+bias_lowest", "small", "float16"),
    ("sinks_strong", "small", "float32"),
    ("sinks", "small", "bfloat16", "cancel"),
    ("plain", "deep", "bfloat16", "large"),
    ("dropout+window+lengths+mask_samples+bias_heads+soft_cap+gqa", "small", "bfloat16"),
    ("dropout+causal+offset+segments+sinks+value_dim", "small", "float32"),
    ("causal+kv_lengths+gqa", "long", "float32"),
)

IN_MODES = (
    ("plain", "bare"),
    ("plain", "forward"),
    ("causal+bias_heads+gqa", "eager"),
    ("causal+mask_samples+bias_heads", "vmap"),
    ("window+sinks+gqa", "vmap_grad"),
    ("lengths+soft_cap+gqa", "remat"),
)

TIMED = ("long",)
"""Sizes at which a route is timed against vanilla."""


def quick(declared: frozenset[Feature]) -> list[Case]:
    """Return the cases of the quick run for a route that declares these features."""
    cases = [make(()), *map(make, _alone(declared, ALONE))]
    cases += [parse("/".join(row)) for row in (*PAIRED, *OTHERS)]
    cases += [make(_split(parts), mode=mode) for parts, mode in IN_MODES]
    for dtype, (parts, geometry, _) in itertools.product(wide_dtypes(), (("plain", "small", ""), *PAIRED[:2])):
        cases.append(make(_split(parts), geometry, dtype))
    return _applicable(cases, declared)


def full(declared: frozenset[Feature]) -> list[Case]:
    """Return the whole grid: each ingredient alone, each pair of features by itself, sizes, dtypes and modes."""
    cases = quick(declared)
    alone = {frozenset(parts) for parts in _alone(declared, ALONE)}
    for index, parts in enumerate([(), *_alone(declared, INGREDIENTS)]):
        dtypes = DTYPES if not parts or frozenset(parts) in alone else (DTYPES[index % 3],)
        cases += [*(make(parts, "small", dtype) for dtype in dtypes), make(parts, "tiles")]
    for index, (one, other) in enumerate(itertools.combinations(_alone(declared, ALONE), 2)):
        cases.append(make({*one, *other}, *_PAIR_SIZES[index % len(_PAIR_SIZES)]))
    for index, geometry in enumerate(GEOMETRIES):
        for count, parts in enumerate(("plain", "causal+gqa", "kv_lengths+bias_heads+soft_cap")):
            cases.append(make(_split(parts), geometry, DTYPES[(index + count) % 2]))
    for index, mode in enumerate(MODES):
        for parts, *_ in (PAIRED[index % len(PAIRED)], PAIRED[(index + 3) % len(PAIRED)]):
            cases.append(make(_split(parts), mode=mode))
    for dtype, parts in zip(("bfloat16", "float16", "bfloat16"), ("sinks", "sinks_many", "sinks_shared"), strict=True):
        cases.append(make((parts,), "aligned", dtype, "cancel"))
    cases += [make((), "deep", dtype, "large") for dtype in DTYPES]
    return _applicable(cases, declared)


_PAIR_SIZES = (("tiles", "float32"), ("small", "bfloat16"), ("square", "float16"))


def alone(features: frozenset[Feature], declared: frozenset[Feature]) -> list[Case]:
    """Return the cases of each ingredient of these features by itself."""
    return [make(parts) for parts in _alone(declared, INGREDIENTS) if {INGREDIENTS[name].feature for name in parts} & features]


def among_others(features: frozenset[Feature], declared: frozenset[Feature]) -> list[Case]:
    """Return the cases that have these features and many more."""
    cases = [case for case in (parse("/".join(row)) for row in PAIRED) if case.features & features]
    return [case for case in _applicable(cases, declared) if not case.variant]


def sample(declared: frozenset[Feature]) -> list[Case]:
    """Return a few cases that have every feature in them, for kernels in their interpreter, which is slow."""
    cases = [make(()), *(parse("/".join(row)) for row in PAIRED[:2])]
    return _applicable(cases, declared)


def interpreted(declared: frozenset[Feature]) -> list[Case]:
    """Return the grid for kernels in their interpreter: the quick one without its long sequences, and each feature at tiles."""
    cases = [case for case in quick(declared) if case.sizes.S < 500 and case.variant != "nan"]
    cases += [make(parts, "tiles", "bfloat16") for parts in [(), *_alone(declared, ALONE)]]
    return _applicable(cases, declared)


def lowered(declared: frozenset[Feature]) -> list[Case]:
    """Return the cases that are lowered and not run: each ingredient alone, and the combinations of the quick grid."""
    cases = [make(parts) for parts in [(), *_alone(declared, INGREDIENTS)]]
    cases += [parse("/".join(row)) for row in (*PAIRED, *OTHERS) if len(row) < 4]
    cases += [make(_split(parts), mode=mode) for parts, mode in IN_MODES if mode in ("bare", "forward", "remat")]
    return [case for case in _applicable(cases, declared) if not case.variant]


def lowered_sample(declared: frozenset[Feature]) -> list[Case]:
    """Return some of these."""
    cases = [make(()), *map(make, _alone(declared, ("causal", "window_left"))), *(parse("/".join(row)) for row in PAIRED)]
    return [case for case in _applicable(cases, declared) if not case.variant]


def _split(parts: str) -> tuple[str, ...]:
    return () if parts == "plain" else tuple(parts.split("+"))


def _alone(declared: frozenset[Feature], names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return each ingredient by itself; an offset, which is nothing without a mask of positions, with one of these."""
    position = next((name for name in ("causal", "window") if INGREDIENTS[name].feature in declared), None)
    rows: list[tuple[str, ...]] = []
    for name in names:
        feature = INGREDIENTS[name].feature
        if feature is Feature.OFFSET and feature in declared:
            rows += [] if position is None else [(position, name)]
        elif feature is None or feature in declared:
            rows.append((name,))
    return rows


_HIDING = frozenset({Feature.MASK, Feature.SEGMENTS, Feature.LENGTHS, Feature.OFFSET})
_POSITIONAL = frozenset({Feature.CAUSAL, Feature.WINDOW})
_ORDINARY = ("small", "tiles", "square")


def _applicable(cases: Iterable[Case], declared: frozenset[Feature]) -> list[Case]:
    """Return the cases as far as the features allow, each once, those that hide keys or rows also with NaN there."""
    kept: dict[Case, None] = {}
    seen: set[Case] = set()
    for wanted in cases:
        case = restricted(wanted, declared)
        kind = dataclasses.replace(case, geometry="small") if case.geometry in _ORDINARY else case
        if not _about(wanted) <= declared or (case != wanted and kind in seen):
            continue
        seen.add(kind)
        kept[case] = None
        if hides(case) and not case.variant and not case.mode and case.geometry not in TIMED:
            kept[dataclasses.replace(case, variant="nan")] = None
    return list(kept)


def hides(case: Case) -> bool:
    """Whether keys or rows are hidden from all, so that they can be filled with NaN."""
    shifted = case.sizes.T != case.sizes.S and bool(case.features & _POSITIONAL)
    return bool(case.features & _HIDING) or "bias_blocks" in case.parts or shifted


def _about(case: Case) -> frozenset[Feature]:
    """Return the features without which a case has no point."""
    return frozenset({Feature.SINKS} if case.variant == "cancel" else {Feature.DROPOUT} & case.features)


def restricted(case: Case, declared: frozenset[Feature]) -> Case:
    """Return the case without the ingredients whose feature is not declared."""
    kept = [item for item in case.ingredients if item.feature is None or item.feature in declared]
    names = {item.name for item in kept}
    kept = [item for item in kept if not item.needs or any(INGREDIENTS[n].feature in _features(names) for n in item.needs)]
    return make((item.name for item in kept), case.geometry, case.dtype, case.variant, case.mode)


def _features(names: Iterable[str]) -> set[Feature | None]:
    return {INGREDIENTS[name].feature for name in names}
