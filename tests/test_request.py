"""Caller errors are raised before anything is planned, and say what was found, what is allowed, and the fix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_ops as ao
from attention_ops import Feature, masks
from attention_ops.metadata import OperationMetadata
from attention_ops.request import DEFAULTS, make_request

F32 = jnp.float32


def _struct(*shape: int, dtype=F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _request(q=(2, 4, 4, 8), k=(2, 4, 2, 8), v=(2, 4, 2, 8), dtype=F32, metadata=None, **options):
    return make_request(
        _struct(*q, dtype=dtype), _struct(*k, dtype=dtype), _struct(*v, dtype=dtype), options, metadata or OperationMetadata()
    )


LONG = {"k": (2, 6, 2, 8), "v": (2, 6, 2, 8)}
ERRORS = [
    ({"is_causal": True}, TypeError, "unknown attention option 'is_causal'. Did you mean 'causal'"),
    ({"q": (4, 4, 8)}, ValueError, r"query has 3 dimensions, allowed are 4; found query \(4, 4, 8\)"),
    ({"q": (2, 4, 3, 8)}, ValueError, "query heads 3 are not a multiple of key/value heads 2"),
    ({"q": (2, 4, 33, 8)}, ValueError, "query heads 33 are not a multiple of key/value heads 2"),
    ({"q": (2, 4, 2, 8), "k": (2, 4, 4, 8), "v": (2, 4, 4, 8)}, ValueError, "query heads 2 are not a multiple of .* heads 4"),
    ({"q": (1, 4, 32, 64), "k": (1, 4, 7, 64), "v": (1, 4, 7, 64)}, ValueError, r"pass x.swapaxes\(1, 2\)"),
    ({"q": (1, 4, 4, 8)}, ValueError, "batch sizes differ"),
    ({"v": (2, 5, 2, 8)}, ValueError, "key length 4 and value length 5 differ"),
    ({"v": (2, 4, 1, 8)}, ValueError, "key heads 2 and value heads 1 differ"),
    ({"q": (2, 4, 4, 16)}, ValueError, "query head dim 16 and key head dim 8 differ"),
    ({"q": (2, 4, 0, 8), "k": (2, 4, 0, 8), "v": (2, 4, 0, 8)}, ValueError, "at least one head"),
    ({"dtype": jnp.int32}, TypeError, "have dtype int32; allowed are float16, bfloat16, float32, float64"),
    ({"dtype": jnp.float8_e4m3fn}, TypeError, "set runtime_dtype in the OperationMetadata"),
    ({"causal": 1}, TypeError, "causal must be True or False, found int"),
    ({**LONG, "causal": True}, ValueError, "query length 4 and key length 6 differ.*0 aligns top-left.* 2 bottom-right"),
    ({**LONG, "sliding_window": 2}, ValueError, "must state query_offset"),
    ({**LONG, "mask": masks.Causal()}, ValueError, "must state query_offset"),
    ({"causal": True, "query_offset": 1.0}, TypeError, "query_offset must be an integer"),
    ({"causal": True, "query_offset": True}, TypeError, "query_offset must be an integer"),
    ({"causal": True, "query_offset": _struct(3, dtype=jnp.int32)}, ValueError, r"query_offset has shape \(3,\); allowed are"),
    ({"sliding_window": (1, 2, 3)}, ValueError, "sliding_window has 3 numbers"),
    ({"sliding_window": -4}, ValueError, "sliding_window left is -4; allowed is 0 or more, or None for unlimited"),
    ({"sliding_window": 2.0}, TypeError, "must be an integer or None"),
    ({"sliding_window": jnp.array(2)}, TypeError, "sliding_window left must be an integer or None"),
    ({"sliding_window": (2, np.array([1]))}, TypeError, "sliding_window right must be an integer or None"),
    ({"sliding_window": {}}, TypeError, "sliding_window left must be an integer or None"),
    ({"mask": _struct(2, 1, 1, 4, dtype=jnp.int32)}, TypeError, r"mask must be boolean.*found int32; pass mask.astype\(bool\)"),
    ({"mask": _struct(2, 1, 1, 4)}, TypeError, "found float32"),
    ({"mask": _struct(2, 1, 1, 4, dtype=jnp.uint8)}, TypeError, "found uint8"),
    ({"mask": _struct(2, 4, 4, dtype=bool)}, ValueError, r"three dimensions are ambiguous. Pass mask\[:, None\]"),
    ({"mask": _struct(2, 1, 1, 10, dtype=bool)}, ValueError, "its key length is 10, allowed are 1 and 4"),
    ({"mask": _struct(3, 1, 4, 4, dtype=bool)}, ValueError, "its batch is 3, allowed are 1 and 2"),
    ({"mask": _struct(2, 2, 4, 4, dtype=bool)}, ValueError, "its heads is 2, allowed are 1 and 4"),
    ({"mask": masks.Dense(np.ones((5, 5), bool))}, ValueError, "its query length is 5, allowed are 1 and 4"),
    ({"bias": _struct(4, 4, dtype=bool)}, TypeError, "bias must be floating, found bool; a boolean mask goes into mask="),
    ({"bias": _struct(4, 4, 4)}, ValueError, "three dimensions are ambiguous"),
    ({"bias": _struct(1, 1, 1, 5)}, ValueError, "its key length is 5, allowed are 1 and 4"),
    ({"kv_segment_ids": _struct(2, 4, dtype=jnp.int32)}, ValueError, "kv_segment_ids is given without q_segment_ids"),
    ({**LONG, "q_segment_ids": _struct(2, 4, dtype=jnp.int32)}, ValueError, "given without kv_segment_ids: query length 4"),
    ({"q_segment_ids": _struct(2, 5, dtype=jnp.int32)}, ValueError, r"q_segment_ids has shape \(2, 5\); allowed is \[2, 4\]"),
    ({"q_segment_ids": _struct(2, 4)}, TypeError, "q_segment_ids must be integers, found float32"),
    ({"kv_lengths": _struct(3, dtype=jnp.int32)}, ValueError, r"kv_lengths has shape \(3,\)"),
    ({"kv_lengths": _struct(2, 2, dtype=jnp.int32)}, ValueError, r"kv_lengths has shape \(2, 2\); allowed is \[B\]"),
    ({"q_lengths": [1.5, 2.0]}, TypeError, "q_lengths must be integers"),
    ({"q_lengths": [1, [2]]}, TypeError, "q_lengths must be an array, found list, of which numpy makes no numbers"),
    ({"mask": [[True], [True, False]]}, TypeError, "mask must be an array, found list"),
    ({"bias": masks.Causal()}, TypeError, "bias must be an array, found Causal"),
    ({"softmax_aux": ["a"] * 4}, TypeError, "softmax_aux must be an array, found list"),
    ({"softmax_aux": np.zeros(4, np.longdouble)}, TypeError, "softmax_aux must be an array, found ndarray of"),
    ({"causal": True, "query_offset": [1, [2]]}, TypeError, "query_offset must be an array, found list"),
    ({"softmax_aux": _struct(3)}, ValueError, r"softmax_aux has shape \(3,\); allowed are \[H\] = \[4\]"),
    ({"softmax_aux": _struct(2, 4)}, ValueError, r"softmax_aux has shape \(2, 4\)"),
    ({"softmax_aux": _struct(4, dtype=jnp.int32)}, TypeError, "softmax_aux must be floating"),
    ({"softmax_scale": "big"}, TypeError, r"softmax_scale must be a number that a float can hold, found 'big' \(str\)"),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale is nan"),
    ({"softmax_scale": 1e39}, ValueError, "softmax_scale is 1e[+]39; allowed is a number from -1e[+]30 to 1e[+]30"),
    ({"softmax_scale": b"1"}, TypeError, "softmax_scale must be a number"),
    ({"softmax_scale": np.array("one")}, TypeError, "softmax_scale must be a number"),
    ({"softmax_scale": [1, [2]]}, TypeError, "softmax_scale must be a number"),
    ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap is 0.0; allowed is a number from 1e-30 to 1e[+]30"),
    ({"logits_soft_cap": 1e38}, ValueError, "logits_soft_cap is 1e[+]38"),
    ({"logits_soft_cap": 1e-45}, ValueError, "logits_soft_cap is 1e-45"),
    ({"logits_soft_cap": -3}, ValueError, "logits_soft_cap is -3.0"),
    ({"dropout_prob": 1.0}, ValueError, "dropout_prob is 1.0; allowed is 0 <= p < 1"),
    ({"dropout_prob": 0.1, "deterministic": False}, ValueError, "dropout_rng must be a jax.random key"),
    (
        {"dropout_prob": 0.1, "deterministic": False, "dropout_rng": _struct(4, dtype=jnp.uint32)},
        TypeError,
        r"dropout_rng must be one jax.random key, found uint32\[4\]",
    ),
    ({"mask_info": np.ones((4, 4), bool)}, TypeError, "mask_info must be an ejkernel.types.MaskInfo, found ndarray"),
    ({"metadata": OperationMetadata(runtime_dtype=jnp.bfloat16), "dtype": jnp.int32}, TypeError, "query has dtype int32"),
]


@pytest.mark.parametrize(("call", "error", "match"), ERRORS, ids=[match[:50] for _, _, match in ERRORS])
def test_caller_errors(call, error, match):
    with pytest.raises(error, match=match):
        _request(**call)


def test_mixed_dtypes_name_the_three():
    with pytest.raises(TypeError, match="query float32, key float32, value bfloat16"):
        make_request(_struct(1, 2, 1, 4), _struct(1, 2, 1, 4), _struct(1, 2, 1, 4, dtype=jnp.bfloat16), {}, OperationMetadata())
    request = make_request(
        _struct(1, 2, 1, 4),
        _struct(1, 2, 1, 4),
        _struct(1, 2, 1, 4, dtype=jnp.bfloat16),
        {},
        OperationMetadata(runtime_dtype=jnp.bfloat16),
    )
    assert request.spec.dtype == jnp.bfloat16


def test_a_traced_scale_is_refused_with_the_fix(qkv):
    q, k, v = qkv()
    with pytest.raises(TypeError, match="softmax_scale is traced.*multiply the query"):
        jax.jit(lambda scale: ao.attention(q, k, v, softmax_scale=scale))(0.5)


def test_defaults_are_resolved_once():
    request = _request()
    assert request.scale == 8**-0.5
    assert request.mask is None
    assert request.sinks is None
    assert request.dropout is None
    assert request.spec.softmax_dtype == np.float32
    assert request.spec.features == {Feature.GQA, Feature.GRADIENT}
    assert _request(differentiable=False).spec.features == {Feature.GQA}


@pytest.mark.parametrize(
    ("call", "features"),
    [
        ({"causal": True}, {Feature.CAUSAL}),
        ({"causal": True, "query_offset": 2}, {Feature.CAUSAL, Feature.OFFSET}),
        ({"sliding_window": (1, 0)}, {Feature.WINDOW}),
        ({"sliding_window": 100}, set()),
        ({"mask": _struct(4, 4, dtype=bool)}, {Feature.MASK}),
        ({"mask": np.ones((4, 4), bool)}, {Feature.MASK}),
        ({"mask": masks.Dense(np.ones((4, 4), bool))}, set()),
        ({"bias": _struct(4, 4)}, {Feature.BIAS, Feature.BIAS_GRADIENT}),
        ({"softmax_aux": _struct(4)}, {Feature.SINKS}),
        ({"softmax_aux": _struct(1, 3)}, {Feature.SINKS}),
        ({"logits_soft_cap": 5}, {Feature.SOFT_CAP}),
        ({"q_segment_ids": _struct(2, 4, dtype=jnp.int32)}, {Feature.SEGMENTS}),
        ({"kv_lengths": [1, 2]}, {Feature.LENGTHS}),
        ({"return_weights": True}, {Feature.WEIGHTS}),
        ({"return_logsumexp": True}, {Feature.LOGSUMEXP}),
        ({"dropout_prob": 0.1}, set()),
        ({"dropout_prob": 0.1, "deterministic": False, "dropout_rng": jax.random.key(0)}, {Feature.DROPOUT}),
        ({"v": (2, 4, 2, 6)}, {Feature.VALUE_DIM}),
    ],
)
def test_features_of_a_request(call, features):
    assert _request(**call).spec.features == features | {Feature.GQA, Feature.GRADIENT}


def test_decoding_one_query_sees_all_keys_and_needs_no_mask():
    request = _request(q=(2, 1, 4, 8), k=(2, 6, 2, 8), v=(2, 6, 2, 8), causal=True)
    assert request.mask is None
    window = _request(q=(2, 1, 4, 8), k=(2, 6, 2, 8), v=(2, 6, 2, 8), causal=True, sliding_window=(2, 0))
    np.testing.assert_array_equal(window.mask.dense(1, 6)[0, 0, 0], [False, False, False, True, True, True])


def test_specs_are_the_same_for_arrays_and_their_shapes(qkv):
    q, k, v = qkv()
    options = {"causal": True, "mask": jnp.ones((8, 8), bool), "bias": jnp.ones((1, 4, 8, 8)), "kv_lengths": jnp.array([3, 4])}
    abstract = {name: x if isinstance(x, bool) else _struct(*x.shape, dtype=x.dtype) for name, x in options.items()}
    a = make_request(q, k, v, options, OperationMetadata()).spec
    b = make_request(*(_struct(*x.shape) for x in (q, k, v)), abstract, OperationMetadata()).spec
    assert a == b
    assert hash(a) == hash(b)


def test_sinks_are_made_per_head():
    request = make_request(
        *(jnp.zeros(s) for s in ((1, 2, 4, 8),) * 3), {"softmax_aux": jnp.array([[1.0, 2.0]])}, OperationMetadata()
    )
    np.testing.assert_array_equal(request.sinks, [[1.0, 2.0]] * 4)


def test_mask_info_of_ejkernel(qkv):
    from ejkernel.types.mask import MaskInfo

    q, k, v = qkv(T=4)
    array = np.tril(np.ones((2, 1, 4, 4), bool))
    by_mask = ao.attention(q, k, v, mask_info=MaskInfo(_attention_mask=jnp.asarray(array, jnp.int32)), impl="vanilla")
    np.testing.assert_allclose(
        by_mask.attention_outputs, ao.attention(q, k, v, causal=True, impl="vanilla").attention_outputs, rtol=1e-6
    )
    ids = jnp.array([[0, 0, 1, -1], [0, 1, 1, 1]])
    by_ids = ao.attention(q, k, v, mask_info=MaskInfo(_q_segment_ids=ids, _kv_segment_ids=ids), impl="flash")
    np.testing.assert_allclose(
        by_ids.attention_outputs, ao.attention(q, k, v, q_segment_ids=ids, impl="flash").attention_outputs, rtol=1e-6
    )
    with pytest.raises(ValueError, match="neither an attention mask nor segment ids"):
        ao.attention(q, k, v, mask_info=MaskInfo())
    with pytest.raises(ValueError, match="kv_segment_ids is given without q_segment_ids"):
        ao.attention(q, k, v, mask_info=MaskInfo(_attention_mask=jnp.asarray(array), _kv_segment_ids=ids))
    struct = MaskInfo(_attention_mask=_struct(2, 4, 4, dtype=jnp.int32))
    assert Feature.MASK in ao.plan("vanilla", q, k, v, mask_info=struct).spec.features


def test_every_option_is_documented():
    for name in DEFAULTS:
        assert name in ao.AttentionOptions.__doc__
