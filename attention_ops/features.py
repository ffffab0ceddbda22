"""What a request can ask of a route, and what a route can declare."""

from __future__ import annotations

import enum
from typing import ClassVar


class Feature(enum.Enum):
    """One thing a request may need beyond plain query, key and value. The value is the phrase used in refusals."""

    ALL: ClassVar[frozenset[Feature]]

    MASK = "an arbitrary boolean mask"
    CAUSAL = "causal masking"
    WINDOW = "a sliding_window"
    SEGMENTS = "segment ids"
    LENGTHS = "q_lengths or kv_lengths"
    OFFSET = "a query_offset other than 0"
    BIAS = "a bias"
    BIAS_GRADIENT = "the gradient of the bias"
    SINKS = "attention sinks (softmax_aux)"
    SOFT_CAP = "logits_soft_cap"
    GQA = "fewer key/value heads than query heads"
    VALUE_DIM = "a value head dim other than the query head dim"
    DROPOUT = "dropout"
    WEIGHTS = "return_weights"
    LOGSUMEXP = "return_logsumexp"
    GRADIENT = "gradients (differentiable=True)"

    __hash__ = object.__hash__  # that of Enum runs in Python, at each look-up of a cached plan

    def __lt__(self, other: Feature) -> bool:
        return _ORDER[self] < _ORDER[other]


_ORDER = {feature: index for index, feature in enumerate(Feature)}
Feature.ALL = frozenset(Feature)
