"""The cuDNN route, lowered for CUDA on a machine without it: what is handed to the kernel is what was asked for."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from attention_ops import masks
from attention_ops.kernels.jax_nn import _visibility_of_intervals, cudnn_attention, native_options

LENGTHS = masks.Lengths(jnp.array([8, 3]), jnp.array([5, 8]))


@pytest.fixture
def cuda_probes(monkeypatch):
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91001)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: capability <= "8.0")
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda capability: False)


def _lowered(mask, bias=None, gradient=False):
    q = jax.ShapeDtypeStruct((2, 8, 4, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 8, 2, 64), jnp.bfloat16)

    def run(q, k, v, bias):
        return cudnn_attention(q, k, v, mask=mask, bias=bias, scale=0.3).astype(jnp.float32).sum()

    function = jax.jit(jax.grad(run, argnums=(0, 1, 2)) if gradient else run)
    text = jax.export.export(
        function, platforms=["cuda"], disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(n) for n in CALLS]
    )(q, k, k, bias).mlir_module()
    calls = re.findall(r"@(__cudnn\$\w+)\(", text)
    configs = [json.loads(c.replace("\\22", '"')) for c in re.findall(r'backend_config = "(\{.*?\})"', text)]
    return calls, [config["cudnn_fmha_backend_config"] for config in configs]


CALLS = [f"__cudnn$fmha{bias}Softmax{back}" for bias in ("", "ScaleBias") for back in ("", "Backward")]


@pytest.mark.parametrize(
    ("mask", "kind", "window"),
    [
        (None, "NO_MASK", 0),
        (masks.Causal(0), "CAUSAL", 0),
        (masks.Causal(0) & masks.Window(3, 0, 0), "CAUSAL", 4),
        (masks.Window(3, 0, 0), "CAUSAL", 4),
        (masks.Causal(0) & masks.Window(3, 2, 0), "CAUSAL", 4),
        (LENGTHS, "PADDING", 0),
        (LENGTHS & masks.Causal(0), "PADDING_CAUSAL", 0),
    ],
)
def test_native_masks_are_lowered_natively(cuda_probes, mask, kind, window):
    calls, configs = _lowered(mask)
    assert calls == ["__cudnn$fmhaSoftmax"]
    assert configs[0]["mask_type"] == kind
    assert configs[0]["sliding_window_length"] == window
    assert configs[0]["fmha_scale"] == 0.3


@pytest.mark.parametrize("mask", [masks.Dense(jnp.ones((2, 1, 1, 8), bool)), masks.Segments(jnp.zeros((2, 8), int))])
def test_other_masks_become_a_bias(cuda_probes, mask):
    calls, configs = _lowered(mask)
    assert calls == ["__cudnn$fmhaScaleBiasSoftmax"]
    assert configs[0]["mask_type"] == "NO_MASK"


def test_gradient_and_bias(cuda_probes):
    assert _lowered(masks.Causal(0), gradient=True)[0] == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    bias = jnp.zeros((1, 4, 8, 8), jnp.bfloat16)
    calls, _ = _lowered(masks.Causal(0), bias, gradient=True)
    assert calls == ["__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"]


def test_options_of_jax_nn():
    options = native_options(masks.Window(5, None, 0) & masks.Window(9, 2, 0), 2, 8, 8)
    assert options == {"local_window_size": (5, 2)}
    with pytest.raises(TypeError, match="chunked.* has no native form"):
        native_options(masks.Chunked(2, 0), 2, 8, 8)


@pytest.mark.parametrize("parts", [(masks.Causal(0),), (masks.Window(2, 0, 0), LENGTHS), (masks.Causal(0), LENGTHS), (LENGTHS,)])
@pytest.mark.parametrize(("T", "S"), [(8, 8), (5, 11), (11, 5)])
def test_rows_and_keys_that_see_nothing(parts, T, S):
    dense = np.broadcast_to(masks.And(parts).dense(T, S), (2, 1, T, S))[:, 0]
    sees, seen = _visibility_of_intervals(parts, T, S)
    np.testing.assert_array_equal(np.broadcast_to(sees[..., 0, 0], (2, T)), dense.any(2))
    np.testing.assert_array_equal(np.broadcast_to(seen[..., 0, 0], (2, S)), dense.any(1))
