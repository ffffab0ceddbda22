"""Masks as values: combine them with `&`, `|` and `~`, pass the result as `mask=`.

A mask answers four questions. `dense(...)` is the boolean array itself. `block_map(...)` says on the host, from what is
static, which tiles are empty, partial or full. `bounds(...)` is the same with run-time data, as traced arrays. `tile(...)`
is one tile, for use inside a kernel. True always means "may attend".

Positions: query row i stands at `offset + i`, key column j at j. An offset of None takes the call's `query_offset`.
Python integers and `Dense(numpy_array)` are static: known while compiling. JAX arrays are run-time data.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from attention_ops import integers
from attention_ops.arrays import array_of
from attention_ops.features import Feature

if TYPE_CHECKING:
    from attention_ops.drawing import MaskPicture

EMPTY, PARTIAL, FULL = 0, 1, 2
Offset = int | Array | None
Bounds = tuple[Any, Any]


@dataclasses.dataclass(frozen=True)
class Tiling:
    """T query rows by S key columns, cut into tiles of block_q by block_kv; the last of each may be short."""

    T: int
    S: int
    block_q: int
    block_kv: int

    @property
    def grid(self) -> tuple[int, int]:
        return -(-self.T // self.block_q), -(-self.S // self.block_kv)

    @functools.cached_property
    def edges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """First and last query row [nq, 1], first and last key column [1, nk] of each tile."""
        rows, cols = self.grid
        q_first = np.arange(rows)[:, None] * self.block_q
        k_first = np.arange(cols)[None, :] * self.block_kv
        q_last = np.minimum(q_first + self.block_q, self.T) - 1
        return q_first, q_last, k_first, np.minimum(k_first + self.block_kv, self.S) - 1


@dataclasses.dataclass(frozen=True)
class Tile:
    """Where a kernel stands: one batch row, `heads` from `head`, `rows` from `row`, `cols` from `col`; origins may be traced."""

    batch: Any
    head: Any
    row: Any
    col: Any
    heads: int
    rows: int
    cols: int


class HostArray:
    """A numpy array that is compared and hashed by its content, so that it can be static under `jax.jit`."""

    __slots__ = ("_digest", "array")

    def __init__(self, array: np.ndarray):
        self.array = np.array(array, order="C")  # a copy: what the caller writes to his own later must not count
        self.array.setflags(write=False)
        self._digest = hashlib.blake2b(np.packbits(self.array).tobytes(), digest_size=16).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostArray) and self._digest == other._digest and self.array.shape == other.array.shape

    def __hash__(self) -> int:
        return hash((self._digest, self.array.shape))

    def __repr__(self) -> str:
        return f"HostArray({list(self.array.shape)}, {self._digest.hex()[:8]})"

    def __reduce__(self) -> tuple[Any, ...]:  # a copy cannot be written to either
        return HostArray, (self.array,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def ndim(self) -> int:
        return self.array.ndim


def _is_static(value: Any) -> bool:
    return value is None or isinstance(value, int | HostArray)


@dataclasses.dataclass(frozen=True, eq=False)
class Mask:
    """Base of every mask. Subclasses are frozen dataclasses; JAX sees them as pytrees whose leaves are the run-time arrays."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        jax.tree_util.register_pytree_node(cls, _flatten, functools.partial(_unflatten, cls))

    def __and__(self, other: Mask) -> Mask:
        return And((*_parts(self, And), *_parts(_mask(other), And)))

    def __or__(self, other: Mask) -> Mask:
        return Or((*_parts(self, Or), *_parts(_mask(other), Or)))

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a Mask has no truth value: combine masks with & | ~, not with `and`, `or`, `not`")

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(
            a is b or (not isinstance(a, jax.Array | np.ndarray) and a == b)
            for a, b in zip(_values(self), _values(other), strict=True)  # type: ignore[arg-type]
        )

    def __hash__(self) -> int:
        return hash((type(self), *_values(self)))

    def children(self) -> tuple[Mask, ...]:
        return ()

    def leaves(self) -> Iterator[Mask]:
        """Yield the masks this expression is made of, without the operators."""
        children = self.children()
        if not children:
            yield self
        for child in children:
            yield from child.leaves()

    def conjuncts(self) -> tuple[Mask, ...]:
        """Return the masks whose `&` this one is."""
        return (self,)

    def features(self) -> frozenset[Feature]:
        """Return what a kernel must support to take this mask in its native form."""
        return frozenset({Feature.MASK})

    @property
    def is_static(self) -> bool:
        """Whether everything is known on the host."""
        return not jax.tree_util.tree_leaves(self)

    @property
    def needs_offset(self) -> bool:
        """Whether a part takes its positions from the call's query_offset."""
        return any(isinstance(leaf, Positional) and leaf.stated_offset is None for leaf in self.leaves())

    def map_leaves(self, function: Callable[[Mask], Mask]) -> Mask:
        """Return the same expression with every leaf mask replaced."""
        return function(self)

    def resolve(self, offset: int | Array) -> Mask:
        """Return the mask with `offset`, as `integers.position` gives it, where none was stated."""

        def place(leaf: Mask) -> Mask:
            is_open = isinstance(leaf, Positional) and leaf.stated_offset is None
            return _with(leaf, offset=offset) if is_open else leaf

        return self.map_leaves(place)

    def abstract(self) -> Mask:
        """Return the mask with every run-time array replaced by its `jax.ShapeDtypeStruct`; it can be hashed."""
        return jax.tree_util.tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self)

    def check(self, B: int, H: int, T: int, S: int) -> None:
        """Raise ValueError when an array of this mask does not fit the shapes."""
        for leaf in self.leaves():
            leaf.check_leaf(B, H, T, S)

    def check_leaf(self, B: int, H: int, T: int, S: int) -> None:
        pass

    def dense(self, T: int, S: int) -> Bool[Array, "b h T S"]:
        """Return the boolean array; b and h are 1 where the mask does not depend on the batch row or the head."""
        raise NotImplementedError

    def bounds(self, tiling: Tiling, xp: Any) -> Bounds:
        """Return for every tile whether something in it may be visible, and whether all of it must be.

        Both are [b, h, nq, nk] booleans; `xp` is numpy (then run-time data counts as unknown) or jax.numpy.
        """
        raise NotImplementedError

    def tile(self, at: Tile) -> Bool[Array, "h rows cols"]:
        """Return one tile, broadcastable to [heads, rows, cols]. The mask must be `padded` to whole tiles."""
        raise NotImplementedError

    def padded(self, rows: int, cols: int) -> Mask:
        """Return the mask with its arrays grown to `rows` by `cols`; what is added sees nothing."""
        return self.map_leaves(lambda leaf: leaf.pad_leaf(rows, cols))

    def pad_leaf(self, rows: int, cols: int) -> Mask:
        return self

    def cut(self, row: Any, T: int, col: Any, S: int, *, in_arrays: tuple[Any, Any] | None = None) -> Mask:
        """Return the mask of T query rows from `row` by S key columns from `col`, which may be traced.

        `in_arrays` is the row and the column at which that part begins in the arrays of `Dense` masks, where those are
        themselves a part of the whole.

        Raises:
            ValueError: chunks that columns from elsewhere than the start of one would cut.
        """

        def part(leaf: Mask) -> Mask:
            first_row, first_col = in_arrays if in_arrays is not None and isinstance(leaf, Dense) else (row, col)
            return leaf.cut_leaf(first_row, T, first_col, S)

        return self.map_leaves(part)

    def cut_leaf(self, row: Any, T: int, col: Any, S: int) -> Mask:
        raise NotImplementedError

    def block_map(self, T: int, S: int, block_q: int, block_kv: int) -> np.ndarray:
        """Return int8 [b, h, nq, nk] of EMPTY, PARTIAL or FULL per tile; tiles that depend on run-time data are PARTIAL."""
        may, must = self.bounds(Tiling(T, S, block_q, block_kv), np)
        return np.where(must, FULL, np.where(may, PARTIAL, EMPTY)).astype(np.int8)

    def visible_fraction(self, T: int, S: int, block: int = 128) -> float:
        """Return the share of T*S in tiles that are not known to be empty: 1.0 when nothing is known."""
        if T == 0 or S == 0:
            return 0.0
        kinds = self.block_map(T, S, min(block, T), min(block, S))
        return float(np.mean(kinds != EMPTY)) if kinds.size else 0.0  # a static array of an empty batch has no tiles

    def show(self, T: int, S: int | None = None, **options: Any) -> MaskPicture:
        """Return the picture of the mask over T queries and S keys (T if None). Options: those of `drawing.draw`.

        >>> print(Causal().show(3).summary()[1])
        visible  66.7 % of T * S, 6 of 9
        """
        from attention_ops.drawing import draw

        return draw(self, T, T if S is None else S, **options)


_Kind = TypeVar("_Kind", bound=Mask)


def _values(mask: Mask) -> list[Any]:
    return [getattr(mask, name) for name in mask.__match_args__]


def _flatten(mask: Mask) -> tuple[list[Any], tuple[Any, ...]]:
    values = _values(mask)
    dynamic = [value for value in values if not _is_static(value)]
    return dynamic, tuple(("static", value) if _is_static(value) else ("leaf", None) for value in values)


def _unflatten(cls: type[Mask], aux: tuple[Any, ...], children: Any) -> Mask:
    remaining = iter(children)
    return _made(cls, (value if kind == "static" else next(remaining) for kind, value in aux))


def _made(cls: type[_Kind], values: Iterable[Any]) -> _Kind:
    """Make a mask of values that are checked and canonical."""
    mask = object.__new__(cls)
    for name, value in zip(cls.__match_args__, values, strict=True):
        object.__setattr__(mask, name, value)
    return mask


def _with(mask: _Kind, **changes: Any) -> _Kind:
    """Return a mask with other values, checked and canonical, for some of its fields."""
    return _made(type(mask), (changes.get(name, value) for name, value in zip(mask.__match_args__, _values(mask), strict=True)))


def _mask(value: Any) -> Mask:
    if not isinstance(value, Mask):
        raise TypeError(f"masks combine with masks, found {type(value).__name__}; wrap an array in masks.Dense(array)")
    return value


def _parts(mask: Mask, kind: type[_Combined]) -> tuple[Mask, ...]:
    return mask.parts if isinstance(mask, kind) else (mask,)


def _is_array(value: Any) -> bool:
    return not _is_static(value)


def _unknown(xp: Any, *values: Any) -> bool:
    return xp is np and any(_is_array(value) for value in values)


_UNKNOWN: Bounds = (np.ones((1, 1, 1, 1), bool), np.zeros((1, 1, 1, 1), bool))


def _column(value: Any, xp: Any) -> Any:
    """Shape a scalar or [B] quantity as [B|1, 1, 1, 1]."""
    return xp.reshape(xp.asarray(value), (-1, 1, 1, 1))


def _at(value: Any, batch: Any) -> Any:
    """Take batch row `batch` of a quantity that is a scalar, [1] or [B]."""
    if not _is_array(value) or value.ndim == 0:
        return value
    return value[0] if value.shape[0] == 1 else jax.lax.dynamic_index_in_dim(value, batch, keepdims=False)


def _check_rows(name: str, value: Any, B: int) -> None:
    if _is_array(value) and value.ndim and (value.ndim != 1 or value.shape[0] not in (1, B)):
        raise ValueError(f"{name} has shape {tuple(value.shape)}; allowed are () and [{B}] (one per batch row)")


# ---------------------------------------------------------------- masks of positions


@dataclasses.dataclass(frozen=True, eq=False)
class Positional(Mask):
    """A mask that compares the position of the query, `offset` + row, with that of the key."""

    def __post_init__(self) -> None:
        if self.stated_offset is not None:
            object.__setattr__(self, "offset", integers.position("query_offset", self.stated_offset))

    def allowed(self, query: Any, key: Any) -> Any:
        """Return whether a query at position `query` may attend the key at `key` (arrays that broadcast)."""
        raise NotImplementedError

    def span(self, q_first: Any, q_last: Any, k_first: Any, k_last: Any) -> Bounds:
        """Return (may, must) for a tile whose positions run from first to last, ends included."""
        raise NotImplementedError

    @property
    def stated_offset(self) -> Offset:
        """The `offset` every subclass has as its last field."""
        return self.offset  # type: ignore[attr-defined]

    def parameters(self) -> tuple[Any, ...]:
        return (self.stated_offset,)

    def check_leaf(self, B: int, H: int, T: int, S: int) -> None:
        _check_rows("query_offset", self.stated_offset, B)

    def _offset(self) -> Any:
        offset = self.stated_offset
        if offset is None:
            raise ValueError(f"{type(self).__name__.lower()} has no query_offset yet: call resolve(offset) first")
        return offset

    def dense(self, T: int, S: int) -> Bool[Array, "b h T S"]:
        query = jnp.arange(T)[:, None] + _column(self._offset(), jnp)
        return self._per_row(lambda value: _column(value, jnp)).allowed(query, jnp.arange(S)[None, :])

    def bounds(self, tiling: Tiling, xp: Any) -> Bounds:
        if _unknown(xp, *self.parameters()):
            return _UNKNOWN
        q_first, q_last, k_first, k_last = tiling.edges
        offset = _column(self._offset(), xp)
        this = self._per_row(lambda value: _column(value, xp))
        return this.span(q_first + offset, q_last + offset, k_first, k_last)

    def tile(self, at: Tile) -> Bool[Array, "h rows cols"]:
        query = _iota(at.rows, 0) + (at.row + _at(self._offset(), at.batch))
        this = self._per_row(lambda value: _at(value, at.batch))
        return this.allowed(query, _iota(at.cols, 1) + at.col)[None]

    def cut_leaf(self, row: Any, T: int, col: Any, S: int) -> Mask:
        return _with(self, offset=self._offset() + row - col)

    def _per_row(self, function: Callable[[Any], Any]) -> Positional:
        """Return the mask with `function` applied to parameters, other than the offset, that may differ per batch row."""
        return self


def _iota(size: int, axis: int) -> Int[Array, ...]:
    shape = (size, 1) if axis == 0 else (1, size)
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


@dataclasses.dataclass(frozen=True, eq=False)
class Causal(Positional):
    """A query attends keys at its own position and before."""

    offset: Offset = None

    def features(self) -> frozenset[Feature]:
        return frozenset({Feature.CAUSAL}) | _offset_feature(self.offset)

    def allowed(self, query: Any, key: Any) -> Any:
        return key <= query

    def span(self, q_first: Any, q_last: Any, k_first: Any, k_last: Any) -> Bounds:
        return k_first <= q_last, k_last <= q_first

    def __str__(self) -> str:
        return f"causal{_offset_text(self.offset)}"


@dataclasses.dataclass(frozen=True, eq=False)
class Window(Positional):
    """A query attends at most `left` keys before it and `right` after it, and itself. None leaves that side open.

    The counts exclude the query itself, as in jax.nn; Hugging Face's `sliding_window=n` is `Window(n - 1, 0)`.
    """

    left: int | None
    right: int | None
    offset: Offset = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for side in ("left", "right"):
            value = getattr(self, side)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"sliding_window {side} must be an integer or None (unlimited), found {type(value).__name__}")
            if value < 0:
                raise ValueError(f"sliding_window {side} is {value}; allowed is 0 or more, or None for unlimited")
            object.__setattr__(self, side, integers.near(value))

    def features(self) -> frozenset[Feature]:
        return frozenset({Feature.WINDOW}) | _offset_feature(self.offset)

    def allowed(self, query: Any, key: Any) -> Any:
        ok = (key <= query + self.right) if self.right is not None else None
        if self.left is not None:
            left = key >= query - self.left
            ok = left if ok is None else ok & left
        return (key == key) & (query == query) if ok is None else ok

    def span(self, q_first: Any, q_last: Any, k_first: Any, k_last: Any) -> Bounds:
        nearest, farthest = k_first - q_last, k_last - q_first
        may, must = nearest == nearest, farthest == farthest
        if self.left is not None:
            may, must = may & (farthest >= -self.left), must & (nearest >= -self.left)
        if self.right is not None:
            may, must = may & (nearest <= self.right), must & (farthest <= self.right)
        return may, must

    def __str__(self) -> str:
        return f"window({self.left}, {self.right}){_offset_text(self.offset)}"


@dataclasses.dataclass(frozen=True, eq=False)
class PrefixLM(Positional):
    """Keys before `prefix` are seen by every query; the rest is causal. `prefix` is an int or one per batch row [B]."""

    prefix: int | Array
    offset: Offset = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "prefix", integers.position("prefix", self.prefix))

    def parameters(self) -> tuple[Any, ...]:
        return self.prefix, self.offset

    def check_leaf(self, B: int, H: int, T: int, S: int) -> None:
        super().check_leaf(B, H, T, S)
        _check_rows("prefix", self.prefix, B)

    def cut_leaf(self, row: Any, T: int, col: Any, S: int) -> Mask:
        return _with(self, prefix=self.prefix - col, offset=self._offset() + row - col)

    def _per_row(self, function: Callable[[Any], Any]) -> PrefixLM:
        return _with(self, prefix=function(self.prefix))

    def allowed(self, query: Any, key: Any) -> Any:
        return (key <= query) | (key < self.prefix)

    def span(self, q_first: Any, q_last: Any, k_first: Any, k_last: Any) -> Bounds:
        return (k_first <= q_last) | (k_first < self.prefix), (k_last <= q_first) | (k_last < self.prefix)

    def __str__(self) -> str:
        return f"prefix_lm({self.prefix if not _is_array(self.prefix) else 'traced'}){_offset_text(self.offset)}"


@dataclasses.dataclass(frozen=True, eq=False)
class Chunked(Positional):
    """Positions are cut into chunks of `size`; a query attends the keys of its own chunk. Combine with Causal for Llama 4's."""

    size: int
    offset: Offset = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.size, bool) or not isinstance(self.size, int | np.integer) or self.size < 1:
            raise ValueError(f"chunk size is {self.size!r}; allowed is an integer of 1 or more")
        object.__setattr__(self, "size", integers.near(self.size))

    def cut_leaf(self, row: Any, T: int, col: Any, S: int) -> Mask:
        if (isinstance(col, int) and col % self.size) or (not isinstance(col, int) and S % self.size):
            raise ValueError(f"chunks of {self.size} keys are cut by parts of {S} keys; allowed are parts of whole chunks")
        return super().cut_leaf(row, T, col, S)

    def allowed(self, query: Any, key: Any) -> Any:
        return query // self.size == key // self.size

    def span(self, q_first: Any, q_last: Any, k_first: Any, k_last: Any) -> Bounds:
        q_low, q_high, k_low, k_high = (x // self.size for x in (q_first, q_last, k_first, k_last))
        return (q_low <= k_high) & (k_low <= q_high), (q_low == k_high) & (k_low == q_high)

    def __str__(self) -> str:
        return f"chunked({self.size}){_offset_text(self.offset)}"


def _offset_feature(offset: Offset) -> frozenset[Feature]:
    return frozenset() if offset is None or (isinstance(offset, int) and offset == 0) else frozenset({Feature.OFFSET})


def _offset_text(offset: Offset) -> str:
    if offset is None or (isinstance(offset, int) and offset == 0):
        return ""
    return f"[offset {offset if isinstance(offset, int) else 'traced'}]"


# ---------------------------------------------------------------- masks of run-time data


@dataclasses.dataclass(frozen=True, eq=False)
class Segments(Mask):
    """Equal ids attend; a negative id is padding, which attends nothing and is attended by nothing.

    `q` is [B, T] or [1, T]; `kv` is [B, S] or [1, S], and `q` again when left out. They are kept in int32: ids of a dtype that it
    cannot hold are numbered anew.
    """

    q: Int[Array, "b T"]
    kv: Int[Array, "b S"] = None  # type: ignore[assignment]  # q again, see __post_init__

    def __post_init__(self) -> None:
        q = array_of("q_segment_ids", self.q)
        kv = q if self.kv is None else array_of("kv_segment_ids", self.kv)
        for name, ids in (("q_segment_ids", q), ("kv_segment_ids", kv)):
            if not jnp.issubdtype(ids.dtype, jnp.integer):
                raise TypeError(f"{name} must be integers, found {ids.dtype}; cast with {name}.astype('int32')")
            if ids.ndim != 2:
                raise ValueError(f"{name} has shape {tuple(ids.shape)}; allowed is [batch, length]")
        for name, ids in zip(("q", "kv"), integers.ids(q, kv), strict=True):
            object.__setattr__(self, name, ids)

    def features(self) -> frozenset[Feature]:
        return frozenset({Feature.SEGMENTS})

    def check_leaf(self, B: int, H: int, T: int, S: int) -> None:
        for name, ids, length in (("q_segment_ids", self.q, T), ("kv_segment_ids", self.kv, S)):
            if ids.shape[0] not in (1, B) or ids.shape[1] != length:
                raise ValueError(f"{name} has shape {tuple(ids.shape)}; allowed is [{B}, {length}] or [1, {length}]")

    def dense(self, T: int, S: int) -> Bool[Array, "b h T S"]:
        q, kv = self.q[:, None, :, None], self.kv[:, None, None, :]
        return (q == kv) & (q >= 0)

    def bounds(self, tiling: Tiling, xp: Any) -> Bounds:
        if xp is np:
            return _UNKNOWN
        q_low, q_high, q_some, q_all = _id_ranges(self.q, tiling.block_q)
        k_low, k_high, k_some, k_all = _id_ranges(self.kv, tiling.block_kv)
        q_low, q_high, q_some, q_all = (x[:, None, :, None] for x in (q_low, q_high, q_some, q_all))
        k_low, k_high, k_some, k_all = (x[:, None, None, :] for x in (k_low, k_high, k_some, k_all))
        may = q_some & k_some & (q_low <= k_high) & (k_low <= q_high)
        return may, q_all & k_all & (q_low == k_high) & (k_low == q_high)

    def cut_leaf(self, row: Any, T: int, col: Any, S: int) -> Mask:
        q, kv = ((self.q, row, T), (self.kv, col, S))
        return Segments(*(slice_within(ids, (0, start), (ids.shape[0], n)) for ids, start, n in (q, kv)))

    def pad_leaf(self, rows: int, cols: int) -> Mask:
        return Segments(_grow(self.q, 1, rows, -1), _grow(self.kv, 1, cols, -1))

    def tile(self, at: Tile) -> Bool[Array, "h rows cols"]:
        q = slice_within(self.q, (at.batch, at.row), (1, at.rows))[0][:, None]
        kv = slice_within(self.kv, (at.batch, at.col), (1, at.cols))
        return ((q == kv) & (q >= 0))[None]

    def __str__(self) -> str:
        return "segments"


def _id_ranges(ids: Int[Array, "b n"], block: int) -> tuple[Array, Array, Array, Array]:
    """Return per block the lowest and highest id that is not padding, and whether some and all ids are not padding."""
    blocks = -(-ids.shape[1] // block)
    grid = _grow(ids, 1, blocks * block, -1).reshape(ids.shape[0], blocks, block)
    limits = jnp.iinfo(ids.dtype)
    low = jnp.min(jnp.where(grid >= 0, grid, limits.max), axis=-1)
    high = jnp.max(jnp.where(grid >= 0, grid, limits.min), axis=-1)
    padding = jnp.arange(blocks * block).reshape(blocks, block) >= ids.shape[1]
    return low, high, jnp.any(grid >= 0, axis=-1), jnp.all((grid >= 0) | padding, axis=-1)


@dataclasses.dataclass(frozen=True, eq=False)
class Lengths(Mask):
    """Of batch row b only the first q[b] queries and the first kv[b] keys are real. None means all are."""

    q: Int[Array, " B"] | None = None
    kv: Int[Array, " B"] | None = None

    def __post_init__(self) -> None:
        for side in ("q", "kv"):
            if getattr(self, side) is None:
                continue
            name = f"{side}_lengths"
            lengths = array_of(name, getattr(self, side))
            if not jnp.issubdtype(lengths.dtype, jnp.integer):
                raise TypeError(f"{name} must be integers, found {lengths.dtype}; cast with {name}.astype('int32')")
            object.__setattr__(self, side, integers.data(lengths))

    def features(self) -> frozenset[Feature]:
        return frozenset({Feature.LENGTHS})

    def cut_leaf(self, row: Any, T: int, col: Any, S: int) -> Mask:
        return Lengths(*(None if lengths is None else lengths - start for lengths, start in ((self.q, row), (self.kv, col))))

    def check_leaf(self, B: int, H: int, T: int, S: int) -> None:
        _check_rows("q_lengths", self.q, B)
        _check_rows("kv_lengths", self.kv, B)

    def dense(self, T: int, S: int) -> Bool[Array, "b h T S"]:
        ok = jnp.ones((1, 1, T, S), bool)
        if self.q is not None:
            ok = ok & (jnp.arange(T)[:, None] < _column(self.q, jnp))
        if self.kv is not None:
            ok = ok & (jnp.arange(S)[None, :] < _column(self.kv, jnp))
        return ok

    def bounds(self, tiling: Tiling, xp: Any) -> Bounds:
        if _unknown(xp, self.q, self.kv):
            return _UNKNOWN
        q_first, q_last, k_first, k_last = tiling.edges
        may = must = np.ones((1, 1, *tiling.grid), bool)
        for lengths, first, last in ((self.q, q_first, q_last), (self.kv, k_first, k_last)):
            if lengths is not None:
                lengths = _column(lengths, xp)
                may, must = may & (first < lengths), must & (last < lengths)
        return may, must

    def tile(self, at: Tile) -> Bool[Array, "h rows cols"]:
        ok = jnp.ones((1, 1), bool)
        if self.q is not None:
            ok = ok & (_iota(at.rows, 0) + at.row < _at(self.q, at.batch))
        if self.kv is not None:
            ok = ok & (_iota(at.cols, 1) + at.col < _at(self.kv, at.batch))
        return ok[None]

    def __str__(self) -> str:
        names = [name for name, value in (("q", self.q), ("kv", self.kv)) if value is not None]
        return f"lengths({', '.join(names)})"


@dataclasses.dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A boolean array: [T, S], or four dimensions that broadcast to [B, H, T, S].

    A numpy array is static: tiles it leaves empty are dropped while compiling, and a new content compiles anew. A JAX array
    is run-time data: empty tiles are found and skipped when it runs.
    """

    array: Bool[Array, "b h t s"] | Bool[np.ndarray, "b h t s"] | HostArray | jax.ShapeDtypeStruct

    def __post_init__(self) -> None:
        if isinstance(self.array, HostArray):
            return
        array = checked_mask_array(self.array)
        if array.ndim == 2:
            array = reshaped(array, (1, 1, *array.shape))
        object.__setattr__(self, "array", HostArray(array) if isinstance(array, np.ndarray) else array)

    def as_data(self) -> Dense:
        """Return the same mask as run-time data."""
        return Dense(jnp.asarray(self._values()))

    def check_leaf(self, B: int, H: int, T: int, S: int) -> None:
        shape = tuple(self.array.shape)
        for axis, (found, want) in enumerate(zip(shape, (B, H, T, S), strict=True)):
            if found not in (1, want):
                name = ("batch", "heads", "query length", "key length")[axis]
                raise ValueError(
                    f"mask has shape {shape}, which does not broadcast to [B, H, T, S] = {(B, H, T, S)}: "
                    f"its {name} is {found}, allowed are 1 and {want}"
                )

    def _values(self) -> Any:
        return self.array.array if isinstance(self.array, HostArray) else self.array

    def _traced(self) -> Array:
        """Return the array for use in a program; the barrier keeps XLA from folding a large constant at compile time."""
        values = self._values()
        return jax.lax.optimization_barrier(jnp.asarray(values)) if isinstance(values, np.ndarray) else values

    def dense(self, T: int, S: int) -> Bool[Array, "b h T S"]:
        array = self._traced()
        return jnp.broadcast_to(array, (*array.shape[:2], T, S))

    def bounds(self, tiling: Tiling, xp: Any) -> Bounds:
        if _unknown(xp, self.array):
            return _UNKNOWN
        xp = np if isinstance(self.array, HostArray) else xp
        array, (rows, cols) = self._values(), tiling.grid
        some, every = array, array
        for axis, block, count in ((2, tiling.block_q, rows), (3, tiling.block_kv, cols)):
            some = _reduce_blocks(some, axis, block, count, False, xp)
            every = _reduce_blocks(every, axis, block, count, True, xp)
        return some, every

    def cut_leaf(self, row: Any, T: int, col: Any, S: int) -> Mask:
        array = self._traced()
        sizes = (*array.shape[:2], *(min(n, size) for n, size in zip(array.shape[2:], (T, S), strict=True)))
        return Dense(slice_within(array, (0, 0, row, col), sizes))

    def pad_leaf(self, rows: int, cols: int) -> Mask:
        array = self._values()
        for axis, size in ((2, rows), (3, cols)):
            if array.shape[axis] > 1 or size == 1:
                array = _grow(array, axis, size, False)
        return Dense(array)

    def tile(self, at: Tile) -> Bool[Array, "h rows cols"]:
        array = self._traced()
        sizes = (1, *map(min, array.shape[1:], (at.heads, at.rows, at.cols)))
        return slice_within(array, (at.batch, at.head, at.row, at.col), sizes)[0]

    def __str__(self) -> str:
        return f"dense{list(self.array.shape)}"


def reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    """Return an array, or a `jax.ShapeDtypeStruct`, in another shape."""
    return array.reshape(shape) if hasattr(array, "reshape") else jax.ShapeDtypeStruct(shape, array.dtype)


def checked_mask_array(array: Any) -> Any:
    """Return what is given for a mask as an array; raise for one that is not boolean, or not of rank 2 or 4."""
    array = array_of("mask", array)
    if array.dtype != np.bool_:
        raise TypeError(
            f"mask must be boolean (True = may attend), found {array.dtype}; "
            "pass mask.astype(bool) for a 0/1 mask, or bias= for values to add to the logits"
        )
    if array.ndim == 3:
        raise ValueError(
            f"mask has shape {tuple(array.shape)}: three dimensions are ambiguous. Pass mask[:, None] for one mask per batch "
            "row or mask[None] for one per head; allowed are [T, S] and [B, H, T, S]"
        )
    if array.ndim not in (2, 4):
        raise ValueError(f"mask has shape {tuple(array.shape)}; allowed are [T, S] and [B, H, T, S]")
    return array


def _grow(array: Any, axis: int, size: int, fill: Any) -> Any:
    missing = size - array.shape[axis]
    if not missing:
        return array
    widths = [(0, missing if a == axis else 0) for a in range(array.ndim)]
    return (np if isinstance(array, np.ndarray) else jnp).pad(array, widths, constant_values=fill)


def _reduce_blocks(array: Any, axis: int, block: int, count: int, every: bool, xp: Any) -> Any:
    if array.shape[axis] == 1 and block * count > 1:
        return array
    array = _grow(array, axis, block * count, every)
    shape = (*array.shape[:axis], count, block, *array.shape[axis + 1 :])
    return (xp.all if every else xp.any)(xp.reshape(array, shape), axis=axis + 1)


def slice_within(array: Array, starts: tuple[Any, ...], sizes: tuple[int, ...]) -> Array:
    """Return the part of an array from `starts`, see `starts_within`."""
    return jax.lax.dynamic_slice(array, starts_within(array.shape, starts), sizes)


def starts_within(shape: tuple[int, ...], starts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return where to slice an array: an axis of length 1 is broadcast, so its start is 0. All are int32, under x64 too."""
    return tuple(jnp.asarray(0 if n == 1 else start, jnp.int32) for n, start in zip(shape, starts, strict=True))


# ---------------------------------------------------------------- operators


@functools.lru_cache(maxsize=4096)
def _sees_everything(mask: Mask, T: int, S: int) -> bool:
    _, must = mask.bounds(Tiling(T, S, T, S), np)
    return bool(np.all(must))


def simplify(mask: Mask, T: int, S: int) -> Mask | None:
    """Drop the conjuncts that, as far as the host knows, hide nothing; return None when none is left."""
    if T == 0 or S == 0:
        return None
    kept = tuple(part for part in mask.conjuncts() if not (part.is_static and _sees_everything(part, T, S)))
    return None if not kept else kept[0] if len(kept) == 1 else And(kept)


@dataclasses.dataclass(frozen=True, eq=False)
class _Combined(Mask):
    parts: tuple[Mask, ...]

    def children(self) -> tuple[Mask, ...]:
        return self.parts

    def map_leaves(self, function: Callable[[Mask], Mask]) -> Mask:
        return type(self)(tuple(part.map_leaves(function) for part in self.parts))


@dataclasses.dataclass(frozen=True, eq=False)
class And(_Combined):
    """Visible where every part is. Write `a & b`."""

    def conjuncts(self) -> tuple[Mask, ...]:
        return tuple(leaf for part in self.parts for leaf in part.conjuncts())

    def features(self) -> frozenset[Feature]:
        return frozenset().union(*(part.features() for part in self.parts))

    def dense(self, T: int, S: int) -> Bool[Array, "b h T S"]:
        return functools.reduce(operator.and_, (part.dense(T, S) for part in self.parts))

    def bounds(self, tiling: Tiling, xp: Any) -> Bounds:
        may, must = zip(*(part.bounds(tiling, xp) for part in self.parts), strict=True)
        return functools.reduce(operator.and_, may), functools.reduce(operator.and_, must)

    def tile(self, at: Tile) -> Bool[Array, "h rows cols"]:
        return functools.reduce(operator.and_, (part.tile(at) for part in self.parts))

    def __str__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, Or) else str(part) for part in self.parts)


@dataclasses.dataclass(frozen=True, eq=False)
class Or(_Combined):
    """Visible where any part is. Write `a | b`."""

    def dense(self, T: int, S: int) -> Bool[Array, "b h T S"]:
        return functools.reduce(operator.or_, (part.dense(T, S) for part in self.parts))

    def bounds(self, tiling: Tiling, xp: Any) -> Bounds:
        may, must = zip(*(part.bounds(tiling, xp) for part in self.parts), strict=True)
        return functools.reduce(operator.or_, may), functools.reduce(operator.or_, must)

    def tile(self, at: Tile) -> Bool[Array, "h rows cols"]:
        return functools.reduce(operator.or_, (part.tile(at) for part in self.parts))

    def __str__(self) -> str:
        return " | ".join(str(part) for part in self.parts)


@dataclasses.dataclass(frozen=True, eq=False)
class Not(Mask):
    """Visible where `part` is not. Write `~a`."""

    part: Mask

    def children(self) -> tuple[Mask, ...]:
        return (self.part,)

    def map_leaves(self, function: Callable[[Mask], Mask]) -> Mask:
        return Not(self.part.map_leaves(function))

    def dense(self, T: int, S: int) -> Bool[Array, "b h T S"]:
        return ~self.part.dense(T, S)

    def bounds(self, tiling: Tiling, xp: Any) -> Bounds:
        may, must = self.part.bounds(tiling, xp)
        return ~must, ~may

    def tile(self, at: Tile) -> Bool[Array, "h rows cols"]:
        return ~self.part.tile(at)

    def __str__(self) -> str:
        return f"~({self.part})"
