"""What cases are made of: each ingredient adds one thing to a call, with its law as a plain boolean array where it is a Mask.

An ingredient that needs other sizes says so in `resize`, before any data is drawn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from attention_ops.features import Feature


@dataclasses.dataclass
class Draft:
    """A case while it is put together. `options` go to the call; `hidden` collects the law of a Mask object."""

    rng: np.random.Generator
    dtype: np.dtype
    B: int
    T: int
    S: int
    H: int
    K: int
    D: int
    Dv: int
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    law: np.ndarray | None = None
    positional: bool = False

    def normal(self, *shape: int, scale: float = 1.0, center: float = 0.0) -> np.ndarray:
        return self.rng.normal(center, scale, shape).astype(np.float32)

    def rows(self, low: float, high: float, size: int) -> np.ndarray:
        """Return one number per batch row, from `low` * size to `high` * size, all different where there is room."""
        return np.linspace(low * size, high * size, self.B).astype(np.int32)

    @property
    def distance(self) -> np.ndarray:
        """Key position minus query position, [B or 1, 1, T, S]."""
        offset = np.asarray(self.options.get("query_offset", self.S - 1 if self.T == 1 else 0)).reshape(-1, 1, 1, 1)
        return np.arange(self.S)[None, :] - np.arange(self.T)[:, None] - offset


Step = Callable[[Draft], None]


@dataclasses.dataclass(frozen=True)
class Ingredient:
    """One thing a call can have. `feature` is what it is a case of; None for a variation that every route must honour."""

    name: str
    feature: Feature | None
    add: Step
    resize: Step | None = None
    needs: tuple[str, ...] = ()


INGREDIENTS: dict[str, Ingredient] = {}


def _ingredient(feature: Feature | None, resize: Step | None = None, needs: tuple[str, ...] = ()) -> Callable[[Step], Step]:
    def register(step: Step) -> Step:
        name = step.__name__.removeprefix("_")
        INGREDIENTS[name] = Ingredient(name, feature, step, resize, needs)
        return step

    return register


# ---------------------------------------------------------------- shapes and scalars


def _three_groups(draft: Draft) -> None:
    draft.K = max(1, draft.H // 3 if draft.H % 3 == 0 else draft.H // 2)


def _one_key_head(draft: Draft) -> None:
    draft.K = 1


def _wide_values(draft: Draft) -> None:
    draft.Dv = draft.D + 8


def _narrow_values(draft: Draft) -> None:
    draft.Dv = draft.D // 2


def _nothing(draft: Draft) -> None:
    pass


for _name, _feature, _resize in (
    ("gqa", Feature.GQA, _three_groups),
    ("mqa", Feature.GQA, _one_key_head),
    ("value_dim", Feature.VALUE_DIM, _wide_values),
    ("value_narrow", Feature.VALUE_DIM, _narrow_values),
):
    INGREDIENTS[_name] = Ingredient(_name, _feature, _nothing, _resize)


@_ingredient(None)
def _scale(draft: Draft) -> None:
    draft.options["softmax_scale"] = 0.4


@_ingredient(Feature.SOFT_CAP)
def _soft_cap(draft: Draft) -> None:
    """Well below the logits, whose deviation is 3, so that it bites."""
    draft.options["logits_soft_cap"] = 2.5


def _as_many_keys_as_values(draft: Draft) -> None:
    """For values that are the unit matrix."""
    draft.T, draft.S = (draft.Dv if draft.T == draft.S else draft.T), draft.Dv


@_ingredient(Feature.DROPOUT, _as_many_keys_as_values)
def _dropout(draft: Draft) -> None:
    draft.options |= {"dropout_prob": 0.3, "deterministic": False}


# ---------------------------------------------------------------- positions


@_ingredient(Feature.CAUSAL)
def _causal(draft: Draft) -> None:
    draft.options["causal"], draft.positional = True, True


@_ingredient(Feature.WINDOW)
def _window(draft: Draft) -> None:
    draft.options["sliding_window"] = (draft.S // 4, draft.S // 8 + 1)
    draft.positional = True


@_ingredient(Feature.WINDOW)
def _window_int(draft: Draft) -> None:
    draft.options["sliding_window"], draft.positional = draft.S // 5, True


@_ingredient(Feature.WINDOW)
def _window_left(draft: Draft) -> None:
    draft.options["sliding_window"], draft.positional = (draft.S // 4, 0), True


@_ingredient(Feature.WINDOW)
def _window_open(draft: Draft) -> None:
    draft.options["sliding_window"], draft.positional = (None, draft.S // 6), True


def _more_keys(draft: Draft) -> None:
    if draft.T >= draft.S:
        draft.T = max(1, draft.S * 2 // 3)


def _more_queries(draft: Draft) -> None:
    draft.T = draft.S + 5


@_ingredient(Feature.OFFSET, _more_keys, needs=("causal", "window"))
def _offset(draft: Draft) -> None:
    """Neither the top-left nor the bottom-right alignment."""
    draft.options["query_offset"] = draft.S - draft.T - 2


@_ingredient(Feature.OFFSET, _more_queries, needs=("causal", "window"))
def _offset_negative(draft: Draft) -> None:
    """Bottom-right with more queries than keys: the first rows see nothing."""
    draft.options["query_offset"] = draft.S - draft.T


@_ingredient(Feature.OFFSET, _more_keys, needs=("causal", "window"))
def _offset_traced(draft: Draft) -> None:
    draft.options["query_offset"] = np.int32(draft.S - draft.T - 2)


@_ingredient(Feature.OFFSET, _more_keys, needs=("causal", "window"))
def _offset_rows(draft: Draft) -> None:
    draft.options["query_offset"] = np.linspace(draft.S - draft.T, 1, draft.B).astype(np.int32)


# ---------------------------------------------------------------- run-time masks


def _packed(draft: Draft, length: int) -> np.ndarray:
    """Three segments per row, cut in other places in each, the last ones padding (-1)."""
    cuts = np.linspace((0.3, 0.75, 0.92), (0.5, 0.85, 0.97), draft.B)
    place = np.arange(length)[None, :] / length
    ids = (place >= cuts[:, :1]).astype(np.int32) + (place >= cuts[:, 1:2])
    return np.where(place >= cuts[:, 2:], -1, ids).astype(np.int32)


@_ingredient(Feature.SEGMENTS)
def _segments(draft: Draft) -> None:
    draft.options |= {"q_segment_ids": _packed(draft, draft.T), "kv_segment_ids": _packed(draft, draft.S)}


@_ingredient(Feature.SEGMENTS)
def _segments_mixed(draft: Draft) -> None:
    """Ids in no order, padding between them."""
    for name, length in (("q_segment_ids", draft.T), ("kv_segment_ids", draft.S)):
        draft.options[name] = draft.rng.integers(-1, 3, (draft.B, length)).astype(np.int32)


@_ingredient(Feature.LENGTHS)
def _lengths(draft: Draft) -> None:
    draft.options |= {"q_lengths": draft.rows(1.0, 0.7, draft.T), "kv_lengths": draft.rows(0.6, 0.95, draft.S)}


@_ingredient(Feature.LENGTHS)
def _kv_lengths(draft: Draft) -> None:
    draft.options["kv_lengths"] = draft.rows(0.5, 0.9, draft.S)


@_ingredient(Feature.LENGTHS)
def _q_lengths(draft: Draft) -> None:
    draft.options["q_lengths"] = draft.rows(0.5, 0.9, draft.T)


@_ingredient(Feature.LENGTHS)
def _kv_lengths_zero(draft: Draft) -> None:
    draft.options["kv_lengths"] = draft.rows(0.0, 1.0, draft.S)


def _scattered(draft: Draft, b: int, h: int, t: int, s: int) -> np.ndarray:
    """Three quarters True, with one row that sees nothing and one key that nothing sees, elsewhere for each b and h."""
    mask = draft.rng.random((b, h, t, s)) < 0.75
    for i in range(b):
        for j in range(h):
            if t > 4:
                mask[i, j, (3 + i + 2 * j) % t] = False
            mask[i, j, :, (s // 2 + 3 * i + j) % s] = False
    return mask


def _array_mask(draft: Draft, per_sample: bool, per_head: bool, per_query: bool = True) -> None:
    sizes = (draft.B if per_sample else 1, draft.H if per_head else 1, draft.T if per_query else 1, draft.S)
    draft.options["mask"] = _scattered(draft, *sizes)


@_ingredient(Feature.MASK)
def _mask(draft: Draft) -> None:
    _array_mask(draft, True, True)


@_ingredient(Feature.MASK)
def _mask_2d(draft: Draft) -> None:
    draft.options["mask"] = _scattered(draft, 1, 1, draft.T, draft.S)[0, 0]


@_ingredient(Feature.MASK)
def _mask_shared(draft: Draft) -> None:
    _array_mask(draft, False, False)


@_ingredient(Feature.MASK)
def _mask_samples(draft: Draft) -> None:
    _array_mask(draft, True, False)


@_ingredient(Feature.MASK)
def _mask_heads(draft: Draft) -> None:
    _array_mask(draft, False, True)


@_ingredient(Feature.MASK)
def _mask_keys(draft: Draft) -> None:
    _array_mask(draft, True, False, per_query=False)


@_ingredient(Feature.MASK)
def _mask_late(draft: Draft) -> None:
    """Only keys near the end are visible, so that the first tiles are wholly hidden."""
    place = np.arange(draft.S) / draft.S
    draft.options["mask"] = ((place >= 0.82) & (place < 0.88))[None, None, None, :] & np.ones((draft.B, 1, draft.T, 1), bool)


# ---------------------------------------------------------------- masks as values


def _dense(array: Any) -> Any:
    from attention_ops.masks import Dense

    return Dense(array)


def _value_mask(draft: Draft, mask: Any, law: np.ndarray) -> None:
    draft.options["mask"], draft.law = mask, law


@_ingredient(Feature.MASK)
def _mask_static(draft: Draft) -> None:
    array = _scattered(draft, draft.B, 1, draft.T, draft.S)
    array[:, :, :, draft.S // 3 : 2 * draft.S // 3] &= np.arange(draft.T)[:, None] > draft.T // 2
    _value_mask(draft, _dense(array), array)


@_ingredient(Feature.MASK)
def _mask_static_heads(draft: Draft) -> None:
    array = _scattered(draft, 1, draft.H, draft.T, draft.S)
    _value_mask(draft, _dense(array), array)


@_ingredient(Feature.MASK)
def _mask_prefix(draft: Draft) -> None:
    from attention_ops.masks import PrefixLM

    prefix, draft.positional = draft.S // 3, True
    _value_mask(draft, PrefixLM(prefix), (draft.distance <= 0) | (np.arange(draft.S) < prefix))


@_ingredient(Feature.MASK)
def _mask_prefix_rows(draft: Draft) -> None:
    import jax.numpy as jnp

    from attention_ops.masks import PrefixLM

    prefix, draft.positional = draft.rows(0.5, 0.2, draft.S), True
    law = (draft.distance <= 0) | (np.arange(draft.S) < prefix[:, None, None, None])
    _value_mask(draft, PrefixLM(jnp.asarray(prefix)), law)


@_ingredient(Feature.MASK)
def _mask_chunked(draft: Draft) -> None:
    from attention_ops.masks import Chunked

    size, draft.positional = draft.S // 3, True
    key = np.arange(draft.S)
    _value_mask(draft, Chunked(size), (key - draft.distance) // size == key // size)


@_ingredient(Feature.MASK)
def _mask_or(draft: Draft) -> None:
    """A window or the first keys (attention sinks as positions), and not one more key."""
    from attention_ops.masks import Window

    wide, first, draft.positional = draft.S // 5, draft.S // 8, True
    key = np.arange(draft.S)[None, :] + np.zeros((draft.T, 1), int)
    law = (((draft.distance <= 1) & (draft.distance >= -wide)) | (key < first)) & (key != draft.S // 2)
    _value_mask(draft, (Window(wide, 1) | _dense(key < first)) & _dense(key != draft.S // 2), law)


@_ingredient(Feature.MASK)
def _mask_not(draft: Draft) -> None:
    import jax.numpy as jnp

    from attention_ops.masks import Segments, Window

    blocked = ~_scattered(draft, draft.B, 1, draft.T, draft.S)
    ids = draft.rng.integers(-1, 8, (draft.B, draft.T)).astype(np.int32)
    key_ids = draft.rng.integers(-1, 8, (draft.B, draft.S)).astype(np.int32)
    same = (ids[:, None, :, None] == key_ids[:, None, None, :]) & (ids >= 0)[:, None, :, None]
    near, draft.positional = np.abs(draft.distance) <= 1, True
    mask = ~(_dense(jnp.asarray(blocked)) | Window(1, 1)) & ~Segments(jnp.asarray(ids), jnp.asarray(key_ids))
    _value_mask(draft, mask, ~(blocked | near) & ~same)


# ---------------------------------------------------------------- biases and sinks


def _add_bias(draft: Draft, b: bool, h: bool, t: bool, s: bool) -> None:
    sizes = (draft.B if b else 1, draft.H if h else 1, draft.T if t else 1, draft.S if s else 1)
    draft.options["bias"] = draft.normal(*sizes, scale=2.0).astype(draft.dtype)


@_ingredient(Feature.BIAS)
def _bias(draft: Draft) -> None:
    _add_bias(draft, True, True, True, True)


@_ingredient(Feature.BIAS)
def _bias_2d(draft: Draft) -> None:
    draft.options["bias"] = draft.normal(draft.T, draft.S, scale=2.0).astype(draft.dtype)


@_ingredient(Feature.BIAS)
def _bias_shared(draft: Draft) -> None:
    _add_bias(draft, False, False, True, True)


@_ingredient(Feature.BIAS)
def _bias_heads(draft: Draft) -> None:
    _add_bias(draft, False, True, True, True)


@_ingredient(Feature.BIAS)
def _bias_keys(draft: Draft) -> None:
    _add_bias(draft, True, False, False, True)


@_ingredient(Feature.BIAS)
def _bias_head_keys(draft: Draft) -> None:
    _add_bias(draft, False, True, False, True)


@_ingredient(Feature.BIAS)
def _bias_float32(draft: Draft) -> None:
    draft.options["bias"] = draft.normal(draft.B, 1, draft.T, draft.S, scale=2.0)


@_ingredient(Feature.BIAS)
def _bias_blocks(draft: Draft) -> None:
    """-inf blocks like a mask; it may leave rows empty and hide keys."""
    bias = draft.normal(draft.B, draft.H, draft.T, draft.S, scale=2.0)
    draft.options["bias"] = np.where(_scattered(draft, *bias.shape), bias, -np.inf).astype(draft.dtype)


@_ingredient(Feature.BIAS)
def _bias_lowest(draft: Draft) -> None:
    """The lowest finite number where a key should not be attended, two planes of it: a sum of them would be -inf."""
    import ml_dtypes

    hidden = np.arange(draft.S)[None, :] > np.arange(draft.T)[:, None]
    draft.options["bias"] = np.where(hidden, ml_dtypes.finfo(draft.dtype).min, 0).astype(draft.dtype)


@_ingredient(Feature.SINKS)
def _sinks(draft: Draft) -> None:
    draft.options["softmax_aux"] = draft.normal(draft.H, scale=1.5, center=4.0)


@_ingredient(Feature.SINKS)
def _sinks_many(draft: Draft) -> None:
    draft.options["softmax_aux"] = draft.normal(draft.H, 2, scale=1.5, center=3.0)


@_ingredient(Feature.SINKS)
def _sinks_shared(draft: Draft) -> None:
    draft.options["softmax_aux"] = draft.normal(1, 3, scale=1.5, center=3.0)


@_ingredient(Feature.SINKS)
def _sinks_strong(draft: Draft) -> None:
    """So far above the logits that their ratio overflows float32."""
    draft.options["softmax_aux"] = draft.normal(draft.H, center=120.0)
