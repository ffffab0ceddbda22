"""The command end to end, at sizes at which times mean nothing."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from attention_ops.bench import jax_systems, plot
from attention_ops.bench.cli import main

SMALL = ("--op", "blocksparse", "--length", "32", "--repeats", "2")


@pytest.fixture
def invoke():
    return lambda *arguments: CliRunner().invoke(main, list(arguments))


def test_rows_are_listed(invoke):
    result = invoke("--list")
    assert result.exit_code == 0
    assert "backward/causal_t4096: forward + backward causal, B 1, T 4096, H 8, D 64, float32\n" in result.output


def test_end_to_end_with_a_peer_that_fails(invoke, tmp_path, monkeypatch):
    def fails(problem):
        raise RuntimeError("no such kernel\nand a long story")

    monkeypatch.setattr(jax_systems, "jax_nn", fails)
    file = tmp_path / "out.json"
    rows = ("forward/causal_t2048_d64_f32", "dispatch/causal_t16")
    result = invoke(*SMALL, *(word for row in rows for word in ("--row", row)), "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "\x1b[" not in result.output
    assert "load average" in result.output
    line = next(line for line in result.output.splitlines() if "jax.nn" in line)
    assert line.split()[:3] == ["jax.nn", "(XLA)", "none"]
    assert line.endswith("RuntimeError: no such kernel")

    written = json.loads(file.read_text())
    assert written["environment"]["versions"]["jax"]
    assert [row["name"] for row in written["rows"]] == list(rows)
    forward, dispatch = written["rows"]
    measured = {m["system"]: m for m in forward["measurements"]}
    assert set(measured) == {"blocksparse", "jax_nn", "ej_flash", "ej_attention", "ej_blocksparse", "torch", "matmul"}
    assert measured["blocksparse"]["note"] == "blocksparse/native"
    for m in measured.values():
        assert (len(m["seconds"]) == 2) is (m["failure"] is None)
        assert m["agrees"]
        assert m["label"] in result.output
    assert {c["against"] for c in forward["comparisons"]} >= {"ej_flash", "ej_attention", "ej_blocksparse", "matmul"}
    assert {c["against"] for c in dispatch["comparisons"] if c["at_most"]} == {"overhead"}
    assert dispatch["targets"][0]["verdict"] in ("met", "missed")


def test_ours_that_fails_is_an_error_of_the_command(invoke):
    result = invoke("--op", "cudnn_flash", "--length", "16", "--repeats", "1", "--row", "dispatch/causal_t16")
    assert result.exit_code == 1
    assert "NoRouteError: cudnn_flash cannot take this request" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "blockspars"), "blocksparse"),
        (("--row", "nothing/*"), "no row matches nothing/*"),
        (("--suite", "fast"), "'fast' is not one of 'forward', 'backward'"),
        (("--plot", "a.png", "--suite", "decode"), "--plot draws the suite scaling"),
        (("--json", "nowhere/a.json"), "there is no folder nowhere"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_measured(invoke, arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_plot_without_matplotlib_is_refused(invoke, monkeypatch):
    monkeypatch.setattr(plot, "is_available", lambda: False)
    result = invoke("--plot", "a.png", "--suite", "scaling")
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.output
