"""Which of six models get a fused kernel, for inference as the published table has it: planned without any of the devices."""

from __future__ import annotations

import json
import pathlib

import pytest
from click.testing import CliRunner

from attention_ops.cli import main

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
HEAD_DIM = "head_dim 256 > 128, the limit on compute capability 8.0"
SOFT_CAP = "does not support logits_soft_cap"
MODELS = {
    "gemma_2b": (HEAD_DIM,),
    "gemma2_2b": (SOFT_CAP, HEAD_DIM),
    "gemma3_1b": (HEAD_DIM,),
    "llama3_2_1b": (),
    "stable_diffusion_3_medium": (),
    "stable_diffusion_3_5_large": (),
}
"""Why cuDNN refuses each on an A100; nothing where it does not."""


def _explained(model, operation, device, differentiable="false"):
    """Return what the command says, one plan per kind of layer."""
    words = [operation, "--config", str(CONFIGS / f"{model}.yaml"), "--device", device]
    result = CliRunner().invoke(main, ["explain", *words, "--set", f"differentiable={differentiable}", "--json"])
    assert result.exit_code == 0, result.output
    plans = json.loads(result.output)["plans"]
    assert plans
    return plans


def _reasons(plan):
    return tuple(reason["text"] for reason in plan["decisions"][0]["reasons"])


@pytest.mark.parametrize("model", MODELS)
def test_cudnn_on_an_a100(model):
    for plan in _explained(model, "cudnn_flash", "a100"):
        assert _reasons(plan) == MODELS[model]
        assert plan["route"] == ("flash/gpu" if MODELS[model] else "cudnn_flash/cuda")  # Gemma gets a fused kernel all the same


@pytest.mark.parametrize("model", MODELS)
def test_cudnn_on_an_h100_takes_head_dim_256(model):
    for plan in _explained(model, "cudnn_flash", "h100"):
        assert _reasons(plan) == ((SOFT_CAP,) if model == "gemma2_2b" else ())
        assert plan["route"] == ("flash/gpu" if model == "gemma2_2b" else "cudnn_flash/cuda")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("differentiable", ["false", "true"])
def test_splash_on_a_tpu(model, differentiable):
    for plan in _explained(model, "blocksparse", "tpu-v5e", differentiable):
        assert (plan["route"], _reasons(plan)) == ("blocksparse/tpu", ())


def test_training_of_stable_diffusion_has_an_odd_length():
    """4429 tokens: JAX lets cuDNN train even lengths only, and the plan says what to do."""
    (plan,) = _explained("stable_diffusion_3_medium", "cudnn_flash", "a100", "true")
    assert _reasons(plan) == ("query length 4429, key length 4429: training needs both even",)
    assert plan["decisions"][0]["reasons"][0]["remedy"].startswith("pad by one and pass q_lengths and kv_lengths")
    assert plan["route"] == "flash/gpu"
