"""The command: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import io
import json
import os
import pathlib
import subprocess
import sys

import pytest
from click.testing import CliRunner

from attention_ops.selftest import report
from attention_ops.selftest.__main__ import main
from attention_ops.selftest.results import Failure, Report, RouteReport

HERE = pathlib.Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
MODULE = """
import attention_ops as ao
from attention_ops import Feature, OperationImpl, forward
from attention_ops.kernels.dense import dense_attention

@ao.OperationRegistry.register
class Loaded(OperationImpl):
    name = "loaded"
    fallback = ("vanilla",)

    @forward(supports={Feature.CAUSAL})
    def forward_native(self, request):
        s = request.spec
        mask = None if request.mask is None else request.mask.dense(s.T, s.S)
        return ao.OperationRegistry.create("vanilla").forward_native(request).attention_outputs * FACTOR
"""


def _run(*words):
    return CliRunner().invoke(main, list(words))


@pytest.fixture
def module(registry, tmp_path, monkeypatch):
    """Write a module that registers an operation; its output is multiplied by a factor."""

    def write(factor):
        path = tmp_path / "my_operation.py"
        path.write_text(MODULE.replace("FACTOR", str(factor)))
        return str(path)

    monkeypatch.setattr(sys, "path", [*sys.path])
    yield write
    sys.modules.pop("my_operation", None)


def test_a_loaded_operation_is_proven(module, tmp_path):
    file = tmp_path / "report.json"
    cases = ("plain/small/float32", "causal/tiles/bfloat16/nan", "refuse/bias", "inactive_dropout")
    named = [word for case in cases for word in ("--case", case)]
    result = _run("--load", module(1.0), "--op", "loaded", *named, "--json", str(file))
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert list(found) == ["version", "device", "ok", "routes"]
    assert found["ok"] is True
    (route,) = found["routes"]
    keys = ["operation", "route", "status", "proof", "cases", "failed", "max_error", "reason", "device", "caveat", "seconds"]
    assert list(route) == keys
    assert (route["operation"], route["route"], route["status"]) == ("loaded", "loaded/native", "passed")
    assert route["cases"] == 4


def test_a_failure_names_case_shapes_bound_and_a_way_to_repeat(module):
    path = module(1.01)
    result = _run("--load", path, "--op", "loaded", "--case", "causal/small/float32")
    assert result.exit_code == 1
    assert "causal/small/float32 [CAUSAL]" in result.output
    assert "output is off by" in result.output
    assert "query [2, 19, 6, 16]" in result.output
    assert f"python -m attention_ops.selftest --load {path} --op loaded --case causal/small/float32" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--op", "vanila"), "no operation is named 'vanila'; known are vanilla"),
        (("--load", "no_such_module_here"), "--load no_such_module_here: ModuleNotFoundError: No module named"),
        (("--load", "no/such/file.py"), "--load no/such/file.py: no such file"),
        (("--case", "casual/small/float32"), "Did you mean 'causal'?"),
        (("--case", "nope"), "no case ingredient is named 'nope' in 'nope'. Allowed: plain, or with + between gqa, mqa, "),
        (
            ("--case", "plain/small/small"),
            "'small' in 'plain/small/small' is no size, dtype, variant or mode that is left. Allowed: ",
        ),
        (("--op", "sdpa", "--case", "sinks/small/float32"), "no route of sdpa takes the case sinks/small/float32"),
        (("--config", "no_such_config.yaml"), "no_such_config.yaml"),
        (("--seed", "many"), "many"),
        (("--nonsense",), "nonsense"),
    ],
)
def test_bad_usage(words, message):
    result = _run(*words)
    assert result.exit_code == 2
    assert message in result.output
    errors = [line for line in result.output.splitlines() if line.startswith("Error")]
    assert len(errors) == 1


def test_a_named_case(tmp_path):
    file = tmp_path / "report.json"
    assert (
        _run("--op", "flash", "--case", "causal+gqa/small/float32", "--case", "refuse/weights", "--json", str(file)).exit_code
        == 0
    )
    assert json.loads(file.read_text())["routes"][0]["cases"] == 2


@pytest.mark.parametrize("name", ["gemma2_2b", "smollm2_135m"])
def test_a_config_is_proven(name, tmp_path):
    file = tmp_path / "report.json"
    result = _run("--config", str(CONFIGS / f"{name}.yaml"), "--json", str(file))
    assert result.exit_code == 0, result.output
    routes = {route["route"]: route for route in json.loads(file.read_text())["routes"]}
    assert routes["blocksparse/native"]["status"] == "passed"
    assert routes["blocksparse/native"]["cases"] == (14 if name == "gemma2_2b" else 7)


def test_as_a_module():
    command = [sys.executable, "-m", "attention_ops.selftest"]
    done = subprocess.run([*command, "--op", "flsh"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "known are flash" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_with_64_bit_types():
    """Index types differ there, and float64 inputs are held to float64."""
    cases = ("mask_shared+bias_keys/tiles/float32", "mask_2d+bias_head_keys+gqa/tiles/float32", "causal+sinks/small/float64")
    words = [word for name in ("flash", "vanilla") for word in ("--op", name)] + [
        word for name in cases for word in ("--case", name)
    ]
    environment = {**os.environ, "JAX_ENABLE_X64": "1"}
    command = [sys.executable, "-m", "attention_ops.selftest", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed of 4 routes, 12 cases" in done.stdout


def test_help_imports_nothing_heavy():
    code = "import sys, attention_ops.selftest.__main__; print([m for m in ('jax', 'rich', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---------------------------------------------------------------- what is printed

FAILURE = Failure("bias/small/float32", "output", "output is off by 1, allowed is 1e-06", ("BIAS",), "query [1]", "python -m x")
REPORT = Report(
    "0.1.0",
    "cpu",
    (
        RouteReport("one", "one/native", "passed", "numeric", 5, 0, 0.5, "", 1.0, (), 0.25),
        RouteReport("two", "two/native", "failed", "numeric", 5, 1, float("inf"), str(FAILURE), 1.0, (FAILURE,)),
        RouteReport("three", "three/cuda", "unavailable", "none", reason="has no route for cpu"),
    ),
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines():
    stream = io.StringIO()
    report.show(REPORT, stream)
    lines = stream.getvalue().splitlines()
    assert lines[0].split() == ["operation", "route", "status", "proof", "cases", "error/tolerance", "time/vanilla"]
    assert lines[1].split() == ["one", "one/native", "passed", "numeric", "5", "0.50", "0.25x"]
    assert lines[3].endswith("has no route for cpu")
    assert "two/native: 1 of 5 cases failed" in lines
    assert lines[-1] == "attention_ops 0.1.0 on cpu: 1 passed, 1 failed, 1 unavailable of 3 routes, 10 cases"
    assert "\x1b" not in stream.getvalue()


def test_a_table_on_a_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "140")
    stream = Terminal()
    report.show(REPORT, stream)
    text = stream.getvalue()
    assert "\x1b[" in text
    assert "two/native" in text
    assert "three/cuda: has no route for cpu" in text
    with report.progress(Terminal()) as progress:
        progress(1, 5, "one/native")


def test_without_a_stderr_no_bar_is_drawn():
    with report.progress(None) as progress:
        progress(1, 5, "one/native")


def test_no_color_is_plain(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    report.show(REPORT, stream)
    assert "\x1b" not in stream.getvalue()


def test_the_report_as_values():
    found = REPORT.to_dict()
    assert found["ok"] is False
    assert found["routes"][0]["max_error"] == 0.5
    assert found["routes"][1]["max_error"] is None
    json.dumps(found, allow_nan=False)
