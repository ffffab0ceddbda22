"""What the planner knows of a device: the one at hand, or one that is not here."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib.metadata
import os
import platform
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

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
    when there is no cuDNN. `notes` says what could not be read, in sentences. A profile can be made by hand for a device that is
    not at hand.
    """

    name: str
    platform: Platform
    compute_capability: tuple[int, int] | None = None
    memory: int | None = None
    cudnn_version: tuple[int, ...] | None = None
    jax_version: tuple[int, ...] = dataclasses.field(default_factory=lambda: version_tuple(jax.__version__))
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.platform not in BACKENDS:
            raise ValueError(f"platform is {self.platform!r}; allowed are {', '.join(sorted(BACKENDS))}")

    @property
    def backends(self) -> tuple[str, ...]:
        return BACKENDS[self.platform]

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that one program of a GPU may use; for a device that is not known, what the least has."""
        if self.platform == "rocm":
            return 64 * 1024
        known = (size * 1024 for size, capabilities in _SHARED_MEMORY.items() if self.compute_capability in capabilities)
        return next(known, LEAST_SHARED_MEMORY)

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
        """Return the profile that calls are planned for when nothing else decides.

        That is the device of `compiling_for`, or else JAX's default device. Never fails: what cannot be read is a note, and
        where JAX cannot start at all the profile is that of the CPU. With `platform`, the first device of that platform.

        Raises:
            RuntimeError: there is no device of `platform` here.
        """
        if platform is not None:
            return describe(_first_of(platform))
        return _ASSUMED.value or _default()


_ASSUMED = jax.make_user_context(None)  # a part of the key under which JAX keeps traced programs


@contextlib.contextmanager
def compiling_for(device: DeviceProfile | JaxDevice | str) -> Iterator[DeviceProfile]:
    """Plan the calls that are made, or traced, inside for another device: to lower a model for one that is not here.

    >>> import attention_ops
    >>> q = jax.ShapeDtypeStruct((1, 256, 2, 64), "float32")
    >>> def model(q):
    ...     return attention_ops.attention(q, q, q, impl="flash").attention_outputs
    >>> with compiling_for("tpu-v5e"):
    ...     lowered = jax.jit(model).trace(q).lower(lowering_platforms=("tpu",))
    """
    profile = as_profile(device)
    with _ASSUMED(profile):
        yield profile


def is_assumed() -> bool:
    """Return whether `compiling_for` decides the device of a call that is planned now."""
    return _ASSUMED.value is not None


_PROBED: contextvars.ContextVar[DeviceProfile | None] = contextvars.ContextVar("attention_ops.cudnn_probes", default=None)


@contextlib.contextmanager
def cudnn_probes(device: DeviceProfile) -> Iterator[None]:
    """Let JAX's cuDNN module take the machine for `device` inside, in this thread: it asks for version and capability."""
    if device.platform != "cuda":
        yield
        return
    _install_probes()
    token = _PROBED.set(device)
    try:
        yield
    finally:
        _PROBED.reset(token)


@functools.cache
def _install_probes() -> None:
    """Put functions in the place of JAX's that answer for the device of `cudnn_probes`, and outside of it as those do."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    def version(device: DeviceProfile) -> int:
        major, minor, patch = (*(device.cudnn_version or ()), 0, 0, 0)[:3]
        return major * 10000 + minor * 100 + patch

    answers: dict[str, Callable[..., Any]] = {
        "check_cudnn_version": version,
        "check_compute_capability": lambda device, minimum: (device.compute_capability or (0, 0)) >= version_tuple(minimum),
        "is_cuda_compute_capability_equal": lambda device, wanted: device.compute_capability == version_tuple(wanted),
    }

    def answering(own: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(own)(lambda *asked: own(*asked) if (device := _PROBED.get()) is None else answer(device, *asked))

    for name, answer in answers.items():
        setattr(cudnn, name, answering(getattr(cudnn, name), answer))


def cudnn_of_assumed() -> contextlib.AbstractContextManager[None]:
    """Return a context in which JAX's cuDNN module takes the machine for the device of `compiling_for`, if there is one."""
    return contextlib.nullcontext() if _ASSUMED.value is None else cudnn_probes(_ASSUMED.value)


def _first_of(platform: str) -> JaxDevice:
    try:
        return jax.devices(platform)[0]
    except RuntimeError as error:
        raise RuntimeError(
            f"there is no {platform} device here ({_first_line(error)}); to plan for one name it, as in device='a100', "
            "and to compile for one use attention_ops.compiling_for"
        ) from error


def _default() -> DeviceProfile:
    """Return the profile of JAX's default device: that of `jax.default_device`, or the first."""
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return _describe_here(jax.devices(chosen)[0] if chosen is None or isinstance(chosen, str) else chosen)
    except Exception as error:  # a broken plug-in may raise anything
        why = f"JAX cannot start its devices, so this is the profile of the CPU ({_first_line(error)})"
        return DeviceProfile("cpu", "cpu", notes=(why,))


@functools.lru_cache(maxsize=8)
def _describe_here(device: JaxDevice) -> DeviceProfile:
    """Return the profile of the default device, with notes on the machine around it."""
    profile = describe(device)
    return dataclasses.replace(profile, notes=(*profile.notes, *_other_kinds(device), *_idle_plugins(device)))


def _other_kinds(device: JaxDevice) -> list[str]:
    kinds = list(dict.fromkeys(str(one.device_kind) for one in jax.local_devices(backend=device.platform)))
    if len(kinds) < 2:
        return []
    return [
        f"there are {len(kinds)} kinds of device here ({', '.join(kinds)}) and this is the profile of the {device.device_kind}; "
        "calls on arrays that lie on another are planned for that one"
    ]


_PLUGINS = {"jax-cuda13-plugin": "NVIDIA GPU", "jax-cuda12-plugin": "NVIDIA GPU", "jax-rocm7-plugin": "AMD GPU", "libtpu": "TPU"}


def _idle_plugins(device: JaxDevice) -> list[str]:
    """Say which installed plug-ins found nothing; a machine whose user chose the platforms needs no telling."""
    if device.platform != "cpu" or jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        return []
    return [
        f"{package} {version} is installed, but JAX finds no {kind}: its driver is missing or does not fit"
        for package, kind in _PLUGINS.items()
        if (version := _installed(package))
    ]


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@functools.lru_cache(maxsize=64)
def describe(device: JaxDevice) -> DeviceProfile:
    """Return the profile of one JAX device. What cannot be read is None, with a note."""
    if device.platform == "cpu":
        return DeviceProfile("cpu", "cpu")
    notes: list[str] = []
    kind = str(device.device_kind)
    memory = _read("memory", notes, lambda: int(device.memory_stats()["bytes_limit"]))
    if device.platform == "tpu":
        return DeviceProfile(kind, "tpu", memory=memory, notes=tuple(notes))
    version = _read("platform version", notes, lambda: str(device.client.platform_version).lower()) or ""
    if "rocm" in version:
        return DeviceProfile(kind, "rocm", memory=memory, notes=tuple(notes))
    if device.platform not in ("gpu", "cuda"):
        notes.append(f"JAX calls the platform {device.platform!r}, which is not known here; it is planned as the CPU is")
        return DeviceProfile(kind, "cpu", memory=memory, notes=tuple(notes))
    capability = _read("compute capability", notes, lambda: _pair(device.compute_capability))
    return DeviceProfile(kind, "cuda", capability, memory, _cudnn_version(), notes=tuple(notes))


_Fact = TypeVar("_Fact")


def _read(name: str, notes: list[str], read: Callable[[], _Fact]) -> _Fact | None:
    try:
        return read()
    except Exception as error:  # drivers and plug-ins may raise anything
        notes.append(f"the {name} of the device cannot be read ({type(error).__name__}: {_first_line(error)})")
        return None


def _pair(capability: Any) -> tuple[int, int]:
    major, minor = version_tuple(str(capability))
    return major, minor


def _cudnn_version() -> tuple[int, ...] | None:
    """Return the version that JAX loads, or else that of the package that brings it."""
    with contextlib.suppress(Exception):  # private: it may be missing, or fail where the library is
        from jax._src.lib import cuda_versions

        found = int(cuda_versions.cudnn_get_version())  # pyright: ignore[reportOptionalMemberAccess]
        return found // 10000, found // 100 % 100, found % 100
    version = _installed("nvidia-cudnn-cu13") or _installed("nvidia-cudnn-cu12")
    return version_tuple(version)[:3] if version else None


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": the most shared memory per thread block, in KiB.
# AMD's CDNA 3 has 64 KiB of local data share.
_SHARED_MEMORY = {
    64: ((7, 5),),
    96: ((7, 0), (7, 2)),
    99: ((8, 6), (8, 9), (12, 0), (12, 1)),
    163: ((8, 0), (8, 7)),
    227: ((9, 0), (10, 0), (10, 3), (11, 0)),
}
LEAST_SHARED_MEMORY = 99 * 1024
"""What every NVIDIA device since compute capability 8.0 has, in bytes."""


# Compute capabilities: NVIDIA's table "CUDA GPU Compute Capability" (developer.nvidia.com/cuda-gpus). Memory: the data sheets of
# NVIDIA (of the V100 and the A100 the larger of two models) and AMD, and Google Cloud's page on TPU versions, per chip. cuDNN
# 9.10.1 is the version of the measurements that the planner is checked against; override it for another.
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
    if isinstance(device, str):
        return DeviceProfile.named(device)
    if not hasattr(device, "platform"):
        raise TypeError(f"device is {device!r:.60}; allowed are a name as 'a100', a DeviceProfile, a device of JAX, and None")
    return describe(device)


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
