"""What float32 products are lowered to on accelerators: full precision, never passes over bfloat16 (TPU) or TF32 (CUDA)."""

from __future__ import annotations

import contextlib
import re

import jax
import jax.numpy as jnp
import pytest

import attention_ops as ao
from attention_ops.device import compiling_for

_PRODUCT = re.compile(r"stablehlo\.dot_general .*")


def _products(impl: str, device: str, dtype: str, gradient: bool, options: dict) -> list[str]:
    q, k = (jax.ShapeDtypeStruct((2, 256, heads, 64), dtype) for heads in (4, 2))

    def run(q, k, v):
        return ao.attention(q, k, v, impl=impl, **options).attention_outputs.astype(jnp.float32).sum()

    function = jax.jit(jax.grad(run, argnums=(0, 1, 2)) if gradient else run)
    with compiling_for(device) as profile:
        text = function.trace(q, k, k).lower(lowering_platforms=(profile.platform,)).as_text()
    assert "custom_call @tpu_custom_call" not in text
    return _PRODUCT.findall(text)


@pytest.mark.parametrize("default", [None, "bfloat16", "tensorfloat32"])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("device", ["tpu-v5e", "a100", "mi300x"])
@pytest.mark.parametrize("impl", ["vanilla/native", "sdpa/native", "flash/native", "blocksparse/native"])
def test_float32_products_are_at_full_precision(impl, device, gradient, default):
    with jax.default_matmul_precision(default) if default else contextlib.nullcontext():
        found = _products(impl, device, "float32", gradient, {"causal": True})
    assert len(found) >= (5 if gradient else 2)
    assert [line for line in found if "precision = [HIGHEST, HIGHEST]" not in line] == []


@pytest.mark.parametrize("device", ["tpu-v5e", "a100"])
def test_vanilla_computes_in_the_softmax_dtype_at_full_precision(device):
    """Products of bfloat16 inputs included: the weights are not rounded to bfloat16 between the two."""
    found = _products("vanilla/native", device, "bfloat16", True, {"causal": True})
    assert found
    assert [line for line in found if "xbf16>" in line or "precision = [HIGHEST, HIGHEST]" not in line] == []
