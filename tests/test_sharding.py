"""A mesh in the metadata gives the numbers of one device."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import attention_ops as ao
from attention_ops.sharding import layout

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
    result = subprocess.run(
        [sys.executable, "-c", ON_EIGHT_DEVICES],
        env={**__import__("os").environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
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
        ((8,), ("dp",), None, "batch size 4 cannot be split over the mesh axes .'dp'. of 8 devices"),
        ((3,), ("tp",), None, "query heads 4 cannot be split over the mesh axes .'tp'. of 3 devices"),
        ((4,), ("tp",), None, "key/value heads 2 cannot be split over the mesh axes .'tp'. of 4 devices"),
        ((2,), ("dp",), {"batch_axis": "data"}, "partition_axis.batch_axis names 'data'; the mesh has dp"),
        ((2,), ("dp",), {"batch": "dp"}, "partition_axis has no key 'batch'; allowed are batch_axis, head_axis"),
    ],
)
def test_what_does_not_divide_is_refused_with_both_numbers(sizes, names, axis, match):
    with pytest.raises(ValueError, match=match):
        ao.plan("flash", *SHAPES, metadata=_metadata(sizes, names, axis))


def test_partition_axis_of_eformer_or_a_mapping():
    from eformer.escale import PartitionAxis

    split = layout(_metadata((2, 2, 2), ("dp", "fsdp", "tp"), PartitionAxis()))
    assert (set(split.batch), split.heads) == ({"dp", "fsdp"}, ("tp",))
    split = layout(_metadata((2, 2), ("data", "model"), {"batch_axis": "data", "head_axis": ["model"]}))
    assert (split.batch, split.heads) == (("data",), ("model",))
