"""Every planted fault is convicted, by the case that is about it; the same kernel without a fault is not."""

from __future__ import annotations

import pytest
from planted import FAULTY, Right

from attention_ops.selftest import runner
from attention_ops.selftest.results import Settings


@pytest.fixture
def planted(registry):
    for cls in (Right, *FAULTY):
        registry.register(cls)


def test_there_are_enough():
    assert len(FAULTY) >= 20
    assert all(cls.caught_by for cls in FAULTY)


def test_the_right_kernel_passes(planted):
    names = {case for cls in FAULTY for case, _ in cls.caught_by if not case.startswith("refuse/")}
    report = runner.run([Right.name], Settings(cases=tuple(sorted(names))))
    assert report.ok, [str(failure) for failure in report.failures]
    assert report.routes[0].cases == len(names)
    assert report.routes[0].max_error < 1


@pytest.mark.parametrize("cls", FAULTY, ids=lambda cls: cls.name.removeprefix("planted_"))
def test_convicted(planted, cls):
    cases = tuple(dict.fromkeys(case for case, _ in cls.caught_by))
    report = runner.run([cls.name], Settings(cases=cases))
    found = {(failure.case, failure.quantity) for failure in report.failures}
    assert not report.ok
    assert set(cls.caught_by) <= found
    for failure in report.failures:
        assert failure.problem
        assert f"--op {cls.name} --case {failure.case}" in failure.reproduce
