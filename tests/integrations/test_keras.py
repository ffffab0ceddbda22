"""Keras' own attention, layers and fit() beside the same through the registry; float64 where Keras is not right."""

from __future__ import annotations

import inspect
import logging

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import attention_ops as ao
from attention_ops.integrations.keras import dot_product_attention, use_attention_ops
from attention_ops.selftest import reference

B, T, S, N, D = 2, 5, 7, 3, 8
NAN = float("nan")


def floats(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def bools(*shape):
    """A random mask in which every row sees key 0."""
    mask = np.random.default_rng(7).random(shape) < 0.6
    mask[..., 0] = True
    return jnp.asarray(mask)


def exact(q, k, v, **options):
    return reference.attention(*(np.asarray(x) for x in (q, k, v)), options).output


@pytest.fixture
def qkv():
    return floats(B, T, N, D), floats(B, S, N, D, seed=1), floats(B, S, N, D, seed=2)


@pytest.fixture
def quiet():
    """Keras logs a traceback where it moves on to its next implementation."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# ---------------------------------------------------------------- the function

CASES = {
    "plain": {},
    "causal, T < S": {"is_causal": True, "scale": 0.3},
    "mask and bias": {"mask": bools(B, 1, T, S), "bias": floats(1, N, T, S)},
    "mask [B, T, S]": {"mask": bools(B, T, S)},
    "mask of integers": {"mask": bools(B, 1, 1, S).astype(jnp.int32)},
    "mask [T, S] and causal": {"mask": bools(T, S), "is_causal": True},
}


@pytest.fixture(scope="module")
def answers(outputs_and_gradients):
    arrays = floats(B, T, N, D), floats(B, S, N, D, seed=1), floats(B, S, N, D, seed=2)
    logging.disable(logging.CRITICAL)
    sides = [
        outputs_and_gradients({case: (lambda *a, o=options, f=f: f(*a, **o), arrays) for case, options in CASES.items()})
        for f in (dot_product_attention, keras.ops.dot_product_attention)
    ]
    logging.disable(logging.NOTSET)
    return sides


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients(case, answers, close):
    ours, theirs = answers
    close(ours[case], theirs[case])


SIDES = dot_product_attention, keras.ops.dot_product_attention


def test_the_signature_is_that_of_keras():
    ours, theirs = (inspect.signature(f).parameters for f in SIDES)
    assert {name: p.default for name, p in ours.items()} == {name: p.default for name, p in theirs.items()}


def test_grouped_heads_and_one_query(close):
    q, k, v = floats(B, 1, 4, D), floats(B, S, 2, D, seed=1), floats(B, S, 2, D, seed=2)
    for options in ({}, {"is_causal": True}):  # a single query sees key 0 only: Keras aligns top-left
        close(*(jax.jit(lambda *a: f(*a, **options))(q, k, v) for f in SIDES))  # noqa: B023


def test_dtypes_are_promoted_as_keras_does(qkv):
    q, k, v = qkv
    mixed = q.astype(jnp.bfloat16), k, v
    assert dot_product_attention(*mixed).dtype == keras.ops.dot_product_attention(*mixed).dtype == jnp.float32
    low = tuple(x.astype(jnp.bfloat16) for x in qkv)
    bias = floats(B, N, T, S)
    found = dot_product_attention(*low, bias=bias)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(found, np.float64), exact(*low, bias=np.asarray(bias.astype(jnp.bfloat16), np.float64)), atol=0.02
    )


# ---------------------------------------------------------------- flash_attention: None, True, False


def operations(*args, **options):
    with ao.record_plans() as plans:
        dot_product_attention(*args, **options)
    return [plan.operation for plan in plans]


def test_none_decides_true_requires_and_false_forbids(qkv):
    assert operations(*qkv) == ["vanilla"]  # the choice of "auto" for few logits
    assert operations(*qkv, flash_attention=True) == ["flash"]
    assert operations(*qkv, flash_attention=False) == ["sdpa"]
    assert operations(*qkv, flash_attention=False, mask=bools(T, S)) == ["vanilla"]
    with ao.use("blocksparse"):
        assert operations(*qkv) == ["blocksparse"]
        assert operations(*qkv, flash_attention=True) == ["flash"]
        assert operations(*qkv, flash_attention=False) == ["sdpa"]
    routed = keras.src.backend.nn
    with use_attention_ops(["vanilla", "blocksparse"]), ao.record_plans() as plans:
        for flag in (None, True, False):
            routed.dot_product_attention(*qkv, flash_attention=flag)
    assert [plan.operation for plan in plans] == ["vanilla", "blocksparse", "vanilla"]
    assert plans[0].notes[0] == "name chosen by attention_ops.integrations.keras.use_attention_ops"


def test_true_raises_every_reason(qkv, registry):
    for name in ("flash", "blocksparse"):

        class Weak(ao.OperationImpl):
            @ao.forward(supports={ao.Feature.GRADIENT})
            def forward_native(self, request): ...

        registry.register(name=name, override=True)(Weak)
    with pytest.raises(ao.NoRouteError) as error:
        dot_product_attention(*qkv, is_causal=True, attn_logits_soft_cap=9.0, flash_attention=True)
    lines = str(error.value).splitlines()
    assert lines[0].startswith("flash_attention=True leaves cudnn_flash > flash > blocksparse, and no route of")
    for reason in (
        "cudnn_flash: has no route for cpu, only for cuda",
        "flash/native: does not support causal masking",
        "flash/native: does not support logits_soft_cap",
        "blocksparse/native: does not support causal masking",
        "blocksparse/native: does not support logits_soft_cap",
    ):
        assert f"  {reason}" in lines
    assert dot_product_attention(*qkv, is_causal=True, attn_logits_soft_cap=9.0).shape == (B, T, N, D)


# ---------------------------------------------------------------- layers


def layer_cases():
    x, memory = floats(B, T, 16), floats(B, S, 16, seed=1)
    padded = jnp.arange(S) < jnp.array([[4], [7]])
    multi = keras.layers.MultiHeadAttention(N, D)
    grouped = keras.layers.GroupQueryAttention(D, 4, 2)
    windowed = keras.layers.MultiHeadAttention(N, D, sliding_window=2)
    return {
        "multi-head, causal": (multi, (x, x), {"use_causal_mask": True}),
        "multi-head, attention_mask": (multi, (x, memory), {"attention_mask": bools(B, T, S)}),
        "multi-head, causal and padded": (multi, (memory, memory), {"use_causal_mask": True, "value_mask": padded}),
        "multi-head, window": (windowed, (x, x), {"use_causal_mask": True}),
        "grouped, causal": (grouped, (x, x), {"use_causal_mask": True}),
        "grouped, padded": (grouped, (x, memory), {"value_mask": padded}),
    }


def test_layers_give_what_keras_gives(outputs_and_gradients, close):
    cases = layer_cases()
    for layer, (x, memory), _ in cases.values():
        if not layer.built:
            layer.build(x.shape, memory.shape)
    calls = {name: (lambda *a, f=layer, o=options: f(*a, **o), arrays) for name, (layer, arrays, options) in cases.items()}
    theirs = outputs_and_gradients(calls)
    with use_attention_ops("vanilla"), ao.record_plans() as plans:
        ours = outputs_and_gradients(calls)
    assert [plan.operation for plan in plans] == ["vanilla"] * len(calls)
    assert str(plans[0].spec.mask) == "causal"  # as a fact, not as an array
    for name in calls:
        close(ours[name], theirs[name])
    name = "multi-head, causal and padded"
    with use_attention_ops("blocksparse"), ao.record_plans() as plans:
        close(outputs_and_gradients({name: calls[name]})[name], theirs[name])
    assert plans[0].operation == "blocksparse"


def language_model():
    """A causal decoder over padded tokens, the same at every call."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(11, 16, mask_zero=True)(tokens)
    x = keras.layers.Add()([x, keras.layers.MultiHeadAttention(2, 8)(x, x, use_causal_mask=True)])
    model = keras.Model(tokens, keras.layers.Dense(11)(x))
    model.compile(keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_fit_has_the_losses_of_keras():
    tokens = np.random.default_rng(0).integers(1, 11, (12, 8))
    tokens[::3, 5:] = 0  # padding: its rows see nothing, where Keras gives a mean and we give 0, so they get no weight

    def losses():
        arguments = {"sample_weight": tokens != 0, "batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
        return language_model().fit(tokens, tokens, **arguments).history["loss"]

    theirs = losses()
    with use_attention_ops("flash"), ao.record_plans() as plans:
        ours = losses()
    assert {plan.operation for plan in plans} == {"flash"}
    assert ours[1] < ours[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_a_compiled_model_keeps_its_attention_until_it_is_compiled_again():
    tokens = np.ones((4, 8), int)
    model = language_model()
    model.fit(tokens, tokens, verbose=0)
    with use_attention_ops(), ao.record_plans() as plans:
        model.fit(tokens, tokens, verbose=0)
        assert plans == []
        model.compile(model.optimizer, model.loss)
        model.fit(tokens, tokens, verbose=0)
        assert plans
    model.fit(tokens, tokens, verbose=0)  # runs what was compiled inside


# ---------------------------------------------------------------- the routing


def test_the_routing_ends_and_nests(qkv):
    module = keras.src.backend.jax.nn
    original = module.dot_product_attention

    def now():
        with ao.record_plans() as plans:
            keras.ops.dot_product_attention(*qkv)
        return [plan.operation for plan in plans]

    with use_attention_ops("flash"):
        assert now() == ["flash"]
        with use_attention_ops(["cudnn_flash", "blocksparse"]):
            assert now() == ["blocksparse"]
        with use_attention_ops():
            assert now() == ["vanilla"]
        with ao.use("sdpa"):
            assert now() == ["sdpa"]
    assert module.dot_product_attention is original
    assert now() == []

    first, second = use_attention_ops("flash"), use_attention_ops("blocksparse")
    first.restore()
    first.restore()
    assert now() == ["blocksparse"]
    wrapper = module.dot_product_attention
    second.restore()
    assert module.dot_product_attention is original
    np.testing.assert_array_equal(wrapper(*qkv), original(*qkv))  # one that was kept calls Keras again

    with pytest.raises(ZeroDivisionError), use_attention_ops("flash"):
        raise ZeroDivisionError
    assert module.dot_product_attention is original
    with pytest.raises(ao.UnknownOperationError, match="no operation is named 'flahs'"):
        use_attention_ops("flahs")
    with pytest.raises(ao.UnknownOperationError, match="no route is named 'flash/natve'; flash has flash/gpu"):
        use_attention_ops("flash/natve")
    with pytest.raises(ao.NoRouteError, match="the fallback policy is 'error'"):  # noqa: SIM117
        with use_attention_ops("cudnn_flash", metadata=ao.OperationMetadata(fallback="error")):
            keras.ops.dot_product_attention(*qkv)
    assert module.dot_product_attention is original


def test_functional_models_and_symbolic_tensors():
    inputs = [keras.Input((T, N, D)) for _ in range(3)]
    with use_attention_ops("flash"), ao.record_plans() as plans:
        model = keras.Model(inputs, keras.ops.dot_product_attention(*inputs, is_causal=True))
        model([floats(B, T, N, D)] * 3)
    assert plans[-1].operation == "flash"
    with pytest.raises(TypeError, match="query is a symbolic KerasTensor; .* call keras.ops.dot_product_attention"):
        dot_product_attention(*inputs)


def test_an_error_begins_with_the_argument_that_was_given(qkv):
    for options, message in (
        ({"scale": "x"}, "scale must be a number"),
        ({"is_causal": 1}, "is_causal must be True or False"),
        ({"attn_logits_soft_cap": -1.0}, "attn_logits_soft_cap is -1.0; allowed"),
        ({"attn_logits_soft_cap": -1.0, "flash_attention": True}, "attn_logits_soft_cap is -1.0; allowed"),
        ({"mask": bools(B, T, T)}, r"mask has shape \(2, 5, 5\); .* = \(2, 5, 7\)"),
        ({"mask": bools(T, T)}, r"mask has shape \(5, 5\); .* = \(2, 3, 5, 7\)"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            dot_product_attention(*qkv, **options)
    with pytest.raises(TypeError, match=r"scale must be one real number, found a traced float32\[3, 1\]"):
        jax.jit(lambda scale: dot_product_attention(*qkv, scale=scale))(jnp.ones((N, 1)))
    with pytest.raises(TypeError, match="^query must be an array, found NoneType"):
        dot_product_attention(None, *qkv[1:])
    with pytest.raises(ValueError, match=r"^query has shape \(3, 8\); allowed is \[batch, length, heads, dim\]"):
        dot_product_attention(qkv[0][0, 0], *qkv[1:])
    for implementation in (3, ao.OperationRegistry.create("flash"), {"flash"}):
        with pytest.raises(TypeError, match="^implementation is .*; allowed is an operation's name or a non-empty sequence"):
            use_attention_ops(implementation)


def test_metadata_of_another_kind_is_refused_at_once():
    with pytest.raises(TypeError, match="metadata must be an OperationMetadata, found dict"):
        use_attention_ops("flash", metadata={})


def test_another_backend_is_refused(qkv, monkeypatch):
    monkeypatch.setattr(keras.config, "backend", lambda: "torch")
    for call in (use_attention_ops, lambda: dot_product_attention(*qkv)):
        with pytest.raises(
            RuntimeError, match="Keras runs on its torch backend, .* set the environment variable KERAS_BACKEND=jax"
        ):
            call()


# ---------------------------------------------------------------- where the answers differ (docs/from_keras.md)


def test_keras_reads_a_mask_of_three_dimensions_in_three_ways(quiet):
    """[B, T, S], as its layers and its TPU path do; but [N, T, S] where B == N, and [B, N, 1, S] where T == N."""
    for B, N, T in ((2, 3, 4), (3, 3, 4), (2, 4, 4)):
        q, k, v, mask = floats(B, T, N, D), floats(B, S, N, D, seed=1), floats(B, S, N, D, seed=2), bools(B, T, S)
        wanted = exact(q, k, v, mask=np.asarray(mask)[:, None])
        np.testing.assert_allclose(dot_product_attention(q, k, v, mask=mask), wanted, atol=2e-6)
        theirs = np.abs(jax.jit(keras.ops.dot_product_attention)(q, k, v, mask=mask) - wanted).max()
        assert theirs < 2e-6 if (B, N, T) == (2, 3, 4) else theirs > 1


def test_a_bias_of_three_dimensions_is_refused(qkv):
    with pytest.raises(
        ValueError, match=r"bias has shape .*: three dimensions are ambiguous, use bias\[:, None\] or bias\[None\]"
    ):
        dot_product_attention(*qkv, bias=floats(N, T, S))


def test_value_heads_of_another_width(quiet):
    layer, x = keras.layers.MultiHeadAttention(2, 8, value_dim=4), floats(B, T, 16)
    layer.build(x.shape, x.shape)
    with pytest.raises(TypeError, match="cannot reshape array"):
        layer(x, x)
    with use_attention_ops():
        output = layer(x, x)
    project = {name: np.asarray(getattr(layer, f"_{name}_dense").kernel) for name in ("query", "key", "value", "output")}
    q, k, v = (np.einsum("btf,fhd->bthd", x, project[name]) for name in ("query", "key", "value"))
    np.testing.assert_allclose(output, np.einsum("bthd,hdf->btf", exact(q, k, v), project["output"]), atol=1e-5)


def test_the_soft_cap_is_not_dropped(qkv):
    wanted = exact(*qkv, logits_soft_cap=0.5)
    np.testing.assert_allclose(dot_product_attention(*qkv, attn_logits_soft_cap=0.5), wanted, atol=2e-6)
    with use_attention_ops():
        capped = keras.src.backend.nn.dot_product_attention(*qkv, attn_logits_soft_cap=0.5)
    np.testing.assert_allclose(capped, wanted, atol=2e-6)
    theirs = keras.src.backend.nn.dot_product_attention(*qkv, attn_logits_soft_cap=0.5)  # off TPU: not applied
    np.testing.assert_array_equal(theirs, keras.src.backend.nn.dot_product_attention(*qkv))
    with pytest.raises(ValueError, match="only supported for JAX on TPU"):
        keras.ops.dot_product_attention(*qkv, attn_logits_soft_cap=0.5)


def test_rows_and_keys_that_are_hidden(qkv):
    q, k, v = qkv
    mask = jnp.ones((B, T, S), bool).at[0, 2].set(False).at[1, :, 4:].set(False)
    v = v.at[1, 4:].set(NAN)
    ours, theirs = dot_product_attention(q, k, v, mask=mask), keras.ops.dot_product_attention(q, k, v, mask=mask[:, None])
    np.testing.assert_allclose(ours, exact(q, k, v, mask=np.asarray(mask)[:, None]), atol=2e-6)
    assert np.all(ours[0, 2] == 0)
    assert np.all(np.isnan(theirs[1]))
    np.testing.assert_allclose(theirs[0, 2], v[0].mean(0), atol=1e-6)


def test_a_layer_forgets_flash_attention_false():
    assert keras.layers.MultiHeadAttention(2, 8, flash_attention=False)._flash_attention is None
    keras.config.disable_flash_attention()
    try:
        assert keras.layers.MultiHeadAttention(2, 8)._flash_attention is False
    finally:
        keras.config.enable_flash_attention()


def test_masks_that_are_floats_are_refused(qkv):
    with pytest.raises(TypeError, match="mask has dtype float32; allowed are booleans and 0/1 integers: .* is bias="):
        dot_product_attention(*qkv, mask=jnp.zeros((T, S)))
