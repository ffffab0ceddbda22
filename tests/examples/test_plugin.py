"""The package examples/plugin, installed by pip as a user would, beside a plug-in that is broken."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples" / "plugin"

PROGRAM = """
import importlib.metadata, json, sys, warnings
import attention_ops as ao
lazy = "attention_ops_example" not in sys.modules
import jax.numpy as jnp
x = jnp.ones((1, 16, 4, 32))
with ao.record_plans() as plans:
    out = ao.attention(x, x, x, impl="example_einsum", causal=True).attention_outputs
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ao.attention(x, x, x, impl="example_einsum", causal=True, logits_soft_cap=30.0)
try:
    ao.OperationRegistry.get("exmaple_einsum")
except ao.UnknownOperationError as error:
    unknown = str(error)
json.dump({
    "lazy": lazy,
    "names": ao.OperationRegistry.names(),
    "unavailable": ao.OperationRegistry.unavailable(),
    "routes": [plan.route for plan in plans],
    "warnings": [str(warning.message) for warning in caught],
    "output": [float(out.min()), float(out.max())],
    "unknown": unknown,
}, sys.stdout)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the plug-in and its broken copy are installed: a folder on PYTHONPATH, nothing else changed."""
    if importlib.util.find_spec("hatchling") is None or importlib.util.find_spec("pip") is None:
        pytest.fail("not installed: hatchling and pip build the plug-in without the network. pip install pip hatchling")
    folder = tmp_path_factory.mktemp("plugins")
    installed = folder / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    command += ["--no-deps", "--no-build-isolation", "--target", str(installed)]
    sources = shutil.copytree(PLUGIN, folder / "plugin"), _broken(folder / "broken")
    done = subprocess.run([*command, *map(str, sources)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    paths = os.pathsep.join([str(installed), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}


def _broken(folder: Path) -> Path:
    """The plug-in under another name, as it is when a library it needs will not load."""
    shutil.copytree(PLUGIN, folder)
    pyproject = folder / "pyproject.toml"
    text = (
        pyproject.read_text().replace("attention-ops-example", "broken-plugin").replace("attention_ops_example", "broken_plugin")
    )
    pyproject.write_text(text)
    package = (folder / "src" / "attention_ops_example").rename(folder / "src" / "broken_plugin")
    (package / "example_einsum.py").write_text('raise OSError("libkernel.so: cannot open shared object file")\n')
    return folder


@pytest.fixture(scope="module")
def found(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a program sees that imports nothing but attention_ops."""
    command, elsewhere = [sys.executable, "-c", PROGRAM], tmp_path_factory.mktemp("elsewhere")
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_plugin_is_a_name_like_any_other(found: dict[str, Any]) -> None:
    assert found["lazy"]  # importing attention_ops imports no plug-in
    assert {"example_einsum", "vanilla", "flash", "blocksparse"} <= set(found["names"])
    assert found["routes"][0] == "example_einsum/native"
    assert found["output"] == pytest.approx([1.0, 1.0])


def test_what_it_does_not_declare_runs_elsewhere(found: dict[str, Any]) -> None:
    assert found["routes"][1] == "flash/native"
    (warning,) = found["warnings"]
    assert "example_einsum/native: does not support logits_soft_cap" in warning


def test_a_broken_plugin_is_listed_and_breaks_nobody(found: dict[str, Any]) -> None:
    assert found["unavailable"] == {"broken_plugin": "OSError: libkernel.so: cannot open shared object file"}
    assert "no operation is named 'exmaple_einsum'; known are example_einsum" in found["unknown"]
    assert "plug-in 'broken_plugin' is unavailable: OSError: libkernel.so" in found["unknown"]


def test_the_plugin_is_proven(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "attention_ops.selftest", "--op", "example_einsum"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed of 1 routes" in done.stdout.splitlines()[-1]
