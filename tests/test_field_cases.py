"""Reports of attention going wrong in the field, each as a test of every operation by name.

An operation that cannot take a request may fall back; what counts is that the answer is right under the law of docs/numerics.md.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import attention_ops as ao
from attention_ops.selftest import reference

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
    bias = options.pop("bias", None)

    def loss(q, k, v, bias):
        return jnp.sum(d_output * ao.attention(q, k, v, impl=op, bias=bias, **options).attention_outputs)

    wanted = (0, 1, 2) if bias is None else (0, 1, 2, 3)
    found = jax.jit(jax.grad(loss, argnums=wanted))(q, k, v, bias)
    given = {**options, "bias": bias}
    want = reference.attention(q, k, v, {n: x for n, x in given.items() if x is not None}).gradients(d_output)
    for name, gradient in zip(("query", "key", "value", "bias"), found, strict=False):
        np.testing.assert_allclose(gradient, getattr(want, name), atol=atol, err_msg=name)


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
    clean = _law(q[:, :, :], k[:, :3], v[:, :3])
    for target, garbage in ((0, 1e10), (1, np.nan), (0, np.nan), (1, np.inf), (0, -np.inf)):
        dirty = [k.copy(), v.copy()]
        dirty[target][0, 3] = garbage
        np.testing.assert_allclose(_call(op, q, *dirty, **hide), clean, atol=2e-6)
        gradients = jax.grad(lambda q, k, v: ao.attention(q, k, v, impl=op, **hide).attention_outputs.sum(), argnums=(0, 1, 2))(
            q, *dirty
        )
        assert all(np.isfinite(g).all() for g in gradients)


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
