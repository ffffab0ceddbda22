"""A request to plan for, and what the planner answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from attention_ops import api, sharding
from attention_ops.cli import saying
from attention_ops.cli.lazy import Refused, refusals
from attention_ops.cli.parameters import layers_of
from attention_ops.config import AttentionConfig, load_config
from attention_ops.device import DeviceProfile
from attention_ops.errors import NoRouteError
from attention_ops.metadata import OperationMetadata
from attention_ops.planner import Decision, Plan
from attention_ops.request import RequestSpec, make_request


@dataclasses.dataclass(frozen=True)
class Question:
    """A call, not made: query, key and value as shapes, and who names the operation when nobody asks for another.

    `layer` is the number or kind of the layer, where the request is a config's.
    """

    arrays: tuple[Any, Any, Any]
    options: Mapping[str, Any]
    metadata: OperationMetadata = OperationMetadata()
    default: tuple[str, ...] = ("auto",)
    source: str = "default"
    layer: str | int | None = None

    def on_mesh(self, axes: tuple[tuple[str, int], ...]) -> Question:
        """Return the question for a mesh of these axes, of devices that need not be here."""
        names, sizes = zip(*axes, strict=True)
        mesh = jax.sharding.AbstractMesh(sizes, names)
        return dataclasses.replace(self, metadata=dataclasses.replace(self.metadata, mesh=mesh))

    def ask(self, names: tuple[str, ...] | None, device: DeviceProfile) -> Answer:
        """Plan it. Names given win over all else, as those of a call do."""
        spec = make_request(*self.arrays, self.options, self.metadata).spec
        try:
            if names is not None:
                impl = names[0] if len(names) == 1 else names
                plan = api.plan(impl, *self.arrays, device=device, metadata=self.metadata, **self.options)
            else:
                plan = api.plan_dispatch(
                    *self.arrays, self.options, self.metadata, device, default=self.default, source=self.source
                )
        except NoRouteError as error:
            return Answer(
                names or self.default, device, spec, self, None, str(error).splitlines()[0].rstrip(":"), error.decisions
            )
        split = None if self.metadata.mesh is None else sharding.layout(spec, self.metadata, plan.way)
        return Answer(plan.requested, device, plan.spec, self, plan, _headline(plan), plan.decisions, spec, split)


@dataclasses.dataclass(frozen=True)
class Answer:
    """A plan, or that there is none; with every candidate's verdict either way."""

    names: tuple[str, ...]
    device: DeviceProfile
    spec: RequestSpec
    question: Question
    plan: Plan | None
    headline: str
    decisions: tuple[Decision, ...]
    whole: RequestSpec | None = None
    split: sharding.Layout | None = None

    def placements(self) -> list[dict[str, Any]]:
        """Return where the arrays lie on the mesh: each with its `PartitionSpec` and the shape of one device's part."""
        if self.whole is None or self.split is None:
            return []
        mesh = self.question.metadata.mesh
        found = []
        for name, (shape, spec) in sharding.array_specs(self.whole, self.split).items():
            local = jax.sharding.NamedSharding(mesh, spec).shard_shape(shape)
            found.append({"array": name, "shape": list(shape), "spec": str(spec), "local": list(local)})
        return found

    def transfers(self) -> list[dict[str, Any]]:
        """Return what every device receives over the sequence axes."""
        if self.whole is None or self.split is None:
            return []
        return [dataclasses.asdict(transfer) for transfer in sharding.transfers(self.whole, self.split)]

    @property
    def runs(self) -> bool:
        """Whether a call would run: there is a route, and the policy lets a fallback be taken if it is one."""
        return self.plan is not None and not (self.plan.is_fallback and self.question.metadata.fallback == "error")

    def facts(self) -> dict[str, str]:
        """Return the request in words."""
        s = self.spec
        needs = ", ".join(feature.name.lower() for feature in sorted(s.features))
        facts = {"layer": "" if self.question.layer is None else str(self.question.layer)}
        facts["request"] = f"B {s.B}, T {s.T}, S {s.S}, H {s.H}, K {s.K}, D {s.D}, Dv {s.Dv}, {s.dtype}"
        facts |= {"needs": needs or "nothing special", "mask": "" if s.mask is None else str(s.mask)}
        return {name: text for name, text in facts.items() if text}

    def notes(self) -> tuple[str, ...]:
        """Return the plan's notes, and what a call would say."""
        if self.plan is None or not self.plan.is_fallback:
            return () if self.plan is None else self.plan.notes
        said = {
            "warn": f"{self.names[0]} cannot take this request; a call warns once and runs {self.plan.route}",
            "silent": f"{self.names[0]} cannot take this request; the fallback policy is 'silent'",
            "error": "the fallback policy is 'error', so a call raises NoRouteError",
        }
        return (*self.plan.notes, said[self.question.metadata.fallback])

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain values: those of `Plan.to_dict`, the request, and whether a call would run."""
        none = {"operation": None, "route": None, "flops": None, "temporary_bytes": None}
        plan = none if self.plan is None else self.plan.to_dict()
        sizes = {name: getattr(self.spec, name) for name in ("B", "T", "S", "H", "K", "D", "Dv")}
        mask = None if self.spec.mask is None else str(self.spec.mask)
        needs = [feature.name for feature in sorted(self.spec.features)]
        return {
            "runs": self.runs,
            "layer": self.question.layer,
            **plan,
            "requested": list(self.names),
            "device": str(self.device),
            "request": {**sizes, "dtype": str(self.spec.dtype), "needs": needs, "mask": mask},
            "decisions": [
                {"route": d.route, "accepted": d.accepted, "reasons": [dataclasses.asdict(reason) for reason in d.reasons]}
                for d in self.decisions
            ],
            "notes": list(self.notes()),
            "mesh": {"arrays": self.placements(), "transfers": self.transfers()},
        }


def _headline(plan: Plan) -> str:
    return f"{' > '.join(plan.requested)} on {plan.device} runs {plan.route}"


# ---------------------------------------------------------------- questions

_INSTEAD = {
    "kv": "--length T,S",
    "layer": "--shape and --set",
    "batch": "--shape",
    "length": "--shape and --kv",
}


def of_said(said: Mapping[str, Any]) -> list[Question]:
    """Return the requests that the parameters of a command say, by the names those have in `parameters`."""
    config, shape = said["config_file"], said["shape"]
    if (config is None) == (shape is None):
        which = "found both" if config else "found neither"
        raise Refused(f"a request is --config FILE or --shape B,T,H,D, {which}; for example --shape 1,4096,8,128")
    for option in ("kv",) if config else ("layer", "batch", "length"):
        if said[option] is not None:
            raise Refused(f"--{option} goes with {'--shape' if config else '--config'}; use {_INSTEAD[option]}")
    common = {"settings": said["settings"], "dtype": said["dtype"], "backend": said.get("backend")}
    with refusals():
        if shape is not None:
            asked = [of_shape(shape, said["kv"], **common)]
        else:
            asked = of_config(config, said["layer"], said["batch"], said["length"], **common)
    axes = said.get("mesh")
    return asked if axes is None else [question.on_mesh(axes) for question in asked]


def of_shape(
    shape: tuple[int, ...], kv: tuple[int, ...] | None, *, settings: tuple[str, ...], dtype: str | None, backend: str | None
) -> Question:
    """Return the request that shapes and settings say."""
    dtype = dtype or "bfloat16"
    arrays = saying.arrays(shape, kv, dtype)
    return Question(arrays, saying.options(settings, saying.Sizes.of(*arrays), dtype), OperationMetadata(backend=backend))


def of_config(
    path: str,
    layer: str | None,
    batch: int | None = None,
    lengths: tuple[int, ...] | None = None,
    *,
    settings: tuple[str, ...] = (),
    dtype: str | None = None,
    backend: str | None = None,
) -> list[Question]:
    """Return the requests of a config: of the layer named, or of one layer of each kind. What is said wins over the config."""
    config = load_config(path)
    return [_of_layer(config, at, batch or 1, lengths, settings, dtype, backend) for at in layers_of(config, layer)]


def _of_layer(
    config: AttentionConfig,
    layer: str | int | None,
    batch: int,
    lengths: tuple[int, ...] | None,
    settings: tuple[str, ...],
    dtype: str | None,
    backend: str | None,
) -> Question:
    attend = config.build(layer)
    query, key, value = config.shapes(batch, lengths[0] if lengths else None, layer, dtype)
    if lengths and len(lengths) == 2:
        key, value = (jax.ShapeDtypeStruct((batch, lengths[1], *array.shape[2:]), array.dtype) for array in (key, value))
    sinks = ("softmax_aux=H",) if attend.facts.sinks and not any(text.startswith("softmax_aux") for text in settings) else ()
    said = saying.options((*settings, *sinks), saying.Sizes.of(query, key, value), str(query.dtype))
    options = {**attend.options, **said}
    chunks = attend.options.get("mask")
    if chunks is not None:  # as in a call: a mask comes on top of the config's chunks
        options["mask"] = chunks if said.get("mask") is None else chunks & said["mask"]
    changes = {"runtime_dtype": dtype, "backend": backend}
    metadata = dataclasses.replace(attend.metadata, **{name: value for name, value in changes.items() if value is not None})
    return Question((query, key, value), options, metadata, attend.operation, attend.source, layer)
