"""What the runner does with operations of every kind: the built-in ones, and those that others write."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys

import pytest
from compiling import environment_of_users
from planted import Right

from attention_ops import Feature, OperationImpl, forward, rules
from attention_ops.rules import Reason
from attention_ops.selftest import provers, runner, table
from attention_ops.selftest.results import CaseResult, Settings, Work

QUICK = Settings()


def _plain(request):
    return Right().forward_native(request).attention_outputs


class TwoFeatures(OperationImpl):
    name = "mine_two_features"

    @forward(supports={Feature.CAUSAL, Feature.GRADIENT})
    def forward_native(self, request):
        return _plain(request)


class NoGradient(OperationImpl):
    name = "mine_no_gradient"
    fallback = ("vanilla",)

    @forward(supports={Feature.BIAS})
    def forward_native(self, request):
        return _plain(request)


class Narrow(OperationImpl):
    name = "mine_narrow"
    fallback = ("vanilla",)

    @forward(
        supports={Feature.CAUSAL, Feature.GQA, Feature.GRADIENT},
        rules=(rules.HeadDim(multiple_of=64), rules.LengthMultiple(128), rules.Dtypes(("bfloat16",)), rules.SelfAttentionMask()),
    )
    def forward_native(self, request):
        return _plain(request)


@dataclasses.dataclass(frozen=True)
class NoSegments:
    def check(self, spec, metadata, device):
        return Reason("segments are not taken after all") if Feature.SEGMENTS in spec.features else None

    def describe(self):
        return "no segments"


class Boaster(OperationImpl):
    name = "mine_boaster"

    @forward(supports={Feature.SEGMENTS}, rules=(NoSegments(),))
    def forward_native(self, request):
        return _plain(request)


class Raising(OperationImpl):
    name = "mine_raising"

    @forward(supports={Feature.CAUSAL})
    def forward_native(self, request):
        if request.mask is not None:
            raise RuntimeError("no causal today")
        return _plain(request)


class Elsewhere(OperationImpl):
    name = "mine_elsewhere"

    @forward(supports={Feature.CAUSAL})
    def forward_tpu(self, request):
        raise AssertionError("never runs here")


class TwoRoutes(OperationImpl):
    name = "mine_two_routes"

    @forward()
    def forward_cpu(self, request):
        return _plain(request)

    @forward(supports={Feature.CAUSAL})
    def forward_native(self, request):
        return _plain(request)


class Picks(OperationImpl):
    name = "mine_picks"

    @classmethod
    def candidates(cls, spec, metadata, device):
        return ("mine_two_features", "vanilla")


MINE = (TwoFeatures, NoGradient, Narrow, Boaster, Raising, Elsewhere, TwoRoutes, Picks)


@pytest.fixture
def mine(registry, monkeypatch):
    """Register them, and keep the table short: what is tested here is what the runner makes of it."""
    for cls in MINE:
        registry.register(cls)
    for name, kept in (("OTHERS", 0), ("IN_MODES", 2)):
        monkeypatch.setattr(table, name, getattr(table, name)[:kept])


def _cases(monkeypatch, name, settings=QUICK):
    """Run an operation; return its report and every case result."""
    results = []
    execute = runner._execute

    def spy(jobs, progress):
        execute(jobs, progress)
        results.extend(result for job in jobs for result in job.results)

    monkeypatch.setattr(runner, "_execute", spy)
    return runner.run([name], settings), {result.case: result for result in results}


def test_few_features(mine, monkeypatch):
    report, results = _cases(monkeypatch, "mine_two_features")
    assert report.ok, report.failures
    assert {"plain/small/float32", "causal/small/float32", "refuse/bias", "refuse/logsumexp", "refuse/offset"} <= set(results)
    assert not any("bias" in name.split("/")[0] for name in results)


def test_without_gradient(mine, monkeypatch):
    report, results = _cases(monkeypatch, "mine_no_gradient")
    assert report.ok, report.failures
    assert {"bias/small/float32", "refuse/gradient", "refuse/bias_gradient"} <= set(results)


def test_rules_choose_the_sizes(mine, monkeypatch):
    report, results = _cases(monkeypatch, "mine_narrow")
    assert report.ok, report.failures
    proven = [name for name in results if not name.startswith(("refuse", "inactive"))]
    assert proven
    assert all(re.search(r"(aligned|aligned_wide|deep)/bfloat16", name) for name in proven)
    assert {f"refuse/{rule}" for rule in ("HeadDim", "LengthMultiple", "Dtypes", "SelfAttentionMask")} <= set(results)


def test_what_is_declared_must_be_provable(mine):
    report = runner.run(["mine_boaster"], QUICK)
    assert [failure.case for failure in report.failures] == ["declared/segments"]
    assert "declares segment ids, but its rules refuse every case" in report.failures[0].problem


def test_a_kernel_that_raises(mine):
    report = runner.run(["mine_raising"], QUICK)
    route = report.routes[0]
    assert route.status == "failed"
    assert route.max_error == float("inf")
    assert route.to_dict()["max_error"] is None
    raised = [failure for failure in route.failures if failure.case.startswith("causal")]
    assert raised
    assert all("RuntimeError: no causal today" in failure.problem for failure in raised)
    assert "CAUSAL" in raised[0].features
    assert "query [2, 19, 6, 16]" in raised[0].shapes


def test_a_route_for_another_device(mine):
    route = runner.run(["mine_elsewhere"], QUICK).routes[0]
    assert (route.route, route.status, route.proof, route.cases) == ("mine_elsewhere/tpu", "unavailable", "none", 0)
    assert "only for tpu" in route.reason


def test_every_route_is_tested(mine):
    report = runner.run(["mine_two_routes"], QUICK)
    assert report.ok, report.failures
    assert {route.route for route in report.routes} == {"mine_two_routes/cpu", "mine_two_routes/native"}
    assert all(route.proof == "numeric" and route.cases for route in report.routes)


def test_an_operation_that_picks_others(mine):
    route = runner.run(["mine_picks"], QUICK).routes[0]
    assert (route.route, route.status, route.failed) == ("mine_picks", "passed", 0)
    assert route.cases == len(runner._PICKING)


def test_a_further_kind_of_proof_can_be_added(mine, monkeypatch):
    class Lowering:
        proof = "lowering"

        def device(self, subject, here):
            return here

        def obstacle(self, subject, here):
            return "" if subject.route.backend == "tpu" else "only for tpu"

        def work(self, subject, source, settings, here):
            return [Work(("lowers",), lambda: [CaseResult("lowers", 0.5)])]

    monkeypatch.setattr(provers, "PROVERS", (*provers.PROVERS, Lowering()))
    route = runner.run(["mine_elsewhere"], QUICK).routes[0]
    assert (route.status, route.proof, route.cases, route.max_error) == ("passed", "lowering", 1, 0.5)


def test_a_broken_plug_in_is_listed(mine, monkeypatch):
    monkeypatch.setattr(runner.OperationRegistry, "names", lambda: ("mine_elsewhere",))
    monkeypatch.setattr(runner.OperationRegistry, "unavailable", lambda: {"theirs": "ImportError: no such module"})
    report = runner.run(None, QUICK)
    assert [(route.route, route.status) for route in report.routes] == [
        ("mine_elsewhere/tpu", "unavailable"),
        ("theirs", "unavailable"),
    ]
    assert report.routes[1].reason == "ImportError: no such module"


def test_progress_counts_cases(mine):
    seen = []
    report = runner.run(["mine_two_features"], QUICK, progress=lambda done, total, what: seen.append((done, total, what)))
    assert seen[0][0] == 0
    assert seen[-1][:2] == (report.routes[0].cases,) * 2
    assert seen[-1][2] == "mine_two_features/native"


def _command(tmp_path, *words):
    """Run the command in a process of its own; return what it printed and its report."""
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "attention_ops.selftest", *words, "--json", str(file)]
    done = subprocess.run(command, env=environment_of_users(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["ok"]
    return done.stdout, {route["route"]: route for route in found["routes"]}


def test_the_built_in_operations_are_proven(tmp_path):
    """The quick run as users make it."""
    ours = ("auto", "vanilla", "sdpa", "flash", "blocksparse", "cudnn_flash")
    output, by_route = _command(tmp_path, *(word for name in ours for word in ("--op", name)))
    for name in ("vanilla", "sdpa", "flash", "blocksparse"):
        route = by_route[f"{name}/native"]
        assert (route["operation"], route["status"], route["proof"], route["failed"]) == (name, "passed", "numeric", 0)
        assert 0 < route["max_error"] <= 1
        assert route["cases"] > 30
    assert by_route["auto"]["status"] == "passed"
    cudnn = by_route["cudnn_flash/cuda"]
    assert (cudnn["status"], cudnn["proof"], cudnn["max_error"]) == ("passed", "lowering", 0)
    assert cudnn["cases"] > 15
    assert "never run on the device" in cudnn["caveat"]
    elsewhere = [route for name, route in by_route.items() if not name.endswith(("/native", "/cpu", "auto"))]
    assert all(route["status"] == "passed" and route["proof"] in ("interpreter", "lowering") for route in elsewhere)
    assert all(f"{route['route']}: declared for" in output for route in elsewhere)


def test_many_features_at_once_are_proven_when_compiled_as_users_compile(tmp_path):
    """A full run optimises the cases that pair features; the quick one leaves that out."""
    cases = ["/".join(row) for row in table.PAIRED[:2]]
    words = [word for case in cases for word in ("--case", case)]
    _, by_route = _command(tmp_path, "--full", "--op", "vanilla", "--op", "blocksparse", *words)
    assert all(by_route[f"{name}/native"]["cases"] == len(cases) for name in ("vanilla", "blocksparse"))
