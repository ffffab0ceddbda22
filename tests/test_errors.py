"""Every error message of the package, as a whole: it names the argument, what was found, what is allowed, and the fix.

A message of the table below is raised and compared. One may be asserted in another test instead; the last test here finds every
place that raises, and whether somebody asserts what it says.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import importlib.util
import pathlib
import re
import subprocess
import traceback
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import click
import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest

import attention_ops as ao
from attention_ops import api, masks, storage, tuning, verdicts
from attention_ops.bench import jax_systems, memory
from attention_ops.bench import peers as bench_peers
from attention_ops.bench import runner as bench_runner
from attention_ops.bench import systems as bench_systems
from attention_ops.bench import tune as bench_tune
from attention_ops.bench.cases import CASES
from attention_ops.bench.problems import Problem
from attention_ops.bench.systems import Unavailable, find_system
from attention_ops.cli import main
from attention_ops.cli.configs import write as write_config
from attention_ops.cli.lazy import Refused
from attention_ops.config import AttentionConfig
from attention_ops.integrations import binding, easydel
from attention_ops.integrations import keras as keras_layers
from attention_ops.integrations.jax_nn import dot_product_attention
from attention_ops.kernels.cudnn import split
from attention_ops.kernels.jax_nn import native_options
from attention_ops.kernels.pallas_gpu_tiles import Geometry, Tiles
from attention_ops.metadata import OperationMetadata
from attention_ops.selftest import reference
from attention_ops.selftest.__main__ import main as selftest_command
from attention_ops.selftest.cases import UnknownCaseError
from attention_ops.selftest.cases import parse as parse_case
from attention_ops.selftest.ingredients import INGREDIENTS

QKV = tuple(jnp.ones((2, 4, heads, 8)) for heads in (4, 2, 2))
SHAPE = ("--shape", "1,8,4,8")
FACTS = {"name": "m", "num_layers": 6, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "max_length": 64, "causal": True}
YAML = "".join(f"{key}: {str(value).lower()}\n" for key, value in FACTS.items())
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "max_position_embeddings": 64,
}
MLA = {"model_type": "deepseek_v3", "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
VERDICT = {"machine": "", "versions": "", "route": "", "passed": True, "proof": "", "seed": 0, "reason": "", "date": ""}


class Stage:
    """What a row of the table may use: files, the registry, and a way to take packages away. Undone afterwards."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, registry: Any):
        self._monkeypatch, self.folder, self.registry = monkeypatch, folder, registry
        folder.mkdir(exist_ok=True)
        monkeypatch.setenv(storage.ENVIRONMENT, str(folder))
        monkeypatch.delenv(api.ENVIRONMENT, raising=False)
        api._reported.clear()

    def environment(self, value: str) -> None:
        self._monkeypatch.setenv(api.ENVIRONMENT, value)

    def file(self, content: str | bytes, name: str = "x.yaml") -> pathlib.Path:
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def patch(self, target: Any, name: str, value: Any) -> None:
        self._monkeypatch.setattr(target, name, value)

    def without(self, package: str) -> None:
        """Take a package away from those who ask whether it is there."""
        find = importlib.util.find_spec
        self.patch(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))

    def missing(self, package: str, error: Exception) -> None:
        """Let a command's import fail."""
        self.patch(main.commands["bench"], "target", "attention_ops.bench.cli:main")
        real = importlib.import_module

        def fake(name: str, *rest: Any) -> ModuleType:
            if name == package:
                raise error
            return real(name, *rest)

        self.patch(importlib, "import_module", fake)


def call(query: Any = QKV[0], key: Any = QKV[1], value: Any = QKV[2], metadata: OperationMetadata | None = None, **options: Any):
    return ao.attention(query, key, value, impl="vanilla", metadata=metadata, **options)


def in_the_environment(s: Stage, names: str) -> None:
    s.environment(names)
    ao.attention(*QKV)


class Plain(ao.OperationImpl):
    def forward_native(self, request: ao.AttentionRequest) -> Any:
        return request.query


def returning(s: Stage, result: Callable[[Any], Any], **options: Any) -> None:
    """Call an operation that returns something wrong."""

    class Wrong(ao.OperationImpl):
        name = "wrong"

        @ao.forward(supports=ao.Feature.ALL)
        def forward_native(self, request: ao.AttentionRequest) -> Any:
            return result(request)

    s.registry.register(override=True)(Wrong)
    ao.attention(*QKV, impl="wrong", **options)


def falling_back(s: Stage) -> None:
    s.registry.register(type("NoLuck", (Plain,), {"name": "no_luck", "fallback": ("vanila",)}))
    ao.plan("no_luck", *QKV)


def narrow_softmax() -> None:
    with jax.enable_x64(True):
        ao.attention(*(x.astype("float64") for x in QKV), metadata=OperationMetadata(softmax_dtype="float32"))


def config(**changes: Any) -> AttentionConfig:
    return AttentionConfig.from_dict(FACTS | changes)


def hf(**changes: Any) -> AttentionConfig:
    return AttentionConfig.from_hf({name: x for name, x in (LLAMA | changes).items() if x is not None}, name="m")


def load(s: Stage, content: str | bytes) -> AttentionConfig:
    return ao.load_config(s.file(content))


def load_hf(s: Stage, content: str | bytes) -> AttentionConfig:
    return AttentionConfig.from_hf(s.file(content, "config.json"))


def kept(s: Stage, content: str) -> Any:
    s.file(content, "kept.json")
    return storage.entries("kept", storage.load("kept"), tuning.Tuned, "attention-ops tune")


def tuned(**changes: Any) -> tuning.Tuned:
    facts = {
        "machine": "",
        "versions": "",
        "route": "",
        "request": "",
        "work": "forward",
        "q": 1,
        "kv": 1,
        "ratio": 0.5,
        "date": "",
    }
    return tuning.Tuned(**(facts | changes))


def tile_of(mask: Any) -> Any:
    geometry = Geometry(1, 8, 8, 1, 1, 8, 8, 1.0, None, has_bias=False, blind_rows=False, hidden_keys=False, by_data=False)
    return Tiles(geometry, 4, 4, None, None, 0, 0)._visible(mask, 0, 0)


def cli(*args: str) -> None:
    main(list(args), prog_name="attention-ops", standalone_mode=False)


FORMS = (
    ". Allowed: causal, window(left, right), prefix(n), chunked(size), lengths(q, kv), segments(n, n, ...), joined by & | ~ and "
    "parentheses; none is no limit"
)


def child(s: Stage, error: Exception | None = None, returncode: int = 0) -> None:
    """Measure memory in a process that ends so."""

    def run(*args: Any, **options: Any) -> Any:
        if error is not None:
            raise error
        return SimpleNamespace(returncode=returncode, stdout="", stderr="")

    s.patch(subprocess, "run", run)
    memory._child(CASES[0], find_system("vanilla", "vanilla"), "vanilla")


def failing() -> None:
    raise RuntimeError("broken")


def job() -> bench_tune.Job:
    """A request to tune on a TPU."""
    x = jax.ShapeDtypeStruct((1, 4096, 2, 64), "bfloat16")
    return bench_tune.Job(ao.plan("blocksparse", x, x, x, device="tpu-v5e"), (x, x, x), {}, OperationMetadata(), "forward")


def selftest(*args: str) -> None:
    """Run the selftest's command and raise the error behind its exit status."""
    with pytest.raises(SystemExit) as caught:
        selftest_command(list(args), standalone_mode=False)
    assert caught.value.code == 2
    assert caught.value.__context__ is not None
    raise caught.value.__context__


@dataclasses.dataclass(frozen=True)
class Row:
    """What raises, with what, and the whole message. `{folder}` stands for that of the files."""

    call: Callable[[Stage], Any]
    error: type[BaseException]
    message: str


ROWS = [
    # ------------------------------------------------------------ the front door
    Row(
        lambda s: ao.attention(*QKV, impl=[]),
        TypeError,
        "impl is []; allowed is an operation name or a non-empty sequence of names",
    ),
    Row(
        lambda s: in_the_environment(s, "flsh"),
        ao.UnknownOperationError,
        "ATTENTION_OPS_IMPL=flsh: no operation is named 'flsh'; known are flash, splash, cudnn_flash, "
        "flash_attn2, cuda_flash_attn2, ulysses, blockwise, xla, blocksparse, sdpa, vanilla, "
        "autoregressive_decodeattn, auto, cudnn, ring",
    ),
    Row(
        lambda s: returning(s, lambda r: (r.query, None)),
        TypeError,
        "wrong/native returned tuple; allowed are an AttentionOutput and the output array",
    ),
    Row(
        lambda s: returning(s, lambda r: r.query[:, :1]),
        TypeError,
        "wrong/native returned attention_outputs of (2, 1, 4, 8) float32, expected (2, 4, 4, 8) float32",
    ),
    Row(
        lambda s: returning(s, lambda r: r.query, return_logsumexp=True),
        TypeError,
        "wrong/native returned no logsumexp, which it declares",
    ),
    Row(
        lambda s: ao.attention(*QKV, impl="cudnn_flash"),
        ao.FallbackWarning,
        "cudnn_flash cannot take this request on cpu, flash/native runs instead:\n"
        "  cudnn_flash: has no route for cpu, only for cuda",
    ),
    Row(
        lambda s: ao.attention(*QKV, impl="cudnn_flash", metadata=OperationMetadata(fallback="error")),
        ao.NoRouteError,
        "cudnn_flash cannot take this request on cpu, flash/native could run, but the fallback policy is 'error':\n"
        "  cudnn_flash: has no route for cpu, only for cuda",
    ),
    Row(
        lambda s: ao.plan(["cudnn_flash"], *QKV, device="cpu"),
        ao.NoRouteError,
        "no route of cudnn_flash takes this request on cpu:\n  cudnn_flash: has no route for cpu, only for cuda",
    ),
    Row(
        lambda s: ao.plan("flash/rocm", *QKV),
        ao.UnknownOperationError,
        "no route is named 'flash/rocm'; flash has flash/gpu, flash/native, flash/tpu (of cuda, gpu, native, rocm, tpu, cpu)",
    ),
    Row(
        lambda s: ao.no_such,
        AttributeError,
        "module 'attention_ops' has no attribute 'no_such'",
    ),
    # ------------------------------------------------------------ the request
    Row(
        lambda s: call(is_causal=True),
        TypeError,
        "unknown attention option 'is_causal'. Did you mean 'causal'? Options: bias, causal, deterministic, "
        "differentiable, dropout_prob, dropout_rng, kv_lengths, kv_segment_ids, logits_soft_cap, mask, mask_info, "
        "q_lengths, q_segment_ids, query_offset, return_logsumexp, return_weights, sliding_window, softmax_aux, "
        "softmax_scale",
    ),
    Row(
        lambda s: call(causal=1),
        TypeError,
        "causal must be True or False, found int; it decides what is compiled",
    ),
    Row(
        lambda s: call(query=None),
        TypeError,
        "query must be an array, found NoneType, of which numpy makes no numbers that JAX has; the layout is query [B, T, H, D], "
        "key [B, S, K, D], value [B, S, K, Dv]",
    ),
    Row(
        lambda s: call(query=QKV[0][0]),
        ValueError,
        "query has 3 dimensions, allowed are 4; found query (4, 4, 8), key (2, 4, 2, 8), value (2, 4, 2, 8); the "
        "layout is query [B, T, H, D], key [B, S, K, D], value [B, S, K, Dv]",
    ),
    Row(
        lambda s: call(query=jnp.ones((2, 4, 3, 8))),
        ValueError,
        "query heads 3 are not a multiple of key/value heads 2: found query (2, 4, 3, 8), key (2, 4, 2, 8), value "
        "(2, 4, 2, 8); the layout is query [B, T, H, D], key [B, S, K, D], value [B, S, K, Dv], and K divides H; "
        "for arrays in [batch, heads, length, dim] pass x.swapaxes(1, 2)",
    ),
    Row(
        lambda s: call(query=jnp.ones((2, 4, 4, 9))),
        ValueError,
        "query head dim 9 and key head dim 8 differ: found query (2, 4, 4, 9), key (2, 4, 2, 8), value (2, 4, 2, "
        "8); the layout is query [B, T, H, D], key [B, S, K, D], value [B, S, K, Dv], and K divides H; for arrays "
        "in [batch, heads, length, dim] pass x.swapaxes(1, 2)",
    ),
    Row(
        lambda s: call(value=QKV[2].astype("bfloat16")),
        TypeError,
        "the dtypes differ: query float32, key float32, value bfloat16; cast them to one, or set runtime_dtype in "
        "the OperationMetadata",
    ),
    Row(
        lambda s: call(*(x.astype("int32") for x in QKV)),
        TypeError,
        "query, key and value have dtype int32; allowed are float16, bfloat16, float32, float64; for another "
        "floating dtype set runtime_dtype in the OperationMetadata",
    ),
    Row(
        lambda s: call(query=QKV[0].astype("int32"), metadata=OperationMetadata(runtime_dtype="bfloat16")),
        TypeError,
        "query has dtype int32; allowed are floating dtypes, which runtime_dtype then casts",
    ),
    Row(
        lambda s: narrow_softmax(),
        ValueError,
        "softmax_dtype float32 is narrower than the runtime dtype float64; leave it None or use float64",
    ),
    Row(
        lambda s: call(logits_soft_cap=0),
        ValueError,
        "logits_soft_cap is 0.0; allowed is a number from 1e-30 to 1e+30, or None for no cap",
    ),
    Row(
        lambda s: call(softmax_scale=float("inf")),
        ValueError,
        "softmax_scale is inf; allowed is a number from -1e+30 to 1e+30, or None for D ** -0.5 = 0.353553",
    ),
    Row(
        lambda s: call(softmax_scale="big"),
        TypeError,
        "softmax_scale must be a number that a float can hold, found 'big' (str)",
    ),
    Row(
        lambda s: call(logits_soft_cap=10**400),
        TypeError,
        "logits_soft_cap must be a number that a float can hold, found "
        "100000000000000000000000000000000000000000000000000000000000 (int)",
    ),
    Row(
        lambda s: jax.jit(lambda x: call(softmax_scale=x))(0.5),
        TypeError,
        "softmax_scale is traced, but must be a number known while compiling; multiply the query by it instead",
    ),
    Row(
        lambda s: jax.jit(lambda x: call(logits_soft_cap=x))(0.5),
        TypeError,
        "logits_soft_cap is traced, but must be a number known while compiling; name it in static_argnames of jax.jit",
    ),
    Row(
        lambda s: call(sliding_window=(1, 2, 3)),
        ValueError,
        "sliding_window has 3 numbers; allowed is (left, right) or one int for both",
    ),
    Row(
        lambda s: call(sliding_window=1.5),
        TypeError,
        "sliding_window left must be an integer or None (unlimited), found float",
    ),
    Row(
        lambda s: call(sliding_window=(0, -1)),
        ValueError,
        "sliding_window right is -1; allowed is 0 or more, or None for unlimited",
    ),
    Row(
        lambda s: call(causal=True, query_offset=1.5),
        TypeError,
        "query_offset must be an integer or an integer array, found float; cast an array with .astype('int32')",
    ),
    Row(
        lambda s: call(causal=True, query_offset=jnp.zeros(3, int)),
        ValueError,
        "query_offset has shape (3,); allowed are () and [2] (one per batch row)",
    ),
    Row(
        lambda s: call(causal=True, key=jnp.ones((2, 6, 2, 8)), value=jnp.ones((2, 6, 2, 8))),
        ValueError,
        "query length 4 and key length 6 differ, so a causal or windowed call must state query_offset, the "
        "position of query row 0: 0 aligns top-left (jax.nn, PyTorch), 2 bottom-right (FlashAttention)",
    ),
    Row(
        lambda s: call(q_segment_ids=np.ones((2, 4))),
        TypeError,
        "q_segment_ids must be integers, found float64; cast with .astype('int32')",
    ),
    Row(
        lambda s: call(q_segment_ids=np.ones((2, 2, 4), int)),
        ValueError,
        "q_segment_ids has shape (2, 2, 4); allowed is [B, length]",
    ),
    Row(
        lambda s: call(kv_segment_ids=np.ones((2, 4), int)),
        ValueError,
        "kv_segment_ids is given without q_segment_ids: query length 4, key length 4; pass both (for padding keys "
        "alone use kv_lengths)",
    ),
    Row(
        lambda s: call(kv_lengths=np.ones((2, 1), int)),
        ValueError,
        "kv_lengths has shape (2, 1); allowed is [B]",
    ),
    Row(
        lambda s: call(mask_info=3),
        TypeError,
        "mask_info must be an ejkernel.types.MaskInfo, found int; pass arrays as mask=",
    ),
    Row(
        lambda s: call(mask_info=SimpleNamespace(_attention_mask=None, _q_segment_ids=None, _kv_segment_ids=None)),
        ValueError,
        "mask_info holds neither an attention mask nor segment ids; build it with one of them",
    ),
    Row(
        lambda s: call(bias=np.ones((4, 4), bool)),
        TypeError,
        "bias must be floating, found bool; a boolean mask goes into mask=",
    ),
    Row(
        lambda s: call(bias=np.ones((4, 4, 4), "f")),
        ValueError,
        "bias has shape (4, 4, 4): three dimensions are ambiguous, use bias[:, None] or bias[None]; allowed are "
        "[T, S] and [B, H, T, S]",
    ),
    Row(
        lambda s: call(bias=np.ones((1, 1, 4, 5), "f")),
        ValueError,
        "bias has shape (1, 1, 4, 5), which does not broadcast to [B, H, T, S] = (2, 4, 4, 4): its key length is "
        "5, allowed are 1 and 4",
    ),
    Row(
        lambda s: call(softmax_aux=np.ones(4, int)),
        TypeError,
        "softmax_aux must be floating, found int64; cast with .astype('float32')",
    ),
    Row(
        lambda s: call(softmax_aux=np.ones(3, "f")),
        ValueError,
        "softmax_aux has shape (3,); allowed are [H] = [4], [H, n] = [4, n] and [1, n]",
    ),
    Row(
        lambda s: call(dropout_prob=1),
        ValueError,
        "dropout_prob is 1.0; allowed is 0 <= p < 1",
    ),
    Row(
        lambda s: call(dropout_prob=0.1, deterministic=False),
        ValueError,
        "dropout_prob is 0.1 with deterministic=False, so dropout_rng must be a jax.random key",
    ),
    Row(
        lambda s: call(dropout_prob=0.1, deterministic=False, dropout_rng=0),
        TypeError,
        "dropout_rng must be one jax.random key, found int; make it with jax.random.key(seed)",
    ),
    Row(
        lambda s: call(dropout_prob=0.1, deterministic=False, dropout_rng=jnp.ones(2)),
        TypeError,
        "dropout_rng must be one jax.random key, found float32[2]; make it with jax.random.key(seed)",
    ),
    # ------------------------------------------------------------ masks
    Row(
        lambda s: bool(masks.Causal()),
        TypeError,
        "a Mask has no truth value: combine masks with & | ~, not with `and`, `or`, `not`",
    ),
    Row(
        lambda s: masks.Causal() & np.ones((4, 4), bool),
        TypeError,
        "masks combine with masks, found ndarray; wrap an array in masks.Dense(array)",
    ),
    Row(
        lambda s: masks.Causal().dense(4, 4),
        ValueError,
        "causal has no query_offset yet: call resolve(offset) first",
    ),
    Row(
        lambda s: masks.Chunked(0),
        ValueError,
        "chunk size is 0; allowed is an integer of 1 or more",
    ),
    Row(
        lambda s: masks.Segments(jnp.ones((1, 4))),
        TypeError,
        "q_segment_ids must be integers, found float32; cast with q_segment_ids.astype('int32')",
    ),
    Row(
        lambda s: masks.Segments(jnp.ones(4, int)),
        ValueError,
        "q_segment_ids has shape (4,); allowed is [batch, length]",
    ),
    Row(
        lambda s: call(q_segment_ids=np.ones((2, 5), int)),
        ValueError,
        "q_segment_ids has shape (2, 5); allowed is [2, 4] or [1, 4]",
    ),
    Row(
        lambda s: masks.Lengths(kv=jnp.ones(2)),
        TypeError,
        "kv_lengths must be integers, found float32; cast with kv_lengths.astype('int32')",
    ),
    Row(
        lambda s: call(mask=np.ones((2, 1, 4, 5), bool)),
        ValueError,
        "mask has shape (2, 1, 4, 5), which does not broadcast to [B, H, T, S] = (2, 4, 4, 4): its key length is "
        "5, allowed are 1 and 4",
    ),
    Row(
        lambda s: call(mask=np.ones((4, 4), int)),
        TypeError,
        "mask must be boolean (True = may attend), found int64; pass mask.astype(bool) for a 0/1 mask, or bias= "
        "for values to add to the logits",
    ),
    Row(
        lambda s: call(mask=np.ones((4, 4, 4), bool)),
        ValueError,
        "mask has shape (4, 4, 4): three dimensions are ambiguous. Pass mask[:, None] for one mask per batch row "
        "or mask[None] for one per head; allowed are [T, S] and [B, H, T, S]",
    ),
    Row(
        lambda s: call(mask=np.ones(4, bool)),
        ValueError,
        "mask has shape (4,); allowed are [T, S] and [B, H, T, S]",
    ),
    Row(
        lambda s: masks.Causal().show(0),
        ValueError,
        "T is 0, S 0, block (128, 128); allowed are 1 or more",
    ),
    Row(
        lambda s: masks.Causal().show(10**6),
        ValueError,
        "7813 x 7813 tiles are more than 4194304, the limit; choose a larger block than 128, 128",
    ),
    Row(
        lambda s: masks.Causal().show(4).save("mask.txt"),
        ValueError,
        "'mask.txt' is no picture file; allowed are .pdf, .png, .svg",
    ),
    Row(
        lambda s: masks.Causal(jnp.zeros(2, int)).show(4, batch=2).tiles,
        ValueError,
        "batch is 2; the mask has 2, so allowed are 0 to 1",
    ),
    # ------------------------------------------------------------ metadata and devices
    Row(
        lambda s: ao.BlockSizes(q=0),
        ValueError,
        "block_sizes.q is 0; allowed is an integer of 1 or more, or None to choose",
    ),
    Row(
        lambda s: call(bias=jax.ShapeDtypeStruct((1, 1, 4, 4), jnp.float32)),
        TypeError,
        "bias is a jax.ShapeDtypeStruct, which has no values; give arrays, or plan the call with attention_ops.plan, or trace "
        "it with jax.eval_shape",
    ),
    Row(
        lambda s: ao.plan("auto", *QKV, device=3),
        TypeError,
        "device is 3; allowed are a name as 'a100', a DeviceProfile, a device of JAX, and None",
    ),
    Row(
        lambda s: call(metadata={"runtime_dtype": "float32"}),
        TypeError,
        "metadata must be an OperationMetadata, found dict; OperationMetadata.from_config reads a mapping",
    ),
    Row(
        lambda s: OperationMetadata(block_sizes=128),
        TypeError,
        "block_sizes is 128; allowed are BlockSizes(q, kv), a pair, or a mapping with q and kv",
    ),
    Row(
        lambda s: OperationMetadata(block_sizes={"k": 1}),
        TypeError,
        "block_sizes has no field 'k'; allowed are q and kv",
    ),
    Row(
        lambda s: OperationMetadata(backend="cudda"),
        ValueError,
        "backend is 'cudda'; allowed are None, cuda, gpu, native, rocm, tpu, cpu",
    ),
    Row(
        lambda s: OperationMetadata(fallback="never"),
        ValueError,
        "fallback is 'never'; allowed are warn, silent, error",
    ),
    Row(
        lambda s: OperationMetadata(runtime_dtype="flot32"),
        TypeError,
        "runtime_dtype is 'flot32', which is no dtype; allowed are float16, bfloat16, float32, float64",
    ),
    Row(
        lambda s: OperationMetadata(runtime_dtype="int32"),
        TypeError,
        "runtime_dtype is int32; allowed are float16, bfloat16, float32, float64",
    ),
    Row(
        lambda s: OperationMetadata(runtime_dtype="float64"),
        TypeError,
        "runtime_dtype is float64, which JAX would truncate to float32; set JAX_ENABLE_X64=1 first",
    ),
    Row(
        lambda s: OperationMetadata(softmax_dtype="bfloat16"),
        ValueError,
        "softmax_dtype is bfloat16; allowed are float32 and float64: softmax sums need at least float32",
    ),
    Row(
        lambda s: OperationMetadata(operation_configs=3),
        TypeError,
        "operation_configs must be a mapping from names to settings, found int",
    ),
    Row(
        lambda s: OperationMetadata(operation_configs={"flash": {}}),
        TypeError,
        "operation_configs is {'flash': {}}; allowed are values that can be hashed, as a frozen dataclass: "
        "unhashable type: 'dict'",
    ),
    Row(
        lambda s: OperationMetadata.from_config({"backed": "cpu"}),
        TypeError,
        "metadata has no field 'backed'. Did you mean 'backend'? Fields: backend, block_sizes, fallback, mesh, "
        "on_indivisible, operation_configs, partition_axis, runtime_dtype, softmax_dtype",
    ),
    Row(
        lambda s: ao.DeviceProfile("x", "npu"),
        ValueError,
        "platform is 'npu'; allowed are cpu, cuda, rocm, tpu",
    ),
    Row(
        lambda s: ao.DeviceProfile.named("a1000"),
        ValueError,
        "device 'a1000' is not known; known are a100, h100, v100, b200, h200, mi300x, rtx4090, cpu, l4, t4, "
        "tpu-v4, tpu-v5e, tpu-v5p, tpu-v6e",
    ),
    Row(
        lambda s: ao.DeviceProfile.current("tpu"),
        RuntimeError,
        "there is no tpu device here (Unknown backend tpu. Available backends are ['cpu']); to plan for one name "
        "it, as in device='a100', and to compile for one use attention_ops.compiling_for",
    ),
    # ------------------------------------------------------------ the registry, and what is registered
    Row(
        lambda s: ao.OperationRegistry.get("flsh"),
        ao.UnknownOperationError,
        "no operation is named 'flsh'; known are flash, splash, cudnn_flash, flash_attn2, cuda_flash_attn2, "
        "ulysses, blockwise, xla, blocksparse, sdpa, vanilla, autoregressive_decodeattn, auto, cudnn, ring",
    ),
    Row(
        lambda s: ao.OperationRegistry.get(3),
        ao.UnknownOperationError,
        "an operation is chosen by its name, found int",
    ),
    Row(
        lambda s: s.registry.register(dict),
        TypeError,
        "an operation must be a subclass of OperationImpl, found <class 'dict'>",
    ),
    Row(
        lambda s: s.registry.register(name="a/b")(Plain),
        ValueError,
        "Plain has the name 'a/b'; set `name` to a letter followed by letters, digits, '_', '-' or '.'",
    ),
    Row(
        lambda s: s.registry.register(type("Empty", (ao.OperationImpl,), {"name": "empty"})),
        TypeError,
        "Empty defines no forward; define at least forward_native(self, request)",
    ),
    Row(
        lambda s: s.registry.register(type("Letters", (Plain,), {"name": "letters", "aliases": "abc"})),
        TypeError,
        "Letters.aliases is 'abc'; allowed is a tuple of names, as in ('vanilla',)",
    ),
    Row(
        lambda s: falling_back(s),
        ao.UnknownOperationError,
        "no_luck falls back on 'vanila': no operation is named 'vanila'; known are vanilla, xla, flash, cudnn_flash, splash, "
        "no_luck, cuda_flash_attn2, flash_attn2, auto, ring, sdpa, autoregressive_decodeattn, cudnn, ulysses, blockwise, "
        "blocksparse",
    ),
    Row(
        lambda s: s.registry.register(name="flash")(Plain),
        ao.DuplicateOperationError,
        "the name 'flash' is taken by attention_ops.operations.flash.Flash; choose another, or "
        "register(override=True) to replace it",
    ),
    Row(
        lambda s: type("Typo", (ao.OperationImpl,), {"forward_gppu": None}),
        TypeError,
        "Typo.forward_gppu is no forward that any device would run; allowed are forward_cuda, forward_gpu, "
        "forward_native, forward_rocm, forward_tpu, forward_cpu",
    ),
    Row(
        lambda s: ao.OperationRegistry.create("flash", {}),
        TypeError,
        "metadata must be an OperationMetadata, found dict; OperationMetadata.from_config reads a mapping",
    ),
    Row(
        lambda s: ao.forward(supports={"causal"}),
        TypeError,
        "supports holds 'causal'; allowed are members of Feature",
    ),
    Row(
        lambda s: ao.forward(rules=("short",)),
        TypeError,
        "rules holds 'short'; allowed are instances with check(spec, metadata, device) and describe()",
    ),
    Row(
        lambda s: ao.forward(because={ao.Feature.MASK: ""}, supports={ao.Feature.MASK}),
        TypeError,
        "because holds <Feature.MASK: 'an arbitrary boolean mask'>; allowed are members of Feature that are not in supports",
    ),
    # ------------------------------------------------------------ configs
    Row(
        lambda s: config(operation=[]),
        ao.ConfigError,
        "config: operation: found [] (list); allowed is an operation's name, or a list of names tried in order",
    ),
    Row(
        lambda s: config(sliding_window="wide"),
        ao.ConfigError,
        "config: sliding_window: found 'wide' (str); allowed is [left, right], the keys before and after the "
        "query (itself not counted; null: no limit), one number for both, or null. Hugging Face's sliding_window "
        "n is [n - 1, 0]",
    ),
    Row(
        lambda s: config(partition_axis={"heads": "tp"}),
        ao.ConfigError,
        "config: partition_axis: found the key 'heads'. Did you mean 'head_axis'? Allowed: batch_axis, head_axis, sequence_axis",
    ),
    Row(
        lambda s: config(partition_axis={"head_axis": [1]}),
        ao.ConfigError,
        "config: partition_axis: head_axis: found [1] (list); allowed is a mesh axis name, a list of names, or null",
    ),
    Row(
        lambda s: config(num_kv_heads=3),
        ao.ConfigError,
        "config: num_kv_heads: found 3, which does not divide num_heads 4; allowed: 1, 2, 4",
    ),
    Row(
        lambda s: config(layer_types={"a": {}, "b": {}}),
        ao.ConfigError,
        "config: pattern: layer_types has a, b, and nothing says which layer is which; add it, for example pattern: [a, b]",
    ),
    Row(
        lambda s: config(layer_types={"a": {}, "b": {}}, pattern=["a", "c"]),
        ao.ConfigError,
        "config: pattern: found the kind 'c'. Kinds in layer_types: a, b",
    ),
    Row(
        lambda s: config(layer_types={"a": {}}, pattern=["a"] * 4),
        ao.ConfigError,
        "config: pattern_tail: pattern has 4 layers and num_layers is 6: 1 rounds leave 2 over, and pattern_tail "
        "has 0; for example pattern_tail: [a, a]",
    ),
    Row(
        lambda s: config(layer_types={"a": {}, "b": {}}, pattern=["a"]),
        ao.ConfigError,
        "config: pattern_tail: no layer is of the kind 'b'; name it in pattern, or remove it from layer_types",
    ),
    Row(
        lambda s: config(layer_types={"a": {}, "b": {}}, pattern=["a", "b"]).build(),
        ao.ConfigError,
        "m: its layers differ (a: 0, 2, 4; b: 1, 3, 5); name one: build(0) or build('a')",
    ),
    Row(
        lambda s: config().layer(6),
        ao.ConfigError,
        "m: there is no layer 6. Allowed: a layer from 0 to 5, or a kind: all",
    ),
    Row(
        lambda s: config(sinks=True).build()(*QKV),
        ValueError,
        "config m has attention sinks and the call brings none; pass softmax_aux=, one learned logit per query "
        "head [4], or softmax_aux=None to run without",
    ),
    Row(
        lambda s: load(s, YAML + "operation: flsh"),
        ao.ConfigError,
        "{folder}/x.yaml:8: operation: no operation is named 'flsh'; known are flash, splash, cudnn_flash, "
        "flash_attn2, cuda_flash_attn2, ulysses, blockwise, xla, blocksparse, sdpa, vanilla, "
        "autoregressive_decodeattn, auto, cudnn, ring",
    ),
    Row(
        lambda s: load(s, ""),
        ao.ConfigError,
        "{folder}/x.yaml: is empty; a config has lines of `key: value`, for example name: my_model",
    ),
    Row(
        lambda s: load(s, "- 1"),
        ao.ConfigError,
        "{folder}/x.yaml: found [1] (list); allowed is a mapping: lines of `key: value`",
    ),
    Row(
        lambda s: load(s, "[" * 5000),
        ao.ConfigError,
        "{folder}/x.yaml: is nested too deeply; a config has four levels at most",
    ),
    Row(
        lambda s: ao.load_config(s.folder / "no.yaml"),
        ao.ConfigError,
        "{folder}/no.yaml: no such file",
    ),
    Row(
        lambda s: ao.load_config(s.folder),
        ao.ConfigError,
        "{folder}: cannot be read: Is a directory",
    ),
    Row(
        lambda s: load(s, " " * 1_000_001),
        ao.ConfigError,
        "{folder}/x.yaml: has more than 1000000 bytes, the limit; a config is a page of text",
    ),
    Row(
        lambda s: load(s, b"name: \xff"),
        ao.ConfigError,
        "{folder}/x.yaml:1: is not UTF-8 text (byte 6); a config is a text file in YAML",
    ),
    Row(
        lambda s: load(s, "name: [m"),
        ao.ConfigError,
        "{folder}/x.yaml:1: is not YAML: expected ',' or ']', but got '<stream end>'",
    ),
    Row(
        lambda s: load(s, "name: \x00"),
        ao.ConfigError,
        "{folder}/x.yaml:1: is not YAML: unacceptable character #x0000: special characters are not allowed",
    ),
    Row(
        lambda s: load(s, "name: &a [*a]"),
        ao.ConfigError,
        "{folder}/x.yaml:1: name[0]: an alias contains itself; write the value out",
    ),
    Row(
        lambda s: load(s, "name: !!python/name:os.system"),
        ao.ConfigError,
        "{folder}/x.yaml:1: name: found a value of type !!python/name:os.system; allowed are text, numbers, true, "
        "false, null, lists and mappings: remove the tag, or quote what is text",
    ),
    Row(
        lambda s: load(s, "[a, b]: 1"),
        ao.ConfigError,
        "{folder}/x.yaml:1: a key is not plain text; allowed are lines of `key: value`",
    ),
    Row(
        lambda s: load(s, "name: m\nname: n"),
        ao.ConfigError,
        "{folder}/x.yaml:2: the key 'name' is given twice; keep one",
    ),
    Row(
        lambda s: load(s, f"name: [{'1, ' * 20_001}]"),
        ao.ConfigError,
        "{folder}/x.yaml:1: name: holds more than 20000 values with its aliases written out; a config is a page of text",
    ),
    Row(
        lambda s: load(s, "num_heads: 0x" + "f" * 5000),
        ao.ConfigError,
        "{folder}/x.yaml:1: num_heads: is a number of 5002 characters, more than 100; write a smaller one, or quote what is text",
    ),
    Row(
        lambda s: load(s, "causal: !!bool maybe"),
        ao.ConfigError,
        "{folder}/x.yaml:1: causal: 'maybe' (str) is neither true nor false; remove the tag !!bool, or correct the value",
    ),
    Row(
        lambda s: load(s, r'name: "\ud800"'),
        ao.ConfigError,
        r"{folder}/x.yaml:1: name: '\ud800' (str) holds half of a pair of surrogates, which is no character; write the character "
        "itself",
    ),
    Row(
        lambda s: load(s, "on: 1"),
        ao.ConfigError,
        "{folder}/x.yaml:1: YAML reads the key 'on' as bool, not as text; quote it",
    ),
    Row(
        lambda s: load_hf(s, '{"a": 1, "a": 2}'),
        ao.ConfigError,
        "{folder}/config.json: the key 'a' is given twice; keep one",
    ),
    Row(
        lambda s: load_hf(s, " " * 10_000_001),
        ao.ConfigError,
        "{folder}/config.json: has more than 10000000 bytes, the limit; is it a config.json?",
    ),
    Row(
        lambda s: hf(num_attention_heads=0),
        ao.ConfigError,
        "config.json: num_attention_heads: found 0 (int); allowed is a whole number of 1 to 2147483647",
    ),
    Row(
        lambda s: hf(num_key_value_heads=3),
        ao.ConfigError,
        "config.json: num_key_value_heads: found 3 (int), which does not divide num_attention_heads 4; allowed: 1, 2, 4",
    ),
    Row(
        lambda s: hf(model_type="qwen2", num_key_value_heads=None),
        ao.ConfigError,
        "config.json: num_key_value_heads: is left out, and its default is 32 (int), which does not divide "
        "num_attention_heads 4; allowed: 1, 2, 4",
    ),
    Row(
        lambda s: ao.load_config(None),  # type: ignore[arg-type]
        TypeError,
        "path: found null; allowed is the path of a YAML file",
    ),
    Row(
        lambda s: config(name="\ud800").to_yaml(),
        ao.ConfigError,
        r"'\ud800' (str) holds half of a pair of surrogates, which is no character; write the character itself",
    ),
    Row(
        lambda s: hf(model_type="gemma2", query_pre_attn_scalar=0),
        ao.ConfigError,
        "config.json: query_pre_attn_scalar: found 0 (int); allowed is a number from 1e-30 to 1e30, or null",
    ),
    Row(
        lambda s: hf(model_type="gemma", use_bidirectional_attention=True),
        ao.ConfigError,
        "config.json: use_bidirectional_attention: found True (bool): attention to later positions is not read; "
        "allowed is False or null",
    ),
    Row(
        lambda s: hf(hidden_size=65),
        ao.ConfigError,
        "config.json: hidden_size: 65 is not a multiple of num_attention_heads 4; say head_dim",
    ),
    Row(
        lambda s: hf(model_type="gemma2", layer_types=["full"]),
        ao.ConfigError,
        "config.json: layer_types: found 1 entries, full; allowed are 2 entries (num_hidden_layers), each "
        "sliding_attention or full_attention",
    ),
    Row(
        lambda s: AttentionConfig.from_hf(LLAMA | {"model_type": "gemma2", "sliding_window": None}),
        ao.ConfigError,
        "config.json: sliding_window: found null, and there are layers of sliding_attention; allowed is 1 or more",
    ),
    Row(
        lambda s: hf(**MLA, rope_scaling=3),
        ao.ConfigError,
        "config.json: rope_scaling: found 3 (int); allowed is a mapping, or null",
    ),
    Row(
        lambda s: hf(model_type="rwkv"),
        ao.ConfigError,
        "config.json: model_type: found 'rwkv' (str); allowed are vit, deepseek_v3, bert, qwen2, qwen3, mistral, "
        "whisper, SD3Transformer2DModel, gemma, gemma2, gemma3_text, gpt_oss, llama, phi3",
    ),
    Row(
        lambda s: hf(attention_sinks=4),
        ao.ConfigError,
        "config.json: has keys that are not known and may change attention: attention_sinks = 4 (int); if they do "
        "not, pass ignore=['attention_sinks']",
    ),
    Row(
        lambda s: hf(color="red"),
        UserWarning,
        "config.json: keys that are not known, not read: color",
    ),
    Row(
        lambda s: AttentionConfig.from_hf(s.folder / "no.json"),
        ao.ConfigError,
        "{folder}/no.json: cannot be read: No such file or directory",
    ),
    Row(
        lambda s: load_hf(s, b"\xff"),
        ao.ConfigError,
        "{folder}/config.json: is not UTF-8 text (byte 0); a config.json is text in JSON",
    ),
    Row(
        lambda s: load_hf(s, '{"a": 1,\n}'),
        ao.ConfigError,
        "{folder}/config.json:2: is not JSON: Expecting property name enclosed in double quotes",
    ),
    Row(
        lambda s: load_hf(s, "[" * 100_000),
        ao.ConfigError,
        "{folder}/config.json: is not JSON that can be read: maximum recursion depth exceeded while decoding a "
        "JSON array from a unicode string",
    ),
    Row(
        lambda s: load_hf(s, "[]"),
        ao.ConfigError,
        "{folder}/config.json: found [] (list); allowed is a JSON object",
    ),
    # ------------------------------------------------------------ files of this machine
    Row(
        lambda s: kept(s, "{"),
        UserWarning,
        "{folder}/kept.json cannot be read and is ignored; the next save replaces it (JSONDecodeError: Expecting "
        "property name enclosed in double quotes: line 1 column 2 (char 1))",
    ),
    Row(
        lambda s: kept(s, '{"kept": [{"q": 1}]}'),
        UserWarning,
        "{folder}/kept.json: 1 entries are not in order and are ignored (Tuned.__init__() missing 8 required "
        "positional arguments: 'machine', 'versions', 'route', 'request', 'work', 'kv', 'ratio', and 'date'); "
        "`attention-ops tune` replaces them",
    ),
    Row(
        lambda s: tuned(work="both"),
        ValueError,
        "work is 'both'; allowed are forward, gradient",
    ),
    Row(
        lambda s: tuned(route=["flash"]),
        TypeError,
        "route is ['flash']; allowed is text",
    ),
    Row(
        lambda s: tuned(ratio=0.0),
        ValueError,
        "ratio is 0.0; allowed is a number above 0",
    ),
    Row(
        lambda s: verdicts.Verdict(**VERDICT, full=1),
        TypeError,
        "full is 1; allowed is bool",
    ),
    # ------------------------------------------------------------ the kernels
    Row(
        lambda s: native_options(masks.Chunked(4, 0), 8, 8),
        TypeError,
        "chunked(4) has no form in jax.nn; allowed are causal masks and windows",
    ),
    Row(
        lambda s: split(masks.Window(1, 1, 0)),
        ValueError,
        "window(1, 1) does not end at the query, and cuDNN knows only windows that do",
    ),
    Row(
        lambda s: tile_of(3),
        TypeError,
        "int is not a mask that `prepared` returns",
    ),
    # ------------------------------------------------------------ integrations
    Row(
        lambda s: dot_product_attention(jnp.ones((4, 8)), *QKV[1:]),
        ValueError,
        "query has shape (4, 8); allowed are [batch, length, heads, dim] and [length, heads, dim]",
    ),
    Row(
        lambda s: dot_product_attention(*QKV, local_window_size=-1),
        ValueError,
        "local_window_size left is -1; allowed is 0 or more, or None for unlimited",
    ),
    Row(
        lambda s: dot_product_attention(*QKV, mask=jnp.ones((2, 4, 4), bool)),
        ValueError,
        "mask has shape (2, 4, 4); allowed is what broadcasts to [*batch, heads, query length, key length] = (2, 4, 4, 4); "
        "pass mask[:, None] for one of all heads",
    ),
    Row(
        lambda s: jax.jit(lambda scale: dot_product_attention(*QKV, scale=scale))(jnp.ones((4, 1))),
        TypeError,
        "scale must be one real number, found a traced float32[4, 1]; for a scale of each head or dim multiply the query by it "
        "and pass scale=1.0",
    ),
    Row(
        lambda s: binding.bind(3, source=""),
        TypeError,
        "implementation is of type int; allowed are an operation's name, a sequence of names, an operation, an "
        "AttentionConfig or its build(), and None for 'auto'",
    ),
    Row(
        lambda s: binding.bind([], source=""),
        TypeError,
        "implementation is []; allowed is an operation's name or a non-empty sequence of names",
    ),
    Row(
        lambda s: binding.bind("flash", source="", layer=0),
        TypeError,
        "layer=0 goes with a model config; leave it out",
    ),
    Row(
        lambda s: binding.check_precision(jax.lax.DotAlgorithmPreset.F16_F16_F16),
        ValueError,
        "precision=F16_F16_F16 names an algorithm, which an attention kernel does not take; leave precision out: "
        "products of float32 run at full precision here, those of 16-bit floats with float32 sums",
    ),
    Row(
        lambda s: binding.check_dropout(1.0, None, ("dropout_rate", "dropout_rng")),
        ValueError,
        "dropout_rate is 1.0; allowed is 0 <= p < 1",
    ),
    Row(
        lambda s: binding.check_dropout(0.5, None, ("dropout_rate", "dropout_rng")),
        ValueError,
        "dropout_rate is 0.5 and dropout is active, so dropout_rng must be a jax.random key",
    ),
    Row(
        lambda s: easydel.attention(*QKV, mode="train"),
        ValueError,
        "mode is 'train'; allowed are __train__, __prefill__, __autoregressive__ and None",
    ),
    Row(
        lambda s: easydel.attention(*QKV, mode="__autoregressive__"),
        ValueError,
        "decoding with neither mask_info nor cache_metadata: nothing says how much of the cache is filled",
    ),
    Row(
        lambda s: easydel.attention(*QKV, attn_mechanism=easydel.DECODE),
        ValueError,
        "autoregressive_decodeattn takes one query per sequence and cache_metadata with indexs; found query "
        "length 4 and no cache_metadata",
    ),
    Row(
        lambda s: easydel.attention(QKV[0][0, 0], *QKV[1:]),
        ValueError,
        "query has shape (4, 8); allowed is [batch, length, heads, dim]",
    ),
    Row(
        lambda s: easydel.attention(*QKV, attn_mechanism=["flash"]),
        TypeError,
        "attn_mechanism is ['flash']; allowed is one name, EasyDeL's or that of a registered operation",
    ),
    Row(
        lambda s: easydel.attention(*QKV, cache_metadata=SimpleNamespace(indexs=[4, 4, 4])),
        ValueError,
        "cache_metadata.indexs has shape (3,); allowed is [2], one for each batch row",
    ),
    Row(
        lambda s: easydel.attention(*QKV, fused=True),
        TypeError,
        "unknown argument 'fused'. Beside those of the signature, taken at their defaults: compute_dtype, "
        "cum_seqlens_k, cum_seqlens_q, dropout_seed, fused_backward, mask_value, normalize_output, optimized, "
        "policy, prevent_cse, vmem_limit_bytes",
    ),
    Row(
        lambda s: easydel.attention(*QKV, mask_value=-1.0),
        ValueError,
        "mask_value=-1.0 cannot be kept, only None: a hidden key gets exactly no weight",
    ),
    Row(
        lambda s: easydel.attention(*QKV, cache_view=object()),
        TypeError,
        "cache_view is a object without indexs: it reads a paged cache, and every operation here takes key and "
        "value as arrays [B, S, K, D]; gather the pages first",
    ),
    Row(
        lambda s: easydel.attention(QKV[0][:, :3], *QKV[1:], mask_info=SimpleNamespace(sliding_window_baked_in=True)),
        ValueError,
        "causal with query length 3 and key length 4, and a mask_info whose window is baked in: the keys are a "
        "slice of unknown position; apply mask_info.apply_causal(...) before the window and pass causal=False",
    ),
    Row(
        lambda s: easydel.attention(QKV[0][:, :1], *QKV[1:], sliding_window=3),
        ValueError,
        "sliding_window with query length 1 and key length 4: nothing says where in the cache the query stands; "
        "pass cache_metadata with indexs, or bake the window into mask_info",
    ),
    Row(
        lambda s: s.without("keras") or keras_layers._keras(),
        ModuleNotFoundError,
        "Keras is not installed; pip install 'attention-ops[keras]'",
    ),
    Row(
        lambda s: s.missing("keras", ModuleNotFoundError("no tensorflow")) or keras_layers._keras(),
        ModuleNotFoundError,
        "Keras cannot be imported: no tensorflow. Set the environment variable KERAS_BACKEND=jax before Keras is first imported",
    ),
    # ------------------------------------------------------------ the command line
    Row(
        lambda s: cli("show", "mask", "--expr", "window(left=1, left=2)"),
        Refused,
        "'window(left=1, left=2)', at character 1, has left twice; keep one. Allowed: causal, window(left, "
        "right), prefix(n), chunked(size), lengths(q, kv), segments(n, n, ...), joined by & | ~ and parentheses; "
        "none is no limit",
    ),
    Row(
        lambda s: cli("show", "mask", "--expr", "windw(3)"),
        Refused,
        "'windw', at character 1 of 'windw(3)', is no mask. Did you mean 'window'? Allowed: causal, window(left, "
        "right), prefix(n), chunked(size), lengths(q, kv), segments(n, n, ...), joined by & | ~ and parentheses; "
        "none is no limit",
    ),
    Row(
        lambda s: cli("show", "mask", "--expr", "chunked(0)"),
        Refused,
        "'chunked(0)', at character 1, cannot be: chunk size is 0; allowed is an integer of 1 or more. Allowed: "
        "causal, window(left, right), prefix(n), chunked(size), lengths(q, kv), segments(n, n, ...), joined by & "
        "| ~ and parentheses; none is no limit",
    ),
    Row(
        lambda s: cli("show", "mask", "--expr", "lengths(9)", "--length", "8"),
        Refused,
        "'lengths(9)', at character 1, cannot be: q is 9, more than the 8 there are. Allowed: causal, "
        "window(left, right), prefix(n), chunked(size), lengths(q, kv), segments(n, n, ...), joined by & | ~ and "
        "parentheses; none is no limit",
    ),
    Row(
        lambda s: cli("explain", *SHAPE, "--length", "8"),
        Refused,
        "--length goes with --config; use --shape and --kv",
    ),
    Row(
        lambda s: cli("explain", *SHAPE, "--load", "no_such"),
        Refused,
        "--load no_such: ModuleNotFoundError: No module named 'no_such'",
    ),
    Row(
        lambda s: cli("explain", *SHAPE, "--device", "a10"),
        Refused,
        "device 'a10' is not known; known are a100, h100, v100, b200, h200, mi300x, rtx4090, cpu, l4, t4, tpu-v4, "
        "tpu-v5e, tpu-v5p, tpu-v6e",
    ),
    Row(
        lambda s: cli("explain", *SHAPE, "--set", "mask_info=x"),
        Refused,
        "mask_info holds arrays and cannot be said in text; say mask= and q_segment_ids= for what is in it",
    ),
    Row(
        lambda s: cli("explain", *SHAPE, "--set", "causal=maybe"),
        Refused,
        "causal=maybe: found 'maybe'; allowed is true or false, for example causal=true",
    ),
    Row(
        lambda s: cli("explain", *SHAPE, "--set", "sliding_window=1,2,3"),
        Refused,
        "sliding_window=1,2,3: found 3 numbers; allowed is the keys before and after the query, none for no "
        "limit, or one number for both, for example sliding_window=511,0",
    ),
    Row(
        lambda s: cli("explain", *SHAPE, "--set", "query_offset=x"),
        Refused,
        "query_offset=x: 'x' is no whole number; allowed is a whole number, traced (known only at run time), or "
        "per-row, for example query_offset=4095",
    ),
    Row(
        lambda s: cli("tune", "cudnn_flash/cuda", *SHAPE, "--dry-run"),
        Refused,
        "no route of cudnn_flash/cuda takes this request on cpu",
    ),
    Row(
        lambda s: cli("explian"),
        Refused,
        "No such command 'explian'. Did you mean 'explain'? See attention-ops --help.",
    ),
    Row(
        lambda s: cli("new", "test_it"),
        Refused,
        "'test_it' is taken for a test by pytest; use another, for example it_attention",
    ),
    Row(
        lambda s: cli("new", "numpy"),
        Refused,
        "'numpy' is an installed package, which the new file would hide; use another, for example numpy_attention",
    ),
    Row(
        lambda s: cli("new", "my_op", "--dir", str(s.file("", "file") / "sub")),
        Refused,
        "{folder}/file/sub cannot be written: Not a directory",
    ),
    Row(
        lambda s: cli("show", "mask", "--expr", "causal", "--length", "8", "--out", str(s.folder / f"{'a' * 300}.png")),
        Refused,
        f"{{folder}}/{'a' * 300}.png cannot be written: File name too long",
    ),
    Row(
        lambda s: write_config(str(s.folder / "no" / "a.yaml"), ""),
        Refused,
        "{folder}/no/a.yaml cannot be written: No such file or directory",
    ),
    Row(
        lambda s: s.missing("attention_ops.bench.cli", ModuleNotFoundError("", name="rich")) or cli("bench", "--list"),
        Refused,
        "bench needs the package rich, which is not installed",
    ),
    Row(
        lambda s: cli("show", "mask", "--expr", "segments(2)", "--length", "4,8"),
        Refused,
        "'segments(2)', at character 1, cannot be: segments need as many queries as keys, found 4 and 8" + FORMS,
    ),
    Row(
        lambda s: cli("show", "mask", "--expr", "causal &"),
        Refused,
        "'causal &' is no mask: invalid syntax at character 8" + FORMS,
    ),
    Row(
        lambda s: cli("explain", *SHAPE, "--backend", "tpu"),
        Refused,
        "there is no tpu device here (Unknown backend tpu. Available backends are ['cpu']); name one, for example --device a100",
    ),
    Row(
        lambda s: cli("bench", "--op", "flsh"),
        Refused,
        "Invalid value for --op: no operation is named 'flsh'; known are flash, splash, cudnn_flash, flash_attn2, "
        "cuda_flash_attn2, ulysses, blockwise, xla, blocksparse, sdpa, vanilla, autoregressive_decodeattn, auto, cudnn, ring. "
        "See attention-ops bench --help.",
    ),
    Row(
        lambda s: s.without("matplotlib") or cli("bench", "--suite", "scaling", "--plot", str(s.folder / "a.png")),
        Refused,
        "matplotlib is not installed, and --plot needs it: pip install matplotlib. See attention-ops bench --help.",
    ),
    Row(
        lambda s: cli("new", "splash"),
        Refused,
        "'splash' is taken by attention_ops.operations.blocksparse.BlockSparse; use another, for example my_splash",
    ),
    Row(
        lambda s: cli("explain", *SHAPE, "--set", "bias=1,1,Q,S"),
        Refused,
        "bias=1,1,Q,S: 'Q' is no size; allowed is sizes in numbers and in the letters B, T, S, H, K, D, Dv, and a dtype after a "
        "colon, for example bias=1,1,T,S:float32",
    ),
    Row(
        lambda s: cli("explain", *SHAPE, "--set", "bias=1,1,T,S:flot"),
        Refused,
        "bias=1,1,T,S:flot: 'flot' is no dtype; allowed is sizes in numbers and in the letters B, T, S, H, K, D, Dv, and a dtype "
        "after a colon, for example bias=1,1,T,S:float32",
    ),
    # ------------------------------------------------------------ bench and selftest
    Row(
        lambda s: s.patch(jax_systems, "free_memory", lambda: 0) or jax_systems.ours(Problem(CASES[0]), "vanilla"),
        Unavailable,
        "not run: vanilla/native needs about 0 GiB",
    ),
    Row(
        lambda s: s.patch(bench_systems, "free_memory", lambda: 0) or find_system("jax_nn", "vanilla").check_memory(CASES[0]),
        Unavailable,
        "not run: needs about 0 GiB, more than 60% of the 0 free",
    ),
    Row(lambda s: child(s, returncode=-9), Unavailable, "its process was ended by signal 9 (9: out of memory)"),
    Row(lambda s: child(s, returncode=3), Unavailable, "its process ended with 3"),
    Row(lambda s: child(s, error=subprocess.TimeoutExpired("", 600)), Unavailable, "took more than 600 s in its own process"),
    Row(
        lambda s: s.without("torch") or bench_peers._torch.__wrapped__(),
        Unavailable,
        "torch is not installed: pip install 'attention-ops[peers]'",
    ),
    Row(
        lambda s: bench_tune._timed({None: failing}, 1, lambda: None),
        bench_tune.CannotTune,
        "the default block sizes fail when run again (RuntimeError: broken)",
    ),
    Row(
        lambda s: job().admitted(ao.BlockSizes(100, 128)),
        bench_tune.CannotTune,
        "block_sizes.q 100 is not a multiple of 128 (use 128, or None to choose)",
    ),
    Row(
        lambda s: selftest("--json", "/no/such/folder/a.json"),
        click.UsageError,
        "--json /no/such/folder/a.json: there is no such folder",
    ),
    Row(
        lambda s: parse_case("causl/small"),
        UnknownCaseError,
        "no case ingredient is named 'causl' in 'causl/small'. Did you mean 'causal'? Allowed: plain, or with + between "
        + ", ".join(INGREDIENTS),
    ),
    Row(
        lambda s: parse_case("causal/smal"),
        UnknownCaseError,
        "'smal' in 'causal/smal' is no size, dtype, variant or mode that is left. Did you mean 'small'? Allowed: small, tiles, "
        "square, ragged, one_head, odd, wide, decode, decode_long, long, deep, aligned, aligned_wide, float32, bfloat16, "
        "float16, nan, large, cancel, bare, forward, eager, vmap, vmap_grad, remat",
    ),
    Row(
        lambda s: parse_case("plain/small/float32/nan/bare/bare"),
        UnknownCaseError,
        "'bare' in 'plain/small/float32/nan/bare/bare' is no size, dtype, variant or mode that is left. Allowed: nothing more",
    ),
    Row(
        lambda s: reference.attention(np.ones((1, 2, 1, 4)), np.ones((1, 3, 1, 4)), np.ones((1, 3, 1, 4)), {"causal": True}),
        ValueError,
        "a positional mask with T 2 and S 3 has no default query_offset",
    ),
    Row(
        lambda s: bench_runner.Settings(operations=()),
        ValueError,
        "operations is empty; name at least one",
    ),
    Row(
        lambda s: bench_runner.Settings(repeats=0),
        ValueError,
        "repeats is 0; allowed is 1 or more",
    ),
    Row(
        lambda s: bench_runner.relative_difference([np.ones(2)], [np.ones(3)]),
        Unavailable,
        "its output is (2,), ours (3,)",
    ),
    Row(
        lambda s: s.without("ejkernel") or bench_peers._ejkernel.__wrapped__("x"),
        Unavailable,
        "ejkernel is not installed",
    ),
    Row(
        lambda s: s.patch(jax, "default_backend", lambda: "gpu") or bench_peers._torch.__wrapped__(),
        Unavailable,
        "PyTorch is measured on the CPU only, and JAX runs on gpu",
    ),
    Row(
        lambda s: selftest("--save", "--case", "causal"),
        click.UsageError,
        "--save keeps verdicts on whole routes; leave out --case",
    ),
]


@pytest.fixture
def stage(monkeypatch, tmp_path, registry):
    return Stage(monkeypatch, tmp_path, registry)


def raised(row: Row, stage: Stage) -> BaseException:
    """Return the error of a row; a warning is one too."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(row.error) as caught:
            row.call(stage)
    return caught.value


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"[^\w .']+", " ", row.message)[:70])
def test_message(row, stage):
    error = raised(row, stage)
    found = error.format_message() if isinstance(error, click.ClickException) else str(error)
    assert found == row.message.replace("{folder}", str(stage.folder))


# ---------------------------------------------------------------- nothing raises unasserted

PACKAGE = pathlib.Path(ao.__file__).parent
TESTS = pathlib.Path(__file__).parent

EXCUSED = {
    ("bench/cli.py", "SystemExit(130)"): "an exit status, no message",
    ("bench/cli.py", "SystemExit(1)"): "an exit status, no message",
    ("integrations/keras.py", "NoRouteError("): "tests/integrations/test_keras.py has it, with Keras imported",
    ("bench/memory.py", "'peak memory cannot be measured on Windows'"): "the platform of the tests is another",
}
"""Places whose message is not found by the test below, and why."""


class Site(NamedTuple):
    """A place that raises an error it makes, or warns. `runs`: the runs of three words in the constant parts of its message."""

    file: pathlib.Path
    first: int
    last: int
    source: str
    runs: set[tuple[str, ...]]


def _sites() -> Iterator[Site]:
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for node in ast.walk(tree):
            made = node.exc if isinstance(node, ast.Raise) else node if _warns(node) else None
            if isinstance(made, ast.Call):
                pieces = list(_strings(made))
                if not pieces:  # a function of the same file writes the sentence
                    called = (item.func for item in ast.walk(made) if isinstance(item, ast.Call))
                    names = (getattr(item, "attr", getattr(item, "id", "")) for item in called)
                    pieces = [text for name in names if name in functions for text in _strings(functions[name])]
                runs = {run for piece in pieces for run in _runs(piece)}
                yield Site(path, node.lineno, node.end_lineno or node.lineno, ast.unparse(made), runs)


def _warns(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn"


def _strings(node: ast.AST) -> Iterator[str]:
    for item in ast.walk(node):
        if isinstance(item, ast.Constant) and isinstance(item.value, str):
            yield item.value


def _hits(error: BaseException | None) -> Iterator[tuple[pathlib.Path, int]]:
    """Yield where an error, and each that it came from, was raised: the innermost line of this package."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        lines = [
            (pathlib.Path(frame.f_code.co_filename), line)
            for frame, line in traceback.walk_tb(error.__traceback__)
            if frame.f_code.co_filename.startswith(f"{PACKAGE}/")
        ]
        yield from lines[-1:]
        for one in error.errors() if isinstance(error, pydantic.ValidationError) else ():
            yield from _hits(one.get("ctx", {}).get("error"))
        error = error.__cause__ or error.__context__


def _runs(text: str) -> Iterator[tuple[str, ...]]:
    """Yield each run of three words."""
    words = re.findall(r"\w+", text)
    return zip(words, words[1:], words[2:], strict=False)


def test_every_place_that_raises_is_asserted(monkeypatch, tmp_path, registry):
    """By a row above, or by a run of three words that no other message has, in a string of another test."""
    hit: set[tuple[pathlib.Path, int]] = set()
    for number, row in enumerate(ROWS):
        with monkeypatch.context() as patch:
            hit |= set(_hits(raised(row, Stage(patch, tmp_path / str(number), registry))))
    sites = list(_sites())
    said = collections.Counter(run for runs in {frozenset(site.runs) for site in sites} for run in runs)
    elsewhere = (path for path in TESTS.rglob("*.py") if path != pathlib.Path(__file__))
    texts = (text.replace("\\", "") for path in elsewhere for text in _strings(ast.parse(path.read_text())))
    asserted = {run for text in texts for chunk in text.split(".*") for run in _runs(chunk)}
    missing = []
    for site in sites:
        file = site.file.relative_to(PACKAGE).as_posix()
        by_row = any(path == site.file and site.first <= line <= site.last for path, line in hit)
        by_text = any(said[run] == 1 and run in asserted for run in site.runs)
        excused = any(file == name and part in site.source for name, part in EXCUSED)
        if not (by_row or by_text or excused):
            missing.append(f"{file}:{site.first}: {site.source[:160]}")
    assert not missing, "\n".join(missing)
