"""Flax' own attention and layers, NNX and Linen, beside the same with an `attention_fn` of ours."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import attention_ops as ao
from attention_ops.integrations.flax import attention_fn
from attention_ops.selftest import reference

B, T, S, H, D = 2, 5, 7, 4, 8
NAN = float("nan")
RNG = jax.random.key(3)


def floats(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def bools(*shape):
    """A random mask in which every row sees key 0."""
    mask = np.random.default_rng(7).random(shape) < 0.6
    mask[..., 0] = True
    return jnp.asarray(mask)


def qkv(*batch, K=H):
    return floats(*batch, T, H, D), floats(*batch, S, K, D, seed=1), floats(*batch, S, K, D, seed=2)


# ---------------------------------------------------------------- the function

DROPOUT = {"dropout_rng": RNG, "dropout_rate": 0.4}
CASES = {
    "plain": ((B,), {}),
    "no batch": ((), {"bias": floats(H, T, S), "mask": bools(T, S)}),
    "two batch axes": ((B, 3), {"bias": floats(1, 1, H, 1, S), "mask": bools(B, 1, 1, T, S)}),
    "mask of floats": ((B,), {"mask": bools(B, 1, 1, S).astype(jnp.float32)}),
    "dropout": ((B,), DROPOUT),
    "dropout of each weight": ((B,), {**DROPOUT, "broadcast_dropout": False, "mask": bools(T, S)}),
    "no dropout": ((B,), {**DROPOUT, "deterministic": True}),
}
NNX_CASES = {
    "causal, T < S": ((B,), {"is_causal": True}),
    "grouped heads": ((B,), {"K": 2}),
    "grouped heads with dropout": ((B,), {"K": 2, **DROPOUT, "bias": floats(B, H, T, S)}),
}


@pytest.fixture(scope="module")
def answers(outputs_and_gradients):
    def calls(function, cases):
        split = {case: (batch, {k: v for k, v in options.items() if k != "K"}) for case, (batch, options) in cases.items()}
        return {
            case: (lambda *a, o=options: function(*a, **o), qkv(*batch, K=cases[case][1].get("K", H)))
            for case, (batch, options) in split.items()
        }

    by_nnx = {case: made for case, made in {**CASES, **NNX_CASES}.items() if case != "two batch axes"}
    return (
        outputs_and_gradients(calls(attention_fn("vanilla"), {**CASES, **NNX_CASES})),
        outputs_and_gradients(calls(nnx.dot_product_attention, by_nnx)),
        outputs_and_gradients(calls(linen.dot_product_attention, CASES)),
    )


@pytest.mark.parametrize("case", [*CASES, *NNX_CASES])
def test_output_and_gradients(case, answers, close):
    ours, *theirs = answers
    for side in theirs:
        if case in side:
            close(ours[case], side[case])


def test_nnx_refuses_a_mask_that_broadcasts_along_one_of_two_batch_axes():
    (batch, options) = CASES["two batch axes"]
    with pytest.raises(TypeError, match="incompatible shapes for broadcasting"):
        nnx.dot_product_attention(*qkv(*batch), **options)


def test_every_argument_of_the_layers_is_a_parameter():
    """Linen drops, without a word, what an attention_fn does not name; NNX passes everything."""
    passed_by_linen = {"mask", "dropout_rng", "dropout_rate", "broadcast_dropout", "deterministic", "dtype", "precision"}
    passed_by_linen |= {"force_fp32_for_softmax", "qk_attn_weights_einsum", "attn_weights_value_einsum", "module"}
    assert passed_by_linen | {"is_causal"} <= set(inspect.signature(attention_fn()).parameters)


def test_dtypes(close):
    q, k, v = qkv(B)
    low = attention_fn("flash")(q, k, v, dtype=jnp.bfloat16, force_fp32_for_softmax=True, precision="highest")
    assert low.dtype == jnp.bfloat16
    close(low, attention_fn("flash")(*(x.astype(jnp.bfloat16) for x in (q, k, v))))
    assert attention_fn("flash")(q.astype(jnp.bfloat16), k, v).dtype == jnp.float32


# ---------------------------------------------------------------- layers


def nnx_layer(function=None, **options):
    arguments = {} if function is None else {"attention_fn": function}
    return nnx.MultiHeadAttention(H, 16, decode=False, rngs=nnx.Rngs(0, dropout=1), **arguments, **options)


def nnx_run(x, layer, **options):
    """Return the output and the gradients of the parameters; a dropout key is drawn at each call."""

    @nnx.jit
    def run(layer, x):
        def loss(layer):
            output = layer(x, **options)
            return jnp.sum(output * floats(*output.shape, seed=5)), output

        (_, output), gradients = nnx.value_and_grad(loss, has_aux=True)(layer)
        return output, nnx.to_pure_dict(gradients)

    return run(layer, x)


def test_nnx_layers(close):
    x, mask = floats(B, T, 16), nnx.make_causal_mask(jnp.ones((B, T)))
    with ao.record_plans() as plans:
        ours = nnx_run(x, nnx_layer(attention_fn("flash")), mask=mask)
    assert {plan.operation for plan in plans} == {"flash"}
    close(ours, nnx_run(x, nnx_layer(), mask=mask))

    grouped = {"num_kv_heads": 2, "dropout_rate": 0.3, "deterministic": False}
    with ao.record_plans() as plans:
        ours = nnx_run(x, nnx_layer(attention_fn("vanilla"), **grouped), is_causal=True)
    assert str(plans[0].spec.mask) == "causal"
    close(ours, nnx_run(x, nnx_layer(**grouped), is_causal=True))


def linen_layer(function=None, **options):
    arguments = {} if function is None else {"attention_fn": function}
    return linen.MultiHeadDotProductAttention(H, **arguments, **options)


def test_linen_layers(outputs_and_gradients, close):
    x, mask = floats(B, T, 16), linen.make_causal_mask(jnp.ones((B, T)))
    variables = linen_layer().init(jax.random.key(0), x)
    drops = {"dropout_rate": 0.3, "deterministic": False}
    sides = {
        name: (lambda x, layer=layer: layer.apply(variables, x, mask=mask, rngs={"dropout": RNG}), (x,))
        for name, layer in {
            "ours": linen_layer(attention_fn()),
            "theirs": linen_layer(),
            "ours, dropout": linen_layer(attention_fn("vanilla"), **drops),
            "theirs, dropout": linen_layer(**drops),
        }.items()
    }
    found = outputs_and_gradients(sides)
    close(found["ours"], found["theirs"])
    close(found["ours, dropout"], found["theirs, dropout"])


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_weights_are_sown(close):
    x = floats(B, T, 16)
    ours, theirs = nnx_layer(attention_fn("vanilla")), nnx_layer()
    for layer in (ours, theirs):
        nnx.jit(lambda layer: layer(x, sow_weights=True, is_causal=True))(layer)
    close(ours.attention_weights[0], theirs.attention_weights[0])

    variables = linen_layer().init(jax.random.key(0), x)
    sow = jax.jit(lambda layer: layer.apply(variables, x, sow_weights=True, mutable=["intermediates"])[1], static_argnums=0)
    close(sow(linen_layer(attention_fn("vanilla"))), sow(linen_layer()))
    with pytest.raises(TypeError, match="module must be a Flax module, found object"):
        attention_fn()(*qkv(B), module=object())


def test_weights_that_an_operation_does_not_give_are_a_reported_fallback():
    with pytest.warns(ao.FallbackWarning, match="flash/native: does not support return_weights"):
        attention_fn("flash")(*qkv(B), **DROPOUT)


# ---------------------------------------------------------------- decoding


def test_nnx_decodes_what_it_prefills(close):
    x = floats(B, T, 16)
    layer = nnx_layer(attention_fn("blocksparse"), num_kv_heads=2)
    whole = layer(x, is_causal=True)
    layer.init_cache(x.shape)

    step = nnx.jit(lambda layer, token: layer(token, decode=True))
    with ao.record_plans() as plans:
        close(jnp.concatenate([step(layer, x[:, i : i + 1]) for i in range(T)], axis=1), whole)
    assert [(plan.spec.T, plan.spec.S) for plan in plans] == [(1, T)]  # traced once: equal functions compile once
    close(whole, nnx_layer(num_kv_heads=2)(x, is_causal=True))


def test_linen_decodes_what_it_prefills(close):
    x = floats(B, T, 16)
    function = attention_fn("blocksparse")
    layer = linen_layer(function, decode=True)
    variables = layer.init(jax.random.key(0), x)
    step = jax.jit(lambda variables, token: layer.apply(variables, token, mutable=["cache"]))
    steps, state = [], variables
    for i in range(T):
        output, cache = step(state, x[:, i : i + 1])
        steps.append(output)
        state = {**variables, **cache}
    whole = linen_layer(function).apply({"params": variables["params"]}, x, mask=linen.make_causal_mask(x[..., 0]))
    close(jnp.concatenate(steps, axis=1), whole)


def test_is_causal_while_decoding_is_refused_where_flax_shows_key_0_only(close):
    x = floats(B, T, 16)
    for function in (None, attention_fn()):
        layer = nnx_layer(function)
        layer.init_cache(x.shape)
        layer(x[:, :1], decode=True)
        if function is None:
            first = layer.value(x[:, :1])
            close(layer(x[:, 1:2], decode=True, is_causal=True), layer.out(first))  # of two tokens, it sees one
        else:
            with pytest.raises(ValueError, match="is_causal with query length 1 and key length 5: .* only key 0 would be seen"):
                layer(x[:, 1:2], decode=True, is_causal=True)


# ---------------------------------------------------------------- what names the attention


def config(**facts):
    shape = {"num_heads": H, "num_kv_heads": H, "head_dim": 4, "max_length": 8, "num_layers": 2, "causal": True}
    return ao.AttentionConfig.from_dict({"name": "tiny", **shape, **facts})


def test_a_config_brings_its_facts():
    q, k, v = (x[:, :T] for x in qkv(B))
    facts = {"sliding_window": [2, 0], "logits_soft_cap": 3.0, "softmax_scale": 0.2, "operation": "blocksparse"}
    cfg = config(layer_types={"local": facts, "global": {}}, pattern=["local", "global"])
    with ao.record_plans() as plans:
        output = attention_fn(cfg, layer=0)(q, k, v)
    options = {"causal": True, "sliding_window": (2, 0), "logits_soft_cap": 3.0, "softmax_scale": 0.2}
    np.testing.assert_allclose(output, reference.attention(*map(np.asarray, (q, k, v)), options).output, atol=2e-6)
    assert (plans[0].operation, plans[0].notes[0]) == ("blocksparse", "name chosen by config tiny, local layers")
    assert attention_fn(cfg, layer=0) == attention_fn(cfg.build(0))
    with pytest.raises(ValueError, match="sliding_window and the call query length 1, key length 7: Flax does not say"):
        attention_fn(cfg, layer=0)(q[:, :1], *qkv(B)[1:])
    assert attention_fn(cfg, layer=1)(q[:, :1], *qkv(B)[1:]).shape == (B, 1, H, D)


def test_names_operations_and_what_wins():
    q, k, v = (x[:, :T] for x in qkv(B))
    operation = ao.OperationRegistry.create("flash")
    with ao.record_plans() as plans:
        attention_fn()(q, k, v)
        attention_fn(["cudnn_flash", "blocksparse"])(q, k, v)
        attention_fn(operation)(q, k, v)
        with ao.use("sdpa"):
            attention_fn("flash")(q, k, v)
    assert [plan.operation for plan in plans] == ["vanilla", "blocksparse", "flash", "sdpa"]
    assert plans[1].notes[0] == "name chosen by attention_ops.integrations.flax.attention_fn"
    assert attention_fn("flash") == attention_fn("flash")
    with pytest.raises(ao.NoRouteError, match="no route of cudnn_flash takes this request on cpu"):
        attention_fn(["cudnn_flash"])(q, k, v)
    assert hash(attention_fn(config())) == hash(attention_fn(config()))
    assert attention_fn("flash") != attention_fn("flash", metadata=ao.OperationMetadata(fallback="error"))


def test_what_is_refused():
    q, k, v = qkv(B)
    attend = attention_fn("vanilla")
    for call, error, message in (
        (
            lambda: attend(q, k, v, qk_attn_weights_einsum=jnp.einsum),
            ValueError,
            "qk_attn_weights_einsum replaces a product inside",
        ),
        (
            lambda: attend(q, k, v, precision=jax.lax.DotAlgorithmPreset.TF32_TF32_F32),
            ValueError,
            "names an algorithm, which an attention kernel does not take",
        ),
        (lambda: attend(q, k, v, dropout_rate=0.1), ValueError, "dropout_rng must be a jax.random key"),
        (lambda: attend(q, k, v, dropout_rate=1.0, dropout_rng=RNG), ValueError, "dropout_rate is 1.0; allowed is 0 <= p < 1"),
        (lambda: attend(q, k, v, dropout_rate=NAN, dropout_rng=RNG), ValueError, "dropout_rate is nan; allowed is 0 <= p < 1"),
        (lambda: attend(q, k, v, dropout_rate="x", dropout_rng=RNG), ValueError, "dropout_rate is x; allowed is 0 <= p < 1"),
        (lambda: attend(q, k, v, is_causal="no"), TypeError, "^is_causal must be True or False, found str"),
        (lambda: attend(q, k[0], v), ValueError, r"key \(7, 4, 8\).* with one batch shape for all three"),
        (lambda: attention_fn("flahs"), ao.UnknownOperationError, "no operation is named 'flahs'"),
        (lambda: attention_fn(["sdpa", "flash/natve"]), ao.UnknownOperationError, "no route is named 'flash/natve'; flash has"),
        (lambda: attention_fn("flash", metadata={}), TypeError, "metadata must be an OperationMetadata, found dict"),
        (lambda: attention_fn("flash", layer=0), TypeError, "layer=0 goes with a model config"),
        (
            lambda: attention_fn(config(), metadata=ao.OperationMetadata()),
            TypeError,
            "goes with names: an operation and a config",
        ),
        (lambda: attention_fn(3), TypeError, "implementation is of type int; allowed are an operation's name"),
        (lambda: attention_fn([]), TypeError, "non-empty sequence of names"),
        (lambda: attend(q, None, v), TypeError, "key must be an array, found NoneType"),
        (
            lambda: attend(q, k, v, mask=bools(3, 1, T, S)),
            ValueError,
            r"mask has shape \(3, 1, 5, 7\); allowed is what broadcasts to .* = \(2, 4, 5, 7\)$",
        ),
        (
            lambda: attend(q, k, v, bias=floats(B, T, S)),
            ValueError,
            r"bias has shape \(2, 5, 7\); .* = \(2, 4, 5, 7\); pass bias\[:, None\]",
        ),
        (
            lambda: attend(q[None], k[None], v[None], mask=bools(1, B, T, S)),
            ValueError,
            r"mask has shape \(1, 2, 5, 7\); .* = \(1, 2, 4, 5, 7\); pass mask\[:, :, None\]",
        ),
    ):
        with pytest.raises(error, match=message):
            call()


# ---------------------------------------------------------------- where the answers differ


def test_rows_and_keys_that_are_hidden():
    q, k, v = qkv(B)
    mask = jnp.ones((B, 1, T, S), bool).at[0, :, 2].set(False).at[1, :, :, 4:].set(False)
    v = v.at[1, 4:].set(NAN)
    exact = reference.attention(*map(np.asarray, (q, k, v)), {"mask": np.asarray(mask)}).output
    np.testing.assert_allclose(attention_fn()(q, k, v, mask=mask), exact, atol=2e-6)
    dropped = attention_fn("vanilla")(q, k, v, mask=mask, **DROPOUT)
    assert np.all(np.isfinite(dropped))
    assert np.all(dropped[0, 2] == 0)
    theirs = jax.jit(nnx.dot_product_attention)(q, k, v, mask=mask)
    np.testing.assert_allclose(theirs[0, 2], v[0].mean(0), atol=1e-6)
    assert np.all(np.isnan(theirs[1]))
