"""How a route is proven. Each prover says why it cannot prove a route here, or gives the work that proves it.

`PROVERS` are tried in order, the strongest first: a proof for devices that are not here is one more prover at its end.
"""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax

from attention_ops.device import DeviceProfile
from attention_ops.errors import NoRouteError
from attention_ops.features import Feature
from attention_ops.metadata import OperationMetadata
from attention_ops.operation import OperationImpl, Route
from attention_ops.planner import make_plan
from attention_ops.selftest import calls, cases, numeric, refusals, table
from attention_ops.selftest.cases import Case
from attention_ops.selftest.results import CaseResult, Failure, ProofKind, Settings, Work


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is to be proven: one route of an operation, or an operation without routes, which picks others."""

    operation: type[OperationImpl]
    route: Route | None
    metadata: OperationMetadata = OperationMetadata()

    @property
    def name(self) -> str:
        return self.operation.name if self.route is None else self.route.name

    @property
    def target(self) -> calls.Target:
        supports = _PICKED if self.route is None else self.route.declaration.supports
        return calls.Target(self.name, supports, self.operation.tolerance, self.metadata)


_PICKED = Feature.ALL - {Feature.WEIGHTS}
"""Asking for weights would leave an operation that picks others no choice."""


CaseSource = Callable[[Subject], Sequence[Case]]


class Prover(Protocol):
    """One kind of proof."""

    @property
    def proof(self) -> ProofKind: ...

    def obstacle(self, subject: Subject, device: DeviceProfile) -> str:
        """Return why this cannot prove the subject on this device, or nothing."""
        ...

    def work(self, subject: Subject, source: CaseSource, settings: Settings, device: DeviceProfile) -> list[Work]:
        """Return the cases to run."""
        ...


@dataclasses.dataclass(frozen=True)
class Numeric:
    """Runs the route on this device and compares with the law."""

    proof: ProofKind = "numeric"

    def obstacle(self, subject: Subject, device: DeviceProfile) -> str:
        first = ""
        for case in cases.make(()).elsewhere():
            reason = _refusal(subject, case, calls.Asks(False, False, False), device)
            if not reason:
                return ""
            first = first or reason
        return first

    def work(self, subject: Subject, source: CaseSource, settings: Settings, device: DeviceProfile) -> list[Work]:
        target, groups = subject.target, dict[Any, list[Case]]()
        exercised: set[Feature] = set()
        for wanted in source(subject):
            case = _taken(subject, wanted, device)
            if case is None:
                continue
            asks = calls.asks_of(case, target.supports)
            exercised |= calls.spec_of(case, asks, subject.metadata).features
            problems = [case.problem(settings.seed, sample) for sample in range(case.samples)]
            same = groups.setdefault((calls.arguments(case, problems, target, asks).key, _is_timed(subject, case)), [])
            same.extend([] if case in same else [case])
        runner = functools.partial(_run_group, subject, settings)
        work = [Work(tuple(case.name for case in group), functools.partial(runner, group)) for group in groups.values()]
        if subject.route is not None and settings.declarations:
            work += _refusal_work(subject, subject.route, settings)
            work += [] if settings.cases else _untested(subject, exercised, settings)
        return work


PROVERS: tuple[Prover, ...] = (Numeric(),)


def compiler_options(settings: Settings) -> dict[str, Any]:
    """Return XLA options that compile six times faster, for a quick run on CPU. A full run compiles as users do."""
    return {} if settings.full else _fast_options()


@functools.cache
def _fast_options() -> dict[str, Any]:
    options = {
        "xla_backend_optimization_level": 0,
        "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_parallel_codegen_split_count": 1,
    }
    if jax.default_backend() != "cpu":
        return {}
    try:
        jax.jit(lambda x: x + 1, compiler_options=options)(1.0)
    except jax.errors.JaxRuntimeError:  # this XLA has no such option
        return {}
    return options


# ---------------------------------------------------------------- which cases


def _refusal(subject: Subject, case: Case, asks: calls.Asks, device: DeviceProfile) -> str:
    metadata = calls.metadata_for(subject.target, case.sizes.blocks)
    try:
        make_plan((subject.name,), calls.spec_of(case, asks, metadata), metadata, device)
    except NoRouteError as error:
        return "; ".join(line.strip().removeprefix(f"{subject.name}: ") for line in str(error).splitlines()[1:])
    return ""


def _taken(subject: Subject, wanted: Case, device: DeviceProfile) -> Case | None:
    """Return the case, at other sizes if the rules of the route ask for them, or None if the route never takes it."""
    for case in wanted.elsewhere():
        asks = calls.asks_of(case, subject.target.supports)
        if not _refusal(subject, case, asks, device):
            return None if case.variant == "nan" and not table.hides(case) else case
        spec = calls.spec_of(case, asks, subject.metadata)
        if subject.route is not None and spec.features - subject.route.declaration.supports:
            return None
    return None


def _is_timed(subject: Subject, case: Case) -> bool:
    """Whether to time a case against vanilla; it is then compiled as users compile."""
    return subject.route is not None and case.geometry in table.TIMED and not case.variant and not case.mode


# ---------------------------------------------------------------- running them


def _run_group(subject: Subject, settings: Settings, group: Sequence[Case]) -> list[CaseResult]:
    """Compile once, run each."""
    timed = _is_timed(subject, group[0])
    options = {} if timed else compiler_options(settings)
    programs: dict[Any, Any] = {}
    results = []
    for case in group:
        target, call = subject.target, None
        asks = calls.asks_of(case, target.supports)
        try:
            problems = [case.problem(settings.seed, sample) for sample in range(case.samples)]
            args = calls.arguments(case, problems, target, asks)
            if args.key not in programs:
                programs[args.key] = calls.program(args.call, args.inputs, options)
            found = numeric.run(case, target, settings.seed, programs, asks)
        except Exception as error:  # a kernel may raise anything: that is a verdict on it
            results.append(CaseResult(case.name, float("inf"), (_raised(subject, settings, case, error),)))
            continue
        if timed:
            call = functools.partial(once, programs[args.key], args)
        failures = tuple(_failure(subject, settings, case, check) for check in found if not check.passed)
        results.append(CaseResult(case.name, max(check.ratio for check in found), failures, call))
    return results


def once(program: Any, args: calls.Arguments) -> None:
    jax.block_until_ready(program(args.inputs, args.traced, args.cotangents))


def _failure(subject: Subject, settings: Settings, case: Case, check: numeric.Check) -> Failure:
    return _explained(subject, settings, case, check.quantity, check.sentence)


def _raised(subject: Subject, settings: Settings, case: Case, error: Exception) -> Failure:
    where = next((f for f in reversed(traceback.extract_tb(error.__traceback__)) if "site-packages" not in f.filename), None)
    place = f" ({where.filename.rpartition('/')[2]}:{where.lineno})" if where else ""
    first = str(error).strip().splitlines()[:1]
    return _explained(subject, settings, case, "raised", f"{type(error).__name__}: {''.join(first)}{place}")


def _explained(subject: Subject, settings: Settings, case: Case, quantity: str, problem: str) -> Failure:
    features = tuple(sorted(feature.name for feature in case.features))
    reproduce = settings.reproduction(subject.operation.name, case.name)
    return Failure(case.name, quantity, problem, features, case.problem(settings.seed).shapes, reproduce)


def _refusal_work(subject: Subject, route: Route, settings: Settings) -> list[Work]:
    checks = refusals.Refusals(subject.operation, route, settings.seed, compiler_options(settings)).checks()
    return [
        Work((name,), functools.partial(_run_check, subject, settings, name, check))
        for name, check in checks.items()
        if not settings.cases or name in settings.cases
    ]


def _run_check(subject: Subject, settings: Settings, name: str, check: Callable[[], str]) -> list[CaseResult]:
    try:
        problem, quantity = check(), "plan"
    except Exception as error:  # see _run_group
        problem, quantity = f"{type(error).__name__}: {error}".splitlines()[0], "raised"
    if not problem:
        return [CaseResult(name, 0.0)]
    feature = (name.rpartition("/")[2].upper(),)
    failure = Failure(name, quantity, problem, feature, "", settings.reproduction(subject.operation.name, name))
    return [CaseResult(name, float("inf"), (failure,))]


def _untested(subject: Subject, exercised: Iterable[Feature], settings: Settings) -> list[Work]:
    """A feature that is declared and that no case could ask for is not proven."""
    declared = subject.target.supports
    missing = declared - set(exercised)
    if not declared & {Feature.CAUSAL, Feature.WINDOW, Feature.MASK}:
        missing -= {Feature.OFFSET}  # no request has an offset and no mask of positions
    if not {Feature.BIAS, Feature.GRADIENT} <= declared:
        missing -= {Feature.BIAS_GRADIENT}
    work = []
    for feature in sorted(missing):
        sentence = f"{subject.name} declares {feature.value}, but its rules refuse every case that has it"
        name = f"declared/{feature.name.lower()}"
        work.append(Work((name,), functools.partial(_run_check, subject, settings, name, lambda text=sentence: text)))
    return work
