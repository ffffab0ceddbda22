"""A decoder in Flax NNX learns the same by every operation. Nothing here is skipped: without flax and optax the tests fail."""

import importlib
import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

import attention_ops as ao

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
STEPS = 12

# In float32 the curves differ in the order of sums: 1e-6 measured on losses of 3 to 6. Small mistakes in attention move them
# further: a softmax scale off by 0.1% by 7e-5, a gradient of the query that is 0.1% short by 2e-5.
TOLERANCE = 5e-6


@pytest.fixture(scope="module")
def train_tiny() -> ModuleType:
    if str(ROOT / "examples") not in sys.path:
        sys.path.insert(0, str(ROOT / "examples"))
    missing = [package for package in ("flax", "optax", "matplotlib") if importlib.util.find_spec(package) is None]
    if missing:
        pytest.fail(f"not installed: {', '.join(missing)}. pip install {' '.join(missing)}", pytrace=False)
    return importlib.import_module("train_tiny")


@pytest.fixture(scope="module")
def size(train_tiny: ModuleType) -> Any:
    return train_tiny.Size(layers=2, width=32, kv_heads=1, head_dim=16, length=48, batch=4, learning_rate=1e-2)


def _curve(train_tiny: ModuleType, size: Any, name: str) -> np.ndarray:
    attends = train_tiny.attention_of(ao.load_config(CONFIGS / "smollm2_135m.yaml"), size, "float32")
    with ao.use(name), ao.record_plans() as plans:
        losses = train_tiny.train(attends, STEPS, size)
    assert {plan.operation for plan in plans} == {name}  # itself, no fallback
    return np.array(losses)


@pytest.fixture(scope="module")
def vanilla(train_tiny: ModuleType, size: Any) -> np.ndarray:
    return _curve(train_tiny, size, "vanilla")


def test_the_loss_falls(vanilla: np.ndarray) -> None:
    """It starts where nothing is known of 256 bytes, log(256) = 5.5, or a little above."""
    assert vanilla.shape == (STEPS,)
    assert 5.5 < vanilla[0] < 6.5
    assert vanilla[-3:].mean() < 3.6


@pytest.mark.parametrize("name", ["flash", "blocksparse", "sdpa"])
def test_the_curve_is_the_same_for_every_operation(train_tiny: ModuleType, size: Any, vanilla: np.ndarray, name: str) -> None:
    np.testing.assert_allclose(_curve(train_tiny, size, name), vanilla, rtol=0, atol=TOLERANCE)


def test_batches_are_consecutive_bytes_and_repeat_with_the_seed(train_tiny: ModuleType, size: Any) -> None:
    first, second = itertools.islice(train_tiny.batches(size), 2)
    assert first.shape == (size.batch, size.length + 1)
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(next(train_tiny.batches(size)), first)
    text = train_tiny.corpus().tobytes()
    assert all(bytes(row.astype(np.uint8)) in text for row in first)
    assert b"def __init__(self" in text


@pytest.mark.parametrize(
    ("config", "features"),
    [
        ("llama3_2_1b", [{"CAUSAL", "GQA", "GRADIENT"}]),
        ("gemma2_2b", [{"CAUSAL", "GQA", "GRADIENT", "SOFT_CAP", "WINDOW"}, {"CAUSAL", "GQA", "GRADIENT", "SOFT_CAP"}]),
        ("gpt_oss_20b", [{"CAUSAL", "GQA", "GRADIENT", "SINKS", "WINDOW"}, {"CAUSAL", "GQA", "GRADIENT", "SINKS"}]),
        ("deepseek_v3_mla", [{"CAUSAL", "GRADIENT", "VALUE_DIM"}]),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_are_those_of_the_config(
    train_tiny: ModuleType, size: Any, config: str, features: list[set[str]], dtype: str
) -> None:
    attends = train_tiny.attention_of(ao.load_config(CONFIGS / f"{config}.yaml"), size, dtype)
    with ao.use("vanilla"), ao.record_plans() as plans:
        model = train_tiny.Decoder(attends, size.width, dtype, train_tiny.nnx.Rngs(0))
        logits = jax.eval_shape(model, jax.ShapeDtypeStruct((2, size.length), "int32"))
    assert (logits.shape, str(logits.dtype)) == ((2, size.length, 256), "float32")
    found = [{feature.name for feature in plan.spec.features} for plan in plans]
    assert found == (features * 2)[:2]
    assert {str(plan.spec.dtype) for plan in plans} == {dtype}


def test_a_config_that_no_decoder_can_use_is_refused(train_tiny: ModuleType, size: Any) -> None:
    with pytest.raises(ValueError, match="bert_base: layer 0 is no causal self-attention"):
        train_tiny.attention_of(ao.load_config(CONFIGS / "bert_base.yaml"), size, "float32")


def test_the_script_trains_and_plots(
    train_tiny: ModuleType, size: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_tiny, "Size", lambda: size)  # compiles faster than its default
    picture = tmp_path / "loss.png"
    options = ["--impl", "flash", "--dtype", "bfloat16", "--steps", "2", "--plot", str(picture), "--explain"]
    assert train_tiny.main(options) == 0
    out, err = capsys.readouterr()
    assert "smollm2_135m in miniature by flash/native: 2 steps of 192 bytes" in out
    assert "bfloat16; needs causal, gqa, gradient" in out
    assert [line[:8] for line in err.splitlines()] == ["step 1/2", "step 2/2"]  # no bar: this is no terminal
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_terminal_gets_a_bar(
    train_tiny: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes any stream for a terminal
    with train_tiny.progress(2) as report:
        report(1, 4.5)
        report(2, 1.5)
    out, err = capsys.readouterr()
    assert out == ""
    assert "━" in err
    assert "1.500" in err


@pytest.mark.parametrize("package", ["flax", "optax"])
def test_a_missing_package_is_one_line(package: str) -> None:
    hidden = f"import runpy, sys; sys.modules[{package!r}] = None; runpy.run_path('examples/train_tiny.py', run_name='__main__')"
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command, env = [sys.executable, "-c", hidden], os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"not installed: {package}. pip install flax optax"]


def test_a_missing_matplotlib_is_one_line(
    train_tiny: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_tiny.importlib.util, "find_spec", lambda name: None)
    assert train_tiny.main(["--plot", "loss.png"]) == 2
    assert capsys.readouterr().err.splitlines() == ["not installed: matplotlib. pip install matplotlib"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--impl", "blokspars"], "no operation is named 'blokspars'; known are blocksparse"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["--plot", "no/such/folder/loss.png"], "there is no folder no/such/folder"),
    ],
)
def test_a_wrong_option_is_one_line(
    train_tiny: ModuleType, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert train_tiny.main([*options, "--steps", "1"]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1
