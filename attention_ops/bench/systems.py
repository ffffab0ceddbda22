"""What can be measured: ours, the peers and the ceilings, all behind one verb, `prepare`.

A system turns a problem into a call without arguments that computes and waits. Inputs are converted once, outside of it. A system
that is not installed, or cannot do the work, raises `Unavailable` with the reason, which is reported in its place.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from attention_ops.bench.cases import OWN_CAUSAL, Case
from attention_ops.bench.problems import Problem
from attention_ops.errors import AttentionOpsError

FITS = 0.6
"""A system whose temporary arrays need more than this share of the free memory is not run: others use the machine too."""

NOT_RUN = "not run:"
"""How a reason begins when a system was not even tried."""


class Unavailable(AttentionOpsError):
    """A system cannot be measured on this problem; the message says why."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A call that is ready to be timed.

    Attributes:
        call: computes, waits until it is done, and returns whatever the system returns.
        outputs: what `call` returned, as float32 in the public layout: the output, then the gradients of query, key and value.
            None for a reference that computes something else.
        note: what really runs, if that is not obvious.
    """

    call: Callable[[], Any]
    outputs: Callable[[Any], tuple[np.ndarray, ...]] | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class System:
    """Something to measure.

    Attributes:
        label: its name in the table.
        role: "ours", "peer", or "reference" (not the same problem: ceilings, and our own causal attention).
        dense: how many arrays of B * H * T * S float32 it holds at once, roughly; 0 where memory is linear in T and S.
    """

    name: str
    label: str
    role: Literal["ours", "peer", "reference"]
    prepare: Callable[[Problem], Prepared]
    dense: int = 0

    def temporary_bytes(self, case: Case) -> int:
        backward = 2 if case.kind == "gradient" else 1
        return self.dense * backward * case.B * case.H * case.T * case.S * 4

    def check_memory(self, case: Case) -> None:
        """Raise Unavailable when the temporary arrays would not fit."""
        needed, free = self.temporary_bytes(case), free_memory()
        if needed > FITS * free:
            share = f"{needed / 2**30:.0f} GiB, more than {FITS:.0%} of the {free / 2**30:.0f} free"
            raise Unavailable(f"{NOT_RUN} needs about {share}")


def free_memory() -> int:
    """Return the bytes that a new process could use."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_PEERS: dict[str, tuple[str, Literal["peer", "reference"], str, int]] = {
    "jax_nn": ("jax.nn (XLA)", "peer", "jax_systems:jax_nn", 2),
    "ej_flash": ("ejkernel flash", "peer", "peers:ej_flash", 0),
    "ej_attention": ("ejkernel attention", "peer", "peers:ej_attention", 2),
    "ej_blocksparse": ("ejkernel blocksparse", "peer", "peers:ej_blocksparse", 3),
    "torch": ("PyTorch SDPA", "peer", "peers:torch_sdpa", 0),
    "torch_folded": ("PyTorch SDPA, groups folded", "peer", "peers:torch_folded", 0),
    "matmul": ("matrix product, same flops", "reference", "jax_systems:matmul", 0),
    "matmul_f32": ("the same in float32", "reference", "jax_systems:matmul_f32", 0),
    "read": ("read of the cache once", "reference", "jax_systems:read", 0),
}


def find_system(name: str, operation: str) -> System:
    """Return a peer by name, or what runs one of our operations; `OWN_CAUSAL` is the causal attention of `operation`."""
    if name == OWN_CAUSAL:
        return System(name, f"{operation}, causal", "reference", _load("jax_systems:own_causal", operation))
    if name not in _PEERS:
        return System(name, name, "ours", _load("jax_systems:ours", name))
    label, role, where, dense = _PEERS[name]
    return System(name, label, role, _load(where), dense)


def systems_for(case: Case, operations: tuple[str, ...]) -> tuple[System, ...]:
    """Return ours, then the peers of a row."""
    return tuple(find_system(name, operations[0]) for name in (*operations, *case.peers))


def _load(where: str, *arguments: str) -> Callable[[Problem], Prepared]:
    """Return a function that imports its module when it is called."""
    module, _, function = where.partition(":")

    def prepare(problem: Problem) -> Prepared:
        return getattr(importlib.import_module(f"attention_ops.bench.{module}"), function)(problem, *arguments)

    return prepare


def reason_of(error: BaseException) -> str:
    """Return a failure as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return text if isinstance(error, Unavailable) and text else f"{type(error).__name__}: {text}".rstrip(": ")
