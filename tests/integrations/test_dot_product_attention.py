"""`attention_ops.dot_product_attention` beside `jax.nn.dot_product_attention`; float64 where jax.nn is not right."""

from __future__ import annotations

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_ops as ao
from attention_ops.integrations.jax_nn import dot_product_attention
from attention_ops.selftest import reference

B, T, S, N, K, D = 2, 6, 9, 4, 2, 8
NAN = float("nan")


def bools(*shape):
    """A random mask in which every row sees key 0."""
    mask = np.random.default_rng(7).random(shape) < 0.6
    mask[..., 0] = True
    return jnp.asarray(mask)


def floats(*shape):
    return jnp.asarray(np.random.default_rng(8).standard_normal(shape), jnp.float32)


CASES = {
    "plain": ((T, S), {}),
    "causal": ((T, T), {"is_causal": True, "scale": 0.3}),
    "causal, fewer queries": ((T, S), {"is_causal": True}),
    "causal, one query": ((1, S), {"is_causal": True}),
    "causal, more queries": ((S, T), {"is_causal": True}),
    "window": ((T, S), {"local_window_size": 2}),
    "window, causal": ((S, S), {"local_window_size": (3, 1), "is_causal": True}),
    "mask and bias": ((T, S), {"mask": bools(B, N, T, S), "bias": floats(1, N, 1, S)}),
    "mask [N, T, S], bias [T, S]": ((T, S), {"mask": bools(N, T, S), "bias": floats(T, S)}),
    "mask [S], bias of integers": ((T, S), {"mask": bools(S), "bias": jnp.arange(S)[None, None, None]}),
    "lengths": (  # the gradients of the rows cut off are compared too: 0 on both sides
        (T, S),
        {"query_seq_lengths": jnp.array([6, 2], jnp.int32), "key_value_seq_lengths": jnp.array([3, 7], jnp.int32)},
    ),
}
ALSO_BY = {"window, causal": "blocksparse", "mask and bias": "flash", "lengths": "flash"}


def inputs(rng, T, S, batch=(B,), dtype=jnp.float32):
    shapes = (*batch, T, N, D), (*batch, S, K, D), (*batch, S, K, D)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


jax_nn = jax.jit(jax.nn.dot_product_attention, static_argnames=("is_causal", "return_residual", "local_window_size"))
"""Compiled: its many small operations would each be compiled alone."""


def test_the_signature_is_that_of_jax_nn():
    ours, theirs = (inspect.signature(f).parameters for f in (ao.dot_product_attention, jax.nn.dot_product_attention))
    assert {name: (p.kind, p.default) for name, p in ours.items()} == {name: (p.kind, p.default) for name, p in theirs.items()}


PAIRS = [*((case, None) for case in CASES), *ALSO_BY.items()]


@pytest.fixture(scope="module")
def answers(outputs_and_gradients):
    """Every case by both sides, each in one compiled program."""
    arrays = {case: inputs(np.random.default_rng(0), T, S) for case, ((T, S), _) in CASES.items()}
    ours = {
        pair: (partial(dot_product_attention, implementation=pair[1], **CASES[pair[0]][1]), arrays[pair[0]]) for pair in PAIRS
    }
    theirs = {case: (partial(jax.nn.dot_product_attention, **options), arrays[case]) for case, (_, options) in CASES.items()}
    return outputs_and_gradients(ours), outputs_and_gradients(theirs)


@pytest.mark.parametrize(("case", "implementation"), PAIRS)
def test_output_and_gradients(case, implementation, answers, close):
    ours, theirs = answers
    close(ours[case, implementation], theirs[case])


@pytest.mark.parametrize(
    "implementation", ["xla", "sdpa", "flash", "blocksparse", ("cudnn_flash", "blocksparse"), "flash/native"]
)
def test_implementations(implementation, rng, close):
    q, k, v = inputs(rng, T, T)
    with ao.record_plans() as plans:
        found = dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
    close(found, jax_nn(q, k, v, is_causal=True))
    named = implementation if isinstance(implementation, str) else implementation[-1]
    assert plans[0].operation == {"xla": "vanilla", "flash/native": "flash"}.get(named, named)


def test_the_gradient_of_the_bias(rng, close, outputs_and_gradients):
    q, k, v = inputs(rng, T, S)
    sides = (dot_product_attention, jax.nn.dot_product_attention)
    both = outputs_and_gradients({f: (lambda q, bias, f=f: f(q, k, v, bias), (q, floats(1, N, T, S))) for f in sides})
    close(*both.values())


def test_three_dimensions_and_residuals(rng, close):
    options = {"is_causal": True, "bias": floats(N, T, T), "return_residual": True}
    for batch in ((), (B,)):
        q, k, v = inputs(rng, T, T, batch)
        found = dot_product_attention(q, k, v, **options)
        assert found[1].shape == (*batch, T, N)
        close(found, jax_nn(q, k, v, **options))
    with pytest.raises(ValueError, match=r"query has shape \(4, 8\); allowed are \[batch, length, heads, dim\]"):
        dot_product_attention(q[0, 0], k[0], v[0])


def test_array_likes_jit_vmap_and_a_traced_scale(rng, close):
    q, k, v = inputs(rng, T, T)
    close(dot_product_attention(*(np.asarray(x) for x in (q, k, v))), jax_nn(q, k, v))
    scaled = jax.jit(jax.value_and_grad(lambda scale, attend: attend(q, k, v, scale=scale).sum()), static_argnums=1)
    close(scaled(0.4, dot_product_attention), scaled(0.4, jax.nn.dot_product_attention))
    mapped = jax.vmap(lambda q, k, v: dot_product_attention(q, k, v, implementation="blocksparse"))
    close(mapped(q, k, v), jax_nn(q, k, v))


def test_low_precision_is_nearer_to_float64_than_jax_nn(rng):
    dtype = jnp.bfloat16
    q, k, v = inputs(rng, 64, 64, dtype=dtype)
    exact = reference.attention(*(np.asarray(x) for x in (q, k, v)), {"causal": True})
    output, residual = dot_product_attention(q, k, v, is_causal=True, implementation="flash", return_residual=True)
    theirs = jax_nn(q, k, v, is_causal=True)
    assert output.dtype == residual.dtype == dtype
    errors = [np.linalg.norm(np.asarray(x, np.float64) - exact.output) for x in (output, theirs)]
    assert errors[0] <= errors[1]
    np.testing.assert_allclose(np.asarray(residual, np.float64), exact.logsumexp, rtol=2 * reference.epsilon(dtype))


def test_cudnn_is_that_kernel_or_an_error(rng):
    q, k, v = inputs(rng, T, T)
    with pytest.raises(ao.NoRouteError, match="no route of cudnn_flash/cuda takes this request on cpu:\n.* has no route for cpu"):
        dot_product_attention(q, k, v, implementation="cudnn")
    with pytest.raises(RuntimeError, match="cuDNN"):  # a NoRouteError is one too
        jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
    with pytest.raises(ao.UnknownOperationError, match="no operation is named 'cuddn'"):
        dot_product_attention(q, k, v, implementation="cuddn")


def test_none_takes_what_use_names(rng):
    with ao.use("blocksparse"), ao.record_plans() as plans:
        dot_product_attention(*inputs(rng, T, T))
        dot_product_attention(*inputs(rng, T, T), implementation="flash")
    assert [plan.operation for plan in plans] == ["blocksparse", "flash"]


@pytest.mark.parametrize(
    "scale", [jnp.ones((N, 1)), jnp.ones(D), jnp.asarray(True), jnp.asarray(1j)], ids=lambda s: f"{s.dtype}{s.shape}"
)
def test_a_traced_scale_is_one_real_number(scale, rng):
    q, k, v = inputs(rng, T, T)
    with pytest.raises(TypeError, match=rf"scale must be one real number, found a traced {scale.dtype}\[.*pass scale=1.0"):
        jax.jit(lambda scale: dot_product_attention(q, k, v, scale=scale))(scale)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": NAN}, "scale is nan; allowed"),
        ({"scale": "softmax_scale"}, "scale must be a number .*, found 'softmax_scale'"),
        ({"is_causal": "causal"}, "is_causal must be True or False"),
        ({"local_window_size": (1, 2, 3)}, "local_window_size has 3 numbers"),
        ({"query_seq_lengths": jnp.ones(3, int)}, r"query_seq_lengths has shape \(3,\); allowed"),
        ({"key_value_seq_lengths": jnp.ones(B)}, "key_value_seq_lengths must be integers"),
        ({"return_residual": 1}, "return_residual must be True or False"),
        ({"implementation": 3}, "implementation is 3; allowed"),
        ({"mask": bools(B, T, T)}, r"mask has shape \(2, 6, 6\); .* = \(2, 4, 6, 6\); pass mask\[:, None\]"),
        ({"bias": floats(T, S)}, r"bias has shape \(6, 9\); .* = \(2, 4, 6, 6\)$"),
        ({"mask": ao.masks.Causal()}, "mask must be an array, found Causal"),
    ],
    ids=lambda options: next(iter(options)) if isinstance(options, dict) else "",
)
def test_an_error_begins_with_the_argument_that_was_given(options, message, rng):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        dot_product_attention(*inputs(rng, T, T), **options)


def test_a_bias_of_integers_is_not_truncated(rng):
    q, k, v = inputs(rng, T, S)
    hidden = np.arange(S) >= 4
    found = dot_product_attention(q, k, v, bias=np.where(hidden, -(2**40), 0))  # 0 in the int32 that jax.nn makes of it
    exact = reference.attention(*(np.asarray(x) for x in (q, k, v)), {"mask": ~hidden[None, None, None]}).output
    np.testing.assert_allclose(found, exact, atol=2e-6)


def test_an_error_of_a_kernel_is_left_as_it_is(rng, registry):
    @registry.register(name="broken")
    class Broken(ao.OperationImpl):
        @ao.forward(supports=ao.Feature.ALL)
        def forward_native(self, request):
            raise ValueError("causal is what this kernel says")

    with pytest.raises(ValueError, match="^causal is what this kernel says"):
        dot_product_attention(*inputs(rng, T, T), implementation="broken")


# ---------------------------------------------------------------- where the answers differ (docs/from_jax_nn.md)


def test_a_row_that_sees_nothing_gives_0(rng):
    q, k, v = inputs(rng, T, T)
    mask = jnp.ones((T, T), bool).at[2].set(False)
    output, residual = dot_product_attention(q, k, v, mask=mask, return_residual=True)
    theirs = jax_nn(q, k, v, mask=mask)
    assert np.all(output[:, 2] == 0)
    assert np.all(residual[:, 2] == -np.inf)
    np.testing.assert_allclose(theirs[:, 2], np.repeat(v.mean(1), N // K, 1), atol=1e-6)  # the mean of all values


def test_hidden_keys_may_hold_anything(rng):
    q, k, v = inputs(rng, T, S)
    lengths = jnp.array([4, 5], jnp.int32)
    padding = jnp.arange(S)[:, None, None] >= lengths[:, None, None, None]
    k, v = (jnp.where(padding, NAN, x) for x in (k, v))
    exact = reference.attention(*(np.asarray(x) for x in (q, k, v)), {"kv_lengths": np.asarray(lengths)}).output
    np.testing.assert_allclose(dot_product_attention(q, k, v, key_value_seq_lengths=lengths), exact, atol=2e-6)
    assert np.all(np.isnan(jax_nn(q, k, v, key_value_seq_lengths=lengths)))


def test_the_residual_has_a_gradient(rng):
    q, k, v = inputs(rng, T, T)
    ours, theirs = (
        jax.jit(jax.grad(lambda q: attend(q, k, v, return_residual=True)[1].sum()))(q)  # noqa: B023
        for attend in (dot_product_attention, jax.nn.dot_product_attention)
    )
    exact = reference.attention(*(np.asarray(x) for x in (q, k, v)), {})
    wanted = exact.gradients(np.zeros((B, T, N, D)), d_logsumexp=np.ones((B, T, N))).query
    np.testing.assert_allclose(ours, wanted, atol=5e-6)
    assert np.all(theirs == 0)


def test_float64_is_computed_in_float64(rng):
    with jax.enable_x64(True):
        q, k, v = inputs(rng, T, T, dtype=jnp.float64)
        exact = reference.attention(*(np.asarray(x) for x in (q, k, v)), {}).output
        ours, theirs = np.asarray(dot_product_attention(q, k, v)), np.asarray(jax_nn(q, k, v))
    assert np.abs(ours - exact).max() < 1e-14
    assert np.abs(theirs - exact).max() > 1e-9


def test_float16_under_jit_on_cpu(rng):
    q, k, v = inputs(rng, T, T, dtype=jnp.float16)
    assert jax.jit(dot_product_attention)(q, k, v).dtype == jnp.float16
    with pytest.raises(ValueError, match="F16_F16_F32"):
        jax.jit(jax.nn.dot_product_attention)(q, k, v)


def test_the_value_may_have_its_own_head_dim(rng):
    q, k, v = inputs(rng, T, T)
    output = dot_product_attention(q, k, v[..., :5])
    assert output.shape == (B, T, N, 5)
    with pytest.raises(ValueError, match="value shape should be"):
        jax.nn.dot_product_attention(q, k, v[..., :5])


def test_what_is_refused_here_and_there(rng):
    q, k, v = inputs(rng, T, T)
    for options, ours, there in (
        ({"mask": jnp.ones((1, 1, T, T), int)}, (TypeError, "mask.astype"), (ValueError, "mask dtype should be bool")),
        ({"bias": jnp.ones((T, T), bool)}, (TypeError, "a boolean mask goes into mask="), None),
        ({"local_window_size": (-1, 2)}, (ValueError, "local_window_size left is -1; allowed is 0 or more"), None),
    ):
        with pytest.raises(ours[0], match=ours[1]):
            dot_product_attention(q, k, v, **options)
        if there is None:
            jax_nn(q, k, v, **options)
        else:
            with pytest.raises(there[0], match=there[1]):
                jax.nn.dot_product_attention(q, k, v, **options)
    mixed = q, k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
    with pytest.raises(TypeError, match="query float32, key bfloat16, value bfloat16"):
        dot_product_attention(*mixed)
    with pytest.raises(ValueError, match="query dtype should be bfloat16"):
        jax.nn.dot_product_attention(*mixed)
    plan = ao.plan("cudnn_flash", *(x.astype(jnp.bfloat16) for x in (q, k, v)), device="h100", return_logsumexp=True)
    assert plan.decisions[0].route == "cudnn_flash/cuda"
    assert "does not support return_logsumexp" in plan.reasons
