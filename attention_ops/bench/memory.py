"""Peak memory of one system on one row, measured in a process of its own: `python -m attention_ops.bench.memory ORDER`.

The process imports the system, makes the inputs, forgets how high its memory was until then, and computes once. What it needs
beyond its inputs has the compiler's memory in it, some 60 to 90 MB for anything that runs on XLA.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

from attention_ops.bench.cases import Case, find_case
from attention_ops.bench.problems import Problem
from attention_ops.bench.systems import System, Unavailable, find_system, reason_of

CHILD_SECONDS = 600.0
_ENVIRONMENT = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
"""ejkernel turns JAX's cache on disk on; what is found there needs no memory to compile."""


@dataclasses.dataclass(frozen=True)
class Peak:
    """Peak resident bytes of the process while it computed, resident bytes before that, or why there are none."""

    total: int | None = None
    baseline: int | None = None
    failure: str | None = None

    @property
    def above_inputs(self) -> int | None:
        return None if self.total is None or self.baseline is None else max(self.total - self.baseline, 0)


def peak_of(case: Case, system: System, operation: str) -> Peak:
    """Measure in a child process. A system that fails there, or would not fit, gives its reason."""
    try:
        if sys.platform == "win32":
            raise Unavailable("peak memory cannot be measured on Windows")
        system.check_memory(case)
        answer = _child(case, system, operation)
        return Peak(answer["total"], answer["baseline"])
    except Unavailable as error:
        return Peak(failure=reason_of(error))


def _child(case: Case, system: System, operation: str) -> dict[str, int]:
    length = None if case.full_size else max(case.T, case.S)
    order = {"row": case.name, "length": length, "system": system.name, "operation": operation}
    here = str(pathlib.Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    try:
        result = subprocess.run(
            [sys.executable, "-m", "attention_ops.bench.memory", json.dumps(order)],
            env={**os.environ, "PYTHONPATH": path, **_ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=CHILD_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"took more than {CHILD_SECONDS:.0f} s in its own process") from None
    if result.returncode < 0:
        raise Unavailable(f"its process was ended by signal {-result.returncode} (9: out of memory)")
    lines = result.stdout.strip().splitlines()
    answer = json.loads(lines[-1]) if result.returncode == 0 and lines else {}
    if "total" in answer:
        return answer
    errors = result.stderr.strip().splitlines()
    raise Unavailable(answer.get("failure") or (errors[-1] if errors else f"its process ended with {result.returncode}"))


def peak_here() -> int:
    """Return the peak resident bytes of this process, since the last `forget_peak` where that is possible.

    From /proc where there is one: on Linux, getrusage of a process that was forked and executed starts at the size of its parent.
    """
    try:
        return _status("VmHWM")
    except (OSError, StopIteration):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def forget_peak() -> int:
    """Give freed memory back, start the peak anew and return the resident bytes: making the inputs may have needed more.

    Where the system has no such thing, the peak until now is returned, and what a computation adds to it is a lower bound.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
        return _status("VmRSS")
    except (OSError, StopIteration):
        return peak_here()


def _status(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def _answer(order: dict[str, Any]) -> dict[str, Any]:
    """What the child does."""
    import jax

    if jax.default_backend() != "cpu":
        return {"failure": f"peak memory is measured on the CPU only, and JAX runs on {jax.default_backend()}"}
    case = find_case(order["row"]).at_length(order["length"])
    try:
        prepared = find_system(order["system"], order["operation"]).prepare(Problem(case))
        baseline = forget_peak()
        prepared.call()
    except Exception as error:  # a system's failure is a result
        return {"failure": reason_of(error)}
    return {"total": peak_here(), "baseline": baseline}


if __name__ == "__main__":
    print(json.dumps(_answer(json.loads(sys.argv[1]))))
