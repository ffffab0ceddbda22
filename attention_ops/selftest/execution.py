"""Cases of a route: which of them its rules take, which share a program, and what running them finds."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from attention_ops.device import DeviceProfile
from attention_ops.errors import NoRouteError
from attention_ops.features import Feature
from attention_ops.planner import Plan, make_plan
from attention_ops.selftest import calls, cases, numeric, refusals, table
from attention_ops.selftest.cases import Case
from attention_ops.selftest.results import CaseResult, Failure, Settings, Work
from attention_ops.selftest.subject import Stand, Subject

# ---------------------------------------------------------------- which cases


def obstacle(subject: Subject, device: DeviceProfile) -> str:
    """Return why a route takes not even a plain call on a device, or nothing."""
    first = ""
    for case in cases.make(()).elsewhere():
        reason = refusal(subject, case, calls.Asks(False, False, False), device)
        if not reason:
            return ""
        first = first or reason
    return first


def refusal(subject: Subject, case: Case, asks: calls.Asks, device: DeviceProfile) -> str:
    metadata = calls.metadata_for(subject.target, case.sizes.blocks)
    try:
        make_plan((subject.name,), calls.spec_of(case, asks, metadata), metadata, device)
    except NoRouteError as error:
        return "; ".join(line.strip().removeprefix(f"{subject.name}: ") for line in str(error).splitlines()[1:])
    return ""


def taken(subject: Subject, wanted: Iterable[Case], device: DeviceProfile) -> list[Case]:
    """Return the cases, each once, at other sizes if the rules of the route ask for them, without those it never takes."""
    found = (_taken(subject, case, device) for case in wanted)
    return list(dict.fromkeys(case for case in found if case is not None))


def _taken(subject: Subject, wanted: Case, device: DeviceProfile) -> Case | None:
    for case in wanted.elsewhere():
        asks = calls.asks_of(case, subject.target.supports)
        if not refusal(subject, case, asks, device):
            return None if case.variant == "nan" and not table.hides(case) else case
        spec = calls.spec_of(case, asks, subject.metadata)
        if subject.route is not None and spec.features - subject.route.declaration.supports:
            return None
    return None


def completed(subject: Subject, found: list[Case], settings: Settings, device: DeviceProfile) -> list[Case]:
    """Add cases for each declared feature that none has, the feature alone or else among others: rules may refuse either.

    None are added to cases that were named, or that a config asked for.
    """
    if settings.cases or not settings.declarations:
        return found
    for more in (table.alone, table.among_others):
        missing = subject.target.supports - exercised(subject, found)
        found = [*found, *taken(subject, more(missing, subject.target.supports), device)]
    return list(dict.fromkeys(found))


def exercised(subject: Subject, found: Iterable[Case]) -> set[Feature]:
    """Return the features that the cases need."""
    features: set[Feature] = set()
    for case in found:
        features |= calls.spec_of(case, calls.asks_of(case, subject.target.supports), subject.metadata).features
    return features


def is_timed(subject: Subject, case: Case) -> bool:
    """Whether to time a case against vanilla; it is then compiled as users compile."""
    return subject.route is not None and case.geometry in table.TIMED and not case.variant and not case.mode


# ---------------------------------------------------------------- as work


def case_work(subject: Subject, found: Sequence[Case], settings: Settings, stand: Stand) -> list[Work]:
    """Return the cases as work, those together that share a program."""
    target, groups = subject.target, dict[Any, list[Case]]()
    for case in found:
        asks = calls.asks_of(case, target.supports)
        problems = [case.problem(settings.seed, sample) for sample in range(case.samples)]
        timed = not stand.absent and is_timed(subject, case)
        groups.setdefault((calls.arguments(case, problems, target, asks).key, timed), []).append(case)
    runner = functools.partial(_run_group, subject, settings, stand)
    return [
        Work(tuple(case.name for case in group), functools.partial(runner, group, timed)) for (_, timed), group in groups.items()
    ]


def declaration_work(
    subject: Subject, found: Iterable[Case], settings: Settings, stand: Stand, runs_here: Callable[[Plan], bool]
) -> list[Work]:
    """Return the checks that what a route does not declare goes elsewhere, and that what it declares was asked for."""
    if subject.route is None or not settings.declarations:
        return []
    with stand.on():
        checks = refusals.Refusals(
            subject.operation, subject.route, settings.seed, compiler_options(fast=True), runs_here
        ).checks()
    work = [check_work(subject, settings, stand, name, check) for name, check in checks.items()]
    if settings.cases:
        return [one for one in work if one.cases[0] in settings.cases]
    return work + _untested(subject, exercised(subject, found), settings, stand)


def check_work(subject: Subject, settings: Settings, stand: Stand, name: str, check: Callable[[], str]) -> Work:
    """Return one check, which answers with what is wrong or with nothing, as work."""
    return Work((name,), functools.partial(_run_check, subject, settings, stand, name, check))


def _untested(subject: Subject, asked: set[Feature], settings: Settings, stand: Stand) -> list[Work]:
    """A feature that is declared and that no case could ask for is not proven."""
    declared = subject.target.supports
    missing = declared - asked
    if not declared & {Feature.CAUSAL, Feature.WINDOW, Feature.MASK}:
        missing -= {Feature.OFFSET}  # no request has an offset and no mask of positions
    if not {Feature.BIAS, Feature.GRADIENT} <= declared:
        missing -= {Feature.BIAS_GRADIENT}
    work = []
    for feature in sorted(missing):
        sentence = f"{subject.name} declares {feature.value}, but its rules refuse every case that has it"
        name = f"declared/{feature.name.lower()}"
        work.append(check_work(subject, settings, stand, name, lambda text=sentence: text))
    return work


# ---------------------------------------------------------------- running them


def _run_group(subject: Subject, settings: Settings, stand: Stand, group: Sequence[Case], timed: bool) -> list[CaseResult]:
    """Compile once, run each."""
    as_users = timed or (settings.full and not stand.absent and any(case.name in _AS_USERS for case in group))
    options = compiler_options(fast=not as_users)
    programs: dict[Any, Any] = {}
    with stand.on():
        return [_run_case(subject, settings, case, programs, options, timed) for case in group]


def _run_case(
    subject: Subject, settings: Settings, case: Case, programs: dict[Any, Any], options: Mapping[str, Any], timed: bool
) -> CaseResult:
    target = subject.target
    asks = calls.asks_of(case, target.supports)
    try:
        problems = [case.problem(settings.seed, sample) for sample in range(case.samples)]
        args = calls.arguments(case, problems, target, asks)
        if args.key not in programs:
            programs[args.key] = calls.program(args.call, args.inputs, options)
        found = numeric.run(case, target, settings.seed, programs, asks)
    except Exception as error:  # a kernel may raise anything: that is a verdict on it
        return CaseResult(case.name, float("inf"), (_raised(subject, settings, case, error),))
    failures = tuple(explained(subject, settings, case, check.quantity, check.sentence) for check in found if not check.passed)
    call = functools.partial(once, programs[args.key], args) if timed else None
    return CaseResult(case.name, max(check.ratio for check in found), failures, call)


def once(program: Any, args: calls.Arguments) -> None:
    jax.block_until_ready(program(args.inputs, args.traced, args.cotangents))


def _raised(subject: Subject, settings: Settings, case: Case, error: Exception) -> Failure:
    where = next((f for f in reversed(traceback.extract_tb(error.__traceback__)) if "site-packages" not in f.filename), None)
    place = f" ({where.filename.rpartition('/')[2]}:{where.lineno})" if where else ""
    first = str(error).strip().splitlines()[:1]
    return explained(subject, settings, case, "raised", f"{type(error).__name__}: {''.join(first)}{place}")


def explained(subject: Subject, settings: Settings, case: Case, quantity: str, problem: str) -> Failure:
    """Return a failure with what one needs to run its case again."""
    features = tuple(sorted(feature.name for feature in case.features))
    reproduce = settings.reproduction(subject.operation.name, case.name)
    return Failure(case.name, quantity, problem, features, case.problem(settings.seed).shapes, reproduce)


def _run_check(subject: Subject, settings: Settings, stand: Stand, name: str, check: Callable[[], str]) -> list[CaseResult]:
    try:
        with stand.on():
            problem, quantity = check(), "plan"
    except Exception as error:  # see _run_case
        problem, quantity = f"{type(error).__name__}: {error}".splitlines()[0], "raised"
    if not problem:
        return [CaseResult(name, 0.0)]
    feature = (name.rpartition("/")[2].upper(),)
    failure = Failure(name, quantity, problem, feature, "", settings.reproduction(subject.operation.name, name))
    return [CaseResult(name, float("inf"), (failure,))]


_AS_USERS = frozenset(cases.parse("/".join(row)).name for row in table.PAIRED)
"""Cases that a full run compiles as users do, beside the timed ones: every pair of features is in one of them."""


def compiler_options(fast: bool) -> dict[str, Any]:
    """Return XLA options that compile six times faster on CPU, or none."""
    return _fast_options() if fast else {}


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
