"""Configs: each file loads, plans and runs; each mistake is named with its place; Hugging Face files read as the same facts."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

import attention_ops as ao
from attention_ops import masks
from attention_ops.config import AttentionConfig, ConfiguredAttention, LayerConfig
from attention_ops.hf import FAMILIES
from attention_ops.metadata import BACKEND_NAMES
from attention_ops.selftest import reference

CONFIGS = Path(__file__).parents[1] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
KINDS = [(path.stem, kind) for path in FILES for kind in ao.load_config(path).kinds]
GEMMA2 = (CONFIGS / "gemma2_2b.yaml").read_text()
BASE: dict[str, Any] = {
    "name": "base",
    "num_layers": 6,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_length": 64,
    "causal": True,
}


def config(**changes: Any) -> AttentionConfig:
    return AttentionConfig.from_dict(BASE | changes)


def load(name: str) -> AttentionConfig:
    return ao.load_config(CONFIGS / f"{name}.yaml")


def inputs(layer: LayerConfig, dtype: Any = jnp.float32, batch: int = 2) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    keys, width = layer.kv_length or layer.max_length, layer.value_head_dim or layer.head_dim
    shapes = (
        (batch, layer.max_length, layer.num_heads, layer.head_dim),
        (batch, keys, layer.num_kv_heads, layer.head_dim),
        (batch, keys, layer.num_kv_heads, width),
    )
    query, key, value = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return query, key, value


def law(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> np.ndarray:
    return reference.attention(query, key, value, options).output


# ---------------------------------------------------------------- the files


def test_every_model_has_a_file():
    wanted = """llama3_2_1b llama3_1_8b gemma_2b gemma2_2b gemma3_1b mistral_7b qwen3_8b phi3_mini gpt_oss_20b deepseek_v3_mla
        smollm2_135m minilm_l6 bert_base vit_b16 whisper_small stable_diffusion_3_medium stable_diffusion_3_5_large"""
    assert {path.stem for path in FILES} >= set(wanted.split())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_names_itself_and_its_source(path: Path):
    loaded = ao.load_config(path)
    assert loaded.name == path.stem
    assert loaded.source is not None
    assert loaded.source.startswith("https://")
    assert len(loaded.layer_kinds) == loaded.num_layers
    assert set(loaded.layer_kinds) == set(loaded.kinds)


@pytest.mark.parametrize("device", ["cpu", "a100", "h100", "tpu-v5e"])
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_every_layer_has_a_plan(name: str, kind: str, device: str):
    loaded = load(name)
    plan = loaded.build(kind).plan(*loaded.shapes(layer=kind), device=device)
    geometry = loaded.num_heads, loaded.num_kv_heads, loaded.head_dim
    assert geometry == (plan.spec.H, plan.spec.K, plan.spec.D)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_every_layer_runs_at_reduced_size(name: str, kind: str):
    small = load(name).reduced(head_dim=8, max_length=48).model_copy(update={"runtime_dtype": None})
    layer, attend = small.layer(kind), small.build(kind)
    query, key, value = inputs(layer)
    options: dict[str, Any] = {"softmax_aux": jnp.linspace(-1.0, 1.0, layer.num_heads)} if layer.sinks else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = attend(query, key, value, **options).attention_outputs
    np.testing.assert_allclose(found, law(query, key, value, **attend.options, **options), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "device", "route"),
    [
        ("llama3_2_1b", "a100", "cudnn_flash/cuda"),
        ("stable_diffusion_3_medium", "a100", "cudnn_flash/cuda"),
        ("stable_diffusion_3_5_large", "a100", "cudnn_flash/cuda"),
        ("llama3_2_1b", "cpu", "blocksparse/native"),
        ("deepseek_v3_mla", "a100", "blocksparse/gpu"),
    ],
)
def test_the_chain_of_a_config_is_tried_in_order(name: str, device: str, route: str):
    loaded = load(name)
    assert loaded.build().plan(*loaded.shapes(), device=device, differentiable=False).route == route


def test_gemma2_alternates_local_and_global():
    gemma2 = load("gemma2_2b")
    assert gemma2.layer_kinds == ("local", "global") * 13
    shared = {"causal": True, "logits_soft_cap": 50.0, "softmax_scale": 0.0625}
    assert gemma2.build(0).options == shared | {"sliding_window": (4095, 0)}
    assert gemma2.build(1).options == shared
    assert gemma2.build("local") == gemma2.build(24)
    assert hash(gemma2.build("local")) == hash(gemma2.build(24))


def test_the_tail_of_gemma3_is_local():
    kinds = load("gemma3_1b").layer_kinds
    assert [layer for layer, kind in enumerate(kinds) if kind == "global"] == [5, 11, 17, 23]


def test_cross_attention_has_its_own_length():
    query, key, value = load("whisper_small").shapes(layer="cross", batch=3)
    assert query.shape == (3, 448, 12, 64)
    assert key.shape == value.shape == (3, 1500, 12, 64)


# ---------------------------------------------------------------- a built layer


def test_options_of_the_call_win():
    attend = config(sliding_window=4, logits_soft_cap=5.0).build()
    query, key, value = inputs(config().layer())
    full = attend(query, key, value, sliding_window=None, logits_soft_cap=None, causal=False).attention_outputs
    np.testing.assert_allclose(full, law(query, key, value), rtol=1e-5, atol=1e-5)
    own = attend(query, key, value).attention_outputs
    expected = law(query, key, value, causal=True, sliding_window=4, logits_soft_cap=5.0)
    np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-5)


def test_metadata_comes_from_the_config():
    attend = config(
        runtime_dtype="bfloat16",
        softmax_dtype="float32",
        block_sizes={"q": 128, "kv": 256},
        fallback="error",
        backend="cpu",
        partition_axis={"batch_axis": ["dp", "fsdp"], "head_axis": "tp"},
    ).build()
    assert attend.metadata == ao.OperationMetadata(
        runtime_dtype=jnp.bfloat16,
        softmax_dtype=jnp.float32,
        block_sizes=ao.BlockSizes(q=128, kv=256),
        fallback="error",
        backend="cpu",
        partition_axis={"batch_axis": ("dp", "fsdp"), "head_axis": "tp"},
    )
    assert attend(*inputs(config().layer())).attention_outputs.dtype == jnp.bfloat16


def test_a_mesh_is_given_when_a_layer_is_built():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("dp", "fsdp", "tp"))
    loaded = load("llama3_1_8b").reduced()
    attend, arrays = loaded.build(mesh=mesh), inputs(loaded.layer(), jnp.bfloat16)
    assert attend.metadata.mesh == mesh
    alone = loaded.build()(*arrays).attention_outputs.astype(jnp.float32)
    np.testing.assert_allclose(attend(*arrays).attention_outputs.astype(jnp.float32), alone, rtol=1e-2, atol=1e-2)


def test_use_wins_over_the_config_and_the_plan_says_which():
    attend = config(operation=["flash", "vanilla"]).build()
    arrays = inputs(config().layer())
    with ao.record_plans() as plans:
        attend(*arrays)
        with ao.use("vanilla"):
            attend(*arrays)
    assert [plan.operation for plan in plans] == ["flash", "vanilla"]
    assert "config base" in " ".join(plans[0].notes)
    assert "attention_ops.use" in " ".join(plans[1].notes)
    assert attend.name == "flash > vanilla"


def test_the_fallback_policy_of_a_config_holds():
    query, key, value = inputs(config().layer())
    with pytest.raises(ao.NoRouteError, match="return_weights"):
        config(operation="flash", fallback="error").build()(query, key, value, return_weights=True)
    weights = config(operation=["flash", "vanilla"], fallback="error").build()(query, key, value, return_weights=True)
    assert weights.attention_weights is not None


def test_sinks_that_are_not_given_are_missed():
    attend = config(sinks=True).build()
    query, key, value = inputs(config().layer())
    with pytest.raises(ValueError, match=r"config base has attention sinks .* pass softmax_aux=.* \[4\]"):
        attend(query, key, value)
    without = attend(query, key, value, softmax_aux=None).attention_outputs
    some = attend(query, key, value, softmax_aux=jnp.zeros(4)).attention_outputs
    assert not np.allclose(without, some)
    assert ao.Feature.SINKS in attend.plan(query, key, value).spec.features
    assert ao.Feature.SINKS not in attend.plan(query, key, value, softmax_aux=None).spec.features


def test_a_mask_comes_on_top_of_the_chunks():
    attend = config(chunk_size=16).build()
    query, key, value = inputs(config().layer())
    mask = np.random.default_rng(1).random((64, 64)) < 0.7
    same_chunk = np.arange(64)[:, None] // 16 == np.arange(64)[None] // 16
    for given, allowed in ((None, same_chunk), (mask, mask & same_chunk), (masks.Dense(mask), mask & same_chunk)):
        found = attend(query, key, value, mask=given).attention_outputs
        np.testing.assert_allclose(found, law(query, key, value, causal=True, mask=allowed), rtol=1e-5, atol=1e-5)


def test_decoding_and_jit():
    attend = config(sliding_window=[7, 0]).build()
    query, key, value = inputs(config().layer())
    whole = attend(query, key, value).attention_outputs
    last = jax.jit(attend)(query[:, -1:], key, value).attention_outputs
    np.testing.assert_allclose(last, whole[:, -1:], rtol=1e-5, atol=1e-5)


def test_a_config_is_a_value():
    assert config() == config()
    assert hash(config()) == hash(config())
    assert config() != config(num_layers=7)
    with pytest.raises(ValueError, match="frozen"):
        config().num_heads = 3
    assert isinstance(config().build(), ConfiguredAttention)
    assert config(sliding_window=3).sliding_window == (3, 3)
    assert config(sliding_window=[None, 0]).build().options["sliding_window"] == (None, 0)


def test_a_built_layer_can_be_copied_and_pickled():
    attend = load("gpt_oss_20b").build("local")
    assert attend.options["sliding_window"] == (127, 0)
    for again in (pickle.loads(pickle.dumps(attend)), copy.deepcopy(attend)):
        assert again == attend
        assert hash(again) == hash(attend)


def test_reduced_keeps_groups_ratios_and_patterns():
    small = load("gpt_oss_20b").reduced()
    assert (small.num_heads, small.num_kv_heads, small.num_layers) == (16, 2, 24)
    assert small.layer("local").sliding_window == (16, 0)
    assert small.layer("global").sliding_window is None
    mla = load("deepseek_v3_mla").reduced(head_dim=24)
    assert (mla.head_dim, mla.value_head_dim) == (24, 16)
    cross = load("whisper_small").reduced().layer("cross")
    assert cross.kv_length is not None
    assert cross.kv_length > cross.max_length == 64


def test_importing_the_package_imports_no_pydantic_and_no_yaml():
    code = "import sys, attention_ops as ao; ao.attention, ao.OperationRegistry; print({'pydantic', 'yaml'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=CONFIGS.parent)
    assert done.stdout.strip() == "set()"


def test_backends_are_those_of_the_metadata():
    annotation = AttentionConfig.model_fields["backend"].annotation
    assert set(get_args(get_args(annotation)[0])) == set(BACKEND_NAMES)


# ---------------------------------------------------------------- mistakes


def edit(old: str, new: str) -> str:
    assert old in GEMMA2
    return GEMMA2.replace(old, new)


def bomb() -> str:
    """Ten levels of ten aliases each: a page of text that stands for ten thousand million values."""
    levels = [f"k{n}: &k{n} [{', '.join([f'*k{n - 1}'] * 10)}]" for n in range(1, 10)]
    return "\n".join(["k0: &k0 [1]", *levels])


MISTAKES = {
    "unknown key": (
        edit("num_kv_heads", "num_kv_head"),
        r"^x.yaml:7: num_kv_head: is no key of a config; the nearest is 'num_kv_heads'. Allowed here: num_heads, [a-z_, ]*$",
    ),
    "unknown key in a kind": (
        edit("{sliding_window", "{sliding_windw"),
        r"^x.yaml:15: layer_types.local.sliding_windw: is no key of a config; the nearest is 'sliding_window'",
    ),
    "a key that is null": (edit("causal:", "~:"), r"^x.yaml:10: YAML reads the key '~' as null, not as text; quote it$"),
    "a key that is a number": (GEMMA2 + "8: 9\n", r"^x.yaml:24: \[8\]: is no key of a config"),
    "unknown operation": (
        edit("operation: blocksparse", "operation: [flash, blocksparce]"),
        r"(?s)^x.yaml:19: operation: .*blocksparce.*blocksparse.*flash",
    ),
    "unknown operation of a kind": (
        edit("global: {}", "global: {operation: vanila}"),
        r"(?s)^x.yaml:16: layer_types.global.operation: .*vanila.*vanilla",
    ),
    "unknown route": (
        edit("operation: blocksparse", "operation: flash/natve"),
        r"^x.yaml:19: operation: no route is named 'flash/natve'; flash has .*flash/native",
    ),
    "operation is a number": (
        edit("operation: blocksparse", "operation: 3"),
        r"^x.yaml:19: operation: found 3 \(int\); allowed is",
    ),
    "heads do not divide": (
        edit("num_kv_heads: 4", "num_kv_heads: 3"),
        r"^x.yaml:7: num_kv_heads: found 3, which does not divide num_heads 8; allowed: 1, 2, 4, 8$",
    ),
    "heads of a kind do not divide": (
        edit("global: {}", "global: {num_heads: 6}"),
        r"^x.yaml:16: layer_types.global.num_kv_heads: found 4, which does not divide num_heads 6; allowed: 1, 2, 3, 6$",
    ),
    "text for a number": (
        edit("num_heads: 8", "num_heads: eight"),
        r"^x.yaml:6: num_heads: found 'eight' \(str\); allowed is the number of .*, 1 or more; for example num_heads: 32$",
    ),
    "zero": (edit("head_dim: 256", "head_dim: 0"), r"^x.yaml:8: head_dim: found 0 \(int\); allowed is the width of .*1 or more"),
    "number for a flag": (edit("causal: true", "causal: 1"), r"^x.yaml:10: causal: found 1 \(int\); allowed is true or false"),
    "cap below zero": (
        edit("50.0", "-1"),
        r"^x.yaml:12: logits_soft_cap: found -1 \(int\); allowed is a number from 1e-30 to 1e30, or null",
    ),
    "not a number": (edit("50.0", ".nan"), r"^x.yaml:12: logits_soft_cap: found nan \(float\); allowed is a number from"),
    "infinite": (edit("50.0", ".inf"), r"^x.yaml:12: logits_soft_cap: found inf \(float\); allowed is a number from"),
    "number that YAML reads as text": (
        edit("0.0625", "625e-4"),
        r"^x.yaml:11: softmax_scale: found '625e-4' \(str\); allowed is .*\. YAML 1\.1 reads it as text; write 625\.0e-4$",
    ),
    "quoted number": (edit("0.0625", "'1.0e-5'"), r"^x.yaml:11: softmax_scale: found '1.0e-5' \(str\); allowed is .* 0\.125$"),
    "number whose exponent has no sign": (edit("50.0", "5.5e1"), r"^x.yaml:12: logits_soft_cap: found '5.5e1'.* write 5\.5e\+1$"),
    "number too large": (
        edit("head_dim: 256", "head_dim: 2147483648"),
        r"^x.yaml:8: head_dim: found 2147483648 \(int\); allowed is .*, 1 or more, below 2147483648; for example head_dim: 64$",
    ),
    "window of one side": (
        edit("[4095, 0]", "[4095]"),
        r"^x.yaml:15: layer_types.local.sliding_window: found \[4095\] \(list\); allowed is \[left, right\].* is \[n - 1, 0\]$",
    ),
    "window below zero": (edit("[4095, 0]", "-1"), r"sliding_window: found -1 \(int\); allowed is \[left, right\]"),
    "window is a flag": (edit("[4095, 0]", "true"), r"sliding_window: found True \(bool\); allowed is \[left, right\]"),
    "pattern does not divide": (
        edit("num_layers: 26", "num_layers: 27"),
        r"pattern_tail: pattern has 2 layers and num_layers is 27: 13 rounds leave 1 over, and pattern_tail has 0; "
        r"for example pattern_tail: \[local\]$",
    ),
    "a tail too many": (
        edit("pattern:", "pattern_tail: [local]\npattern:"),
        r"13 rounds leave 0 over.* has 1; remove pattern_tail$",
    ),
    "unknown kind": (
        edit("[local, global]", "[locl, global]"),
        r"^x.yaml:17: pattern: found the kind 'locl'. Did you mean 'local'\? Kinds in layer_types: local, global$",
    ),
    "no pattern": (
        edit("pattern: [local, global]", ""),
        r"pattern: layer_types has local, global, and nothing says .*\[local, global\]$",
    ),
    "pattern without kinds": ("pattern: [a]\n", r"x.yaml:1: pattern: found the kind 'a'. Kinds .* none: layer_types is empty"),
    "a kind no layer has": (
        edit("[local, global]", "[local]"),
        r"no layer is of the kind 'global'; name it in pattern, or remove it",
    ),
    "a kind is a number": (edit("global: {}", "3: {}"), r"^x.yaml:16: layer_types\[3\]: found 3 \(int\);.* quote the kind: '3'"),
    "a kind is no mapping": (
        edit("global: {}", "global: 3"),
        r"^x.yaml:16: layer_types.global: found 3 \(int\); allowed is a mapping",
    ),
    "layer_types is a list": (
        edit("  local: {", "  - local: {").replace("  global: {}\n", ""),
        r"layer_types: found \[.*allowed is a mapping",
    ),
    "unknown policy": (
        edit("fallback: warn", "fallback: warning"),
        r"^x.yaml:20: fallback: found 'warning' \(str\); allowed is warn, silent or error. Did you mean 'warn'\?$",
    ),
    "unknown dtype": (
        edit("runtime_dtype: bfloat16", "runtime_dtype: bf16"),
        r"^x.yaml:21: runtime_dtype: found 'bf16' \(str\); allowed is float16, bfloat16, .*Did you mean 'bfloat16'\?$",
    ),
    "narrow softmax": (
        edit("softmax_dtype: float32", "softmax_dtype: bfloat16"),
        r"softmax_dtype: found 'bfloat16' \(str\); allowed is float32",
    ),
    "unknown block size": (edit("kv: 512}", "k: 512}"), r"^x.yaml:23: block_sizes.k: is no key of a config; the nearest is 'kv'"),
    "block size of zero": (
        edit("{q: 512", "{q: 0"),
        r"^x.yaml:23: block_sizes.q: found 0 \(int\); allowed is a whole number of 1 or more",
    ),
    "one block size": (
        edit("{q: 512, kv: 512}", "512"),
        r"^x.yaml:23: block_sizes: found 512 \(int\); allowed is a mapping of q and kv",
    ),
    "unknown axis": (
        GEMMA2 + "partition_axis: {heads_axis: tp}",
        r"^x.yaml:24: partition_axis: found the key 'heads_axis'. Did you mean 'head_axis'\?",
    ),
    "axis is a number": (
        GEMMA2 + "partition_axis: {head_axis: [1]}",
        r"^x.yaml:24: partition_axis: head_axis: found \[1\] \(list\)",
    ),
    "axis is one number": (
        GEMMA2 + "partition_axis: {head_axis: 3}",
        r"^x.yaml:24: partition_axis: head_axis: found 3 \(int\); allowed is a mesh axis name, a list of names, or null$",
    ),
    "axis is a mapping": (
        GEMMA2 + "partition_axis: {head_axis: {tp: 2}}",
        r"^x.yaml:24: partition_axis: head_axis: found {'tp': 2}",
    ),
    "missing keys": (
        "name: x\n",
        r"(?s)x.yaml: num_heads: is missing; .*\nx.yaml: head_dim: is missing; .*\nx.yaml: num_layers: is missing; [^\n]*$",
    ),
    "two mistakes, two lines": (
        edit("num_heads: 8", "num_heads: eight").replace("50.0", "none"),
        r"(?s)^x.yaml:6: num_heads: found 'eight'.*\nx.yaml:12: logits_soft_cap: found 'none'[^\n]*$",
    ),
    "a key given twice": (GEMMA2 + "\nname: other\n", r"^x.yaml:25: the key 'name' is given twice; keep one$"),
    "code": (
        edit("name: gemma2_2b", "name: !!python/object/apply:os.getcwd []"),
        r"^x.yaml:2: name: found a value of type !!python/object/apply:os.getcwd; allowed are text, .*remove the tag",
    ),
    "a date": (
        edit("name: gemma2_2b", "name: 2024-06-27"),
        r"^x.yaml:2: name: found a value of type !!timestamp; .*quote what is text$",
    ),
    "a key that is a list": ("? [a, b]\n: c\n", r"^x.yaml:1: a key is not plain text"),
    "a key that is code": ("? !!python/name:os.getcwd x\n: c\n", r"^x.yaml:1: a key is not plain text"),
    "a list": ("- a\n- b\n", r"^x.yaml: found \['a', 'b'\] \(list\); allowed is a mapping"),
    "a word": ("hello", r"^x.yaml: found 'hello' \(str\); allowed is a mapping"),
    "empty": ("", r"^x.yaml: is empty; a config has lines of `key: value`"),
    "only comments": ("# nothing yet\n", r"^x.yaml: is empty"),
    "two documents": ("---\na: 1\n---\nb: 2\n", r"^x.yaml:3: is not YAML: but found another document$"),
    "not YAML": ("a: [1, 2\nb: }", r"^x.yaml:2: is not YAML: expected ',' or '\]', but got ':'$"),
    "tabs": ("a:\n\t- b", r"^x.yaml:2: is not YAML: found character '\\t' that cannot start any token$"),
    "an alias of nothing": ("a: *b", r"^x.yaml:1: is not YAML: found undefined alias 'b'$"),
    "an alias of itself": ("a: &a [*a]\n", r"^x.yaml:1: a\[0\]: an alias contains itself"),
    "an alias bomb": (bomb(), r"holds more than 20000 values with its aliases written out"),
    "nested without end": ("a: " + "[" * 5000, r"^x.yaml: is nested too deeply"),
    "a number of 6000 digits": ("a: " + "9" * 6000, r"^x.yaml:1: a: is a number of 6000 characters, more than 100; write a"),
    "a hexadecimal number without end": ("a: 0x" + "f" * 6000, r"^x.yaml:1: a: is a number of 6002 characters"),
    "a number in base 60 without end": ("a: 1" + ":59" * 300_000, r"^x.yaml:1: a: is a number of 900001 characters"),
    "a key that is a number without end": ("0x" + "f" * 900 + ": 1", r"^x.yaml:1: is a number of 902 characters"),
    "a million bytes": ("a: " + "x" * 1_000_000, r"^x.yaml: has more than 1000000 bytes, the limit"),
    "binary": (b"\x80\x04\x95\xff\x00", r"^x.yaml:1: is not UTF-8 text \(byte 0\)"),
    "zero bytes": (b"a\x00b: 1", r"^x.yaml:1: is not YAML: unacceptable character #x0000"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    content, message = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ao.ConfigError, match=message):
        ao.load_config("x.yaml")


@pytest.mark.parametrize("where", range(0, len(GEMMA2), 71))
def test_a_file_cut_off_anywhere_loads_or_is_named(where: int, tmp_path: Path):
    path = tmp_path / "x.yaml"
    path.write_text(GEMMA2[:where])
    with contextlib.suppress(ao.ConfigError):
        assert ao.load_config(path).num_layers == 26


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "latin-1"])
def test_a_file_in_another_encoding_is_named_with_the_line(encoding: str, tmp_path: Path):
    path = tmp_path / "x.yaml"
    path.write_bytes(GEMMA2.replace("gemma2_2b", "gemm\u00e9").encode(encoding))
    with pytest.raises(ao.ConfigError, match=rf"x.yaml:{2 if encoding == 'latin-1' else 1}: is not UTF-8 text"):
        ao.load_config(path)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(
        ao.ConfigError, match=r"gemma2.yaml: no such file; nearest in that folder: gemma_2b.yaml, gemma2_2b.yaml, "
    ):
        ao.load_config(CONFIGS / "gemma2.yaml")
    with pytest.raises(ao.ConfigError, match=r"x.yaml: no such file$"):
        ao.load_config(tmp_path / "none" / "x.yaml")
    with pytest.raises(ao.ConfigError, match=r"num_heads: found a whole number of 16610 bits \(int\); allowed is"):
        config(num_heads=10**5000)
    with pytest.raises(ao.ConfigError, match=r"cannot be read: Is a directory"):
        ao.load_config(tmp_path)


def test_a_byte_order_mark_and_merge_keys_are_fine(tmp_path: Path):
    path = tmp_path / "x.yaml"
    merged = edit("  global: {}", "  global: {<<: *w}").replace("local: {", "local: &w {")
    path.write_bytes(b"\xef\xbb\xbf" + merged.encode())
    assert ao.load_config(path).layer("global").sliding_window == (4095, 0)


def test_a_layer_that_is_not_there():
    gemma2 = load("gemma2_2b")
    with pytest.raises(
        ao.ConfigError, match=r"its layers differ \(local: 0, 2, 4, 6 and 9 more; global: .*build\(0\) or build\('local'\)"
    ):
        gemma2.build()
    with pytest.raises(
        ao.ConfigError, match=r"there is no layer 'locl'. Did you mean 'local'\? Allowed: a layer from 0 to 25, or"
    ):
        gemma2.build("locl")
    for which in (26, -1, True):
        with pytest.raises(ao.ConfigError, match=rf"there is no layer {which}. Allowed: a layer from 0 to 25"):
            gemma2.build(which)


def test_layers_and_lengths_may_be_any_whole_number():
    gemma2 = load("gemma2_2b")
    assert gemma2.build(np.int64(1)) == gemma2.build(jnp.asarray(1)) == gemma2.build(1)
    assert [shape.shape[1] for shape in gemma2.shapes(length=0, layer=0)] == [0, 0, 0]
    with pytest.raises(ao.ConfigError, match=r"there is no layer 26. Allowed: a layer from 0 to 25"):
        gemma2.build(np.int64(26))
    with pytest.raises(ao.ConfigError, match=r"there is no layer array\(\[0, 1\]\). Allowed: a layer from 0 to 25"):
        gemma2.build(np.arange(2))  # type: ignore[arg-type]


@pytest.mark.parametrize(("read", "argument"), [(ao.load_config, "path"), (AttentionConfig.from_hf, "source")])
def test_a_path_that_is_none_is_named(read: Any, argument: str):
    for path in (None, 3, ["c.yaml"], b"c.yaml"):
        with pytest.raises(TypeError, match=rf"^{argument}: found .*; allowed is (the|a) path"):
            read(path)
    for path, held in {"c\0": "a null character", "\ud800": "half of a pair of surrogates"}.items():
        message = rf"^{argument}: found '.*' \(str\), which holds {held}, as no file's name does; allowed is (the|a) path"
        with pytest.raises(ao.ConfigError, match=message):
            read(path)


def test_an_operation_registered_before_is_accepted(tmp_path: Path):
    path = tmp_path / "x.yaml"
    path.write_text(edit("operation: blocksparse", "operation: [config_test_op, flash/native]"))
    with pytest.raises(ao.ConfigError, match="config_test_op"):
        ao.load_config(path)

    class Mine(ao.OperationImpl):
        name = "config_test_op"

        def forward_native(self, request: ao.AttentionRequest) -> Any:
            return request.query

    ao.OperationRegistry.register(Mine)
    try:
        built = ao.load_config(path).build(0)
        plan = built.plan(*load("gemma2_2b").shapes(layer=0), device="cpu")
        assert plan.route == "flash/native"
    finally:
        ao.OperationRegistry.unregister("config_test_op")


# ---------------------------------------------------------------- to YAML and back


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_to_yaml_reads_back_equal(path: Path, tmp_path: Path):
    loaded = ao.load_config(path)
    (tmp_path / "x.yaml").write_text(loaded.to_yaml())
    again = ao.load_config(tmp_path / "x.yaml")
    assert again == loaded
    assert again.to_yaml() == loaded.to_yaml()


def test_to_yaml_says_what_a_kind_takes_back():
    kinds = {"local": {}, "global": {"sliding_window": None, "operation": ["flash", "vanilla"]}}
    before = config(sliding_window=[7, 0], layer_types=kinds, pattern=["local", "global"], operation="blocksparse")
    after = AttentionConfig.from_dict(yaml.safe_load(before.to_yaml()))
    assert after == before
    assert after.layer("global").sliding_window is None
    assert list(yaml.safe_load(before.to_yaml()))[:3] == ["name", "num_layers", "num_heads"]


UNUSUAL = ["a\x85b", "\x85", "a\u2028 b", "\u2029\x85c", "\ufeffa", "\x07\x00\x7f\ufffe", "a\n\r\tb", " a ", "1e5", "<<"]


@pytest.mark.parametrize("text", UNUSUAL, ids=ascii)
def test_any_text_survives_to_yaml(text: str, tmp_path: Path):
    before = config(name=text, source=text, layer_types={text: {}, "b": {"sinks": True}}, pattern=[text, "b"])
    (tmp_path / "x.yaml").write_text(before.to_yaml(), encoding="utf-8", newline="")
    assert ao.load_config(tmp_path / "x.yaml") == before


def test_what_no_file_can_hold_is_not_written():
    message = r"^'\\ud800' \(str\) holds half of a pair of surrogates, which is no character; write the character itself$"
    with pytest.raises(ao.ConfigError, match=message):
        config(name="\ud800").to_yaml()


# ---------------------------------------------------------------- Hugging Face

# The values of the published files; keys without effect on attention are left out, but for a few.
LLAMA = {"model_type": "llama", "rope_theta": 500000.0, "hidden_act": "silu", "attention_bias": False, "torch_dtype": "bfloat16"}
SD3 = {"_class_name": "SD3Transformer2DModel", "sample_size": 128, "patch_size": 2, "attention_head_dim": 64}
HF: dict[str, dict[str, Any]] = {
    "smollm2_135m": {
        **LLAMA,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
    },
    "llama3_2_1b": {
        **LLAMA,
        "hidden_size": 2048,
        "head_dim": 64,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "llama3", "factor": 32.0},
    },
    "llama3_1_8b": {
        **LLAMA,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "gemma_2b": {
        "model_type": "gemma",
        "hidden_size": 2048,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_hidden_layers": 18,
        "num_key_value_heads": 1,
        "max_position_embeddings": 8192,
    },
    "gemma2_2b": {
        "model_type": "gemma2",
        "hidden_size": 2304,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "cache_implementation": "hybrid",
    },
    "gemma3_1b": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "head_dim": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32768,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": None,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000,
    },
    "mistral_7b": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    },
    "qwen3_8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "phi3_mini": {
        "model_type": "phi3",
        "hidden_size": 3072,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "sliding_window": 2047,
    },
    "gpt_oss_20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "deepseek_v3_mla": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 163840,
        "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32},
    },
    "minilm_l6": {
        "model_type": "bert",
        "hidden_size": 384,
        "num_attention_heads": 12,
        "num_hidden_layers": 6,
        "max_position_embeddings": 512,
        "position_embedding_type": "absolute",
    },
    "bert_base": {
        "model_type": "bert",
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "max_position_embeddings": 512,
    },
    "vit_b16": {
        "model_type": "vit",
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "image_size": 224,
        "patch_size": 16,
    },
    "whisper_small": {
        "model_type": "whisper",
        "d_model": 768,
        "encoder_layers": 12,
        "decoder_layers": 12,
        "encoder_attention_heads": 12,
        "decoder_attention_heads": 12,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "num_hidden_layers": 12,
    },
    "stable_diffusion_3_medium": {**SD3, "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536},
    "stable_diffusion_3_5_large": {**SD3, "num_layers": 38, "num_attention_heads": 38, "qk_norm": "rms_norm"},
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_file_says_what_hugging_face_says(path: Path):
    ours, theirs = ao.load_config(path), AttentionConfig.from_hf(HF[path.stem], name=path.stem)
    assert ours.layer_kinds == theirs.layer_kinds
    for kind in ours.kinds:
        facts = ours.layer(kind).model_dump(include=set(LayerConfig.model_fields) - {"operation"})
        assert facts == theirs.layer(kind).model_dump(include=set(facts))
    assert AttentionConfig.from_dict(yaml.safe_load(theirs.to_yaml())) == theirs


def test_from_a_file_or_its_folder(tmp_path: Path):
    folder = tmp_path / "SmolLM2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HF["smollm2_135m"]))
    read = AttentionConfig.from_hf(folder)
    assert read == AttentionConfig.from_hf(folder / "config.json")
    assert (read.name, read.runtime_dtype) == ("SmolLM2", "bfloat16")
    small = read.reduced()
    assert small.build()(*inputs(small.layer())).attention_outputs.shape == (2, 64, 6, 16)


def test_null_is_not_the_default():
    assert AttentionConfig.from_hf({**HF["mistral_7b"], "sliding_window": None}).sliding_window is None
    left_out = {key: value for key, value in HF["mistral_7b"].items() if key != "sliding_window"}
    assert AttentionConfig.from_hf(left_out).sliding_window == (4095, 0)


def left_out(layers: int, heads: int, hidden_size: int, **others: Any) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden_size, **others}


QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28, "use_sliding_window": False}
GEMMA = {"num_key_value_heads": 4, "sliding_window": 4096, "head_dim": 256, "query_pre_attn_scalar": 256}
MLA = {"num_key_value_heads": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
WHISPER_HEADS = {"encoder_attention_heads": 6, "decoder_attention_heads": 6}
LEFT_OUT: dict[str, dict[str, Any]] = {
    "llama": left_out(32, 32, 4096, max_position_embeddings=2048, num_key_value_heads=None, head_dim=None),
    "mistral": left_out(32, 32, 4096, max_position_embeddings=131072, num_key_value_heads=8, head_dim=None, sliding_window=4096),
    "phi3": left_out(32, 32, 3072, max_position_embeddings=4096, num_key_value_heads=None, sliding_window=None),
    "qwen2": left_out(32, 32, 4096, max_position_embeddings=32768, **QWEN),
    "qwen3": left_out(32, 32, 4096, max_position_embeddings=32768, **QWEN, head_dim=128),
    "gemma": left_out(28, 16, 3072, max_position_embeddings=8192, num_key_value_heads=16, head_dim=256),
    "gemma2": left_out(26, 8, 2304, max_position_embeddings=8192, **GEMMA, attn_logit_softcapping=50.0),
    "gemma3_text": left_out(26, 8, 2304, max_position_embeddings=131072, **GEMMA, sliding_window_pattern=6),
    "gpt_oss": left_out(36, 64, 2880, max_position_embeddings=131072, num_key_value_heads=8, head_dim=64, sliding_window=128),
    "deepseek_v3": left_out(61, 128, 7168, max_position_embeddings=4096, **MLA),
    "bert": left_out(12, 12, 768, max_position_embeddings=512, is_decoder=False),
    "vit": left_out(12, 12, 768, image_size=224, patch_size=16),
    "whisper": {
        "encoder_layers": 4,
        "decoder_layers": 4,
        "d_model": 384,
        "max_source_positions": 1500,
        "max_target_positions": 448,
    }
    | WHISPER_HEADS,
    "SD3Transformer2DModel": {"num_layers": 18, "num_attention_heads": 18, "attention_head_dim": 64, "sample_size": 128}
    | {"patch_size": 2},
}
"""What transformers (diffusers, for the last) has where a file leaves a key out."""


def unlike_the_defaults(family: str) -> dict[str, Any]:
    """Return a config in which no key has its default, but for Whisper's heads, which must agree."""
    special = {"num_key_value_heads": 2, "head_dim": 48, "sliding_window": 24, "use_sliding_window": True, "is_decoder": True}
    changed = {key: special.get(key) or 2 * value for key, value in LEFT_OUT[family].items() if key not in WHISPER_HEADS}
    return {"model_type": family, **changed}


def test_the_defaults_of_every_family_are_tested():
    assert set(LEFT_OUT) == set(FAMILIES)


@pytest.mark.parametrize("family", LEFT_OUT)
def test_a_key_left_out_has_the_default_of_its_family(family: str):
    whole = unlike_the_defaults(family)
    for key, default in LEFT_OUT[family].items():
        rest = {name: value for name, value in whole.items() if name != key}
        assert AttentionConfig.from_hf(rest) == AttentionConfig.from_hf({**rest, key: default}), key


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="the package transformers is not installed")
@pytest.mark.filterwarnings("ignore:.*keys that are not known, not read")
@pytest.mark.parametrize("family", [family for family in LEFT_OUT if family != "SD3Transformer2DModel"])
def test_a_key_left_out_is_as_transformers_completes_it(family: str):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    whole = unlike_the_defaults(family)
    for key in (None, *LEFT_OUT[family]):
        rest = {name: value for name, value in whole.items() if name != key}
        completed = CONFIG_MAPPING[family].from_dict(rest).to_dict()
        assert AttentionConfig.from_hf(rest) == AttentionConfig.from_hf(completed), key


def test_windows_of_qwen_start_at_a_layer():
    qwen = {**HF["qwen3_8b"], "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 30}
    kinds = AttentionConfig.from_hf(qwen).layer_kinds
    assert kinds == ("global",) * 30 + ("local",) * 6
    assert AttentionConfig.from_hf({**qwen, "sliding_window": None}).layer_kinds == ("all",) * 36
    with pytest.raises(ao.ConfigError, match="layer_types: found sliding_attention, which use_sliding_window turns off"):
        AttentionConfig.from_hf({**qwen, "use_sliding_window": False, "layer_types": ["sliding_attention"] * 36})


def test_the_text_model_of_a_multimodal_gemma3():
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    gemma3 = AttentionConfig.from_hf({"model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16"})
    assert (gemma3.num_layers, gemma3.num_heads, gemma3.num_kv_heads, gemma3.head_dim) == (34, 8, 4, 256)
    assert gemma3.layer(0).sliding_window == (1023, 0)
    assert gemma3.runtime_dtype == "bfloat16"


def test_a_decoder_made_of_bert_is_causal():
    assert AttentionConfig.from_hf({**HF["bert_base"], "is_decoder": True}).causal


def test_keys_that_are_not_known_are_named():
    with pytest.warns(UserWarning, match=r"keys that are not known, not read: unsloth_fixed, wandb$"):
        AttentionConfig.from_hf({**HF["llama3_1_8b"], "unsloth_fixed": True, "wandb": 1, "unset": None})
    strange = {**HF["llama3_1_8b"], "attention_chunk_size": 8192}
    with pytest.raises(
        ao.ConfigError, match=r"may change attention: attention_chunk_size = 8192 \(int\); .*ignore=\['attention_chunk_size'\]"
    ):
        AttentionConfig.from_hf(strange)
    assert AttentionConfig.from_hf(strange, ignore=["attention_chunk_size"]).num_heads == 32


HF_MISTAKES = {
    "another family": ("llama3_1_8b", {"model_type": "lama"}, r"model_type: found 'lama' \(str\); allowed are llama, "),
    "no family": ("llama3_1_8b", {"model_type": None}, r"model_type: found null; allowed are "),
    "text for a number": (
        "llama3_1_8b",
        {"num_attention_heads": "32"},
        r"num_attention_heads: found '32' \(str\); allowed is a whole",
    ),
    "missing": (
        "llama3_1_8b",
        {"num_hidden_layers": None},
        r"num_hidden_layers: found null; allowed is a whole number of 1 to 10000",
    ),
    "width": (
        "llama3_1_8b",
        {"num_attention_heads": 33},
        r"hidden_size: 4096 is not a multiple of num_attention_heads 33; say head_dim",
    ),
    "groups": (
        "llama3_1_8b",
        {"num_key_value_heads": 5},
        r"num_key_value_heads: found 5 \(int\), which does not divide num_attention_heads 32; allowed: 1, 2, 4, 8, 16, 32$",
    ),
    "groups of latent attention": (
        "deepseek_v3_mla",
        {"num_key_value_heads": 3},
        r"num_key_value_heads: found 3 \(int\), which does not divide num_attention_heads 128; allowed: 1, 2, ",
    ),
    "length": (
        "llama3_1_8b",
        {"max_position_embeddings": 2**40},
        r"max_position_embeddings: found 1099511627776 \(int\); allowed is a whole number of 1 to 2147483647$",
    ),
    "image": ("vit_b16", {"image_size": 10**6}, r"image_size: found 1000000 \(int\); allowed is a whole number of 1 to 32768$"),
    "patch": ("vit_b16", {"patch_size": 225}, r"patch_size: found 225 \(int\); allowed is a whole number of 1 to 224$"),
    "latent image": (
        "stable_diffusion_3_medium",
        {"sample_size": 10**6},
        r"sample_size: found 1000000 \(int\); allowed is a whole number of 1 to 32768$",
    ),
    "a head of two parts": (
        "deepseek_v3_mla",
        {"qk_nope_head_dim": 2**31},
        r"qk_nope_head_dim: found 2147483648 .* 1 to 1048576$",
    ),
    "layers of two stacks": ("whisper_small", {"encoder_layers": 9999}, r"encoder_layers: found 9999 .* 1 to 3333$"),
    "scale": (
        "gemma2_2b",
        {"query_pre_attn_scalar": 10**400},
        r"query_pre_attn_scalar: found a whole number of 1329 bits \(int\); allowed is a number from 1e-30 to 1e30, or null$",
    ),
    "cap of gemma3": (
        "gemma3_1b",
        {"attn_logit_softcapping": 0.5},
        r"attn_logit_softcapping: found 0.5 \(float\): transformers' Gemma 3 has the key and applies no cap .*; allowed is null$",
    ),
    "pattern of gemma2": (
        "gemma2_2b",
        {"sliding_window_pattern": 3},
        r"sliding_window_pattern: found 3 \(int\): transformers' Gemma 2 has a window in every other layer; allowed is 2 or",
    ),
    "a key that is a number": ("llama3_1_8b", {1: 2}, r"found the key 1 \(int\); allowed are keys of text$"),
    "window of zero": (
        "mistral_7b",
        {"sliding_window": 0},
        r"sliding_window: found 0 \(int\); allowed is a whole number of 1 to 2147483647$",
    ),
    "cap": (
        "gemma2_2b",
        {"attn_logit_softcapping": -50.0},
        r"attn_logit_softcapping: found -50.0 \(float\); allowed is a number from 1e-30 to 1e30",
    ),
    "both ways": (
        "gemma3_1b",
        {"use_bidirectional_attention": True},
        r"use_bidirectional_attention: found True \(bool\): attention to later",
    ),
    "layers": (
        "gpt_oss_20b",
        {"layer_types": ["full_attention"]},
        r"layer_types: found 1 entries, full_attention; allowed are 24 entries",
    ),
    "kind": (
        "gpt_oss_20b",
        {"layer_types": ["linear_attention"] * 24},
        r"layer_types: found 24 entries, linear_attention; .*sliding_attention or full",
    ),
    "kinds": ("gpt_oss_20b", {"layer_types": 3}, r"layer_types: found 3 \(int\); allowed are 24 entries"),
    "no window": (
        "gpt_oss_20b",
        {"sliding_window": None},
        r"sliding_window: found null, and there are layers of sliding_attention",
    ),
    "rope": ("deepseek_v3_mla", {"rope_scaling": "yarn"}, r"rope_scaling: found 'yarn' \(str\); allowed is a mapping, or null"),
    "relative": (
        "bert_base",
        {"position_embedding_type": "relative_key"},
        r"position_embedding_type: found 'relative_key' \(str\): relative",
    ),
    "two numbers of heads": (
        "whisper_small",
        {"encoder_attention_heads": 8},
        r"encoder_attention_heads: found 8 \(int\): the decoder has 12",
    ),
    "second attention": (
        "stable_diffusion_3_5_large",
        {"dual_attention_layers": [0, 1]},
        r"dual_attention_layers: found \[0, 1\] \(list\)",
    ),
}


@pytest.mark.parametrize("mistake", HF_MISTAKES)
def test_a_mistake_in_a_hugging_face_file_is_named(mistake: str):
    name, change, message = HF_MISTAKES[mistake]
    with pytest.raises(ao.ConfigError, match=r"^config\.json: " + message):
        AttentionConfig.from_hf({**HF[name], **change})


def test_a_hugging_face_file_that_cannot_be_read(tmp_path: Path):
    path = tmp_path / "config.json"
    contents = {
        b"{\n 1": r":2: is not JSON: ",
        b"[]": r"found \[\] \(list\); allowed is a JSON object",
        b"\xff": "is not UTF-8 text",
    }
    for content, message in contents.items():
        path.write_bytes(content)
        with pytest.raises(ao.ConfigError, match=message):
            AttentionConfig.from_hf(path)
    with pytest.raises(ao.ConfigError, match="cannot be read: No such file"):
        AttentionConfig.from_hf(tmp_path / "none.json")
