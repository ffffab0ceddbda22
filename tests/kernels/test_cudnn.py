"""The cuDNN kernel, lowered for CUDA on a machine without it: what is handed to it is what was asked for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_ops import masks
from attention_ops.device import DeviceProfile
from attention_ops.kernels import cudnn
from attention_ops.kernels.cudnn import NativeMask, cudnn_attention, split
from attention_ops.selftest.lowering import custom_calls, lowered, matrix_products

LENGTHS = masks.Lengths(jnp.array([8, 3]), jnp.array([5, 8]))
DENSE = masks.Dense(jnp.ones((2, 1, 1, 8), bool))
CAUSAL = masks.Causal(0)


def _calls(mask, bias=None, gradient=False, Dv=64, profile="h100"):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 8, 4, 64), (2, 8, 2, 64), (2, 8, 2, Dv))]

    def run(q, k, v, bias):
        return cudnn_attention(q, k, v, mask=mask, bias=bias, scale=0.3).astype(jnp.float32).sum()

    trained = (0, 1, 2) if bias is None else (0, 1, 2, 3)
    function = jax.jit(jax.grad(run, argnums=trained) if gradient else run)
    text = lowered(function, (*shapes, bias), DeviceProfile.named(profile))
    assert not matrix_products(text)
    calls = custom_calls(text)
    return [call.target for call in calls], [call.settings()["cudnn_fmha_backend_config"] for call in calls]


@pytest.mark.parametrize(
    ("mask", "kind", "window"),
    [
        (None, "NO_MASK", 0),
        (CAUSAL, "CAUSAL", 0),
        (CAUSAL & masks.Window(3, 0, 0), "CAUSAL", 4),
        (masks.Window(3, 0, 0), "CAUSAL", 4),
        (CAUSAL & masks.Window(3, 2, 0), "CAUSAL", 4),
        (CAUSAL & masks.Window(None, 2, 0), "CAUSAL", 0),
        (masks.Window(None, 0, 0), "CAUSAL", 0),
        (masks.Window(5, 1, 0) & masks.Window(2, 0, 0), "CAUSAL", 3),
        (LENGTHS, "PADDING", 0),
        (LENGTHS & CAUSAL, "PADDING_CAUSAL", 0),
        (LENGTHS & CAUSAL & masks.Window(3, 2, 0), "PADDING_CAUSAL", 4),
    ],
    ids=str,
)
def test_what_cudnn_knows_is_its_own(mask, kind, window):
    calls, (config,) = _calls(mask)
    assert calls == ["__cudnn$fmhaSoftmax"]
    assert (config["mask_type"], config["sliding_window_length"], config["fmha_scale"]) == (kind, window, 0.3)


@pytest.mark.parametrize("mask", [DENSE, masks.Segments(jnp.zeros((2, 8), int)), masks.Chunked(4, 0), DENSE | CAUSAL], ids=str)
@pytest.mark.parametrize(
    ("beside", "kind"), [(None, "NO_MASK"), (CAUSAL, "CAUSAL"), (LENGTHS & CAUSAL, "PADDING_CAUSAL")], ids=str
)
def test_the_rest_is_a_bias_beside_it(mask, beside, kind):
    calls, (config,) = _calls(mask if beside is None else mask & beside)
    assert calls == ["__cudnn$fmhaScaleBiasSoftmax"]
    assert config["mask_type"] == kind


def test_gradient_bias_and_value_dim():
    assert _calls(CAUSAL, gradient=True)[0] == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    bias = jnp.zeros((1, 4, 8, 8), jnp.bfloat16)
    calls, configs = _calls(CAUSAL, bias, gradient=True)
    assert calls == ["__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"]
    assert [config["mask_type"] for config in configs] == ["CAUSAL", "CAUSAL"]
    assert _calls(CAUSAL, gradient=True, Dv=32)[0] == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]


def test_a_window_past_the_query_has_no_form():
    with pytest.raises(ValueError, match=r"window\(3, 2\) does not end at the query"):
        split(masks.Window(3, 2, 0))
    assert split(masks.Causal(2))[1] == masks.Causal(2)  # from another position: not cuDNN's


def test_lengths_of_several_masks_are_the_shorter_ones():
    native, rest = split(masks.Lengths(None, jnp.array([5, 8])) & LENGTHS)
    assert rest is None
    np.testing.assert_array_equal(native.kv_lengths, [5, 8])
    q, kv = cudnn._lengths(NativeMask(q_lengths=jnp.array([0, 99])), 2, 8, 6)
    np.testing.assert_array_equal(q, [1, 8])
    np.testing.assert_array_equal(kv, [6, 6])


@pytest.mark.parametrize("mask", [CAUSAL, masks.Window(2, 0, 0) & LENGTHS, CAUSAL & LENGTHS, LENGTHS], ids=str)
@pytest.mark.parametrize(("T", "S"), [(8, 8), (5, 11), (11, 5)])
def test_rows_and_keys_that_see_nothing(mask, T, S):
    dense = np.broadcast_to(mask.dense(T, S), (2, 1, T, S))[:, 0]
    sees, seen = cudnn._visibility_of_intervals(split(mask)[0], T, S)
    np.testing.assert_array_equal(np.broadcast_to(sees[..., 0, 0], (2, T)), dense.any(2))
    np.testing.assert_array_equal(np.broadcast_to(seen[..., 0, 0], (2, S)), dense.any(1))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_hidden_keys_stay_below_the_lowest_bias(dtype):
    """A bias at the lowest number of its dtype, on all that a row may attend, and a mask on the rest."""
    lowest = jnp.finfo(dtype).min
    allowed = jnp.array([[[[True, True, False]]]])
    bias = jnp.full((1, 1, 2, 3), lowest, dtype).at[:, :, 1, 0].set(1.5)
    found, added = cudnn._as_bias(masks.Dense(allowed), bias, 2, 3, dtype)
    weights = jax.nn.softmax(jnp.asarray(added, jnp.float32), axis=-1)
    np.testing.assert_allclose(weights[0, 0], [[0.5, 0.5, 0], [1, 0, 0]], atol=1e-6)
    assert found.shape == (1, 1, 2, 3)
    gradient = jax.grad(lambda bias: cudnn._as_bias(masks.Dense(allowed), bias, 2, 3, dtype)[1].astype(jnp.float32).sum())(bias)
    np.testing.assert_array_equal(gradient[0, 0], [[1, 1, 0], [1, 1, 0]])


def test_minus_infinity_hides():
    bias = jnp.zeros((1, 1, 1, 4), jnp.float16).at[..., 2].set(-jnp.inf)
    found, added = cudnn._as_bias(None, bias, 2, 4, jnp.float16)
    np.testing.assert_array_equal(found[0, 0], [[True, True, False, True]] * 2)
    np.testing.assert_array_equal(added[0, 0], [[0, 0, -32768, 0]] * 2)
