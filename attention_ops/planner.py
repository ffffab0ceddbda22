"""Which route runs, and why each other one does not. Planning looks at specs only: no array is touched."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

from jax.export import is_symbolic_dim

from attention_ops import registry, tuning, verdicts
from attention_ops.device import BACKENDS, DeviceProfile
from attention_ops.errors import NoRouteError, UnknownOperationError
from attention_ops.metadata import BlockSizes, OperationMetadata
from attention_ops.operation import Estimate, OperationImpl, Route
from attention_ops.request import RequestSpec
from attention_ops.rules import Reason
from attention_ops.sharding import layout, local_spec, sequence_devices


class Chain(tuple[str, ...]):
    """Names that are to be tried, in order, and no others: the declared fallbacks are left out, even of a single name."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and tuple.__eq__(self, other)

    def __hash__(self) -> int:
        return hash((Chain, *self))


@dataclasses.dataclass(frozen=True)
class Decision:
    """One candidate route: accepted, or refused with all its reasons."""

    route: str
    reasons: tuple[Reason, ...] = ()

    @property
    def accepted(self) -> bool:
        return not self.reasons


@dataclasses.dataclass(frozen=True)
class Plan:
    """The route for one request. Print it for a table that can be pasted into a bug report.

    Attributes:
        requested: the names asked for, in order.
        operation, route: what runs, for example "blocksparse" and "blocksparse/native".
        device: the profile planned for.
        decisions: every candidate route in order.
        block_sizes: what the route is given: those of the metadata, else tuned ones, else None for the kernel to choose.
        notes: remarks on the choice, among them where the name came from.
        estimate: flops and temporary bytes of the forward, where the operation states them and the batch size is a number.
        spec: the facts of the request; with a mesh, of one device's part of it.
        way: over a sequence axis of the mesh, see `sharding`: the one that was planned with.
    """

    requested: tuple[str, ...]
    operation: str
    route: str
    device: DeviceProfile
    decisions: tuple[Decision, ...]
    block_sizes: BlockSizes
    notes: tuple[str, ...]
    estimate: Estimate | None
    spec: RequestSpec = dataclasses.field(repr=False)
    implementation: type[OperationImpl] = dataclasses.field(repr=False)
    way: str = "gather"

    @property
    def is_fallback(self) -> bool:
        """Whether one name was asked for and another operation runs."""
        return not _is_chain(self.requested) and not _is_asked_for(self.requested[0], self.operation, self.way)

    @functools.cached_property
    def reasons(self) -> str:
        """The refusals before the chosen route, one line each."""
        lines = []
        for decision in self.decisions:
            if decision.accepted:
                break
            lines += [f"  {decision.route}: {reason}" for reason in decision.reasons]
        return "\n".join(lines)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the class of the operation, or its name where it cannot be imported: it must then be registered there too."""
        state = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return state if _can_be_imported(self.implementation) else state | {"implementation": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if state["implementation"] is None:
            self.__dict__["implementation"] = registry.OperationRegistry.get(self.operation)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, ready for JSON."""
        return {
            "requested": list(self.requested),
            "operation": self.operation,
            "route": self.route,
            "device": str(self.device),
            "decisions": [
                {
                    "route": decision.route,
                    "accepted": decision.accepted,
                    "reasons": [{"text": reason.text, "remedy": reason.remedy} for reason in decision.reasons],
                }
                for decision in self.decisions
            ],
            "block_sizes": dataclasses.asdict(self.block_sizes),
            "notes": list(self.notes),
            "flops": self.estimate.flops if self.estimate else None,
            "temporary_bytes": self.estimate.temporary_bytes if self.estimate else None,
        }

    def __str__(self) -> str:
        s = self.spec
        needs = ", ".join(feature.name.lower() for feature in sorted(s.features)) or "nothing special"
        lines = [
            f"{' > '.join(self.requested)} on {self.device} runs {self.route}",
            f"  request  B {s.B}, T {s.T}, S {s.S}, H {s.H}, K {s.K}, D {s.D}, Dv {s.Dv}, {s.dtype}; needs {needs}",
        ]
        if s.mask is not None:
            lines.append(f"  mask     {s.mask}")
        lines += _table(self)
        if self.estimate:
            lines.append(
                f"  forward  about {self.estimate.flops / 1e9:.3g} GFLOP, "
                f"{self.estimate.temporary_bytes / 2**20:.3g} MiB of temporary memory"
            )
        return "\n".join([*lines, *(f"  note     {note}" for note in self.notes)])


def _can_be_imported(cls: type) -> bool:
    return getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls


def _table(plan: Plan) -> list[str]:
    width = max(len(decision.route) for decision in plan.decisions)
    lines = []
    for decision in plan.decisions:
        verdict = "runs" if decision.route == plan.route else "could run"
        if decision.accepted:
            lines.append(f"  {decision.route:<{width}}  {verdict}")
        for index, reason in enumerate(decision.reasons):
            lines.append(f"  {decision.route if not index else '':<{width}}  {'no: ' if not index else '    '}{reason}")
    return lines


def _is_chain(requested: tuple[str, ...]) -> bool:
    return len(requested) > 1 or isinstance(requested, Chain)


def _is_asked_for(requested: str, operation: str, way: str) -> bool:
    cls, _ = registry.OperationRegistry.resolve(requested)
    return cls.name == operation or (not cls.routes and way in cls.over_sequence)


def make_plan(
    requested: tuple[str, ...],
    spec: RequestSpec,
    metadata: OperationMetadata,
    device: DeviceProfile,
    source: str = "",
) -> Plan:
    """Plan a request. One name is followed by its declared fallbacks; several names, or a `Chain`, are all that is tried.

    A name is an operation ("flash"), an alias, or a single route ("flash/native"). A route that failed the selftest on such a
    device is refused. Cached, until an operation is registered, block sizes are tuned or verdicts are saved.

    Raises:
        UnknownOperationError: a name is not registered.
        NoRouteError: every candidate refused; the message has all reasons.
        ValueError: as `layout`, of a way over the mesh, and there is no other.
    """
    return _make_plan(requested, spec, metadata, device, source, registry.generation(), tuning.table(), verdicts.table())


@functools.lru_cache(maxsize=4096)
def _make_plan(
    requested: tuple[str, ...],
    spec: RequestSpec,
    metadata: OperationMetadata,
    device: DeviceProfile,
    source: str,
    generation: int,
    tuned: tuning.Table,
    proven: verdicts.Table,
) -> Plan:
    decisions: list[Decision] = []
    problems: list[ValueError] = []
    chosen: tuple[type[OperationImpl], Route, RequestSpec, str] | None = None
    backends = backends_for(metadata, device)
    for name, way in _expand(requested, spec, metadata, device):
        local, problem = _split(spec, metadata, way)
        if problem is not None:
            problems.append(problem)
            blocked = (Reason(str(problem)),)
        else:
            blocked = () if metadata.mesh is None else tuple(Reason(text) for text in layout(spec, metadata, way).refusals)
        operation, routes = _routes(name, backends)
        if not routes:
            found = ", ".join(operation.routes) or "none"
            decisions.append(Decision(name, (Reason(f"has no route for {device.platform}, only for {found}"),)))
        for route in routes:
            if any(decision.accepted and decision.route == route.name for decision in decisions):
                continue  # it can go an earlier way
            failed = proven.refusal(route.name, device)
            reasons = blocked if problem else (*blocked, *route.refusals(local, metadata, device))
            decision = Decision(route.name, reasons if failed is None else (*reasons, failed))
            if decision not in decisions:  # another way over the mesh may be refused for the same reasons
                decisions.append(decision)
            if chosen is None and decision.accepted:
                chosen = operation, route, local, way
    if chosen is None:
        if problems:
            raise problems[0]
        lines = [f"  {d.route}: {reason}" for d in decisions for reason in d.reasons]
        headline = f"no route of {' > '.join(requested)} takes this request on {device}:"
        raise NoRouteError("\n".join([headline, *lines]), tuple(decisions))
    operation, route, local, way = chosen
    sizes, remarks = _tuned_sizes(route, local, metadata, device, tuned)
    with_sizes = dataclasses.replace(metadata, block_sizes=sizes)
    return Plan(
        requested=requested,
        operation=operation.name,
        route=route.name,
        device=device,
        decisions=tuple(decisions),
        block_sizes=sizes,
        notes=(*_notes(spec, metadata, source, way), *remarks, *device.notes),
        estimate=None if is_symbolic_dim(local.B) else operation.estimate(local, with_sizes),
        spec=local,
        implementation=operation,
        way=way,
    )


def _tuned_sizes(
    route: Route, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile, tuned: tuning.Table
) -> tuple[BlockSizes, tuple[str, ...]]:
    """Return the block sizes of a request and what is to be said of them. Any that the metadata states win over tuned ones."""
    stated = metadata.block_sizes
    if stated != BlockSizes() or not route.declaration.block_sizes:
        return stated, ()
    found = tuned.find(route.name, spec, device)
    sizes = None if found is None else tuning.admitted(BlockSizes(found.q, found.kv), route, spec, metadata, device)
    if found is None or sizes is None:
        return stated, ()
    return sizes, (f"block sizes ({sizes.q}, {sizes.kv}) {found.note}",)


def backends_for(metadata: OperationMetadata, device: DeviceProfile) -> tuple[str, ...]:
    """Return the forwards to look for, in order."""
    backend = metadata.backend
    if backend is None:
        return device.backends
    return BACKENDS.get(backend) or (("gpu", "native") if backend == "gpu" else ("native",))


def _expand(
    requested: tuple[str, ...], spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile
) -> tuple[tuple[str, str], ...]:
    """Return the names to try, each with the way to go over a sequence axis of the mesh."""
    names: list[tuple[str, str]] = []
    for name in requested:
        operation, backend = registry.OperationRegistry.resolve(name)
        if operation.routes and (_is_chain(requested) or backend):
            names.append((name, "gather"))
            continue
        for way in operation.over_sequence:
            names += [(found, way) for found in _candidates(operation, _split(spec, metadata, way)[0], metadata, device)]
        if not operation.routes and not _is_chain(requested):
            names += [(found, "gather") for found in operation.fallback]
    if sequence_devices(metadata) == 1:  # then all ways are one
        ways = dict(reversed(names))
        names = [(name, ways[name]) for name, _ in names]
    return tuple(dict.fromkeys(names))


def _split(spec: RequestSpec, metadata: OperationMetadata, way: str) -> tuple[RequestSpec, ValueError | None]:
    """Return one device's part; or the whole request, and why it is not to be split that way."""
    try:
        if metadata.mesh is not None:
            layout(spec, metadata, way)
    except ValueError as error:
        return spec, error
    return local_spec(spec, metadata, way), None


def _candidates(
    operation: type[OperationImpl], spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile
) -> tuple[str, ...]:
    found = operation.candidates(spec, metadata, device)
    for name in found:
        try:
            registry.OperationRegistry.resolve(name)
        except UnknownOperationError as error:
            raise UnknownOperationError(f"{operation.name} falls back on {name!r}: {error}") from None
    return found


def _routes(name: str, backends: tuple[str, ...]) -> tuple[type[OperationImpl], list[Route]]:
    operation, backend = registry.OperationRegistry.resolve(name)
    if backend:
        backends = tuple(found for found in backends if found == backend)
    return operation, [operation.routes[found] for found in backends if found in operation.routes]


def _notes(spec: RequestSpec, metadata: OperationMetadata, source: str, way: str) -> tuple[str, ...]:
    notes = [f"name chosen by {source}"] if source else []
    if metadata.mesh is not None:
        split = layout(spec, metadata, way)
        notes += [f"the mesh splits {split}; the request above is one device's part", *split.notes]
    if 0 in (spec.B, spec.T, spec.S):
        notes.append("an axis is empty, so no kernel runs and the output is zeros")
    return tuple(notes)
