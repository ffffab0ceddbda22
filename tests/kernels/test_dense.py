"""vanilla's dense computation where its numbers are extreme: sinks far from the logits, rows longer than one sum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_ops as ao
from attention_ops.selftest import reference


@pytest.mark.parametrize("sinks", [(500.0, -500.0), (-np.inf, 0.0), (-np.inf, -np.inf), (100.0, 80.0)], ids=str)
def test_sinks_far_above_and_below_the_logits_and_absent_ones_with_an_empty_row(sinks):
    rng = np.random.default_rng(0)
    query, key, value, d_output = rng.standard_normal((4, 1, 5, 2, 4)).astype(np.float32)
    sinks, mask = np.float32(sinks), np.ones((5, 5), bool)
    mask[1] = False

    def call(*inputs):
        return ao.attention(*inputs[:3], softmax_aux=inputs[3], impl="vanilla", mask=mask).attention_outputs

    output, pull = jax.vjp(jax.jit(call), query, key, value, sinks)
    law = reference.attention(query, key, value, {"softmax_aux": sinks, "mask": mask})
    np.testing.assert_allclose(output, law.output, atol=1e-6)
    gradients = law.gradients(d_output)
    for name, found in zip(("query", "key", "value", "sinks"), pull(jnp.asarray(d_output)), strict=True):
        np.testing.assert_allclose(found, getattr(gradients, name), atol=2e-6, err_msg=name)


@pytest.mark.parametrize("S", [(1 << 12) - 1, (1 << 12) + 5])
def test_a_long_row_is_the_same_in_parts(S):
    rng = np.random.default_rng(0)
    query = rng.standard_normal((1, 2, 2, 4)).astype(np.float32)
    key, value = rng.standard_normal((2, 1, S, 1, 4)).astype(np.float32)
    lengths = np.array([S - 3])
    key[:, -3:] = value[:, -3:] = np.nan

    def call(value):
        return ao.attention(query, key, value, impl="vanilla", kv_lengths=lengths).attention_outputs

    output, pull = jax.vjp(jax.jit(call), value)
    law = reference.attention(query, key, value, {"kv_lengths": lengths})
    np.testing.assert_allclose(output, law.output, atol=4e-8)  # numbers of 0.02
    np.testing.assert_allclose(pull(jnp.ones_like(output))[0], law.gradients(np.ones_like(output)).value, atol=2e-8)
