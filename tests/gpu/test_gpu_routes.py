"""The GPU routes on a GPU: `make test-device`. The same cases as in the interpreter, and the sizes that models have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_cases import CASES, failures

import attention_ops as ao

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason=f"JAX's default device is {jax.default_backend()}, not a GPU"),
]


@pytest.mark.parametrize("route", ["blocksparse/gpu", "flash/gpu"])
@pytest.mark.parametrize("name", CASES)
def test_case(route, name):
    assert failures(name, route, {}) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("D", "H", "K"), [(64, 32, 8), (128, 32, 8), (256, 8, 1)])
def test_sizes_of_models_at_the_chosen_tiles(D, H, K, dtype):
    """Against the native kernel, whose own cases hold it to the law: the reference has no room for 2000 keys."""
    rng = np.random.default_rng(D)
    q, k, v, d_output = (jnp.asarray(rng.normal(size=(1, 2000, h, D)), dtype) for h in (H, K, K, H))

    def run(route, dtype):
        def forward(q, k, v):
            return ao.attention(q, k, v, impl=route, causal=True, sliding_window=(900, 0)).attention_outputs

        output, pull_back = jax.vjp(jax.jit(forward), *(x.astype(dtype) for x in (q, k, v)))
        return [np.asarray(x, np.float64) for x in (output, *pull_back(d_output.astype(dtype)))]

    found, exact = run("blocksparse/gpu", dtype), run("blocksparse/native", "float32")
    for got, want in zip(found, exact, strict=True):
        assert np.abs(got - want).max() <= 8 * float(jnp.finfo(dtype).eps) * np.abs(want).max()
