"""Tiles that are padded, empty, or hold garbage give what the whole matrix gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_ops as ao
from attention_ops import masks
from attention_ops.kernels.blockwise import block_sizes, blockwise_attention
from attention_ops.kernels.dense import dense_attention
from attention_ops.kernels.interpreter import interpreted
from attention_ops.kernels.tiles import work_list
from attention_ops.selftest import reference

F32 = np.dtype("float32")


def _arrays(T, S, H=4, K=2, D=8, B=2):
    rng = np.random.default_rng(T * S)
    return tuple(jnp.asarray(rng.standard_normal((B, n, h, D)), jnp.float32) for n, h in ((T, H), (S, K), (S, K)))


def _blockwise(q, k, v, mask, bias=None, blocks=(None, None), by_data=True):
    return blockwise_attention(
        q,
        k,
        v,
        mask=mask,
        bias=bias,
        sinks=None,
        scale=0.3,
        soft_cap=None,
        block_q=blocks[0],
        block_kv=blocks[1],
        skip_by_data=by_data,
        softmax_dtype=F32,
    ).output


def _dense(q, k, v, mask, bias=None):
    return dense_attention(
        q,
        k,
        v,
        allowed=None if mask is None else mask.dense(q.shape[1], k.shape[1]),
        bias=bias,
        sinks=None,
        scale=0.3,
        soft_cap=None,
        dropout_probability=0.0,
        dropout_key=None,
        softmax_dtype=F32,
    ).output


@pytest.mark.parametrize(("T", "S", "offset"), [(199, 256, 0), (100, 128, 0), (3, 520, 514), (130, 130, -7)])
@pytest.mark.parametrize("by_data", [True, False])
def test_keys_beyond_every_query_may_hold_anything(T, S, offset, by_data):
    q, k, v = _arrays(T, S)
    seen = max(T + offset, 0)
    dirty_k, dirty_v = (x.at[:, seen:].set(jnp.nan) for x in (k, v))
    mask = masks.Causal(offset)

    def loss(function):
        return jax.jit(jax.value_and_grad(lambda q, k, v: jnp.sum(jnp.sin(function(q, k, v, mask))), argnums=(0, 1, 2)))

    dirty, dirty_gradients = loss(lambda *x: _blockwise(*x, blocks=(64, 128), by_data=by_data))(q, dirty_k, dirty_v)
    clean, clean_gradients = loss(_dense)(q, k, v)
    np.testing.assert_allclose(dirty, clean, rtol=1e-5)
    for a, b in zip(dirty_gradients, clean_gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("shape", [(2, 4, 70, 90), (1, 4, 1, 90), (2, 1, 70, 1), (1, 1, 1, 1)])
def test_bias_gradients_are_summed_over_broadcast_axes(shape):
    q, k, v = _arrays(70, 90)
    bias = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    mask = masks.Lengths(kv=jnp.array([90, 33]))
    run = lambda f: jax.jit(jax.grad(lambda b: jnp.sum(jnp.sin(f(q, k, v, mask, b)))))(bias)  # noqa: E731
    found = run(lambda *x: _blockwise(*x, blocks=(32, 40)))
    assert found.shape == shape
    np.testing.assert_allclose(found, run(_dense), atol=2e-5)


def _largest(jaxpr) -> int:
    sizes = [int(np.prod(v.aval.shape)) for e in jaxpr.eqns for v in e.outvars]
    for equation in jaxpr.eqns:
        for parameter in jax.tree_util.tree_leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                sizes.append(_largest(inner))
    return max(sizes, default=0)


@pytest.mark.parametrize("bias_shape", [None, (1, 1, 1, 65536), (1, 2, 65536, 1)])
def test_nothing_of_size_T_times_S_exists(bias_shape):
    T = 65536
    x = jax.ShapeDtypeStruct((1, T, 2, 16), jnp.float32)
    bias = None if bias_shape is None else jax.ShapeDtypeStruct(bias_shape, jnp.float32)
    mask = masks.Causal(0) & masks.Window(1023, 0, 0)

    def loss(q, k, v, bias):
        return _blockwise(q, k, v, mask, bias).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(x, x, x, bias)
    assert _largest(jaxpr.jaxpr) <= 4 * T * 2 * 16


def _equations(jaxpr) -> int:
    return sum(1 for _ in jaxpr.eqns) + sum(
        _equations(getattr(inner, "jaxpr", inner))
        for equation in jaxpr.eqns
        for inner in jax.tree_util.tree_leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        )
        if hasattr(getattr(inner, "jaxpr", inner), "eqns")
    )


@pytest.mark.parametrize("mask", [masks.Causal(0), masks.Causal(0) & masks.Window(1023, 0, 0), masks.Chunked(3000, 0)])
def test_the_program_does_not_grow_with_the_number_of_tiles(mask):
    def size(T):
        x = jax.ShapeDtypeStruct((1, T, 2, 16), jnp.float32)
        return _equations(
            jax.make_jaxpr(jax.grad(lambda q, k, v: _blockwise(q, k, v, mask).sum(), argnums=(0, 1, 2)))(x, x, x).jaxpr
        )

    assert size(65536) == size(8192)


@pytest.mark.parametrize("columns", [1, 2, 9])
@pytest.mark.parametrize("static", [True, False])
def test_the_work_list_visits_each_visible_tile_once_and_hides_in_what_is_not_full(static, columns):
    rng = np.random.default_rng(3)
    may = rng.random((2, 3, 5, columns)) < 0.6
    must = may & (rng.random(may.shape) < 0.5)
    work = work_list(may, must) if static else work_list(jnp.asarray(may), jnp.asarray(must))
    if columns == 1:
        assert work.exists == (False, False, True)
    for index in np.ndindex(2, 3, 5):
        order, counts = np.asarray(work.order[index]), np.asarray(work.counts[index])
        visited = []
        for place in range(counts[2]):
            tiles = [order[place], order[place] + 1] if place < counts[1] else [order[place]]
            visited += tiles
            if place < counts[0]:
                assert must[index][tiles].all()
        assert sorted(visited) == list(np.flatnonzero(may[index]))


DECODING = {
    "lengths": (2, 1, 3000, 8, 2, 64, {"kv_lengths": np.array([3000, 777])}),
    "no key": (2, 1, 2999, 8, 2, 32, {"kv_lengths": np.array([2999, 0]), "softmax_aux": np.ones(8, np.float32)}),
    "window": (1, 4, 3000, 8, 2, 64, {"query_offset": 2996, "causal": True, "sliding_window": (1000, 0)}),
    "one row per head": (1, 1, 5000, 8, 8, 64, {"causal": True, "logits_soft_cap": 5.0}),
    "many rows per head": (2, 8, 3000, 32, 8, 64, {"kv_lengths": np.array([3000, 777])}),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", DECODING)
def test_decoding_follows_the_law_with_unwritten_slots_of_nan(case, dtype):
    B, T, S, H, K, Dv, options = DECODING[case]
    rng = np.random.default_rng(1)
    q, k, v = (
        np.array(jnp.asarray(rng.standard_normal(shape), dtype)) for shape in ((B, T, H, 64), (B, S, K, 64), (B, S, K, Dv))
    )
    for row, length in enumerate(options.get("kv_lengths", [])):
        k[row, length:] = v[row, length:] = np.nan
    call = jax.jit(lambda *x: ao.attention(*x, impl="blocksparse/native", return_logsumexp=True, **options))
    found, exact, plain = call(q, k, v), reference.attention(q, k, v, options), reference.plain(q, k, v, options)
    yardstick = max(np.abs(plain.output.astype(np.float64) - exact.output).max(), 1e-6)
    assert np.abs(np.asarray(found.attention_outputs, np.float64) - exact.output).max() <= 4 * yardstick
    np.testing.assert_allclose(found.logsumexp, exact.logsumexp, rtol=2e-6 if dtype == "float32" else 2e-2)


def test_one_head_that_holds_nan_leaves_the_others_alone_while_decoding():
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 1, 8, 64), (1, 3000, 4, 64), (1, 3000, 4, 64)))
    k[0, 100, 2], v[0, 50, 1] = np.nan, np.inf
    allowed = np.ones((1, 8, 1, 3000), bool)
    allowed[:, 4:6, :, 100] = allowed[:, 2:4, :, 50] = False
    found = ao.attention(*map(jnp.asarray, (q, k, v)), impl="blocksparse/native", mask=jnp.asarray(allowed))
    exact = reference.attention(q, k, v, {"mask": allowed})
    np.testing.assert_allclose(found.attention_outputs, exact.output, atol=2e-6)
    visible = ao.attention(*map(jnp.asarray, (q, k, v)), impl="blocksparse/native").attention_outputs
    broken = np.flatnonzero(~np.isfinite(np.asarray(visible)).all(axis=-1))
    assert list(broken) == [2, 3, 4, 5], "only the heads that see the NaN and the Inf may show it"


def test_block_sizes_cover_the_lengths_with_little_padding():
    for T, S, groups in [(1, 7, 1), (513, 1000, 4), (4096, 4096, 1), (129, 65536, 8), (1, 65000, 4)]:
        block_q, block_kv = block_sizes(T, S, 2 * groups, 2, 64, None, None)
        assert -(-T // block_q) * block_q <= T + 8 * -(-T // block_q)
        assert -(-S // block_kv) * block_kv <= S + 8 * -(-S // block_kv)
    assert block_sizes(100, 100, 1, 1, 64, 7, 9) == (7, 9)


@pytest.mark.parametrize("impl", ["vanilla", "flash", "blocksparse", ["flash/gpu"]])
def test_sinks_of_minus_infinity_and_a_cotangent_of_nan_at_a_row_that_sees_nothing(impl):
    query, key, value = (np.random.default_rng(n).standard_normal((1, 3, 2, 4)).astype(np.float32) for n in range(3))
    mask = np.array([[True] * 3, [False] * 3, [True] * 3])
    sinks = np.float32([-np.inf, 0.5])

    def run(*arrays):
        return ao.attention(*arrays, impl=impl, mask=mask, softmax_aux=sinks).attention_outputs

    d_output = np.ones_like(query)
    poisoned = d_output.copy()
    poisoned[:, 1] = np.nan

    def found():
        output, pull_back = jax.vjp(run, query, key, value)
        return output, pull_back(poisoned)

    if isinstance(impl, list):
        with ao.compiling_for("a100"), interpreted():
            output, gradients = found()
    else:
        output, gradients = found()
    want = reference.attention(query, key, value, {"mask": mask, "softmax_aux": sinks})
    np.testing.assert_allclose(output, want.output, atol=1e-6)
    for name, gradient in zip(("query", "key", "value"), gradients, strict=True):
        np.testing.assert_allclose(gradient, getattr(want.gradients(d_output), name), atol=2e-6, err_msg=name)
