"""Block sizes that `attention-ops tune` has measured on this machine: what is kept, and which request it is for.

They stand in one file of `attention_ops.storage`. Nothing here measures: `attention_ops.bench.tune` does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import jax

import attention_ops
from attention_ops import storage
from attention_ops.device import DeviceProfile, cores, processor
from attention_ops.features import Feature
from attention_ops.metadata import BlockSizes, OperationMetadata
from attention_ops.operation import Route
from attention_ops.request import RequestSpec

FILE = "block_sizes"
Work = Literal["forward", "gradient"]
Key = tuple[str, str, str, str, str]

_TILE_WORK = (
    *(Feature.MASK, Feature.CAUSAL, Feature.WINDOW, Feature.SEGMENTS, Feature.LENGTHS, Feature.OFFSET),
    *(Feature.BIAS, Feature.SOFT_CAP),
)
"""What changes the work inside a tile. The rest of a request is in the sizes, or costs the same whatever the tiles are."""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The sizes that won for one kind of request.

    Attributes:
        machine, versions, route, request: what it was measured for; see `machine_of`, `versions` and `request_of`.
        work: "forward", or "gradient" for forward and backward together.
        q, kv: the block sizes, as candidates: `fitted` evens them out for the lengths of a call.
        ratio: median of its time over that of the default rule in the same round.
        date: the day it was measured, ISO 8601.
    """

    machine: str
    versions: str
    route: str
    request: str
    work: Work
    q: int
    kv: int
    ratio: float
    date: str

    def __post_init__(self) -> None:
        for name in ("machine", "versions", "route", "request", "date"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} is {getattr(self, name)!r}; allowed is text")
        BlockSizes(self.q, self.kv)  # judges them
        if self.work not in get_args(Work):
            raise ValueError(f"work is {self.work!r}; allowed are {', '.join(get_args(Work))}")
        if not (isinstance(self.ratio, float) and self.ratio > 0):
            raise ValueError(f"ratio is {self.ratio!r}; allowed is a number above 0")

    @property
    def key(self) -> Key:
        return self.machine, self.versions, self.route, self.request, self.work

    @property
    def note(self) -> str:
        """What plans say of it."""
        what = "forward" if self.work == "forward" else "forward and backward"
        return f"tuned on {self.date} by `attention-ops tune`: {self.ratio:.2f} of the default's time, {what}"


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """All that is kept. Compared by identity, so that plans can be cached by it."""

    kept: Mapping[Key, Tuned]

    def find(self, route: str, spec: RequestSpec, device: DeviceProfile) -> Tuned | None:
        """Return what was measured for such a request on the device at hand, or None.

        A request that may be differentiated takes sizes measured with the backward, else those of the forward.
        """
        if not self.kept or 0 in (spec.B, spec.T, spec.S):
            return None
        facts = (machine_of(device), versions(), route, request_of(spec))
        wanted: tuple[Work, ...] = ("gradient", "forward") if spec.differentiable else ("forward",)
        return next((self.kept[(*facts, work)] for work in wanted if (*facts, work) in self.kept), None)


def _read(content: Mapping[str, Any]) -> Table:
    """Return the table that the file holds."""
    found = storage.entries(FILE, content, Tuned, "attention-ops tune")
    return Table({one.key: one for one in found})


_watched = storage.Watched(FILE, _read)
table = _watched.table
default_rule = _watched.ignored
"""Plan calls made, or traced, inside as if nothing had been tuned."""


def keep(found: Iterable[Tuned] = (), *, dropped: Iterable[Key] = ()) -> None:
    """Add to what is kept, in place of what was measured for the same before, and take away what is `dropped`.

    What other processes have kept meanwhile stays.

    Raises:
        OSError: the folder cannot be written.
    """
    new, gone = {one.key: one for one in found}, set(dropped)

    def change(content: dict[str, Any]) -> dict[str, Any]:
        kept = {key: one for key, one in _read(content).kept.items() if key not in gone} | new
        return {"kept": [dataclasses.asdict(kept[key]) for key in sorted(kept)]}

    storage.update(FILE, change)


def machine_of(device: DeviceProfile) -> str:
    """Return what tells machines apart: the kind of the device; of a CPU, the processor and the cores this process may use."""
    return f"{processor()}, {cores()} cores" if device.platform == "cpu" else device.name


def versions() -> str:
    """Return the versions that a measurement holds for: another kernel or compiler may prefer other sizes."""
    return f"attention_ops {attention_ops.__version__}, jax {jax.__version__}"


def request_of(spec: RequestSpec) -> str:
    """Return the kind of request that shares its block sizes: lengths and the visible share of T * S up to powers of two.

    Batch and heads are left out, but for the query heads per key/value head. The visible share is what is known while planning.
    """
    work = [feature.name.lower() for feature in _TILE_WORK if feature in spec.features]
    lengths = f"T {_power_of_two(spec.T)}, S {_power_of_two(spec.S)}, D {spec.D}, Dv {spec.Dv}"
    return ", ".join([lengths, f"groups {spec.groups}", str(spec.dtype), *work, f"visible {_share(spec.visible_fraction())}"])


def _power_of_two(length: int) -> int:
    return 1 << (length - 1).bit_length()


def _share(fraction: float) -> str:
    return "nothing" if fraction == 0 else f"1/{2 ** round(-math.log2(fraction))}"


def fitted(sizes: BlockSizes, T: int, S: int) -> BlockSizes:
    """Return block sizes evened out over the lengths, so that few rows are padding: as many blocks, none larger.

    >>> fitted(BlockSizes(512, 1024), T=2100, S=900)
    BlockSizes(q=424, kv=900)
    """
    return BlockSizes(_even(sizes.q, T), _even(sizes.kv, S))


def admitted(
    sizes: BlockSizes, route: Route, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile
) -> BlockSizes | None:
    """Return the sizes that a route is given for a request: fitted, or as they are where its rules want that; None if neither."""
    for tried in (fitted(sizes, spec.T, spec.S), sizes):
        if not route.refusals(spec, dataclasses.replace(metadata, block_sizes=tried), device):
            return tried
    return None


def _even(size: int | None, length: int) -> int | None:
    if size is None or size >= length:
        return size if size is None else length
    blocks = -(-length // size)
    return min(size, -(-length // (blocks * 8)) * 8)
