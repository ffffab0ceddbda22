"""Time calls fairly: interleaved round-robin, several rounds, one sample of each per round."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attention_ops.bench.systems import NOT_RUN, reason_of

SAMPLE_SECONDS = 0.05
"""Short calls are repeated until it has taken about this long; the sample is their median."""

PAUSE_SECONDS = 0.01
"""Between two systems: the idle threads of the one spin for a while and would take a core from the other."""

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Samples:
    """Seconds per call, one number per round, or why there are none."""

    seconds: tuple[float, ...] = ()
    failure: str | None = None

    @property
    def was_skipped(self) -> bool:
        """Whether it was not even tried, to spare memory or time."""
        return self.failure is not None and self.failure.startswith(NOT_RUN)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, ...]:
    """Return ours over theirs, round by round.

    >>> ratios((1.0, 2.0), (2.0, 2.0))
    (0.5, 1.0)
    """
    return tuple(a / b for a, b in zip(ours, theirs, strict=True))


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median over the rounds of ours over theirs: a slow phase of the machine hits both sides of a round.

    >>> median_ratio((1.0, 10.0, 1.0), (2.0, 20.0, 4.0))
    0.5
    """
    return statistics.median(ratios(ours, theirs))


def median_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median over the rounds of ours minus theirs.

    >>> median_difference((3.0, 5.0, 3.0), (1.0, 2.0, 2.0))
    2.0
    """
    return statistics.median(a - b for a, b in zip(ours, theirs, strict=True))


def seconds_per_call(call: Call, number: int = 1, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the median time of `number` calls in a row."""
    times = [clock()]
    for _ in range(number):
        call()
        times.append(clock())
    return statistics.median(after - before for before, after in itertools.pairwise(times))


def calls_per_sample(seconds: float) -> int:
    """Return how many calls of that length fill a sample."""
    return max(1, math.ceil(SAMPLE_SECONDS / max(seconds, 1e-7)))


def interleave(
    calls: Mapping[str, Call],
    repeats: int,
    *,
    step: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    pause: float = PAUSE_SECONDS,
) -> dict[str, Samples]:
    """Time every call once per round; the first of each round rotates. The calls must be warm: compiled, inputs made.

    A call that raises is given up, with its reason; the others go on. The garbage collector waits meanwhile.
    """
    names, seconds, failures, numbers = list(calls), {name: [] for name in calls}, {}, {}

    def attempt(name: str, number: int) -> float | None:
        time.sleep(pause)
        try:
            return seconds_per_call(calls[name], number, clock)
        except Exception as error:  # a peer's failure is a result
            failures[name] = reason_of(error)
            return None

    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for name in names:
            first = attempt(name, 1)
            if first is not None and first < SAMPLE_SECONDS:
                first = attempt(name, 5)
            numbers[name] = 1 if first is None else calls_per_sample(first)
            step()
        for turn in range(repeats):
            start = turn % max(len(names), 1)
            for name in names[start:] + names[:start]:
                sample = None if name in failures else attempt(name, numbers[name])
                if sample is not None:
                    seconds[name].append(sample)
                step()
    finally:
        if was_enabled:
            gc.enable()
    return {name: Samples(failure=failures[name]) if name in failures else Samples(tuple(seconds[name])) for name in names}
