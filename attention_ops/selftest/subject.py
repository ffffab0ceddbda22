"""What is proven, where, and what a prover is."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from attention_ops.device import DeviceProfile, compiling_for
from attention_ops.features import Feature
from attention_ops.kernels.interpreter import interpreted
from attention_ops.metadata import OperationMetadata
from attention_ops.operation import OperationImpl, Route
from attention_ops.selftest import calls
from attention_ops.selftest.cases import Case
from attention_ops.selftest.results import ProofKind, Settings, Work


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


@dataclasses.dataclass(frozen=True)
class Stand:
    """Where cases run: always on the devices here, with the rules asked about `device`; if `absent`, its kernels interpreted."""

    device: DeviceProfile
    absent: bool = False

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Trace and run what is inside there."""
        with contextlib.ExitStack() as stack:
            if self.absent:
                stack.enter_context(compiling_for(self.device))
                stack.enter_context(interpreted())
            yield


CaseSource = Callable[[Subject, ProofKind], Sequence[Case]]
"""The cases for a subject, by the kind of proof that they are to be part of."""


class Prover(Protocol):
    """One kind of proof."""

    @property
    def proof(self) -> ProofKind: ...

    def device(self, subject: Subject, here: DeviceProfile) -> DeviceProfile:
        """Return the device that the subject would be proven for."""
        ...

    def obstacle(self, subject: Subject, here: DeviceProfile) -> str:
        """Return why this cannot prove the subject on the device here, or nothing."""
        ...

    def work(self, subject: Subject, source: CaseSource, settings: Settings, here: DeviceProfile) -> list[Work]:
        """Return the cases to run."""
        ...
