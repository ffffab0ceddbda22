"""The real SmolLM2-135M-Instruct through the registry, against Hugging Face transformers on the same weights.

The fixture is written by examples/make_smollm2_fixture.py. Nothing here is skipped: without the model the
tests fail and say what to install.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import environment_of_users

import attention_ops as ao

pytestmark = pytest.mark.usefixtures("optimised")

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "smollm2_135m.yaml"
PROMPTS = ("capital", "long", "story")
NAN = float("nan")  # what unwritten cache slots hold here: it may reach no output

# Both sides compute in float32 and differ in the order of their sums: 4e-5 measured, logits from -20 to 30.
# Small mistakes are far above that: norm epsilon 1e-6 for 1e-5 gives 1e-3 to 5e-3, a softmax scale off by
# 0.1% 4e-3 to 2e-2, q, k and v rounded to bfloat16 5e-2, a wrong rotary order or causal edge 4 and more.
TOLERANCE = 5e-4


@pytest.fixture(scope="module")
def smollm2() -> ModuleType:
    return _example("smollm2")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return _example("smollm2_generate")


def _example(name: str) -> ModuleType:
    if str(ROOT / "examples") not in sys.path:
        sys.path.insert(0, str(ROOT / "examples"))
    script = importlib.import_module("smollm2_generate")
    missing = [package for package in script.NEEDS if importlib.util.find_spec(package) is None]
    if missing:
        pytest.fail(f"not installed: {', '.join(missing)}. {script.INSTALL}", pytrace=False)
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def model(smollm2: ModuleType) -> Any:
    return smollm2.load(smollm2.gguf_path())


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    return dict(np.load(ROOT / "tests" / "fixtures" / "smollm2_logits.npz"))


@pytest.fixture(scope="module")
def words(expected: dict[str, np.ndarray]) -> dict[str, Any]:
    return json.loads(str(expected["words"]))


def _operation(name: str) -> Any:
    return ao.OperationRegistry.create(name, ao.OperationMetadata(fallback="silent"))


def _assert_logits(logits: np.ndarray, expected: dict[str, np.ndarray], prompt: str) -> None:
    facts = {key.removeprefix(f"{prompt}."): value for key, value in expected.items()}
    statistics = [logits.mean(), logits.std(), logits.min(), logits.max(), jax.nn.logsumexp(logits)]
    np.testing.assert_allclose(logits[facts["top_indices"]], facts["top_logits"], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(logits[::32], facts["strided_logits"], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(statistics, facts["statistics"], rtol=0, atol=TOLERANCE)


def test_tokenizer_agrees_with_llama_cpp(model: Any, words: dict[str, Any]) -> None:
    for text, tokens in words["tokenized"]:
        assert model.tokenizer.encode(text).ids == tokens, text
        assert model.tokenizer.decode(tokens, skip_special_tokens=False) == text


def test_chat_is_the_files_own_template(
    smollm2: ModuleType, model: Any, expected: dict[str, np.ndarray], words: dict[str, Any]
) -> None:
    for name, prompt in words["chats"].items():
        assert model.tokenizer.encode(smollm2.chat(prompt)).ids == expected[f"{name}.tokens"].tolist()


def test_config_describes_the_file(smollm2: ModuleType, model: Any) -> None:
    smollm2.check_geometry(model.architecture, ao.load_config(CONFIG))
    with pytest.raises(ValueError, match="num_layers is 16, and the model file has 30"):
        smollm2.check_geometry(model.architecture, ao.load_config(CONFIG.with_name("llama3_2_1b.yaml")))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_last_logits_equal_hugging_face(smollm2: ModuleType, model: Any, expected: dict[str, np.ndarray], prompt: str) -> None:
    attend = ao.load_config(CONFIG).build()
    cache = smollm2.empty_cache(model.architecture, 256, NAN)
    tokens = jnp.asarray(expected[f"{prompt}.tokens"])[None]
    prefill = jax.jit(lambda w, t, c: smollm2.forward(model.architecture, attend, w, t, 0, c))
    logits, _ = prefill(model.weights, tokens, cache)
    _assert_logits(np.asarray(logits[0]), expected, prompt)


def test_decoding_equals_prefill(smollm2: ModuleType, model: Any, expected: dict[str, np.ndarray]) -> None:
    """The long prompt's last 8 tokens fed one at a time give the logits of the whole prompt at once."""
    attend = ao.load_config(CONFIG).build()
    tokens, split = jnp.asarray(expected["long.tokens"])[None], -8

    def forward(weights: Any, tokens: Any, position: Any, cache: Any) -> Any:
        return smollm2.forward(model.architecture, attend, weights, tokens, position, cache)

    step = jax.jit(forward)
    cache = smollm2.empty_cache(model.architecture, 256, NAN)
    _, cache = step(model.weights, tokens[:, :split], 0, cache)
    for position in range(tokens.shape[1] + split, tokens.shape[1]):
        logits, cache = step(model.weights, tokens[:, position : position + 1], position, cache)
    _assert_logits(np.asarray(logits[0]), expected, "long")


def _routes(smollm2: ModuleType, model: Any, attend: Any, prompt: list[int]) -> tuple[str, ...]:
    """Return the routes of prefill and of decoding. Nothing is compiled."""
    forward = partial(smollm2.forward, model.architecture, attend)
    cache = smollm2.empty_cache(model.architecture, 256)
    with ao.record_plans() as plans:
        jax.eval_shape(lambda *a: forward(a[0], a[1], 0, a[2]), model.weights, jnp.asarray([prompt]), cache)
        jax.eval_shape(forward, model.weights, jnp.asarray([prompt[:1]]), jnp.asarray(len(prompt)), cache)
    return tuple(plan.route for plan in plans)


@pytest.fixture(scope="module")
def written() -> dict[tuple[str, ...], list[int]]:
    """What was written, by routes: names that lead to the same routes share it, because compiling takes seconds."""
    return {}


@pytest.mark.parametrize("name", ao.OperationRegistry.names())
def test_every_operation_writes_hugging_faces_text(
    smollm2: ModuleType, model: Any, expected: dict[str, np.ndarray], written: dict[tuple[str, ...], list[int]], name: str
) -> None:
    prompt, text = expected["long.tokens"].tolist(), expected["long.greedy"].tolist()
    routes = _routes(smollm2, model, _operation(name), prompt)
    if name in ("vanilla", "flash", "blocksparse"):
        assert {route.partition("/")[0] for route in routes} == {name}
    if routes not in written:
        with ao.record_plans() as plans:
            written[routes] = list(smollm2.greedy(model, _operation(name), prompt, len(text), NAN))
        assert [(plan.spec.T, plan.route) for plan in plans] == [*zip((len(prompt), 1), routes, strict=True)]  # once each
        assert {plan.requested for plan in plans} == {(name,)}
    assert written[routes] == text


def test_the_script_answers() -> None:
    options = ["--config", str(CONFIG), "--impl", "blocksparse", "--max-tokens", "16", "--explain"]
    command = [sys.executable, "examples/smollm2_generate.py", *options, "What is the capital of France?"]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, cwd=ROOT, env=environment_of_users() | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answer, *explanation = done.stdout.splitlines()
    assert answer == "The capital of France is Paris."
    assert "blocksparse/" in "".join(explanation)


def test_a_missing_package_is_one_line(
    generate: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate.importlib.util, "find_spec", lambda name: None)
    assert generate.main(["a prompt"]) == 2
    line = f"not installed: {', '.join(generate.NEEDS)}. {generate.INSTALL}"
    assert capsys.readouterr().err.splitlines() == [line]


def test_an_unknown_operation_is_refused(generate: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--impl", "blokspars", "a prompt"]) == 2
    assert "blocksparse" in capsys.readouterr().err
