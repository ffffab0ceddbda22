"""What was measured, as values: they are printed, drawn and written as JSON, and know nothing of how they came about."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any, Literal

from attention_ops.bench.cases import OVERHEAD, PEAK, Case
from attention_ops.bench.memory import Peak
from attention_ops.bench.timing import Samples, median_difference, median_ratio

DIFFERENCE_AT_MOST = {"float32": 1e-2, "bfloat16": 3e-2}
"""Relative RMS difference up to which two systems are taken to have solved the same problem. One key more or less in a window of
512 makes about 4e-2; float32 kernels differ by 1e-6, bfloat16 kernels by 5e-3."""

JITTED = " jitted"
"""Added to the name of a system, the compiled call that a dispatch row takes as the cost of its kernel."""

Role = Literal["ours", "peer", "reference"]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One system on one row.

    Attributes:
        difference: relative RMS difference of its outputs from ours, the worst of output and gradients; None for references and
            for ours.
        note: what really ran.
    """

    system: str
    label: str
    role: Role
    samples: Samples = Samples()
    difference: float | None = None
    note: str = ""
    peak: Peak | None = None

    def agrees(self, dtype: str) -> bool:
        """Whether it solved the same problem as ours, as far as is known."""
        return self.difference is None or self.difference <= DIFFERENCE_AT_MOST[dtype]

    def remarks(self, dtype: str) -> list[str]:
        """What must be said beside the figures: failures and disagreement first."""
        failures = [self.samples.failure, self.peak.failure if self.peak else None]
        remarks = list(dict.fromkeys(failure for failure in failures if failure))
        if not self.agrees(dtype):
            remarks.append(f"not the same problem: differs by {self.difference:.1e} from ours")
        return [*remarks, self.note] if self.note else remarks


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One of our operations against a system, or against nothing where a quantity of its own has a target.

    Attributes:
        against: a system, `OVERHEAD` (value in seconds) or `PEAK` (value in bytes); otherwise the value is a ratio.
        at_most, aim: the target of the row, or None.
    """

    ours: str
    against: str
    value: float
    at_most: float | None = None
    aim: float | None = None

    @property
    def verdict(self) -> str:
        if self.at_most is None:
            return ""
        if math.isnan(self.value):
            return "not measured"
        if self.value > self.at_most:
            return "missed"
        return "met" if self.aim is None else "aim met" if self.value <= self.aim else "met, aim missed"


@dataclasses.dataclass(frozen=True)
class CaseResult:
    case: Case
    flops: int
    measurements: tuple[Measurement, ...]

    def find(self, system: str) -> Measurement | None:
        return next((m for m in self.measurements if m.system == system), None)

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Every operation of ours against every other system that was timed on the same problem, and its own quantities."""
        found = []
        for mine in (m for m in self.measurements if m.role == "ours"):
            if mine.samples.seconds and mine.agrees(self.case.dtype):
                found += [self._compare(mine, other) for other in self.measurements if self._is_comparable(mine, other)]
            if mine.peak and mine.peak.total is not None:
                found.append(self._judged(mine.system, PEAK, float(mine.peak.total)))
        return tuple(found)

    @property
    def verdicts(self) -> tuple[Comparison, ...]:
        """What has a target, for every operation of ours; one that could not be compared has the value nan."""
        found = {(c.ours, c.against): c for c in self.comparisons}
        mine = [m.system for m in self.measurements if m.role == "ours"]
        targets = [target for target in self.case.targets if self.case.full_size]
        return tuple(found.get((o, t.against)) or self._judged(o, t.against, math.nan) for o in mine for t in targets)

    @property
    def is_broken(self) -> bool:
        """Whether one of ours failed, or differs from another of ours. One that was spared is not broken."""
        mine = [m for m in self.measurements if m.role == "ours"]
        return any((m.samples.failure and not m.samples.was_skipped) or not m.agrees(self.case.dtype) for m in mine)

    def _is_comparable(self, mine: Measurement, other: Measurement) -> bool:
        if other.role == "ours" or not other.samples.seconds or not other.agrees(self.case.dtype):
            return False
        return not other.system.endswith(JITTED) or other.system == mine.system + JITTED

    def _compare(self, mine: Measurement, other: Measurement) -> Comparison:
        pair = mine.samples.seconds, other.samples.seconds
        if other.system == mine.system + JITTED:
            return self._judged(mine.system, OVERHEAD, median_difference(*pair))
        return self._judged(mine.system, other.system, median_ratio(*pair))

    def _judged(self, ours: str, against: str, value: float) -> Comparison:
        target = self.case.target(against)
        return Comparison(ours, against, value, target and target.at_most, target and target.aim)

    def to_dict(self) -> dict[str, Any]:
        case = dataclasses.asdict(self.case)
        case.pop("targets")
        return {
            "name": self.case.name,
            "title": self.case.title,
            "case": case,
            "flops": self.flops,
            "measurements": [_measurement(m, self.case.dtype) for m in self.measurements],
            "comparisons": [dataclasses.asdict(c) | {"verdict": c.verdict} for c in self.comparisons],
            "targets": [dataclasses.asdict(c) | {"value": _number(c.value), "verdict": c.verdict} for c in self.verdicts],
        }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _measurement(m: Measurement, dtype: str) -> dict[str, Any]:
    seconds = m.samples.seconds
    return {
        "system": m.system,
        "label": m.label,
        "role": m.role,
        "seconds": list(seconds),
        "median": statistics.median(seconds) if seconds else None,
        "min": min(seconds, default=None),
        "max": max(seconds, default=None),
        "failure": m.samples.failure,
        "difference": m.difference,
        "agrees": m.agrees(dtype),
        "note": m.note,
        "peak_bytes": m.peak.total if m.peak else None,
        "peak_bytes_above_inputs": m.peak.above_inputs if m.peak else None,
        "peak_failure": m.peak.failure if m.peak else None,
    }
