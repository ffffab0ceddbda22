"""Numbers at the edge of their dtype, and settings of JAX that change between calls."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_ops as ao
from attention_ops import masks
from attention_ops.selftest import reference

every_operation = pytest.mark.parametrize("op", ["vanilla", "flash", "blocksparse"])
LOWEST = np.finfo(np.float64).min


def _arrays(T: int, dtype: Any = jnp.float32, S: int = 5) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((1, n, 2, 8)), dtype) for n in (T, S, S)]


@every_operation
@pytest.mark.parametrize("T", [5, 1])
@pytest.mark.parametrize("row", ["hidden", "low", "-inf"])
def test_a_float64_bias_that_float32_cannot_hold_hides_as_it_does_in_float64(op, T, row):
    bias = np.where(np.tri(T, 5, 5 - T, dtype=bool), 0.5, LOWEST)
    bias[0] = {"hidden": bias[0], "low": LOWEST / 2, "-inf": -np.inf}[row]
    with jax.enable_x64(True):
        arrays = _arrays(T)
        run = lambda *arrays: ao.attention(*arrays[:3], impl=op, bias=arrays[3], return_logsumexp=True)  # noqa: E731
        found, pull = jax.vjp(run, *arrays, jnp.asarray(bias))
        cotangent = ao.AttentionOutput(jnp.ones_like(found.attention_outputs), None, jnp.zeros_like(found.logsumexp))
        gradients = pull(cotangent)
    law = reference.attention(*arrays, {"bias": bias})
    np.testing.assert_allclose(found.attention_outputs, law.output, atol=1e-5)
    assert np.array_equal(np.isneginf(found.logsumexp), np.isneginf(law.logsumexp))
    wanted = law.gradients(np.ones_like(law.output))
    for name, gradient in zip(("query", "key", "value", "bias"), gradients, strict=True):
        np.testing.assert_allclose(gradient, getattr(wanted, name), atol=1e-5, err_msg=name)
    assert gradients[3].dtype == np.float64


@every_operation
def test_float64_sinks_that_float32_cannot_hold_take_all_or_nothing(op):
    sinks = np.array([1e300, -1e300])
    with jax.enable_x64(True):
        arrays = _arrays(5)
        found = ao.attention(*arrays, impl=op, softmax_aux=jnp.asarray(sinks)).attention_outputs
    np.testing.assert_allclose(found, reference.attention(*arrays, {"softmax_aux": sinks}).output, atol=1e-5)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("x64", [False, True])
def test_a_bias_of_numpy_is_held_to_what_float32_has_before_jax_casts_it(x64):
    bias = np.where(np.tri(5, dtype=bool), 0.5, LOWEST)
    bias[0] = LOWEST
    with jax.enable_x64(x64):
        arrays = _arrays(5)
        found = ao.attention(*arrays, impl="vanilla", bias=bias, softmax_aux=np.array([1.0, -np.inf])).attention_outputs
    law = reference.attention(*arrays, {"bias": bias.clip(np.finfo(np.float32).min), "softmax_aux": np.array([1.0, -np.inf])})
    np.testing.assert_allclose(found, law.output, atol=1e-5)


class Parameter:
    """As those of Flax and Keras: numpy and JAX can both read it."""

    def __init__(self, value: jax.Array):
        self.value, self.is_copied = value, False

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.is_copied = True
        return np.asarray(self.value, dtype)


def test_parameters_of_other_libraries_stay_on_their_devices():
    query, key, value = _arrays(5)
    given = {"query": query, "key": key, "value": value, "bias": query[0, :, 0, :5], "query_offset": jnp.int32(2)}
    expected = ao.attention(**given, causal=True).attention_outputs
    held = {name: Parameter(x) for name, x in given.items()}
    np.testing.assert_array_equal(ao.attention(**held, causal=True).attention_outputs, expected)
    assert not any(one.is_copied for one in held.values())


def test_float64_counts_where_jax_has_it_whatever_was_called_before():
    shapes = [jax.ShapeDtypeStruct((1, 4, 2, 8), np.float64)] * 3
    assert ao.plan("vanilla", *shapes).spec.dtype == np.float32
    with jax.enable_x64(True):
        arrays = _arrays(4, np.float64, 4)
        assert ao.attention(*arrays).attention_outputs.dtype == np.float64
    assert ao.attention(*arrays).attention_outputs.dtype == np.float32


@every_operation
@pytest.mark.parametrize("mask", [masks.Causal, lambda at: masks.Window(3, None, at), lambda at: masks.PrefixLM(2, at)])
def test_an_offset_at_the_end_of_int32_is_one_beyond_every_key(op, mask):
    arrays = _arrays(4, S=4)
    for far in (2**31 - 1, -(2**31)):
        found = [ao.attention(*arrays, impl=op, mask=mask(at)).attention_outputs for at in (far, jnp.int32(far))]
        np.testing.assert_allclose(found[0], found[1], atol=1e-6)


@every_operation
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "options", [{"softmax_scale": 1e-46}, {"softmax_scale": 1e-40}, {"logits_soft_cap": 1e30}, {"logits_soft_cap": 1e-30}]
)
def test_scales_and_caps_at_their_limits(op, dtype, options):
    arrays = _arrays(5, dtype)
    found = jax.value_and_grad(lambda q: ao.attention(q, *arrays[1:], impl=op, causal=True, **options).attention_outputs.sum())(
        arrays[0]
    )
    law = reference.attention(*arrays, {"causal": True, **options})
    np.testing.assert_allclose(found[0], law.output.sum(), rtol=0.02)
    assert np.isfinite(np.asarray(found[1], np.float32)).all()


def test_what_is_written_to_an_array_after_it_became_a_mask_does_not_count():
    arrays = _arrays(4, S=4)
    buffer = np.tri(4, dtype=bool)
    mask = masks.Dense(buffer)
    buffer[:] = True
    expected = ao.attention(*arrays, causal=True).attention_outputs
    for one in (mask, masks.Dense(np.tri(4, dtype=bool))):
        np.testing.assert_allclose(ao.attention(*arrays, mask=one).attention_outputs, expected, atol=1e-6)
    whole, offset = np.ones((1, 1, 4, 4), bool), np.zeros(1, np.int32)
    masks.Dense(whole), masks.Causal(offset)
    whole[:] = False
    causal = masks.Causal(offset)
    offset[:] = 9
    np.testing.assert_allclose(ao.attention(*arrays, mask=causal).attention_outputs, expected, atol=1e-6)


def test_lists_are_taken_for_the_arrays_that_they_are():
    arrays, rows = _arrays(4, S=4), np.tri(4, dtype=bool)
    expected = ao.attention(*arrays, causal=True, kv_lengths=np.array([3])).attention_outputs
    for mask in (
        masks.Dense(rows.tolist()) & masks.Lengths(kv=[3]),
        masks.Causal([0]) & masks.Segments([[0] * 4], [[0, 0, 0, 1]]),
    ):
        np.testing.assert_allclose(ao.attention(*arrays, mask=mask).attention_outputs, expected, atol=1e-6)
    found = jax.jit(lambda n, at: ao.attention(*arrays, causal=True, kv_lengths=[n], query_offset=[at]).attention_outputs)(3, 0)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_window_is_judged_by_its_own_type_and_not_by_an_equal_one_before():
    arrays = _arrays(4, S=4)
    for good, bad in ((1, True), (0, False), (1, 1.0), ((1, 0), (1.0, False))):
        ao.attention(*arrays, sliding_window=good)
        with pytest.raises(TypeError, match="sliding_window left must be an integer or None"):
            ao.attention(*arrays, sliding_window=bad)
