"""A route that failed the selftest on this kind of device is refused until it passes."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import pytest
from click.testing import CliRunner

import attention_ops as ao
from attention_ops import Feature, OperationImpl, forward, planner, storage, verdicts
from attention_ops.selftest import cases, runner
from attention_ops.selftest.__main__ import main
from attention_ops.selftest.results import Settings


class Flaky(OperationImpl):
    name = "planted_flaky"
    fallback = ("vanilla",)
    factor = 1.0

    @forward(supports={Feature.CAUSAL})
    def forward_native(self, request):
        return ao.OperationRegistry.create("vanilla").forward_native(request).attention_outputs * self.factor


class Faulty(Flaky):
    factor = 1.01


@pytest.fixture
def flaky(registry, monkeypatch, tmp_path):
    monkeypatch.setenv(storage.ENVIRONMENT, str(tmp_path))
    registry.register(Faulty)
    grids = dict.fromkeys(
        runner._GRIDS, (lambda declared: [cases.make(()), cases.make(("causal",))], lambda declared: [cases.make(("causal",))])
    )
    monkeypatch.setattr(runner, "_GRIDS", grids)
    return monkeypatch


def _selftest(settings=Settings(declarations=False)):  # noqa: B008
    report = runner.run([Flaky.name], settings)
    return report, runner.save(report, settings)[1]


def _plan(qkv, **options):
    return ao.plan(Flaky.name, *qkv(T=8, K=4), **options)


def test_a_failed_route_is_refused_and_comes_back(flaky, qkv):
    assert _plan(qkv, differentiable=False).route == "planted_flaky/native"
    report, _ = _selftest()
    assert report.routes[0].status == "failed"

    plan = _plan(qkv, differentiable=False)
    assert plan.route == "vanilla/native"
    reason = str(plan.decisions[0].reasons[0])
    assert "failed the selftest for this device on 2" in reason
    assert "plain/small/float32: output: output is off by" in reason
    assert "once it passes: python -m attention_ops.selftest --op planted_flaky --save" in reason
    with pytest.warns(ao.FallbackWarning, match="failed the selftest"):
        out = ao.attention(*qkv(T=8, K=4), impl=Flaky.name, differentiable=False)
    wanted = ao.attention(*qkv(T=8, K=4), impl="vanilla").attention_outputs
    assert jnp.array_equal(out.attention_outputs, wanted)

    ao.OperationRegistry.register(override=True)(Flaky)
    assert _plan(qkv, differentiable=False).route == "vanilla/native"  # mended, but not proven yet
    report, standing = _selftest()
    assert report.ok
    assert standing == ()
    assert _plan(qkv, differentiable=False).route == "planted_flaky/native"


def test_a_smaller_run_does_not_take_a_failure_back(flaky, qkv):
    _selftest(Settings(full=True, declarations=False))
    ao.OperationRegistry.register(override=True)(Flaky)
    _, (standing,) = _selftest()
    assert standing.rerun == "python -m attention_ops.selftest --op planted_flaky --full --save"
    assert _plan(qkv, differentiable=False).route == "vanilla/native"
    _selftest(Settings(full=True, seed=1, declarations=False))  # other data
    assert _plan(qkv, differentiable=False).route == "vanilla/native"
    _selftest(Settings(full=True, declarations=False))
    assert _plan(qkv, differentiable=False).route == "planted_flaky/native"


def test_verdicts_of_other_devices_and_versions_say_nothing(flaky, qkv):
    _selftest()
    assert _plan(qkv, differentiable=False).route == "vanilla/native"
    assert _plan(qkv, differentiable=False, device="a100").route == "planted_flaky/native"
    (found,) = json.loads(storage.path(verdicts.FILE).read_text())["kept"]
    for change in ({"machine": "cpu (another)"}, {"versions": "attention_ops 0.0.1, jax 0.9, jaxlib 0.9"}):
        storage.save(verdicts.FILE, {"kept": [found | change]})
        assert _plan(qkv, differentiable=False).route == "planted_flaky/native"
    storage.save(verdicts.FILE, {"kept": [found]})
    assert _plan(qkv, differentiable=False).route == "vanilla/native"


@pytest.mark.parametrize("content", ["{", '{"kept": 3}', '{"kept": [{"route": "flash/native"}, 7]}'])
def test_a_broken_file_is_ignored_with_a_warning_and_replaced(flaky, qkv, content):
    storage.path(verdicts.FILE).write_text(content)
    with pytest.warns(UserWarning, match="verdicts.json"):
        assert _plan(qkv, differentiable=False).route == "planted_flaky/native"
    _selftest()
    assert len(json.loads(storage.path(verdicts.FILE).read_text())["kept"]) == 1


def test_a_verdict_of_the_wrong_kind_is_none():
    good = verdicts.Verdict("m", "v", "flash/native", True, "numeric", False, 0, "", "2026-01-01")
    for change in ({"passed": 1}, {"seed": "0"}, {"route": None}):
        with pytest.raises(TypeError, match="allowed is"):
            dataclasses.replace(good, **change)


def test_plans_are_cached_over_verdicts_that_do_not_change(flaky, qkv):
    arrays = qkv(T=8, K=4)
    ao.plan(Flaky.name, *arrays, differentiable=False)
    before = planner._make_plan.cache_info()
    for _ in range(5):
        ao.plan(Flaky.name, *arrays, differentiable=False)
    after = planner._make_plan.cache_info()
    assert (after.hits - before.hits, after.misses) == (5, before.misses)


def test_the_command_saves(flaky, qkv):
    result = CliRunner().invoke(main, ["--op", Flaky.name, "--save"])
    assert result.exit_code == 1
    assert f"verdicts saved in {storage.path(verdicts.FILE)}" in result.output
    assert _plan(qkv, differentiable=False).route == "vanilla/native"
    ao.OperationRegistry.register(override=True)(Flaky)
    result = CliRunner().invoke(main, ["--op", Flaky.name, "--save"])
    assert result.exit_code == 0, result.output
    assert _plan(qkv, differentiable=False).route == "planted_flaky/native"


@pytest.mark.parametrize("words", [("--case", "plain"), ("--config", "x.yaml")])
def test_only_whole_runs_are_saved(words):
    result = CliRunner().invoke(main, ["--save", *words])
    assert result.exit_code == 2
    assert f"--save keeps verdicts on whole routes; leave out {words[0]}" in result.output


def test_a_folder_that_cannot_be_written_is_one_line(flaky, tmp_path):
    (tmp_path / "file").write_text("")
    flaky.setenv(storage.ENVIRONMENT, str(tmp_path / "file" / "below"))
    result = CliRunner().invoke(main, ["--op", Flaky.name, "--save"])
    assert result.exit_code == 2
    assert "Error: " in result.output
