"""The kinds of proof, the strongest first: on the device, in the interpreter of its kernels, by what it is lowered to."""

from __future__ import annotations

import dataclasses

from attention_ops.device import DeviceProfile
from attention_ops.selftest import execution
from attention_ops.selftest.elsewhere import Interpreted, Lowered
from attention_ops.selftest.results import ProofKind, Settings, Work
from attention_ops.selftest.subject import CaseSource, Prover, Stand, Subject


@dataclasses.dataclass(frozen=True)
class Numeric:
    """Runs the route on this device and compares with the law."""

    proof: ProofKind = "numeric"

    def device(self, subject: Subject, here: DeviceProfile) -> DeviceProfile:
        return here

    def obstacle(self, subject: Subject, here: DeviceProfile) -> str:
        return execution.obstacle(subject, here)

    def work(self, subject: Subject, source: CaseSource, settings: Settings, here: DeviceProfile) -> list[Work]:
        stand, found = Stand(here), execution.taken(subject, source(subject, self.proof), here)
        work = execution.case_work(subject, found, settings, stand)
        return work + execution.declaration_work(subject, found, settings, stand, lambda plan: True)


PROVERS: tuple[Prover, ...] = (Numeric(), Interpreted(), Lowered())


def prover_of(subject: Subject, here: DeviceProfile) -> tuple[Prover | None, str]:
    """Return the strongest prover for a subject on the device here; without one, why each of them cannot prove it."""
    reasons = []
    for prover in PROVERS:
        obstacle = prover.obstacle(subject, here)
        if not obstacle:
            return prover, ""
        reasons.append(obstacle)
    return None, "; ".join(dict.fromkeys(reasons))


def caveat(subject: Subject, prover: Prover | None, here: DeviceProfile) -> str:
    """Return what is not proven of a subject by that prover, or nothing."""
    if subject.route is None or (prover is not None and prover.proof == "numeric"):
        return ""
    name = "" if prover is None else prover.device(subject, here).name
    said = {
        "interpreter": f"its kernel ran in the interpreter, with the rules of {name}",
        "lowering": f"its calls were lowered for {name} and their settings compared, and no number was computed",
        "none": "nothing is proven",
    }
    proof = "none" if prover is None else prover.proof
    return f"declared for {subject.route.backend} but never run on the device: {said[proof]}"
