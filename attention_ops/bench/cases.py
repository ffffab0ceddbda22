"""The table of work that is measured, and what each row must reach.

A row is a value: sizes, which pairs of query and key are visible, whom to compare with, and the targets. Nothing here touches an
array or imports a framework.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence
from typing import Any, Literal

SUITES = ("forward", "backward", "sparse", "decode", "scaling", "dispatch")
Kind = Literal["forward", "gradient", "dispatch"]

OWN_CAUSAL = "own_causal"
"""The reference of sparse rows: our first operation on plain causal attention of the same sizes."""

OVERHEAD = "overhead"
"""The target of a dispatch row: seconds of an eager call over the jitted one."""

PEAK = "peak"
"""The target of a memory row: peak bytes of the whole process."""

EJKERNEL = ("ej_flash", "ej_attention", "ej_blocksparse")
DENSE_PEERS = ("jax_nn", *EJKERNEL, "torch")


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Which keys a query may attend. Everything that is given applies at once.

    Attributes:
        causal: its own position and earlier ones.
        window: the last `window` keys, its own among them.
        documents: that many packed documents; their ids are run-time data. `even` makes them equally long.
        blocks: a share of a `grid` by `grid` raster, the diagonal and others at random. `static` is known while compiling.
        lengths: row b of the batch attends its first S * (B - b) / B keys; run-time data.
    """

    causal: bool = False
    window: int | None = None
    documents: int = 0
    even: bool = True
    blocks: float = 0.0
    grid: int = 32
    static: bool = False
    lengths: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is causal and nothing else."""
        return self == Pattern(causal=True)

    def __str__(self) -> str:
        words = ["causal"] if self.causal else []
        if self.window:
            words.append(f"window {self.window}")
        if self.documents:
            words.append(f"{self.documents} {'even' if self.even else 'uneven'} documents")
        if self.blocks:
            when = "static" if self.static else "at run time"
            words.append(f"{self.blocks:.0%} of {self.grid} x {self.grid} blocks, {when}")
        if self.lengths:
            words.append("lengths per row")
        return " ".join(words) or "everything visible"


@dataclasses.dataclass(frozen=True)
class Target:
    """What a row must reach: ours over `against`, or a quantity of ours (`OVERHEAD` in seconds, `PEAK` in bytes)."""

    against: str
    at_most: float
    aim: float | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """One row. Sizes as in the public layout; S of None is T, K of None is H.

    Attributes:
        peers: whom it is compared with; `more_peers` are added in the full form (slow, or of less interest).
        in_short: whether the short form has this row.
        timed, memory: whether its time, and the peak memory of a process that runs it, are measured.
        full_size: False once `at_length` made it smaller; its targets then no longer apply.
    """

    suite: str
    label: str
    pattern: Pattern
    T: int
    S: int
    B: int = 1
    H: int = 8
    K: int = 8
    D: int = 64
    dtype: Literal["float32", "bfloat16"] = "float32"
    kind: Kind = "forward"
    peers: tuple[str, ...] = ()
    more_peers: tuple[str, ...] = ()
    targets: tuple[Target, ...] = ()
    in_short: bool = True
    timed: bool = True
    memory: bool = False
    full_size: bool = True

    @property
    def name(self) -> str:
        return f"{self.suite}/{self.label}"

    @property
    def title(self) -> str:
        """The row in words, with the sizes that are really used."""
        work = {"forward": "forward", "gradient": "forward + backward", "dispatch": "eager call"}[self.kind]
        sizes = [f"T {self.T}"] + ([f"S {self.S}"] if self.S != self.T else []) + [f"H {self.H}"]
        sizes += [f"K {self.K}"] if self.K != self.H else []
        return f"{work} {self.pattern}, B {self.B}, {', '.join(sizes)}, D {self.D}, {self.dtype}"

    def target(self, against: str) -> Target | None:
        """Return the target against a system or quantity, or None where there is none at this size."""
        return next((target for target in self.targets if target.against == against and self.full_size), None)

    def at_length(self, length: int | None) -> Case:
        """Return the row with no sequence longer than `length`; its window shrinks in proportion."""
        longest = max(self.T, self.S)
        if length is None or longest <= length:
            return self
        window = self.pattern.window and max(1, self.pattern.window * length // longest)
        pattern = dataclasses.replace(self.pattern, window=window)
        return dataclasses.replace(self, T=min(self.T, length), S=min(self.S, length), pattern=pattern, full_size=False)


_CAUSAL = Pattern(causal=True)


def _square(suite: str, label: str, T: int, pattern: Pattern = _CAUSAL, **rest: Any) -> Case:
    return Case(suite, label, pattern, T, T, **rest)


def _forward(T: int, D: int, dtype: Literal["float32", "bfloat16"], *targets: Target) -> Case:
    short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    ceilings = ("matmul",) if dtype == "float32" else ("matmul", "matmul_f32")
    rest: dict[str, Any] = {"D": D, "dtype": dtype, "targets": targets, "in_short": bool(targets)}
    return _square("forward", f"causal_t{T}_d{D}_{short}", T, peers=(*DENSE_PEERS, *ceilings), **rest)


def _backward(T: int, *targets: Target) -> Case:
    return _square("backward", f"causal_t{T}", T, kind="gradient", peers=(*DENSE_PEERS, "matmul"), targets=targets)


def _sparse(label: str, pattern: Pattern, at_most: float) -> Case:
    """A row against our own causal attention; in the full form against the peers that can do it at all."""
    targets, more = (Target(OWN_CAUSAL, at_most),), ("torch", "jax_nn", "ej_flash")
    return _square("sparse", label, 16384, pattern, peers=(OWN_CAUSAL, "matmul"), more_peers=more, targets=targets)


def _decode(label: str, B: int, *targets: Target, **rest: Any) -> Case:
    peers = (*DENSE_PEERS, "torch_folded", "read")
    return Case("decode", label, Pattern(lengths=True), 1, 16384, B=B, H=32, K=8, peers=peers, targets=targets, **rest)


def _scaling(T: int) -> Case:
    peers = ("jax_nn", "ej_flash", "torch")
    return _square("scaling", f"causal_t{T}", T, peers=peers, memory=True, in_short=T in (1024, 4096, 16384))


def _dispatch(label: str, pattern: Pattern, *targets: Target) -> Case:
    return _square("dispatch", label, 16, pattern, kind="dispatch", peers=("jax_nn",), targets=targets)


CASES: tuple[Case, ...] = (
    _forward(2048, 64, "float32", Target("jax_nn", 0.30), Target("torch", 1.05)),
    _forward(4096, 64, "float32", Target("jax_nn", 0.20), Target("torch", 1.0, aim=0.85)),
    _forward(2048, 128, "float32"),
    _forward(4096, 128, "float32", Target("jax_nn", 0.30), Target("torch", 1.0)),
    _forward(2048, 64, "bfloat16"),
    _forward(4096, 64, "bfloat16", Target("jax_nn", 0.12), Target("torch", 0.75, aim=0.6)),
    _forward(2048, 128, "bfloat16"),
    _forward(4096, 128, "bfloat16"),
    _backward(2048, Target("jax_nn", 0.30), Target("torch", 1.2)),
    _backward(4096, Target("jax_nn", 0.20), Target("torch", 1.1, aim=1.0)),
    _sparse("window512_t16384", Pattern(causal=True, window=512), 0.15),
    _sparse("documents16_even_t16384", Pattern(causal=True, documents=16), 0.20),
    _sparse("documents16_uneven_t16384", Pattern(causal=True, documents=16, even=False), 0.20),
    _sparse("blocks9_static_t16384", Pattern(blocks=0.09, static=True), 0.30),
    _sparse("blocks9_runtime_t16384", Pattern(blocks=0.09), 0.30),
    _decode("s16384_b1", 1, Target("jax_nn", 0.5), Target("torch", 1.2)),
    _decode("s16384_b4", 4),
    _decode("s16384_b1_bf16", 1, dtype="bfloat16", in_short=False),
    *(_scaling(2**power) for power in range(9, 17)),
    _square(
        "scaling",
        "window1024_t65536_gradient",
        65536,
        Pattern(causal=True, window=1024),
        H=4,
        K=4,
        kind="gradient",
        targets=(Target(PEAK, 3e9),),
        timed=False,
        memory=True,
    ),
    _dispatch("causal_t16", _CAUSAL, Target(OVERHEAD, 150e-6)),
    _dispatch("documents_t16", Pattern(causal=True, documents=4)),
)


def find_case(name: str) -> Case:
    """Return the row of that name."""
    return next(case for case in CASES if case.name == name)


def select(
    suites: Sequence[str] = (), rows: Sequence[str] = (), short: bool = False, length: int | None = None
) -> tuple[Case, ...]:
    """Return the rows of the suites whose names match a pattern of `rows`; no suites or no rows means all.

    The short form leaves out rows and peers; the full form has `more_peers` among the peers.
    """
    chosen = []
    for case in CASES:
        if (suites and case.suite not in suites) or (short and not case.in_short):
            continue
        if rows and not any(fnmatch.fnmatch(case.name, row) for row in rows):
            continue
        is_beyond = length is not None and length < case.T and case.suite == "scaling" and case.pattern.is_plain
        if is_beyond and any(earlier.suite == "scaling" for earlier in chosen):
            continue  # the points of a curve are not made equal, but left out
        peers = case.peers if short else (*case.peers, *case.more_peers)
        chosen.append(dataclasses.replace(case, peers=peers, more_peers=()).at_length(length))
    return tuple(chosen)
