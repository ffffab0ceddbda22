"""The TPU flash kernels of JAX and of ejkernel in the interpreter, held to the float64 law, forward and backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu
from tpu_cases import FLASH_CASES, WINDOW_CASES, errors

import attention_ops as ao
from attention_ops.device import compiling_for
from attention_ops.kernels.interpreter import interpreted

ROUTE = "flash/tpu"


@pytest.fixture
def in_interpreter():
    with compiling_for("tpu-v5e"), interpreted():
        yield


@pytest.fixture
def repeat(monkeypatch):
    """The function that ejkernel's kernel calls and this JAX does not have."""

    def tile(x, repeats, axis):
        return jnp.tile(x, [repeats if a == axis else 1 for a in range(x.ndim)])

    monkeypatch.setattr(pltpu, "repeat", tile, raising=False)


@pytest.mark.parametrize("name", FLASH_CASES)
def test_case(in_interpreter, name):
    shares = errors(FLASH_CASES[name], ROUTE)
    assert max(shares.values()) <= 1, shares


def test_with_64_bit_numbers_enabled(in_interpreter):
    with jax.enable_x64(True):
        shares = errors(FLASH_CASES["causal segments sinks"], ROUTE)
    assert max(shares.values()) <= 1, shares


@pytest.mark.parametrize("name", WINDOW_CASES)
def test_windows_with_the_kernel_of_ejkernel(in_interpreter, repeat, name):
    shares = errors(WINDOW_CASES[name], ROUTE, logsumexp=False)
    assert max(shares.values()) <= 1, shares


def _refusals(H=4, K=4, T=256, S=256, **options):
    q, k = (jax.ShapeDtypeStruct((2, n, heads, 64), jnp.float32) for n, heads in ((T, H), (S, K)))
    facts = ao.OperationMetadata(), ao.DeviceProfile.named("tpu-v5e")
    spec = ao.plan("vanilla", q, k, k, device="tpu-v5e", **options).spec
    return [str(reason) for reason in ao.OperationRegistry.get("flash").routes["tpu"].refusals(spec, *facts)]


def test_a_window_waits_for_what_ejkernel_calls():
    (reason,) = _refusals(sliding_window=5)
    assert reason == (
        f"jax.experimental.pallas.tpu has no repeat in jax {jax.__version__}, which ejkernel's TPU flash kernel calls, "
        "the one for a sliding_window without a bias"
    )


def test_a_window_is_taken_when_what_ejkernel_calls_is_there(repeat):
    assert _refusals(sliding_window=5) == []
    (reason,) = _refusals(sliding_window=5, return_logsumexp=True)
    assert "a sliding_window together with return_logsumexp, without a bias: ejkernel's TPU flash kernel returns no" in reason


def test_a_window_beside_a_bias_needs_no_such_kernel():
    bias = jax.ShapeDtypeStruct((1, 1, 256, 256), jnp.float32)
    assert _refusals(sliding_window=5, bias=bias, return_logsumexp=True) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"K": 2}, "fewer key/value heads than query heads without a bias: the kernel would need keys and values repeated"),
        ({"logits_soft_cap": 5.0}, "does not support logits_soft_cap: JAX's TPU flash kernel has none, blocksparse does"),
        ({"causal": True, "query_offset": 3}, r"causal[offset 3] without a bias: the kernel would need it as an array"),
        ({"mask": jax.ShapeDtypeStruct((256, 256), bool)}, "dense[1, 1, 256, 256] without a bias"),
    ],
)
def test_refusals(options, reason):
    (found,) = _refusals(**options)
    assert reason in found


@pytest.mark.parametrize("name", ["causal segments sinks", "bias everything"])
def test_lowered_for_tpu(name):
    from test_splash import lowered

    for gradient, kernels in ((False, 1), (True, 3)):
        text = lowered(FLASH_CASES[name], ROUTE, gradient)
        assert text.count("custom_call @tpu_custom_call") == kernels
        assert "stablehlo.dot_general" not in text


def test_float32_is_at_full_precision_inside_the_kernels(in_interpreter):
    with jax.default_matmul_precision("bfloat16"):
        shares = errors(FLASH_CASES["causal"], ROUTE)
        assert max(shares.values()) <= 1, shares
        text = str(
            jax.make_jaxpr(lambda q: ao.attention(q, q, q, impl=ROUTE).attention_outputs)(jnp.ones((1, 128, 1, 64), jnp.float32))
        )
    assert text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") >= 2
    assert "Precision.DEFAULT" not in text
