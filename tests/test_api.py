"""One call from the front door to the route: what is chosen, reported, compiled and returned."""

from __future__ import annotations

import collections
import re
import subprocess
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_ops as ao
from attention_ops import Feature
from attention_ops.kernels.blockwise import blockwise_attention
from attention_ops.masks import Causal

EVERY = ("vanilla", "sdpa", "flash", "blocksparse", "cudnn_flash", "auto")


def test_a_named_fallback_warns_once_with_every_reason(qkv):
    q, k, v = qkv()
    with pytest.warns(ao.FallbackWarning, match="cudnn_flash: has no route for cpu, only for cuda") as caught:
        ao.attention(q, k, v, impl="cudnn_flash")
        ao.attention(q, k, v, impl="cudnn_flash")
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_the_policy_of_the_metadata(qkv):
    q, k, v = qkv()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ao.attention(q, k, v, impl="cudnn_flash", metadata=ao.OperationMetadata(fallback="silent"))
        ao.attention(q, k, v, impl="auto")
        ao.attention(q, k, v, impl=["cudnn_flash", "flash"])
    with pytest.raises(ao.NoRouteError, match="the fallback policy is 'error'"):
        ao.attention(q, k, v, impl="cudnn_flash", metadata=ao.OperationMetadata(fallback="error"))


def test_use_wins_over_operations_and_defaults_but_not_over_the_call(qkv):
    q, k, v = qkv()
    op = ao.OperationRegistry.create("flash")

    def operations(call):
        with ao.record_plans() as plans:
            call()
        return [(plan.operation, plan.notes[0]) for plan in plans]

    assert operations(lambda: op(q, k, v)) == [("flash", "name chosen by operation")]
    assert operations(lambda: ao.attention(q, k, v)) == [("vanilla", "name chosen by default")]
    with ao.use("blocksparse"):
        assert operations(lambda: op(q, k, v)) == [("blocksparse", "name chosen by attention_ops.use")]
        assert operations(lambda: ao.attention(q, k, v))[0][0] == "blocksparse"
        assert operations(lambda: ao.attention(q, k, v, impl="flash")) == [("flash", "name chosen by the call")]
        with ao.use("vanilla"):
            assert operations(lambda: op(q, k, v))[0][0] == "vanilla"
        assert operations(lambda: op(q, k, v))[0][0] == "blocksparse"
    assert operations(lambda: op(q, k, v))[0][0] == "flash"
    for bad in ((), [1], None):
        with pytest.raises(TypeError, match="allowed is an operation name or a non-empty sequence"), ao.use(bad):
            pass


def test_the_environment_wins_over_operations_and_configs_but_not_over_use(qkv, monkeypatch):
    q, k, v = qkv()
    monkeypatch.setenv("ATTENTION_OPS_IMPL", "cudnn_flash, blocksparse")
    with ao.record_plans() as plans:
        ao.OperationRegistry.create("flash")(q, k, v)
        ao.attention(q, k, v)
        ao.load_config("configs/smollm2_135m.yaml").build()(*qkv(H=9, K=3, D=64))
        with ao.use("vanilla"):
            ao.attention(q, k, v)
        ao.attention(q, k, v, impl="sdpa")
    assert [plan.operation for plan in plans] == ["blocksparse"] * 3 + ["vanilla", "sdpa"]
    assert {plan.notes[0] for plan in plans[:3]} == {"name chosen by ATTENTION_OPS_IMPL"}
    monkeypatch.setenv("ATTENTION_OPS_IMPL", "flsh")
    with pytest.raises(ao.UnknownOperationError, match="no operation is named 'flsh'"):
        ao.attention(q, k, v)


def test_use_is_seen_by_its_own_thread_only(qkv):
    q, k, v = qkv()
    seen = {}

    def work(name, barrier):
        with ao.use(name), ao.record_plans() as plans:
            barrier.wait()
            ao.attention(q, k, v)
            seen[name] = [plan.operation for plan in plans]

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=work, args=(name, barrier)) for name in ("flash", "vanilla")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"flash": ["flash"], "vanilla": ["vanilla"]}


def test_a_compiled_function_keeps_its_plan(qkv):
    q, k, v = qkv()
    call = jax.jit(lambda q, k, v: ao.attention(q, k, v).attention_outputs)
    with ao.use("flash"), ao.record_plans() as plans:
        call(q, k, v)
        assert [plan.operation for plan in plans] == ["flash"]
        with ao.use("vanilla"):
            call(q, k, v)
    assert len(plans) == 1


def test_record_plans_nests(qkv):
    q, k, v = qkv()
    with ao.record_plans() as outer:
        ao.attention(q, k, v, impl="flash")
        with ao.record_plans() as inner:
            ao.attention(q, k, v, impl="vanilla")
    assert [plan.operation for plan in outer] == ["flash", "vanilla"]
    assert [plan.operation for plan in inner] == ["vanilla"]


def test_under_jit_only_the_kernel_remains(qkv):
    q, k, v = qkv(T=16, S=16, D=16)
    op = ao.OperationRegistry.create("blocksparse")

    def direct(q, k, v):
        return blockwise_attention(
            q,
            k,
            v,
            mask=Causal(0),
            bias=None,
            sinks=None,
            scale=0.25,
            soft_cap=None,
            block_q=None,
            block_kv=None,
            skip_by_data=True,
            softmax_dtype=np.dtype("float32"),
        ).output

    def through_the_door(q, k, v):
        return op(q, k, v, causal=True).attention_outputs

    def operations(function):
        return collections.Counter(re.findall(r"stablehlo\.\w+", jax.jit(function).lower(q, k, v).as_text()))

    assert operations(through_the_door) == operations(direct)
    ours, theirs = (jax.grad(lambda *x, f=f: f(*x).sum(), argnums=(0, 1, 2)) for f in (through_the_door, direct))
    assert operations(ours) <= operations(theirs)


@pytest.mark.parametrize("name", ["vanilla", "sdpa", "flash", "blocksparse"])
def test_the_route_is_named_in_the_program(name, qkv):
    q, k, v = qkv()
    call = jax.jit(lambda q, k, v: ao.attention(q, k, v, impl=name).attention_outputs)
    assert f"attention_ops/{name}/native" in call.lower(q, k, v).as_text(debug_info=True)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.filterwarnings("ignore::attention_ops.FallbackWarning")
@pytest.mark.parametrize(("B", "T", "S"), [(0, 4, 4), (2, 0, 0), (2, 0, 4), (2, 4, 0)])
def test_empty_axes_give_zeros(name, B, T, S):
    q, k = jnp.ones((B, T, 4, 8)), jnp.ones((B, S, 2, 8))
    v = jnp.ones((B, S, 2, 6))
    options = {"causal": True, "query_offset": 0, "return_logsumexp": True, "return_weights": True}
    out = ao.attention(q, k, v, impl=name, **options)
    assert out.attention_outputs.shape == (B, T, 4, 6)
    assert not out.attention_outputs.any()
    assert (out.logsumexp == -jnp.inf).all()
    assert out.logsumexp.shape == (B, T, 4)
    assert out.attention_weights.shape == (B, 4, T, S)
    grads = jax.grad(lambda *x: ao.attention(*x, impl=name).attention_outputs.sum(), argnums=(0, 1, 2))(q, k, v)
    assert not any(grad.any() for grad in grads)


def _misbehaving(registry, result, supports=Feature.ALL):
    @registry.register
    class Misbehaving(ao.OperationImpl):
        name = "misbehaving"
        fallback = ("vanilla",)

        @ao.forward(supports=supports)
        def forward_native(self, request):
            return result(request)

    return Misbehaving


def test_a_route_that_raises_is_an_error_and_no_other_is_tried(registry, qkv):
    def boom(request):
        raise ValueError("kernel exploded")

    _misbehaving(registry, boom)
    with pytest.raises(ValueError, match="kernel exploded"):
        ao.attention(*qkv(), impl="misbehaving")


def test_a_caller_error_tries_no_implementation(registry, qkv):
    calls = []
    _misbehaving(registry, lambda request: calls.append(1) or request.query)
    q, k, v = qkv(B=1, T=4)
    with pytest.raises(ValueError, match="its batch is 2, allowed are 1 and 1"):
        ao.attention(q, k, v, impl=["misbehaving", "vanilla"], mask=jnp.ones((2, 1, 4, 4), bool))
    assert not calls


@pytest.mark.parametrize(
    ("result", "match"),
    [
        (
            lambda r: r.query[:, :1],
            r"misbehaving/native returned attention_outputs of \(2, 1, 4, 16\) float32, expected \(2, 8, 4, 16\)",
        ),
        (lambda r: r.query.astype(jnp.bfloat16), "bfloat16, expected .* float32"),
        (lambda r: r.query, "returned no logsumexp, which it declares"),
        (lambda r: ao.AttentionOutput(r.query, logsumexp=r.query), "returned logsumexp of"),
    ],
)
def test_what_a_route_returns_is_checked(registry, qkv, result, match):
    _misbehaving(registry, result)
    with pytest.raises(TypeError, match=match):
        ao.attention(*qkv(), impl="misbehaving", return_logsumexp=True)


def test_what_was_not_asked_for_is_not_returned(qkv):
    out = ao.attention(*qkv(), impl="vanilla")
    assert out.attention_weights is None
    assert out.logsumexp is None


def test_a_wrapped_operation_keeps_causality_and_padding(registry, qkv):
    from attention_ops.operations.vanilla import Vanilla

    @registry.register
    class Mine(ao.OperationImpl):
        name = "mine"

        @ao.forward(supports=Feature.ALL)
        def forward_native(self, request):
            return Vanilla(self.metadata).forward_native(request)

    q, k, v = qkv()
    options = {"causal": True, "kv_lengths": jnp.array([3, 8])}
    mine, vanilla = (ao.attention(q, k, v, impl=name, **options).attention_outputs for name in ("mine", "vanilla"))
    np.testing.assert_array_equal(mine, vanilla)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.filterwarnings("ignore::attention_ops.FallbackWarning")
def test_changed_scalars_are_not_served_from_a_cache(name, qkv):
    q, k, v = qkv()
    op = ao.OperationRegistry.create(name)
    variants = [{}, {"softmax_scale": 2.0}, {"logits_soft_cap": 1.0}, {"causal": True}, {"sliding_window": 1}, {}]
    outs = [np.asarray(op(q, k, v, **options).attention_outputs) for options in variants]
    assert np.array_equal(outs[0], outs[-1])
    for a in range(len(outs) - 1):
        for b in range(a):
            assert np.abs(outs[a] - outs[b]).max() > 1e-3, (variants[a], variants[b])


def test_layers_of_two_kinds_in_one_process(qkv):
    q, k, v = qkv(T=16)
    op = ao.OperationRegistry.create("sdpa")
    full = op(q, k, v, causal=True).attention_outputs
    window = op(q, k, v, causal=True, sliding_window=(4, 0)).attention_outputs
    np.testing.assert_array_equal(full, op(q, k, v, causal=True).attention_outputs)
    assert jnp.abs(full - window)[:, 5:].max() > 1e-2
    np.testing.assert_allclose(full[:, :5], window[:, :5], atol=1e-6)


def test_dropout_is_no_state_of_the_operation(qkv):
    q, k, v = qkv()
    op = ao.OperationRegistry.create("vanilla")
    train = {"dropout_prob": 0.5, "deterministic": False, "dropout_rng": jax.random.key(1)}
    first, evaluation, third = (op(q, k, v, **o).attention_outputs for o in (train, {"dropout_prob": 0.5}, train))
    np.testing.assert_array_equal(first, third)
    assert jnp.abs(first - evaluation).max() > 0.1
    np.testing.assert_array_equal(evaluation, op(q, k, v).attention_outputs)


def test_runtime_dtype_is_the_dtype_of_the_output(qkv):
    q, k, _ = qkv()
    v = qkv(dtype=jnp.bfloat16)[2]
    for name in ("vanilla", "sdpa", "flash", "blocksparse"):
        out = ao.OperationRegistry.create(name, ao.OperationMetadata(runtime_dtype=jnp.bfloat16))(q, k, v)
        assert out.attention_outputs.dtype == jnp.bfloat16


def test_eager_dispatch_stays_small(qkv):
    """Not a time: the calls of Python functions that one eager call makes once its plan is cached."""
    q, k, v = qkv()
    op = ao.OperationRegistry.create("blocksparse")
    op(q, k, v, causal=True)
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    op(q, k, v, causal=True)
    sys.setprofile(None)
    assert calls < 150


def test_import_is_light():
    code = (
        "import sys, jax; before = set(sys.modules)\n"
        "import attention_ops as ao; ao.attention; ao.OperationRegistry; ao.masks.Causal\n"
        "heavy = {'ejkernel', 'eformer', 'pydantic', 'yaml', 'rich', 'click', 'matplotlib', 'torch'}\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert not new & heavy, new & heavy\n"
        "assert not any(name.startswith('attention_ops.operations') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_vmap_grad_and_scan_of_a_call(qkv):
    q, k, v = qkv(T=8)
    for name in ("vanilla", "blocksparse", "sdpa"):

        @jax.jit
        def call(q, k, v, name=name):
            return ao.attention(q, k, v, impl=name, causal=True).attention_outputs

        stacked = jnp.stack([q, q + 1])
        mapped = jax.vmap(call, in_axes=(0, None, None))(stacked, k, v)
        np.testing.assert_allclose(mapped, jnp.stack([call(x, k, v) for x in stacked]), atol=1e-5)
        gradient = jax.jit(jax.grad(lambda q, call=call: jnp.sum(call(q, k, v) ** 2)))
        np.testing.assert_allclose(jax.vmap(gradient)(stacked), jnp.stack([gradient(x) for x in stacked]), atol=1e-4)
        _, scanned = jax.lax.scan(lambda c, x, call=call: (c, call(x, k, v)), None, stacked)
        np.testing.assert_allclose(scanned, mapped, atol=1e-5)
