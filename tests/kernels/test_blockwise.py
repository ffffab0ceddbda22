"""Tiles that are padded, empty, or hold garbage give what the whole matrix gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_ops import masks
from attention_ops.kernels.blockwise import block_sizes, blockwise_attention
from attention_ops.kernels.dense import dense_attention

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


def test_block_sizes_cover_the_lengths_with_little_padding():
    for T, S, groups in [(1, 7, 1), (513, 1000, 4), (4096, 4096, 1), (129, 65536, 8), (1, 65000, 4)]:
        block_q, block_kv = block_sizes(T, S, 2 * groups, 2, 64, None, None)
        assert -(-T // block_q) * block_q <= T + 8 * -(-T // block_q)
        assert -(-S // block_kv) * block_kv <= S + 8 * -(-S // block_kv)
    assert block_sizes(100, 100, 1, 1, 64, 7, 9) == (7, 9)
