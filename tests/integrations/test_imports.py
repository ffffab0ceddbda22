"""An integration imports its framework when a call needs it, and not before."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import attention_ops.integrations.jax_nn, attention_ops.integrations.keras, attention_ops.integrations.flax
import attention_ops.integrations.easydel
frameworks = {"keras", "flax", "equinox", "ejkernel", "eformer", "easydel", "pydantic"}
assert not frameworks & set(sys.modules), frameworks & set(sys.modules)

import importlib.util
importlib.util.find_spec = lambda name, *rest: None
for call in (attention_ops.integrations.keras.use_attention_ops, attention_ops.integrations.keras._keras):
    try:
        call()
    except ModuleNotFoundError as error:
        assert "pip install 'attention-ops[keras]'" in str(error)
    else:
        raise AssertionError
"""


def test_importing_is_free():
    subprocess.run([sys.executable, "-c", CODE], check=True)
