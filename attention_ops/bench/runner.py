"""Run rows: prepare every system, check that they solve the same problem, time them interleaved, measure peak memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from attention_ops.bench import dispatch
from attention_ops.bench.cases import Case
from attention_ops.bench.memory import Peak, peak_of
from attention_ops.bench.problems import Problem
from attention_ops.bench.results import CaseResult, Measurement
from attention_ops.bench.systems import NOT_RUN, Prepared, System, Unavailable, reason_of, systems_for
from attention_ops.bench.timing import Samples, interleave

Step = Callable[[], None]

PATIENCE = 4.0
"""Peak memory takes one call, times take several."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        operations: ours; outputs are compared with the first of them that runs.
        repeats: rounds, that is samples of each system.
        limit: seconds that one call of a scaling row may be expected to take; slower ones are not timed, and `PATIENCE` times
            slower ones not run for their peak memory either.
    """

    operations: tuple[str, ...] = ("blocksparse", "auto")
    repeats: int = 5
    limit: float = 60.0

    def __post_init__(self) -> None:
        if not self.operations:
            raise ValueError("operations is empty; name at least one")
        if self.repeats < 1:
            raise ValueError(f"repeats is {self.repeats}; allowed is 1 or more")


def steps(case: Case, settings: Settings) -> int:
    """Return how often `step` is called at most for a row."""
    systems = len(settings.operations) + len(case.peers)
    if case.kind == "dispatch":
        return 2 * systems * (settings.repeats + 1)
    return systems * ((settings.repeats + 2 if case.timed else 0) + (1 if case.memory else 0))


def run(cases: Sequence[Case], settings: Settings, step: Step = lambda: None) -> Iterator[CaseResult]:
    """Yield the result of each row as it is finished."""
    run_one = _Runner(settings, step)
    for case in cases:
        yield run_one(case)


class _Runner:
    """Remembers from row to row how slow systems are."""

    def __init__(self, settings: Settings, step: Step):
        self.settings, self.step = settings, step
        self.slowest: dict[str, tuple[int, float]] = {}

    def __call__(self, case: Case) -> CaseResult:
        import jax

        problem, operations = Problem(case), self.settings.operations
        if case.kind == "dispatch":
            measured = dispatch.measure(problem, operations, case.peers, self.settings.repeats, self.step)
            return CaseResult(case, problem.flops, measured)
        systems = systems_for(case, operations)
        refused = self._too_slow(case, systems, self.settings.limit)
        fresh = {system.name: Measurement(system.name, system.label, system.role) for system in systems}
        measured = self._time(problem, systems, refused, fresh) if case.timed else fresh
        jax.clear_caches()
        if case.memory:
            refused = self._too_slow(case, systems, PATIENCE * self.settings.limit)
            for system in systems:
                reason = refused.get(system.name)
                peak = Peak(failure=reason) if reason else peak_of(case, system, operations[0])
                measured[system.name] = dataclasses.replace(measured[system.name], peak=peak)
                self.step()
        return CaseResult(case, problem.flops, tuple(measured[system.name] for system in systems))

    def _too_slow(self, case: Case, systems: Sequence[System], limit: float) -> dict[str, str]:
        """Predict from the last point of the scaling suite; plain causal attention grows with the square of T."""
        reasons = {}
        for name in (system.name for system in systems):
            if case.suite == "scaling" and case.pattern.is_plain and name in self.slowest:
                T, seconds = self.slowest[name]
                expected = seconds * (case.T / T) ** 2
                if expected > limit:
                    reasons[name] = f"{NOT_RUN} would take about {expected:.0f} s a call, the limit is {limit:g} s"
        return reasons

    def _time(
        self, problem: Problem, systems: Sequence[System], refused: dict[str, str], measured: dict[str, Measurement]
    ) -> dict[str, Measurement]:
        case, failures = problem.case, dict(refused)
        ready: dict[str, Prepared] = {}
        reference: tuple[np.ndarray, ...] | None = None
        for system in systems:
            try:
                if system.name in failures:
                    continue
                system.check_memory(case)
                prepared = system.prepare(problem)
                outputs = prepared.call()
                difference = None
                if prepared.outputs and reference is None and system.role == "ours":
                    reference = prepared.outputs(outputs)
                elif prepared.outputs and reference is not None:
                    difference = relative_difference(prepared.outputs(outputs), reference)
                change = {"difference": difference, "note": prepared.note}
                measured[system.name] = dataclasses.replace(measured[system.name], **change)
                ready[system.name] = prepared
            except Exception as error:  # a system's failure is a result
                failures[system.name] = reason_of(error)
            finally:
                outputs = None
                self.step()
        samples = interleave({n: p.call for n, p in ready.items()}, self.settings.repeats, step=self.step)
        samples |= {name: Samples(failure=reason) for name, reason in failures.items()}
        for name, sample in samples.items():
            if sample.seconds and case.suite == "scaling":
                self.slowest[name] = case.T, sample.median
        return {name: dataclasses.replace(m, samples=samples[name]) for name, m in measured.items()}


def relative_difference(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Return the RMS of the difference over the RMS of what is expected, the worst of all arrays; inf where one is not finite.

    >>> relative_difference([np.array([3.0, 4.4])], [np.array([3.0, 4.0])])
    0.08
    """
    worst = 0.0
    for mine, theirs in zip(found, expected, strict=True):
        if mine.shape != theirs.shape:
            raise Unavailable(f"its output is {mine.shape}, ours {theirs.shape}")
        scale = float(np.linalg.norm(theirs)) or 1.0
        difference = float(np.linalg.norm(mine - theirs)) / scale
        worst = max(worst, difference if np.isfinite(difference) else float("inf"))
    return float(f"{worst:.1e}")
