"""A mesh in the metadata gives the numbers of one device."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import on_devices
from eformer.escale import PartitionAxis
from jax.sharding import PartitionSpec as P

import attention_ops as ao
from attention_ops import masks, sequence
from attention_ops.sharding import array_specs, layout

ON_EIGHT_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
import attention_ops as ao
from jax.sharding import AxisType

keys = jax.random.split(jax.random.key(0), 6)
q = jax.random.normal(keys[0], (4, 12, 4, 8))
k, v = (jax.random.normal(key, (4, 12, 2, 8)) for key in keys[1:3])
mask = jax.random.bernoulli(keys[3], 0.7, (4, 4, 12, 12))
requests = (
    {"causal": True, "sliding_window": (5, 0), "logits_soft_cap": 5.0},
    {"mask": mask, "softmax_aux": jnp.arange(4.0)},
    {"mask": ao.masks.Dense(np.asarray(mask)), "bias": jax.random.normal(keys[4], (4, 1, 12, 12))},
    {"q_segment_ids": jnp.repeat(jnp.arange(4), 3)[None].repeat(4, 0), "bias": jax.random.normal(keys[5], (1, 4, 1, 12))},
    {"kv_lengths": jnp.array([3, 0, 12, 6]), "causal": True, "query_offset": jnp.array([0, 1, 2, 3])},
)
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2, 2, 2), ("dp", "fsdp", "tp"), axis_types=(kind,) * 3)
    metadata = ao.OperationMetadata(mesh=mesh)
    for options in requests[:: 1 if kind == AxisType.Auto else 2]:
        for name in ("vanilla", "blocksparse") if kind == AxisType.Auto else ("flash",):
            def loss(arrays, metadata=None):
                out = ao.attention(*arrays, impl=name, metadata=metadata, return_logsumexp=True, **options)
                finite = jnp.where(out.logsumexp == -jnp.inf, 0.0, out.logsumexp)
                return jnp.sum(jnp.sin(out.attention_outputs)) + jnp.sum(finite), out
            run = jax.value_and_grad(loss, has_aux=True)
            (_, one), gradient_one = jax.jit(run)((q, k, v))
            with jax.set_mesh(mesh):
                (_, many), gradient_many = jax.jit(lambda a: run(a, metadata))((q, k, v))
            for a, b in zip(jax.tree.leaves((one, gradient_one)), jax.tree.leaves((many, gradient_many)), strict=True):
                np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=2e-5, err_msg=f"{name} {list(options)}")
    drop = ao.attention(q, q, q, impl="vanilla", metadata=ao.OperationMetadata(mesh=mesh), dropout_prob=0.5, deterministic=False,
                        dropout_rng=jax.random.key(0), return_weights=True) if kind == AxisType.Auto else None
hlo = jax.jit(lambda q, k, v: ao.attention(q, k, v, impl="flash", causal=True, metadata=ao.OperationMetadata(
    mesh=jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,)))).attention_outputs)
x = jnp.ones((8, 16, 2, 8))
assert "all-gather" not in hlo.lower(x, x, x).compile().as_text()
print("equal")
"""


def test_the_numbers_of_one_device():
    result = on_devices(8, "-c", ON_EIGHT_DEVICES)
    assert result.stdout.strip() == "equal", result.stderr[-3000:]


def _metadata(sizes, names, partition_axis=None):
    return ao.OperationMetadata(mesh=jax.sharding.AbstractMesh(sizes, names), partition_axis=partition_axis)


SHAPES = tuple(jax.ShapeDtypeStruct((4, 16, heads, 8), jnp.float32) for heads in (4, 2, 2))


def test_an_abstract_mesh_can_be_planned():
    mask = ao.masks.Dense(jnp.ones((4, 4, 16, 16), bool))
    plan = ao.plan("flash", *SHAPES, metadata=_metadata((2, 2), ("dp", "tp")), mask=mask)
    assert (plan.spec.B, plan.spec.H, plan.spec.K) == (2, 2, 1)
    assert plan.spec.mask is not None
    assert str(plan.spec.mask) == "dense[2, 2, 16, 16]"
    assert any("batch over ['dp'] in 2, heads over ['tp'] in 2" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("sizes", "names", "axis", "match"),
    [
        ((8,), ("dp",), None, "batch size 4 cannot be split over the mesh axis 'dp' of 8 devices; use a size that 8 divides"),
        ((3,), ("tp",), None, "query heads 4 cannot be split over the mesh axis 'tp' of 3 devices"),
        ((4,), ("tp",), None, "key/value heads 2 cannot be split over the mesh axis 'tp' of 4 devices"),
        ((3,), ("sp",), None, "query length 16 and key length 16 cannot be split over the mesh axis 'sp' of 3 devices"),
        ((2,), ("dp",), {"batch_axis": "data"}, "partition_axis.batch_axis names 'data'; the mesh has dp"),
    ],
)
def test_what_does_not_divide_is_refused_with_both_numbers_if_asked_for(sizes, names, axis, match):
    metadata = dataclasses.replace(_metadata(sizes, names, axis), on_indivisible="error")
    with pytest.raises(ValueError, match=match):
        ao.plan("flash", *SHAPES, metadata=metadata)


@pytest.mark.parametrize(
    ("axes", "match"),
    [
        ({"batch_axis": ("dp", "sp"), "sequence_axis": "sp"}, "'sp' in batch_axis and again in sequence_axis; allowed is once"),
        ({"batch_axis": "dp", "head_axis": "dp"}, "'dp' in batch_axis and again in head_axis"),
        ({"sequence_axis": ["sp", "sp"]}, "'sp' in sequence_axis and again in sequence_axis"),
        (PartitionAxis(batch_axis=("dp", "sp")), "'sp' in batch_axis and again in sequence_axis"),
    ],
)
def test_a_mesh_axis_that_is_named_twice_is_refused_whether_it_divides_or_not(axes, match):
    for size in (2, 3):
        with pytest.raises(ValueError, match=f"partition_axis names the mesh axis {match}"):
            ao.plan("flash", *SHAPES, metadata=_metadata((1, size), ("dp", "sp"), axes))
    elsewhere = PartitionAxis(batch_axis=("dp", "tp"))  # of which the mesh has one
    assert ao.plan("flash", *SHAPES, metadata=_metadata((2,), ("dp",), elsewhere)).spec.B == 2


@pytest.mark.parametrize(
    ("sizes", "names", "note", "local"),
    [
        (
            (8,),
            ("dp",),
            "batch size 4 is not split over 'dp' of 8 devices, which does not divide it: replicated",
            (4, 16, 16, 4, 2),
        ),
        ((2, 4), ("dp", "fsdp"), "batch size 4 is not split over 'fsdp' of 4 devices", (2, 16, 16, 4, 2)),
        ((3,), ("tp",), "query heads 4 is not split over 'tp' of 3 devices", (4, 16, 16, 4, 2)),
        ((4,), ("tp",), "key/value heads 2 is not split over 'tp' of 4 devices.*takes the heads it reads", (4, 16, 16, 1, 1)),
        ((3,), ("sp",), "query length 16 and key length 16 is not split over 'sp' of 3 devices", (4, 16, 16, 4, 2)),
    ],
)
def test_else_it_is_replicated_and_the_plan_says_so(sizes, names, note, local):
    plan = ao.plan("flash", *SHAPES, metadata=_metadata(sizes, names))
    assert any(re.search(note, found) for found in plan.notes), plan.notes
    assert tuple(getattr(plan.spec, name) for name in "BTSHK") == local


@pytest.mark.parametrize(
    ("impl", "T", "options", "way", "local"),
    [
        ("flash", 16, {}, "gather", (4, 16)),
        ("ring", 16, {}, "ring", (2, 2)),
        ("auto", 16, {"sliding_window": (3, 0)}, "ring", (4, 4)),
        ("auto", 12, {"query_offset": 4}, "ring", (3, 4)),
        ("ring", 1, {}, "merge", (1, 4)),
        ("vanilla", 1, {}, "merge", (1, 4)),
        ("vanilla", 1, {"return_weights": True}, "", (1, 16)),
        ("ulysses", 16, {}, "ulysses", (16, 16)),
    ],
)
def test_the_way_over_a_sequence_axis(impl, T, options, way, local):
    query = jax.ShapeDtypeStruct((4, T, 4, 8), jnp.float32)
    plan = ao.plan(impl, query, *SHAPES[1:], metadata=_metadata((4,), ("sp",)), causal=True, **options)
    (note,) = [note for note in plan.notes if note.startswith("the mesh splits")]
    assert (f"({way}:" in note) if way else "sequence over" not in note
    assert local == (plan.spec.T, plan.spec.S)
    assert not plan.is_fallback


@pytest.mark.parametrize(
    ("impl", "T", "dtype", "local"),
    [
        ("ring", 16, "float16", "float32"),
        ("flash", 1, "float16", "float32"),
        ("flash", 16, "float16", "float16"),
        ("ring", 16, "bfloat16", "bfloat16"),
    ],
)
def test_a_route_is_asked_about_the_dtype_in_which_it_attends_a_part_of_the_keys(impl, T, dtype, local):
    arrays = [jax.ShapeDtypeStruct((4, n, 4, 8), dtype) for n in (T, 16, 16)]
    assert ao.plan(impl, *arrays, metadata=_metadata((4,), ("sp",))).spec.dtype == local


@pytest.mark.parametrize(
    ("impl", "T", "rows", "columns"), [("ring", 16, "sp", None), ("flash", 16, "sp", None), ("flash", 1, None, "sp")]
)
def test_a_bias_is_split_with_the_queries_or_with_the_keys_that_stay(impl, T, rows, columns):
    query = jax.ShapeDtypeStruct((4, T, 4, 8), jnp.float32)
    for heads, size in ((1, 16), (4, 16), (1, 1)):
        bias = jax.ShapeDtypeStruct((1, heads, T, size), jnp.float32)
        metadata = _metadata((2, 4), ("tp", "sp"))
        spec = ao.plan(impl, query, *SHAPES[1:], bias=bias, softmax_scale=0.5).spec
        placed = array_specs(spec, layout(spec, metadata, "ring" if impl == "ring" else "gather"))
        tp = "tp" if heads > 1 else None
        assert placed["bias"] == (bias.shape, P(None, tp, ("sp",) if rows else None, ("sp",) if columns and size > 1 else None))


@pytest.mark.parametrize("n", [2, 3, 8])
def test_in_zigzag_order_all_devices_see_as_much_of_a_causal_mask(n):
    zigzag = sequence._Ring(lambda *_: None, ("sp",), n, True)  # type: ignore[arg-type, return-value]
    starts = [zigzag.starts(device, 4) for device in range(n)]
    assert sorted(start for both in starts for start in both) == list(range(0, 8 * n, 4))
    keys = [start for both in starts for start in both]
    assert {sum(key <= row for row in rows for key in keys) for rows in starts} == {2 * n + 1}


def test_zigzag_is_for_causal_masks_without_a_window_or_a_bias_of_every_head_and_row():
    metadata = _metadata((4,), ("sp",))

    def is_zigzag(**options):
        return "one from each end" in str(ao.plan("ring", *SHAPES, metadata=metadata, **options))

    assert is_zigzag(causal=True)
    assert is_zigzag(mask=ao.masks.Causal() & ao.masks.Chunked(2))
    assert not is_zigzag()
    assert not is_zigzag(causal=True, sliding_window=(3, 0))
    for shape in ((1, 1, 16, 16), (1, 4, 1, 16), (1, 4, 16, 16)):
        bias = jax.ShapeDtypeStruct(shape, jnp.float32)
        assert is_zigzag(causal=True, bias=bias) == (shape[1:3] != (4, 16)), shape
    assert not is_zigzag(mask=ao.masks.Causal() & ao.masks.Chunked(4))


def test_a_ring_that_cannot_go_round_is_refused_and_falls_back_with_a_warning():
    x = jnp.ones((1, 16, 2, 8))
    mask = ao.masks.Chunked(3) & ao.masks.Causal()
    metadata = _metadata((4,), ("sp",))
    plan = ao.plan("ring", x, x, x, metadata=metadata, mask=mask)
    assert plan.is_fallback
    assert "blocksparse/native: a ring of 4 devices would cut the mask's chunks of 3 keys into parts of 4" in plan.reasons
    plan = ao.plan("ring", x, x, x, metadata=metadata, return_weights=True)
    assert "cannot return the attention weights, which no device has" in plan.reasons
    assert plan.route == "vanilla/native"
    plan = ao.plan("ring", x, x[:, :6], x[:, :6], metadata=metadata)
    assert "a ring of 4 devices needs a key length that 4 divides, found 6" in plan.reasons
    plan = ao.plan("ulysses", x, x, x, metadata=metadata)
    assert "ulysses needs query heads that 4 devices divide, found 2" in plan.reasons
    assert not ao.plan("auto", x, x, x, metadata=metadata, mask=mask).is_fallback


def test_a_way_that_would_replicate_is_refused_where_another_one_can_be_gone():
    x = jax.ShapeDtypeStruct((2, 6, 4, 8), jnp.float32)
    metadata = dataclasses.replace(_metadata((4,), ("sp",)), on_indivisible="error")
    plan = ao.plan("ulysses", x, x, x, metadata=metadata)
    assert (plan.route, plan.way, plan.is_fallback) == ("blocksparse/native", "ulysses", False)
    assert "vanilla/native      no: query length 6 and key length 6 cannot be split" in str(plan)
    plan = ao.plan(("ring", "ulysses"), x, x, x, metadata=metadata)
    assert (plan.route, plan.way) == ("blocksparse/native", "ulysses")
    for impl in ("ring", "auto"):
        with pytest.raises(ValueError, match="query length 6 and key length 6 cannot be split over the mesh axis 'sp'"):
            ao.plan(impl, x, x, x, metadata=metadata)


def test_a_route_that_two_ways_refuse_for_the_same_reasons_is_said_once():
    with ao.compiling_for("tpu-v5e"):
        plan = ao.plan("ring", *SHAPES, metadata=_metadata((4,), ("sp",)), causal=True)
    routes = [decision.route for decision in plan.decisions]
    assert routes.count("flash/tpu") == 1, plan


def test_on_one_device_ring_and_ulysses_are_blocksparse():
    x = jnp.ones((1, 16, 2, 8))
    for metadata in (ao.OperationMetadata(), _metadata((2,), ("dp",)), _metadata((1,), ("sp",))):
        for name in ("ring", "ulysses"):
            plan = ao.plan(name, x, x, x, metadata=metadata)
            assert (plan.route, plan.is_fallback) == ("blocksparse/native", False)


@pytest.mark.parametrize(
    "mask",
    [
        masks.Causal(2),
        masks.Causal(jnp.array([0, 3])) & masks.Window(4, 1, 1),
        masks.PrefixLM(5, 0),
        masks.PrefixLM(jnp.array([3, 9]), 0) | masks.Window(2, 2, 0),
        masks.Chunked(4, 1) & ~masks.Causal(0),
        masks.Segments(jnp.arange(12)[None] // 5, jnp.arange(16)[None] // 5),
        masks.Lengths(jnp.array([7, 12]), jnp.array([9, 16])),
        masks.Dense(np.random.default_rng(0).random((2, 1, 12, 16)) < 0.5),
        masks.Dense(jnp.asarray(np.random.default_rng(1).random((1, 3, 1, 16)) < 0.5)),
    ],
    ids=str,
)
@pytest.mark.parametrize("traced", [False, True])
def test_a_cut_of_a_mask_is_that_part_of_it(mask, traced):
    whole = np.broadcast_to(mask.dense(12, 16), (2, 3, 12, 16))
    row, col = (jnp.int32(4), jnp.int32(8)) if traced else (4, 8)
    part = np.broadcast_to(mask.cut(row, 4, col, 8).dense(4, 8), (2, 3, 4, 8))
    np.testing.assert_array_equal(part, whole[:, :, 4:8, 8:16])


def test_chunks_are_not_cut():
    with pytest.raises(ValueError, match="chunks of 3 keys are cut by parts of 8 keys; allowed are parts of whole chunks"):
        masks.Chunked(3, 0).cut(0, 4, jnp.int32(8), 8)


def test_partition_axis_of_eformer_or_a_mapping():
    spec = ao.plan("flash", *SHAPES).spec
    split = layout(spec, _metadata((2, 2, 2, 2), ("dp", "fsdp", "tp", "sp"), PartitionAxis()))
    assert (set(split.batch), split.heads, split.sequence) == ({"dp", "fsdp"}, ("tp",), ("sp",))
    axes = {"batch_axis": "data", "head_axis": ["model"], "sequence_axis": "context"}
    split = layout(spec, _metadata((2, 2, 2), ("data", "model", "context"), axes))
    assert (split.batch, split.heads, split.sequence) == (("data",), ("model",), ("context",))


def test_a_mesh_that_a_call_cannot_run_over_is_refused_in_our_words_and_an_abstract_one_is_that_of_set_mesh():
    x, mesh = jnp.ones((2, 4, 2, 4)), jax.make_mesh((1,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))

    def call(mesh):
        return ao.attention(x, x, x, impl="vanilla", metadata=ao.OperationMetadata(mesh=mesh)).attention_outputs

    with pytest.raises(ValueError, match=r"^mesh has no axes, as jax.sharding.get_abstract_mesh\(\) outside of"):
        call(jax.sharding.get_abstract_mesh())
    abstract = jax.sharding.AbstractMesh((1,), ("sp",))
    with pytest.raises(ValueError, match=r"metadata.mesh is AbstractMesh\(.*which has no devices to run on and is for planning"):
        call(abstract)
    others = [jax.make_mesh((1,), ("dp",), axis_types=mesh.axis_types), jax.make_mesh((1,), ("sp",))]
    with jax.set_mesh(mesh):
        assert (call(abstract) == call(mesh)).all()
        for other in others:
            with pytest.raises(ValueError, match=r"metadata.mesh is Mesh.*, but the mesh around the call, of jax.set_mesh"):
                call(other)
    with pytest.raises(ValueError, match="but the mesh around the call"):
        jax.shard_map(lambda _: call(others[0]), mesh=mesh, in_specs=P(), out_specs=P())(x)
