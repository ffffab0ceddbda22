"""What the selftest finds out, as plain values."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Sequence
from typing import Any, Literal

from attention_ops.device import DeviceProfile

Status = Literal["passed", "failed", "unavailable"]
ProofKind = Literal["numeric", "interpreter", "lowering", "none"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a run is made.

    Attributes:
        full: the whole grid.
        seed: of all data.
        cases: names of the only cases to run; none means the table.
        declarations: also show that what a route does not declare goes elsewhere, and that all it declares was asked for.
        rerun: the arguments that load what is tested, for the reproduction lines.
    """

    full: bool = False
    seed: int = 0
    cases: tuple[str, ...] = ()
    declarations: bool = True
    rerun: tuple[str, ...] = ()

    def reproduction(self, operation: str, case: str) -> str:
        words = ["python", "-m", "attention_ops.selftest", *self.rerun, "--op", operation, "--case", case]
        words += ["--seed", str(self.seed)] if self.seed else []
        return shlex.join([*words, *(["--full"] if self.full else [])])


@dataclasses.dataclass(frozen=True)
class Failure:
    """One thing that is not as the law has it.

    Attributes:
        case: its name in the table; `--case` runs it again.
        quantity: "output", "logsumexp", "d_bias", ...; "raised" if nothing came back.
        problem: one sentence with the error and the bound, or the exception.
        features: those of the case.
        shapes: of every array of the call.
        reproduce: a command line.
    """

    case: str
    quantity: str
    problem: str
    features: tuple[str, ...]
    shapes: str
    reproduce: str

    def __str__(self) -> str:
        return f"{self.case}: {self.quantity}: {self.problem}"


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """One case on one route. `ratio` is the worst error over its bound; `call` runs the compiled case once, to time it."""

    case: str
    ratio: float
    failures: tuple[Failure, ...] = ()
    call: Callable[[], Any] | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True)
class Work:
    """Cases of one route that are run together because they share a compiled program."""

    cases: tuple[str, ...]
    run: Callable[[], Sequence[CaseResult]]


@dataclasses.dataclass(frozen=True)
class RouteReport:
    """The verdict on one route. `max_error` is the worst error over its bound: up to 1 passes.

    `device` is the one it was proven for, which need not be here, and `caveat` says then what was not proven.
    """

    operation: str
    route: str
    status: Status
    proof: ProofKind
    cases: int = 0
    failed: int = 0
    max_error: float | None = None
    reason: str = ""
    seconds: float = 0.0
    failures: tuple[Failure, ...] = ()
    time_ratio: float | None = None
    device: DeviceProfile | None = None
    caveat: str = ""

    def to_dict(self) -> dict[str, Any]:
        finite = self.max_error is not None and math.isfinite(self.max_error)
        return {
            "operation": self.operation,
            "route": self.route,
            "status": self.status,
            "proof": self.proof,
            "cases": self.cases,
            "failed": self.failed,
            "max_error": round(self.max_error, 4) if finite and self.max_error is not None else None,
            "reason": self.reason,
            "device": None if self.device is None else str(self.device),
            "caveat": self.caveat,
            "seconds": round(self.seconds, 3),
        }


@dataclasses.dataclass(frozen=True)
class Report:
    """The verdict on every route of the operations that were tested."""

    version: str
    device: str
    routes: tuple[RouteReport, ...]

    @property
    def ok(self) -> bool:
        return all(route.status != "failed" for route in self.routes)

    @property
    def failures(self) -> tuple[Failure, ...]:
        return tuple(failure for route in self.routes for failure in route.failures)

    def to_dict(self) -> dict[str, Any]:
        routes = [route.to_dict() for route in self.routes]
        return {"version": self.version, "device": self.device, "ok": self.ok, "routes": routes}
