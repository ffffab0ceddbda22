"""Reports of attention going wrong in the field, each as a test of every operation by name.

An operation that cannot take a request may fall back; what counts is that the answer is right under the law of docs/numerics.md.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import attention_ops as ao
from attention_ops import Feature
from attention_ops.device import compiling_for
from attention_ops.kernels.interpreter import interpreted
from attention_ops.operations.vanilla import Vanilla
from attention_ops.selftest import reference
from attention_ops.selftest.execution import compiler_options

CASES = tuple(range(1, 102, 2))
"""The numbers of the reports. A test is named after those that it is made from."""

ELSEWHERE = {
    95: "needs eight devices: tests/test_mesh.py, batch_1 over dp=8 and decode over sp=8",
    97: "needs eight devices: tests/test_mesh.py, gqa and mqa over tp=8",
    99: "needs eight devices: tests/test_mesh.py, gradients of every ring case",
    101: "needs eight devices: tests/test_mesh.py, explicit axes",
}
"""Cases without a test here, and why."""

OPERATIONS = ("vanilla", "sdpa", "flash", "blocksparse", "cudnn_flash", "auto")
every_operation = pytest.mark.parametrize("op", OPERATIONS)
pytestmark = pytest.mark.filterwarnings("ignore::attention_ops.FallbackWarning")


def _make(B=1, T=4, S=None, H=2, K=None, D=8, Dv=None, dtype=np.float32, seed=0, spread=1.0):
    rng = np.random.default_rng(seed)
    S, K = S or T, K or H
    shapes = ((B, T, H, D), (B, S, K, D), (B, S, K, Dv or D))
    return tuple((rng.standard_normal(shape) * spread).astype(dtype) for shape in shapes)


def _call(op: str, q, k, v, **options: Any) -> np.ndarray:
    return np.asarray(ao.attention(q, k, v, impl=op, **options).attention_outputs)


def _law(q, k, v, **options: Any) -> np.ndarray:
    return reference.attention(q, k, v, options).output


def _agrees(op: str, q, k, v, atol=2e-5, **options: Any) -> np.ndarray:
    out = _call(op, q, k, v, **options)
    np.testing.assert_allclose(out.astype(np.float64), _law(q, k, v, **options), atol=atol)
    return out


def _gradients_agree(op: str, q, k, v, atol=5e-5, **options: Any) -> None:
    d_output = np.random.default_rng(9).standard_normal((*q.shape[:3], v.shape[3])).astype(np.float32)
    data = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    static = tuple((name, x) for name, x in options.items() if name not in data)
    route = ao.plan(op, q, k, v, **options).route
    found = _gradients(route, static, {"query": q, "key": k, "value": v}, data, d_output)
    want = reference.attention(q, k, v, options).gradients(d_output)
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, getattr(want, name), atol=atol, err_msg=name)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gradients(route: str, static: Any, arrays: Any, data: Any, d_output: Any) -> Any:
    """Return the gradients of the arrays and of a bias. Names that lead to the same route share its program."""
    trained = arrays | {name: data[name] for name in ("bias",) if name in data}

    def loss(trained):
        return jnp.sum(d_output * ao.attention(impl=route, **(data | trained), **dict(static)).attention_outputs)

    return jax.grad(loss)(trained)


@every_operation
def test_c01_fully_masked_row_gives_zero_for_mask_and_bias(op):
    q, k, v = _make(T=6, S=10)
    mask = np.tril(np.ones((6, 10), bool))
    mask[:, 5:] = False
    mask[5] = False
    by_mask = _agrees(op, q, k, v, mask=mask)
    by_bias = _agrees(op, q, k, v, bias=np.where(mask, 0, -np.inf).astype(np.float32))
    for out in (by_mask, by_bias):
        assert not out[:, 5].any()
    _gradients_agree(op, q, k, v, mask=mask)


@every_operation
@pytest.mark.parametrize("how", ["mask", "bias"])
def test_c03_garbage_in_masked_slots(op, how):
    q, k, v = _make()
    mask = np.ones((4, 4), bool)
    mask[:, 3] = False
    hide = {"mask": mask} if how == "mask" else {"bias": np.where(mask, 0, -np.inf).astype(np.float32)}
    clean = _law(q, k[:, :3], v[:, :3])
    loss = lambda q, k, v: ao.attention(q, k, v, impl=op, **hide).attention_outputs.sum()  # noqa: E731
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    for target, garbage in ((0, 1e10), (1, np.nan), (0, np.nan), (1, np.inf), (0, -np.inf)):
        dirty = [k.copy(), v.copy()]
        dirty[target][0, 3] = garbage
        np.testing.assert_allclose(_call(op, q, *dirty, **hide), clean, atol=2e-6)
        assert all(np.isfinite(g).all() for g in gradient(q, *dirty))


@every_operation
def test_c05_saturated_planes_are_not_added(op):
    q, k, v = _make(H=1, dtype=ml_dtypes.bfloat16)
    lowest = ml_dtypes.finfo(ml_dtypes.bfloat16).min
    bias = np.where(np.tril(np.ones((4, 4), bool)), 0, lowest).astype(ml_dtypes.bfloat16)
    mask = np.ones((4, 4), bool)
    mask[:, :2] = False
    out = _call(op, q, k, v, bias=bias, mask=mask, causal=True)
    np.testing.assert_allclose(out.astype(np.float32), _law(q, k, v, mask=mask, causal=True), atol=2e-2)
    assert not out[:, :2].any()


@every_operation
def test_c07_finite_minimum_plus_a_negative_score(op):
    q, k = np.full((1, 2, 1, 16), 4, np.float16), np.full((1, 2, 1, 16), -4, np.float16)
    v = _make(T=2, H=1, D=16, dtype=np.float16)[2]
    bias = np.array([[np.finfo(np.float16).min] * 2, [0, 0]], np.float16)
    out = _call(op, q, k, v, bias=bias)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[0, 1, 0], v[0, :, 0].mean(0, dtype=np.float32), atol=2e-3)


@every_operation
def test_c09_first_blocks_entirely_masked(op):
    q, k, v = _make(T=1, S=1100, H=1, D=16)
    mask = np.zeros((1, 1100), bool)
    mask[:, 900:960] = True
    _agrees(op, q, k, v, mask=mask)
    _agrees(op, *_make(T=130, H=1, D=16), causal=True, sliding_window=(16, 0))


@every_operation
@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.uint8])
def test_c11_numbers_are_no_mask(op, dtype):
    with pytest.raises(TypeError, match=r"mask must be boolean.*pass mask.astype\(bool\)"):
        _call(op, *_make(B=2), mask=np.ones((2, 1, 1, 4), dtype))


@every_operation
def test_c13_causal_without_a_mask(op):
    q, k, v = _make(B=2, T=8, D=16)
    out = _agrees(op, q, k, v, causal=True)
    np.testing.assert_allclose(out[:, 0], v[:, 0], atol=1e-6)
    assert np.abs(out - _agrees(op, q, k, v)).max() > 0.1


@every_operation
def test_c15_causal_and_a_mask_both_count(op):
    q, k, v = _make(T=6)
    mask = np.ones((6, 6), bool)
    mask[1:, 0] = False
    out = _agrees(op, q, k, v, mask=mask, causal=True)
    np.testing.assert_allclose(out[0, 1], v[0, 1], atol=1e-6)


@every_operation
def test_c17_c19_c21_masks_of_every_broadcast_shape(op):
    q, k, v = _make(B=2, T=8, D=16)
    mask = np.random.default_rng(1).random((2, 2, 8, 8)) < 0.6
    for part in (mask, mask[:, :1], mask[:1, :1], mask[0, 0], mask[:, :1, :1], mask[:1, :, :, :], mask[:1, :1, :, :1]):
        _agrees(op, q, k, v, mask=part)
    q, k, v = _make(B=2, T=128, D=64)
    second = np.ones((2, 1, 128, 128), bool)
    second[1, :, :, 64:] = False
    _agrees(op, q, k, v, mask=second)


@every_operation
def test_c23_a_mask_that_varies_inside_a_block(op):
    q, k, v = _make(B=2, T=256)
    mask = np.arange(256)[None, :] <= np.arange(256)[:, None] + 50
    _agrees(op, q, k, v, mask=mask)
    blocks = ao.OperationMetadata(block_sizes=(128, 96))
    out = ao.attention(q, k, v, impl=op, mask=mask, metadata=blocks).attention_outputs
    np.testing.assert_allclose(out, _law(q, k, v, mask=mask), atol=2e-5)


@every_operation
def test_c25_a_mask_longer_than_the_cache_is_not_trimmed(op):
    with pytest.raises(ValueError, match="its key length is 10, allowed are 1 and 4"):
        _call(op, *_make(T=1, S=4), mask=np.ones((1, 1, 1, 10), bool))


@every_operation
def test_c27_padding_does_not_attend_padding(op):
    q, k, v = _make(T=5)
    out = _agrees(op, q, k, v, q_segment_ids=np.array([[1, 1, 1, -1, -1]]))
    assert not out[:, 3:].any()


@every_operation
def test_c29_c31_lengths_and_padding_count_with_and_without_causal(op):
    q, k, v = _make(B=3, T=8)
    out = _agrees(op, q, k, v, kv_lengths=np.array([8, 5, 1]))
    np.testing.assert_allclose(out[2], np.broadcast_to(v[2, :1], out[2].shape), atol=1e-6)
    _agrees(op, q, k, v, q_lengths=np.array([8, 0, 3]))
    left_padding = np.ones((3, 1, 1, 8), bool)
    left_padding[1, ..., :2] = False
    _agrees(op, q, k, v, mask=left_padding, causal=True)


@every_operation
def test_c35_windows_count_alike(op):
    q = k = np.zeros((1, 8, 1, 8), np.float32)
    v = np.eye(8, dtype=np.float32)[None, :, None]
    keys = lambda **o: (_call(op, q, k, v, **o)[0, :, 0] > 0).sum(1).tolist()  # noqa: E731
    assert keys(causal=True, sliding_window=3) == [1, 2, 3, 4, 4, 4, 4, 4]
    assert keys(causal=True, sliding_window=(2, 0)) == keys(sliding_window=(2, 0)) == [1, 2, 3, 3, 3, 3, 3, 3]
    assert keys(sliding_window=(1, 2)) == [3, 4, 4, 4, 4, 4, 3, 2]


@every_operation
def test_c37_c39_positions_with_a_cache(op):
    q, k, v = _make(T=8)
    whole = _agrees(op, q, k, v, causal=True, sliding_window=(2, 0))
    suffix = _agrees(op, q[:, 6:], k, v, causal=True, sliding_window=(2, 0), query_offset=6)
    np.testing.assert_allclose(suffix, whole[:, 6:], atol=1e-6)
    occupied = np.array([[[[True] * 4 + [False] * 2]]])
    one, k, v = _make(T=1, S=6)
    _agrees(op, one, k, v, causal=True, mask=occupied, query_offset=3)
    traced = jax.jit(lambda position: ao.attention(one, k, v, impl=op, causal=True, query_offset=position).attention_outputs)
    np.testing.assert_allclose(traced(3), _law(one, k[:, :4], v[:, :4]), atol=1e-6)


@every_operation
def test_c41_more_queries_than_keys(op):
    q, k, v = _make(T=5, S=2)
    out = _agrees(op, q, k, v, causal=True, query_offset=-3)
    assert not out[:, :3].any()
    np.testing.assert_allclose(out[:, 3], v[:, 0], atol=1e-6)
    _gradients_agree(op, q, k, v, causal=True, query_offset=-3)
    with pytest.raises(ValueError, match="must state query_offset"):
        _call(op, q, k, v, causal=True)


@every_operation
@pytest.mark.parametrize("T", [16, 129])
def test_c47_c67_c69_soft_cap(op, T):
    q, k, v = _make(T=T, spread=4.0)
    outs = [_agrees(op, q, k, v, causal=True, logits_soft_cap=cap, atol=2e-4) for cap in (None, 5.0, 50.0)]
    assert min(np.abs(a - b).max() for a, b in ((outs[0], outs[1]), (outs[1], outs[2]), (outs[0], outs[2]))) > 1e-2
    bias = np.random.default_rng(3).standard_normal((1, 2, T, T)).astype(np.float32)
    _gradients_agree(op, q, k, v, causal=True, logits_soft_cap=30.0, bias=bias, atol=2e-3)
    v[:, 3] = 1e6
    assert np.abs(_call(op, q, k, v, causal=True, logits_soft_cap=1.0)[:, :3]).max() < 100


@every_operation
@pytest.mark.parametrize("D", [80, 192])
def test_c65_c85_scale_is_that_of_the_true_head_dim(op, D):
    q, k, v = _make(T=32, D=D)
    np.testing.assert_array_equal(_agrees(op, q, k, v), _call(op, q, k, v, softmax_scale=D**-0.5))


@every_operation
def test_c71_gradient_of_sinks_under_cancellation(op):
    sinks = np.array([0.5, -0.3], np.float32)
    worst = 0.0
    for seed in range(3):
        q, k, v = _make(B=2, T=256, D=64, dtype=ml_dtypes.bfloat16, seed=seed)
        call = lambda s: ao.attention(q, k, v, impl=op, softmax_aux=s).attention_outputs  # noqa: B023, E731
        out, pull = jax.vjp(call, jnp.asarray(sinks))
        o = np.asarray(out).astype(np.float64)
        p = reference.attention(q, k, v, {"softmax_aux": sinks}).sink_weights[..., 0].swapaxes(1, 2)[..., None]
        w, do = p * o, np.random.default_rng(seed + 50).standard_normal(o.shape)
        c = (w * do).sum((0, 1, 3), keepdims=True) / (w * w).sum((0, 1, 3), keepdims=True)
        do = (do - 0.99 * c * w).astype(ml_dtypes.bfloat16)
        found = np.asarray(pull(jnp.asarray(do))[0])
        want = -(p * do.astype(np.float64) * o).sum((0, 1, 3))
        assert found.dtype == sinks.dtype
        worst = max(worst, float(np.abs((found - want) / want).max()))
    assert worst <= 2e-2


@every_operation
def test_c73_logits_are_not_rounded(op):
    rng = np.random.default_rng(0)
    q, k, v = ((spread * rng.standard_normal((1, 256, 2, 128))).astype(ml_dtypes.bfloat16) for spread in (6, 2, 1))
    assert np.abs(_call(op, q, k, v).astype(np.float64) - _law(q, k, v)).max() <= 0.0625
    assert np.abs(_call(op, q[:, :1], k, v).astype(np.float64) - _law(q[:, :1], k, v)).max() <= 0.0625


@every_operation
def test_c75_mixed_dtypes(op):
    q, k, v = _make()
    low = v.astype(ml_dtypes.bfloat16)
    with pytest.raises(TypeError, match="query float32, key float32, value bfloat16"):
        _call(op, q, k, low)
    out = ao.attention(q, k, low, impl=op, metadata=ao.OperationMetadata(runtime_dtype="bfloat16")).attention_outputs
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float32), _law(q, k, v), atol=5e-2)


@every_operation
@pytest.mark.parametrize(("D", "Dv"), [(32, 24), (192, 128)])
def test_c77_value_head_dim(op, D, Dv):
    q, k, v = _make(T=16, D=D, Dv=Dv)
    assert _agrees(op, q, k, v).shape == (1, 16, 2, Dv)
    _gradients_agree(op, q, k, v)


@every_operation
@pytest.mark.parametrize(("H", "K"), [(3, 2), (33, 2), (2, 4)])
def test_c79_heads_that_do_not_divide(op, H, K):
    with pytest.raises(ValueError, match=f"query heads {H} are not a multiple of key/value heads {K}"):
        _call(op, *_make(H=H, K=K))


@every_operation
@pytest.mark.parametrize("S", [8, 32, 100, 129])
@pytest.mark.parametrize("extra", ["none", "bias", "mask"])
def test_c83_backward_of_ragged_lengths(op, S, extra):
    T = S + 3
    q, k, v = (np.ones((1, n, 2, 8), np.float32) for n in (T, S, S))
    options = {"bias": np.ones((1, 1, T, S), np.float32)} if extra == "bias" else {}
    options |= {"mask": np.random.default_rng(0).random((T, S)) < 0.5} if extra == "mask" else {}
    _gradients_agree(op, q, k, v, **options)


@every_operation
def test_c91_cotangents_of_output_and_logsumexp(op):
    q, k, v = _make(T=6, K=1, spread=2.0)
    rng = np.random.default_rng(0)
    g, h = rng.standard_normal((1, 6, 2, 8)).astype(np.float32), rng.standard_normal((1, 6, 2)).astype(np.float32)

    def call(q, k, v):
        out = ao.attention(q, k, v, impl=op, causal=True, return_logsumexp=True)
        return out.attention_outputs, out.logsumexp

    _, pull = jax.vjp(call, q, k, v)
    law = reference.attention(q, k, v, {"causal": True})
    for cotangent in (h, np.zeros_like(h)):
        want = law.gradients(g, cotangent)
        for name, found in zip(("query", "key", "value"), pull((g, cotangent)), strict=True):
            np.testing.assert_allclose(found, getattr(want, name), atol=2e-5)


@every_operation
@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (1, 4, 1, 8), (4, 1, 1, 1)])
def test_c93_bias_gradient_over_broadcast_axes(op, shape):
    q, k, v = _make(B=4, T=8, H=4)
    bias = np.random.default_rng(0).standard_normal(shape).astype(ml_dtypes.bfloat16)
    d_output = np.random.default_rng(1).standard_normal(q.shape).astype(np.float32)
    loss = lambda b: jnp.sum(d_output * ao.attention(q, k, v, impl=op, bias=b).attention_outputs)  # noqa: E731
    found = jax.grad(loss)(jnp.asarray(bias))
    want = reference.attention(q, k, v, {"bias": bias}).gradients(d_output).bias
    assert found.shape == shape
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(np.float32), want, rtol=1e-2, atol=1e-3)


@every_operation
def test_c89_vmap_of_some_operands_and_jacobian(op):
    q, k, v = _make(T=4)
    qs = np.stack([q, 2 * q])
    biases = np.random.default_rng(0).standard_normal((2, 1, 1, 4, 4)).astype(np.float32)
    mask = np.tril(np.ones((4, 4), bool))

    @jax.jit
    def call(q, bias):
        return ao.attention(q, k, v, impl=op, bias=bias, mask=mask).attention_outputs

    mapped = jax.vmap(call, in_axes=(0, None))(qs, biases[0])
    np.testing.assert_allclose(mapped, np.stack([call(x, biases[0]) for x in qs]), atol=1e-6)
    mapped = jax.vmap(call, in_axes=(None, 0))(q, biases)
    np.testing.assert_allclose(mapped, np.stack([call(q, x) for x in biases]), atol=1e-6)
    assert jax.jacrev(call)(q, biases[0]).shape == (*q.shape, *q.shape)


@every_operation
@pytest.mark.parametrize(("B", "T", "S"), [(0, 4, 4), (2, 0, 4), (2, 4, 0), (0, 0, 0)])
def test_c33_empty_axes(op, B, T, S):
    q, k, v = np.ones((B, T, 2, 8), np.float16), np.ones((B, S, 1, 8), np.float16), np.ones((B, S, 1, 6), np.float16)
    out = ao.attention(q, k, v, impl=op, return_logsumexp=True)
    assert (out.attention_outputs.shape, out.attention_outputs.dtype) == ((B, T, 2, 6), jnp.float16)
    assert not out.attention_outputs.any()
    assert (out.logsumexp == -jnp.inf).all()


@every_operation
def test_c33_no_heads(op):
    x = np.ones((1, 4, 0, 8), np.float32)
    with pytest.raises(ValueError, match="there must be at least one head and one head dim: found query"):
        _call(op, x, x, x)


@every_operation
def test_c43_layers_with_and_without_a_window(op):
    q, k, v = _make(T=16)
    layer = ao.OperationRegistry.create(op)
    for window in ((3, 0), None, (3, 0), (0, 0), None):
        out = layer(q, k, v, causal=True, sliding_window=window).attention_outputs
        np.testing.assert_allclose(out, _law(q, k, v, causal=True, sliding_window=window), atol=2e-5)


@pytest.fixture
def limited(registry):
    """An operation whose forward for GPUs takes masks and whose native forward takes nothing; either gives zeros."""

    @registry.register
    class Limited(ao.OperationImpl):
        name = "limited"
        fallback = ("vanilla",)
        calls = 0

        @ao.forward(supports={Feature.MASK, Feature.GRADIENT}, rules=(ao.rules.HeadDim(maximum=256, multiple_of=16),))
        def forward_gpu(self, request):
            return 0 * request.query

        @ao.forward(supports={Feature.GRADIENT}, rules=(ao.rules.HeadDim(maximum=256, multiple_of=16),))
        def forward_native(self, request):
            Limited.calls += 1
            return 0 * request.query

    return Limited


def test_c43_c45_what_the_forward_that_runs_does_not_declare_is_not_given_to_it(limited):
    q, k, v = _make(T=16, D=16)
    mask = np.random.default_rng(0).random((16, 16)) < 0.5
    for device, route in (("a100", "limited/gpu"), ("mi300x", "limited/gpu"), ("tpu-v5e", "vanilla/native")):
        assert ao.plan("limited", q, k, v, mask=mask, device=device).route == route
    error = ao.OperationMetadata(fallback="error")
    for options, said in (
        ({"mask": mask}, "does not support an arbitrary boolean mask"),
        ({"sliding_window": 3}, "does not support a sliding_window"),
    ):
        np.testing.assert_allclose(_call("limited", q, k, v, **options), _law(q, k, v, **options), atol=2e-5)
        with pytest.raises(ao.NoRouteError, match=f"limited/native: {said}"):
            ao.attention(q, k, v, impl="limited", metadata=error, **options)
    assert limited.calls == 0
    assert not _call("limited", q, k, v).any()


UNSUPPORTED = {
    "sinks": ({"softmax_aux": np.array([0.5, -1.0], np.float32)}, "attention sinks (softmax_aux)"),
    "soft cap": ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
    "dropout": ({"dropout_prob": 0.1, "deterministic": False, "dropout_rng": jax.random.key(0)}, "dropout"),
}


@pytest.mark.parametrize(("extra", "said"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_c49_a_substitute_that_lacks_a_feature_is_refused_with_all_it_lacks(extra, said):
    q, k, v = _make(T=8)
    options = {**extra, "q_segment_ids": np.array([[0, 0, 0, 1, 1, 1, 1, 1]])}
    with pytest.raises(ao.NoRouteError) as error:
        ao.attention(q, k, v, impl=["cudnn_flash", "sdpa"], **options)
    for feature in ("segment ids", said):
        assert f"  sdpa/native: does not support {feature}" in str(error.value)
    with ao.record_plans() as plans:
        out = _call("sdpa", q, k, v, **options)
    assert plans[0].operation == ("vanilla" if said == "dropout" else "flash")
    if said != "dropout":
        np.testing.assert_allclose(out, _law(q, k, v, **options), atol=2e-5)


@every_operation
def test_c51_an_error_of_the_caller_tries_no_implementation(op, limited):
    q, k, v = _make()
    with pytest.raises(ValueError, match=r"mask has shape \(2, 1, 4, 4\), .*: its batch is 2, allowed are 1 and 1"):
        ao.attention(q, k, v, impl=["limited", op], mask=np.ones((2, 1, 4, 4), bool))
    assert limited.calls == 0


def test_c53_the_innermost_choice_wins_and_is_reported(monkeypatch):
    q, k, v = _make(H=2, D=16)
    facts = {"name": "m", "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "max_length": 4, "causal": True}
    layer = ao.AttentionConfig.from_dict({**facts, "operation": "sdpa"}).build()

    def ran(call):
        with ao.record_plans() as plans:
            call()
        return plans[0].operation, plans[0].notes[0]

    assert ran(lambda: layer(q, k, v)) == ("sdpa", "name chosen by config m")
    monkeypatch.setenv("ATTENTION_OPS_IMPL", "flash")
    assert ran(lambda: layer(q, k, v)) == ("flash", "name chosen by ATTENTION_OPS_IMPL")
    with ao.use("blocksparse"), ao.use("vanilla"):
        assert ran(lambda: layer(q, k, v)) == ("vanilla", "name chosen by attention_ops.use")
        assert ran(lambda: ao.attention(q, k, v, impl="sdpa")) == ("sdpa", "name chosen by the call")


def test_c55_an_operation_of_a_user_keeps_causality_and_padding(registry):
    @registry.register
    class Mine(ao.OperationImpl):
        name = "mine"

        @ao.forward(supports=Feature.ALL)
        def forward_native(self, request):
            return Vanilla(self.metadata).forward_native(request)

    q, k, v = _make(B=2, T=8)
    _agrees("mine", q, k, v, causal=True, kv_lengths=np.array([3, 8]))
    _agrees("mine", q, k, v, causal=True, mask=np.arange(8)[None, None, None] >= np.array([2, 0]).reshape(2, 1, 1, 1))


def test_c57_each_call_is_judged_by_its_own_head_dim(limited):
    layer = ao.OperationRegistry.create("limited")
    with ao.record_plans() as plans, pytest.warns(ao.FallbackWarning) as warned:
        for D in (64, 80, 512, 64, 512, 72):
            layer(*_make(D=D))
    assert [plan.operation for plan in plans] == ["limited", "limited", "vanilla", "limited", "vanilla", "vanilla"]
    assert ["head_dim 512 > 256" in str(one.message) for one in warned] == [True, False]


CUDNN = {
    "no GPU": ("cpu", {}, "has no route for cpu, only for cuda"),
    "compute capability": ("t4", {}, "compute capability 7.5 < 8.0, the minimum"),
    "old cuDNN": (
        ao.DeviceProfile.named("a100", cudnn_version=(8, 9, 7)),
        {},
        "cuDNN 8.9.7 < 9.8, the minimum (upgrade nvidia-cudnn)",
    ),
    "float32": ("h100", {"dtype": "float32"}, "dtype float32 is not one of bfloat16, float16 (set runtime_dtype=bfloat16)"),
    "head dim": ("h100", {"D": 76}, "head_dim 76 is not a multiple of 8 (pad to 80 with softmax_scale=76**-0.5)"),
    "wide head dim": ("a100", {"D": 256}, "head_dim 256 > 128, the limit on compute capability 8.0"),
}


@pytest.mark.parametrize(("device", "changes", "reason"), CUDNN.values(), ids=CUDNN)
def test_c59_what_cudnn_needs_is_one_line_and_then_the_fallback(device, changes, reason):
    dtype, D = changes.get("dtype", "bfloat16"), changes.get("D", 64)
    x = jax.ShapeDtypeStruct((1, 128, 2, D), dtype)
    plan = ao.plan("cudnn_flash", x, x, x, device=device)
    (said,) = (str(one) for one in plan.decisions[0].reasons)
    assert said == reason
    assert plan.operation != "cudnn_flash"
    with pytest.raises(ao.NoRouteError, match=re.escape(said)):
        ao.plan(["cudnn_flash"], x, x, x, device=device)


@pytest.mark.parametrize(("op", "compiled"), [*((op, False) for op in OPERATIONS), ("vanilla", True), ("blocksparse", True)])
def test_c61_a_changed_scalar_is_not_served_from_a_cache(op, compiled):
    q, k, v = _make(spread=3.0)
    layer = ao.OperationRegistry.create(op)
    for options in ({}, {"softmax_scale": 2.0}, {"logits_soft_cap": 1.5}, {"causal": True}, {"logits_soft_cap": 15.0}, {}):
        call = lambda *x, options=options: layer(*x, **options).attention_outputs  # noqa: E731
        out = (jax.jit(call) if compiled else call)(q, k, v)
        np.testing.assert_allclose(out, _law(q, k, v, **options), atol=2e-5)


@every_operation
def test_c63_arrays_with_heads_first_are_told_where_it_shows(op):
    q, k, _ = _make(T=4, H=32, D=64)
    with pytest.raises(ValueError, match=r"query heads 32 are not a multiple of key/value heads 7.*pass x.swapaxes\(1, 2\)"):
        _call(op, q, k[:, :, :7], k[:, :, :7])
    right = _call(op, *(x.swapaxes(1, 2) for x in (q, k, k)))
    np.testing.assert_allclose(right, _law(*(x.swapaxes(1, 2) for x in (q, k, k))), atol=2e-5)


@every_operation
def test_c81_dropout_is_no_state_and_does_not_choose_while_inactive(op):
    q, k, v = _make(T=8, S=512)
    layer, drop = ao.OperationRegistry.create(op), {"dropout_prob": 0.1}
    train = {**drop, "deterministic": False, "dropout_rng": jax.random.key(1)}
    with ao.record_plans() as plans:
        first, idle, again, plain = (layer(q, k, v, **o).attention_outputs for o in (train, drop, train, {}))
    assert plans[1].route == plans[3].route
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(idle, plain)
    np.testing.assert_allclose(idle, _law(q, k, v), atol=2e-5)
    assert np.abs(first - plain).max() > 1e-3
    assert np.abs(np.mean(first - plain)) < 5e-3


def _largest_array(jaxpr) -> int:
    """Return the most numbers in one array that a program makes."""
    sizes = [np.prod(v.aval.shape, dtype=np.int64) for equation in jaxpr.eqns for v in equation.outvars]
    inner = [_largest_array(one) for equation in jaxpr.eqns for one in jax.extend.core.jaxprs_in_params(equation.params)]
    return int(max([*sizes, *inner], default=0))


@pytest.mark.parametrize("op", ["flash", "blocksparse", "auto"])
@pytest.mark.parametrize("masked", ["static", "segments", "lengths"])
def test_c87_no_array_of_all_pairs_exists(op, masked):
    T = 65536
    x, ids = jax.ShapeDtypeStruct((1, T, 1, 16), jnp.float32), jax.ShapeDtypeStruct((1, T), jnp.int32)
    options = {"segments": {"q_segment_ids": ids}, "lengths": {"kv_lengths": jax.ShapeDtypeStruct((1,), jnp.int32)}}

    def loss(x, options):
        return ao.attention(x, x, x, impl=op, causal=True, sliding_window=(4095, 0), **options).attention_outputs.sum()

    program = jax.make_jaxpr(jax.grad(loss))(x, options.get(masked, {}))
    assert _largest_array(program.jaxpr) < T * T // 64


@pytest.mark.parametrize("op", ["flash", "blocksparse", "auto"])
def test_c87_a_bias_that_broadcasts_is_not_expanded(op):
    x, bias = jax.ShapeDtypeStruct((4, 2048, 4, 16), jnp.float32), jax.ShapeDtypeStruct((1, 1, 2048, 2048), jnp.float32)
    loss = lambda x, bias: ao.attention(x, x, x, impl=op, bias=bias).attention_outputs.sum()  # noqa: E731
    assert _largest_array(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, bias).jaxpr) <= 2048 * 2048


def _on_tpu(route: str, gradient: bool = False, **options: Any) -> Any:
    """Return the output, or the gradients of its sum, of a TPU kernel in its interpreter, as a function of the arrays."""

    def call(*arrays):
        return ao.attention(*arrays, impl=[route], **options).attention_outputs

    function = jax.grad(lambda *arrays: call(*arrays).sum(), argnums=(0, 1, 2)) if gradient else call

    def run(*arrays):
        with compiling_for("tpu-v5e"), interpreted():
            return jax.jit(function, compiler_options=compiler_options(fast=True) or None)(*arrays)

    return run


def test_c09_c17_c23_masks_of_the_tpu_kernel_in_its_interpreter():
    q, k, v = _make(T=1, S=1100, H=1, D=16)
    late = np.zeros((1, 1100), bool)
    late[:, 900:960] = True
    np.testing.assert_allclose(_on_tpu("blocksparse/tpu", mask=late)(q, k, v), _law(q, k, v, mask=late), atol=2e-5)
    q, k, v = _make(B=2, T=256)
    mask = np.broadcast_to(np.arange(256)[None, :] <= np.arange(256)[:, None] + 50, (2, 1, 256, 256)).copy()
    mask[1, :, :, 64:] = False
    np.testing.assert_allclose(_on_tpu("blocksparse/tpu", mask=mask)(q, k, v), _law(q, k, v, mask=mask), atol=2e-5)


@pytest.mark.parametrize("route", ["blocksparse/tpu", "flash/tpu"])
def test_c83_c85_ragged_lengths_and_narrow_heads_of_the_tpu_kernels_in_their_interpreter(route):
    for S, D in ((8, 8), (129, 192)):
        q, k, v = (np.ones((1, n, 2, D), np.float32) for n in (S + 3, S, S))
        want = reference.attention(q, k, v, {}).gradients(np.ones_like(q))
        for name, found in zip(("query", "key", "value"), _on_tpu(route, gradient=True)(q, k, v), strict=True):
            np.testing.assert_allclose(found, getattr(want, name), atol=5e-5, err_msg=f"{name}, S {S}, D {D}")


def test_every_case_has_a_test_or_a_reason():
    named = {int(number) for name in globals() if name.startswith("test_") for number in re.findall(r"(?<=_c)\d+", name)}
    assert named.isdisjoint(ELSEWHERE)
    assert sorted(named | set(ELSEWHERE)) == list(CASES)
