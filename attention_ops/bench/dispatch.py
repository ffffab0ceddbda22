"""What a call costs beyond its kernel: the same call eagerly, its plan cached, and jitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attention_ops.bench.problems import Problem
from attention_ops.bench.results import JITTED, Measurement
from attention_ops.bench.systems import reason_of
from attention_ops.bench.timing import Call, Samples, interleave


def measure(
    problem: Problem, operations: Sequence[str], peers: Sequence[str], repeats: int, step: Callable[[], None]
) -> tuple[Measurement, ...]:
    """Return for each operation of ours and each peer the eager and the jitted call, timed interleaved."""
    calls: dict[str, Call] = {}
    failures: dict[str, str] = {}
    for name in (*operations, *peers):
        try:
            eager, jitted = _pair(problem, name)
            eager()
            jitted()
            calls |= {name: eager, name + JITTED: jitted}
        except Exception as error:  # a system's failure is a result
            failures |= {name: reason_of(error), name + JITTED: reason_of(error)}
    samples = interleave(calls, repeats, step=step) | {name: Samples(failure=reason) for name, reason in failures.items()}
    measured = []
    for name in (*operations, *peers):
        eager_role = "ours" if name in operations else "peer"
        measured.append(Measurement(name, f"{name}, eager", eager_role, samples[name]))
        measured.append(Measurement(name + JITTED, f"{name}, jitted", "reference", samples[name + JITTED]))
    return tuple(measured)


def _pair(problem: Problem, name: str) -> tuple[Call, Call]:
    """Return the eager and the jitted call of one of our operations, or of `jax.nn`."""
    import jax
    import jax.numpy as jnp

    import attention_ops as ao
    from attention_ops.bench.jax_systems import METADATA, run_time_data, static_options

    data = {key: jnp.array(value) for key, value in run_time_data(problem).items() if value is not None}
    arrays = [jnp.array(x, problem.case.dtype) for x in (problem.query, problem.key, problem.value)]
    static = static_options(problem)

    def ours(query: Any, key: Any, value: Any, data: Any) -> Any:
        return ao.attention(query, key, value, impl=name, metadata=METADATA, **static, **data).attention_outputs

    def peer(query: Any, key: Any, value: Any, data: Any) -> Any:
        ids = data.get("q_segment_ids")
        mask = None if ids is None else (ids[:, :, None] == ids[:, None])[:, None]
        return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=static["causal"], implementation="xla")

    function: Callable[..., Any] = peer if name == "jax_nn" else ours
    compiled: Callable[..., Any] = jax.jit(function)
    return (
        lambda: jax.block_until_ready(function(*arrays, data)),
        lambda: jax.block_until_ready(compiled(*arrays, data)),
    )
