"""Keras reads its backend once, when it is first imported."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def close():
    """Compare arrays, or trees of them, that two float32 programs computed: 2e-6 measured at most, 2e-5 allowed."""

    def check(found, wanted, tolerance=2e-5):
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert one.shape == other.shape
            assert one.dtype == other.dtype
            np.testing.assert_allclose(np.asarray(one, np.float64), np.asarray(other, np.float64), atol=tolerance, rtol=tolerance)

    return check


@pytest.fixture(scope="session")
def outputs_and_gradients():
    """Return for every (function, arrays) its output and gradients, all in one compiled program. The cotangents are random."""

    def run(calls):
        functions = {name: function for name, (function, _) in calls.items()}

        def one(function, arrays):
            def weighed(*arrays):
                output = function(*arrays)
                weights = jnp.asarray(np.random.default_rng(1).standard_normal(output.shape), output.dtype)
                return jnp.sum(output * weights), output

            (_, output), gradients = jax.value_and_grad(weighed, range(len(arrays)), has_aux=True)(*arrays)
            return output, gradients

        program = jax.jit(lambda arrays: [one(f, a) for f, a in zip(functions.values(), arrays, strict=True)])
        return dict(zip(functions, program([arrays for _, arrays in calls.values()]), strict=True))

    return run
