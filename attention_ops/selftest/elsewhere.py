"""Proofs for devices that are not here: the kernel in its interpreter, and what a call is lowered to."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from attention_ops.device import DeviceProfile, compiling_for
from attention_ops.planner import Plan
from attention_ops.registry import OperationRegistry
from attention_ops.selftest import calls, cudnn_calls, execution, lowering
from attention_ops.selftest.cases import Case
from attention_ops.selftest.results import CaseResult, ProofKind, Settings, Work
from attention_ops.selftest.subject import CaseSource, Stand, Subject

PROFILES = {"tpu": "tpu-v5e", "gpu": "a100", "cuda": "h100", "rocm": "mi300x"}
"""The device that the rules of a forward are asked about where there is none."""

LOWERS = "lowers/"
"""What the names of cases begin with that are lowered and not run."""


def _device(subject: Subject, here: DeviceProfile) -> DeviceProfile:
    return DeviceProfile.named(PROFILES.get(subject.route.backend, "cpu") if subject.route else "cpu")


def _obstacle(subject: Subject, here: DeviceProfile) -> str:
    if subject.route is None or subject.route.backend not in PROFILES:
        return "it is not for one kind of device"
    return execution.obstacle(subject, _device(subject, here))


@dataclasses.dataclass(frozen=True)
class Interpreted:
    """Runs a Pallas kernel in its interpreter on the CPU, planned for the device it is written for, and compares with the law."""

    proof: ProofKind = "interpreter"

    def device(self, subject: Subject, here: DeviceProfile) -> DeviceProfile:
        return _device(subject, here)

    def obstacle(self, subject: Subject, here: DeviceProfile) -> str:
        if subject.route is not None and not subject.route.declaration.interpretable:
            return "its kernel has no interpreter"
        return _obstacle(subject, here)

    def work(self, subject: Subject, source: CaseSource, settings: Settings, here: DeviceProfile) -> list[Work]:
        stand = Stand(_device(subject, here), absent=True)
        found = execution.taken(subject, source(subject, self.proof), stand.device)
        found = execution.completed(subject, found, settings, stand.device)
        work = execution.case_work(subject, found, settings, stand)
        work += execution.declaration_work(subject, found, settings, stand, _runs_interpreted)
        return work + _lowering_work(subject, source, settings, stand.device)[0]


def _runs_interpreted(plan: Plan) -> bool:
    backend = plan.route.rpartition("/")[2]
    return backend not in PROFILES or OperationRegistry.get(plan.operation).routes[backend].declaration.interpretable


@dataclasses.dataclass(frozen=True)
class Lowered:
    """Lowers calls for the device a route is written for and looks at what they became: the kernel, given what was asked for."""

    proof: ProofKind = "lowering"

    def device(self, subject: Subject, here: DeviceProfile) -> DeviceProfile:
        return _device(subject, here)

    def obstacle(self, subject: Subject, here: DeviceProfile) -> str:
        if subject.route is not None and not subject.route.declaration.lowers_to:
            return "it declares no custom call that its lowering would show"
        return _obstacle(subject, here)

    def work(self, subject: Subject, source: CaseSource, settings: Settings, here: DeviceProfile) -> list[Work]:
        device = _device(subject, here)
        work, found = _lowering_work(subject, source, settings, device)
        stand = Stand(device, absent=True)
        return work + execution.declaration_work(subject, found, settings, stand, lambda plan: False)


# ---------------------------------------------------------------- lowering


def _lowering_work(
    subject: Subject, source: CaseSource, settings: Settings, device: DeviceProfile
) -> tuple[list[Work], list[Case]]:
    """Return work that lowers cases, and these."""
    if subject.route is None or not subject.route.declaration.lowers_to:
        return [], []
    found = execution.taken(subject, source(subject, "lowering"), device)
    found = execution.completed(subject, found, settings, device)
    work = [Work((LOWERS + case.name,), functools.partial(_lower, subject, settings, device, case)) for case in found]
    return work, found


def _lower(subject: Subject, settings: Settings, device: DeviceProfile, case: Case) -> list[CaseResult]:
    name = LOWERS + case.name
    try:
        problems = lowering_problems(subject, settings, device, case)
    except Exception as error:  # a kernel may raise anything: that is a verdict on it
        problems = [f"{type(error).__name__}: {error}".splitlines()[0]]
    again = settings.reproduction(subject.operation.name, name)
    failures = (execution.explained(subject, settings, case, "lowering", problem) for problem in problems)
    failures = tuple(dataclasses.replace(failure, case=name, reproduce=again) for failure in failures)
    return [CaseResult(name, float("inf") if failures else 0.0, failures)]


def lowering_problems(subject: Subject, settings: Settings, device: DeviceProfile, case: Case) -> list[str]:
    """Return what is wrong with the program that a case becomes on a device, as sentences."""
    assert subject.route is not None
    target = subject.target
    asks = calls.asks_of(case, target.supports)
    args = calls.arguments(case, [case.problem(settings.seed, sample) for sample in range(case.samples)], target, asks)
    arrays: tuple[Any, ...] = (args.inputs, args.traced, args.cotangents)
    with compiling_for(device):
        text = lowering.lowered(calls.program(args.call, args.inputs, {}), arrays, device)
    found, prefix = lowering.custom_calls(text), subject.route.declaration.lowers_to
    kernels = [call for call in found if call.target.startswith(prefix)]
    problems = []
    if len(kernels) < (2 if asks.gradients else 1):
        wanted = "a kernel for the forward and one for the gradient" if asks.gradients else "a kernel"
        others = ", ".join(call.target for call in found) or "none"
        problems.append(f"{len(kernels)} custom calls begin with {prefix}, expected {wanted}; custom calls: {others}")
    problems += [f"a matrix product runs outside of the kernel: {product}" for product in lowering.matrix_products(text)]
    if prefix == cudnn_calls.PREFIX and not problems:
        problems += cudnn_calls.problems(case, case.problem(settings.seed), asks, found)
    return problems
