"""A model config as cases: each kind of its layers at reduced size, whole, padded and decoding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from attention_ops.api import plan
from attention_ops.config import AttentionConfig
from attention_ops.device import DeviceProfile
from attention_ops.metadata import OperationMetadata
from attention_ops.registry import OperationRegistry
from attention_ops.selftest.cases import Case, Geometry, make
from attention_ops.selftest.ingredients import Draft
from attention_ops.selftest.results import ProofKind
from attention_ops.selftest.subject import CaseSource, Subject


@dataclasses.dataclass(frozen=True)
class ConfigCase(Case):
    """A case whose sizes and options are those of one kind of layer; ingredients come on top."""

    config: AttentionConfig = dataclasses.field(kw_only=True, repr=False)
    kind: str = dataclasses.field(kw_only=True)
    decode: bool = dataclasses.field(kw_only=True, default=False)

    @functools.cached_property
    def name(self) -> str:
        words = (self.kind + (".decode" if self.decode else ""), "+".join(self.parts), self.dtype, self.variant, self.mode)
        return "/".join(word for word in words if word)

    @property
    def sizes(self) -> Geometry:
        facts = self.config.layer(self.kind)
        rows = 1 if self.decode else max(1, facts.max_length - 3)
        keys = facts.kv_length or (facts.max_length if self.decode else rows)
        return Geometry(2, rows, keys, facts.num_heads, facts.head_dim)

    def elsewhere(self) -> Iterator[Case]:
        yield self

    def _start(self, rng: np.random.Generator) -> Draft:
        draft, facts = super()._start(rng), self.config.layer(self.kind)
        draft.K, draft.Dv = facts.num_kv_heads, facts.value_head_dim or facts.head_dim
        draft.options |= facts.options()
        draft.positional = facts.causal or facts.sliding_window is not None or facts.chunk_size is not None
        if facts.chunk_size is not None:
            key = np.arange(draft.S)
            draft.law = (key - draft.distance) // facts.chunk_size == key // facts.chunk_size
        return draft


def config_cases(config: AttentionConfig) -> dict[str, list[Case]]:
    """Return the cases of each kind of layer. The config is to be `reduced` first."""
    dtype = config.runtime_dtype or "float32"
    found: dict[str, list[Case]] = {}
    for kind in config.kinds:
        always = ("sinks",) if config.layer(kind).sinks else ()
        whole = ConfigCase(always, dtype=dtype, config=config, kind=kind)
        padded, packed, filled = (
            dataclasses.replace(whole, parts=make((*always, part)).parts) for part in ("lengths", "segments", "kv_lengths")
        )
        decoding = dataclasses.replace(filled, decode=True)
        poisoned = [dataclasses.replace(case, variant="nan") for case in (padded, packed, decoding)]
        found[kind] = [whole, padded, packed, decoding, *poisoned]
    return found


def operations_of(config: AttentionConfig, metadata: OperationMetadata) -> dict[str, tuple[str, ...]]:
    """Return, by kind of layer, the operations it names and the one that runs on this device."""
    found = {}
    for kind, cases in config_cases(config).items():
        operation = config.layer(kind).operation
        names = (operation,) if isinstance(operation, str) else operation
        query, key, value = config.shapes(batch=2, layer=kind, dtype=cases[0].dtype)
        options = config.layer(kind).options()
        chosen = plan(names, query, key, value, device=DeviceProfile.current(), metadata=metadata, **options)
        found[kind] = tuple(dict.fromkeys([*(OperationRegistry.resolve(name)[0].name for name in names), chosen.operation]))
    return found


def source_of(config: AttentionConfig, operations: dict[str, tuple[str, ...]], names: tuple[str, ...] = ()) -> CaseSource:
    """Return the cases for a subject: those of the kinds of layers that name its operation; only `names` if there are any."""
    by_kind = config_cases(config)

    def source(subject: Subject, proof: ProofKind) -> Sequence[Case]:
        if proof != "numeric":  # what the config leads to on the device here
            return []
        found = [case for kind, cases in by_kind.items() if subject.operation.name in operations[kind] for case in cases]
        return [case for case in found if not names or case.name in names]

    return source
