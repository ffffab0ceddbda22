"""The reference against numbers worked out by hand, and its gradients against differences in float64."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest

from attention_ops.selftest import cases, reference


def _arrays(T, S, H=1, K=1, D=2, Dv=2):
    return np.zeros((1, T, H, D)), np.zeros((1, S, K, D)), np.zeros((1, S, K, Dv))


def _with_logits(*logits, **options):
    """One query whose logits are the given ones; the values are a unit matrix, so the output is the weights."""
    query, key, _ = _arrays(1, len(logits))
    query[..., 0], key[0, :, 0, 0] = 1.0, logits
    value = np.eye(len(logits))[None, :, None]
    return reference.attention(query, key, value, {"softmax_scale": 1.0, **options})


def test_two_keys_by_hand():
    result = _with_logits(math.log(1), math.log(3))
    np.testing.assert_allclose(result.output[0, 0, 0], [0.25, 0.75])
    np.testing.assert_allclose(result.weights[0, 0, 0], [0.25, 0.75])
    np.testing.assert_allclose(result.logsumexp[0, 0, 0], math.log(4))


def test_a_sink_joins_the_denominator_only():
    result = _with_logits(math.log(1), math.log(3), softmax_aux=np.array([math.log(4)]))
    np.testing.assert_allclose(result.output[0, 0, 0], [1 / 8, 3 / 8])
    np.testing.assert_allclose(result.logsumexp[0, 0, 0], math.log(4))
    several = _with_logits(0.0, math.log(3), softmax_aux=np.array([[math.log(2), math.log(2)]]))
    np.testing.assert_allclose(several.output, result.output)


def test_scale_then_cap_then_bias():
    result = _with_logits(3.0, 5.0, softmax_scale=2.0, logits_soft_cap=4.0, bias=np.array([[0.5, -1.0]]))
    logits = [4 * math.tanh(6 / 4) + 0.5, 4 * math.tanh(10 / 4) - 1.0]
    np.testing.assert_allclose(result.logsumexp[0, 0, 0], np.log(np.exp(logits).sum()))


def test_the_default_scale_is_of_the_true_head_dim():
    query, key, value = (np.ones((1, 1, 1, 3)), np.ones((1, 1, 1, 3)), np.ones((1, 1, 1, 3)))
    assert reference.attention(query, key, value, {}).logsumexp == pytest.approx(math.sqrt(3))


def test_an_empty_row_is_zero():
    result = _with_logits(1.0, 2.0, mask=np.zeros((1, 2), bool))
    assert not result.output.any()
    assert result.logsumexp[0, 0, 0] == -np.inf
    gradients = result.gradients(np.ones((1, 1, 1, 2)), np.ones((1, 1, 1)))
    assert not any(x.any() for x in (gradients.query, gradients.key, gradients.value))


def test_minus_infinity_in_the_bias_blocks():
    blocked = _with_logits(1.0, 2.0, 0.5, bias=np.array([[0.0, -np.inf, 0.0]]))
    masked = _with_logits(1.0, 2.0, 0.5, mask=np.array([[True, False, True]]))
    np.testing.assert_array_equal(blocked.output, masked.output)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_what_nobody_sees_reaches_nothing(poison):
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, 4, 2, 3)) for _ in range(3))
    mask = np.ones((2, 2, 4, 4), bool)
    mask[0, :, :, 2] = False
    mask[1, 0, 3] = False
    clean = reference.attention(query, key, value, {"mask": mask})
    for array, index in ((key, (0, 2)), (value, (0, 2)), (query, (1, 3, 0))):
        array[index] = poison
    dirty = reference.attention(query, key, value, {"mask": mask})
    np.testing.assert_array_equal(clean.output, dirty.output)
    for one, other in zip(_gradients(clean), _gradients(dirty), strict=True):
        np.testing.assert_array_equal(one, other)


def _gradients(result):
    found = result.gradients(np.ones_like(result.output), np.ones_like(result.logsumexp))
    return found.query, found.key, found.value


@pytest.mark.parametrize(
    ("sizes", "options", "rows"),
    [
        ((4, 4), {"causal": True}, ["x...", "xx..", "xxx.", "xxxx"]),
        ((2, 4), {"causal": True, "query_offset": 2}, ["xxx.", "xxxx"]),
        ((2, 4), {"causal": True, "query_offset": 0}, ["x...", "xx.."]),
        ((1, 4), {"causal": True}, ["xxxx"]),
        ((4, 2), {"causal": True, "query_offset": -2}, ["..", "..", "x.", "xx"]),
        ((4, 4), {"sliding_window": (1, 0)}, ["x...", "xx..", ".xx.", "..xx"]),
        ((4, 4), {"sliding_window": (0, 2)}, ["xxx.", ".xxx", "..xx", "...x"]),
        ((4, 4), {"sliding_window": 1}, ["xx..", "xxx.", ".xxx", "..xx"]),
        ((4, 4), {"sliding_window": (None, 0), "causal": True}, ["x...", "xx..", "xxx.", "xxxx"]),
        ((2, 5), {"sliding_window": (1, 0), "query_offset": np.array([3])}, ["..xx.", "...xx"]),
        ((3, 3), {"q_segment_ids": np.array([[0, 0, -1]])}, ["xx.", "xx.", "..."]),
        ((2, 3), {"q_segment_ids": np.array([[1, 2]]), "kv_segment_ids": np.array([[2, 1, -1]])}, [".x.", "x.."]),
        ((2, 3), {"q_lengths": np.array([1])}, ["xxx", "..."]),
        ((2, 3), {"kv_lengths": np.array([2])}, ["xx.", "xx."]),
    ],
)
def test_masks_drawn(sizes, options, rows):
    drawn = np.array([[cell == "x" for cell in row] for row in rows])
    np.testing.assert_array_equal(reference.visible(1, 1, *sizes, options)[0, 0], drawn)


def test_offsets_and_lengths_differ_by_batch_row():
    options = {"causal": True, "query_offset": np.array([0, 2]), "kv_lengths": np.array([3, 2])}
    found = reference.visible(2, 1, 1, 4, options)[:, 0, 0]
    np.testing.assert_array_equal(found, [[True, False, False, False], [True, True, False, False]])


def test_a_position_needs_an_offset():
    with pytest.raises(ValueError, match="T 2 and S 4"):
        reference.visible(1, 1, 2, 4, {"causal": True})


def test_query_head_reads_its_group():
    query, key, value = (np.zeros((1, 1, 4, 2)), np.zeros((1, 1, 2, 2)), np.zeros((1, 1, 2, 1)))
    value[0, 0, :, 0] = [1.0, 2.0]
    np.testing.assert_array_equal(reference.attention(query, key, value, {}).output[0, 0, :, 0], [1, 1, 2, 2])


@pytest.mark.parametrize(
    "name",
    [
        "plain/odd/float32",
        "causal+offset_rows+segments+lengths+mask_shared+sinks+value_dim/small/float32",
        "window+mask_heads+bias_keys+sinks_many+soft_cap+mqa/small/float32",
        "bias_2d+sinks_shared+scale+gqa/small/float32",
        "mask_not+bias_head_keys+soft_cap/small/float32",
        "bias_blocks+sinks/small/float32",
    ],
)
def test_gradients_are_differences(name):
    """Move the inputs a little in a random direction: the loss must change as the gradients say."""
    problem = cases.parse(name).problem()
    law = {key: value.astype(np.float64) if _is_float(value) else value for key, value in problem.law.items()}
    arrays = {key: getattr(problem, key).astype(np.float64) for key in ("query", "key", "value")}
    arrays |= {key: law[key] for key in ("bias", "softmax_aux") if key in law}
    cotangents = problem.d_output.astype(np.float64), problem.d_logsumexp, problem.d_weights

    def loss(moved):
        options = {**law, **{key: moved[key] for key in ("bias", "softmax_aux") if key in moved}}
        result = reference.attention(moved["query"], moved["key"], moved["value"], options)
        logsumexp = np.where(np.isfinite(result.logsumexp), result.logsumexp, 0)
        return sum((x * ct).sum() for x, ct in zip((result.output, logsumexp, result.weights), cotangents, strict=True))

    found = reference.attention(arrays["query"], arrays["key"], arrays["value"], law).gradients(*cotangents)
    gradients = {**dataclasses.asdict(found), "softmax_aux": found.sinks}
    rng = np.random.default_rng(1)
    for key, array in arrays.items():
        direction = np.where(np.isfinite(array), rng.normal(size=array.shape), 0)
        step = 1e-6
        ahead, behind = ({**arrays, key: array + sign * step * direction} for sign in (1, -1))
        difference = (loss(ahead) - loss(behind)) / (2 * step)
        assert gradients[key].shape == array.shape
        np.testing.assert_allclose((gradients[key] * direction).sum(), difference, rtol=2e-6, atol=1e-7, err_msg=key)


def _is_float(value):
    return isinstance(value, np.ndarray) and value.dtype.kind in "fV"


def test_kept_weights_multiply():
    problem = cases.parse("plain/small/float32").problem()
    keep = np.random.default_rng(0).random((2, 6, 19, 19)) < 0.7
    result = reference.attention(problem.query, problem.key, problem.value, {}, keep / 0.7)
    want = np.einsum("bhts,bshd->bthd", result.weights * keep / 0.7, problem.value.astype(np.float64))
    np.testing.assert_allclose(result.output, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_plain_computation_errs_as_its_dtype_does(dtype):
    problem = cases.parse(f"causal+gqa+sinks/small/{dtype}").problem()
    arrays = problem.query, problem.key, problem.value, problem.law
    error = np.abs(reference.plain(*arrays).output - reference.attention(*arrays).output).max()
    epsilon = float(ml_dtypes.finfo(problem.query.dtype).eps)
    assert epsilon / 16 < error < 16 * epsilon
