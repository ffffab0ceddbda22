"""Frozen values: metadata, device profiles, rules."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
        ({"runtime_dtype": "int32"}, TypeError, "runtime_dtype is int32; allowed are floating dtypes"),
        ({"runtime_dtype": "flot32"}, TypeError, "runtime_dtype is 'flot32', which is no dtype"),
        ({"runtime_dtype": "float64"}, TypeError, "set JAX_ENABLE_X64=1 first"),
        ({"softmax_dtype": "bfloat16"}, ValueError, "softmax_dtype is bfloat16; allowed are float32 and float64"),
        ({"block_sizes": (0, 1)}, ValueError, "block_sizes.q is 0; allowed is an integer of 1 or more"),
        ({"block_sizes": {"k": 1}}, TypeError, "block_sizes has no field 'k'; allowed are q and kv"),
        ({"block_sizes": 128}, TypeError, "block_sizes is 128; allowed are"),
        ({"backend": "cudda"}, ValueError, "backend is 'cudda'; allowed are None, cuda"),
        ({"fallback": "never"}, ValueError, "fallback is 'never'; allowed are warn, silent, error"),
        ({"operation_configs": {"flash": {}}}, TypeError, "must be hashable"),
        ({"operation_configs": 3}, TypeError, "expected a mapping"),
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
LIMITS = [
    (rules.Dtypes(("float32",)), {}, {"dtype": jnp.float16}, "dtype float16 is not one of float32"),
    (rules.HeadDim(maximum=64), {"D": 64}, {"D": 65}, "head_dim 65 > 64, the limit"),
    (rules.HeadDim(maximum=64), {}, {"Dv": 128}, "value head_dim 128 > 64"),
    (rules.HeadDim(minimum=16), {"D": 16}, {"D": 15}, "head_dim 15 < 16, the minimum"),
    (rules.HeadDim(multiple_of=8), {"D": 72}, {"D": 73}, "head_dim 73 is not a multiple of 8 (pad to 80"),
    (rules.MinQueryLength(2), {"T": 2}, {"T": 1, "S": 8}, "query length 1 < 2, the minimum"),
    (rules.LengthMultiple(16), {"T": 32, "S": 48}, {"T": 32, "S": 40}, "key length 40 is not a multiple of 16 (pad to 48"),
    (rules.LengthMultiple(16), {"T": 32, "S": 48}, {"T": 31, "S": 48}, "query length 31 is not a multiple of 16"),
    (
        rules.SelfAttentionMask(),
        {"T": 4, "S": 8},
        {"T": 4, "S": 8, "causal": True, "query_offset": 0},
        "query length 4 != key length 8",
    ),
    (rules.SoftmaxDtype("float32"), {}, None, ""),
    (
        rules.BiasDtype(),
        {},
        {"dtype": jnp.float16, "bias": jax.ShapeDtypeStruct((64, 64), jnp.float32)},
        "bias dtype float32 != runtime",
    ),
    (rules.Requires("jax", "jax"), {}, None, ""),
    (rules.JaxVersion((0, 10)), {}, None, ""),
]


@pytest.mark.parametrize(("rule", "inside", "outside", "reason"), LIMITS, ids=[repr(limit[0]) for limit in LIMITS])
def test_each_rule_refuses_alone_and_takes_what_is_just_inside(rule, inside, outside, reason):
    metadata = OperationMetadata()
    assert rule.check(_spec(**inside), metadata, GPU) is None
    assert rule.describe()
    if outside is not None:
        assert reason in str(rule.check(_spec(**outside), metadata, GPU))


def test_a_dtype_can_be_missing_on_one_platform():
    rule, half = rules.DtypeNotOn("float16", "cpu"), _spec(dtype=jnp.float16)
    assert rule.check(half, OperationMetadata(), GPU) is None
    assert rule.check(_spec(), OperationMetadata(), ao.DeviceProfile.named("cpu")) is None
    assert "dtype float16 on cpu" in str(rule.check(half, OperationMetadata(), ao.DeviceProfile.named("cpu")))


def test_rules_of_the_environment():
    metadata, spec = OperationMetadata(), _spec()
    old = dataclasses.replace(GPU, jax_version=(0, 6, 2))
    assert str(rules.JaxVersion((0, 10)).check(spec, metadata, old)) == "JAX 0.6.2 < 0.10, the minimum (upgrade jax)"
    missing = rules.Requires("no_such_package", "attention-ops[cuda]").check(spec, metadata, GPU)
    assert str(missing) == "the package no_such_package is not installed (pip install attention-ops[cuda])"
    cpu = rules.ComputeCapability((8, 0)).check(spec, metadata, ao.DeviceProfile.named("cpu"))
    assert str(cpu) == "cpu reports no compute capability, 8.0 is needed"
    wide = dataclasses.replace(spec, softmax_dtype=np.dtype("float64"))
    assert "softmax dtype float64 is asked for" in str(rules.SoftmaxDtype().check(wide, metadata, GPU))


def test_several_windows_are_their_intersection():
    check = lambda **options: rules.LeftWindowOnly().check(_spec(**options), OperationMetadata(), GPU)  # noqa: E731
    assert check(causal=True, mask=ao.masks.Window(3, 0), sliding_window=(5, 0)) is None
    assert check(mask=ao.masks.Window(3, 4), sliding_window=(5, 0)) is None
    assert "window right size 2 != 0" in str(check(mask=ao.masks.Window(3, 4), sliding_window=(5, 2)))


def test_eight_bit_floats_have_a_reason_of_their_own():
    spec = dataclasses.replace(_spec(), dtype=np.dtype(jnp.float8_e4m3fn))
    assert "float8_e4m3fn needs a scaling factor for each tensor" in str(rules.NoFloat8().check(spec, OperationMetadata(), GPU))
    assert rules.NoFloat8().check(_spec(), OperationMetadata(), GPU) is None


def test_a_value_head_dim_of_its_own():
    rule, spec = rules.ValueHeadDim((9, 0), (9, 10)), _spec(Dv=32)
    h100 = ao.DeviceProfile.named("h100")
    assert rule.check(spec, OperationMetadata(), h100) is None
    assert rule.check(_spec(), OperationMetadata(), GPU) is None
    assert "on compute capability 8.0 < 9.0" in str(rule.check(spec, OperationMetadata(), GPU))
    none = dataclasses.replace(h100, cudnn_version=None)
    assert "with cuDNN not found, 9.10 is needed" in str(rule.check(spec, OperationMetadata(), none))


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
