"""What the planner knows of a device: the one at hand, or one that is not here."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import platform
import re
from typing import Any, Literal

import jax

from attention_ops.errors import closest_first

Platform = Literal["cpu", "cuda", "rocm", "tpu"]
GIB = 1024**3
JaxDevice = Any  # a jax.Device, whose name type checkers take for a variable

BACKENDS: dict[str, tuple[str, ...]] = {
    "cuda": ("cuda", "gpu", "native"),
    "rocm": ("rocm", "gpu", "native"),
    "tpu": ("tpu", "native"),
    "cpu": ("cpu", "native"),
}
"""The forwards tried on each platform, in order."""


def version_tuple(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: "9.10.1.4" gives (9, 10, 1, 4)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:4])


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@dataclasses.dataclass(frozen=True)
class DeviceProfile:
    """The facts about a device that rules ask for.

    `compute_capability` is NVIDIA's (major, minor); `memory` is in bytes; `cudnn_version` is None
    when there is no cuDNN. A profile can be made by hand for a device that is not at hand.
    """

    name: str
    platform: Platform
    compute_capability: tuple[int, int] | None = None
    memory: int | None = None
    cudnn_version: tuple[int, ...] | None = None
    jax_version: tuple[int, ...] = dataclasses.field(default_factory=lambda: version_tuple(jax.__version__))

    def __post_init__(self) -> None:
        if self.platform not in BACKENDS:
            raise ValueError(f"platform is {self.platform!r}; allowed are {', '.join(sorted(BACKENDS))}")

    @property
    def backends(self) -> tuple[str, ...]:
        return BACKENDS[self.platform]

    def __str__(self) -> str:
        facts = [self.platform] if self.platform != self.name else []
        if self.compute_capability:
            facts.append(f"compute capability {dotted(self.compute_capability)}")
        if self.platform == "cuda":
            facts.append(f"cuDNN {dotted(self.cudnn_version)}" if self.cudnn_version else "no cuDNN")
        return f"{self.name} ({', '.join(facts)})" if facts else self.name

    @staticmethod
    def named(name: str, **overrides: Any) -> DeviceProfile:
        """Return the profile of a known kind of device; keyword arguments replace fields (`cudnn_version=(9, 5, 0)`)."""
        key = name.lower().replace("_", "-")
        if key not in _NAMED:
            raise ValueError(f"device {name!r} is not known; known are {', '.join(closest_first(key, _NAMED))}")
        return dataclasses.replace(_NAMED[key], **overrides)

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the names that `named` knows."""
        return tuple(_NAMED)

    @staticmethod
    def current(platform: str | None = None) -> DeviceProfile:
        """Read the profile of JAX's first device, or of its first device of `platform`."""
        return _current(platform)


@functools.lru_cache(maxsize=8)
def _current(platform: str | None) -> DeviceProfile:
    device = jax.devices(platform)[0] if platform else jax.devices()[0]
    return describe(device)


@functools.lru_cache(maxsize=64)
def describe(device: JaxDevice) -> DeviceProfile:
    """Return the profile of one JAX device."""
    if device.platform == "gpu":
        return _describe_gpu(device)
    if device.platform == "tpu":
        return DeviceProfile(name=device.device_kind, platform="tpu")
    return DeviceProfile(name="cpu", platform="cpu")


def _describe_gpu(device: JaxDevice) -> DeviceProfile:
    version = device.client.platform_version.lower()
    if "rocm" in version:
        return DeviceProfile(name=device.device_kind, platform="rocm")
    capability = version_tuple(str(getattr(device, "compute_capability", "")))
    return DeviceProfile(
        name=device.device_kind,
        platform="cuda",
        compute_capability=(capability[0], capability[1]) if len(capability) == 2 else None,
        memory=(device.memory_stats() or {}).get("bytes_limit"),
        cudnn_version=_cudnn_version(),
    )


def _cudnn_version() -> tuple[int, ...] | None:
    for package in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        try:
            return version_tuple(importlib.metadata.version(package))[:3]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


# Compute capabilities: NVIDIA's table of CUDA GPUs. Memory: the vendors' data sheets. cuDNN 9.10.1 is the version of the
# measurements that the planner is checked against; override it for another.
_CUDNN = (9, 10, 1)
_NAMED = {
    profile.name: profile
    for profile in (
        DeviceProfile("cpu", "cpu"),
        DeviceProfile("t4", "cuda", (7, 5), 16 * GIB, _CUDNN),
        DeviceProfile("v100", "cuda", (7, 0), 32 * GIB, _CUDNN),
        DeviceProfile("a100", "cuda", (8, 0), 80 * GIB, _CUDNN),
        DeviceProfile("l4", "cuda", (8, 9), 24 * GIB, _CUDNN),
        DeviceProfile("rtx4090", "cuda", (8, 9), 24 * GIB, _CUDNN),
        DeviceProfile("h100", "cuda", (9, 0), 80 * GIB, _CUDNN),
        DeviceProfile("h200", "cuda", (9, 0), 141 * GIB, _CUDNN),
        DeviceProfile("b200", "cuda", (10, 0), 180 * GIB, _CUDNN),
        DeviceProfile("mi300x", "rocm", None, 192 * GIB),
        DeviceProfile("tpu-v4", "tpu", None, 32 * GIB),
        DeviceProfile("tpu-v5e", "tpu", None, 16 * GIB),
        DeviceProfile("tpu-v5p", "tpu", None, 95 * GIB),
        DeviceProfile("tpu-v6e", "tpu", None, 32 * GIB),
    )
}


def as_profile(device: DeviceProfile | JaxDevice | str | None) -> DeviceProfile:
    """Return the profile that a user's `device=` names: None is the device at hand."""
    if device is None:
        return DeviceProfile.current()
    if isinstance(device, DeviceProfile):
        return device
    return DeviceProfile.named(device) if isinstance(device, str) else describe(device)


def cores() -> int:
    """Return the processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def processor() -> str:
    """Return the name of the processor here."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
