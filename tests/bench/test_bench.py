"""The parts of the bench that need no clock: the table, the problems, the arithmetic, what is printed."""

from __future__ import annotations

import dataclasses
import json
import math
import os

import numpy as np
import pytest

from attention_ops.bench import memory, plot, report, systems
from attention_ops.bench.cases import CASES, OVERHEAD, OWN_CAUSAL, PEAK, SUITES, Case, Pattern, find_case, select
from attention_ops.bench.memory import Peak
from attention_ops.bench.problems import Problem
from attention_ops.bench.results import JITTED, CaseResult, Measurement
from attention_ops.bench.runner import Settings, relative_difference, run, steps
from attention_ops.bench.timing import Samples, calls_per_sample, interleave, median_ratio

TARGETS = {
    "forward/causal_t2048_d64_f32": {"jax_nn": 0.30, "torch": 1.05},
    "forward/causal_t4096_d64_f32": {"jax_nn": 0.20, "torch": 1.0},
    "forward/causal_t4096_d128_f32": {"jax_nn": 0.30, "torch": 1.0},
    "forward/causal_t4096_d64_bf16": {"jax_nn": 0.12, "torch": 0.75},
    "backward/causal_t2048": {"jax_nn": 0.30, "torch": 1.2},
    "backward/causal_t4096": {"jax_nn": 0.20, "torch": 1.1},
    "sparse/window512_t16384": {OWN_CAUSAL: 0.15},
    "sparse/documents16_even_t16384": {OWN_CAUSAL: 0.20},
    "sparse/documents16_uneven_t16384": {OWN_CAUSAL: 0.20},
    "sparse/blocks9_static_t16384": {OWN_CAUSAL: 0.30},
    "sparse/blocks9_runtime_t16384": {OWN_CAUSAL: 0.30},
    "decode/s16384_b1": {"jax_nn": 0.5, "torch": 1.2},
    "scaling/window1024_t65536_gradient": {PEAK: 3e9},
    "dispatch/causal_t16": {OVERHEAD: 150e-6},
}
"""What must be reached, row by row."""


# ---------------------------------------------------------------- the table


def test_every_target_has_its_row_and_the_short_form_measures_it():
    short = {case.name: case for case in select(short=True)}
    assert {name: {t.against: t.at_most for t in case.targets} for name, case in short.items() if case.targets} == TARGETS
    for name, targets in TARGETS.items():
        for against in set(targets) - {PEAK, OVERHEAD}:
            assert against in short[name].peers, f"{name} has a target against {against}, which is not among its peers"


def test_names_are_unique_and_every_suite_has_rows():
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.suite for case in CASES} == set(SUITES) == {case.suite for case in select(short=True)}


@pytest.mark.parametrize("T", [2048, 4096])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_forward_rows(T, D, dtype):
    case = find_case(f"forward/causal_t{T}_d{D}_{dtype}")
    assert (case.T, case.S, case.D, case.pattern) == (T, T, D, Pattern(causal=True))


def test_length_makes_rows_smaller_and_takes_their_targets_away():
    case = find_case("sparse/window512_t16384").at_length(256)
    assert (case.T, case.S, case.pattern.window, case.target(OWN_CAUSAL)) == (256, 256, 8, None)
    assert case.name == "sparse/window512_t16384"
    assert find_case("dispatch/causal_t16").at_length(256).target(OVERHEAD) is not None
    decode = find_case("decode/s16384_b1").at_length(256)
    assert (decode.T, decode.S) == (1, 256)


def test_points_of_the_scaling_curve_are_left_out_above_length():
    points = [case.T for case in select(["scaling"], length=2048) if case.pattern.is_plain]
    assert points == [512, 1024, 2048]


def test_the_full_form_adds_peers():
    short, full = (next(iter(select(["sparse"], short=flag))) for flag in (True, False))
    assert "torch" not in short.peers
    assert "torch" in full.peers


# ---------------------------------------------------------------- problems


@pytest.mark.parametrize("case", [case for case in CASES if case.suite in ("sparse", "decode", "forward")], ids=lambda c: c.name)
def test_the_pairs_that_are_counted_are_those_that_are_allowed(case):
    problem = Problem(case.at_length(96))
    allowed = problem.allowed()
    assert np.broadcast_to(allowed, (problem.case.B, 1, problem.case.T, problem.case.S)).sum() == problem.pairs
    assert allowed.any(-1).all(), "peers disagree on what an empty row is"


def test_a_share_of_blocks():
    problem = Problem(find_case("sparse/blocks9_runtime_t16384").at_length(1024))
    assert problem.pairs / 1024**2 == pytest.approx(0.09, abs=5e-4)


def test_flops_of_causal_attention():
    case = find_case("forward/causal_t4096_d64_f32")
    assert Problem(case).flops == pytest.approx(17.2e9, rel=5e-3)
    assert Problem(find_case("backward/causal_t4096")).flops == int(3.5 * Problem(case).flops)


# ---------------------------------------------------------------- timing and ratios


def test_ratio_is_the_median_over_rounds_not_the_ratio_of_medians():
    assert median_ratio((1.0, 9.0, 2.0), (2.0, 3.0, 4.0)) == 0.5
    with pytest.raises(ValueError, match="longer"):
        median_ratio((1.0,), (1.0, 2.0))


def test_interleave_takes_turns_and_keeps_a_failure():
    now, turns = [0.0], []

    def costs(name, seconds):
        def call():
            turns.append(name)
            now[0] += seconds

        return call

    def fails():
        turns.append("c")
        raise RuntimeError("no kernel\nfor this")

    samples = interleave({"a": costs("a", 1.0), "b": costs("b", 2.0), "c": fails}, 3, clock=lambda: now[0], pause=0.0)
    assert turns == ["a", "b", "c", "a", "b", "b", "a", "a", "b"]
    assert samples["a"].seconds == (1.0, 1.0, 1.0)
    assert samples["b"].seconds == (2.0, 2.0, 2.0)
    assert samples["c"] == Samples(failure="RuntimeError: no kernel")


def test_short_calls_are_repeated_within_a_sample():
    assert calls_per_sample(1.0) == 1
    assert calls_per_sample(0.0005) == 100


def test_relative_difference():
    assert relative_difference([np.ones(4)], [np.ones(4)]) == 0
    assert relative_difference([np.full(4, np.nan)], [np.ones(4)]) == math.inf
    with pytest.raises(systems.Unavailable, match=r"\(3,\), ours \(4,\)"):
        relative_difference([np.ones(3)], [np.ones(4)])


# ---------------------------------------------------------------- results and what is printed


def _measurement(name, role, *seconds, **rest):
    return Measurement(name, name, role, Samples(seconds), **rest)


def _result(name="forward/causal_t4096_d64_f32", *more, **rest):
    return CaseResult(find_case(name), 10**9, (_measurement("blocksparse", "ours", 1.0, 2.0, 3.0, **rest), *more))


def test_verdicts():
    result = _result(
        "forward/causal_t4096_d64_f32",
        _measurement("jax_nn", "peer", 10.0, 20.0, 10.0),
        _measurement("torch", "peer", 1.1, 2.2, 3.3),
    )
    assert [(c.against, c.value, c.verdict) for c in result.comparisons] == [
        ("jax_nn", 0.1, "met"),
        ("torch", pytest.approx(1 / 1.1), "met, aim missed"),
    ]
    assert (
        _result("forward/causal_t4096_d64_f32", _measurement("jax_nn", "peer", 2.0, 4.0, 6.0)).comparisons[0].verdict == "missed"
    )


def test_a_peer_on_another_problem_is_not_compared_and_said_so():
    result = _result("forward/causal_t4096_d64_f32", _measurement("torch", "peer", 9.0, 9.0, 9.0, difference=0.3))
    assert result.comparisons == ()
    assert "not the same problem: differs by 3.0e-01 from ours" in report.plain(result, ("blocksparse",))


def test_a_target_that_was_not_measured_is_said_so():
    text = report.plain_summary([_result()])
    assert text.startswith("targets: 0 met, 0 missed, 2 not measured")
    assert json.loads(json.dumps(_result().to_dict()))["targets"][0] == {
        "ours": "blocksparse", "against": "jax_nn", "value": None, "at_most": 0.2, "aim": None, "verdict": "not measured"
    }  # fmt: skip


def test_overhead_is_the_difference_to_the_jitted_call_of_the_same_operation():
    jitted = (_measurement(name + JITTED, "reference", 0.9999, 1.9999, 2.9) for name in ("blocksparse", "auto"))
    comparisons = _result("dispatch/causal_t16", *jitted).comparisons
    assert [(c.against, c.verdict) for c in comparisons] == [(OVERHEAD, "met")]
    assert comparisons[0].value == pytest.approx(1e-4)


def test_peak_memory_is_judged_by_that_of_the_whole_process():
    result = _result("scaling/window1024_t65536_gradient", peak=Peak(int(3.2e9), int(1e9)))
    assert [(c.against, c.verdict) for c in result.comparisons] == [(PEAK, "missed")]
    assert "3.20 GB, 2.20 GB" in report.plain(result, ("blocksparse",))


@pytest.mark.parametrize("no_color", [True, False])
def test_rich_table(monkeypatch, no_color):
    from rich.console import Console

    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    result = _result(
        "forward/causal_t4096_d64_f32",
        _measurement("jax_nn", "peer", 10.0, 20.0, 10.0),
        Measurement("torch", "torch", "peer", Samples(failure="absent")),
    )
    console = Console(force_terminal=True, width=120, record=True, color_system="standard")
    with console.capture() as capture:
        console.print(report.rich_table(result, ("blocksparse",)))
    text = capture.get()
    assert "0.10 met" in text
    assert "torch: absent" in text
    assert ("\x1b[32m" in text) is not no_color


def test_series_of_the_plot():
    results = [
        CaseResult(find_case(f"scaling/causal_t{T}"), 1, (_measurement("torch", "peer", T * 1e-3, peak=Peak(T * 10**6 + 5, 5)),))
        for T in (1024, 512)
    ]
    assert plot.series(results) == ({"torch": [(512, 512.0), (1024, 1024.0)]}, {"torch": [(512, 512.0), (1024, 1024.0)]})


@pytest.mark.skipif(not plot.is_available(), reason=plot.MISSING)
def test_plot_is_drawn(tmp_path):
    peak = Peak(2 * 10**8, 10**8)
    measured = tuple(_measurement(name, "peer", 1e-3, peak=peak) for name in ("blocksparse", "torch"))
    plot.draw([CaseResult(find_case("scaling/causal_t512"), 1, measured)], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------- running


SMALL = Case("sparse", "small", Pattern(causal=True), 32, 32, H=2, K=2, D=16)


def test_a_dense_system_that_would_not_fit_is_not_run(monkeypatch):
    monkeypatch.setattr(systems, "free_memory", lambda: 2**30)
    with pytest.raises(systems.Unavailable, match="not run: needs about 16 GiB, more than 60% of the 1 free"):
        systems.find_system("jax_nn", "blocksparse").check_memory(find_case("sparse/window512_t16384"))


@pytest.mark.parametrize(
    "change",
    [
        {"pattern": Pattern(causal=True, window=9), "peers": ("jax_nn", "ej_flash", "torch")},
        {"pattern": Pattern(causal=True, documents=4, even=False), "peers": ("jax_nn", "ej_blocksparse", "torch")},
        {"pattern": Pattern(blocks=0.3, grid=8, static=True), "peers": ("jax_nn", "ej_attention")},
        {"pattern": Pattern(blocks=0.3, grid=8), "peers": ("jax_nn", OWN_CAUSAL)},
        {
            "pattern": Pattern(lengths=True),
            "T": 1,
            "B": 2,
            "H": 4,
            "peers": ("jax_nn", "ej_flash", "torch", "torch_folded", "read"),
        },
        {"kind": "gradient", "peers": ("jax_nn", "torch", "matmul")},
    ],
    ids=lambda change: str(change.get("pattern", "gradient")),
)
def test_every_system_solves_the_same_problem(change):
    case = dataclasses.replace(SMALL, **change)
    taken = []
    settings = Settings(("blocksparse",), repeats=1)
    (result,) = run([case], settings, lambda: taken.append(1))
    absent = {m.system: m.samples.failure for m in result.measurements if m.samples.failure}
    assert len(taken) == steps(case, settings) - len(absent) * (settings.repeats + 1)
    assert all("is not installed" in reason for reason in absent.values()), absent
    for m in result.measurements:
        assert m.agrees(case.dtype), f"{m.label} differs by {m.difference}"
        assert (m.difference is not None) is (m.role == "peer" and m.system not in absent)


def test_a_slow_system_is_left_out_of_longer_points(monkeypatch):
    from attention_ops.bench.runner import _Runner

    runner = _Runner(Settings(("blocksparse",), limit=10.0), lambda: None)
    runner.slowest["torch"] = 4096, 3.0
    chosen = [systems.find_system("torch", "blocksparse")]
    assert runner._too_slow(find_case("scaling/causal_t4096"), chosen, 10) == {}
    reason = "not run: would take about 12 s a call, the limit is 10 s"
    assert runner._too_slow(find_case("scaling/causal_t8192"), chosen, 10) == {"torch": reason}
    assert runner._too_slow(find_case("scaling/window1024_t65536_gradient"), chosen, 10) == {}


def test_peak_memory_of_a_child_process():
    case = find_case("scaling/causal_t512").at_length(64)
    peak = memory.peak_of(case, systems.find_system("jax_nn", "blocksparse"), "blocksparse")
    assert peak.failure is None
    assert peak.total >= peak.baseline > 10**7
    assert peak.above_inputs == peak.total - peak.baseline


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="only Linux can start the peak anew")
def test_what_was_needed_to_make_the_inputs_is_forgotten():
    held = np.ones(2**27, np.uint8)
    high = memory.peak_here()
    assert high > held.nbytes
    del held
    assert memory.forget_peak() < high - 2**26
    held = np.ones(2**26, np.uint8)
    assert held.nbytes < memory.peak_here() < high - 2**25


def test_peak_memory_of_a_child_that_fails():
    case = dataclasses.replace(find_case("decode/s16384_b1"), suite="scaling", label="causal_t512", full_size=False, T=64, S=64)
    peak = memory.peak_of(case, systems.find_system("torch_folded", "blocksparse"), "blocksparse")
    assert peak == Peak(failure="groups are folded for one query that sees all keys up to a length, not for T 64")
