"""EasyDeL's names and arguments: beside ejkernel's `attention`, which EasyDeL's "vanilla" calls; float64 where that is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ejkernel.modules import attention as ejkernel_attention
from ejkernel.types import MaskInfo

import attention_ops as ao
from attention_ops.integrations import easydel
from attention_ops.selftest import reference

B, T, S, H, K, D = 2, 6, 6, 4, 2, 8
RNG = jax.random.key(3)


@dataclasses.dataclass
class TransformerMetadata:
    """What EasyDeL's class of this name holds."""

    starts: Any = None
    indexs: Any = None
    postpadded: bool = False


def floats(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def bools(*shape):
    """A random mask in which every row sees key 0."""
    mask = np.random.default_rng(7).random(shape) < 0.6
    mask[..., 0] = True
    return jnp.asarray(mask)


def qkv(T=T, S=S):
    return floats(B, T, H, D), floats(B, S, K, D, seed=1), floats(B, S, K, D, seed=2)


def exact(q, k, v, **options):
    return reference.attention(*map(np.asarray, (q, k, v)), {name: x for name, x in options.items() if x is not None}).output


# ---------------------------------------------------------------- names


def test_the_names_of_easydel():
    for name, operation in easydel.OPERATION_OF.items():
        assert easydel.operation_name(name) == operation
        assert operation in ao.OperationRegistry.names()
        with contextlib.suppress(ao.UnknownOperationError):  # where it is an alias too, it means the same
            assert ao.OperationRegistry.get(name).name == operation
    assert easydel.operation_name("flash") == "flash"
    assert easydel.operation_name(enum.StrEnum("AttentionMechanisms", {"FLASH_ATTN2": "flash_attn2"}).FLASH_ATTN2) == "flash"
    registered = {*ao.OperationRegistry.names()}
    for name in easydel.REFUSED.keys() - registered:
        with pytest.raises(
            ao.UnknownOperationError, match=f"EasyDeL's '{name}' has no operation here: it .*Known: auto, vanilla"
        ):
            easydel.operation_name(name)
    with pytest.raises(ao.UnknownOperationError, match="no operation is named 'vanila'"):
        easydel.operation_name("vanila")


def test_a_registered_operation_wins_over_a_refusal(registry):
    @registry.register(name="paged_flash_attention")
    class Paged(ao.OperationImpl):
        @ao.forward(supports=ao.Feature.ALL)
        def forward_native(self, request):
            return request.query

    q, k, v = qkv()
    np.testing.assert_array_equal(easydel.attention(q, k, v, attn_mechanism="paged_flash_attention").attention_outputs, q)


# ---------------------------------------------------------------- arguments, beside ejkernel

CASES = {
    "causal by default": {},
    "not causal, scale and cap": {"causal": False, "softmax_scale": 0.3, "logits_soft_cap": 2.0},
    "mask": {"causal": False, "mask_info": MaskInfo.from_attention_mask(bools(B, 1, T, S))},
    "mask and init_bias, which is then not called": {
        "mask_info": MaskInfo.from_attention_mask(bools(B, 1, T, S)),
        "init_bias": lambda: floats(B, H, T, S),
    },
    "bias": {"bias": floats(B, H, T, S)},
    "init_bias": {"init_bias": lambda: floats(B, 1, T, S)},
    "window": {"sliding_window": (2, 0)},
    "window of one number": {"sliding_window": 1, "causal": False},
    "sinks per head": {"softmax_aux": floats(H)},
    "sinks per key/value head": {"softmax_aux": floats(K)},
    "sinks for all heads": {"softmax_aux": floats(3)},
    "dropout": {"dropout_prob": 0.4, "dropout_rng": RNG, "deterministic": False},
    "no dropout": {"dropout_prob": 0.4, "dropout_rng": RNG},
}


def by_ejkernel(q, k, v, bias=None, dropout_rng=None, softmax_aux=None, causal=True, **options):
    return ejkernel_attention(q, k, v, bias, dropout_rng, softmax_aux, causal=causal, dtype=jnp.float32, **options)[0]


@pytest.fixture(scope="module")
def answers(outputs_and_gradients):
    def ours(*arrays, **options):
        return easydel.attention(*arrays, attn_mechanism="vanilla", **options).attention_outputs

    return [
        outputs_and_gradients({case: (lambda *a, f=f, o=options: f(*a, **o), qkv()) for case, options in CASES.items()})
        for f in (ours, by_ejkernel)
    ]


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients(case, answers, close):
    ours, theirs = answers
    close(ours[case], theirs[case])


def test_several_sinks_per_key_value_head():
    q, k, v = qkv()
    sinks = floats(K, 3)
    wanted = exact(q, k, v, causal=True, softmax_aux=np.repeat(sinks, H // K, 0))
    np.testing.assert_allclose(easydel.attention(q, k, v, softmax_aux=sinks).attention_outputs, wanted, atol=2e-6)


# ---------------------------------------------------------------- the cache


@pytest.mark.parametrize("dtype", ["int32", "uint8", "uint32"])
def test_more_queries_than_the_cache_holds_whatever_the_dtype_of_its_lengths(dtype):
    q, k, v = qkv(T=4, S=9)
    found = easydel.attention(q, k, v, cache_metadata=TransformerMetadata(indexs=jnp.array([2, 9], dtype)))
    wanted = exact(q, k, v, causal=True, query_offset=np.array([-2, 5]), kv_lengths=np.array([2, 9]))
    np.testing.assert_allclose(found.attention_outputs, wanted, atol=2e-6)


@pytest.mark.parametrize("mechanism", [easydel.DECODE, "flash_attn2"])
def test_decoding_reads_the_lengths_of_the_cache(mechanism):
    q, k, v = qkv(T=1, S=9)
    cache = TransformerMetadata(starts=jnp.array([0, 2]), indexs=jnp.array([9, 5]))
    v = jnp.where(jnp.arange(9)[None, :, None, None] < cache.indexs[:, None, None, None], v, float("nan"))
    real = (np.arange(9) >= np.array([[0], [2]])) & (np.arange(9) < np.array([[9], [5]]))
    for window in (None, (2, 0)):
        options = {"attn_mechanism": mechanism, "sliding_window": window, "mode": "__autoregressive__"}
        found = easydel.attention(q, k, v, cache_metadata=cache, **options)
        wanted = exact(q, k, v, mask=real[:, None, None], sliding_window=window, query_offset=np.array([8, 4]))
        np.testing.assert_allclose(found.attention_outputs, wanted, atol=2e-6)
        by_view = easydel.attention(q, k, v, cache_view=cache, **options)
        np.testing.assert_array_equal(by_view.attention_outputs, found.attention_outputs)


def test_several_queries_stand_at_the_end_of_the_cache():
    q, k, v = qkv(T=3, S=9)
    cache = TransformerMetadata(indexs=jnp.array([9, 5]))
    found = easydel.attention(q, k, v, cache_metadata=cache, attn_mechanism="vanilla").attention_outputs
    wanted = exact(q, k, v, causal=True, query_offset=np.array([6, 2]), kv_lengths=np.array([9, 5]))
    np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_without_a_cache_positions_are_those_of_ejkernel(close):
    for T, S in ((3, 9), (1, 9)):
        q, k, v = qkv(T, S)
        causal = T > 1  # EasyDeL's operations drop causality for a single query
        close(easydel.attention(q, k, v).attention_outputs, by_ejkernel(q, k, v, causal=causal))


def test_what_is_baked_into_mask_info_is_not_applied_again():
    q, k, v = qkv(T=1, S=4)
    mask = bools(B, 1, 1, 4)
    window = dataclasses.replace(MaskInfo.from_attention_mask(mask), sliding_window_baked_in=True)
    cache = TransformerMetadata(indexs=jnp.array([90, 50]))  # of the cache that the four keys were cut from
    found = easydel.attention(q, k, v, mask_info=window, sliding_window=(2, 0), cache_metadata=cache).attention_outputs
    np.testing.assert_allclose(found, exact(q, k, v, mask=np.asarray(mask)), atol=2e-6)

    q, k, v = qkv(T=2, S=4)
    causal = MaskInfo.from_attention_mask(jnp.ones((B, 1, 2, 4), bool)).apply_causal(offset=2)
    found = easydel.attention(q, k, v, mask_info=causal).attention_outputs
    np.testing.assert_allclose(found, exact(q, k, v, causal=True, query_offset=2), atol=2e-6)


# ---------------------------------------------------------------- what goes wrong there (docs/from_easydel.md)


def test_a_bias_does_not_replace_the_mask():
    q, k, v = qkv()
    mask, bias = bools(B, 1, T, S), floats(B, H, T, S)
    options = {"mask_info": MaskInfo.from_attention_mask(mask), "bias": bias, "causal": False}
    wanted = exact(q, k, v, mask=np.asarray(mask), bias=np.asarray(bias))
    np.testing.assert_allclose(easydel.attention(q, k, v, **options).attention_outputs, wanted, atol=2e-6)
    assert np.abs(jax.jit(lambda: by_ejkernel(q, k, v, **options))() - wanted).max() > 0.5


def test_the_window_of_a_single_query_needs_its_position():
    q, k, v = qkv(T=1, S=9)
    with pytest.raises(ValueError, match="sliding_window with query length 1 and key length 9: nothing says where in the cache"):
        easydel.attention(q, k, v, sliding_window=(2, 0))
    theirs = jax.jit(lambda: by_ejkernel(q, k, v, sliding_window=(2, 0), causal=False))()
    np.testing.assert_allclose(theirs, np.repeat(v[:, :1], H // K, 2), atol=1e-6)  # key 0 only


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("view", ["cache_metadata", "cache_view"])
@pytest.mark.parametrize("field", ["indexs", "starts"])
def test_the_lengths_of_a_cache_are_integers_one_for_each_batch_row(view, field):
    held = {"indexs": jnp.array([6, 6]), "starts": None}
    for lengths, error, message in (
        ([4.7, 5.0], TypeError, "must be an integer or an integer array, found float64"),
        (jnp.array([True, False]), TypeError, "must be an integer or an integer array, found bool"),
        ([1, 2, 3], ValueError, r"has shape \(3,\); allowed is \[2\], one for each batch row"),
    ):
        with pytest.raises(error, match=f"^{view}.{field} {message}"):
            easydel.attention(*qkv(), **{view: TransformerMetadata(**{**held, field: lengths})})


def test_a_length_that_int32_cannot_hold_is_not_truncated():
    q, k, v = qkv(T=1, S=9)
    far = TransformerMetadata(indexs=np.array([2**32 + 5, 9]))
    found = easydel.attention(q, k, v, cache_metadata=far).attention_outputs
    np.testing.assert_allclose(found, exact(q, k, v), atol=2e-6)


def test_dropout_is_active_with_a_boolean_of_numpy_too():
    q, k, v = qkv()
    dropout = {"dropout_prob": 0.4, "dropout_rng": RNG, "attn_mechanism": "vanilla"}
    found, wanted = (easydel.attention(q, k, v, deterministic=no, **dropout).attention_outputs for no in (np.False_, False))
    np.testing.assert_array_equal(found, wanted)


def test_what_is_refused():
    q, k, v = qkv()
    one = qkv(T=1, S=9)
    baked = dataclasses.replace(MaskInfo.from_attention_mask(bools(B, 1, 3, 9)), sliding_window_baked_in=True)
    metadata = TransformerMetadata(indexs=jnp.array([9, 5]))
    for arrays, options, error, message in (
        (
            (q, k, v),
            {"fused_backward": True},
            ValueError,
            "fused_backward=True cannot be kept, only False: each operation has one",
        ),
        ((q, k, v), {"normalize_output": False}, ValueError, "always divided by the sum of the softmax"),
        ((q, k, v), {"cum_seqlens_q": [0, 6]}, ValueError, r"cum_seqlens_q=\[0, 6\] cannot be kept, only None: .*from_segments"),
        ((q, k, v), {"compute_dtype": "bfloat16"}, ValueError, "set runtime_dtype in the metadata"),
        (
            (q, k, v),
            {"normalise_output": True},
            TypeError,
            "unknown argument 'normalise_output'. Did you mean 'normalize_output'?",
        ),
        ((q, k, v), {"mode": "decode"}, ValueError, "mode is 'decode'; allowed are __train__, __prefill__, __autoregressive__"),
        (one, {"mode": "__autoregressive__"}, ValueError, "nothing says how much of the cache is filled"),
        (one, {"attn_mechanism": easydel.DECODE}, ValueError, "found query length 1 and no cache_metadata"),
        (
            (q, k, v),
            {"attn_mechanism": easydel.DECODE, "cache_metadata": metadata},
            ValueError,
            "found query length 6 and cache_metadata",
        ),
        ((q[0, 0], k, v), {}, ValueError, r"query has shape \(4, 8\); allowed is \[batch, length, heads, dim\]"),
        ((q, k, None), {}, TypeError, "value must be an array, found NoneType"),
        ((q, k, v), {"attn_mechanism": ["flash"]}, TypeError, r"attn_mechanism is \['flash'\]; allowed is one name"),
        ((q, k, v), {"dropout_prob": "x", "deterministic": False}, ValueError, "dropout_prob is x; allowed is 0 <= p < 1"),
        ((q, k[:, :, :0], v[:, :, :0]), {"softmax_aux": jnp.ones(0)}, ValueError, "there must be at least one head"),
        ((q, k, v), {"metadata": {}}, TypeError, "metadata must be an OperationMetadata, found dict"),
        (one, {"cache_view": object()}, TypeError, "cache_view is a object without indexs: it reads a paged cache"),
        (qkv(T=3, S=9), {"mask_info": baked}, ValueError, "causal with query length 3 and key length 9, and a mask_info whose"),
        ((q, k, v), {"dropout_prob": 0.1, "deterministic": False}, ValueError, "dropout_rng must be a jax.random key"),
        ((q, k, v), {"precision": jax.lax.DotAlgorithmPreset.TF32_TF32_F32}, ValueError, "names an algorithm"),
    ):
        with pytest.raises(error, match=message):
            easydel.attention(*arrays, **options)


def test_defaults_of_the_other_arguments_are_taken(close):
    q, k, v = qkv()
    others = {name: default for name, (default, _) in easydel._UNSUPPORTED.items()}
    close(easydel.attention(q, k, v, **others, mode="__train__"), easydel.attention(q, k, v))
