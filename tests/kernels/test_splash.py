"""JAX's splash kernels in their interpreter, held to the float64 law, forward and backward."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.extend.core import jaxprs_in_params
from tpu_cases import CASES, Case, errors

import attention_ops as ao
from attention_ops import masks, rules
from attention_ops.device import compiling_for
from attention_ops.kernels import splash, splash_masks
from attention_ops.kernels.interpreter import interpreted
from attention_ops.selftest import reference

ROUTE = "blocksparse/tpu"


@pytest.fixture
def in_interpreter():
    with compiling_for("tpu-v5e"), interpreted():
        yield


@pytest.mark.parametrize("name", CASES)
def test_case(in_interpreter, name):
    shares = errors(CASES[name], ROUTE)
    assert max(shares.values()) <= 1, shares


def test_tiles_larger_than_the_sequence(in_interpreter):
    shares = errors(CASES["causal"], ROUTE, blocks=ao.BlockSizes())
    assert max(shares.values()) <= 1, shares


def test_with_64_bit_numbers_enabled(in_interpreter):
    with jax.enable_x64(True):
        shares = errors(CASES["everything"], ROUTE)
    assert max(shares.values()) <= 1, shares


# ---------------------------------------------------------------- what another library's path to these kernels gets wrong


def _run(options, B=2, T=150, D=24, seed=0):
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=(B, T, h, D)).astype(np.float32) for h in (4, 2, 2)]
    found = ao.attention(*map(jnp.asarray, arrays), impl=ROUTE, **options).attention_outputs
    law = {name: value if isinstance(value, bool | float) else np.asarray(value) for name, value in options.items()}
    return np.asarray(found), lambda **changes: reference.attention(*arrays, {**law, **changes}).output


@pytest.mark.parametrize("options", [{}, {"softmax_scale": 0.4}])
def test_the_scale_is_applied_exactly_once(in_interpreter, options):
    found, law = _run(options)
    scale = options.get("softmax_scale", 24**-0.5)
    np.testing.assert_allclose(found, law(softmax_scale=scale), atol=1e-5)
    for wrong in (1.0, scale**2, 128**-0.5):
        assert np.abs(found - law(softmax_scale=wrong)).max() > 0.1


def test_no_mask_is_not_causal(in_interpreter):
    found, law = _run({})
    np.testing.assert_allclose(found, law(), atol=1e-5)
    assert np.abs(found - law(causal=True)).max() > 0.1


def test_masks_of_samples_differ(in_interpreter):
    mask = np.random.default_rng(1).random((2, 1, 150, 150)) < 0.5
    found, law = _run({"mask": jnp.asarray(mask)})
    np.testing.assert_allclose(found, law(), atol=1e-5)
    assert np.abs(found - law(mask=mask[:1])).max() > 0.1


def test_a_mask_for_one_sample_holds_for_all(in_interpreter):
    mask = np.random.default_rng(1).random((1, 1, 150, 150)) < 0.5
    found, law = _run({"mask": jnp.asarray(mask)})
    np.testing.assert_allclose(found, law(), atol=1e-5)
    assert np.abs(found - law(mask=None)).max() > 0.1


def test_a_bias_is_refused_not_dropped(in_interpreter):
    q = jax.ShapeDtypeStruct((2, 150, 4, 24), jnp.float32)
    bias = jax.ShapeDtypeStruct((1, 4, 150, 150), jnp.float32)
    plan = ao.plan("blocksparse", q, q, q, bias=bias)
    assert plan.route == "blocksparse/native"
    assert "blocksparse/tpu: does not support a bias: JAX's splash kernels add nothing to the logits" in plan.reasons


# ---------------------------------------------------------------- what is handed to the kernel


def _shapes(T, D=64, B=1, H=4, K=2, dtype=jnp.float32):
    return [jax.ShapeDtypeStruct((B, T, heads, D), dtype) for heads in (H, K, K)]


def _splash(q, k, v, mask, **options):
    settings = {"sinks": None, "scale": 0.125, "soft_cap": None, "block_q": None, "block_kv": None, **options}
    return splash.splash_attention(q, k, v, mask=mask, **settings)


def _kernels(function, *arguments):
    """Return the kernels of a program: their equations."""
    found, todo = [], [jax.make_jaxpr(function)(*arguments).jaxpr]
    while todo:
        for equation in todo.pop().eqns:
            if equation.primitive.name == "pallas_call":
                found.append(equation)
            else:
                todo += jaxprs_in_params(equation.params)
    return found


@pytest.mark.parametrize(
    ("mask", "visited"),
    [
        (masks.Causal(0), 8),
        (masks.Causal(0) & masks.Window(511, 0, 0), 2),
        (masks.Chunked(1024, 0) & masks.Causal(0), 2),
        (masks.Window(511, 0, 0) | masks.Dense(np.arange(4096)[None, :] < 8), 3),
        (masks.Causal(0) & masks.Window(511, 0, 0) & masks.Lengths(kv=jnp.array([4000])), 2),
    ],
)
def test_empty_tiles_are_no_steps(mask, visited):
    def loss(q, k, v):
        return _splash(q, k, v, mask).output.sum()

    kernels = _kernels(jax.grad(loss, argnums=(0, 1, 2)), *_shapes(4096))
    grids = {kernel.params["grid_mapping"].grid for kernel in kernels}
    assert {grid[2] for grid in grids if grid[0] == 4} == {visited}
    assert len(kernels) == 3


def test_keys_and_values_are_not_repeated_for_grouped_heads():
    kernels = _kernels(lambda *x: _splash(*x, None).output, *_shapes(1024, H=8, K=2))
    assert sorted(a.aval.shape[0] for a in kernels[0].invars if a.aval.ndim == 3 and a.aval.shape[2] == 128) == [2, 2, 8]


def test_nothing_of_size_T_times_S_exists():
    T, seen = 65536, []
    mask = masks.Causal(jnp.array([0])) & masks.Window(1023, 0, jnp.array([0])) & masks.Segments(jnp.zeros((1, T), jnp.int32))

    def loss(q, k, v):
        return _splash(q, k, v, mask).output.sum()

    todo = [jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*_shapes(T)).jaxpr]
    while todo:
        for equation in todo.pop().eqns:
            seen += [int(np.prod(v.aval.shape)) for v in equation.outvars]
            if equation.primitive.name != "pallas_call":
                todo += jaxprs_in_params(equation.params)
    assert max(seen) <= 4 * T * 128


@pytest.mark.parametrize(("dtype", "precision"), [(jnp.float32, "HIGHEST"), (jnp.bfloat16, "DEFAULT")])
def test_precision_inside_the_kernels(dtype, precision):
    """Whatever the user's default: the matrix unit takes no more than one pass over bfloat16."""

    def loss(q, k, v):
        return _splash(q, k, v, masks.Causal(0)).output.astype(jnp.float32).sum()

    with jax.default_matmul_precision("high"):
        kernels = _kernels(jax.grad(loss, argnums=(0, 1, 2)), *_shapes(256, dtype=dtype))
    products = []
    for kernel in kernels:
        todo = [kernel.params["jaxpr"]]
        while todo:
            for equation in todo.pop().eqns:
                products += [equation.params["precision"]] if equation.primitive.name == "dot_general" else []
                todo += jaxprs_in_params(equation.params)
    assert len(products) == 2 + 3 + 4
    assert all(found == (jax.lax.Precision[precision],) * 2 for found in products)


@pytest.mark.parametrize(("D", "dtype", "width"), [(64, "bfloat16", 128), (128, "bfloat16", 256), (128, "float32", 128)])
def test_a_scale_that_rounds_bfloat16_takes_a_second_part(D, dtype, width):
    kernels = _kernels(lambda *x: _splash(*x, None, scale=D**-0.5).output, *_shapes(256, D=D, dtype=jnp.dtype(dtype)))
    assert {a.aval.shape[2] for a in kernels[0].invars if a.aval.dtype == dtype and a.aval.ndim == 3} == {width, 128}


# ---------------------------------------------------------------- masks


@pytest.mark.parametrize(
    ("mask", "numbers", "ids", "tiles"),
    [
        (masks.Causal(0), True, False, False),
        (masks.Causal(3) & ~masks.Window(5, 5, 0), True, False, False),
        (masks.Chunked(70, 0), False, False, True),
        (masks.Causal(0) & masks.Segments(jnp.zeros((2, 300), jnp.int32)), True, True, False),
        (masks.Causal(jnp.array([1, 2])), True, True, False),
        (masks.Causal(jnp.array([1, 2])) & masks.Window(9, 0, jnp.array([1, 2])), True, True, False),
        (masks.Lengths(kv=jnp.array([10, 20])) & masks.Dense(jnp.ones((2, 1, 1, 300), bool)), False, True, False),
        (masks.PrefixLM(jnp.array([1, 2]), 0), False, True, True),
        (masks.Dense(jnp.ones((2, 1, 300, 300), bool)) & masks.Causal(0), False, True, True),
        (masks.Segments(jnp.zeros((2, 300), jnp.int32)) & masks.Segments(jnp.ones((1, 300), jnp.int32)), False, True, True),
    ],
)
def test_the_cheapest_form_is_taken(mask, numbers, ids, tiles):
    static, runtime = splash_masks.lower(mask, 2, 300, 300, 128, 128)
    assert (runtime.numbers is not None, runtime.q_ids is not None, static.tiled) == (numbers, ids, tiles)


def test_equal_tiles_are_kept_once():
    static, _ = splash_masks.lower(masks.Chunked(256, 0) & masks.Causal(0), 1, 4096, 4096, 128, 128)
    assert len(splash_masks.static_tiles(static.mask, static.layout).tiles) == 1


@pytest.mark.parametrize("given", [(None, None), (128, None), (None, 1024)])
@pytest.mark.parametrize(("T", "S", "width", "itemsize"), [(1, 300, 128, 2), (525, 4096, 256, 4), (700, 700, 1024, 4)])
def test_block_sizes(T, S, width, itemsize, given):
    q, kv = splash.block_sizes(T, S, width, itemsize, *given)
    assert q % 128 == kv % 128 == 0
    assert q <= max(128, -(-T // 128) * 128)
    if given == (None, None):
        assert q * kv * itemsize * width // 128 <= splash.TILE_BYTES


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float16}, "dtype float16 is not one of bfloat16, float32"),
        ({"D": 520}, "head_dim 520 > 512, the limit"),
        ({"blocks": (64, 128)}, r"block_sizes.q 64 is not a multiple of 128 \(use 128, or None to choose\)"),
        ({"blocks": (1024, 1024)}, "block_sizes 1024 x 1024 take 4096 KiB of vector memory in float32 with head_dim 64"),
    ],
)
def test_refusals(change, reason):
    q, k, v = _shapes(2048, D=change.get("D", 64), dtype=change.get("dtype", jnp.float32))
    metadata = ao.OperationMetadata(block_sizes=change.get("blocks"))
    with pytest.raises(ao.NoRouteError, match=reason):
        ao.plan(ROUTE, q, k, v, metadata=metadata, device="tpu-v5e")


@pytest.mark.parametrize("name", splash.PRIVATE)
def test_a_jax_without_the_private_kernels_is_refused(monkeypatch, name):
    spec = ao.plan(ROUTE, *_shapes(256), device="tpu-v5e").spec
    route = ao.OperationRegistry.get("blocksparse").routes["tpu"]
    facts = spec, ao.OperationMetadata(), ao.DeviceProfile.named("tpu-v5e")
    assert not route.refusals(*facts)
    with monkeypatch.context() as patch:
        patch.delattr(splash_attention_kernel, name)
        rules._changed.cache_clear()
        (reason,) = route.refusals(*facts)
    rules._changed.cache_clear()
    assert f"has no {splash.KERNELS}.{name}" in str(reason)


# ---------------------------------------------------------------- lowering


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", ["causal bfloat16", "everything", "traced offsets window"])
def test_lowered_for_tpu(name, gradient):
    text = lowered(CASES[name], ROUTE, gradient)
    assert text.count("custom_call @tpu_custom_call") == (3 if gradient else 1)
    assert "stablehlo.dot_general" not in text


def lowered(case: Case, impl: str, gradient: bool) -> str:
    drawn = dataclasses.replace(case).draw()
    static = {name: value for name, value in drawn.options.items() if isinstance(value, bool | int | float | tuple)}
    traced = {name: value for name, value in drawn.options.items() if name not in static}

    def run(arrays, traced):
        out = ao.attention(*arrays, **traced, **static, impl=impl)
        return out.attention_outputs.astype(jnp.float32).sum()

    function = jax.jit(jax.grad(run) if gradient else run)
    with compiling_for("tpu-v5e"):
        return jax.export.export(function, platforms=["tpu"])(drawn.arrays, traced).mlir_module()
