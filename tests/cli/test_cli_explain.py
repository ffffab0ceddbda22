"""`explain` and `list`: what is said becomes the request, and the plan is shown whole."""

from __future__ import annotations

import io
import json
import re
import sys

import jax
import jax.numpy as jnp
import pytest

import attention_ops as ao
from attention_ops import masks
from attention_ops.cli import saying
from attention_ops.cli.console import emit, styled, table
from attention_ops.request import DEFAULTS

GEMMA = "configs/gemma2_2b.yaml"
ON_A100 = ("explain", "cudnn_flash", "--shape", "1,4096,8,256", "--kv", "4096,4", "--device", "a100")


def plans(result):
    return json.loads(result.stdout)["plans"]


def only(result):
    (plan,) = plans(result)
    return plan


# ---------------------------------------------------------------- the answer


def test_every_route_is_shown_with_verdict_reason_and_remedy(cli):
    result = cli(*ON_A100, "--dtype", "float32", "--set", "causal=true")
    lines = result.stdout.splitlines()
    assert lines[0] == "cudnn_flash on a100 (cuda, compute capability 8.0, cuDNN 9.10.1) runs flash/gpu"
    assert "request  B 1, T 4096, S 4096, H 8, K 4, D 256, Dv 256, float32" in lines
    assert "needs    causal, gqa, gradient" in lines
    rows = [re.split(r"  +", line) for line in lines]
    assert ["cudnn_flash/cuda", "no", "dtype float32 is not one of bfloat16, float16", "set runtime_dtype=bfloat16"] in rows
    assert ["", "head_dim 256 > 128, the limit on compute capability 8.0"] in rows
    assert ["flash/gpu", "runs"] in rows
    assert ["flash/native", "could run"] in rows
    assert ["vanilla/native", "could run"] in rows
    assert "cudnn_flash cannot take this request; a call warns once and runs flash/gpu" in result.stdout
    assert re.search(r"forward  about [\d.]+ GFLOP, [\d.]+ MiB of temporary memory", result.stdout)


def test_the_plan_is_the_one_of_the_library(cli):
    q, kv = jax.ShapeDtypeStruct((1, 4096, 8, 256), "bfloat16"), jax.ShapeDtypeStruct((1, 4096, 4, 256), "bfloat16")
    expected = ao.plan("cudnn_flash", q, kv, kv, causal=True, device="a100").to_dict()
    found = only(cli(*ON_A100, "--set", "causal", "--json"))
    assert {key: found[key] for key in expected if key != "notes"} == {key: expected[key] for key in expected if key != "notes"}
    assert found["request"]["mask"] == "causal"
    assert found["runs"] is True


def test_no_route_is_exit_code_1_with_all_reasons(cli):
    args = ("explain", "cudnn_flash,sdpa", "--shape", "1,64,4,8", "--set", "softmax_aux=H", "--set", "kv_lengths=yes")
    result = cli(*args, code=1)
    assert result.stdout.startswith("no route of cudnn_flash > sdpa takes this request on cpu\n")
    for reason in ("has no route for cpu, only for cuda", "does not support attention sinks", "does not support q_lengths"):
        assert reason in result.stdout
    found = only(cli(*args, "--json", code=1))
    assert (found["runs"], found["route"], found["requested"]) == (False, None, ["cudnn_flash", "sdpa"])
    assert [decision["route"] for decision in found["decisions"]] == ["cudnn_flash", "sdpa/native"]
    assert len(found["decisions"][1]["reasons"]) == 2


def test_a_fallback_that_the_policy_forbids_is_no_route(cli, tmp_path):
    file = tmp_path / "strict.yaml"
    facts = "num_layers: 1\nnum_heads: 2\nnum_kv_heads: 2\nhead_dim: 8\nmax_length: 64\ncausal: true\n"
    file.write_text(f"name: strict\n{facts}operation: cudnn_flash\nfallback: error\n")
    result = cli("explain", "--config", str(file), code=1)
    assert "the fallback policy is 'error', so a call raises NoRouteError" in result.stdout
    assert cli("explain", "--config", str(file), "--device", "a100").exit_code == 0


def test_every_operation_side_by_side(cli):
    result = cli("explain", "--all", "--shape", "1,4096,8,128", "--set", "causal", "--set", "logits_soft_cap=30")
    for name in ao.OperationRegistry.names():
        assert re.search(rf"^{name} +\w+/native", result.stdout, re.MULTILINE)
    assert re.search(r"^sdpa +flash/native \(fallback\) .* does not support logits_soft_cap$", result.stdout, re.MULTILINE)
    assert [plan["requested"] for plan in plans(cli("explain", "--all", "--shape", "1,8,2,8", "--json"))] == [
        [name] for name in ao.OperationRegistry.names()
    ]


# ---------------------------------------------------------------- who names the operation


def test_without_a_name_the_environment_or_auto_decides(cli, monkeypatch):
    assert only(cli("explain", "--shape", "1,4096,8,64", "--json"))["notes"] == ["name chosen by default"]
    monkeypatch.setenv("ATTENTION_OPS_IMPL", "vanilla")
    found = only(cli("explain", "--shape", "1,4096,8,64", "--json"))
    assert (found["route"], found["notes"]) == ("vanilla/native", ["name chosen by ATTENTION_OPS_IMPL"])
    assert only(cli("explain", "flash", "--shape", "1,4096,8,64", "--json"))["route"] == "flash/native"


# ---------------------------------------------------------------- configs


def test_a_config_is_explained_one_layer_of_each_kind(cli):
    local, other = plans(cli("explain", "--config", GEMMA, "--device", "tpu-v5e", "--json"))
    assert (local["layer"], local["request"]["mask"]) == ("local", "causal & window(4095, 0)")
    assert (other["layer"], other["request"]["mask"]) == ("global", "causal")
    assert local["request"]["T"] == 8192
    assert "SOFT_CAP" in local["request"]["needs"]
    assert local["notes"][0].startswith("name chosen by config gemma2_2b")


def test_what_is_said_wins_over_the_config(cli):
    args = ("explain", "vanilla", "--config", GEMMA, "--layer", "1", "--batch", "2", "--length", "1,512", "--dtype", "float32")
    found = only(cli(*args, "--set", "logits_soft_cap=none", "--json"))
    assert found["requested"] == ["vanilla"]
    assert {name: found["request"][name] for name in "BTS"} == {"B": 2, "T": 1, "S": 512}
    assert found["request"]["dtype"] == "float32"
    assert "SOFT_CAP" not in found["request"]["needs"]


def test_sinks_of_a_config_are_asked_for_unless_refused(cli):
    args = ("explain", "--config", "configs/gpt_oss_20b.yaml", "--layer", "local", "--json")
    assert "SINKS" in only(cli(*args))["request"]["needs"]
    assert "SINKS" not in only(cli(*args, "--set", "softmax_aux=none"))["request"]["needs"]


def test_a_mask_comes_on_top_of_the_chunks_of_a_config(cli, tmp_path):
    file = tmp_path / "chunks.yaml"
    facts = "num_layers: 1\nnum_heads: 2\nnum_kv_heads: 2\nhead_dim: 8\nmax_length: 64\ncausal: true\nchunk_size: 16\n"
    file.write_text(f"name: chunks\n{facts}")
    request = only(cli("explain", "--config", str(file), "--set", "mask=B,1,T,S", "--json"))["request"]
    assert request["mask"] == "causal & chunked(16) & dense[1, 1, 64, 64]"


# ---------------------------------------------------------------- what can be said


def test_every_option_of_a_call_can_be_said():
    assert set(saying.SAYABLE) == set(DEFAULTS) - {"mask_info"}


@pytest.mark.parametrize("name", saying.SAYABLE)
def test_the_example_of_every_option_makes_a_request(cli, name):
    more = ("--set", "dropout_prob=0.1", "--set", "deterministic=no") if name == "dropout_rng" else ()
    example = "sliding_window=3,0" if name == "sliding_window" else f"{name}={saying.SAYABLE[name].example}"
    pair = ("--set", "q_segment_ids=yes") if name == "kv_segment_ids" else ()
    assert cli("explain", "vanilla", "--shape", "2,8,4,16", "--set", example, *more, *pair, "--json").exit_code == 0


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("causal", True),
        ("causal=no", False),
        ("sliding_window=7", 7),
        ("sliding_window=7, none", (7, None)),
        ("sliding_window=none", None),
        ("query_offset=-3", -3),
        ("query_offset=traced", jax.ShapeDtypeStruct((), jnp.int32)),
        ("query_offset=per-row", jax.ShapeDtypeStruct((2,), jnp.int32)),
        ("softmax_scale=0.5", 0.5),
        ("bias=1,H,T,S", jax.ShapeDtypeStruct((1, 4, 8, 16), jnp.bfloat16)),
        ("bias=T,S:float32", jax.ShapeDtypeStruct((8, 16), jnp.float32)),
        ("softmax_aux=H,2", jax.ShapeDtypeStruct((4, 2), jnp.float32)),
        ("kv_segment_ids=yes", jax.ShapeDtypeStruct((2, 16), jnp.int32)),
        ("q_segment_ids=1,T", jax.ShapeDtypeStruct((1, 8), jnp.int32)),
        ("q_lengths=yes", jax.ShapeDtypeStruct((2,), jnp.int32)),
        ("mask=prefix(3) | window(2, 2)", masks.PrefixLM(3) | masks.Window(2, 2)),
    ],
)
def test_settings(setting, value):
    (found,) = saying.options([setting], saying.Sizes(2, 8, 16, 4, 2, 32, 64), "bfloat16").values()
    assert found == value


def test_dropout_that_is_said_brings_a_key(cli):
    found = only(
        cli("explain", "flash", "--shape", "1,8,2,8", "--set", "dropout_prob=0.1", "--set", "deterministic=no", "--json")
    )
    assert found["route"] == "vanilla/native"


def test_float64_is_planned_as_float64(cli):
    assert only(cli("explain", "vanilla", "--shape", "1,8,2,8", "--dtype", "float64", "--json"))["request"]["dtype"] == "float64"
    assert not jax.config.jax_enable_x64


# ---------------------------------------------------------------- list


def test_list_names_routes_features_and_why_not_here(cli):
    lines = cli("list").stdout.splitlines()
    rows = {row[0]: row for row in (re.split(r"  +", line) for line in lines)}
    assert rows["blocksparse"] == [
        "blocksparse",
        "splash, autoregressive_decodeattn",
        "gpu",
        "yes",
        "all but dropout, weights",
    ]
    assert rows["cudnn_flash"][3] == "no: has no route for cpu, only for cuda"
    assert rows["vanilla"][-1] == "everything"
    assert "available on h100" in cli("list", "--device", "h100").stdout


def test_list_as_json(cli):
    found = json.loads(cli("list", "--json", "--device", "a100").stdout)
    cudnn = next(entry for entry in found["operations"] if entry["name"] == "cudnn_flash")
    assert (cudnn["available"], cudnn["runs"], cudnn["aliases"]) == (True, "cudnn_flash/cuda", ["cudnn", "cuda_flash_attn2"])
    assert "CAUSAL" in cudnn["routes"][0]["supports"]
    assert "dtype bfloat16 or float16" in cudnn["routes"][0]["limits"]
    assert found["unavailable"] == {}


def test_a_broken_plugin_is_listed_with_its_error(cli, monkeypatch):
    monkeypatch.setattr(ao.OperationRegistry, "unavailable", staticmethod(lambda: {"mine": "ImportError: no [thing]"}))
    assert "plug-in mine is unavailable: ImportError: no [thing]" in cli("list").stdout


def test_an_operation_of_ones_own_is_loaded_from_a_file(cli, registry, tmp_path):
    file = tmp_path / "plain_mean.py"
    file.write_text(
        "import attention_ops as ao\n\n\n@ao.OperationRegistry.register\nclass Mean(ao.OperationImpl):\n"
        '    """A mean."""\n\n    name = "plain_mean"\n\n    def forward_native(self, request):\n        return request.value\n'
    )
    assert re.search(r"^plain_mean +native +yes +plain query, key, value$", cli("list", "--load", str(file)).stdout, re.MULTILINE)
    result = cli("explain", "plain_mean", "--load", str(file), "--shape", "1,8,2,8", code=1)
    assert "does not support gradients (differentiable=True)" in result.stdout


# ---------------------------------------------------------------- where it is printed


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colour_only_at_a_terminal_that_wants_it(monkeypatch, variables, coloured):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in ({"TERM": "xterm-256color", "COLUMNS": "40"} | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Terminal())
    rows = table("route", "reason")
    reason = "a reason of [more] words than one line of forty columns can hold"
    rows.add_row(styled("flash/native", "green"), reason)
    emit(rows)
    printed = sys.stdout.getvalue()
    assert ("\x1b[" in printed) == coloured
    words = re.sub(r"\x1b\[[0-9;]*m", "", printed).split()
    body = [word for word in words if word not in ("route", "flash/native") and set(word) != {"─"}]
    assert body == ["reason", *reason.split()]
    assert "…" not in printed


def test_a_pipe_gets_each_row_on_one_line_whatever_its_encoding(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    rows = table("route", "reason")
    rows.add_row("flash/native", "word " * 100)
    emit(rows)
    assert ("word " * 100).strip() in raw.getvalue().decode("ascii")


# ---------------------------------------------------------------- a mesh


def test_a_mesh_shows_local_shapes_specs_and_what_moves(cli):
    said = ("explain", "ring", "--shape", "8,4096,16,128", "--kv", "4096,8", "--set", "causal", "--mesh", "dp=2,tp=4,sp=2")
    lines = [re.split(r"  +", line.strip()) for line in cli(*said).stdout.splitlines()]
    assert ["query", "[8, 4096, 16, 128]", "P('dp', 'sp', 'tp', None)", "[4, 2048, 4, 128]"] in lines
    assert ["key", "[8, 4096, 8, 128]", "P('dp', 'sp', 'tp', None)", "[4, 2048, 2, 128]"] in lines
    assert ["keys and values, one part a hop", "8 MiB", "1", "8 MiB"] in lines
    order, hops = only(cli(*said, "--json"))["mesh"]["transfers"]
    assert hops == {"what": "keys and values, one part a hop", "bytes": 4 * 2048 * 2 * 256 * 2, "steps": 1}
    assert (order["bytes"], order["steps"]) == (4 * 2048 * (4 + 2) * 256 * 2, 2)


@pytest.mark.parametrize(
    ("name", "length", "bytes_and_steps"),
    [
        ("flash", 64, [(2 * 48 * 4 * 32 * 4, 1)]),
        ("ring", 64, [(2 * 48 * 4 * 32 * 4, 3)]),
        ("ulysses", 64, [(2 * 16 * 4 * 32 * 4 * 3 // 4, 2), (2 * 16 * 4 * 32 * 4 * 3 // 4, 1)]),
        ("flash", 1, [(2 * 4 * 4 * 3, 1), (2 * 2 * 4 * 16 * 4 * 3 // 4, 1)]),
    ],
)
def test_what_each_device_receives(cli, name, length, bytes_and_steps):
    said = ("explain", name, "--shape", f"2,{length},4,16", "--kv", "64,4", "--dtype", "float32", "--mesh", "sp=4", "--json")
    found = only(cli(*said))["mesh"]["transfers"]
    assert [(transfer["bytes"], transfer["steps"]) for transfer in found] == bytes_and_steps


def test_what_does_not_divide_is_a_note(cli):
    text = cli("explain", "flash", "--shape", "1,64,6,16", "--mesh", "dp=8,tp=4").stdout
    assert "batch size 1 is not split over 'dp' of 8 devices, which does not divide it: replicated" in " ".join(text.split())


@pytest.mark.parametrize("mesh", ["dp", "dp=0", "dp=2,dp=2", "2=dp", "dp=two"])
def test_a_mesh_that_is_none(cli, mesh):
    result = cli("explain", "flash", "--shape", "1,64,8,16", "--mesh", mesh, code=2)
    assert "allowed are axes of the mesh, each once, with their sizes, as in dp=2,tp=4,sp=2" in " ".join(result.output.split())
