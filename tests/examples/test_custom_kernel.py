"""The ALiBi kernel of examples/custom_kernel.py: what it computes, what it refuses, what it costs, and its proof."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_ops as ao
from attention_ops.selftest import reference, runner
from attention_ops.selftest.results import Settings

ROOT = Path(__file__).parents[2]
SILENT = ao.OperationMetadata(fallback="silent")


@pytest.fixture
def custom(registry: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example, imported anew; the registry forgets its operation after the test."""
    spec = importlib.util.spec_from_file_location("custom_kernel", ROOT / "examples" / "custom_kernel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "custom_kernel", module)
    spec.loader.exec_module(module)
    return module


def test_slopes_are_the_published_ones(custom: ModuleType) -> None:
    """Those that the paper's get_slopes gives: https://github.com/ofirpress/attention_with_linear_biases."""
    eight = [2.0**-i for i in range(1, 9)]
    np.testing.assert_allclose(custom.slopes(8), eight, rtol=1e-6)
    np.testing.assert_allclose(custom.slopes(12), [*eight, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5], rtol=1e-6)
    np.testing.assert_allclose(custom.slopes(16), [2 ** (-i / 2) for i in range(1, 17)], rtol=1e-6)
    np.testing.assert_allclose(custom.slopes(3), [2**-4, 2**-8, 2**-2], rtol=1e-6)
    np.testing.assert_allclose(custom.slopes(1), [2**-8], rtol=1e-6)


def _literal_alibi(custom: ModuleType, query: Any, key: Any, value: Any, offset: Any = 0) -> np.ndarray:
    """In float64, with -slope * (i - j) written out for every query and key."""
    position = np.arange(query.shape[1]) + np.reshape(offset, (-1, 1))
    distance = position[:, :, None] - np.arange(key.shape[1])
    bias = -np.asarray(custom.slopes(query.shape[2]), np.float64)[None, :, None, None] * distance[:, None]
    law = {"bias": bias, "causal": True, "query_offset": offset}
    return reference.attention(*map(np.asarray, (query, key, value)), law).output


@pytest.mark.parametrize("name", ["key_bias", *ao.OperationRegistry.names()])
@pytest.mark.parametrize("heads", [4, 6])
def test_every_operation_gives_alibi(custom: ModuleType, qkv: Any, name: str, heads: int) -> None:
    query, key, value = qkv(T=150, H=heads, K=2)
    with ao.record_plans() as plans:
        output = custom.alibi_attention(query, key, value, impl=name, metadata=SILENT).attention_outputs
    np.testing.assert_allclose(output, _literal_alibi(custom, query, key, value), rtol=0, atol=5e-6)
    assert plans[0].operation == name or name not in ("key_bias", "vanilla", "flash", "blocksparse")


@pytest.mark.parametrize("offset", [5, [3, 9], 12])
def test_offsets_are_refused_by_the_kernel_and_right_by_its_fallback(custom: ModuleType, qkv: Any, offset: Any) -> None:
    """The bias has nothing of the query in it, so it is right at any offset."""
    query, key, value = qkv(T=4, S=16)
    at = jnp.asarray(offset)
    with ao.record_plans() as plans:
        output = custom.alibi_attention(query, key, value, metadata=SILENT, query_offset=at).attention_outputs
    np.testing.assert_allclose(output, _literal_alibi(custom, query, key, value, np.asarray(offset)), rtol=0, atol=5e-6)
    assert plans[0].route == "blocksparse/native"
    assert "does not support a query_offset other than 0" in plans[0].reasons


def test_what_was_not_declared_is_refused_with_every_reason(custom: ModuleType, qkv: Any) -> None:
    query, key, value = qkv(T=12)
    bias = jnp.zeros((1, 4, 12, 12))
    plan = ao.plan("key_bias", query, key, value, bias=bias, logits_soft_cap=30.0, kv_lengths=jnp.array([3, 4]))
    assert plan.route == "blocksparse/native"
    assert [str(reason) for reason in plan.decisions[0].reasons] == [
        "does not support q_lengths or kv_lengths",
        "does not support logits_soft_cap",
        "the bias has 12 query rows > 1, the kernel's limit (pass [batch, heads, 1, keys])",
    ]
    with pytest.warns(ao.FallbackWarning, match="does not support a sliding_window"):
        ao.attention(query, key, value, impl="key_bias", sliding_window=3)
    with pytest.raises(ao.NoRouteError, match="does not support dropout"):
        ao.plan("key_bias/native", query, key, value, dropout_prob=0.1, dropout_rng=jax.random.key(0), deterministic=False)


@pytest.mark.parametrize("causal", [False, True])
def test_an_infinite_bias_blocks_its_key_whatever_it_holds(custom: ModuleType, qkv: Any, causal: bool) -> None:
    """Keys 0 and 7 are blocked for all heads and hold NaN: with causal, the first query then has no key."""
    query, key, value = qkv(T=21, Dv=24)
    bias = np.random.default_rng(1).normal(size=(2, 4, 1, 21)).astype(np.float32)
    bias[:, :, :, [0, 7]] = bias[0, 1, :, 4] = -np.inf
    query = query.at[:, 0].set(jnp.nan) if causal else query
    key, value = (x.at[:, [0, 7]].set(jnp.nan) for x in (key, value))
    d_output = np.random.default_rng(2).normal(size=(2, 21, 4, 24)).astype(np.float32)

    def run(query: Any, key: Any, value: Any, bias: Any) -> Any:
        return ao.attention(query, key, value, bias=bias, causal=causal, impl="key_bias/native").attention_outputs

    output, pull_back = jax.vjp(run, query, key, value, jnp.asarray(bias))
    law = reference.attention(*map(np.asarray, (query, key, value)), {"bias": bias, "causal": causal})
    wanted = law.gradients(d_output, None, None)
    np.testing.assert_allclose(output, law.output, rtol=0, atol=1e-5)
    for got, want in zip(pull_back(d_output), (wanted.query, wanted.key, wanted.value, wanted.bias), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("gradient", [False, True])
def test_memory_follows_the_rows_at_a_time(custom: ModuleType, gradient: bool) -> None:
    """At 2048 queries the compiled program, forward or backward, has less than a quarter of vanilla's temporary memory."""
    array = jax.ShapeDtypeStruct((1, 2048, 4, 32), "float32")

    def temporary_bytes(name: str) -> int:
        def run(query: Any, key: Any, value: Any) -> Any:
            return custom.alibi_attention(query, key, value, impl=name).attention_outputs.sum()

        program = jax.grad(run, argnums=(0, 1, 2)) if gradient else run
        return jax.jit(program).lower(array, array, array).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes("key_bias") < 0.25 * temporary_bytes("vanilla")


def test_slopes_inside_an_operation_would_fail_the_selftest(custom: ModuleType) -> None:
    """Why the example hands the bias over: an operation that adds it unasked computes something else."""

    @ao.OperationRegistry.register
    class Alibi(ao.OperationImpl):
        name = "alibi_inside"

        @ao.forward(supports={ao.Feature.CAUSAL, ao.Feature.GRADIENT})
        def forward_native(self, request: ao.AttentionRequest) -> Any:
            return custom.alibi_attention(request.query, request.key, request.value, impl="vanilla").attention_outputs

    report = runner.run(["alibi_inside"], Settings(cases=("causal/small/float32",)))
    assert not report.ok
    assert {failure.quantity for failure in report.failures} == {"output", "d_query", "d_key", "d_value"}


def test_the_script_ends_with_its_proof() -> None:
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "examples/custom_kernel.py"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.index("key_bias on cpu runs key_bias/native") < done.stdout.index(
        "key_bias on cpu runs blocksparse/native"
    )
    assert "no: does not support logits_soft_cap" in done.stdout
    assert "but the fallback policy is 'error':\n  key_bias/native: does not support a sliding_window" in done.stdout
    assert "1 passed of 1 routes" in done.stdout.splitlines()[-1]
