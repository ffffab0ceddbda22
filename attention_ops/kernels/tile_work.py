"""Which tiles a kernel visits: for each outer tile a list of inner tiles, made while compiling or when the kernel runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_ops.masks import And, Causal, Lengths, Mask, Positional, Tiling, Window

_INTERVALS = (Causal, Window, Lengths)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("bounds", "order"),
    meta_fields=("has_before", "has_full", "has_after"),
)
@dataclasses.dataclass(frozen=True)
class TileWork:
    """The inner tiles of each outer tile, in three runs: partial, full, partial.

    Attributes:
        bounds: int32 [b, h, outer, 4], where the runs begin and end: the first from 0 to 1, the full one to 2, the last to 3.
        order: int32 [b, h, outer, n], the inner tile at each place of the runs, or None where place n is tile n: the visible
            tiles of every outer tile follow each other, so that a kernel reads memory in order and no list.
        has_before, has_full, has_after: False where it is known while compiling that no outer tile has such a run.

    b and h are 1 where the batch row or the query head makes no difference.
    """

    bounds: Any
    order: Any
    has_before: bool
    has_full: bool
    has_after: bool

    def loop(self, visit: Callable[..., Any], edges: tuple[Any, Any, Any, Any], state: Any) -> Any:
        """Call `visit(place, state, partial=...)` for every place between the edges, one outer tile's row of `bounds`."""
        for present, low, high, partial in (
            (self.has_before, edges[0], edges[1], True),
            (self.has_full, edges[1], edges[2], False),
            (self.has_after, edges[2], edges[3], True),
        ):
            if present:
                state = jax.lax.fori_loop(low, high, functools.partial(visit, partial=partial), state)
        return state


def tile_kinds(mask: Mask | None, tiling: Tiling, by_data: bool, never_full: bool) -> tuple[Any, Any]:
    """Return (may, must) per tile, [b, h, nq, nk] booleans: numpy where everything that counts is static, else traced.

    `by_data` also asks run-time data; without it only static positions rule tiles out. `never_full` is for what can hide a key
    beyond the mask.
    """
    may = must = np.ones((1, 1, *tiling.grid), bool)
    parts = () if mask is None else mask.conjuncts()
    asked = tuple(part for part in parts if by_data or (isinstance(part, Positional) and part.is_static))
    if asked:
        chosen = And(asked)
        may, must = chosen.bounds(tiling, np if chosen.is_static else jnp)
        may, must = (_whole(x, tiling) for x in (may, must))
    if never_full or len(asked) < len(parts):
        must = np.zeros((1, 1, *tiling.grid), bool)
    if tiling.S % tiling.block_kv:
        must = must & (np.arange(tiling.grid[1]) < tiling.grid[1] - 1)
    return may, must


def _whole(kinds: Any, tiling: Tiling) -> Any:
    xp = np if isinstance(kinds, np.ndarray) else jnp
    return xp.broadcast_to(kinds, (*kinds.shape[:2], *tiling.grid))


def tile_work(mask: Mask | None, tiling: Tiling, by_data: bool, never_full: bool, by_column: bool = False) -> TileWork:
    """Return the work of one kernel; `by_column` for one whose outer tiles are those of the keys."""
    may, must = tile_kinds(mask, tiling, by_data, never_full)
    if by_column:
        may, must = may.swapaxes(-1, -2), must.swapaxes(-1, -2)
    if isinstance(may, np.ndarray) and isinstance(must, np.ndarray):
        must = must & may
        return _runs(may, must, np) if _contiguous(may) and _contiguous(must) else _lists(may, must, np)
    intervals = mask is not None and all(isinstance(part, _INTERVALS) for part in mask.conjuncts())
    work = _runs(may, must & may, jnp) if intervals else _lists(may, must & may, jnp)
    none_full = isinstance(must, np.ndarray) and not must.any()
    return dataclasses.replace(work, has_before=False, has_full=False) if none_full else work


def _contiguous(kinds: np.ndarray) -> bool:
    """Whether the True of every row follow each other."""
    starts = kinds & ~np.pad(kinds, [(0, 0)] * 3 + [(1, 0)])[..., :-1]
    return bool(np.all(starts.sum(-1) <= 1))


def _runs(may: Any, must: Any, xp: Any) -> TileWork:
    first, full = xp.argmax(may, -1), must.sum(-1)
    full_first = xp.where(full > 0, xp.argmax(must, -1), first)
    edges = (first, full_first, full_first + full, first + may.sum(-1))
    return _work(xp.stack(edges, -1), None)


def _lists(may: Any, must: Any, xp: Any) -> TileWork:
    """Full tiles first, then the partial ones."""
    rank = xp.where(must, 0, xp.where(may, 1, 2))
    order = xp.argsort(rank, axis=-1, stable=True).astype(np.int32)
    full, visible = must.sum(-1), may.sum(-1)
    none = xp.zeros_like(full)
    if xp is np:
        order = order[..., : max(1, int(visible.max(initial=0)))]
    return _work(xp.stack((none, none, full, visible), -1), order)


def _work(bounds: Any, order: Any) -> TileWork:
    def present(run: int) -> bool:
        return bool(np.any(bounds[..., run] < bounds[..., run + 1])) if isinstance(bounds, np.ndarray) else True

    before = present(0) and order is None
    order = None if order is None else jnp.asarray(order)
    return TileWork(jnp.asarray(bounds, jnp.int32), order, before, present(1), present(2))


def hidden_from_all(mask: Mask | None, T: int, S: int) -> tuple[bool, bool]:
    """Return whether some query may see no key, and some key may be seen by no query, as far as the host knows."""
    if mask is None:
        return False, False
    low, high = np.zeros(T, np.int64), np.full(T, S)
    for part in mask.conjuncts():
        if not (isinstance(part, Causal | Window) and part.is_static):
            return True, True
        assert isinstance(part.offset, int)
        query = np.arange(T) + part.offset
        left, right = (None, 0) if isinstance(part, Causal) else (part.left, part.right)
        low = low if left is None else np.maximum(low, query - left)
        high = high if right is None else np.minimum(high, query + right + 1)
    rows = low < high
    steps = np.zeros(S + 1, np.int64)
    np.add.at(steps, low[rows], 1)
    np.add.at(steps, high[rows], -1)
    return not bool(rows.all()), bool(np.any(np.cumsum(steps)[:S] == 0))
