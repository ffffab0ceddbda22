"""Model configs: a model's attention geometry and the operation that runs it, from YAML to a callable.

`load_config` reads the file, `AttentionConfig.build` gives one layer's attention, `AttentionConfig.from_hf` reads a Hugging
Face `config.json`. The package loads this module when it is first asked for: pydantic and PyYAML are imported nowhere else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self, SupportsIndex, Unpack

import jax
import pydantic
from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from attention_ops import api, masks
from attention_ops.config_errors import Place, Schema, file_name, indivisible, sentences, shown
from attention_ops.errors import ConfigError, UnknownOperationError, did_you_mean
from attention_ops.metadata import DEFAULT_AXES, FallbackPolicy, OnIndivisible, OperationMetadata
from attention_ops.planner import Chain, Plan
from attention_ops.registry import OperationRegistry
from attention_ops.request import LARGEST, SMALLEST, AttentionOptions, AttentionOutput, as_mask
from attention_ops.yamlio import dump, read

ONE_KIND = "all"
"""The kind of every layer of a config without `layer_types`."""

# ---------------------------------------------------------------- the model


def _operation(value: Any) -> str | tuple[str, ...]:
    names = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"found {shown(value)}; allowed is an operation's name, or a list of names tried in order")
    return names[0] if isinstance(value, str) else names


def _window(value: Any) -> tuple[int | None, int | None] | None:
    sides = (value, value) if isinstance(value, int) else value
    ok = isinstance(sides, list | tuple) and len(sides) == 2
    if value is None or (ok and all(x is None or (type(x) is int and x >= 0) for x in sides)):
        return None if value is None else (sides[0], sides[1])
    raise ValueError(
        f"found {shown(value)}; allowed is [left, right], the keys before and after the query (itself not counted; null: no "
        f"limit), one number for both, or null. Hugging Face's sliding_window n is [n - 1, 0]"
    )


def _names(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _axes(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    for key, axis in value.items():
        if key not in DEFAULT_AXES:
            raise ValueError(f"found the key {key!r}.{did_you_mean(str(key), DEFAULT_AXES)} Allowed: {', '.join(DEFAULT_AXES)}")
        names = [axis] if axis is None or isinstance(axis, str) else axis
        if axis is not None and not (isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)):
            raise ValueError(f"{key}: found {shown(axis)}; allowed is a mesh axis name, a list of names, or null")
    return {key: _names(axis) for key, axis in value.items()}


Count = Annotated[int, Field(ge=1, lt=2**31)]
Positive = Annotated[float, Field(ge=SMALLEST, le=LARGEST)]
Dtype = Literal["float16", "bfloat16", "float32", "float64"]


class _Frozen(pydantic.BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class LayerConfig(_Frozen):
    """The attention of one kind of layer, complete. What an entry of `layer_types` leaves out it takes from the top level."""

    num_heads: Annotated[Count, Field(description="the number of query heads, 1 or more", examples=[32])]
    num_kv_heads: Annotated[Count, Field(description="a whole number that divides num_heads", examples=[8])]
    head_dim: Annotated[Count, Field(description="the width of a query and key head, 1 or more", examples=[64])]
    value_head_dim: Annotated[
        Count | None, Field(description="a whole number of 1 or more, or null: the same as head_dim", examples=[128])
    ] = None
    max_length: Annotated[Count, Field(description="the longest query sequence, 1 or more", examples=[8192])]
    kv_length: Annotated[
        Count | None,
        Field(description="the number of keys where it is fixed (cross attention), or null", examples=[1500]),
    ] = None
    causal: Annotated[bool, Field(description="true or false", examples=["true"])]
    sliding_window: Annotated[tuple[int | None, int | None] | None, BeforeValidator(_window)] = None
    chunk_size: Annotated[
        Count | None, Field(description="a length of 1 or more: positions attend inside their chunk; or null", examples=[8192])
    ] = None
    logits_soft_cap: Annotated[Positive | None, Field(description="a number from 1e-30 to 1e30, or null", examples=[50.0])] = None
    softmax_scale: Annotated[
        Positive | None, Field(description="a number from 1e-30 to 1e30, or null: head_dim ** -0.5", examples=[0.125])
    ] = None
    sinks: Annotated[bool, Field(description="true: each call must bring softmax_aux; or false", examples=["true"])] = False
    operation: Annotated[str | tuple[str, ...], BeforeValidator(_operation)] = "auto"

    @field_validator("num_kv_heads")
    @classmethod
    def _divides(cls, value: int, info: ValidationInfo) -> int:
        heads = info.data.get("num_heads", value)
        if heads % value:
            raise ValueError(f"found {value}, {indivisible('num_heads', heads)}")
        return value

    def options(self) -> dict[str, Any]:
        """Return the call options these facts fix; a fact at its default is left out."""
        chunk = None if self.chunk_size is None else masks.Chunked(self.chunk_size)
        facts = {"causal": self.causal or None, "mask": chunk}
        for name in ("sliding_window", "logits_soft_cap", "softmax_scale"):
            facts[name] = getattr(self, name)
        return {name: value for name, value in facts.items() if value is not None}

    def _reduced(self, num_kv_heads: int, head_dim: int, max_length: int) -> dict[str, Any]:
        kv_heads, length = min(self.num_kv_heads, num_kv_heads), min(self.max_length, max_length)
        shrunk: dict[str, Any] = self.model_dump() | {
            "num_heads": self.num_heads // self.num_kv_heads * kv_heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "max_length": length,
        }
        if self.value_head_dim is not None:
            shrunk["value_head_dim"] = max(8, head_dim * self.value_head_dim // self.head_dim // 8 * 8)
        if self.kv_length is not None:
            shrunk["kv_length"] = max(1, self.kv_length * length // self.max_length)
        if self.sliding_window is not None:
            shrunk["sliding_window"] = tuple(x if x is None else min(x, length // 4) for x in self.sliding_window)
        if self.chunk_size is not None:
            shrunk["chunk_size"] = min(self.chunk_size, max(1, length // 4))
        return shrunk


class AttentionConfig(LayerConfig):
    """A model's attention: the facts every layer shares, what differs between kinds of layers, and how to run it.

    `layer_types` names kinds of layers and says what differs in each; `pattern` lists kinds in layer order and is repeated over
    `num_layers`, `pattern_tail` names what is left over. Lookups: `cfg.layer(3)`, `cfg.layer("local")`, `cfg.layer_kinds`.
    """

    name: Annotated[str, Field(description="text, the model's name", examples=["llama3_2_1b"])]
    source: Annotated[str | None, Field(description="text, where the facts are published", examples=["the model card"])] = None
    num_layers: Annotated[int, Field(ge=1, le=10_000, description="the number of attention layers, 1 to 10000", examples=[16])]
    layer_types: Annotated[
        dict[str, LayerConfig], Field(description="a mapping from kinds of layers to what differs in each")
    ] = {}
    pattern: Annotated[
        tuple[str, ...],
        BeforeValidator(_names),
        Field(validate_default=True, description="a list of names from layer_types", examples=["[local, global]"]),
    ] = ()
    pattern_tail: Annotated[
        tuple[str, ...],
        BeforeValidator(_names),
        Field(validate_default=True, description="a list of names from layer_types", examples=["[local]"]),
    ] = ()
    runtime_dtype: Annotated[
        Dtype | None, Field(description="float16, bfloat16, float32, float64, or null: that of the inputs")
    ] = None
    softmax_dtype: Annotated[
        Literal["float32", "float64"] | None, Field(description="float32, float64, or null: float32 at least")
    ] = None
    block_sizes: Annotated[
        dict[Literal["q", "kv"], Count | None],
        Field(description="a mapping of q and kv to whole numbers", examples=["{q: 512, kv: 512}"]),
    ] = {}
    fallback: Annotated[FallbackPolicy, Field(description="warn, silent or error")] = "warn"
    backend: Annotated[
        Literal["cpu", "cuda", "gpu", "native", "rocm", "tpu"] | None,
        Field(description="cpu, cuda, gpu, native, rocm, tpu, or null: where the arrays are"),
    ] = None
    partition_axis: Annotated[
        dict[str, str | tuple[str, ...] | None] | None,
        BeforeValidator(_axes),
        Field(description="a mapping from array axes to mesh axis names", examples=["{batch_axis: dp, head_axis: tp}"]),
    ] = None
    on_indivisible: Annotated[OnIndivisible, Field(description="replicate or error")] = "replicate"

    @model_validator(mode="before")
    @classmethod
    def _complete_layer_types(cls, data: Any) -> Any:
        kinds = data.get("layer_types") if isinstance(data, Mapping) else None
        if not isinstance(kinds, Mapping):
            return data
        shared = {field: data[field] for field in LayerConfig.model_fields if field in data}
        own = {kind: {} if facts is None else facts for kind, facts in kinds.items()}
        full = {kind: shared | dict(facts) if isinstance(facts, Mapping) else facts for kind, facts in own.items()}
        return {**data, "layer_types": full}

    @field_validator("pattern")
    @classmethod
    def _names_kinds(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        kinds = info.data.get("layer_types")
        if kinds and not value:
            example = f"for example pattern: [{', '.join(kinds)}]"
            raise ValueError(f"layer_types has {', '.join(kinds)}, and nothing says which layer is which; add it, {example}")
        return value if kinds is None else _known_kinds(value, kinds)

    @field_validator("pattern_tail")
    @classmethod
    def _fills_all_layers(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        layers, kinds, pattern = (info.data.get(key) for key in ("num_layers", "layer_types", "pattern"))
        if layers is None or kinds is None or pattern is None:
            return value
        _known_kinds(value, kinds)
        rounds, rest = divmod(layers, len(pattern)) if pattern else (0, 0)
        if rest != len(value):
            left = f"pattern has {len(pattern)} layers and num_layers is {layers}: {rounds} rounds leave {rest} over"
            fix = f"for example pattern_tail: [{', '.join(pattern[:rest])}]" if rest else "remove pattern_tail"
            raise ValueError(f"{left}, and pattern_tail has {len(value)}; {fix}")
        unused = [kind for kind in kinds if kind not in pattern + value]
        if unused:
            raise ValueError(f"no layer is of the kind {unused[0]!r}; name it in pattern, or remove it from layer_types")
        return value

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "config") -> Self:
        """Check `data` and return the config. Every problem found is a line of one ConfigError, headed by `where`."""
        return cls._checked(data, Place(where))

    @classmethod
    def _checked(cls, data: Any, place: Place) -> Self:
        try:
            return cls.model_validate(data)
        except pydantic.ValidationError as error:
            schema = Schema(AttentionConfig.model_fields, LayerConfig.model_fields)
            raise ConfigError("\n".join(sentences(error.errors(include_url=False), data, place, schema))) from None

    @classmethod
    def from_hf(
        cls, source: str | os.PathLike[str] | Mapping[str, Any], *, name: str | None = None, ignore: Iterable[str] = ()
    ) -> Self:
        """Read a Hugging Face `config.json`: a path, the folder that holds it, or its contents.

        The families are `attention_ops.hf.FAMILIES`. A key left out has the default of transformers. A key that is not known and
        could change attention is a ConfigError, unless `ignore` has it; others are named in a warning. `sliding_window` n, which
        counts the query, becomes (n - 1, 0).

        >>> shape = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "max_position_embeddings": 8192}
        >>> cfg = AttentionConfig.from_hf({"model_type": "llama", "num_hidden_layers": 30, **shape}, name="smollm2")
        >>> cfg.head_dim, cfg.build().name, cfg.build().options
        (64, 'auto', {'causal': True})
        """
        from attention_ops import hf

        data, where = hf.convert(source, name, frozenset(ignore))
        return cls.from_dict(data, where)

    def to_yaml(self) -> str:
        """Return the YAML that `load_config` reads back to an equal config. Facts at their default are left out."""
        data = self.model_dump(exclude_defaults=True)
        for kind, facts in self.layer_types.items():
            data["layer_types"][kind] = {field: found for field, found in facts if found != getattr(self, field)}
        first = ("name", "source", "num_layers")
        return dump({field: data[field] for field in dict.fromkeys((*first, *data)) if field in data})

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of layers there are."""
        return tuple(self.layer_types) or (ONE_KIND,)

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each layer, first layer first."""
        pattern = self.pattern or (ONE_KIND,)
        return pattern * (self.num_layers // len(pattern)) + self.pattern_tail

    def layer(self, which: SupportsIndex | str | None = None) -> LayerConfig:
        """Return the facts of a layer by its number or kind. None is the only kind there is."""
        kinds, order = self.kinds, self.layer_kinds
        if which is None and len(kinds) > 1:
            differ = "; ".join(f"{kind}: {_layers(order, kind)}" for kind in kinds)
            raise ConfigError(f"{self.name}: its layers differ ({differ}); name one: build(0) or build({kinds[0]!r})")
        which = next(iter(kinds)) if which is None else which
        if not isinstance(which, str | bool):
            with contextlib.suppress(TypeError):
                number = operator.index(which)
                which = order[number] if 0 <= number < self.num_layers else number
        if not isinstance(which, str) or which not in kinds:
            hint = did_you_mean(str(which), kinds)
            allowed = f"a layer from 0 to {self.num_layers - 1}, or a kind: {', '.join(kinds)}"
            raise ConfigError(f"{self.name}: there is no layer {which!r}.{hint} Allowed: {allowed}")
        return self.layer_types.get(which, self)

    def build(self, layer: SupportsIndex | str | None = None, *, mesh: Any = None) -> ConfiguredAttention:
        """Return a layer's attention, ready to call: its number, its kind, or None where all layers are alike."""
        facts, names = self.layer(layer), self.kinds
        kind = next((kind for kind, found in self.layer_types.items() if found is facts), None)
        return ConfiguredAttention(
            operation=(facts.operation,) if isinstance(facts.operation, str) else Chain(facts.operation),
            facts=facts,
            metadata=dataclasses.replace(OperationMetadata.from_config(self), mesh=mesh),
            source=f"config {self.name}" + (f", {kind} layers" if kind and len(names) > 1 else ""),
        )

    def shapes(
        self, batch: int = 1, length: int | None = None, layer: SupportsIndex | str | None = None, dtype: Any = None
    ) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Return query, key and value to plan with; nothing is allocated.

        `length` is max_length by default; the keys are as many, or kv_length for cross attention. `dtype` is runtime_dtype by
        default, and bfloat16 where the config leaves it to the inputs.
        """
        at, dtype = self.layer(layer), dtype or self.runtime_dtype or "bfloat16"
        queries = at.max_length if length is None else length
        keys, width = at.kv_length or queries, at.value_head_dim or at.head_dim
        dims = (
            (queries, at.num_heads, at.head_dim),
            (keys, at.num_kv_heads, at.head_dim),
            (keys, at.num_kv_heads, width),
        )
        query, key, value = (jax.ShapeDtypeStruct((batch, *dim), dtype) for dim in dims)
        return query, key, value

    def reduced(self, *, num_kv_heads: int = 2, head_dim: int = 16, max_length: int = 64) -> AttentionConfig:
        """Return the same attention in miniature, to be run in a test.

        Layers, query heads per kv head and the ratio of value to key width stay; windows and chunks shrink so that they still
        cut. An explicit softmax_scale and the block sizes stay as they are.
        """
        size = (num_kv_heads, head_dim, max_length)
        kinds = {kind: facts._reduced(*size) for kind, facts in self.layer_types.items()}
        return self.from_dict(self._reduced(*size) | {"layer_types": kinds}, f"{self.name} (reduced)")


def _known_kinds(names: tuple[str, ...], kinds: Mapping[str, Any]) -> tuple[str, ...]:
    for name in names:
        if name not in kinds:
            allowed = ", ".join(kinds) or "none: layer_types is empty"
            raise ValueError(f"found the kind {name!r}.{did_you_mean(name, kinds)} Kinds in layer_types: {allowed}")
    return names


def _layers(kinds: tuple[str, ...], kind: str) -> str:
    numbers = [str(number) for number, name in enumerate(kinds) if name == kind]
    return ", ".join(numbers[:4]) + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")


# ---------------------------------------------------------------- the callable


@dataclasses.dataclass(frozen=True)
class ConfiguredAttention:
    """One layer's attention as its config has it: `attend(query, key, value, **options)`.

    Options of the call win over the config's. A mask in the call comes on top of the config's chunks. `ao.use` wins over the
    config's operation.

    Attributes:
        operation: the name, or the names tried in order.
        facts: the layer's own; with `sinks`, each call must bring `softmax_aux`.
        metadata: the settings of the operation.
        source: what plans say of where the name came from.
    """

    operation: tuple[str, ...]
    facts: LayerConfig
    metadata: OperationMetadata
    source: str

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """The call options that the config fixes."""
        return self.facts.options()

    @property
    def name(self) -> str:
        """The operation's name; a chain is written with ">"."""
        return " > ".join(self.operation)

    def __call__(self, query: Any, key: Any, value: Any, **options: Unpack[AttentionOptions]) -> AttentionOutput:
        """Run the layer's attention; see `attention_ops.attention` for the options and errors."""
        if self.facts.sinks and "softmax_aux" not in options:
            raise ValueError(
                f"{self.source} has attention sinks and the call brings none; pass softmax_aux=, one learned logit per "
                f"query head [{query.shape[2]}], or softmax_aux=None to run without"
            )
        merged = self._merged(options)
        return api.dispatch(query, key, value, merged, self.metadata, default=self.operation, source=self.source)

    def plan(self, query: Any, key: Any, value: Any, device: Any = None, **options: Unpack[AttentionOptions]) -> Plan:
        """Return the plan of such a call, without running it. Sinks, where the config has them, need not be given."""
        merged = self._merged(options)
        if self.facts.sinks:
            merged.setdefault("softmax_aux", jax.ShapeDtypeStruct((query.shape[2],), "float32"))
        return api.plan_dispatch(query, key, value, merged, self.metadata, device, default=self.operation, source=self.source)

    def _merged(self, options: Mapping[str, Any]) -> dict[str, Any]:
        merged = {**self.options, **options}
        chunks, mask = self.options.get("mask"), options.get("mask")
        if chunks is not None:
            merged["mask"] = chunks if mask is None else chunks & as_mask(mask)
        return merged


# ---------------------------------------------------------------- the file


def load_config(path: str | os.PathLike[str]) -> AttentionConfig:
    """Read a model config from YAML. A ConfigError names the file, line and key, what was found, what is allowed and the fix.

    An operation that the config names must be registered by then: import the module that registers it first.
    """
    data, place = read(file_name("path", path, "the path of a YAML file"))
    config = AttentionConfig._checked(data, place)
    for keys, facts in ((), config), *((("layer_types", kind), facts) for kind, facts in config.layer_types.items()):
        for name in (facts.operation,) if isinstance(facts.operation, str) else facts.operation:
            try:
                OperationRegistry.resolve(name)
            except UnknownOperationError as error:
                raise ConfigError(place.at((*keys, "operation"), str(error))) from None
    return config
