"""Transformations over a mesh of two or four devices: `python -m tests.mesh_transforms` prints one line each; exits with 1 if one
failed. tests/test_mesh.py starts it. The checks are those of tests/test_transforms.py, against the law, with the same NaN.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_ops as ao
from attention_ops.selftest import reference
from tests.mesh_cases import mesh_of
from tests.test_transforms import TRANSFORMS, B, Call, D, K, T, agree, has, loops, save_names

SEVERAL = ("vmap, any `in_axes`", "vmap of grad", "jvp, jacfwd, linearize", "hessian, jvp of grad", "checkpoint")
OF_DEVICES = ("donation", "export round trip", "`jax_debug_nans`")
RUN = {
    "flash": tuple(name for name in TRANSFORMS if name != "jit"),
    "ulysses": (*SEVERAL, *OF_DEVICES),
    "ring": (*SEVERAL[1:4], "grad of grad, jacrev of grad", *OF_DEVICES),
}
"""Of the way gather all; of the others those that differ by the way. Decoding, which merges, is in the `while_loop` of flash;
`checkpoint` of a ring in what `NAMED` is for."""
SECOND = {
    "jvp of grad of jit": lambda f, x: jax.jvp(jax.grad(jax.jit(f)), (x,), (x,)),
    "hessian of jit": lambda f, x: jax.hessian(jax.jit(f))(x),
    "jvp of grad of checkpoint": lambda f, x: jax.jvp(jax.grad(jax.checkpoint(f)), (x,), (x,)),
    "linearize of grad of a vmap": lambda f, x: jax.linearize(jax.vmap(jax.grad(jax.jit(f))), x[None])[1](x[None]),
}
NAMED = {"ring": {}, "flash": {}, "ulysses": {}, "flash, decoding": {"query_offset": T - 1}}

IN_FLOAT16 = {"ring": 256, "flash": 255}
"""Queries; an odd number cannot be split, so that the keys are, and the results are merged."""


def over(axes: str, op: str) -> Call:
    return Call(op, metadata=ao.OperationMetadata(mesh=mesh_of(axes), fallback="silent"))


def transformed(call: Call, name: str) -> None:
    """Hold a transform to the law, or to the error that says that there is no such derivative."""
    try:
        TRANSFORMS[name].check(call)
    except ao.DerivativeError:
        assert not has(call, TRANSFORMS[name]), "refused"
    else:
        assert has(call, TRANSFORMS[name]), "not refused"


def second_derivative_is_refused(call: Call, name: str) -> None:
    query = jnp.asarray(np.nan_to_num(call.inputs["query"]))
    with pytest.raises(ao.DerivativeError, match=f"^{call.route} in a ring has no second derivative; use impl="):
        SECOND[name](lambda query: call.loss(call.inputs | {"query": query}), query)


def names_keep_the_forward_from_running_again(op: str, options: dict[str, Any]) -> None:
    """Gradients are the law's under a policy that saves the names, and no kernel runs more often than without checkpoint."""
    call, rows = over("sp=2", op), slice(T - 1, T) if options else slice(None)
    inputs = {name: np.nan_to_num(x[:, rows] if name == "query" else x) for name, x in call.inputs.items()}
    inputs["bias"] = inputs["bias"][:, :, rows]
    options = options | {"mask": call.mask[rows], "softmax_aux": np.float32([0.5, -0.5])}
    cotangent = call.cotangent[:, rows]

    def loss(inputs: Any) -> Any:
        return jnp.sum(call.run(inputs, **options) * cotangent)

    saved = jax.checkpoint(loss, policy=save_names)
    want = call.law(inputs, **options).gradients(cotangent)
    agree(jax.jit(jax.grad(saved))(inputs), {name: getattr(want, name) for name in inputs})
    forward, both = loops(loss, inputs), loops(jax.grad(loss), inputs)
    assert loops(jax.grad(jax.checkpoint(loss)), inputs) == both + forward > both
    assert loops(jax.grad(saved), inputs) == both


def over_an_axis_of_vmap() -> None:
    """An axis that the call leaves alone may be vmap's; of one that it splits JAX says that it may not."""
    stacked = np.random.default_rng(0).standard_normal((2, B, T, K, D)).astype(np.float32)

    def outputs(partition_axis: Any) -> Any:
        metadata = ao.OperationMetadata(mesh=mesh_of("dp=2,sp=2"), partition_axis=partition_axis)
        run = lambda x: ao.attention(x, x, x, impl="flash", metadata=metadata).attention_outputs  # noqa: E731
        return jax.jit(jax.vmap(run, spmd_axis_name="dp"))(stacked)

    law = Call("flash").law
    agree(outputs({"sequence_axis": "sp"}), np.stack([_plain(law, x) for x in stacked]))
    with pytest.raises(ValueError, match="spmd_axis_name cannot appear in shard_map in_specs"):
        outputs(None)


def gradients_in_float16_keep_a_part_of_small_share(op: str, T: int) -> None:
    """The first half of the keys has 4e-6 of the softmax: times a cotangent of 1e-3 that is less than float16 can hold."""
    value = np.random.default_rng(0).standard_normal((1, 8, 1, D)).astype(np.float16)
    inputs = {"query": np.ones((1, T, 1, D), np.float16), "key": np.zeros_like(value), "value": value}
    inputs["bias"] = np.float16([-11, -30, -30, -30, 0, 0, 0, 0]).reshape(1, 1, 1, 8)
    cotangent = np.full((1, T, 1, D), 1e-3, np.float16)
    metadata = ao.OperationMetadata(mesh=mesh_of("sp=2"), fallback="error")

    def loss(value: Any) -> Any:
        return jnp.sum(ao.attention(**inputs | {"value": value}, impl=op, metadata=metadata).attention_outputs * cotangent)

    want = reference.attention(inputs["query"], inputs["key"], value, {"bias": inputs["bias"], "key_heads": 1})
    want = want.gradients(cotangent).value
    np.testing.assert_allclose(np.float64(jax.jit(jax.grad(loss))(value)), want, rtol=1e-3, atol=6e-8)


def _plain(law: Callable[..., Any], x: np.ndarray) -> np.ndarray:
    return law(dict.fromkeys(("query", "key", "value"), x), causal=False, mask=None).output


def checks() -> Iterator[tuple[str, Callable[[], None]]]:
    for op, names in RUN.items():
        call = over("sp=2", op)
        yield from ((f"{op}: {name}", functools.partial(transformed, call, name)) for name in names)
    ring = over("sp=2", "ring")
    yield from ((f"ring: {name}", functools.partial(second_derivative_is_refused, ring, name)) for name in SECOND)
    for what, options in NAMED.items():
        named = functools.partial(names_keep_the_forward_from_running_again, what.partition(",")[0], options)
        yield f"{what}: names for checkpoint", named
    for op, queries in IN_FLOAT16.items():
        yield f"{op}: float16", functools.partial(gradients_in_float16_keep_a_part_of_small_share, op, queries)
    yield "vmap with spmd_axis_name", over_an_axis_of_vmap


def report(checks: Iterable[tuple[str, Callable[[], None]]]) -> None:
    """Run named checks, print a line for each, and exit with 1 if one failed."""
    failed = 0
    for name, check in checks:
        try:
            check()
        except (Exception, pytest.fail.Exception) as error:
            failed += 1
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"{name}: holds", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    report(checks())
