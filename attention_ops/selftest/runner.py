"""Runs the proofs of many routes at a time and gathers the verdicts."""

from __future__ import annotations

import collections
import concurrent.futures
import contextvars
import dataclasses
import datetime
import functools
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attention_ops
from attention_ops import storage, verdicts
from attention_ops.device import DeviceProfile
from attention_ops.metadata import OperationMetadata
from attention_ops.operation import OperationImpl
from attention_ops.registry import OperationRegistry
from attention_ops.selftest import calls, cases, execution, provers, table
from attention_ops.selftest.cases import Case
from attention_ops.selftest.elsewhere import LOWERS
from attention_ops.selftest.results import CaseResult, ProofKind, Report, RouteReport, Settings, Work
from attention_ops.selftest.subject import CaseSource, Prover, Subject
from attention_ops.verdicts import Verdict

Progress = Callable[[int, int, str], None]
_THREADS = 4
_YARDSTICK = "vanilla"
_REPEATS = 5


@dataclasses.dataclass
class _Job:
    """One subject with its work, for the device it is proven for, and what came of it."""

    subject: Subject
    prover: Prover | None
    device: DeviceProfile
    reason: str
    caveat: str
    work: list[Work]
    results: list[CaseResult] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


def run(
    operations: Iterable[str] | None,
    settings: Settings,
    *,
    metadata: OperationMetadata | None = None,
    source: CaseSource | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Report:
    """Prove every route of these operations.

    Args:
        operations: registered names. None is all, and the plug-ins that could not be imported are listed too.
        settings: how much, and with which seed.
        metadata: that of every call; cases add their block sizes.
        source: the cases for a subject. Default: those that the settings name, or `table.quick` or `table.full`.
        progress: called with cases done, cases in total, and the route that a case just finished on.

    Raises:
        UnknownOperationError: a name is not registered.
        UnknownCaseError: the settings name a case that does not exist.
    """
    here = DeviceProfile.current()
    source = source or _source(settings)
    names = OperationRegistry.names() if operations is None else operations
    metadata = metadata or OperationMetadata()
    subjects = [subject for name in names for subject in _subjects(OperationRegistry.get(name), metadata)]
    with verdicts.ignored():  # those of earlier runs
        jobs = [_job(subject, source, settings, here) for subject in subjects]
        _execute(jobs, progress)
        ratios = _time(jobs, settings)
    reports = [_verdict(job, settings, ratios.get(id(job))) for job in jobs]
    broken = OperationRegistry.unavailable() if operations is None else {}
    reports += [RouteReport(name, name, "unavailable", "none", reason=error) for name, error in broken.items()]
    return Report(attention_ops.__version__, str(here), tuple(report for report in reports if report is not None))


def _source(settings: Settings) -> CaseSource:
    return _named(settings.cases) if settings.cases else functools.partial(_from_table, full=settings.full)


def _named(names: Sequence[str]) -> CaseSource:
    """Return the cases of these names, those to be lowered for that proof and the others for the rest."""
    ran = [cases.parse(name) for name in names if not name.startswith(("refuse/", "inactive_", LOWERS))]
    lowered = [cases.parse(name.removeprefix(LOWERS)) for name in names if name.startswith(LOWERS)]

    def source(subject: Subject, proof: ProofKind) -> Sequence[Case]:
        named = lowered if proof == "lowering" else ran
        return [case for case in named if case.features <= subject.target.supports]

    return source


_GRIDS = {
    "numeric": (table.quick, table.full),
    "interpreter": (table.sample, table.interpreted),
    "lowering": (table.lowered_sample, table.lowered),
}


def _from_table(subject: Subject, proof: ProofKind, full: bool) -> Sequence[Case]:
    if subject.route is None:
        return [*map(cases.parse, _PICKING)] if proof == "numeric" else []
    return _GRIDS[proof][full](subject.target.supports)


_PICKING = (
    "plain/small/float32",
    "causal+gqa/small/bfloat16",
    "mask_samples+bias_heads/small/float32",
    "dropout+soft_cap/small/float32",
    "segments+sinks+value_dim/small/float32/nan",
    "causal+kv_lengths+gqa/long/float32",
)
"""Requests of several kinds and sizes, for an operation that picks others."""


def _subjects(operation: type[OperationImpl], metadata: OperationMetadata) -> list[Subject]:
    return [Subject(operation, route, metadata) for route in operation.routes.values()] or [Subject(operation, None, metadata)]


def _job(subject: Subject, source: CaseSource, settings: Settings, here: DeviceProfile) -> _Job:
    prover, reason = provers.prover_of(subject, here)
    caveat = provers.caveat(subject, prover, here)
    if prover is None:
        return _Job(subject, None, here, reason, caveat, [])
    device, work = prover.device(subject, here), prover.work(subject, source, settings, here)
    return _Job(subject, prover, device, "", caveat, work)


# ---------------------------------------------------------------- execution


def _execute(jobs: Sequence[_Job], progress: Progress) -> None:
    """Run all work, the routes interleaved; compiling happens outside Python's lock, so threads help."""
    total, done = sum(len(work.cases) for job in jobs for work in job.work), 0
    progress(0, total, "")
    with concurrent.futures.ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        futures = {pool.submit(contextvars.copy_context().run, _timed, work): (job, work) for job in jobs for work in job.work}
        for future in concurrent.futures.as_completed(futures):
            job, work = futures[future]
            results, seconds = future.result()
            job.results += results
            job.seconds += seconds
            done += len(work.cases)
            progress(done, total, job.subject.name)


def _timed(work: Work) -> tuple[Sequence[CaseResult], float]:
    start = time.perf_counter()
    return work.run(), time.perf_counter() - start


def _time(jobs: Sequence[_Job], settings: Settings) -> dict[int, float]:
    """Return, by job, its time over vanilla's on the same cases, compiled as users do and run one after the other."""
    timed = {(id(job), result.case): result.call for job in jobs for result in job.results if result.call is not None}
    names = {case for _, case in timed}
    base = {id(job) for job in jobs if job.subject.name == f"{_YARDSTICK}/native"}
    base_calls = {case: call for (job, case), call in timed.items() if job in base}
    base_calls |= {case: _yardstick_call(case, settings) for case in names - base_calls.keys()}
    base_seconds = {case: _best(call) for case, call in base_calls.items()}
    sums: dict[int, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for (job, case), call in timed.items():
        sums[job][0] += base_seconds[case] if call is base_calls[case] else _best(call)
        sums[job][1] += base_seconds[case]
    return {job: own / other for job, (own, other) in sums.items()}


def _yardstick_call(name: str, settings: Settings) -> Callable[[], Any]:
    """Compile vanilla for a case that it was not asked to prove."""
    route = OperationRegistry.get(_YARDSTICK).routes["native"]
    case, target = cases.parse(name), calls.Target(route.name, route.declaration.supports)
    asks = calls.asks_of(case, target.supports)
    args = calls.arguments(case, [case.problem(settings.seed)], target, asks)
    return functools.partial(execution.once, calls.program(args.call, args.inputs, {}), args)


def _best(call: Callable[[], Any]) -> float:
    call()
    spent = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        spent.append(time.perf_counter() - start)
    return min(spent)


# ---------------------------------------------------------------- verdicts


def _verdict(job: _Job, settings: Settings, time_ratio: float | None) -> RouteReport | None:
    """Return the report on a subject; None where the cases that were named have nothing for it."""
    operation, route = job.subject.operation.name, job.subject.name
    if job.prover is None:
        return RouteReport(operation, route, "unavailable", "none", reason=job.reason, caveat=job.caveat)
    if not job.results and (settings.cases or not settings.declarations):
        return None
    order = {name: index for index, name in enumerate(name for work in job.work for name in work.cases)}
    results = sorted(job.results, key=lambda result: order[result.case])
    failed = [result for result in results if result.failures]
    failures = tuple(failure for result in failed for failure in result.failures)
    reason = f"{failures[0]}" if failures else ("" if results else "no case applies to this route")
    return RouteReport(
        operation,
        route,
        status="passed" if results and not failed else "failed",
        proof=job.prover.proof,
        cases=len(results),
        failed=len(failed),
        max_error=max((result.ratio for result in results), default=None),
        reason=reason,
        seconds=job.seconds,
        failures=failures,
        time_ratio=time_ratio,
        device=job.device,
        caveat=job.caveat,
    )


def save(report: Report, settings: Settings) -> tuple[pathlib.Path, tuple[Verdict, ...]]:
    """Keep what a run found out; return the file, and the older failures that this run was too small to take back.

    Raises:
        OSError: the folder cannot be written.
    """
    today, versions = datetime.date.today().isoformat(), verdicts.versions()
    found = [
        Verdict(
            machine=verdicts.machine_of(route.device),
            versions=versions,
            route=route.route,
            passed=route.status == "passed",
            proof=route.proof,
            full=settings.full,
            seed=settings.seed,
            reason="" if route.status == "passed" else route.reason,
            date=today,
        )
        for route in report.routes
        if route.device is not None
    ]
    return storage.path(verdicts.FILE), verdicts.keep(found)
