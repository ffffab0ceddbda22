"""Every limit of every route: a request that it alone refuses, with the whole sentence, and one just inside that is taken."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import attention_ops as ao
from attention_ops import masks, rules
from attention_ops.metadata import OperationMetadata
from attention_ops.request import make_request

BUILTIN = ("auto", "blocksparse", "cudnn_flash", "flash", "sdpa", "vanilla")
ROUTES = {route.name: route for name in BUILTIN for route in ao.OperationRegistry.get(name).routes.values()}
DEVICES = {"native": "cpu", "gpu": "a100", "cuda": "h100", "tpu": "tpu-v5e"}
SIZES = {"B": 1, "T": 256, "S": None, "H": 4, "K": 4, "D": 64, "Dv": None, "dtype": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class Limit:
    """One limit of one rule. `outside` and `inside` change sizes, dtype, device, fields of the metadata, or options of the call.

    `beside` names rules that refuse the same for another reason; `repeat` gives JAX the function that ejkernel's kernel misses.
    """

    routes: tuple[str, ...]
    rule: type
    sentence: str
    outside: Mapping[str, Any]
    inside: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    beside: tuple[type, ...] = ()
    repeat: bool = False


def struct(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def profile(name: str, **changes: Any) -> ao.DeviceProfile:
    return ao.DeviceProfile.named(name, **changes)


GPU, SPLASH, TPU = ("blocksparse/gpu", "flash/gpu"), ("blocksparse/tpu",), ("flash/tpu",)
CUDNN, SDPA = ("cudnn_flash/cuda",), ("sdpa/native",)
IDS = {"q_segment_ids": struct(1, 256)}
(OPEN,) = jax.export.symbolic_shape("b")
GB300 = ao.DeviceProfile("gb300", "cuda", (10, 3), cudnn_version=(9, 10, 1))
PAD = "pad both to one head_dim with softmax_scale stated"
EVEN = "pad by one and pass q_lengths and kv_lengths, or pass differentiable=False"
REPEAT = (
    f"jax.experimental.pallas.tpu has no repeat in jax {jax.__version__}, which ejkernel's TPU flash kernel calls, "
    "the one for a sliding_window without a bias"
)
NO_LSE = "ejkernel's TPU flash kernel returns no logsumexp, by which empty rows are found, and takes one head_dim"

LIMITS = (
    # ------------------------------------------------------------ sdpa
    Limit(
        SDPA,
        rules.SelfAttentionMask,
        "query length 256 != key length 255 under causal, which can leave rows empty or keys hidden",
        {"causal": True, "S": 255, "query_offset": 0},
        {"causal": True, "S": 256},
    ),
    Limit(
        SDPA,
        rules.DtypeNotOn,
        "dtype float16 on cpu, where the kernel has no float16 products",
        {"dtype": "float16"},
        {"dtype": "float16", "device": "a100"},
    ),
    Limit(
        (*SDPA, *GPU, *SPLASH, *TPU, *CUDNN),
        rules.SoftmaxDtype,
        "softmax dtype float64 is asked for, the kernel's is float32",
        {"softmax_dtype": "float64"},
        {"softmax_dtype": "float32"},
    ),
    # ------------------------------------------------------------ our Pallas kernels for GPUs
    Limit(GPU, rules.On, "compute capability 7.5 < 8.0, the minimum", {"device": "t4"}, {"device": "a100"}),
    Limit(
        GPU,
        rules.On,
        "an NVIDIA GPU reports no compute capability, 8.0 is needed",
        {"device": ao.DeviceProfile("an NVIDIA GPU", "cuda")},
        {"device": "mi300x"},
    ),
    Limit(
        GPU,
        rules.Dtypes,
        "dtype float64 is not one of bfloat16, float16, float32 (set runtime_dtype=bfloat16)",
        {"dtype": "float64", "differentiable": False},
        {"dtype": "float32"},
        beside=(rules.SoftmaxDtype,),
    ),
    Limit(GPU, rules.HeadDim, "head_dim 257 > 256, the limit on compute capability 8.0", {"D": 257}, {"D": 256}),
    Limit(
        GPU,
        rules.HeadDim,
        "value head_dim 257 > 256, the limit",
        {"Dv": 257, "device": "mi300x", "differentiable": False},
        {"Dv": 256, "device": "mi300x", "differentiable": False},
    ),
    Limit(
        GPU,
        rules.SharedMemory,
        "the smallest tiles at head dims 129 and 129 in float32 take 68608 bytes of shared memory > 65536, "
        "what a program may use on mi300x",
        {"D": 129, "dtype": "float32", "device": "mi300x"},
        {"D": 128, "dtype": "float32", "device": "mi300x"},
    ),
    # ------------------------------------------------------------ the kernels for TPUs
    Limit(
        (*SPLASH, *TPU),
        rules.Dtypes,
        "dtype float16 is not one of bfloat16, float32 (set runtime_dtype=bfloat16)",
        {"dtype": "float16"},
        {"dtype": "float32"},
    ),
    Limit(
        (*GPU, *TPU),
        rules.StaticBatch,
        "batch size b is symbolic, the kernel needs a number (export once for each batch size)",
        {"B": OPEN},
        {"B": 2},
    ),
    Limit(
        SPLASH,
        rules.StaticBatch,
        "batch size b is symbolic beside a mask of run-time data, the kernel needs a number (export once for each batch size)",
        {"B": OPEN, "mask": struct(256, 256, dtype="bool")},
        {"B": OPEN, "causal": True},
    ),
    Limit((*SPLASH, *TPU), rules.HeadDim, "head_dim 513 > 512, the limit", {"D": 513}, {"D": 512}),
    Limit((*SPLASH, *TPU), rules.HeadDim, "value head_dim 513 > 512, the limit", {"Dv": 513}, {"Dv": 512}),
    Limit(
        (*SPLASH, *TPU),
        rules.TpuBlocks,
        "block_sizes.q 127 is not a multiple of 128 (use 128, or None to choose)",
        {"block_sizes": (127, None)},
        {"block_sizes": (128, None)},
    ),
    Limit(
        (*SPLASH, *TPU),
        rules.TpuBlocks,
        "block_sizes.kv 129 is not a multiple of 128 (use 256, or None to choose)",
        {"block_sizes": (None, 129)},
        {"block_sizes": (None, 256)},
    ),
    Limit(
        SPLASH,
        rules.TpuBlocks,
        "block_sizes 1024 x 1152 take 2304 KiB of vector memory in bfloat16 with head_dim 64, more than 2048 KiB "
        "(use smaller ones, or None to choose)",
        {"block_sizes": (1024, 1152), "T": 4096},
        {"block_sizes": (1024, 1024), "T": 4096},
    ),
    Limit(
        TPU,
        rules.TpuBlocks,
        "block_sizes 512 x 640 take 1280 KiB of vector memory in float32 with head_dim 64, more than 1024 KiB "
        "(use smaller ones, or None to choose)",
        {"block_sizes": (512, 640), "T": 4096},
        {"block_sizes": (512, 512), "T": 4096},
    ),
    Limit(
        TPU,
        rules.MaskInKernel,
        "dense[1, 1, 256, 256] without a bias: the kernel would need it as an array [B, H, T, S]",
        {"mask": struct(256, 256, dtype="bool")},
        {"mask": struct(256, 256, dtype="bool"), "bias": struct(1, 1, 256, 256, dtype="bfloat16")},
    ),
    Limit(
        TPU,
        rules.MaskInKernel,
        "causal[offset 1] and segments without a bias: the kernel would need it as an array [B, H, T, S]",
        {"causal": True, "query_offset": 1, **IDS, "mask": masks.Segments(jnp.zeros((1, 256), jnp.int32))},
        {"causal": True, "query_offset": 0, **IDS, "kv_lengths": struct(1)},
    ),
    Limit(
        TPU,
        rules.MaskInKernel,
        "window(3, 0) without a bias: the kernel would need it as an array [B, H, T, S]",
        {"sliding_window": (3, 0), "S": 255, "query_offset": 0},
        {"sliding_window": (3, 0)},
        repeat=True,
    ),
    Limit(
        TPU,
        rules.OnlyBeside,
        "fewer key/value heads than query heads without a bias: the kernel would need keys and values repeated for each query "
        "head",
        {"K": 2},
        {"K": 2, "bias": struct(1, 1, 256, 256, dtype="bfloat16")},
    ),
    Limit(
        TPU,
        rules.RequiresAttribute,
        REPEAT,
        {"sliding_window": (3, 0)},
        {"sliding_window": (3, 0), "bias": struct(256, 256, dtype="bfloat16")},
    ),
    *(
        Limit(
            TPU,
            rules.NotBeside,
            f"a sliding_window together with {said}, without a bias: {NO_LSE}",
            {"sliding_window": (3, 0), **more},
            {"sliding_window": (3, 0)},
            repeat=True,
        )
        for said, more in (
            ("segment ids", IDS),
            ("q_lengths or kv_lengths", {"kv_lengths": struct(1)}),
            ("attention sinks (softmax_aux) and return_logsumexp", {"softmax_aux": np.zeros(4, "f"), "return_logsumexp": True}),
            ("a value head dim other than the query head dim", {"Dv": 32}),
        )
    ),
    # ------------------------------------------------------------ cuDNN
    Limit(CUDNN, rules.ComputeCapability, "compute capability 7.5 < 8.0, the minimum", {"device": "t4"}, {"device": "a100"}),
    Limit(
        CUDNN,
        rules.ComputeCapability,
        "a GPU reports no compute capability, 8.0 is needed",
        {"device": ao.DeviceProfile("a GPU", "cuda", cudnn_version=(9, 8))},
        {"device": profile("a100", cudnn_version=(9, 8))},
    ),
    Limit(
        CUDNN,
        rules.CudnnVersion,
        "cuDNN 9.7.1 < 9.8, the minimum (upgrade nvidia-cudnn)",
        {"device": profile("a100", cudnn_version=(9, 7, 1))},
        {"device": profile("a100", cudnn_version=(9, 8, 0))},
    ),
    Limit(
        CUDNN,
        rules.CudnnVersion,
        "cuDNN 9.10.1 < 9.11, the minimum on compute capability 10.3 (upgrade nvidia-cudnn)",
        {"device": GB300},
        {"device": dataclasses.replace(GB300, cudnn_version=(9, 11))},
    ),
    Limit(
        CUDNN,
        rules.CudnnVersion,
        "no cuDNN found, 9.8 is needed (pip install 'attention-ops[cuda]')",
        {"device": profile("a100", cudnn_version=None)},
    ),
    Limit(
        CUDNN,
        rules.JaxVersion,
        "JAX 0.9.2 < 0.10, the minimum (upgrade jax)",
        {"device": profile("a100", jax_version=(0, 9, 2))},
        {"device": profile("a100", jax_version=(0, 10, 0))},
    ),
    Limit(
        CUDNN,
        rules.Dtypes,
        "dtype float32 is not one of bfloat16, float16 (set runtime_dtype=bfloat16)",
        {"dtype": "float32"},
        {"dtype": "float16"},
    ),
    Limit(
        CUDNN,
        rules.BiasDtype,
        "bias dtype float32 != runtime dtype bfloat16, to which it would be rounded (cast the bias to bfloat16)",
        {"bias": struct(256, 256, dtype="float32")},
        {"bias": struct(256, 256, dtype="bfloat16")},
    ),
    Limit(CUDNN, rules.HeadDim, "head_dim 264 > 256, the limit on compute capability 9.0", {"D": 264}, {"D": 256}),
    Limit(
        CUDNN,
        rules.HeadDim,
        "head_dim 136 > 128, the limit on compute capability 8.9",
        {"D": 136, "device": "l4"},
        {"D": 128, "device": "l4"},
    ),
    Limit(
        CUDNN,
        rules.HeadDim,
        "value head_dim 12 is not a multiple of 8 (pad to 16 with softmax_scale=64**-0.5)",
        {"Dv": 12},
        {"Dv": 16},
    ),
    Limit(
        CUDNN,
        rules.ValueHeadDim,
        f"value head_dim 32 != head_dim 64 on compute capability 8.9 < 9.0, the minimum ({PAD})",
        {"Dv": 32, "device": "l4"},
        {"Dv": 64, "device": "l4"},
    ),
    Limit(
        CUDNN,
        rules.ValueHeadDim,
        f"value head_dim 32 != head_dim 64 with cuDNN 9.9.1, 9.10 is needed (upgrade nvidia-cudnn, or {PAD})",
        {"Dv": 32, "device": profile("h100", cudnn_version=(9, 9, 1))},
        {"Dv": 32, "device": profile("h100", cudnn_version=(9, 10, 0))},
    ),
    Limit(
        CUDNN,
        rules.LeftWindowOnly,
        "window right size 1 != 0 without causal masking (pass causal=True, or a right size of 0)",
        {"sliding_window": (3, 1)},
        {"sliding_window": (3, 0)},
    ),
    Limit(
        CUDNN,
        rules.LeftWindowOnly,
        "window right size None (no end) != 0 without causal masking (pass causal=True, or a right size of 0)",
        {"sliding_window": (3, None)},
        {"sliding_window": (3, None), "causal": True},
    ),
    Limit(
        CUDNN,
        rules.EvenLengthsInTraining,
        f"query length 255, key length 256: training needs both even ({EVEN})",
        {"T": 255, "S": 256},
        {"T": 255, "S": 256, "differentiable": False},
    ),
    Limit(
        CUDNN,
        rules.EvenLengthsInTraining,
        f"query length 256, key length 255: training needs both even ({EVEN})",
        {"S": 255},
        {"S": 254},
    ),
)
ROWS = [pytest.param(name, limit, id=f"{name}: {limit.sentence[:60]}") for limit in LIMITS for name in limit.routes]


def _ask(route: str, changes: Mapping[str, Any]) -> tuple[Any, Any, OperationMetadata]:
    """Return the spec, the device and the metadata of a request."""
    given = {**SIZES, "device": DEVICES[route.partition("/")[2]], **changes}
    sizes = {name: given.pop(name) for name in SIZES}
    device = given.pop("device")
    device = profile(device) if isinstance(device, str) else device
    settings = {name: given.pop(name) for name in ("block_sizes", "softmax_dtype", "runtime_dtype") if name in given}
    B, T, H, K, D = (sizes[name] for name in ("B", "T", "H", "K", "D"))
    S, Dv = T if sizes["S"] is None else sizes["S"], sizes["Dv"] or D
    shapes = (struct(*shape, dtype=sizes["dtype"]) for shape in ((B, T, H, D), (B, S, K, D), (B, S, K, Dv)))
    metadata = OperationMetadata(**settings)
    return make_request(*shapes, given, metadata).spec, device, metadata


def _refusing(route: str, asked: tuple[Any, Any, OperationMetadata]) -> list[rules.Rule]:
    spec, device, metadata = asked
    return [rule for rule in ROUTES[route].declaration.rules if rule.check(spec, metadata, device) is not None]


@pytest.mark.parametrize(("route", "limit"), ROWS)
def test_a_limit_refuses_alone_and_takes_what_is_just_inside(route, limit, monkeypatch):
    if limit.repeat:
        monkeypatch.setattr(pltpu, "repeat", None, raising=False)
    with jax.enable_x64(True):
        outside, inside = _ask(route, limit.outside), _ask(route, limit.inside)
        refusing = [rule for rule in _refusing(route, outside) if type(rule) not in limit.beside]
        assert [type(rule) for rule in refusing] == [limit.rule]
        spec, device, metadata = outside
        said = [str(reason) for reason in ROUTES[route].refusals(spec, metadata, device)]
        assert limit.sentence in said
        assert len(said) == 1 + len(limit.beside)
        assert refusing[0].describe()
        spec, device, metadata = inside
        assert ROUTES[route].refusals(spec, metadata, device) == ()


PRIVATE = [
    pytest.param(name, rule, id=f"{name}: {rule.function.rpartition('.')[2]}")
    for name, route in ROUTES.items()
    for rule in route.declaration.rules
    if isinstance(rule, rules.PrivateFunction)
]


@pytest.mark.parametrize(("route", "rule"), PRIVATE)
def test_a_private_function_that_is_gone_refuses_alone(route, rule, monkeypatch):
    asked = _ask(route, {})
    assert _refusing(route, asked) == []
    module, _, name = rule.function.rpartition(".")
    monkeypatch.delattr(module + "." + name)
    rules._changed.cache_clear()
    try:
        (reason,) = ROUTES[route].refusals(asked[0], asked[2], asked[1])
    finally:
        rules._changed.cache_clear()
    assert str(reason) == (
        f"jax {jax.__version__} has no {rule.function} as it was (AttributeError: module {module!r} has no attribute {name!r}) "
        "(install a version of jax that attention_ops allows)"
    )


def _function(query: Any, key: Any, scale: float = 1.0) -> None:
    """Stands for one of another package."""


HERE = f"{__name__}._function"
ALONE = [
    (rules.MinQueryLength(2), {"T": 1}, {"T": 2}, "query length 1 < 2, the minimum"),
    (
        rules.LengthMultiple(16),
        {"T": 32, "S": 40},
        {"T": 32, "S": 48},
        "key length 40 is not a multiple of 16 (pad to 48 and pass q_lengths and kv_lengths)",
    ),
    (
        rules.LengthMultiple(16),
        {"T": 31, "S": 48},
        {"T": 32, "S": 48},
        "query length 31 is not a multiple of 16 (pad to 32 and pass q_lengths and kv_lengths)",
    ),
    (rules.HeadDim(minimum=16), {"D": 15}, {"D": 16}, "head_dim 15 < 16, the minimum"),
    (
        rules.ValueHeadDim((9, 0), (9, 10)),
        {"Dv": 32, "device": profile("h100", cudnn_version=None)},
        {"Dv": 32, "device": "h100"},
        f"value head_dim 32 != head_dim 64 with cuDNN not found, 9.10 is needed (upgrade nvidia-cudnn, or {PAD})",
    ),
    (rules.Requires("no_such_package", "it"), {}, None, "the package no_such_package is not installed (pip install it)"),
    (
        rules.RequiresAttribute("no_such_package", "x", "a kernel", ao.Feature.CAUSAL, ao.Feature.BIAS),
        {"causal": True},
        {},
        "no_such_package cannot be imported (No module named 'no_such_package'), which a kernel calls, the one for causal "
        "masking without a bias",
    ),
    (
        rules.PrivateFunction(HERE, ("query", "key", "mask")),
        {},
        None,
        f"test_rules (version unknown): {HERE} has no parameter 'mask', which this route passes "
        "(install a version of jax that attention_ops allows)",
    ),
    (
        rules.PrivateFunction(HERE, ("query",)),
        {},
        None,
        f"test_rules (version unknown): {HERE} needs a parameter 'key', which this route does not know "
        "(install a version of jax that attention_ops allows)",
    ),
    (
        rules.PrivateFunction(HERE, ("query", "key"), (f"{__name__}.no_name",)),
        {},
        None,
        f"test_rules (version unknown) has no {HERE} as it was (AttributeError: module 'test_rules' has no attribute 'no_name') "
        "(install a version of jax that attention_ops allows)",
    ),
]


@pytest.mark.parametrize(("rule", "outside", "inside", "sentence"), ALONE, ids=[row[3][:50] for row in ALONE])
def test_a_rule_for_operations_of_others(rule, outside, inside, sentence):
    spec, device, metadata = _ask("cudnn_flash/cuda", outside)
    assert sentence in str(rule.check(spec, metadata, device))
    assert rule.describe()
    if inside is not None:
        spec, device, metadata = _ask("cudnn_flash/cuda", inside)
        assert rule.check(spec, metadata, device) is None


@pytest.mark.parametrize(
    "rule", [rules.Requires("jax", "jax"), rules.PrivateFunction(HERE, ("query", "key"), (f"{__name__}._ask",))], ids=repr
)
def test_what_is_installed_as_it_is_called_is_taken(rule):
    spec, device, metadata = _ask("cudnn_flash/cuda", {})
    assert rule.check(spec, metadata, device) is None


def test_every_rule_of_every_route_has_its_limit():
    used = {(name, type(rule)) for name, route in ROUTES.items() for rule in route.declaration.rules}
    tested = {(name, limit.rule) for limit in LIMITS for name in limit.routes}
    assert tested | {(row.values[0], rules.PrivateFunction) for row in PRIVATE} == used


def test_every_class_of_rules_has_its_limit():
    classes = {item for item in vars(rules).values() if inspect.isclass(item) and issubclass(item, rules.Rule)} - {rules.Rule}
    assert classes == {limit.rule for limit in LIMITS} | {type(row[0]) for row in ALONE}


@functools.cache
def _sentences() -> tuple[str, ...]:
    return (*(limit.sentence for limit in LIMITS), *(row[3] for row in ALONE))


def test_every_sentence_of_a_rule_is_asserted():
    """Of each reason, the constant pieces of its text stand, in order, in a sentence of the tables above."""
    for call in ast.walk(ast.parse(inspect.getsource(rules))):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Reason":
            text = call.args[0]
            if isinstance(text, ast.JoinedStr):
                pieces = [piece.value for piece in text.values if isinstance(piece, ast.Constant)]
                assert any(_holds(sentence, pieces) for sentence in _sentences()), f"line {call.lineno}: {pieces}"


def _holds(sentence: str, pieces: list[Any]) -> bool:
    at = 0
    for piece in pieces:
        at = sentence.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True
