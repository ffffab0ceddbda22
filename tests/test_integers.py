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
        run = jax.jit(lambda q, kv: ao.attention(Q, K, V, q_segment_ids=q, kv_segment_ids=kv).attention_outputs)
        for q, kv in ((ids[:1], ids), (IDS - 1, ids)):
            law = {"q_segment_ids": np.broadcast_to(q, IDS.shape).astype(np.int64), "kv_segment_ids": kv.astype(np.int64)}
            np.testing.assert_allclose(run(q, kv), reference.attention(Q, K, V, law).output, atol=2e-5)


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
    _agrees("blocksparse", law, **options)
    mask = make_request(Q, K, V, options, OperationMetadata()).mask
    dense = np.ones((1, 1, T, T), bool) if mask is None else mask.dense(T, T)
    np.testing.assert_array_equal(np.broadcast_to(dense, (B, 2, T, T)), reference.visible(B, 2, T, T, law))


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
