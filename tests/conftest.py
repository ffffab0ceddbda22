"""What all tests share. Shapes in the annotations of the kernels are checked while they run."""

from __future__ import annotations

import compiling  # noqa: F401  decides how JAX compiles, before it is imported
from jaxtyping import install_import_hook

with install_import_hook("attention_ops.kernels", "beartype.beartype"):
    import attention_ops.kernels.blockwise
    import attention_ops.kernels.cudnn
    import attention_ops.kernels.dense
    import attention_ops.kernels.jax_nn
    import attention_ops.kernels.pallas_gpu
    import attention_ops.kernels.splash
    import attention_ops.kernels.splash_masks
    import attention_ops.kernels.tpu_flash

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_ops as ao
from attention_ops import api, storage


@pytest.fixture(autouse=True, scope="session")
def _no_files_of_the_user(tmp_path_factory):
    """Keep what was proven and tuned on this machine out of the tests, and their results out of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(storage.ENVIRONMENT, str(tmp_path_factory.mktemp("storage")))
        yield


@pytest.fixture(autouse=True)
def _fresh_warnings() -> None:
    """Let every test see the warnings that are given once per distinct plan."""
    api._reported.clear()


@pytest.fixture
def registry():
    """The registry, restored after the test to what it held before."""
    from attention_ops import registry

    ao.OperationRegistry.names()
    state = registry._state
    operations, aliases = dict(state.operations), dict(state.aliases)
    yield ao.OperationRegistry
    state.operations, state.aliases = operations, aliases
    state.generation += 1


@pytest.fixture(scope="module")
def optimised():
    """Optimise the programs of a module: they run for longer than that takes."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def qkv():
    """Make query, key and value of given sizes."""

    def make(B=2, T=8, S=None, H=4, K=2, D=16, Dv=None, dtype=jnp.float32, seed=0):
        rng = np.random.default_rng(seed)
        shapes = ((B, T, H, D), (B, S or T, K, D), (B, S or T, K, Dv or D))
        return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)

    return make


def shapes_of(*arrays: jax.Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays)
