"""Frozen values: metadata, device profiles, rules."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eformer.escale import PartitionAxis
from jax.sharding import PartitionSpec as P

import attention_ops as ao
from attention_ops import planner, rules
from attention_ops.device import as_profile, version_tuple
from attention_ops.metadata import OperationMetadata
from attention_ops.request import make_request


def test_metadata_is_a_value():
    make = lambda: OperationMetadata(runtime_dtype="bfloat16", block_sizes=(64, 128), operation_configs={"flash": (1, 2)})  # noqa: E731
    a, b = make(), make()
    assert a == b
    assert hash(a) == hash(b)
    assert a.block_sizes == ao.BlockSizes(64, 128)
    assert a != dataclasses.replace(a, fallback="silent")
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.backend = "cpu"  # type: ignore[misc]
    for again in (copy.deepcopy(a), pickle.loads(pickle.dumps(a))):
        assert again == a
        assert hash(again) == hash(a)


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"runtime_dtype": "int32"}, TypeError, "runtime_dtype is int32; allowed are float16"),
        ({"runtime_dtype": "float8_e4m3fn"}, TypeError, "runtime_dtype is float8_e4m3fn; allowed are float16"),
        ({"runtime_dtype": np.longdouble}, TypeError, f"runtime_dtype is {np.dtype(np.longdouble)}; allowed are float16"),
        ({"runtime_dtype": "flot32"}, TypeError, "runtime_dtype is 'flot32', which is no dtype"),
        ({"runtime_dtype": "float64"}, TypeError, "set JAX_ENABLE_X64=1 first"),
        ({"softmax_dtype": "bfloat16"}, ValueError, "softmax_dtype is bfloat16; allowed are float32 and float64"),
        ({"block_sizes": (0, 1)}, ValueError, "block_sizes.q is 0; allowed is an integer of 1 or more"),
        ({"block_sizes": {"k": 1}}, TypeError, "block_sizes has no field 'k'; allowed are q and kv"),
        ({"block_sizes": 128}, TypeError, "block_sizes is 128; allowed are"),
        ({"backend": "cudda"}, ValueError, "backend is 'cudda'; allowed are None, cuda"),
        ({"fallback": "never"}, ValueError, "fallback is 'never'; allowed are warn, silent, error"),
        (
            {"operation_configs": {"flash": {}}},
            TypeError,
            "operation_configs is {'flash': {}}; allowed are values that can be hashed",
        ),
        ({"mesh": "sp=4"}, TypeError, "mesh is 'sp=4'; allowed are a jax.sharding.Mesh or AbstractMesh, and None; jax.make_mesh"),
        ({"mesh": {"sp": 4}}, TypeError, "mesh is {'sp': 4}; allowed are"),
        ({"mesh": jax.devices()}, TypeError, "mesh is .*; allowed are"),
        (
            {"partition_axis": "sp"},
            TypeError,
            "partition_axis is 'sp'; allowed are None, eformer's PartitionAxis, and a mapping of",
        ),
        ({"partition_axis": P("dp", None)}, TypeError, "partition_axis is P.*'dp', None.*; allowed are"),
        ({"partition_axis": {"batch": "dp"}}, ValueError, "partition_axis has no key 'batch'. Did you mean 'batch_axis'"),
        ({"partition_axis": {"head_axis": 3}}, TypeError, "partition_axis.head_axis is 3; allowed are the name of a mesh axis"),
        ({"partition_axis": {"head_axis": {"tp": 2}}}, TypeError, "partition_axis.head_axis is {'tp': 2}; allowed are"),
        ({"partition_axis": PartitionAxis(batch_axis=(1,))}, TypeError, r"partition_axis.batch_axis is \(1,\); allowed are"),
        ({"operation_configs": 3}, TypeError, "operation_configs must be a mapping from names to settings, found int"),
    ],
)
def test_metadata_errors(fields, error, match):
    with pytest.raises(error, match=match):
        OperationMetadata(**fields)


def test_metadata_from_a_config():
    assert OperationMetadata.from_config({"backend": "cpu"}).backend == "cpu"

    class Config:
        runtime_dtype = "bfloat16"
        block_sizes = (16, 32)
        fallback = "error"
        unrelated = 1

    metadata = OperationMetadata.from_config(Config())
    assert (metadata.runtime_dtype, metadata.block_sizes.kv, metadata.fallback) == (jnp.bfloat16, 32, "error")
    with pytest.raises(TypeError, match="metadata has no field 'backed'. Did you mean 'backend'"):
        OperationMetadata.from_config({"backed": "cpu"})


def test_operations_refuse_other_metadata():
    with pytest.raises(TypeError, match="metadata must be an OperationMetadata, found dict"):
        ao.OperationRegistry.create("flash", {"backend": "cpu"})  # type: ignore[arg-type]


def test_named_profiles():
    a100 = ao.DeviceProfile.named("A100")
    assert (a100.platform, a100.compute_capability, a100.cudnn_version) == ("cuda", (8, 0), (9, 10, 1))
    assert a100.backends == ("cuda", "gpu", "native")
    assert ao.DeviceProfile.named("tpu_v5e").backends == ("tpu", "native")
    assert ao.DeviceProfile.named("h100", cudnn_version=(9, 5)).cudnn_version == (9, 5)
    assert str(a100) == "a100 (cuda, compute capability 8.0, cuDNN 9.10.1)"
    with pytest.raises(ValueError, match="device 'a1000' is not known; known are a100"):
        ao.DeviceProfile.named("a1000")
    with pytest.raises(ValueError, match="platform is 'npu'; allowed are cpu, cuda, rocm, tpu"):
        ao.DeviceProfile("x", "npu")  # type: ignore[arg-type]


def test_the_device_at_hand():
    assert ao.DeviceProfile.current().platform == "cpu"
    assert as_profile(None) == as_profile(jax.devices()[0]) == as_profile("cpu")
    assert as_profile(ao.DeviceProfile.named("l4")).name == "l4"
    assert version_tuple("9.10.1.4") == (9, 10, 1, 4)


class _Gpu:
    platform, device_kind, compute_capability = "gpu", "NVIDIA Fake", "9.0"

    class client:
        platform_version = "PJRT C API\ncuda 12090"

    def memory_stats(self):
        return {"bytes_limit": 42}


def test_a_gpu_is_read_without_assuming_much(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.12.0.46" if name.endswith("cu13") else "0")
    profile = as_profile(_Gpu())
    assert (profile.platform, profile.compute_capability, profile.memory) == ("cuda", (9, 0), 42)
    assert profile.cudnn_version == (9, 12, 0)


def _spec(T=64, S=None, D=64, Dv=None, dtype=jnp.float32, **options):
    shapes = ((1, T, 2, D), (1, S or T, 2, D), (1, S or T, 2, Dv or D))
    return make_request(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes), options, OperationMetadata()).spec


GPU = ao.DeviceProfile.named("a100")


def test_several_windows_are_their_intersection():
    check = lambda **options: rules.LeftWindowOnly().check(_spec(**options), OperationMetadata(), GPU)  # noqa: E731
    assert check(causal=True, mask=ao.masks.Window(3, 0), sliding_window=(5, 0)) is None
    assert check(mask=ao.masks.Window(3, 4), sliding_window=(5, 0)) is None
    assert "window right size 2 != 0" in str(check(mask=ao.masks.Window(3, 4), sliding_window=(5, 2)))


def _changed(monkeypatch, function):
    """Return what the rule says of cuDNN's function when JAX has another in its place."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn_of_jax

    from attention_ops.kernels import cudnn

    rule = rules.PrivateFunction(cudnn.FUNCTION, cudnn.PARAMETERS, cudnn.NAMES)
    rules._changed.cache_clear()
    assert rule.check(_spec(), OperationMetadata(), GPU) is None
    rules._changed.cache_clear()
    if function is None:
        monkeypatch.delattr(cudnn_of_jax, "dot_product_attention")
    else:
        monkeypatch.setattr(cudnn_of_jax, "dot_product_attention", function)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.11.0")
    try:
        query = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
        planner._make_plan.cache_clear()
        said = str(ao.plan("cudnn_flash", query, query, query, device=GPU))
        reason = str(rule.check(_spec(), OperationMetadata(), GPU))
        assert reason in said
        return reason
    finally:
        rules._changed.cache_clear()
        planner._make_plan.cache_clear()


def test_a_private_function_that_changed_is_a_reason(monkeypatch):
    renamed = lambda query, key, value, bias, q_seqlen, kv_seqlen, scale, mask_type, window=None: None  # noqa: E731
    reason = _changed(monkeypatch, renamed)
    assert reason.startswith("jax 0.11.0: jax._src.cudnn.fused_attention_stablehlo.dot_product_attention has no parameter")
    assert "'sliding_window_length', which this route passes" in reason


def test_a_private_function_that_wants_more_is_a_reason(monkeypatch):
    def more(layout, query, key, value, bias, q_seqlen, kv_seqlen, scale, mask_type, sliding_window_length):
        pass

    assert "needs a parameter 'layout', which this route does not know" in _changed(monkeypatch, more)


def test_a_private_function_that_is_gone_is_a_reason(monkeypatch):
    assert "jax 0.11.0 has no jax._src.cudnn.fused_attention_stablehlo.dot_product_attention as it was" in _changed(
        monkeypatch, None
    )


@pytest.mark.parametrize("device", ["a100", "h100"])
def test_a_call_compiled_for_a_device_with_cudnn_lowers_to_its_kernels_on_a_machine_without(device):
    query = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)

    def loss(query):
        return ao.attention(query, query, query, causal=True).attention_outputs.astype(jnp.float32).sum()

    with ao.compiling_for(device):
        text = jax.jit(jax.grad(loss)).trace(query).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__cudnn$fmha") == 2
