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
