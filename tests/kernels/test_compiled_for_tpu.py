"""The TPU routes compiled for a TPU by its own compiler, which needs no TPU: `pip install libtpu`. Skipped without it.

Lowering checks what is handed to the compiler; this checks that it takes it: alignment, operations, vector and scalar memory.
"""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from tpu_cases import CASES, FLASH_CASES, Case

import attention_ops as ao
from attention_ops.device import compiling_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the compiler for TPUs, is not installed"),
]


@pytest.fixture(scope="module")
def one_tpu():
    from jax.experimental import topologies

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        patch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-4")
        patch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        yield jax.sharding.SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0])


def _compile(case: Case, impl: str, sharding) -> None:
    drawn = case.draw()
    static = {name: value for name, value in drawn.options.items() if isinstance(value, bool | int | float | tuple)}
    traced = {name: value for name, value in drawn.options.items() if name not in static}
    differentiated = {name: traced.pop(name) for name in ("softmax_aux", "bias") if name in traced}

    def loss(inputs, traced):
        query, key, value = inputs["arrays"]
        options = {**inputs["options"], **traced, **static}
        out = ao.attention(query, key, value, impl=impl, return_logsumexp=True, **options)
        return out.attention_outputs.astype(jnp.float32).sum() + out.logsumexp.sum()

    arguments = jax.tree_util.tree_map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        ({"arrays": drawn.arrays, "options": differentiated}, traced),
    )
    with compiling_for("tpu-v5e"):
        compiled = jax.jit(jax.grad(loss)).lower(*arguments).compile()
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3


@pytest.mark.parametrize("name", CASES)
def test_blocksparse(one_tpu, name):
    _compile(CASES[name], "blocksparse/tpu", one_tpu)


@pytest.mark.parametrize("name", FLASH_CASES)
def test_flash(one_tpu, name):
    _compile(FLASH_CASES[name], "flash/tpu", one_tpu)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("impl", ["blocksparse/tpu", "flash/tpu"])
@pytest.mark.parametrize("D", [64, 128, 256, 512])
def test_tiles_fit_vector_memory(one_tpu, impl, D, dtype):
    _compile(Case(f"{D}", 2048, 2048, lambda rng: {"causal": True}, D=D, Dv=D, K=4, dtype=dtype), impl, one_tpu)
