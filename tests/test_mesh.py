"""Operations over a mesh of eight devices: the numbers of one device, and the collectives that docs/distributed.md states."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import pytest
from compiling import environment_of_users, on_devices
from jax.sharding import PartitionSpec as P

import attention_ops as ao
from attention_ops.sharding import layout, transfers
from tests import mesh_own
from tests.mesh_cases import SHORT, mesh_of
from tests.mesh_transforms import IN_FLOAT16, NAMED, RUN, SECOND


@pytest.mark.parametrize("mesh", SHORT)
def test_values_and_gradients_are_those_of_one_device(mesh):
    result = on_devices(8, "-m", "tests.mesh_cases", mesh)
    lines = result.stdout.splitlines()
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert len(lines) == sum(len(shapes) for shapes in SHORT[mesh].values())
    assert all(line.endswith(": equal") for line in lines)


COLLECTIVES = """
import json, math, re
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import attention_ops as ao

mesh = jax.make_mesh((8,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
metadata = ao.OperationMetadata(mesh=mesh)
T = 2048
x = jax.ShapeDtypeStruct((1, T, 8, 16), jnp.float32, sharding=NamedSharding(mesh, P(None, "sp")))
one = jax.ShapeDtypeStruct((1, 1, 8, 16), jnp.float32)
bias, mask = (
    jax.ShapeDtypeStruct((1, 1, T, T), dtype, sharding=NamedSharding(mesh, P(None, None, "sp"))) for dtype in (jnp.float32, bool)
)

def sizes(text):
    shapes = re.findall(r"(f32|pred)\\[([\\d,]+)\\]", text)
    return [(math.prod(int(n) for n in shape.split(",")), {"f32": 4, "pred": 1}[dtype]) for dtype, shape in shapes]

found = {}
for impl in ("ring", "ulysses", "flash"):
    def forward(q, k, v, bias=None, mask=None, impl=impl):
        options = {"causal": True, "bias": bias, "mask": mask}
        return ao.attention(q, k, v, impl=impl, metadata=metadata, **options).attention_outputs
    def gradient(*arrays):
        return jax.grad(lambda *a: forward(*a).sum(), (0, 1, 2))(*arrays)
    for name, function, arrays in (
        ("forward", forward, (x, x, x)),
        ("with rows", forward, (x, x, x, bias, mask)),
        ("gradient", gradient, (x, x, x)),
        ("decode", forward, (one, x, x)),
    ):
        if (impl, name) == ("ulysses", "with rows"):
            continue  # every device needs all of its heads' logits
        compiled = jax.jit(function).lower(*arrays).compile()
        text = compiled.as_text()
        collective = r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\\("
        sent = [
            (name, where, sum(size * item for size, item in sizes(shapes)))
            for where, part in zip(("in a loop", "once"), text.split("\\nENTRY "), strict=True)
            for shapes, name in re.findall(collective, part)
        ]
        found[f"{impl} {name}"] = {"sent": sent, "largest": max(size for size, _ in sizes(text))}
print(json.dumps(found))
"""


SHARE = {"all-gather": 7 / 8, "all-to-all": 7 / 8, "all-reduce": 2 * 7 / 8, "collective-permute": 1}
"""What one of eight devices receives from others, for each byte of a collective's result."""
COUNTED = {
    "ring forward": (2048, "ring"),
    "ring with rows": (2048, "ring"),
    "ulysses forward": (2048, "ulysses"),
    "flash forward": (2048, "gather"),
    "flash with rows": (2048, "gather"),
    "ulysses decode": (1, "ulysses"),
    "ring decode": (1, "ring"),
    "flash decode": (1, "gather"),
}


def test_the_collectives_are_the_documented_ones_and_explain_counts_their_bytes():
    result = on_devices(8, "-c", COLLECTIVES, environment=environment_of_users())
    assert result.returncode == 0, result.stderr[-2000:]
    programs = json.loads(result.stdout)
    collectives = {key: {name for name, *_ in value["sent"]} for key, value in programs.items()}
    assert collectives == {
        "ring forward": {"collective-permute"},
        "ring with rows": {"collective-permute"},
        "ring gradient": {"collective-permute"},
        "ring decode": {"all-gather", "all-reduce"},
        "ulysses forward": {"all-to-all"},
        "ulysses gradient": {"all-to-all"},
        "ulysses decode": {"all-to-all"},
        "flash forward": {"all-gather"},
        "flash with rows": {"all-gather"},
        "flash gradient": {"all-gather", "all-reduce"},
        "flash decode": {"all-gather", "all-reduce"},
    }
    assert max(value["largest"] for value in programs.values()) <= 2048 * 2048 // 2, "an array of T * S"

    metadata = ao.OperationMetadata(mesh=jax.sharding.AbstractMesh((8,), ("sp",)))
    for program, (T, way) in COUNTED.items():
        arrays = [jax.ShapeDtypeStruct((1, n, 8, 16), jnp.float32) for n in (T, 2048, 2048)]
        rows = [jax.ShapeDtypeStruct((1, 1, T, 2048), dtype) for dtype in (jnp.float32, bool)]
        bias, mask = rows if program.endswith("rows") else (None, None)
        spec, hops = ao.plan("flash", *arrays, causal=True, bias=bias, mask=mask).spec, {"in a loop": 7, "once": 1}
        received = sum(SHARE[name] * size * hops[where] for name, where, size in programs[program]["sent"])
        assert received == sum(found.bytes for found in transfers(spec, layout(spec, metadata, way))) > 0, program


OTHER = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import attention_ops as ao

q, k, v = (jax.random.normal(key, (2, 16, 4, 8)) for key in jax.random.split(jax.random.key(0), 3))
one = ao.attention(q, k, v, impl="vanilla", causal=True).attention_outputs

def check(out, what):
    np.testing.assert_allclose(np.asarray(out), np.asarray(one), atol=2e-5, err_msg=what)

for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2, 4), ("dp", "sp"), axis_types=(kind,) * 2)
    metadata = ao.OperationMetadata(mesh=mesh)
    with jax.set_mesh(mesh):
        for impl in ("ring", "ulysses", "flash"):
            placed = [jax.device_put(x, NamedSharding(mesh, P("dp", "sp"))) for x in (q, k, v)]
            call = lambda *a: ao.attention(*a, impl=impl, causal=True, metadata=metadata).attention_outputs
            check(jax.jit(call)(*placed), f"{kind} {impl} under jit")
            check(jax.jit(jax.checkpoint(call))(*placed), f"{kind} {impl} under remat")
            check(jax.lax.scan(lambda c, _: (c, call(*placed)), 0, jnp.arange(2))[1][1], f"{kind} {impl} in a scan")

for kinds in ((AxisType.Auto, AxisType.Explicit), (AxisType.Explicit, AxisType.Auto)):
    metadata = ao.OperationMetadata(mesh=jax.make_mesh((2, 4), ("dp", "sp"), axis_types=kinds))
    for impl in ("ring", "ulysses"):
        check(ao.attention(q, k, v, impl=impl, causal=True, metadata=metadata).attention_outputs, f"{kinds} {impl}")

mesh = jax.make_mesh((8,), ("sp",), axis_types=(AxisType.Auto,))
metadata = ao.OperationMetadata(mesh=mesh)
with ao.record_plans() as plans:
    local = jax.shard_map(
        lambda q, k, v: ao.attention(q, k, v, impl="ring", metadata=metadata).attention_outputs,
        mesh=mesh, in_specs=(P(None, None, None),) * 3, out_specs=P(), check_vma=False,
    )
    out = jax.jit(local)(q, k, v)
np.testing.assert_allclose(np.asarray(out), np.asarray(ao.attention(q, k, v, impl="vanilla").attention_outputs), atol=2e-5)
assert plans[0].spec.T == 16 and any("inside a shard_map" in note for note in plans[0].notes), plans[0]

lies = jax.device_put(q, jax.devices()[1])
attend = lambda q: ao.attention(q, k, v, impl="flash", metadata=metadata).attention_outputs.sum()
for call, name in ((attend, "query is committed to SingleDeviceSharding"), (jax.grad(attend), "an array of the call")):
    try:
        call(lies)
    except ValueError as error:
        assert str(error).startswith(name) and "and metadata.mesh has the devices [CpuDevice(id=0), " in str(error), error
    else:
        raise AssertionError(name)
attend(jax.device_put(lies, NamedSharding(mesh, P())))

x = jnp.ones((1, 64, 2, 8))
dropped = ao.attention(x, x, x, impl="vanilla", metadata=metadata, dropout_prob=0.5, deterministic=False,
                       dropout_rng=jax.random.key(0)).attention_outputs
rows = np.asarray(dropped[0]).reshape(8, -1)
assert len({row.tobytes() for row in rows}) == 8, "the parts of the sequence drew the same dropout"
print("equal")
"""


def test_axis_types_outer_transforms_and_an_outer_shard_map():
    result = on_devices(8, "-c", OTHER)
    assert result.stdout.strip() == "equal", result.stderr[-3000:]


def test_transformations_over_a_mesh():
    result = on_devices(8, "-m", "tests.mesh_transforms")
    lines = result.stdout.splitlines()
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert len(lines) == sum(map(len, RUN.values())) + len(SECOND) + len(NAMED) + len(IN_FLOAT16) + 1
    assert all(line.endswith(": holds") for line in lines)


def test_calls_in_a_shard_map_of_ones_own_that_checks_what_varies():
    result = on_devices(4, "-m", "tests.mesh_own")
    lines = result.stdout.splitlines()
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert len(lines) == sum(map(len, mesh_own.RUN.values())) + len(mesh_own.MAPPED)
    assert all(line.endswith(": holds") for line in lines)


@pytest.mark.parametrize(("device", "route"), [("a100", "flash/gpu"), ("tpu-v5e", "blocksparse/tpu")])
def test_a_pallas_kernel_runs_only_in_a_shard_map_that_does_not_check_what_varies(device, route):
    call = lambda x: ao.attention(x, x, x, impl=[route]).attention_outputs  # noqa: E731
    on_mesh = functools.partial(jax.shard_map, call, mesh=mesh_of("dp=1"), in_specs=P("dp"), out_specs=P("dp"))
    x = jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.float32)
    with ao.compiling_for(device):
        assert jax.eval_shape(on_mesh(check_vma=False), x).shape == x.shape
        with pytest.raises(ValueError, match=f"^{route} is a Pallas kernel, which does not say over which mesh axes") as error:
            jax.eval_shape(on_mesh(), x)
    assert str(error.value).endswith(
        "its output varies, and the arrays vary over dp in a jax.shard_map that checks it; pass check_vma=False to that"
    )
