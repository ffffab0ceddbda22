"""What an operation is: a name, and one forward per backend, each with its own declaration of what it supports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, Unpack

from attention_ops.derivatives import Derivatives
from attention_ops.device import DeviceProfile
from attention_ops.features import Feature
from attention_ops.metadata import BACKEND_NAMES, OperationMetadata, as_metadata
from attention_ops.request import AttentionOptions, AttentionOutput, AttentionRequest, RequestSpec
from attention_ops.rules import Reason, Rule

if TYPE_CHECKING:
    from attention_ops.planner import Plan

Forward = TypeVar("Forward", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Declaration:
    """What one forward takes: features beyond plain query, key and value, within the limits of the rules.

    `because` says of some features why they are not supported, for refusals to repeat.

    `derivatives`: which it has, if it supports gradients. One with a custom backward, which most kernels have, has gradients
    only; one in plain JAX operations has `Derivatives.ANY`. A mapping states them by dtype; a dtype not in it has gradients.

    `block_sizes`: the forward takes its tiles from `metadata.block_sizes`, so they can be tuned.

    How it can be proven without its device: `interpretable` forwards are Pallas kernels that honour
    `kernels.interpreter.is_interpreted`; `lowers_to` begins the names of the custom calls that it is lowered to.
    """

    supports: frozenset[Feature] = frozenset()
    rules: tuple[Rule, ...] = ()
    derivatives: Derivatives | Mapping[str, Derivatives] = dataclasses.field(default=Derivatives.GRADIENT, hash=False)
    block_sizes: bool = False
    interpretable: bool = False
    lowers_to: str = ""
    because: Mapping[Feature, str] = dataclasses.field(default_factory=dict, hash=False)

    def derivatives_of(self, dtype: Any) -> Derivatives:
        """Return the derivatives for inputs of a dtype."""
        found = self.derivatives
        return found if isinstance(found, Derivatives) else found.get(str(dtype), Derivatives.GRADIENT)


@dataclasses.dataclass(frozen=True)
class Route:
    """One forward of one operation."""

    operation: str
    backend: str
    declaration: Declaration

    @property
    def name(self) -> str:
        return f"{self.operation}/{self.backend}"

    @property
    def method(self) -> str:
        return f"forward_{self.backend}"

    def refusals(self, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> tuple[Reason, ...]:
        """Return every reason why this route cannot take the request; none means that it can."""
        reasons = [self._missing(feature) for feature in sorted(spec.features - self.declaration.supports)]
        for rule in self.declaration.rules:
            reason = rule.check(spec, metadata, device)
            if reason is not None:
                reasons.append(reason if isinstance(reason, Reason) else Reason(str(reason)))
        return tuple(reasons)

    def _missing(self, feature: Feature) -> Reason:
        why = self.declaration.because.get(feature)
        return Reason(f"does not support {feature.value}{f': {why}' if why else ''}", _REMEDIES.get(feature, ""))


_REMEDIES = {Feature.GRADIENT: "pass differentiable=False where no gradient is taken"}


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far a route may be from the float64 reference: multiples of the error of the plain computation in its dtype."""

    forward: float = 4.0
    gradient: float = 6.0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a route is expected to cost in the forward: floating point operations, and bytes beyond inputs and outputs."""

    flops: int
    temporary_bytes: int


def forward(
    *,
    supports: Iterable[Feature] = (),
    rules: Sequence[Rule] = (),
    derivatives: Derivatives | Mapping[str, Derivatives] = Derivatives.GRADIENT,
    block_sizes: bool = False,
    interpretable: bool = False,
    lowers_to: str = "",
    because: Mapping[Feature, str] | None = None,
) -> Callable[[Forward], Forward]:
    """Declare what a `forward_<backend>` method supports. Without it a forward takes plain query, key and value only.

    The arguments are the fields of `Declaration`.
    """
    supports, rules, because = frozenset(supports), tuple(rules), dict(because or {})
    for item in supports:
        if not isinstance(item, Feature):
            raise TypeError(f"supports holds {item!r}; allowed are members of Feature")
    for rule in rules:
        if not isinstance(rule, Rule) or isinstance(rule, type):
            raise TypeError(f"rules holds {rule!r}; allowed are instances with check(spec, metadata, device) and describe()")
    for found in derivatives.values() if isinstance(derivatives, Mapping) else (derivatives,):
        if not isinstance(found, Derivatives):
            raise TypeError(f"derivatives is {derivatives!r}; allowed are members of Derivatives, or a mapping of dtypes to them")
    for feature in because:
        if not isinstance(feature, Feature) or feature in supports:
            raise TypeError(f"because holds {feature!r}; allowed are members of Feature that are not in supports")

    def declare(function: Forward) -> Forward:
        function.__dict__["declaration"] = Declaration(
            supports, rules, derivatives, block_sizes, interpretable, lowers_to, because
        )
        return function

    return declare


class OperationImpl:
    """Base of every operation: subclass it, define forwards, register it.

    Class attributes:
        name: the registered name. Letters, digits, `_`, `-` and `.`.
        aliases: other names for it.
        fallback: names of the operations to try, in order, for what this one cannot take.
        tolerance: `Tolerance`, used by the selftest.
        over_sequence: the ways to use a mesh axis of the sequence, in order, see `sharding`; for operations that have no
            forward of their own and only choose.

    A forward takes one `AttentionRequest` and returns an `AttentionOutput`, or just the output array [B, T, H, Dv]. It must
    honour `request.scale`, and is only ever given what its `@forward` declares. It is traced by `jax.jit`.
    """

    name: ClassVar[str] = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    fallback: ClassVar[tuple[str, ...]] = ()
    tolerance: ClassVar[Tolerance] = Tolerance()
    over_sequence: ClassVar[tuple[str, ...]] = ("gather",)
    routes: ClassVar[dict[str, Route]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for attribute in vars(cls):
            backend = attribute.removeprefix("forward_")
            if attribute.startswith("forward_") and backend not in BACKEND_NAMES:
                raise TypeError(
                    f"{cls.__name__}.{attribute} is no forward that any device would run; "
                    f"allowed are {', '.join(f'forward_{name}' for name in BACKEND_NAMES)}"
                )
        cls.routes = {
            backend: Route(cls.name, backend, getattr(getattr(cls, f"forward_{backend}"), "declaration", Declaration()))
            for backend in BACKEND_NAMES
            if hasattr(cls, f"forward_{backend}")
        }

    def __init__(self, metadata: OperationMetadata | None = None):
        self.metadata = as_metadata(metadata)

    def __call__(self, query: Any, key: Any, value: Any, **options: Unpack[AttentionOptions]) -> AttentionOutput:
        """Run attention by this operation, or by the fallback the plan names. Options: `AttentionOptions`."""
        from attention_ops.api import dispatch

        return dispatch(query, key, value, options, self.metadata, default=(self.name,), source="operation")

    def plan(self, query: Any, key: Any, value: Any, *, device: Any = None, **options: Unpack[AttentionOptions]) -> Plan:
        """Return the plan of such a call, without running it."""
        from attention_ops.api import plan_dispatch

        return plan_dispatch(query, key, value, options, self.metadata, device, default=(self.name,), source="operation")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.metadata})"

    @classmethod
    def candidates(cls, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> tuple[str, ...]:
        """Return the operations to try for a request, in order."""
        return (cls.name, *cls.fallback)

    @classmethod
    def estimate(cls, spec: RequestSpec, metadata: OperationMetadata) -> Estimate | None:
        """Return what a forward costs, or None when it is not known."""
        return None

    forward_native: Callable[[AttentionRequest], Any]
    forward_cpu: Callable[[AttentionRequest], Any]
    forward_gpu: Callable[[AttentionRequest], Any]
    forward_cuda: Callable[[AttentionRequest], Any]
    forward_rocm: Callable[[AttentionRequest], Any]
    forward_tpu: Callable[[AttentionRequest], Any]
