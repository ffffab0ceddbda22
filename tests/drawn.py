"""Calls drawn from the whole option space: a structure, which decides what is compiled, and data for it.

The law of a call is kept beside it as plain numpy: masks are evaluated here, without `attention_ops.masks`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_ops import masks
from attention_ops.selftest import reference

Pick = Callable[..., Any]
"""Chooses one of its arguments."""

LENGTHS = (1, 2, 3, 5, 7, 8, 13)
DTYPES = ("float32", "float32", "bfloat16", "float16")
LEAVES = ("causal", "window", "prefix", "chunk", "static", "data", "segments", "lengths")


def numbered(number: int) -> Pick:
    """Return a pick that always chooses the same for a number."""
    rng = np.random.default_rng(number)
    return lambda *options: options[rng.integers(len(options))]


@dataclasses.dataclass(frozen=True)
class Structure:
    """What of a call is known while compiling. Arrays that broadcast to [B, H, T, S] say for each axis whether it is whole."""

    sizes: tuple[int, int, int, int, int, int, int]
    dtype: str
    causal: bool
    window: tuple[int | None, int | None] | None
    offset: str | int | None
    mask: Any
    bias: tuple[bool, ...] | None
    has_ids: bool
    lengths: tuple[bool, bool]
    sinks: str | None
    cap: float | None
    scale: float | None
    logsumexp: bool

    @property
    def is_positional(self) -> bool:
        return self.causal or self.window is not None or _has_positions(self.mask)

    def call(self, seed: int) -> Call:
        """Return the call with data of a seed."""
        rng, (B, T, S, H, K, D, Dv) = np.random.default_rng(seed), self.sizes
        dtype = jnp.dtype(self.dtype)
        query, key, value = (rng.standard_normal(shape).astype(dtype) for shape in ((B, T, H, D), (B, S, K, D), (B, S, K, Dv)))
        law: dict[str, Any] = {"causal": self.causal}
        if self.window is not None:
            law["sliding_window"] = self.window
        if isinstance(self.offset, int):
            law["query_offset"] = self.offset
        elif self.offset is not None:
            law["query_offset"] = rng.integers(-2, S + 2, (B,) if self.offset == "per row" else ()).astype(np.int32)
        if self.has_ids:
            law["q_segment_ids"], law["kv_segment_ids"] = (rng.integers(-1, 3, (B, n)).astype(np.int32) for n in (T, S))
        for name, length, wanted in zip(("q_lengths", "kv_lengths"), (T, S), self.lengths, strict=True):
            if wanted:
                law[name] = rng.integers(0, length + 1, (B,)).astype(np.int32)
        if self.bias is not None:
            bias = rng.standard_normal(_broadcast((B, H, T, S), self.bias))
            law["bias"] = np.where(rng.random(bias.shape) < 0.1, -np.inf, bias).astype(dtype)
        if self.sinks is not None:
            shape = {"head": (H,), "two": (H, 2), "shared": (1, 3)}[self.sinks]
            law["softmax_aux"] = rng.standard_normal(shape).astype(np.float32)
        law |= {"logits_soft_cap": self.cap} if self.cap is not None else {}
        law |= {"softmax_scale": self.scale} if self.scale is not None else {}
        given = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in law.items()}
        if self.mask is not None:
            given["mask"], law["mask"] = _mask(self.mask, self, law.get("query_offset"), rng)
        given["return_logsumexp"] = self.logsumexp
        return Call(query, key, value, given, law)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call and its law: `given` goes to attention, `law` to the reference."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    given: dict[str, Any]
    law: dict[str, Any]

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        return jnp.asarray(self.query), jnp.asarray(self.key), jnp.asarray(self.value)

    def poisoned(self) -> Call:
        """Return the call with NaN in every key that no query may attend, and in every query that attends no key."""
        (B, T, H, _), (_, S, K, _) = self.query.shape, self.key.shape
        allowed = reference.visible(B, H, T, S, self.law)
        unseen = ~allowed.reshape(B, K, H // K, T, S).any((2, 3)).swapaxes(1, 2)[..., None]
        blind = ~allowed.any(3).swapaxes(1, 2)[..., None]
        hidden = {name: np.where(unseen, np.nan, x).astype(x.dtype) for name, x in (("key", self.key), ("value", self.value))}
        return dataclasses.replace(self, query=np.where(blind, np.nan, self.query).astype(self.query.dtype), **hidden)


def _broadcast(shape: tuple[int, ...], full: tuple[bool, ...]) -> tuple[int, ...]:
    return tuple(size if wanted else 1 for size, wanted in zip(shape, full, strict=True))


def structure(pick: Pick, lengths: tuple[int, ...] = LENGTHS, batches: tuple[int, ...] = (1, 2, 3)) -> Structure:
    """Choose a structure."""
    T, S, K, D = pick(*lengths), pick(*lengths), pick(1, 2, 3), pick(1, 3, 8, 16)
    T = pick(T, S)
    sizes = (pick(*batches), T, S, K * pick(1, 2, 3), K, D, pick(D, D, 5))
    side = lambda: pick(None, 0, 1, 3)  # noqa: E731
    new = Structure(
        sizes=sizes,
        dtype=pick(*DTYPES),
        causal=pick(True, False),
        window=pick(None, None, (side(), side())),
        offset=pick(None, None, 0, -1, 2, S - T, "traced", "per row"),
        mask=pick(None, None, tree(pick, 3)),
        bias=pick(None, None, tuple(pick(True, False) for _ in range(4))),
        has_ids=pick(False, False, True),
        lengths=(pick(False, False, True), pick(False, True)),
        sinks=pick(None, None, "head", "two", "shared"),
        cap=pick(None, None, 1.5),
        scale=pick(None, None, 0.3, 0.0, -0.7),
        logsumexp=pick(False, True),
    )
    return (
        dataclasses.replace(new, offset=pick(0, S - T)) if new.is_positional and new.offset is None and T not in (1, S) else new
    )


def tree(pick: Pick, depth: int) -> Any:
    """Choose a mask expression: a leaf, or operators over leaves."""
    kind = pick("leaf", "leaf", "and", "or", "not") if depth else "leaf"
    if kind == "not":
        return ("not", tree(pick, depth - 1))
    if kind != "leaf":
        return (kind, tree(pick, depth - 1), tree(pick, depth - 1))
    return (pick(*LEAVES), pick(0, 1, 2, 3), pick(None, 0, 2), tuple(pick(True, False) for _ in range(4)))


def _has_positions(expression: Any) -> bool:
    if expression is None:
        return False
    if expression[0] in ("and", "or", "not"):
        return any(_has_positions(part) for part in expression[1:])
    return expression[0] in LEAVES[:4] and expression[2] is None


def _mask(expression: Any, where: Structure, offset: Any, rng: np.random.Generator) -> tuple[masks.Mask, np.ndarray]:
    """Return an expression as a Mask, and as a boolean array [B, H, T, S]."""
    kind, (B, T, S, H, *_) = expression[0], where.sizes
    full = (B, H, T, S)
    if kind in ("and", "or", "not"):
        made = [_mask(part, where, offset, rng) for part in expression[1:]]
        (mask, law), (other, its_law) = made[0], made[-1]
        if kind == "not":
            return ~mask, ~law
        return (mask & other, law & its_law) if kind == "and" else (mask | other, law | its_law)
    _, number, stated, axes = expression
    default = (0 if T == S else S - 1) if offset is None else offset
    start = np.asarray(default if stated is None else stated).reshape(-1, 1, 1, 1)
    query, key = np.arange(T)[:, None] + start, np.arange(S)[None]
    if kind == "causal":
        mask, law = masks.Causal(stated), key <= query
    elif kind == "window":
        mask, law = masks.Window(number, 1, stated), (key >= query - number) & (key <= query + 1)
    elif kind == "prefix":
        mask, law = masks.PrefixLM(number, stated), (key <= query) | (key < number)
    elif kind == "chunk":
        size = number + 1
        mask, law = masks.Chunked(size, stated), query // size == key // size
    elif kind == "segments":
        q, kv = (rng.integers(-1, 2, (B, n)).astype(np.int32) for n in (T, S))
        mask = masks.Segments(jnp.asarray(q), jnp.asarray(kv))
        law = ((q[:, :, None] == kv[:, None]) & (q[:, :, None] >= 0))[:, None]
    elif kind == "lengths":
        q, kv = (rng.integers(0, n + 1, (B,)).astype(np.int32) for n in (T, S))
        mask = masks.Lengths(jnp.asarray(q), jnp.asarray(kv))
        law = (np.arange(T)[:, None] < q.reshape(-1, 1, 1, 1)) & (np.arange(S) < kv.reshape(-1, 1, 1, 1))
    else:  # a static array is part of the structure, so its content must not follow the data
        source = np.random.default_rng(number) if kind == "static" else rng
        array = source.random(_broadcast(full, axes)) < 0.6
        mask, law = masks.Dense(array if kind == "static" else jnp.asarray(array)), array
    return mask, np.broadcast_to(law, full)
