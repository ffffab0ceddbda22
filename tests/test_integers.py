"""Segment ids, lengths and positions of every integer dtype, and numbers that int32 cannot hold."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_ops as ao
from attention_ops import integers, masks
from attention_ops.metadata import OperationMetadata
from attention_ops.request import make_request
from attention_ops.selftest import reference

DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_operation = pytest.mark.parametrize("op", ["vanilla", "blocksparse"])
B, T = 2, 40
TILES = OperationMetadata(block_sizes=(16, 16))
IDS = np.array([[0] * 9 + [1] * 11 + [2] * 20, [5] * 33 + [0] * 7])
RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((B, T, 2, 8)).astype(np.float32) for _ in range(3))


def _agrees(op: str, law: dict[str, Any], **options: Any) -> None:
    found = ao.attention(Q, K, V, impl=op, metadata=TILES, **options).attention_outputs
    np.testing.assert_allclose(found, reference.attention(Q, K, V, law).output, atol=2e-5)


@every_operation
@every_dtype
def test_every_dtype_means_the_same(op, dtype):
    law = {"q_segment_ids": IDS, "kv_lengths": np.array([7, 40]), "causal": True, "query_offset": np.array([3, 0])}
    _agrees(op, law, **{name: x if x is True else jnp.asarray(x.astype(dtype)) for name, x in law.items()})


@every_dtype
def test_every_dtype_means_the_same_with_64_bits(dtype):
    with jax.enable_x64(True):
        _agrees("blocksparse", {"q_segment_ids": IDS}, q_segment_ids=jnp.asarray(IDS.astype(dtype)))


@every_dtype
def test_a_request_holds_int32_and_its_spec_is_that_of_the_shapes(dtype):
    with jax.enable_x64(True):
        given = {"q_segment_ids": jnp.asarray(IDS.astype(dtype)), "kv_lengths": jnp.asarray(np.array([7, 40], dtype))}
        given["mask"] = masks.PrefixLM(jnp.asarray(np.array([3, 0], dtype)), jnp.asarray(np.array(2, dtype)))
        request = make_request(Q, K, V, given, OperationMetadata())
        shapes = jax.eval_shape(lambda given: given, given)
        assert {leaf.dtype for leaf in jax.tree_util.tree_leaves(request.mask)} == {np.dtype("int32")}
        assert make_request(Q, K, V, shapes, OperationMetadata()).spec == request.spec


WIDE = {
    "int64 of numpy": IDS * 2**33,
    "int64 with padding": np.where(IDS == 1, -(2**40), IDS * 2**33),
    "uint32 above int32": (IDS + 2**32 - 10).astype(np.uint32),
    "uint64 above int64": IDS.astype(np.uint64) + np.uint64(2**64 - 10),
}


@every_operation
@pytest.mark.parametrize("ids", WIDE.values(), ids=WIDE)
def test_ids_that_int32_cannot_hold_stay_apart(op, ids):
    _agrees(op, {"q_segment_ids": ids}, q_segment_ids=ids)


@pytest.mark.parametrize("dtype", ["int64", "uint32", "uint64"])
def test_wide_ids_inside_jit_and_of_two_dtypes(dtype):
    ids = np.where(IDS == 1, 2**31 + 1, IDS).astype(dtype)
    with jax.enable_x64(True):
        run = jax.jit(lambda q, kv: masks.Segments(q, kv).dense(T, T))
        for q, kv in ((ids, ids), (ids[:1], ids), (ids, IDS), (IDS - 1, ids)):
            law = {"q_segment_ids": np.broadcast_to(q, IDS.shape).astype(np.int64), "kv_segment_ids": kv.astype(np.int64)}
            np.testing.assert_array_equal(run(q, kv), reference.visible(B, 1, T, T, law))


def test_ids_of_the_host_that_the_others_cannot_equal_match_none():
    keys, queries = jnp.asarray(IDS, jnp.uint32), IDS + np.where(IDS == 1, 2**40, 0)
    found = [np.asarray(x) for x in integers.ids(queries, keys)]
    np.testing.assert_array_equal(found[0][:, :, None] == found[1][:, None], queries[:, :, None] == IDS[:, None])
    assert (found[0][IDS == 1] == -1).all()


FAR = np.iinfo(np.int32).max
SEES_ALL = {"mask": np.ones((T, T), bool)}
SEES_NONE = {"mask": np.zeros((T, T), bool)}
ALL_OR_NONE = {"kv_lengths": np.array([40, 0])}
BEYOND = {
    "lengths of numpy": ({"kv_lengths": np.array([2**33, -(2**33)])}, ALL_OR_NONE),
    "window": ({"causal": True, "sliding_window": (2**40, 0)}, {"causal": True}),
    "window and traced offset": ({"sliding_window": 2**40, "query_offset": np.array([0, 3])}, SEES_ALL),
    "window of int32 and traced offset": ({"sliding_window": FAR, "query_offset": np.array([0, 3])}, SEES_ALL),
    "offset": ({"causal": True, "query_offset": 2**40}, SEES_ALL),
    "offset before": ({"causal": True, "query_offset": -(2**40)}, SEES_NONE),
    "traced offset of int32": ({"causal": True, "query_offset": jnp.array([FAR, -FAR])}, ALL_OR_NONE),
    "offset of numpy": ({"causal": True, "query_offset": np.array([2**40, -(2**40)])}, ALL_OR_NONE),
    "prefix": ({"mask": masks.PrefixLM(2**40)}, SEES_ALL),
    "chunk and traced offset": ({"mask": masks.Chunked(2**40, jnp.array(0))}, SEES_ALL),
}


@pytest.mark.parametrize(("options", "law"), BEYOND.values(), ids=BEYOND)
def test_a_number_beyond_every_sequence_is_as_good_as_none(options, law):
    mask = make_request(Q, K, V, options, OperationMetadata()).mask
    visible = reference.visible(B, 1, T, T, law)
    if mask is None:
        assert visible.all()
        return
    np.testing.assert_array_equal(np.broadcast_to(mask.dense(T, T), visible.shape), visible)
    tiling = masks.Tiling(T, T, 8, 8)
    kinds = visible.reshape(B, 1, 5, 8, 5, 8)
    for bounds, exact in zip(mask.bounds(tiling, jnp), (kinds.any((3, 5)), kinds.all((3, 5))), strict=True):
        np.testing.assert_array_equal(np.broadcast_to(bounds, exact.shape), exact)
    for batch, i, j in ((0, 0, 4), (1, 4, 0), (1, 2, 2)):
        tile = mask.tile(masks.Tile(batch, 0, 8 * i, 8 * j, heads=1, rows=8, cols=8))
        np.testing.assert_array_equal(np.broadcast_to(tile, (1, 8, 8)), kinds[batch, :, i, :, j])


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: masks.Causal(1.5), TypeError, "query_offset must be an integer or an integer array, found float; cast"),
        (lambda: masks.Causal(True), TypeError, "query_offset must be an integer or an integer array, found bool"),
        (lambda: masks.Window(1, 1, "2"), TypeError, "query_offset must be an integer or an integer array, found str"),
        (lambda: masks.PrefixLM(None), TypeError, "prefix must be an integer or an integer array, found NoneType"),
        (lambda: masks.PrefixLM(jnp.ones(2)), TypeError, r"found float32; cast an array with .astype\('int32'\)"),
        (lambda: masks.Chunked(True), ValueError, "chunk size is True; allowed is an integer of 1 or more"),
    ],
)
def test_what_is_no_integer_is_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_numbers_of_numpy_are_static():
    mask = masks.Causal(np.int64(3)) & masks.PrefixLM(np.uint8(2), np.int16(1)) & masks.Chunked(np.int32(4), 0)
    assert mask.is_static
    assert str(mask) == "causal[offset 3] & prefix_lm(2)[offset 1] & chunked(4)"
