"""The real all-MiniLM-L6-v2 through the registry, against sentence-transformers and transformers on the same weights.

The fixture is written by examples/make_minilm_fixture.py. Nothing here is skipped: without the model the
tests fail and say what to install.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
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
CONFIG = ROOT / "configs" / "minilm_l6.yaml"
DIRECT = ("vanilla", "flash", "blocksparse")  # those that take padding themselves
PETS = ["A cat sits on the mat.", "A kitten lies on a rug.", "Shares fell on Monday."]

# Both sides compute in float32 and differ in the order of their sums: 4e-6 measured on token embeddings (up to 2.4 in size),
# 2e-7 on those of sentences. Small mistakes are far above the bounds: a softmax scale off by 0.1% gives 3e-3 and 2e-4, norm
# epsilon 1e-5 for 1e-12 1e-3 and 1e-4, GELU by tanh 4e-3 and 3e-4, one key of padding seen 1 and 0.1.
TOKEN_TOLERANCE = 4e-5
SENTENCE_TOLERANCE = 3e-6


@pytest.fixture(scope="module")
def minilm() -> ModuleType:
    if str(ROOT / "examples") not in sys.path:
        sys.path.insert(0, str(ROOT / "examples"))
    script = importlib.import_module("minilm_embed")
    missing = [package for package in script.NEEDS if importlib.util.find_spec(package) is None]
    if missing:
        pytest.fail(f"not installed: {', '.join(missing)}. {script.INSTALL}", pytrace=False)
    return script


@pytest.fixture(scope="module")
def model(minilm: ModuleType) -> Any:
    return minilm.load(minilm.model_path())


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    return dict(np.load(ROOT / "tests" / "fixtures" / "minilm.npz"))


@pytest.fixture(scope="module")
def words(expected: dict[str, np.ndarray]) -> dict[str, Any]:
    return json.loads(str(expected["words"]))


def _operation(name: str) -> Any:
    return ao.OperationRegistry.create(name, ao.OperationMetadata(fallback="silent"))


def _with_mask(name: str) -> Callable[..., Any]:
    """The operation, told of the padding by a boolean mask [B, 1, 1, S] instead of lengths."""
    operation = _operation(name)

    def attend(query: Any, key: Any, value: Any, *, kv_lengths: Any, **options: Any) -> Any:
        mask = jnp.arange(key.shape[1]) < kv_lengths[:, None]
        return operation(query, key, value, mask=mask[:, None, None, :], **options)

    return attend


def _encoder(minilm: ModuleType, model: Any, attend: Callable[..., Any]) -> Callable[[Any, Any], tuple[Any, Any]]:
    """A function of tokens and lengths that gives the embeddings of all real tokens, and of the sentences."""

    @jax.jit
    def run(weights: Any, tokens: Any, lengths: Any) -> Any:
        hidden = minilm.token_embeddings(model, attend, weights, tokens, lengths)
        return hidden, minilm.pooled(hidden, lengths)

    def encode(tokens: Any, lengths: Any) -> tuple[Any, Any]:
        hidden, vectors = run(model.weights, tokens, lengths)
        return np.concatenate([rows[:length] for rows, length in zip(np.asarray(hidden), lengths, strict=True)]), vectors

    return encode


def _assert_embeddings(results: tuple[Any, Any], expected: dict[str, np.ndarray], words: dict[str, Any]) -> None:
    hidden, vectors = results
    np.testing.assert_allclose(hidden[:, :: words["stride"]], expected["token_embeddings"], rtol=0, atol=TOKEN_TOLERANCE)
    np.testing.assert_allclose(vectors, expected["embeddings"], rtol=0, atol=SENTENCE_TOLERANCE)


def test_tokens_are_those_of_sentence_transformers(
    minilm: ModuleType, model: Any, expected: dict[str, np.ndarray], words: dict[str, Any]
) -> None:
    """Among the sentences are an empty one, other scripts, and one that is cut at 256 tokens."""
    tokens, lengths = minilm.padded(model, words["sentences"])
    assert lengths.tolist() == expected["lengths"].tolist()
    assert sorted({2, 256} & set(lengths.tolist())) == [2, 256]
    assert np.concatenate([row[:length] for row, length in zip(tokens, lengths, strict=True)]).tolist() == (
        expected["tokens"].tolist()
    )


@pytest.mark.parametrize("name", ao.OperationRegistry.names())
def test_every_operation_gives_the_embeddings_of_sentence_transformers(
    minilm: ModuleType, model: Any, expected: dict[str, np.ndarray], words: dict[str, Any], name: str
) -> None:
    with ao.record_plans() as plans:
        results = _encoder(minilm, model, _operation(name))(*minilm.padded(model, words["sentences"]))
    _assert_embeddings(results, expected, words)
    assert {plan.requested for plan in plans} == {(name,)}
    assert all(ao.Feature.LENGTHS in plan.spec.features for plan in plans)
    if name in DIRECT:
        assert {plan.operation for plan in plans} == {name}


@pytest.mark.parametrize("name", DIRECT)
def test_a_boolean_mask_gives_the_same(
    minilm: ModuleType, model: Any, expected: dict[str, np.ndarray], words: dict[str, Any], name: str
) -> None:
    with ao.record_plans() as plans:
        results = _encoder(minilm, model, _with_mask(name))(*minilm.padded(model, words["sentences"]))
    _assert_embeddings(results, expected, words)
    assert all(ao.Feature.MASK in plan.spec.features and plan.operation == name for plan in plans)


@pytest.mark.parametrize("name", ["vanilla", "blocksparse"])
def test_padding_reaches_nothing(minilm: ModuleType, model: Any, words: dict[str, Any], name: str) -> None:
    """Other words in the padding's place change no bit, and a sentence alone has the embedding it has in a batch."""
    tokens, lengths = minilm.padded(model, words["sentences"][:5])
    encode = _encoder(minilm, model, _operation(name))
    _, vectors = encode(tokens, lengths)
    noise = np.random.default_rng(0).integers(1000, 20000, tokens.shape, np.int32)
    real = np.arange(tokens.shape[1]) < lengths[:, None]
    np.testing.assert_array_equal(encode(np.where(real, tokens, noise), lengths)[1], vectors)
    alone = [encode(tokens[row : row + 1], lengths[row : row + 1])[1][0] for row in range(5)]
    np.testing.assert_allclose(alone, vectors, rtol=0, atol=SENTENCE_TOLERANCE)


def test_config_describes_the_model(minilm: ModuleType, model: Any) -> None:
    minilm.check_geometry(model, ao.load_config(CONFIG))
    with pytest.raises(ValueError, match="num_layers is 12, and the model has 6"):
        minilm.check_geometry(model, ao.load_config(CONFIG.with_name("bert_base.yaml")))


def test_the_script_prints_a_table() -> None:
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "examples/minilm_embed.py", "--config", str(CONFIG), "--impl", "flash", "--explain", *PETS]
    done = subprocess.run(
        command, cwd=ROOT, env=environment_of_users() | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split("│")[2:-1] for line in done.stdout.splitlines() if line.startswith("│")]
    assert [row[0].strip() for row in rows] == PETS
    assert [[float(cell) for cell in row[1:]] for row in rows] == [[1.0, 0.56, 0.04], [0.56, 1.0, 0.07], [0.04, 0.07, 1.0]]
    assert "flash on cpu runs flash/native" in done.stdout
    assert "name chosen by attention_ops.use" in done.stdout


def test_a_table_shows_text_as_it_is(minilm: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """No markup, no line breaks, however many columns."""
    sentences = ["[bold]one[/bold]", "two\nlines", *map(str, range(3, 31))]
    minilm.show(sentences, np.eye(30))
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert len(rows) == 30
    assert "[bold]one[/bold]" in rows[0]
    assert "two lines" in rows[1]
    assert rows[29].count("0.00") == 29


def test_a_missing_package_is_one_line(
    minilm: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(minilm.importlib.util, "find_spec", lambda name: None)
    assert minilm.main(["a sentence"]) == 2
    line = f"not installed: {', '.join(minilm.NEEDS)}. {minilm.INSTALL}"
    assert capsys.readouterr().err.splitlines() == [line]


def test_an_unknown_operation_is_refused(minilm: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert minilm.main(["--impl", "blokspars", "a sentence"]) == 2
    assert "blocksparse" in capsys.readouterr().err
