"""The Pallas GPU kernels: by their law in the interpreter, lowered for CUDA, and compiled by Triton where that is installed."""

from __future__ import annotations

import importlib.util
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_cases import ALONE, CASES, failures

import attention_ops as ao
from attention_ops import masks
from attention_ops.device import compiling_for
from attention_ops.kernels import pallas_gpu, pallas_gpu_blocks, pallas_gpu_tiles, tile_work
from attention_ops.kernels.interpreter import interpreted
from attention_ops.masks import Tiling
from attention_ops.selftest import reference

KERNELS = ["attention_forward", "attention_d_query", "attention_d_key_value"]
DEVICES = {80: "a100", 90: "h100"}


@pytest.fixture
def in_interpreter():
    with compiling_for("a100"), interpreted():
        yield


@pytest.mark.parametrize("name", CASES)
def test_blocksparse(in_interpreter, name):
    assert failures(name, "blocksparse/gpu", {"xla_backend_optimization_level": 0}) == []


@pytest.mark.parametrize("name", ALONE[1:6])
def test_flash(in_interpreter, name):
    assert failures(name, "flash/gpu", {"xla_backend_optimization_level": 0}) == []


def _attend(q, k, v, mask=None, bias=None, **options):
    defaults = {"sinks": None, "scale": 0.3, "soft_cap": None, "block_q": 16, "block_kv": 16, "skip_by_data": True}
    return pallas_gpu.pallas_gpu_attention(q, k, v, mask=mask, bias=bias, **{**defaults, "shared_memory": 1 << 17, **options})


@pytest.mark.parametrize("sizes", [(0, 8), (8, 0)])
def test_nothing_to_attend(sizes):
    T, S = sizes
    output, logsumexp = _attend(jnp.ones((2, T, 4, 8)), jnp.ones((2, S, 2, 8)), jnp.ones((2, S, 2, 5)))
    assert output.shape == (2, T, 4, 5)
    assert not output.any()
    assert np.isneginf(logsumexp).all()


# ---------------------------------------------------------------- what is visited

T, S = 100, 130
SEGMENTS = masks.Segments(jnp.asarray(np.arange(T)[None] // 30), jnp.asarray(np.arange(S)[None] // 40))
MASKS = {
    "none": None,
    "causal": masks.Causal(20),
    "window": masks.Window(30, 5, 0),
    "holes": masks.Dense((np.arange(S)[None, :] // 20 % 2 == 0) & np.ones((T, 1), bool)),
    "or": masks.Window(3, 0, 20) | masks.Dense(np.arange(S)[None, :] < 7),
    "segments": SEGMENTS,
    "lengths": masks.Lengths(kv=jnp.array([33, 130])),
    "traced": masks.Causal(jnp.array([20, -7])) & masks.Window(40, 0, 0),
    "array": masks.Dense(jnp.asarray(np.tile(np.arange(S) // 33 % 2 == 1, (1, 4, T, 1)))),
}


def _places(work):
    """Return the inner tiles that each outer tile visits without and with mask arithmetic, as two sets [b, h, outer]."""
    bounds = np.asarray(work.bounds)
    full, partial = np.empty((2, *bounds.shape[:3]), object)
    for index in np.ndindex(*bounds.shape[:3]):
        first, start, end, last = bounds[index]
        order = np.arange(last) if work.order is None else np.asarray(work.order[index])
        full[index] = frozenset(order[start:end].tolist()) if work.has_full else frozenset()
        before = order[first:start] if work.has_before else order[:0]
        partial[index] = frozenset(before.tolist()) | frozenset(order[end:last].tolist() if work.has_after else [])
    return full, partial


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_the_list_of_work_has_the_visible_tiles_and_no_other(name, by_column):
    mask, tiling = MASKS[name], Tiling(T, S, 16, 16)
    full, partial = _places(tile_work.tile_work(mask, tiling, by_data=True, never_full=False, by_column=by_column))
    shown = np.ones((1, 1, T, S), bool) if mask is None else np.asarray(mask.dense(T, S))
    rows, cols = tiling.grid
    for b, h, i, j in itertools.product(*map(range, (*shown.shape[:2], rows, cols))):
        tile = shown[b, h, i * 16 : i * 16 + 16, j * 16 : j * 16 + 16]
        lead = (min(b, full.shape[0] - 1), min(h, full.shape[1] - 1))
        outer, inner = (j, i) if by_column else (i, j)
        visited = inner in full[(*lead, outer)] or inner in partial[(*lead, outer)]
        assert visited or not tile.any()
        assert not tile.all() or visited
        if inner in full[(*lead, outer)]:
            assert tile.all()
            assert j < cols - 1  # the last tile has columns beyond the end
    visits = sum(map(len, (*full.flat, *partial.flat)))
    exact = sum(bool(shown[b, h, i : i + 16, j : j + 16].any())
                for b in range(shown.shape[0]) for h in range(shown.shape[1])
                for i in range(0, T, 16) for j in range(0, S, 16))  # fmt: skip
    assert visits <= (exact if name != "segments" else 1.5 * exact)  # ids are compared by their range


def test_flash_skips_only_what_static_positions_rule_out():
    counts = {}
    for by_data in (False, True):
        work = tile_work.tile_work(masks.Causal(0) & SEGMENTS, Tiling(T, S, 16, 16), by_data, never_full=False)
        counts[by_data] = int((work.bounds[..., 3] - work.bounds[..., 0]).sum())
    assert counts[True] < counts[False] == 7 * 8 // 2


@pytest.mark.parametrize("mask", ["causal", "holes", "array"])
def test_the_kernels_visit_what_the_list_names(monkeypatch, mask):
    """Drop the last place of every row from the lists: the result is that of a mask without those tiles."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, n, h, 8)), jnp.float32) for n, h in ((T, 4), (S, 2), (S, 2)))
    mask = MASKS[mask]
    whole = tile_work.tile_work(mask, Tiling(T, S, 16, 16), by_data=True, never_full=False)
    full, _ = _places(whole)
    keep = np.zeros((*full.shape[:2], T, S), bool)
    for index in np.ndindex(*full.shape):
        order = np.arange(9) if whole.order is None else np.asarray(whole.order[index])
        for j in order[: int(whole.bounds[index][3]) - 1]:
            keep[(*index[:2], slice(index[2] * 16, index[2] * 16 + 16), slice(j * 16, j * 16 + 16))] = True
    assert 0 < keep.sum() < keep.size

    def shortened(*args, **kwargs):
        work = tile_work.tile_work(*args, **kwargs)
        last = jnp.maximum(work.bounds[..., 3:] - 1, work.bounds[..., :1])
        return tile_work.TileWork(jnp.minimum(work.bounds, last), work.order, work.has_before, work.has_full, work.has_after)

    with interpreted():
        expected = _attend(q, k, v, mask & masks.Dense(keep)).output
        monkeypatch.setattr(pallas_gpu, "tile_work", shortened)
        found = _attend(q, k, v, mask).output
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_no_array_of_T_by_S_and_no_list_where_tiles_follow_each_other():
    T = 1 << 16
    x = jax.ShapeDtypeStruct((1, T, 2, 64), jnp.bfloat16)
    mask = masks.Causal(0) & masks.Window(1023, 0, 0) & masks.Lengths(kv=jnp.array([T - 5]))

    def loss(q, k, v):
        return _attend(q, k, v, mask, block_q=None, block_kv=None).output.astype(jnp.float32).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(x, x, x)
    largest = max(int(np.prod(v.aval.shape)) for e in jaxpr.jaxpr.eqns for v in e.outvars)
    assert largest <= T * 2 * 64
    calls = [equation for equation in jaxpr.jaxpr.eqns if equation.primitive.name == "pallas_call"]
    assert len(calls) == 3
    for call in calls:  # four bounds for each tile of at least 16 rows or columns
        assert all(v.aval.size <= 4 * T // 16 for v in call.invars if v.aval.dtype == jnp.int32)


def test_gradients_of_logits_that_float16_cannot_hold_reach_those_of_queries_and_keys():
    rng = np.random.default_rng(0)
    made = ((0.05, 20), (0.05, 4), (6, 4), (12000, 20))
    q, k, v, cotangent = (jnp.asarray(size * rng.standard_normal((1, n, 2, 64)), jnp.float16) for size, n in made)
    law = reference.attention(q, k, v, {"softmax_scale": 0.3}).gradients(cotangent)
    with interpreted():
        found = jax.vjp(lambda *arrays: _attend(*arrays, None).output, q, k, v)[1](cotangent)
    for name, gradient in zip(("query", "key", "value"), found, strict=True):
        expected = getattr(law, name)
        assert np.abs(expected).max() < 65504
        np.testing.assert_allclose(np.asarray(gradient, np.float64), expected, atol=2e-3 * np.abs(expected).max(), err_msg=name)


# ---------------------------------------------------------------- tiles


def test_tiles_fit_whatever_is_asked():
    for D, itemsize, limit, kernel in itertools.product(
        (16, 64, 80, 128, 192, 256), (2, 4), (99, 163, 227), pallas_gpu_blocks.KERNELS
    ):
        for stated in ((None, None), (512, 512), (8, None), (None, 4096), (17, 33)):
            blocks = pallas_gpu_blocks.choose(kernel, 4096, 4096, D, D, itemsize, limit * 1024, *stated)
            assert pallas_gpu_blocks.shared_memory(kernel, blocks, D, D, itemsize) <= limit * 1024
            for size, given in zip((blocks.q, blocks.kv), stated, strict=True):
                assert size >= 16
                assert size & (size - 1) == 0
                assert given is None or size <= max(2 * given, 16)
    assert pallas_gpu_blocks.choose("forward", 5, 3, 64, 64, 2, 1 << 17, None, None).q == 16


def test_large_boolean_arrays_are_indexed_with_64_bits():
    def width(*shape):
        return jax.eval_shape(lambda x: pallas_gpu_tiles.prepared(masks.Dense(x), *shape[2:]), jax.ShapeDtypeStruct(shape, bool))

    assert width(1, 1, 1 << 15, 1 << 15).array.dtype == bool
    assert width(1, 1, 1 << 16, 40000).array.dtype == np.int16
    assert width(1, 1, 1 << 17, 1 << 16).array.dtype == bool  # beyond 4 GiB as it is


@pytest.mark.parametrize("impl", ["cudnn_flash", "flash", "blocksparse"])
def test_gemma_on_a100_runs_these_kernels(impl):
    q, kv = (jax.ShapeDtypeStruct((1, 8192, h, 256), jnp.bfloat16) for h in (8, 1))
    for blocks in (None, (512, 512)):
        metadata = ao.OperationMetadata(block_sizes=blocks)
        plan = ao.plan(impl, q, kv, kv, causal=True, device="a100", metadata=metadata)
        assert plan.route == f"{'flash' if impl == 'cudnn_flash' else impl}/gpu"


def test_what_is_refused():
    def reasons(device, D=256, dtype=jnp.float32, **metadata):
        x = jax.ShapeDtypeStruct((1, 64, 1, D), dtype)
        plan = ao.plan("flash", x, x, x, device=device, metadata=ao.OperationMetadata(**metadata))
        return [str(reason) for decision in plan.decisions if decision.route == "flash/gpu" for reason in decision.reasons]

    assert reasons("a100") == reasons(ao.DeviceProfile("rtx3090", "cuda", (8, 6))) == []
    assert reasons("v100", 64) == ["compute capability 7.0 < 8.0, the minimum"]
    assert reasons("a100", 264) == ["head_dim 264 > 256, the limit on compute capability 8.0"]
    assert reasons("mi300x", 128) == []
    assert reasons("mi300x") == [
        "the smallest tiles at head dims 256 and 256 in float32 take 68608 bytes of shared memory > 65536, "
        "what a program may use on mi300x"
    ]


# ---------------------------------------------------------------- lowered for CUDA

TARGET = "__gpu$xla.gpu.triton"


def _lowered(device, D, dtype, gradient=True, **options):
    """Return the Triton calls of an attention lowered for a device: name, warps, stages and IR of each."""
    q, kv = (jax.ShapeDtypeStruct((1, 1000, h, D), dtype) for h in (4, 2))

    def loss(q, k, v):
        out = ao.attention(q, k, v, impl="blocksparse/gpu", causal=True, return_logsumexp=True, **options)
        return out.attention_outputs.astype(jnp.float32).sum() + out.logsumexp.sum()

    unchecked = [jax.export.DisabledSafetyCheck.custom_call(TARGET)]
    with compiling_for(device):
        function = jax.jit(jax.grad(loss, argnums=(0, 1, 2)) if gradient else loss)
        return _calls(jax.export.export(function, platforms=["cuda"], disabled_checks=unchecked)(q, kv, kv).mlir_module())


def _calls(module):
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jax._src.lib.triton import dialect

    found = []

    def walk(operation):
        for block in (block for region in operation.regions for block in region.blocks):
            for one in block.operations:
                if one.operation.name == "stablehlo.custom_call" and TARGET in str(one.operation.attributes["call_target_name"]):
                    found.append({item.name: item.attr for item in one.operation.attributes["mhlo.backend_config"]})
                walk(one.operation)

    with mlir.make_ir_context():
        walk(ir.Module.parse(module).operation)
        calls = [(c["name"].value, c["num_warps"].value, c["num_stages"].value, c["ir"].value_bytes) for c in found]
    context = mlir.JaxIrContext()
    context.append_dialect_registry(mlir.upstream_dialects)
    dialect.register_dialect(context)
    context.load_all_available_dialects()
    with context:
        return [(*c, ir.Module.parse(code).operation.get_asm(enable_debug_info=False)) for *c, code in calls]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_lowered_to_triton(D, dtype):
    assert [name for name, *_ in _lowered("a100", D, dtype, gradient=False)] == KERNELS[:1]
    calls = _lowered("a100", D, dtype)
    assert [name for name, *_ in calls] == KERNELS
    for *_, text in calls:
        products = re.findall(r"tt\.dot .*", text)
        assert products
        if dtype == "float32":
            assert all("inputPrecision" not in line or "ieee" in line for line in products)
        assert all(line.rstrip().endswith("xf32>") for line in products)  # sums in float32


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed")
@pytest.mark.parametrize(
    ("capability", "D", "dtype"),
    [(80, 256, "bfloat16"), (80, 64, "float32"), (90, 128, "bfloat16")],
)
def test_compiled_by_triton_within_the_shared_memory(tmp_path, monkeypatch, capability, D, dtype):
    """Triton compiles the kernels to machine code without a GPU, and says how much shared memory they take."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget

    device = DEVICES[capability]
    limit = ao.DeviceProfile.named(device).shared_memory
    names = dict(zip(KERNELS, pallas_gpu_blocks.KERNELS, strict=True))
    for name, warps, stages, text in _lowered(device, D, dtype):
        source = tmp_path / f"{name}.ttir"
        source.write_text(text)
        compiled = triton.compile(
            str(source), target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": stages}
        )
        itemsize = jnp.dtype(dtype).itemsize
        blocks = pallas_gpu_blocks.choose(names[name], 1000, 1000, D, D, itemsize, limit, None, None)
        assert blocks.warps == warps
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared <= pallas_gpu_blocks.shared_memory(names[name], blocks, D, D, itemsize) <= limit
