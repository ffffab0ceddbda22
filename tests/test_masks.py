"""Each mask answers its four questions alike: dense form, block map, run-time bounds, tiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_ops import Feature, masks
from attention_ops.masks import EMPTY, FULL, PARTIAL, Tile, Tiling

T, S, B, H = 13, 17, 2, 2
RNG = np.random.default_rng(0)
POSITIONS = np.arange(T)[:, None], np.arange(S)[None, :]
RANDOM = RNG.random((B, H, T, S)) < 0.4
Q_IDS = np.array([[0] * 5 + [1] * 6 + [-1] * 2, [3] * 13])
KV_IDS = np.array([[0] * 4 + [1] * 7 + [-1] * 6, [3] * 8 + [2] * 9])
WIDE_IDS = Q_IDS + 2**32 - 5, KV_IDS + 2**32 - 5


def _per_row(values: list[int]) -> np.ndarray:
    return np.array(values)[:, None, None, None]


def _equal(q: np.ndarray, kv: np.ndarray) -> np.ndarray:
    return q[:, None, :, None] == kv[:, None, None, :]


def _cases() -> dict[str, tuple[masks.Mask, np.ndarray]]:
    i, j = POSITIONS
    offsets, lengths, prefixes = jnp.array([0, 4]), jnp.array([0, 11]), jnp.array([2, 9])
    window = (j >= i + 4 - 3) & (j <= i + 4 + 1)
    return {
        "causal": (masks.Causal(0), j <= i),
        "causal offset": (masks.Causal(4), j <= i + 4),
        "causal negative offset": (masks.Causal(-6), j <= i - 6),
        "causal per row": (masks.Causal(offsets), j <= i + _per_row([0, 4])),
        "window": (masks.Window(3, 1, 4), window),
        "window open left": (masks.Window(None, 1, 0), j <= i + 1),
        "window open right": (masks.Window(2, None, 0), j >= i - 2),
        "window open": (masks.Window(None, None, 0), np.ones((T, S), bool)),
        "prefix": (masks.PrefixLM(5, 0), (j <= i) | (j < 5)),
        "prefix per row": (masks.PrefixLM(prefixes, offsets), (j <= i + _per_row([0, 4])) | (j < _per_row([2, 9]))),
        "chunked": (masks.Chunked(4, 2), (i + 2) // 4 == j // 4),
        "segments": (
            masks.Segments(jnp.asarray(Q_IDS), jnp.asarray(KV_IDS)),
            _equal(Q_IDS, KV_IDS) & (Q_IDS >= 0)[:, None, :, None],
        ),
        "segments of uint32": (masks.Segments(*(jnp.asarray(x.astype(np.uint32)) for x in WIDE_IDS)), _equal(*WIDE_IDS)),
        "kv lengths": (masks.Lengths(kv=lengths), j < _per_row([0, 11])),
        "both lengths": (masks.Lengths(jnp.array([13, 5]), lengths), (i < _per_row([13, 5])) & (j < _per_row([0, 11]))),
        "dense static": (masks.Dense(RANDOM), RANDOM),
        "dense data": (masks.Dense(jnp.asarray(RANDOM)), RANDOM),
        "dense 2d": (masks.Dense(RANDOM[0, 0]), RANDOM[0, 0]),
        "dense keys": (masks.Dense(jnp.asarray(RANDOM[:, :1, :1])), RANDOM[:, :1, :1]),
        "and": (masks.Causal(4) & masks.Window(3, 1, 4) & masks.Dense(RANDOM), (j <= i + 4) & window & RANDOM),
        "or": (masks.Causal(0) | masks.Dense(jnp.asarray(RANDOM)), (j <= i) | RANDOM),
        "not": (~masks.Causal(0), j > i),
        "nested": (~(masks.Causal(0) | masks.Chunked(5, 0)) & ~masks.Window(6, 6, 0), (j > i + 6) & (i // 5 != j // 5)),
    }


CASES = _cases()
everyone = pytest.mark.parametrize(("mask", "expected"), CASES.values(), ids=CASES)


def _full(array: np.ndarray) -> np.ndarray:
    return np.broadcast_to(array, (B, H, T, S))


@everyone
def test_dense(mask, expected):
    np.testing.assert_array_equal(_full(mask.dense(T, S)), _full(expected))


@everyone
@pytest.mark.parametrize(("block_q", "block_kv"), [(4, 4), (5, 3), (13, 17), (1, 17), (16, 32)])
def test_block_map_and_bounds_never_lie(mask, expected, block_q, block_kv):
    tiling = Tiling(T, S, block_q, block_kv)
    rows, cols = tiling.grid
    host = np.broadcast_to(mask.block_map(T, S, block_q, block_kv), (B, H, rows, cols))
    may, must = (np.broadcast_to(x, (B, H, rows, cols)) for x in mask.bounds(tiling, jnp))
    for i in range(rows):
        for j in range(cols):
            tile = _full(expected)[:, :, i * block_q : (i + 1) * block_q, j * block_kv : (j + 1) * block_kv]
            some, every = tile.any((2, 3)), tile.all((2, 3))
            assert not (some & ~may[:, :, i, j]).any()
            assert not (must[:, :, i, j] & ~every).any()
            assert not (some & (host[:, :, i, j] == EMPTY)).any()
            assert not ((host[:, :, i, j] == FULL) & ~every).any()


@pytest.mark.parametrize("name", ["causal", "causal offset", "window", "chunked", "dense static", "kv lengths", "segments"])
def test_single_masks_find_every_empty_and_full_tile(name):
    mask, expected = CASES[name]
    tiling = Tiling(T, S, 4, 4)
    may, must = (np.broadcast_to(x, (B, H, *tiling.grid)) for x in mask.bounds(tiling, jnp))
    for (i, j), _ in np.ndenumerate(np.zeros(tiling.grid)):
        tile = _full(expected)[:, :, i * 4 : i * 4 + 4, j * 4 : j * 4 + 4]
        np.testing.assert_array_equal(may[:, :, i, j], tile.any((2, 3)), err_msg=f"{i}, {j}")
        np.testing.assert_array_equal(must[:, :, i, j], tile.all((2, 3)), err_msg=f"{i}, {j}")


@everyone
def test_tiles_inside_jit(mask, expected):
    rows, cols, block = 16, 20, 4
    padded = mask.padded(rows, cols)

    @jax.jit
    def tile(mask, batch, i, j):
        return mask.tile(Tile(batch, 0, i * block, j * block, heads=H, rows=block, cols=block))

    for batch, i, j in [(0, 0, 0), (1, 1, 2), (1, 3, 4), (0, 2, 0)]:
        found = np.broadcast_to(tile(padded, batch, i, j), (H, block, block))
        want = _full(expected)[batch, :, i * block : (i + 1) * block, j * block : (j + 1) * block]
        np.testing.assert_array_equal(found[:, : want.shape[1], : want.shape[2]], want)


def test_block_map_of_a_causal_mask():
    np.testing.assert_array_equal(masks.Causal(0).block_map(8, 8, 4, 4)[0, 0], [[PARTIAL, EMPTY], [FULL, PARTIAL]])
    assert masks.Causal(0).visible_fraction(1024, 1024) == pytest.approx(36 / 64)


@everyone
def test_pytree_round_trip_and_abstract_form(mask, expected):
    leaves, tree = jax.tree_util.tree_flatten(mask)
    again = jax.tree_util.tree_unflatten(tree, leaves)
    np.testing.assert_array_equal(_full(again.dense(T, S)), _full(expected))
    assert mask.abstract() == again.abstract()
    assert hash(mask.abstract()) == hash(again.abstract())
    assert str(mask)
    np.testing.assert_array_equal(_full(jax.jit(lambda m: m.dense(T, S))(mask)), _full(expected))


def test_static_arrays_are_compared_by_content():
    assert masks.Dense(RANDOM) == masks.Dense(RANDOM.copy())
    assert masks.Dense(RANDOM) != masks.Dense(~RANDOM)
    assert masks.Dense(RANDOM) != masks.Dense(RANDOM.reshape(H, B, T, S)[:, :, :, ::-1])


def test_features():
    assert masks.Causal(0).features() == {Feature.CAUSAL}
    assert masks.Causal(3).features() == {Feature.CAUSAL, Feature.OFFSET}
    assert masks.Window(1, 1, jnp.array(2)).features() == {Feature.WINDOW, Feature.OFFSET}
    ids = jnp.zeros((1, 4), int)
    both = masks.Segments(ids) & masks.Lengths(kv=jnp.array([1])) & masks.Causal(0)
    assert both.features() == {Feature.SEGMENTS, Feature.LENGTHS, Feature.CAUSAL}
    for arbitrary in (masks.Causal(0) | masks.Window(1, 1, 0), ~masks.Causal(0), masks.Chunked(2, 0), masks.PrefixLM(2, 0)):
        assert arbitrary.features() == {Feature.MASK}


def test_an_offset_left_open_is_resolved():
    mask = masks.Causal() & ~masks.Window(1, 1)
    assert mask.needs_offset
    resolved = mask.resolve(3)
    assert not resolved.needs_offset
    i, j = POSITIONS
    np.testing.assert_array_equal(resolved.dense(T, S)[0, 0], (j <= i + 3) & (abs(j - i - 3) > 1))
    with pytest.raises(ValueError, match="causal has no query_offset yet"):
        masks.Causal().dense(T, S)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: masks.Dense(np.ones((2, 2))), TypeError, r"found float64; pass mask.astype\(bool\)"),
        (lambda: masks.Dense(jnp.ones((2, 2), jnp.int32)), TypeError, "found int32"),
        (lambda: masks.Dense(np.ones((1, 2, 2), bool)), ValueError, "three dimensions are ambiguous"),
        (lambda: masks.Dense(np.ones(2, bool)), ValueError, r"allowed are \[T, S\] and \[B, H, T, S\]"),
        (lambda: masks.Window(-1, 0), ValueError, "sliding_window left is -1; allowed is 0 or more"),
        (lambda: masks.Window(0, 1.5), TypeError, "sliding_window right must be an integer or None"),
        (lambda: masks.Window(True, 0), TypeError, "found bool"),
        (lambda: masks.Chunked(0), ValueError, "chunk size is 0"),
        (lambda: masks.Segments(jnp.zeros((1, 4))), TypeError, "q_segment_ids must be integers, found float32"),
        (lambda: masks.Segments(jnp.zeros(4, int)), ValueError, r"q_segment_ids has shape \(4,\)"),
        (lambda: masks.Lengths(kv=jnp.ones(2)), TypeError, "kv_lengths must be integers"),
        (lambda: masks.Causal(0) & np.ones((2, 2), bool), TypeError, r"wrap an array in masks.Dense\(array\)"),
        (lambda: bool(masks.Causal(0)), TypeError, "a Mask has no truth value"),
    ],
)
def test_errors(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_a_static_array_of_an_empty_batch_has_nothing_visible():
    assert masks.Dense(np.ones((0, 1, 3, 5), bool)).visible_fraction(3, 5) == 0.0
