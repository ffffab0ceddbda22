"""The TPU routes on a TPU: `JAX_PLATFORMS=tpu pytest -m tpu tests/tpu`. The same cases as in the interpreter."""

from __future__ import annotations

import jax
import pytest
from tpu_cases import CASES, FLASH_CASES, errors

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.skipif(jax.default_backend() != "tpu", reason=f"JAX's default device is {jax.default_backend()}, not a TPU"),
]


@pytest.mark.parametrize("name", CASES)
def test_blocksparse(name):
    shares = errors(CASES[name], "blocksparse/tpu")
    assert max(shares.values()) <= 1, shares


@pytest.mark.parametrize("name", FLASH_CASES)
def test_flash(name):
    shares = errors(FLASH_CASES[name], "flash/tpu")
    assert max(shares.values()) <= 1, shares
