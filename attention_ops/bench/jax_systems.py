"""Systems that run on JAX without another package: our operations, `jax.nn`, and the ceilings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import attention_ops as ao
from attention_ops.bench.cases import Pattern
from attention_ops.bench.problems import Problem
from attention_ops.bench.systems import FITS, NOT_RUN, Prepared, Unavailable, free_memory
from attention_ops.device import cores
from attention_ops.metadata import OperationMetadata

Attend = Callable[[jax.Array, jax.Array, jax.Array, Mapping[str, jax.Array]], jax.Array]

METADATA = OperationMetadata(fallback="error")
"""An operation that cannot do a row says so; another in its place would be measured under its name."""


def prepare_jax(
    problem: Problem,
    attend: Attend,
    data: Mapping[str, np.ndarray | None],
    *,
    heads_first: bool = False,
    note: str = "",
) -> Prepared:
    """Compile `attend` for a problem, with its gradients where the row asks for them.

    `data` are run-time arrays; those that are None are left out. `heads_first` gives arrays in [B, H, T, D].
    """
    dtype = jnp.dtype(problem.case.dtype)
    turn = (lambda x: x.swapaxes(1, 2)) if heads_first else (lambda x: x)
    names = ("query", "key", "value", "cotangent") if problem.case.kind == "gradient" else ("query", "key", "value")
    arrays = [jax.block_until_ready(jnp.array(turn(getattr(problem, name)), dtype)) for name in names]
    extra = {name: jnp.array(value) for name, value in data.items() if value is not None}

    def forward(query: Any, key: Any, value: Any, extra: Any) -> tuple[jax.Array, ...]:
        return (attend(query, key, value, extra),)

    def gradient(query: Any, key: Any, value: Any, cotangent: Any, extra: Any) -> tuple[jax.Array, ...]:
        output, pull = jax.vjp(lambda q, k, v: attend(q, k, v, extra), query, key, value)
        return (output, *pull(cotangent))

    function: Callable[..., Any] = jax.jit(gradient if problem.case.kind == "gradient" else forward)
    return Prepared(
        call=lambda: jax.block_until_ready(function(*arrays, extra)),
        outputs=lambda results: tuple(turn(np.asarray(x, np.float32)) for x in results),
        note=note,
    )


def run_time_data(problem: Problem) -> dict[str, np.ndarray | None]:
    """Return the arrays of a problem that are known only at run time, under the names of our options."""
    return {
        "q_segment_ids": problem.segment_ids,
        "kv_segment_ids": problem.segment_ids,
        "kv_lengths": problem.kv_lengths,
        "mask": None if problem.case.pattern.static else problem.raster,
    }


def static_options(problem: Problem) -> dict[str, Any]:
    """Return the options of our calls that are known while compiling."""
    pattern = problem.case.pattern
    options: dict[str, Any] = {"causal": pattern.causal}
    if pattern.window:
        options["sliding_window"] = (pattern.window - 1, 0)
    if pattern.static and problem.raster is not None:
        options["mask"] = ao.masks.Dense(problem.raster)  # type: ignore[arg-type]  # it becomes static
    return options


def ours(problem: Problem, operation: str) -> Prepared:
    """One of our operations, jitted, with the options a user would give."""
    static, data = static_options(problem), run_time_data(problem)
    dtype = jnp.dtype(problem.case.dtype)
    shapes = [jax.ShapeDtypeStruct(x.shape, dtype) for x in (problem.query, problem.key, problem.value)]
    known = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in data.items() if x is not None}
    plan = ao.plan(operation, *shapes, metadata=METADATA, **static, **known)  # type: ignore[misc]
    if plan.estimate and plan.estimate.temporary_bytes > FITS * free_memory():
        raise Unavailable(f"{NOT_RUN} {plan.route} needs about {plan.estimate.temporary_bytes / 2**30:.0f} GiB")

    def attend(query: Any, key: Any, value: Any, extra: Any) -> jax.Array:
        return ao.attention(query, key, value, impl=operation, metadata=METADATA, **static, **extra).attention_outputs

    return prepare_jax(problem, attend, data, note=plan.route)


def own_causal(problem: Problem, operation: str) -> Prepared:
    """Our operation on plain causal attention of the same sizes: what a sparse row is measured against."""
    case = dataclasses.replace(problem.case, pattern=Pattern(causal=True))
    return dataclasses.replace(ours(dataclasses.replace(problem, case=case), operation), outputs=None)


def jax_nn(problem: Problem) -> Prepared:
    """`jax.nn.dot_product_attention(implementation="xla")`, with its own form of causal, window and lengths."""
    pattern, data = problem.case.pattern, run_time_data(problem)
    data["mask"] = problem.raster
    window = (pattern.window - 1, 0) if pattern.window else None

    def attend(query: Any, key: Any, value: Any, extra: Any) -> jax.Array:
        mask, ids = extra.get("mask"), extra.get("q_segment_ids")
        if mask is not None:
            mask = mask[None, None]
        if ids is not None:
            mask = (ids[:, :, None] == ids[:, None])[:, None]
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            is_causal=pattern.causal,
            local_window_size=window,
            key_value_seq_lengths=extra.get("kv_lengths"),
            implementation="xla",
        )

    return prepare_jax(problem, attend, data)


def matmul(problem: Problem, dtype: str | None = None) -> Prepared:
    """A nearly square matrix product of the same flops, sums in float32: no attention can be faster than that."""
    side = max(round((problem.flops / 2) ** (1 / 3) / 16), 1) * 16
    inner = max(round(problem.flops / 2 / side**2), 1)
    rng = np.random.default_rng(problem.seed)
    shapes = (side, inner), (inner, side)
    a, b = (jnp.asarray(rng.standard_normal(shape, np.float32), dtype or problem.case.dtype) for shape in shapes)
    product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
    return Prepared(call=lambda: jax.block_until_ready(product(a, b)), note=f"{side} x {inner} x {side}")


def matmul_f32(problem: Problem) -> Prepared:
    return matmul(problem, "float32")


def read(problem: Problem) -> Prepared:
    """A sum over as many bytes as the visible keys and values have: decoding cannot be faster than that."""
    case = problem.case
    rows, numbers = 8 * cores(), 2 * problem.pairs // case.T * case.K * case.D
    data = jnp.ones((rows, -(-numbers // rows)), case.dtype)
    total = jax.jit(lambda data: jnp.sum(data, axis=1, dtype=jnp.float32))
    return Prepared(call=lambda: jax.block_until_ready(total(data)), note=f"{data.nbytes / 1e6:.0f} MB")
