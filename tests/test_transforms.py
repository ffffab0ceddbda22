"""Every operation under every transformation of JAX.

docs/transforms.md has the table of these tests; `python tests/test_transforms.py` writes it.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import attention_ops as ao
from attention_ops import Derivatives
from attention_ops.derivatives import OUTPUT_NAME, RESIDUALS_NAME
from attention_ops.selftest import reference

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "transforms.md"
BEGIN, END = "<!-- transforms: begin, written by tests/test_transforms.py -->", "<!-- transforms: end -->"
OPERATIONS = ("vanilla", "sdpa", "flash", "blocksparse")
"""Those with a route of their own on the CPU."""
LEAD = {"auto": "vanilla", "cudnn_flash": "flash", "ring": "blocksparse", "ulysses": "blocksparse"}
"""Other names, and whose route they lead to without a mesh."""
SILENT = ao.OperationMetadata(fallback="silent")
B, T, H, K, D = 2, 4, 2, 1, 3
LEVELS = (Derivatives.GRADIENT, Derivatives.HESSIAN, Derivatives.ANY)


# ---------------------------------------------------------------- the call that is transformed


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an operation, over the mesh of its metadata. `inputs` are differentiated; the mask, if any, is run-time data.

    Row 1 of the mask is empty and nothing sees key 2: query, key and value hold NaN there. sdpa has causality alone, all that its
    own route takes.
    """

    op: str
    dtype: Any = np.float32
    seed: int = 0
    metadata: ao.OperationMetadata = SILENT

    @functools.cached_property
    def mask(self) -> np.ndarray | None:
        if self.op == "sdpa":
            return None
        mask = np.ones((T, T), bool)
        mask[1], mask[:, 2] = False, False
        return mask

    @functools.cached_property
    def inputs(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        made = {name: rng.standard_normal((B, T, n, D)) for name, n in (("query", H), ("key", K), ("value", K))}
        if self.mask is not None:
            made["bias"] = rng.standard_normal((1, H, T, T))
            made["query"][:, 1] = np.nan
            made["key"][:, 2] = made["value"][:, 2] = np.nan
        return {name: x.astype(self.dtype) for name, x in made.items()}

    @functools.cached_property
    def cotangent(self) -> np.ndarray:
        return np.random.default_rng(self.seed + 99).standard_normal((B, T, H, D)).astype(self.dtype)

    def another(self, seed: int) -> Call:
        return dataclasses.replace(self, seed=seed)

    def placed(self, inputs: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Return inputs on their devices: over a mesh, the rows of all but the bias along `sp`."""
        if self.metadata.mesh is None:
            return {name: jnp.asarray(x) for name, x in inputs.items()}
        rows, whole = (NamedSharding(self.metadata.mesh, spec) for spec in (P(None, "sp"), P()))
        return {name: jax.device_put(x, whole if name == "bias" else rows) for name, x in inputs.items()}

    def run(self, inputs: Any, **changes: Any) -> jax.Array:
        """Return the output for inputs."""
        options = {"causal": True} | ({} if self.mask is None else {"mask": jnp.asarray(self.mask)}) | changes
        return ao.attention(**inputs, impl=self.op, metadata=self.metadata, **options).attention_outputs

    def loss(self, inputs: Any) -> jax.Array:
        return jnp.sum(self.run(inputs) * self.cotangent)

    def law(self, inputs: dict[str, Any] | None = None, **changes: Any) -> reference.Attention:
        inputs = self.inputs if inputs is None else inputs
        options = {"causal": True, **({} if self.mask is None else {"mask": self.mask}), **changes}
        options |= {"bias": inputs["bias"]} if "bias" in inputs else {}
        return reference.attention(inputs["query"], inputs["key"], inputs["value"], options)

    def gradients(self, inputs: dict[str, Any] | None = None, cotangent: Any = None) -> dict[str, np.ndarray]:
        """Return the gradients of the law."""
        inputs = self.inputs if inputs is None else inputs
        found = self.law(inputs).gradients(self.cotangent if cotangent is None else cotangent)
        return {name: getattr(found, name) for name in inputs}

    @functools.cached_property
    def plan(self) -> ao.Plan:
        return ao.plan(self.op, **self.inputs, metadata=self.metadata, causal=True, mask=self.mask)

    @property
    def route(self) -> str:
        return self.plan.route

    @property
    def derivatives(self) -> Derivatives:
        if self.metadata.mesh is not None and self.plan.way == "ring":
            return Derivatives.GRADIENT
        name, _, backend = self.route.partition("/")
        return ao.OperationRegistry.get(name).routes[backend].declaration.derivatives_of(np.dtype(self.dtype))


def agree(got: Any, want: Any, ulps: float = 32.0, dtype: Any = None) -> None:
    """Compare trees of arrays: no further off than some roundings, of `dtype` or its own, of the largest number; nowhere NaN."""
    jax.tree_util.tree_map(functools.partial(_agree, ulps=ulps, dtype=dtype), got, want)


def _agree(got: Any, want: np.ndarray, ulps: float, dtype: Any) -> None:
    atol = ulps * reference.epsilon(dtype or got.dtype) * max(1.0, np.abs(want).max())
    assert np.shape(got) == np.shape(want)
    np.testing.assert_allclose(np.asarray(got).astype(np.float64), want, rtol=0, atol=atol)


def stacked(calls: list[Call]) -> dict[str, np.ndarray]:
    return {name: np.stack([call.inputs[name] for call in calls]) for name in calls[0].inputs}


# ---------------------------------------------------------------- the transforms


@dataclasses.dataclass(frozen=True)
class Transform:
    """A check of a transform on a call, and the derivatives of a route which it needs."""

    check: Callable[[Call], None]
    needs: Derivatives


TRANSFORMS: dict[str, Transform] = {}


def transform(name: str, needs: Derivatives = Derivatives.GRADIENT) -> Callable[..., Any]:
    def add(check: Callable[[Call], None]) -> Callable[[Call], None]:
        TRANSFORMS[name] = Transform(check, needs)
        return check

    return add


@transform("jit")
def under_jit(call: Call) -> None:
    want = call.law().output
    agree(call.run(call.inputs), want)
    agree(jax.jit(call.run)(call.inputs), want)


@transform("vmap, any `in_axes`")
def under_vmap(call: Call) -> None:
    calls = [call.another(seed) for seed in (1, 2, 3)]
    for mapped in ({"query": 0}, {"key": 1, "value": -1}, dict.fromkeys(call.inputs, 2)):
        axes = {name: mapped.get(name) for name in call.inputs}
        inputs = {
            name: call.inputs[name] if axis is None else np.moveaxis(stacked(calls)[name], 0, axis) for name, axis in axes.items()
        }
        own = lambda one: {name: (one if name in mapped else call).inputs[name] for name in call.inputs}  # noqa: B023, E731
        got = jax.jit(jax.vmap(call.run, in_axes=(axes,), out_axes=1))(inputs)
        agree(got, np.stack([call.law(own(one)).output for one in calls], axis=1))


@transform("vmap in vmap")
def under_nested_vmap(call: Call) -> None:
    outer, inner = ([call.another(seed) for seed in seeds] for seeds in ((1, 2), (3, 4, 5)))
    of_outer = {name: 0 if name == "query" else None for name in call.inputs}
    of_inner = {name: None if name == "query" else 0 for name in call.inputs}
    inputs = stacked(inner) | {"query": stacked(outer)["query"]}
    got = jax.jit(jax.vmap(jax.vmap(call.run, in_axes=(of_inner,)), in_axes=(of_outer,)))(inputs)
    want = [[call.law(b.inputs | {"query": a.inputs["query"]}).output for b in inner] for a in outer]
    agree(got, np.array(want))


@transform("vmap over masks, lengths, offsets, ids")
def under_vmap_of_masks(call: Call) -> None:
    rng, n = np.random.default_rng(5), 3
    masks, lengths, offsets = rng.random((n, T, T)) < 0.7, rng.integers(1, T + 1, (n, B)), np.arange(n) - 1
    ids = rng.integers(0, 2, (n, B, T))
    inputs = {name: np.nan_to_num(x) for name, x in call.inputs.items()}

    def run(mask: Any, length: Any, offset: Any, ids: Any) -> Any:
        return call.run(inputs, mask=mask, kv_lengths=length, query_offset=offset, q_segment_ids=ids)

    got = jax.jit(jax.vmap(run))(masks, lengths, offsets, ids)
    for i in range(n):
        options = {"mask": masks[i], "kv_lengths": lengths[i], "query_offset": offsets[i], "q_segment_ids": ids[i]}
        agree(got[i], call.law(inputs, **options).output)


@transform("grad, value_and_grad")
def under_grad(call: Call) -> None:
    value, gradients = jax.jit(jax.value_and_grad(call.loss))(call.inputs)
    agree(value, np.sum(call.law().output * call.cotangent, dtype=np.float64))
    agree(gradients, call.gradients())
    agree(jax.grad(call.loss)(call.inputs), call.gradients())


@transform("vmap of grad")
def under_vmap_of_grad(call: Call) -> None:
    calls = [call.another(seed) for seed in (1, 2)]
    got = jax.jit(jax.vmap(jax.grad(call.loss)))(stacked(calls))
    for i, one in enumerate(calls):
        agree({name: x[i] for name, x in got.items()}, call.gradients(one.inputs))


@transform("jacrev")
def under_jacrev(call: Call) -> None:
    agree(jax.jit(jax.jacrev(call.run))(call.inputs), _jacobian(call))


def _jacobian(call: Call) -> dict[str, np.ndarray]:
    """Return the derivatives of every number of the output, from the law."""
    law, shape = call.law(), (B, T, H, D)
    rows = [law.gradients(row.reshape(shape)) for row in np.eye(B * T * H * D)]
    return {name: np.stack([getattr(row, name) for row in rows]).reshape(*shape, *x.shape) for name, x in call.inputs.items()}


@transform("jvp, jacfwd, linearize", needs=Derivatives.ANY)
def under_jvp(call: Call) -> None:
    tangents = call.another(7).inputs
    want = sum(np.tensordot(jacobian, np.nan_to_num(tangents[name]), 4) for name, jacobian in _jacobian(call).items())
    tangents = {name: np.nan_to_num(x) for name, x in tangents.items()}
    agree(jax.jit(lambda x, t: jax.jvp(call.run, (x,), (t,)))(call.inputs, tangents), (call.law().output, want))
    agree(jax.linearize(call.run, call.inputs)[1](tangents), want)
    agree(jax.jit(jax.jacfwd(call.run))(call.inputs), _jacobian(call))


@transform("hessian, jvp of grad", needs=Derivatives.HESSIAN)
def under_hessian(call: Call) -> None:
    tangents = {name: np.nan_to_num(x) for name, x in call.another(7).inputs.items()}
    agree(jax.jit(lambda x, t: jax.jvp(jax.grad(call.loss), (x,), (t,))[1])(call.inputs, tangents), _second(call, tangents))
    of_query = lambda query: call.loss(call.inputs | {"query": query})  # noqa: E731
    hessian = jax.jit(jax.hessian(of_query))(call.inputs["query"])
    along = {name: np.zeros_like(x) for name, x in tangents.items()} | {"query": tangents["query"]}
    agree(np.tensordot(hessian, tangents["query"], 4), _second(call, along)["query"])


@transform("grad of grad, jacrev of grad", needs=Derivatives.ANY)
def under_grad_of_grad(call: Call) -> None:
    tangents = {name: np.nan_to_num(x) for name, x in call.another(7).inputs.items()}

    def along(inputs: Any) -> Any:
        gradients = jax.grad(call.loss)(inputs)
        return sum(jnp.sum(gradients[name] * tangents[name]) for name in inputs)

    agree(jax.jit(jax.grad(along))(call.inputs), _second(call, tangents))


def _second(call: Call, tangents: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the derivative of the law's gradients along tangents, by differences in float64."""
    step = 1e-5
    moved = lambda step: {name: x.astype(np.float64) + step * tangents[name] for name, x in call.inputs.items()}  # noqa: E731
    ahead, behind = (call.gradients(moved(s)) for s in (step, -step))
    return {name: (ahead[name] - behind[name]) / (2 * step) for name in ahead}


@transform("checkpoint")
def under_checkpoint(call: Call) -> None:
    for policy in (None, save_names):
        agree(jax.jit(jax.grad(jax.checkpoint(call.loss, policy=policy)))(call.inputs), call.gradients())


save_names = jax.checkpoint_policies.save_only_these_names(OUTPUT_NAME, RESIDUALS_NAME)


@transform("scan")
def under_scan(call: Call) -> None:
    calls = [call.another(seed) for seed in (1, 2)]

    def loss(inputs: Any) -> Any:
        total, outputs = jax.lax.scan(lambda total, one: (total + call.loss(one), call.run(one)), jnp.zeros(()), inputs)
        return total, outputs

    (_, outputs), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(stacked(calls))
    for i, one in enumerate(calls):
        agree(outputs[i], call.law(one.inputs).output)
        agree({name: x[i] for name, x in gradients.items()}, call.gradients(one.inputs))


@transform("while_loop, masks in the carry")
def under_while_loop(call: Call) -> None:
    """Decode into a cache that is NaN where nothing was written yet; mask, lengths, offset and ids grow with the steps."""
    inputs = {name: np.nan_to_num(call.inputs[name]) for name in ("query", "key", "value")}
    key, value = (jnp.full_like(inputs[name], jnp.nan) for name in ("key", "value"))
    ids = np.array([[0, 0, 1, 1], [0, 1, 1, 1]])

    def step(carry: Any) -> Any:
        i, key, value, written, seen_ids, outputs = carry
        now = lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1)  # noqa: E731
        put = lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, i, axis=1)  # noqa: E731
        key, value = put(key, now(inputs["key"])), put(value, now(inputs["value"]))
        written, seen_ids = put(written, jnp.ones((B, 1), bool)), put(seen_ids, now(ids))
        changes = {"mask": written[:, None, None], "query_offset": i, "kv_lengths": jnp.full((B,), i + 1)}
        changes |= {"q_segment_ids": now(ids), "kv_segment_ids": seen_ids}
        output = call.run({"query": now(inputs["query"]), "key": key, "value": value}, **changes)
        return i + 1, key, value, written, seen_ids, put(outputs, output)

    start = (0, key, value, jnp.zeros((B, T), bool), jnp.full((B, T), -1), jnp.zeros((B, T, H, D)))
    *_, outputs = jax.jit(lambda start: jax.lax.while_loop(lambda carry: carry[0] < T, step, start))(start)
    agree(outputs, call.law(inputs, mask=None, q_segment_ids=ids).output)


@transform("donation")
def under_donation(call: Call) -> None:
    """The cache is donated and updated, the query is donated for the output; nothing donated is read afterwards."""
    given = call.placed({name: np.nan_to_num(x) for name, x in call.inputs.items()})
    cached = {name: given[name].sharding for name in ("key", "value")}

    @functools.partial(jax.jit, donate_argnums=(0,), out_shardings=(None, cached))
    def step(donated: Any, others: Any) -> Any:
        cache = {name: donated[name].at[:, 0].set(0.5) for name in cached}
        return call.run({"query": donated["query"], **cache, **others}), cache

    donated = {name: given.pop(name) for name in ("query", "key", "value")}
    inputs = {name: np.array(x) for name, x in (donated | given).items()}
    for name in cached:
        inputs[name][:, 0] = 0.5
    output, cache = step(donated, given)
    assert all(x.is_deleted() for x in donated.values())
    agree(output, call.law(inputs).output)
    agree(cache, {name: inputs[name].astype(np.float64) for name in cache})


@transform("export round trip")
def under_export(call: Call) -> None:
    inputs = call.placed(call.inputs)
    stored = jax.export.export(jax.jit(call.run))(inputs).serialize(vjp_order=1)
    loaded = jax.export.deserialize(bytearray(stored))
    agree(jax.jit(loaded.call)(inputs), call.law().output)
    agree(jax.jit(jax.grad(lambda inputs: jnp.sum(loaded.call(inputs) * call.cotangent)))(inputs), call.gradients())


@transform("eval_shape")
def under_eval_shape(call: Call) -> None:
    shapes = jax.tree_util.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), call.inputs)
    got = jax.eval_shape(
        lambda inputs: ao.attention(**inputs, impl=call.op, metadata=call.metadata, return_logsumexp=True), shapes
    )
    assert (got.attention_outputs.shape, got.attention_outputs.dtype) == ((B, T, H, D), jnp.bfloat16)
    assert (got.logsumexp.shape, got.logsumexp.dtype) == ((B, T, H), jnp.float32)
    assert got.attention_weights is None
    gradients = jax.eval_shape(jax.grad(lambda inputs: call.run(inputs).astype(jnp.float32).sum()), shapes)
    assert jax.tree_util.tree_map(lambda x: (x.shape, x.dtype), (gradients, shapes))[0] == jax.tree_util.tree_map(
        lambda x: (x.shape, x.dtype), shapes
    )


@transform("`JAX_ENABLE_X64`")
def under_x64(call: Call) -> None:
    """float64 is computed in float64, float32 stays float32, and integers may have 64 bits."""
    lengths = np.array([3, 4])
    with jax.enable_x64(True):
        for one in (call, dataclasses.replace(call, dtype=np.float64)):
            inputs = {name: np.nan_to_num(x) for name, x in one.inputs.items()}
            options = {"kv_lengths": lengths, "query_offset": np.int64(0)}
            run = lambda inputs: one.run(inputs, **options)  # noqa: B023, E731
            output, pull = jax.vjp(jax.jit(run), inputs)
            assert output.dtype == one.dtype
            law = one.law(inputs, kv_lengths=lengths)
            agree(output, law.output)
            (gradients,) = pull(jnp.asarray(one.cotangent))
            assert all(x.dtype == one.dtype for x in gradients.values())
            agree(gradients, {name: getattr(law.gradients(one.cotangent), name) for name in inputs})


@transform("`jax_debug_nans`")
def under_debug_nans(call: Call) -> None:
    """NaN in what nobody sees, and a row that sees nothing, make no NaN on the way."""
    inputs = call.placed(call.inputs)
    with jax.debug_nans(True):
        agree(call.run(inputs), call.law().output)
        agree(jax.jit(jax.grad(call.loss))(inputs), call.gradients())


@transform("`jax_numpy_dtype_promotion=strict`")
def under_strict_dtypes(call: Call) -> None:
    """bfloat16 arrays with a bias and sinks of float32, which the law allows, mix nothing implicitly.

    sdpa in float32: JAX cannot compile the gradient of `jax.nn.dot_product_attention` in bfloat16 under this setting.
    """
    low = dataclasses.replace(call, dtype=np.float32 if call.op == "sdpa" else jnp.bfloat16)
    inputs = {name: low.inputs[name].astype(np.float32 if name == "bias" else low.dtype) for name in low.inputs}
    with jax.numpy_dtype_promotion("strict"):
        output, gradients = jax.jit(_with_everything(low))(inputs)
    agree(output, low.law(inputs, **_everything(call)).output, ulps=4)
    _agree_gradients(low, inputs, gradients)


@transform("`jax_numpy_rank_promotion=raise`")
def under_no_rank_promotion(call: Call) -> None:
    inputs = {name: np.nan_to_num(x) for name, x in call.inputs.items()}
    with jax.numpy_rank_promotion("raise"):
        output, gradients = jax.jit(_with_everything(call))(inputs)
    agree(output, call.law(inputs, **_everything(call)).output)
    _agree_gradients(call, inputs, gradients)


def _everything(call: Call) -> dict[str, Any]:
    """Return options with a mask of every kind and rank, sinks and a cap; none for sdpa, whose own route has none of them."""
    if call.op == "sdpa":
        return {}
    lengths = {"q_lengths": np.array([4, 3]), "kv_lengths": np.array([3, 4])}
    ids = {"q_segment_ids": np.array([[0, 0, 0, 1]])}
    return lengths | ids | {"softmax_aux": np.float32([0.5, -0.5]), "sliding_window": (2, 0), "logits_soft_cap": 5.0}


def _with_everything(call: Call) -> Callable[[Any], Any]:
    def run(inputs: Any) -> Any:
        output, pull = jax.vjp(lambda inputs: call.run(inputs, **_everything(call)), inputs)
        return output, pull(jnp.asarray(call.cotangent))[0]

    return run


def _agree_gradients(call: Call, inputs: Any, gradients: Any) -> None:
    law = call.law(inputs, **_everything(call)).gradients(call.cotangent)
    agree(gradients, {name: getattr(law, name) for name in inputs}, dtype=call.dtype, ulps=8)


@transform("`jax.checking_leaks`")
def under_leak_checking(call: Call) -> None:
    with jax.checking_leaks():
        got = jax.jit(jax.vmap(jax.grad(call.loss)))(stacked([call]))
    agree({name: x[0] for name, x in got.items()}, call.gradients())


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_operation_obeys_the_law_under_every_transform_or_says_that_it_has_no_such_derivative(name, op):
    call, wanted = Call(op), TRANSFORMS[name]
    if has(call, wanted):
        wanted.check(call)
        return
    with pytest.raises(ao.DerivativeError, match=f'^{call.route} has no .*use impl="vanilla", which has every derivative'):
        wanted.check(call)


def has(call: Call, wanted: Transform) -> bool:
    return LEVELS.index(call.derivatives) >= LEVELS.index(wanted.needs)


# ---------------------------------------------------------------- the page


def table() -> str:
    names = (*OPERATIONS, *LEAD)
    lines = ["| transform | " + " | ".join(f"`{op}`" for op in names) + " |", "|---" * (len(names) + 1) + "|"]
    for name, wanted in TRANSFORMS.items():
        cells = ("yes" if has(Call(LEAD.get(op, op)), wanted) else "error" for op in names)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([BEGIN, "", *lines, "", END])


def test_the_page_has_the_table_of_these_tests():
    assert table() in PAGE.read_text(), f"{PAGE.name} is stale: run python tests/test_transforms.py"


def test_every_other_name_of_the_registry_leads_to_one_of_these_routes():
    assert {*OPERATIONS, *LEAD} == set(ao.OperationRegistry.names())
    for name, leads_to in LEAD.items():
        assert Call(name).route == Call(leads_to).route == f"{leads_to}/native"


# ---------------------------------------------------------------- what the errors catch


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda f, x: jax.jvp(f, (x,), (x,)),
        lambda f, x: jax.eval_shape(lambda x: jax.jvp(f, (x,), (x,)), x),
        lambda f, x: jax.jvp(jax.vmap(f), (x[None],), (x[None],)),
        lambda f, x: jax.jvp(jax.jit(f), (x,), (x,)),
        lambda f, x: jax.jit(lambda x: jax.jvp(jax.jit(f), (x,), (x,)))(x),
        lambda f, x: jax.jvp(jax.checkpoint(f), (x,), (x,)),
        lambda f, x: jax.jvp(lambda x: jax.lax.scan(lambda c, x: (c, f(x)), 0, x[None])[1], (x,), (x,)),
        lambda f, x: jax.linearize(f, x)[1](x),
        lambda f, x: jax.jit(jax.jacfwd(f))(x),
        lambda f, x: jax.jacrev(jax.jacfwd(f))(x),
    ],
    ids=[
        "direct",
        "abstract",
        "vmap",
        "jit inside",
        "jit around",
        "checkpoint",
        "scan",
        "linearize",
        "jacfwd",
        "jacrev of jacfwd",
    ],
)
def test_forward_mode_of_a_route_without_it_names_route_and_remedy_wherever_it_is_found_out(differentiate):
    call = Call("flash")
    match = r'^flash/native has no forward-mode derivative \(jvp, jacfwd, linearize\); take gradients .* use impl="vanilla"'
    with pytest.raises(ao.DerivativeError, match=match):
        differentiate(lambda query: call.run(call.inputs | {"query": query}), jnp.asarray(call.inputs["query"]))


def test_forward_mode_is_refused_before_the_kernel_is_traced(registry):
    traced = []
    _custom(registry, lambda request: traced.append(1) or request.query)
    query = jnp.ones((1, 4, 2, 3))
    with pytest.raises(ao.DerivativeError, match="^mine/native has no forward-mode derivative"):
        jax.jit(lambda x: jax.jvp(lambda x: ao.attention(x, x, x, impl="mine").attention_outputs, (x,), (x,)))(query)
    assert not traced


def _custom(registry, run: Callable[[Any], Any], **declared: Any) -> None:
    @registry.register
    class Mine(ao.OperationImpl):
        name = "mine"

        @ao.forward(supports={ao.Feature.GRADIENT}, **declared)
        def forward_native(self, request):
            return run(request)


@pytest.mark.parametrize(
    "second",
    [
        jax.hessian,
        lambda f: jax.jacrev(jax.grad(f)),
        lambda f: jax.hessian(jax.jit(f)),
        lambda f: jax.jit(jax.jacfwd(jax.grad(f))),
    ],
    ids=["hessian", "jacrev of grad", "hessian of jit", "jacfwd of grad"],
)
def test_a_forward_that_declares_no_derivatives_has_gradients_once(registry, second):
    _custom(registry, lambda request: jnp.sin(request.query))
    query = jnp.arange(6.0).reshape(1, 1, 2, 3)
    loss = lambda x: ao.attention(x, x, x, impl="mine").attention_outputs.sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(loss)(query), jnp.cos(query), rtol=1e-6)
    with pytest.raises(ao.DerivativeError, match='^mine/native has no second derivative; use impl="vanilla"'):
        second(loss)(query)


@pytest.mark.parametrize(
    "second",
    [
        lambda f: jax.hessian(jax.jit(f)),
        lambda f: jax.jit(jax.hessian(jax.checkpoint(f))),
        lambda f: jax.jacfwd(jax.grad(lambda x: jax.lax.scan(lambda total, x: (total + f(x), None), 0.0, x[None])[0])),
        lambda f: lambda x: jax.jvp(jax.vmap(jax.grad(jax.jit(f))), (x[None],), (x[None],)),
        lambda f: lambda x: jax.linearize(jax.grad(jax.jit(f)), x)[1](x),
    ],
    ids=["jit", "checkpoint", "scan", "vmap", "linearize"],
)
def test_a_second_derivative_is_refused_where_a_kernel_inside_the_forward_has_no_first(registry, second):
    """As in a ring, and in Pallas kernels: JAX would find the kernel in the traced gradient, and speak of it in its own words."""
    inner, kernel = (jax.custom_vjp(run) for run in (jnp.sin, lambda x: inner(x)))
    inner.defvjp(lambda x: (jnp.sin(x), x), lambda x, cotangent: (cotangent * jnp.cos(x),))
    kernel.defvjp(lambda x: (inner(x), x), lambda x, cotangent: (cotangent * jnp.cos(x),))
    _custom(registry, lambda request: kernel(request.query))
    query = jnp.arange(6.0).reshape(1, 1, 2, 3)
    loss = lambda x: ao.attention(x, x, x, impl="mine").attention_outputs.sum()  # noqa: E731
    np.testing.assert_allclose(jax.jit(jax.grad(jax.jit(loss)))(query), jnp.cos(query), rtol=1e-6)
    with pytest.raises(ao.DerivativeError, match='^mine/native has no second derivative; use impl="vanilla"'):
        second(loss)(query)


def test_a_forward_that_declares_every_derivative_has_them(registry):
    _custom(registry, lambda request: jnp.sin(request.query), derivatives=Derivatives.ANY)
    query = jnp.arange(6.0).reshape(1, 1, 2, 3)
    call = lambda x: ao.attention(x, x, x, impl="mine").attention_outputs  # noqa: E731
    np.testing.assert_allclose(jax.jvp(call, (query,), (query,))[1], jnp.cos(query) * query, rtol=1e-6)
    for wrong in ("any", {"float32": "any"}):
        with pytest.raises(TypeError, match="any'.*; allowed are members of Derivatives, or a mapping of dtypes to them"):
            ao.forward(derivatives=wrong)


@pytest.mark.parametrize("op", ["flash", "blocksparse"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_second_derivatives_of_16_bit_floats_are_refused_where_the_kernel_moves_bits(op, dtype):
    query = jnp.ones((1, 4, 2, 3), dtype)
    loss = lambda x: ao.attention(x, x, x, impl=op).attention_outputs.sum()  # noqa: E731
    for second in (jax.hessian(loss), jax.hessian(jax.jit(loss))):
        with pytest.raises(ao.DerivativeError, match=f"^{op}/native has no second derivative"):
            second(query)


def test_of_two_modes_at_once_the_inner_one_counts():
    """Mixed partial derivatives: reverse by the key inside, forward by the query outside."""
    query, key, value = (jnp.asarray(Call("sdpa", seed=seed).inputs["query"]) for seed in range(3))

    def by_key(op: str) -> Callable[[Any], Any]:
        return jax.grad(lambda key, query: ao.attention(query, key, value, impl=op).attention_outputs.sum())

    mixed = lambda op: jax.jvp(lambda query: by_key(op)(key, query), (query,), (value,))[1]  # noqa: E731
    np.testing.assert_allclose(mixed("blocksparse"), mixed("vanilla"), atol=1e-5)


@pytest.mark.parametrize("op", ["flash", "blocksparse"])
def test_a_step_of_decoding_against_a_long_cache_is_transformed_like_the_rest(op):
    rng = np.random.default_rng(0)
    query, cotangent = rng.standard_normal((2, 1, 1, 2, 3)).astype(np.float32)
    key, value = rng.standard_normal((2, 3, 1, 40, 1, 3)).astype(np.float32)
    lengths = np.array([[7], [40], [0]])

    def loss(query: Any, key: Any, value: Any, lengths: Any) -> Any:
        out = ao.attention(query, key, value, impl=f"{op}/native", kv_lengths=lengths, query_offset=39)
        return jnp.sum(out.attention_outputs * cotangent)

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    moved = lambda query, *others: jax.jvp(lambda query: gradient(query, *others)[0], (query,), (cotangent,))[1]  # noqa: E731
    over_rows = lambda f: jax.jit(jax.vmap(f, in_axes=(None, 0, 0, 0)))(query, key, value, lengths)  # noqa: E731
    gradients, seconds = over_rows(gradient), over_rows(moved)
    for row in range(3):

        def law(step: float, row: int = row) -> Any:
            arrays = query + step * cotangent.astype(np.float64), key[row], value[row]
            return reference.attention(*arrays, {"kv_lengths": lengths[row], "query_offset": 39}).gradients(cotangent)

        want = law(0.0)
        agree([x[row] for x in gradients], [want.query, want.key, want.value])
        agree(seconds[row], (law(1e-5).query - law(-1e-5).query) / 2e-5)


# ---------------------------------------------------------------- names for jax.checkpoint


def loops(function: Callable[..., Any], *arrays: Any) -> int:
    """Return how many loops over tiles a function traces to."""

    def count(jaxpr: Any) -> int:
        inner = (found for equation in jaxpr.eqns for found in jaxprs_in_params(equation.params))
        return sum(equation.primitive.name == "while" for equation in jaxpr.eqns) + sum(map(count, inner))

    return count(jax.make_jaxpr(function)(*arrays).jaxpr)


@pytest.mark.parametrize("op", ["flash", "blocksparse"])
@pytest.mark.parametrize("extra", [{}, {"softmax_aux": np.float32([0.5, -0.5])}], ids=["plain", "sinks"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saving_the_named_residuals_keeps_the_forward_kernel_from_running_again(op, extra, dtype, capsys):
    inputs = {name: jnp.asarray(np.nan_to_num(x), dtype) for name, x in Call(op).inputs.items()}
    call = Call(op)
    loss = lambda inputs: jnp.sum(jnp.sin(call.run(inputs, **extra)))  # noqa: E731
    forward, both = loops(loss, inputs), loops(jax.grad(loss), inputs)
    assert loops(jax.grad(jax.checkpoint(loss)), inputs) == both + forward > both
    assert loops(jax.grad(jax.checkpoint(loss, policy=save_names)), inputs) == both
    jax.ad_checkpoint.print_saved_residuals(jax.checkpoint(loss, policy=save_names), inputs)
    saved = capsys.readouterr().out
    assert saved.count(OUTPUT_NAME) == 1
    assert saved.count(RESIDUALS_NAME) == (2 if dtype == "float32" else 3)


def test_a_logsumexp_that_is_used_is_kept_with_the_residuals():
    """Else what uses it, as the merging of parts of the keys does, would run the forward kernel again for it."""
    x = jnp.ones((1, 4, 2, 3))
    loss = lambda x: jnp.sum(jnp.sin(ao.attention(x, x, x, impl="flash", return_logsumexp=True).logsumexp))  # noqa: E731
    assert loops(jax.grad(jax.checkpoint(loss, policy=save_names)), x) == loops(jax.grad(loss), x)


@pytest.mark.parametrize("op", ["vanilla", "sdpa"])
def test_the_output_of_a_route_in_plain_operations_is_named_too(op, capsys):
    call = Call(op)
    loss = lambda inputs: jnp.sum(jnp.sin(call.run(inputs)))  # noqa: E731
    jax.ad_checkpoint.print_saved_residuals(jax.checkpoint(loss, policy=save_names), call.inputs)
    assert capsys.readouterr().out.count(OUTPUT_NAME) == 1


@pytest.mark.parametrize(("op", "rows", "keys"), [*((op, T, T) for op in OPERATIONS), ("flash", 1, 12)])
def test_an_exported_call_may_leave_the_batch_size_open(op, rows, keys):
    """The same name of a dimension, in another scope each time, does not meet itself in a cache."""

    def inputs_of(batch: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        rng = np.random.default_rng(batch)
        shapes = {"query": (rows, H, D), "key": (keys, K, D), "value": (keys, K, D), "bias": (1, rows, keys)}
        inputs = {name: rng.standard_normal((batch, *shape)).astype(np.float32) for name, shape in shapes.items()}
        data = {"mask": rng.random((batch, 1, rows, keys)) < 0.7, "kv_lengths": rng.integers(1, keys, batch).astype(np.int32)}
        if op == "sdpa":
            del inputs["bias"], data["mask"], data["kv_lengths"]
        return inputs, data

    def loss(inputs: Any, data: Any) -> Any:
        output = ao.attention(**inputs, **data, causal=True, impl=op, metadata=SILENT).attention_outputs
        return jnp.sum(output), output

    (b,) = jax.export.symbolic_shape("b")
    open_shapes = jax.tree_util.tree_map(lambda x: jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype), inputs_of(2))
    assert ao.plan(op, **open_shapes[0], **open_shapes[1], causal=True, metadata=SILENT).estimate is None
    stored = jax.export.export(jax.jit(jax.grad(loss, has_aux=True)))(*open_shapes)
    for batch in (1, 3):
        inputs, data = inputs_of(batch)
        bias = {"bias": inputs["bias"]} if "bias" in inputs else {}
        law = reference.attention(inputs["query"], inputs["key"], inputs["value"], {"causal": True, **bias, **data})
        found, output = stored.call(inputs, data)
        agree(output, law.output)
        gradients = law.gradients(np.ones_like(law.output))
        agree(found, {name: getattr(gradients, name) for name in inputs})


@pytest.mark.parametrize(
    ("name", "shape", "axis"),
    [("query", "2, n, 4, 8", "length"), ("key", "2, 4, n, 8", "number of heads"), ("value", "2, 4, 4, n", "head dim")],
)
def test_no_other_size_may_be_left_open(name, shape, axis):
    shapes = dict.fromkeys(("query", "key", "value"), (2, 4, 4, 8)) | {name: jax.export.symbolic_shape(shape)}
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    with pytest.raises(TypeError) as error:
        ao.plan("vanilla", **arrays)
    assert str(error.value) == (
        f"{name} has the symbolic {axis} n; of {name} ({shape}) only the batch size may be symbolic: export once for each {axis}"
    )


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + table() + rest.partition(END)[2])
