"""What the selftest found out on this machine, so that a route that failed here is refused until it passes.

The verdicts stand in one file of `attention_ops.storage`; `python -m attention_ops.selftest --save` writes them. A verdict holds
for one kind of device and one set of package versions, and says nothing of others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jaxlib

import attention_ops
from attention_ops import storage
from attention_ops.device import DeviceProfile, processor
from attention_ops.rules import Reason

FILE = "verdicts"
Key = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What one run found out about one route.

    Attributes:
        machine, versions: what it holds for; see `machine_of` and `versions`.
        route: "flash/native".
        passed: whether every case was as the law has it.
        proof: the kind of proof.
        full, seed: the settings of the run.
        reason: of a failure, its first in a sentence.
        date: the day of the run, ISO 8601.
    """

    machine: str
    versions: str
    route: str
    passed: bool
    proof: str
    full: bool
    seed: int
    reason: str
    date: str

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, wanted = getattr(self, field.name), {"bool": bool, "int": int, "str": str}[str(field.type)]
            if type(value) is not wanted:
                raise TypeError(f"{field.name} is {value!r}; allowed is {wanted.__name__}")

    @property
    def key(self) -> Key:
        return self.machine, self.versions, self.route

    @property
    def rerun(self) -> str:
        """The command whose success takes a failure back."""
        words = ["python -m attention_ops.selftest --op", self.route.partition("/")[0]]
        words += ["--full"] if self.full else []
        return " ".join([*words, *([f"--seed {self.seed}"] if self.seed else []), "--save"])

    def replaces(self, old: Verdict | None) -> bool:
        """Whether this one counts over an older one. A failure does; a pass of a failure's own run, or of a larger one, does."""
        return old is None or old.passed or not self.passed or (self.full >= old.full and self.seed == old.seed)


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """All that is kept. Compared by identity, so that plans can be cached by it."""

    kept: Mapping[Key, Verdict]

    def refusal(self, route: str, device: DeviceProfile) -> Reason | None:
        """Return why a route that failed on such a device is not to be used there."""
        found = self.kept.get((machine_of(device), versions(), route)) if self.kept else None
        if found is None or found.passed:
            return None
        return Reason(f"failed the selftest for this device on {found.date}: {found.reason}", f"once it passes: {found.rerun}")


def _read(content: Mapping[str, Any]) -> Table:
    """Return the table that the file holds."""
    found = storage.entries(FILE, content, Verdict, "python -m attention_ops.selftest --save")
    return Table({verdict.key: verdict for verdict in found})


_watched = storage.Watched(FILE, _read)
table = _watched.table
ignored = _watched.ignored
"""Plan calls made, or traced, inside as if nothing had failed: for the selftest itself."""


def keep(found: Iterable[Verdict]) -> tuple[Verdict, ...]:
    """Add to what is kept, and return the older failures that a pass of a smaller run does not take back.

    Raises:
        OSError: the folder cannot be written.
    """
    new, standing = tuple(found), dict[Key, Verdict]()

    def change(content: dict[str, Any]) -> dict[str, Any]:
        kept = dict(_read(content).kept)
        for verdict in new:
            old = kept.get(verdict.key)
            if verdict.replaces(old):
                kept[verdict.key] = verdict
            elif old is not None:
                standing[old.key] = old
        return {"kept": [dataclasses.asdict(kept[key]) for key in sorted(kept)]}

    storage.update(FILE, change)
    return tuple(standing.values())


def machine_of(device: DeviceProfile) -> str:
    """Return what tells kinds of device apart: its facts; of a CPU, the processor."""
    return f"cpu ({processor()})" if device.platform == "cpu" else str(device)


def versions() -> str:
    """Return the versions that a verdict holds for."""
    return f"attention_ops {attention_ops.__version__}, jax {jax.__version__}, jaxlib {jaxlib.__version__}"
