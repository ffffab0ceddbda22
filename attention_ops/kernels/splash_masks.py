"""Our masks in the terms of JAX's splash kernels: a schedule of tiles, and how the inside of a partial tile is known.

A splash kernel knows the inside of a tile in three ways: it computes it from one integer per query row (`KernelFunction`), it
reads a boolean tile, or it compares segment ids. Masks that are static and the same for all samples and heads use the first two,
and batch rows are folded into the heads. All others lay the samples side by side along the sequence axes, each with its own
rows of the schedule, so that a mask per sample is one per sample; segment ids hide what was padded.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from attention_ops.masks import (
    EMPTY,
    FULL,
    PARTIAL,
    And,
    Causal,
    Dense,
    Lengths,
    Mask,
    Not,
    Or,
    Positional,
    Segments,
    Tile,
    Tiling,
    Window,
)

LANES = 128
"""Block sizes and padded head dims are multiples of it."""

PADDED_QUERY, PADDED_KEY = -1, -2
"""Segment ids that match nothing: of queries that see no key, and of keys that no query sees."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes as the kernel sees them: `samples` times T queries and S keys, each padded to whole blocks, one after the other.

    `folded` says that batch rows are heads instead: then there is one sample.
    """

    samples: int
    T: int
    S: int
    block_q: int
    block_kv: int
    folded: bool

    @property
    def tiling(self) -> Tiling:
        return Tiling(self.T, self.S, self.block_q, self.block_kv)

    @property
    def padded(self) -> tuple[int, int]:
        rows, cols = self.tiling.grid
        return rows * self.block_q, cols * self.block_kv


@dataclasses.dataclass(frozen=True)
class KernelFunction:
    """Whether a query attends a key, from the key's column and the query's number: its position, on the same axis.

    `mask` consists of causal masks and windows, which compare differences only. Columns from `end` on are padding.
    """

    mask: Mask
    end: int | None

    def __call__(self, query: Any, key: Any) -> Any:
        allowed = evaluate(self.mask, query, key)
        return allowed if self.end is None else allowed & (key < self.end)


@dataclasses.dataclass(frozen=True)
class KernelIntervals:
    """The same from a number that holds the last key of a query, plus one, and in its lowest `bits` how many keys it has."""

    bits: int

    def __call__(self, query: Any, key: Any) -> Any:
        end = query >> self.bits
        return (key < end) & (key >= end - (query & ((1 << self.bits) - 1)))


@dataclasses.dataclass(frozen=True)
class StaticPart:
    """What of a mask is known while compiling. Hashable.

    `mask` rules tiles out; `function` is computed inside the kernel; `tiled` says that boolean tiles are read, those of `mask`
    unless there are run-time ones.
    """

    layout: Layout
    mask: Mask | None
    function: KernelFunction | KernelIntervals | None
    tiled: bool


class RuntimePart(NamedTuple):
    """What is known when it runs: numbers of the queries and segment ids, of all samples; tiles; the kind of each tile.

    Attributes:
        numbers: int32 [samples * rows], what `StaticPart.function` takes.
        q_ids, kv_ids: int32 [samples * rows], [samples * cols].
        allowed: bool [b, h, rows, cols], from which tiles are cut.
        may, must: bool [b, h, nq, nk], see `Mask.bounds`; None where they follow from `StaticPart.mask`.
    """

    numbers: Any = None
    q_ids: Any = None
    kv_ids: Any = None
    allowed: Any = None
    may: Any = None
    must: Any = None


def lower(mask: Mask | None, B: int, T: int, S: int, block_q: int, block_kv: int) -> tuple[StaticPart, RuntimePart]:
    """Return a mask in the kernel's terms. Temporary memory is O(T + S) per sample unless run-time arrays need [T, S] themselves,
    or run-time parts are combined by `|` or `~`."""
    if mask is None or (mask.is_static and all(_is_shared(leaf) for leaf in mask.leaves())):
        layout = Layout(1, T, S, block_q, block_kv, folded=True)
        if mask is None or not _compares_differences(mask):
            return StaticPart(layout, mask, None, tiled=True), RuntimePart()
        numbers = jnp.arange(layout.padded[0], dtype=jnp.int32)
        end = None if layout.padded[1] == S else S
        return StaticPart(layout, mask, KernelFunction(mask, end), tiled=False), RuntimePart(numbers)
    return _lower_by_sample(mask, Layout(B, T, S, block_q, block_kv, folded=False))


def _lower_by_sample(mask: Mask, layout: Layout) -> tuple[StaticPart, RuntimePart]:
    by_id, others = _split(mask)
    static = _and(part for part in mask.conjuncts() if part.is_static)
    q_ids, kv_ids = segment_ids(by_id, layout)
    runtime = RuntimePart(q_ids=q_ids, kv_ids=kv_ids)
    if not mask.is_static:
        may, _ = mask.bounds(layout.tiling, jnp)
        runtime = runtime._replace(may=may)
    if not others:
        return StaticPart(layout, static, None, tiled=False), runtime
    rest = _and(others)
    assert rest is not None
    numbered = _numbered(rest, layout)
    if numbered is not None:
        function, numbers = numbered
        return StaticPart(layout, static, function, tiled=False), runtime._replace(numbers=numbers)
    if not rest.is_static:
        _, must = rest.bounds(layout.tiling, jnp)
        runtime = runtime._replace(allowed=_grown(rest.dense(layout.T, layout.S), layout), must=must)
    return StaticPart(layout, static, None, tiled=True), runtime


def _is_shared(leaf: Mask) -> bool:
    return not isinstance(leaf, Dense) or leaf.array.shape[:2] == (1, 1)


def _compares_differences(mask: Mask) -> bool:
    """Whether only differences of positions count, so that samples may lie side by side."""
    return all(isinstance(leaf, Causal | Window) for leaf in mask.leaves())


def _and(parts: Any) -> Mask | None:
    kept = tuple(parts)
    return None if not kept else kept[0] if len(kept) == 1 else And(kept)


def evaluate(mask: Mask, rows: Any, cols: Any, batch: int = 0, head: int = 0) -> Any:
    """Return whether the queries at `rows` may attend the keys at `cols`, for a static mask. A `Dense` takes numpy indices."""
    if isinstance(mask, Not):
        return ~evaluate(mask.part, rows, cols, batch, head)
    if isinstance(mask, And | Or):
        combine = operator.and_ if isinstance(mask, And) else operator.or_
        return functools.reduce(combine, (evaluate(part, rows, cols, batch, head) for part in mask.parts))
    if isinstance(mask, Positional):
        return mask.allowed(rows + mask.stated_offset, cols)
    if isinstance(mask, Lengths):  # static only without lengths
        return (rows == rows) & (cols == cols)
    assert isinstance(mask, Dense), f"{mask} is not static"
    array = mask.array.array  # type: ignore[union-attr]
    places = (index if size > 1 else 0 * index for size, index in zip(array.shape, (batch, head, rows, cols), strict=True))
    return array[tuple(places)]


# ---------------------------------------------------------------- segment ids


def _split(mask: Mask) -> tuple[list[Mask], list[Mask]]:
    """Return the conjuncts that segment ids can say, and the others. One pair of segment ids is taken, as are all lengths."""
    by_id: list[Mask] = []
    others: list[Mask] = []
    for part in mask.conjuncts():
        if isinstance(part, Segments):
            fits = not any(isinstance(taken, Segments) for taken in by_id)
        else:
            fits = isinstance(part, Lengths) or (isinstance(part, Dense) and not part.is_static and _is_separable(part))
        (by_id if fits else others).append(part)
    return by_id, others


def _is_separable(mask: Dense) -> bool:
    """Whether an array is about queries alone, or about keys alone."""
    _, h, t, s = mask.array.shape
    return h == 1 and 1 in (t, s)


def segment_ids(parts: list[Mask], layout: Layout) -> tuple[Array, Array]:
    q = jnp.zeros((1, layout.T), jnp.int32)
    kv = jnp.zeros((1, layout.S), jnp.int32)
    q_real, kv_real = jnp.ones((1, layout.T), bool), jnp.ones((1, layout.S), bool)
    for part in parts:
        if isinstance(part, Segments):
            q, kv = part.q, part.kv
            q_real, kv_real = q_real & (part.q >= 0), kv_real & (part.kv >= 0)
        elif isinstance(part, Lengths):
            q_real = q_real if part.q is None else q_real & (jnp.arange(layout.T) < part.q.reshape(-1, 1))
            kv_real = kv_real if part.kv is None else kv_real & (jnp.arange(layout.S) < part.kv.reshape(-1, 1))
        else:
            assert isinstance(part, Dense)
            seen = part.dense(*part.array.shape[2:])[:, 0]  # type: ignore[misc]
            if seen.shape[2] == 1:
                q_real = q_real & seen[:, :, 0]
            else:
                kv_real = kv_real & seen[:, 0, :]
    ids = ((q, q_real, PADDED_QUERY, layout.padded[0]), (kv, kv_real, PADDED_KEY, layout.padded[1]))
    return tuple(_by_sample(jnp.where(real, x, hidden), size, hidden, layout) for x, real, hidden, size in ids)  # type: ignore[return-value]


def _by_sample(x: Array, size: int, fill: int, layout: Layout) -> Array:
    """[1 or samples, n] to [samples * size]."""
    x = jnp.pad(x, ((0, 0), (0, size - x.shape[1])), constant_values=fill)
    return jnp.broadcast_to(x, (layout.samples, size)).reshape(-1)


# ---------------------------------------------------------------- positions inside the kernel


def _numbered(mask: Mask, layout: Layout) -> tuple[KernelFunction | KernelIntervals, Array] | None:
    """Return how the kernel computes a mask of causal parts and windows from one number per query, or None if it cannot."""
    if not _compares_differences(mask):
        return None
    leaves = tuple(mask.leaves())
    rows, cols = layout.padded
    start = jnp.arange(layout.samples, dtype=jnp.int32)[:, None] * cols
    place = start + jnp.arange(rows, dtype=jnp.int32)
    if mask.is_static:
        return KernelFunction(mask, None), place.reshape(-1)
    if len(leaves) == 1:
        offset = _per_sample(leaves[0].stated_offset)  # type: ignore[attr-defined]
        at_zero = mask.map_leaves(lambda leaf: dataclasses.replace(leaf, offset=0))  # type: ignore[call-arg]
        return KernelFunction(at_zero, None), (place + offset).reshape(-1)
    windows = (part for part in leaves if isinstance(part, Window) and part.left is not None and part.right is not None)
    bits = min([layout.S, *(part.left + part.right + 1 for part in windows)]).bit_length()  # type: ignore[operator]
    if not all(isinstance(part, Causal | Window) for part in mask.conjuncts()) or layout.samples * cols >= 1 << (31 - bits):
        return None
    first, last = jnp.zeros((1, rows), jnp.int32), jnp.full((1, rows), layout.S - 1, jnp.int32)
    for part in mask.conjuncts():
        position = jnp.arange(rows, dtype=jnp.int32) + _per_sample(part.stated_offset)  # type: ignore[attr-defined]
        left, right = (None, 0) if isinstance(part, Causal) else (part.left, part.right)  # type: ignore[attr-defined]
        first = first if left is None else jnp.maximum(first, position - left)
        last = last if right is None else jnp.minimum(last, position + right)
    count = jnp.maximum(last - first + 1, 0)
    end = start + jnp.where(count > 0, last + 1, 0)
    return KernelIntervals(bits), ((end << bits) | count).reshape(-1)


def _per_sample(offset: Any) -> Array:
    return jnp.asarray(offset, jnp.int32).reshape(-1, 1)


# ---------------------------------------------------------------- tiles and their schedule


class StaticTiles(NamedTuple):
    """A static mask cut up, and who sees anything: `kinds` of its tiles and their places among the distinct partial `tiles`, both
    [b, h, nq, nk]."""

    kinds: np.ndarray
    numbers: np.ndarray
    tiles: Bool[np.ndarray, "n block_q block_kv"]
    sees: Bool[np.ndarray, "b h T"]
    seen: Bool[np.ndarray, "b h S"]


@functools.lru_cache(maxsize=64)
def static_tiles(mask: Mask | None, layout: Layout) -> StaticTiles:
    """Cut a static mask into tiles on the host; only partial tiles are looked into, and equal ones kept once."""
    shape = (1, 1, *layout.tiling.grid)
    may, must = (np.ones(shape, bool),) * 2 if mask is None else mask.bounds(layout.tiling, np)
    may, must = (np.broadcast_to(x, (*x.shape[:2], *shape[2:])) for x in (may, must))
    b, h = np.broadcast_shapes(may.shape[:2], must.shape[:2])
    kinds = np.where(must, FULL, np.where(may, PARTIAL, EMPTY)).astype(np.int32) * np.ones((b, h, 1, 1), np.int32)
    if layout.padded[1] != layout.S:
        kinds[..., -1] = np.minimum(kinds[..., -1], PARTIAL)
    index, distinct = np.zeros_like(kinds), dict[bytes, int]()
    sees, seen = np.zeros((b, h, layout.padded[0]), bool), np.zeros((b, h, layout.padded[1]), bool)
    tiles: list[np.ndarray] = []
    for batch, head, i, j in np.argwhere(kinds != EMPTY).tolist():
        rows = slice(i * layout.block_q, (i + 1) * layout.block_q)
        cols = slice(j * layout.block_kv, (j + 1) * layout.block_kv)
        if kinds[batch, head, i, j] == FULL:
            sees[batch, head, rows] = seen[batch, head, cols] = True
            continue
        tile = _host_tile(mask, layout, batch, head, rows, cols)
        real = tile[: layout.T - rows.start]
        sees[batch, head, rows] |= tile.any(1)
        seen[batch, head, cols] |= real.any(0)
        if not real.any():
            kinds[batch, head, i, j] = EMPTY
            continue
        number = distinct.setdefault(tile.tobytes(), len(tiles))
        tiles += [tile] if number == len(tiles) else []
        index[batch, head, i, j] = number
    stacked = np.stack(tiles) if tiles else np.zeros((0, layout.block_q, layout.block_kv), bool)
    return StaticTiles(kinds, index, stacked, sees[..., : layout.T], seen[..., : layout.S])


def _host_tile(mask: Mask | None, layout: Layout, batch: int, head: int, rows: slice, cols: slice) -> np.ndarray:
    """Return one tile; padding sees nothing and is seen by nothing."""
    row = np.arange(rows.start, rows.stop, dtype=np.int32)[:, None]
    col = np.arange(cols.start, cols.stop, dtype=np.int32)[None, :]
    inside = (row < layout.T) & (col < layout.S)
    if mask is None:
        return inside
    return inside & evaluate(mask, np.minimum(row, layout.T - 1), np.minimum(col, layout.S - 1), batch, head)


class Schedule(NamedTuple):
    """What MaskInfo holds: for each head and query tile, the key tiles to visit (for a transposed one, the reverse)."""

    data_next: Any
    block_mask: Any
    mask_next: Any
    tiles: Any


def schedule(static: StaticPart, runtime: RuntimePart, transposed: bool) -> Schedule:
    """Order the work. Visible tiles come first; the steps after them repeat the last tile, so that nothing is fetched."""
    layout, planned = static.layout, static_tiles(static.mask, static.layout)
    kinds: Any = planned.kinds
    index: Any = planned.numbers
    tiles: Any = planned.tiles if static.tiled and len(planned.tiles) else None
    width = None
    if runtime.may is not None:
        axis = -2 if transposed else -1
        width = int((planned.kinds != EMPTY).sum(axis).max())
        kinds = _runtime_kinds(planned, runtime)
    if runtime.allowed is not None:
        tiles, index = _cut(runtime.allowed, layout)
    data, block, mask = _ordered(kinds, index, 0 if tiles is None else len(tiles), layout, transposed, width)
    if tiles is not None and transposed:
        tiles = tiles.swapaxes(-1, -2)
    return Schedule(data, block, None if tiles is None else mask, tiles)


def _runtime_kinds(planned: StaticTiles, runtime: RuntimePart) -> Array:
    """Of what the host left, the tiles that the data leave too; full where the tiles that are read say so."""
    visible = runtime.may & (planned.kinds != EMPTY)
    full = planned.kinds == FULL if runtime.must is None else runtime.must
    return jnp.where(visible, jnp.where(full, FULL, PARTIAL), EMPTY).astype(jnp.int32)


def _grown(allowed: Array, layout: Layout) -> Array:
    widths = [(0, 0), (0, 0), (0, layout.padded[0] - layout.T), (0, layout.padded[1] - layout.S)]
    return jnp.pad(allowed, widths)


def _cut(allowed: Array, layout: Layout) -> tuple[Array, Array]:
    b, h = allowed.shape[:2]
    rows, cols = layout.tiling.grid
    tiles = allowed.reshape(b, h, rows, layout.block_q, cols, layout.block_kv).swapaxes(3, 4)
    index = jnp.arange(b * h * rows * cols, dtype=jnp.int32).reshape(b, h, rows, cols)
    return tiles.reshape(-1, layout.block_q, layout.block_kv), index


def _ordered(kinds: Any, index: Any, tiles: int, layout: Layout, transposed: bool, width: int | None) -> tuple[Any, Any, Any]:
    """Return data_next, block_mask and mask_next, [h, outer, steps], or [h, steps, outer] if transposed."""
    xp: Any = np if isinstance(kinds, np.ndarray) and isinstance(index, np.ndarray) else jnp
    if transposed:
        kinds, index = kinds.swapaxes(-1, -2), index.swapaxes(-1, -2)
    h = max(kinds.shape[1], index.shape[1])
    kinds, index = (xp.broadcast_to(x, (layout.samples, h, *x.shape[2:])) for x in (kinds, index))
    visible = kinds != EMPTY
    count = visible.sum(-1, keepdims=True)
    width = max(1, int(count.max()) if width is None else width)
    step = xp.arange(width)
    order = xp.argsort(~visible, axis=-1, stable=True)
    order = xp.take_along_axis(order, xp.minimum(step, xp.maximum(count - 1, 0)), axis=-1)
    kind = xp.where(step < count, xp.take_along_axis(kinds, order, axis=-1), EMPTY)
    partial = xp.where(kind == PARTIAL, step, 0)
    latest = np.maximum.accumulate(partial, -1) if xp is np else jax.lax.cummax(partial, partial.ndim - 1)
    tile = xp.take_along_axis(xp.take_along_axis(index, order, axis=-1), latest, axis=-1)
    inner = kinds.shape[-1]
    data = order + inner * xp.arange(layout.samples).reshape(-1, 1, 1, 1)
    largest = (layout.samples * inner, FULL, tiles)
    return tuple(_scalars(x, bound, transposed) for x, bound in zip((data, kind, tile), largest, strict=True))  # type: ignore[return-value]


def _scalars(x: Any, bound: int, transposed: bool) -> Any:
    """[samples, h, outer, steps] to [h, samples * outer, steps] in the smallest dtype: scalar memory is scarce."""
    dtype = next(t for t in (np.int8, np.int16, np.int32) if bound <= np.iinfo(t).max)
    x = x.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[3]).astype(dtype)
    return x.swapaxes(1, 2) if transposed else x


# ---------------------------------------------------------------- who sees anything


def runtime_visibility(mask: Mask, B: int, H: int, T: int, S: int, block: int) -> tuple[Array, Array]:
    """Return which queries see a key [B, h, T], and which keys are seen [B, h, S], by blocks of queries; h is 1 or H."""
    blocks = -(-T // block)
    grown = mask.padded(blocks * block, S)

    def look(seen: Array, row: Array) -> tuple[Array, Array]:
        def one(batch: Array) -> Array:
            tile = grown.tile(Tile(batch, 0, row, 0, heads=H, rows=block, cols=S))
            return jnp.broadcast_to(tile, (tile.shape[0], block, S)) & (jnp.arange(block) + row < T)[:, None]

        allowed = jax.vmap(one)(jnp.arange(B, dtype=jnp.int32))
        return seen | allowed.any(2), allowed.any(3)

    h = jax.eval_shape(lambda: grown.tile(Tile(0, 0, 0, 0, heads=H, rows=block, cols=S))).shape[0]
    seen, sees = jax.lax.scan(look, jnp.zeros((B, h, S), bool), jnp.arange(blocks, dtype=jnp.int32) * block)
    return jnp.moveaxis(sees, 0, 2).reshape(B, h, -1)[..., :T], seen
