"""A case as a call: what is asked for, its arguments, its facts for planning, and the program that runs it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_ops.api import attention
from attention_ops.features import Feature
from attention_ops.masks import Mask
from attention_ops.metadata import BlockSizes, OperationMetadata
from attention_ops.operation import Tolerance
from attention_ops.request import RequestSpec, make_request
from attention_ops.selftest.cases import Case, Problem

DIFFERENTIABLE = ("bias", "softmax_aux")
MAPPED = {"vmap": ("query", "bias"), "vmap_grad": ("query", "key", "value", "bias", "softmax_aux")}


@dataclasses.dataclass(frozen=True)
class Target:
    """What is proven: the name under which it is called, and what it declares."""

    impl: str | tuple[str, ...]
    supports: frozenset[Feature]
    tolerance: Tolerance = Tolerance()
    metadata: OperationMetadata = OperationMetadata()


@dataclasses.dataclass(frozen=True)
class Asks:
    """What a call asks for beyond its output."""

    logsumexp: bool
    weights: bool
    gradients: bool


def asks_of(case: Case, supports: frozenset[Feature]) -> Asks:
    """Ask for all that the route declares, except where the case is about not asking."""
    bare = case.mode == "bare"
    trained_bias = Feature.BIAS_GRADIENT in supports or Feature.BIAS not in case.features
    return Asks(
        logsumexp=Feature.LOGSUMEXP in supports and not bare,
        weights=Feature.WEIGHTS in supports and not bare,
        gradients=Feature.GRADIENT in supports and trained_bias and case.mode not in ("forward", "eager"),
    )


@dataclasses.dataclass(frozen=True)
class Call:
    """Everything that decides which program is compiled, other than shapes."""

    impl: str | tuple[str, ...]
    metadata: OperationMetadata
    static: tuple[tuple[str, Any], ...]
    asks: Asks
    mode: str


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of one call: `inputs` are differentiated, `traced` are run-time data, `cotangents` come back."""

    call: Call
    inputs: dict[str, Any]
    traced: dict[str, Any]
    cotangents: tuple[Any, Any, Any]

    @property
    def key(self) -> Any:
        """What two calls have in common that share a program."""
        leaves, tree = jax.tree_util.tree_flatten((self.inputs, self.traced, self.cotangents))
        return self.call, tree, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)


def abstract_options(case: Case, problem: Problem, asks: Asks) -> dict[str, Any]:
    """Return the options of a call with shapes for arrays, for planning."""
    static, traced, differentiable = split_options(problem.options)
    if Feature.DROPOUT in case.features:
        traced["dropout_rng"] = jax.random.PRNGKey(0)
    traced = jax.tree_util.tree_map(_shape_of, {**traced, **differentiable})
    wanted = {"return_logsumexp": asks.logsumexp, "return_weights": asks.weights, "differentiable": asks.gradients}
    return {**static, **traced, **wanted}


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@functools.lru_cache(maxsize=4096)
def spec_of(case: Case, asks: Asks, metadata: OperationMetadata, **changes: Any) -> RequestSpec:
    """Return the facts of a case's request; `changes` replace options."""
    problem = case.problem()
    query, key, value = map(_shape_of, (problem.query, problem.key, problem.value))
    return make_request(query, key, value, {**abstract_options(case, problem, asks), **changes}, metadata).spec


def metadata_for(target: Target, blocks: tuple[int | None, int | None]) -> OperationMetadata:
    if blocks == (None, None):
        return target.metadata
    return dataclasses.replace(target.metadata, block_sizes=BlockSizes(*blocks))


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the options that are static, run-time data, and differentiable."""
    static: dict[str, Any] = {}
    traced: dict[str, Any] = {}
    differentiable: dict[str, Any] = {}
    for name, value in options.items():
        if name in DIFFERENTIABLE:
            differentiable[name] = value
        elif isinstance(value, np.ndarray | np.generic | Mask | jax.Array):
            traced[name] = value
        else:
            static[name] = value
    return static, traced, differentiable


def arguments(case: Case, problems: Sequence[Problem], target: Target, asks: Asks) -> Arguments:
    """Return the arguments of a case; in the vmap modes arrays of several samples are stacked."""
    problem = problems[0]
    static, traced, _ = split_options(problem.options)
    traced = jax.tree_util.tree_map(jnp.asarray, traced)
    if Feature.DROPOUT in case.features:
        traced["dropout_rng"] = jax.random.PRNGKey(0)
    mapped = MAPPED.get(case.mode, ())
    inputs: dict[str, Any] = {}
    for name in ("query", "key", "value", *DIFFERENTIABLE):
        samples = [_array(one, name) for one in problems]
        if samples[0] is not None:
            inputs[name] = jnp.stack([jnp.asarray(x) for x in samples]) if name in mapped else jnp.asarray(samples[0])
    wanted = (("d_output", True), ("d_logsumexp", asks.logsumexp), ("d_weights", asks.weights))
    cotangents = []
    for name, asked in wanted:
        samples = [jnp.asarray(getattr(one, name)) for one in problems]
        cotangents.append(None if not asked else jnp.stack(samples) if mapped else samples[0])
    call = Call(target.impl, metadata_for(target, case.sizes.blocks), tuple(sorted(static.items())), asks, case.mode)
    return Arguments(call, inputs, traced, tuple(cotangents))  # type: ignore[arg-type]


def _array(problem: Problem, name: str) -> Any:
    return problem.options.get(name) if name in DIFFERENTIABLE else getattr(problem, name)


def _evaluate(call: Call, inputs: dict[str, Any], traced: dict[str, Any], cotangents: tuple[Any, Any, Any]) -> Any:
    """Return (output, logsumexp, weights) and the gradients of the inputs, or None for these."""

    def forward(inputs: dict[str, Any]) -> Any:
        out = attention(
            **inputs,
            **traced,
            **dict(call.static),
            impl=call.impl,
            metadata=call.metadata,
            return_logsumexp=call.asks.logsumexp,
            return_weights=call.asks.weights,
            differentiable=call.asks.gradients,
        )
        return out.attention_outputs, out.logsumexp, out.attention_weights

    run: Any = jax.checkpoint(forward) if call.mode == "remat" else forward
    if call.mode == "vmap":
        run = jax.vmap(forward, in_axes=(_axes(inputs, call.mode),))
    if not call.asks.gradients:
        return run(inputs), None
    results, pull_back = jax.vjp(run, inputs)
    return results, pull_back(cotangents)[0]


def _axes(inputs: Mapping[str, Any], mode: str) -> dict[str, int | None]:
    return {name: 0 if name in MAPPED[mode] else None for name in inputs}


def program(call: Call, inputs: Mapping[str, Any], compiler_options: Mapping[str, Any]) -> Any:
    """Return the function of (inputs, traced, cotangents) that runs a call, compiled unless the case is about eager calls."""
    evaluate: Any = functools.partial(_evaluate, call)
    if call.mode == "vmap_grad":
        evaluate = jax.vmap(evaluate, in_axes=(_axes(inputs, call.mode), None, 0))
    return evaluate if call.mode == "eager" else jax.jit(evaluate, compiler_options=dict(compiler_options) or None)
