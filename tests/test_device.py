"""Reading the machine: every fact that cannot be read is a sentence, never an error; planning for another needs no device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import attention_ops as ao
from attention_ops import api, device
from attention_ops.device import DeviceProfile, as_profile, compiling_for, describe

SHAPE = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)


class Gpu:
    """What JAX shows of a GPU; a test overrides what is to fail."""

    platform, device_kind, compute_capability = "gpu", "NVIDIA Fake", "9.0"

    class client:
        platform_version = "PJRT C API\ncuda 12090"

    def memory_stats(self):
        return {"bytes_limit": 42}


@pytest.fixture(autouse=True)
def fresh():
    device._describe_here.cache_clear()
    yield
    device._describe_here.cache_clear()


def test_every_named_device_is_planned_for_without_one():
    gpus = ["t4", "v100", "a100", "l4", "h100", "h200", "b200", "rtx4090", "mi300x"]
    wanted = ["cpu", *gpus, "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e"]
    assert set(wanted) == set(DeviceProfile.names())
    for name in wanted:
        plan = ao.plan("auto", SHAPE, SHAPE, SHAPE, causal=True, device=name)
        assert plan.device.name == name
        assert plan.device.memory or name == "cpu"
    older = DeviceProfile.named("a100", jax_version=(0, 6, 0), cudnn_version=(9, 5, 0), memory=1, compute_capability=(8, 6))
    assert (older.jax_version, older.cudnn_version, older.memory) == ((0, 6, 0), (9, 5, 0), 1)
    assert str(older) == "a100 (cuda, compute capability 8.6, cuDNN 9.5.0)"


def test_no_device_can_be_started(monkeypatch):
    def broken(*_):
        raise RuntimeError("Unable to initialize backend 'cuda': no driver\nmore")

    monkeypatch.setattr(jax, "devices", broken)
    profile = DeviceProfile.current()
    assert (profile.name, profile.platform) == ("cpu", "cpu")
    assert profile.notes == (
        "JAX cannot start its devices, so this is the profile of the CPU (Unable to initialize backend 'cuda': no driver)",
    )
    assert profile.notes[0] in str(ao.plan("vanilla", SHAPE, SHAPE, SHAPE))
    with pytest.raises(RuntimeError, match="there is no tpu device here .Unable to initialize"):
        DeviceProfile.current("tpu")


def test_a_gpu_that_answers_nothing(monkeypatch):
    class Silent(Gpu):
        compute_capability = property(lambda self: "unknown")

        def memory_stats(self):
            raise NotImplementedError("not on this driver")

    profile = describe(Silent())
    assert (profile.platform, profile.compute_capability, profile.memory) == ("cuda", None, None)
    assert len(profile.notes) == 2
    assert "the memory of the device cannot be read (NotImplementedError: not on this driver)" in profile.notes
    assert "the compute capability of the device cannot be read" in profile.notes[1]
    assert "reports no compute capability" in str(ao.plan("cudnn_flash", SHAPE, SHAPE, SHAPE, device=profile))


def test_other_platforms():
    class Rocm(Gpu):
        class client:
            platform_version = "PJRT C API\nrocm 70000"

    class Tpu(Gpu):
        platform, device_kind = "tpu", "TPU v5 lite"

    class Unheard(Gpu):
        platform = "npu"

    assert (describe(Rocm()).platform, describe(Rocm()).memory) == ("rocm", 42)
    assert (describe(Tpu()).name, describe(Tpu()).platform, describe(Tpu()).memory) == ("TPU v5 lite", "tpu", 42)
    assert describe(Unheard()).platform == "cpu"
    assert "'npu', which is not known" in describe(Unheard()).notes[0]


def test_two_kinds_of_gpu(monkeypatch):
    class Other(Gpu):
        device_kind = "NVIDIA Other"

    machine = [Gpu(), Other()]
    monkeypatch.setattr(jax, "devices", lambda *_: machine)
    monkeypatch.setattr(jax, "local_devices", lambda backend: machine)
    (note,) = DeviceProfile.current().notes
    assert note.startswith(
        "there are 2 kinds of device here (NVIDIA Fake, NVIDIA Other) and this is the profile of the NVIDIA Fake"
    )


def test_a_plug_in_that_finds_no_device(monkeypatch):
    monkeypatch.setattr(device, "_installed", lambda name: "0.10.2" if name == "jax-cuda13-plugin" else None)
    before = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", None)
        (note,) = DeviceProfile.current().notes
    finally:
        jax.config.update("jax_platforms", before)
    assert note == "jax-cuda13-plugin 0.10.2 is installed, but JAX finds no NVIDIA GPU: its driver is missing or does not fit"


def test_the_cudnn_that_jax_loads_counts_before_the_package(monkeypatch):
    from jax._src import lib

    class Loaded:
        @staticmethod
        def cudnn_get_version():
            return 91302

    monkeypatch.setattr(lib, "cuda_versions", Loaded)
    assert device._cudnn_version() == (9, 13, 2)
    monkeypatch.setattr(lib, "cuda_versions", None)
    monkeypatch.setattr(device, "_installed", lambda name: "9.12.0.46" if name.endswith("cu12") else None)
    assert device._cudnn_version() == (9, 12, 0)


# ---------------------------------------------------------------- which device a call is planned for


def test_arrays_decide_over_the_default_device(monkeypatch, qkv):
    """A machine whose default device is a GPU; the arrays were put on the CPU."""
    a100 = DeviceProfile.named("a100")
    monkeypatch.setattr(device, "_default", lambda: a100)
    arrays = [jax.device_put(x, jax.devices("cpu")[0]) for x in qkv(dtype=jnp.bfloat16, D=64)]
    with ao.record_plans() as plans:
        ao.attention(*arrays, impl="cudnn_flash", metadata=ao.OperationMetadata(fallback="silent"))
    assert (plans[0].device.platform, plans[0].route) == ("cpu", "flash/native")
    assert ao.plan("cudnn_flash", *arrays).device.platform == "cpu"
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    assert ao.plan("cudnn_flash", *shapes).route == "cudnn_flash/cuda"


def test_the_device_of_the_arrays_and_not_the_first(monkeypatch, qkv):
    """Two kinds of device; `describe` tells them apart."""
    here = qkv()[0]
    monkeypatch.setattr(api, "describe", lambda found: as_profile("l4") if found in here.devices() else as_profile("a100"))
    assert api._device_of(here, ao.OperationMetadata()).name == "l4"


def test_the_default_device_of_jax(monkeypatch):
    with jax.default_device(jax.devices("cpu")[0]):
        assert DeviceProfile.current().platform == "cpu"


def test_compiling_for_a_device_that_is_not_here(qkv):
    q, k, v = qkv(T=256, D=64)
    with compiling_for("a100") as profile, ao.record_plans() as plans:
        assert profile == DeviceProfile.current() == DeviceProfile.named("a100")
        jax.eval_shape(lambda q, k, v: ao.attention(q, k, v, impl="vanilla").attention_outputs, q, k, v)
        with compiling_for(dataclasses.replace(profile, name="mine")):
            assert DeviceProfile.current().name == "mine"
    assert plans[0].device.name == "a100"
    assert DeviceProfile.current().platform == "cpu"


def test_a_program_that_was_traced_for_another_device_is_not_used_here(qkv):
    traced = []

    @jax.jit
    def model(q, k, v):
        traced.append(DeviceProfile.current().name)
        return ao.attention(q, k, v, impl="vanilla").attention_outputs

    q, k, v = qkv()
    with compiling_for("tpu-v5e"):
        model.trace(q, k, v)
    model(q, k, v)
    assert traced == ["tpu-v5e", "cpu"]
