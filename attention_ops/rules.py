"""The limits of routes, as data.

A rule looks at the spec of a request, the metadata and the device, and answers None or a `Reason`: one sentence with both
numbers, and the remedy where there is one. Write a rule of your own as a frozen dataclass with a `check` of the same
signature; `describe` is its line in the support matrix.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from jax.export import is_symbolic_dim

from attention_ops.device import DeviceProfile, dotted
from attention_ops.features import Feature
from attention_ops.masks import Causal, Lengths, Segments, Window
from attention_ops.metadata import OperationMetadata
from attention_ops.request import RequestSpec


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a route cannot take a request, and what would change that."""

    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.remedy})" if self.remedy else self.text


@runtime_checkable
class Rule(Protocol):
    """A limit of a route."""

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None: ...

    def describe(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """The runtime dtype is one of `names`."""

    names: tuple[str, ...]

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        if str(spec.dtype) in self.names:
            return None
        return Reason(f"dtype {spec.dtype} is not one of {', '.join(self.names)}", f"set runtime_dtype={self.names[0]}")

    def describe(self) -> str:
        return f"dtype {' or '.join(self.names)}"


@dataclasses.dataclass(frozen=True)
class DtypeNotOn:
    """The runtime dtype is not `name` on `platform`, where the kernel's products do not exist in it."""

    name: str
    platform: str

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        if str(spec.dtype) != self.name or device.platform != self.platform:
            return None
        return Reason(f"dtype {self.name} on {self.platform}, where the kernel has no {self.name} products")

    def describe(self) -> str:
        return f"no {self.name} on {self.platform}"


@dataclasses.dataclass(frozen=True)
class HeadDim:
    """Query and value head dims lie in [minimum, maximum] and are multiples of `multiple_of`.

    `maximum_from` raises the maximum on newer devices: pairs of a compute capability and the maximum from there on.
    """

    minimum: int = 1
    maximum: int | None = None
    multiple_of: int = 1
    maximum_from: tuple[tuple[tuple[int, int], int], ...] = ()

    def _maximum(self, device: DeviceProfile) -> int | None:
        limit = self.maximum
        for capability, larger in self.maximum_from:
            if device.compute_capability is not None and device.compute_capability >= capability:
                limit = larger
        return limit

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        limit = self._maximum(device)
        for name, dim in (("head_dim", spec.D), ("value head_dim", spec.Dv)):
            if limit is not None and dim > limit:
                on = f" on compute capability {dotted(device.compute_capability)}" if device.compute_capability else ""
                return Reason(f"{name} {dim} > {limit}, the limit{on}")
            if dim < self.minimum:
                return Reason(f"{name} {dim} < {self.minimum}, the minimum")
            if dim % self.multiple_of:
                return Reason(
                    f"{name} {dim} is not a multiple of {self.multiple_of}",
                    f"pad to {-(-dim // self.multiple_of) * self.multiple_of} with softmax_scale={spec.D}**-0.5",
                )
        return None

    def describe(self) -> str:
        parts = [f"head dim <= {self.maximum}"] if self.maximum else []
        parts += [f"<= {larger} from compute capability {dotted(c)}" for c, larger in self.maximum_from]
        parts += [f">= {self.minimum}"] if self.minimum > 1 else []
        parts += [f"a multiple of {self.multiple_of}"] if self.multiple_of > 1 else []
        return ", ".join(parts) or "any head dim"


@dataclasses.dataclass(frozen=True)
class MinQueryLength:
    """The query is at least `minimum` rows long."""

    minimum: int

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        return Reason(f"query length {spec.T} < {self.minimum}, the minimum") if self.minimum > spec.T else None

    def describe(self) -> str:
        return f"query length >= {self.minimum}"


@dataclasses.dataclass(frozen=True)
class LengthMultiple:
    """Query and key length are multiples of `multiple_of`."""

    multiple_of: int

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        for name, length in (("query length", spec.T), ("key length", spec.S)):
            if length % self.multiple_of:
                return Reason(
                    f"{name} {length} is not a multiple of {self.multiple_of}",
                    f"pad to {-(-length // self.multiple_of) * self.multiple_of} and pass q_lengths and kv_lengths",
                )
        return None

    def describe(self) -> str:
        return f"lengths a multiple of {self.multiple_of}"


@dataclasses.dataclass(frozen=True)
class SelfAttentionMask:
    """A mask of positions needs T == S, so that no row is empty and no key hidden from all."""

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        if spec.mask is None or spec.T == spec.S:
            return None
        return Reason(
            f"query length {spec.T} != key length {spec.S} under {spec.mask}, which can leave rows empty or keys hidden"
        )

    def describe(self) -> str:
        return "T == S if causal or windowed"


@dataclasses.dataclass(frozen=True)
class LeftWindowOnly:
    """A window ends at the query: its right size is 0, or the request is causal."""

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        if Feature.WINDOW not in spec.features or Feature.CAUSAL in spec.features or spec.mask is None:
            return None
        windows = [part for part in spec.mask.conjuncts() if isinstance(part, Window)]
        right = min((window.right for window in windows if window.right is not None), default=None)
        if right == 0:
            return None
        found = "None (no end)" if right is None else right
        return Reason(f"window right size {found} != 0 without causal masking", "pass causal=True, or a right size of 0")

    def describe(self) -> str:
        return "a window has right size 0 or is causal"


@dataclasses.dataclass(frozen=True)
class EvenLengthsInTraining:
    """Query and key length are even where gradients are taken."""

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        if not spec.differentiable or (spec.T % 2 == 0 and spec.S % 2 == 0):
            return None
        return Reason(
            f"query length {spec.T}, key length {spec.S}: training needs both even",
            "pad by one and pass q_lengths and kv_lengths, or pass differentiable=False",
        )

    def describe(self) -> str:
        return "even lengths in training"


@dataclasses.dataclass(frozen=True)
class ComputeCapability:
    """NVIDIA compute capability of at least `minimum`."""

    minimum: tuple[int, int]

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        found = device.compute_capability
        if found is None:
            return Reason(f"{device.name} reports no compute capability, {dotted(self.minimum)} is needed")
        if found < self.minimum:
            return Reason(f"compute capability {dotted(found)} < {dotted(self.minimum)}, the minimum")
        return None

    def describe(self) -> str:
        return f"compute capability >= {dotted(self.minimum)}"


@dataclasses.dataclass(frozen=True)
class CudnnVersion:
    """cuDNN is installed, in at least version `minimum`; `minimum_for` asks more of one compute capability."""

    minimum: tuple[int, ...]
    minimum_for: tuple[tuple[tuple[int, int], tuple[int, ...]], ...] = ()

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        if device.cudnn_version is None:
            return Reason(f"no cuDNN found, {dotted(self.minimum)} is needed", "pip install 'attention-ops[cuda]'")
        needed = dict(self.minimum_for).get(device.compute_capability or (0, 0), self.minimum)
        if device.cudnn_version < needed:
            on = f" on compute capability {dotted(device.compute_capability or ())}" if needed != self.minimum else ""
            return Reason(f"cuDNN {dotted(device.cudnn_version)} < {dotted(needed)}, the minimum{on}", "upgrade nvidia-cudnn")
        return None

    def describe(self) -> str:
        extra = "".join(f", >= {dotted(v)} on compute capability {dotted(c)}" for c, v in self.minimum_for)
        return f"cuDNN >= {dotted(self.minimum)}{extra}"


@dataclasses.dataclass(frozen=True)
class JaxVersion:
    """JAX in at least version `minimum`."""

    minimum: tuple[int, ...]

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        if device.jax_version >= self.minimum:
            return None
        return Reason(f"JAX {dotted(device.jax_version)} < {dotted(self.minimum)}, the minimum", "upgrade jax")

    def describe(self) -> str:
        return f"JAX >= {dotted(self.minimum)}"


@dataclasses.dataclass(frozen=True)
class ValueHeadDim:
    """A value head dim other than the query's needs newer hardware and cuDNN (multi-head latent attention)."""

    capability: tuple[int, int]
    cudnn: tuple[int, ...]

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        if spec.Dv == spec.D:
            return None
        dims, remedy = f"value head_dim {spec.Dv} != head_dim {spec.D}", "pad both to one head_dim with softmax_scale stated"
        found = device.compute_capability or (0, 0)
        if found < self.capability:
            return Reason(f"{dims} on compute capability {dotted(found)} < {dotted(self.capability)}, the minimum", remedy)
        if (device.cudnn_version or ()) < self.cudnn:
            version = dotted(device.cudnn_version or ()) or "not found"
            return Reason(f"{dims} with cuDNN {version}, {dotted(self.cudnn)} is needed", "upgrade nvidia-cudnn, or " + remedy)
        return None

    def describe(self) -> str:
        return f"value head dim = head dim below compute capability {dotted(self.capability)} or cuDNN {dotted(self.cudnn)}"


@dataclasses.dataclass(frozen=True)
class StaticBatch:
    """The batch size is a number, not a symbolic dimension of `jax.export`; where `beside_data`, if the mask is run-time data."""

    beside_data: bool = False

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        if not is_symbolic_dim(spec.B) or (self.beside_data and (spec.mask is None or spec.mask.is_static)):
            return None
        beside = " beside a mask of run-time data" if self.beside_data else ""
        return Reason(f"batch size {spec.B} is symbolic{beside}, the kernel needs a number", "export once for each batch size")

    def describe(self) -> str:
        return f"batch size is a number{' if the mask is run-time data' if self.beside_data else ''}"


@dataclasses.dataclass(frozen=True)
class PrivateFunction:
    """A function outside another package's public interface is still what the route calls.

    `function` and `names` are dotted names; `parameters` are those that the route passes by name.
    """

    function: str
    parameters: tuple[str, ...]
    names: tuple[str, ...] = ()

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        problem = _changed(self.function, self.parameters, self.names)
        return Reason(problem, "install a version of jax that attention_ops allows") if problem else None

    def describe(self) -> str:
        return f"{self.function} as it is called here"


@functools.lru_cache(maxsize=256)
def _changed(function: str, parameters: tuple[str, ...], names: tuple[str, ...]) -> str:
    """Return what has changed about a function, or nothing."""
    package = f"{function.partition('.')[0]} {_version(function.partition('.')[0])}"
    try:
        for name in names:
            pkgutil.resolve_name(name)
        found = inspect.signature(pkgutil.resolve_name(function)).parameters
    except Exception as error:  # a private module may raise anything while it is imported
        return f"{package} has no {function} as it was ({type(error).__name__}: {error})"
    if missing := [name for name in parameters if name not in found]:
        return f"{package}: {function} has no parameter {missing[0]!r}, which this route passes"
    required = [p.name for p in found.values() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if unknown := [name for name in required if name not in parameters]:
        return f"{package}: {function} needs a parameter {unknown[0]!r}, which this route does not know"
    return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(version unknown)"


@dataclasses.dataclass(frozen=True)
class RequiresAttribute:
    """A module has an attribute that a kernel calls, where a request needs that kernel: for `feature`, and without `unless`."""

    module: str
    attribute: str
    user: str
    feature: Feature
    unless: Feature

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        if self.feature not in spec.features or self.unless in spec.features:
            return None
        try:
            if hasattr(importlib.import_module(self.module), self.attribute):
                return None
            problem = f"{self.module} has no {self.attribute} in {self._package()}"
        except ImportError as error:
            problem = f"{self.module} cannot be imported ({error})"
        return Reason(f"{problem}, which {self.user} calls, the one for {self.feature.value} without {self.unless.value}")

    def _package(self) -> str:
        package = self.module.partition(".")[0]
        return f"{package} {_version(package)}"

    def describe(self) -> str:
        return f"{self.module}.{self.attribute}, which {self.user} calls, for {self.feature.value} without {self.unless.value}"


@dataclasses.dataclass(frozen=True)
class NotBeside:
    """A request with `feature`, and without `unless`, has none of `others`."""

    feature: Feature
    unless: Feature
    others: tuple[Feature, ...]
    why: str

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        found = [other.value for other in self.others if other in spec.features]
        if self.feature not in spec.features or self.unless in spec.features or not found:
            return None
        return Reason(f"{self.feature.value} together with {' and '.join(found)}, without {self.unless.value}: {self.why}")

    def describe(self) -> str:
        return (
            f"no {' or '.join(other.value for other in self.others)} beside {self.feature.value}, unless with {self.unless.value}"
        )


@dataclasses.dataclass(frozen=True)
class MaskInKernel:
    """Without a bias, into which any mask can go, the mask is one the kernel knows itself.

    That is causal masks and windows from offset 0, lengths, and one pair of segment ids. Windows need as many queries as keys.
    """

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        if spec.mask is None or Feature.BIAS in spec.features:
            return None
        unknown = self._unknown(spec)
        if not unknown:
            return None
        return Reason(f"{' and '.join(unknown)} without a bias: the kernel would need it as an array [B, H, T, S]")

    def _unknown(self, spec: RequestSpec) -> list[str]:
        unknown, segments = [], 0
        for part in spec.mask.conjuncts() if spec.mask is not None else ():
            if isinstance(part, Segments):
                segments += 1
                known = segments == 1
            elif isinstance(part, Window):
                known = isinstance(part.offset, int) and part.offset == 0 and spec.T == spec.S
            else:
                known = isinstance(part, Lengths) or (
                    isinstance(part, Causal) and isinstance(part.offset, int) and part.offset == 0
                )
            unknown += [] if known else [str(part)]
        return unknown

    def describe(self) -> str:
        return "without a bias: masks are causal or windows (T == S) from offset 0, lengths, one pair of segment ids"


@dataclasses.dataclass(frozen=True)
class OnlyBeside:
    """`feature` is taken only together with `other`."""

    feature: Feature
    other: Feature
    why: str

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        if self.feature not in spec.features or self.other in spec.features:
            return None
        return Reason(f"{self.feature.value} without {self.other.value}: {self.why}")

    def describe(self) -> str:
        return f"{self.feature.value} only with {self.other.value}"


@dataclasses.dataclass(frozen=True)
class TpuBlocks:
    """Block sizes are multiples of `lanes`, and a tile takes at most `tile_bytes` in `dtype`, the runtime dtype if None.

    That limit is for head dims up to `lanes`, and proportionally less for wider ones: blocks of query, key and value lie in the
    same vector memory.
    """

    tile_bytes: int
    dtype: str | None = None
    lanes: int = 128

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        given = {"q": metadata.block_sizes.q, "kv": metadata.block_sizes.kv}
        for name, size in given.items():
            if size is not None and size % self.lanes:
                whole = -(-size // self.lanes) * self.lanes
                return Reason(f"block_sizes.{name} {size} is not a multiple of {self.lanes}", f"use {whole}, or None to choose")
        sizes = zip(given.values(), (spec.T, spec.S), strict=True)
        q, kv = (min(size or self.lanes, self._whole(length)) for size, length in sizes)
        wide, dtype = max(spec.D, spec.Dv), np.dtype(self.dtype or spec.dtype)
        found = q * kv * dtype.itemsize * self._whole(wide) // self.lanes
        if found <= self.tile_bytes:
            return None
        return Reason(
            f"block_sizes {q} x {kv} take {found >> 10} KiB of vector memory in {dtype} with head_dim {wide}, "
            f"more than {self.tile_bytes >> 10} KiB",
            "use smaller ones, or None to choose",
        )

    def _whole(self, size: int) -> int:
        return -(-size // self.lanes) * self.lanes

    def describe(self) -> str:
        return f"block sizes multiples of {self.lanes}, at most {self.tile_bytes >> 20} MiB a tile"


@dataclasses.dataclass(frozen=True)
class Requires:
    """A package is installed."""

    package: str
    install: str

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        if importlib.util.find_spec(self.package) is not None:
            return None
        return Reason(f"the package {self.package} is not installed", f"pip install {self.install}")

    def describe(self) -> str:
        return f"package {self.package}"


@dataclasses.dataclass(frozen=True)
class SoftmaxDtype:
    """The softmax dtype is the route's own, which cannot be changed."""

    name: str = "float32"

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        if str(spec.softmax_dtype) == self.name:
            return None
        return Reason(f"softmax dtype {spec.softmax_dtype} is asked for, the kernel's is {self.name}")

    def describe(self) -> str:
        return f"softmax in {self.name}"


@dataclasses.dataclass(frozen=True)
class On:
    """A rule that holds on one platform only."""

    platform: str
    rule: Rule

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        return self.rule.check(spec, metadata, device) if device.platform == self.platform else None

    def describe(self) -> str:
        return f"{self.rule.describe()} on {self.platform}"


@dataclasses.dataclass(frozen=True)
class SharedMemory:
    """The tiles of the kernel fit the shared memory of the device.

    `needed` returns the bytes that a program takes, with the tiles that the kernel would choose for the device.
    """

    needed: Callable[..., int]

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        blocks, limit = metadata.block_sizes, device.shared_memory
        sizes = (spec.T, spec.S, spec.D, spec.Dv, spec.dtype.itemsize)
        needed = self.needed(*sizes, limit, blocks.q, blocks.kv, spec.differentiable)
        if needed <= limit:
            return None
        return Reason(
            f"the smallest tiles at head dims {spec.D} and {spec.Dv} in {spec.dtype} take {needed} bytes of shared memory "
            f"> {limit}, what a program may use on {device.name}"
        )

    def describe(self) -> str:
        return "tiles that fit the shared memory"


@dataclasses.dataclass(frozen=True)
class BiasDtype:
    """A bias has the runtime dtype, because the kernel would round it to that."""

    def check(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Reason | None:
        if spec.bias_dtype is None or spec.bias_dtype == spec.dtype:
            return None
        return Reason(
            f"bias dtype {spec.bias_dtype} != runtime dtype {spec.dtype}, to which it would be rounded",
            f"cast the bias to {spec.dtype}",
        )

    def describe(self) -> str:
        return "bias in the runtime dtype"
