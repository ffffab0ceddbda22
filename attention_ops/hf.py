"""Hugging Face `config.json` files, read as attention configs by `AttentionConfig.from_hf`.

What a key means, and what holds where a file leaves it out, is as in the configuration and modelling files of transformers 5
(`transformers/models/*/`) and in diffusers' `SD3Transformer2DModel`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from attention_ops.config_errors import Place, file_name, indivisible, shown
from attention_ops.errors import ConfigError, closest_first
from attention_ops.request import LARGEST, SMALLEST

Facts = dict[str, Any]
MAX_BYTES = 10_000_000
"""Largest file that is read."""
_MOST = 2**31 - 1

_WITHOUT_EFFECT = """
_attn_implementation_autoset _class_name _diffusers_version _name_or_path activation_dropout activation_function
apply_spec_augment architectures attention_bias attention_dropout attention_probs_dropout_prob auto_map aux_loss_alpha
begin_suppress_tokens boi_token_index bos_token_id cache_implementation caption_projection_dim chunk_size_feed_forward
classifier_dropout classifier_proj_size decoder_ffn_dim decoder_layerdrop decoder_start_token_id dropout embd_pdrop
encoder_ffn_dim encoder_layerdrop encoder_stride eoi_token_index eos_token_id ep_size experts_per_token
final_logit_softcapping first_k_dense_replace forced_decoder_ids gradient_checkpointing hidden_act hidden_activation
hidden_dropout_prob hidden_size id2label image_token_index in_channels init_std initial_context_length
initializer_factor initializer_range intermediate_size is_encoder_decoder joint_attention_dim kv_lora_rank label2id
layer_norm_eps mask_feature_length mask_feature_min_masks mask_feature_prob mask_time_length mask_time_min_masks
mask_time_prob max_length median_filter_width mlp_bias mm_tokens_per_image model_type moe_intermediate_size
moe_layer_freq n_group n_routed_experts n_shared_experts norm_topk_prob num_channels num_experts_per_tok num_hidden_layers
num_local_experts num_mel_bins num_mtp_layers num_nextn_predict_layers original_max_position_embeddings out_channels
output_attentions output_hidden_states output_router_logits pad_token_id partial_rotary_factor pooled_projection_dim
pooler_act pooler_output_size pos_embed_max_size pretraining_tp problem_type q_lora_rank qk_norm qkv_bias
quantization_config resid_pdrop return_dict rms_norm_eps rope_interleave rope_local_base_freq rope_parameters
rope_scaling rope_theta routed_scaling_factor router_aux_loss_coef scale_embedding scoring_func seq_aux
suppress_tokens swiglu_alpha swiglu_limit tie_word_embeddings tokenizer_class topk_group topk_method
transformers_version type_vocab_size use_cache use_weighted_layer_sum vision_config vocab_size
"""
WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())
"""Keys that leave the attention call as it is: they act before it or after it, or in training only."""

_SUSPECT = re.compile(r"att(ention|n)|head|window|cap(ping)?$|sink|mask|chunk|causal|layer_types|scal|alibi|bias|bidirection")
"""A key that looks like this may change what attention computes, so one that is not known is refused."""

_KINDS = {"sliding_attention": "local", "full_attention": "global"}
_DTYPES = ("float16", "bfloat16", "float32", "float64")
_SD3_TEXT_TOKENS = 77 + 256
"""CLIP's tokens and T5's, as many as diffusers' pipeline makes by default."""


class Keys:
    """The keys of a `config.json`. Remembers which were read, so that the others can be named."""

    def __init__(self, data: Mapping[str, Any], defaults: Mapping[str, Any], place: Place):
        self.data, self.defaults, self.place, self.seen = data, defaults, place, set[str]()

    def get(self, key: str) -> Any:
        """Return a value. A key left out has transformers' default; null is null: Mistral v0.3 has no window."""
        self.seen.add(key)
        return self.data.get(key, self.defaults.get(key))

    def found(self, key: str) -> str:
        value = shown(self.get(key))
        return f"found {value}" if key in self.data else f"is left out, and its default is {value}"

    def count(self, key: str, least: int = 1, most: int = _MOST) -> int:
        value = self.get(key)
        if type(value) is not int or not least <= value <= most:
            raise self.error(key, f"{self.found(key)}; allowed is a whole number of {least} to {most}")
        return value

    def layers(self, key: str) -> int:
        return self.count(key, most=10_000)

    def positive(self, key: str) -> float | None:
        value = self.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and SMALLEST <= value <= LARGEST):
            raise self.error(key, f"{self.found(key)}; allowed is a number from 1e-30 to 1e30, or null")
        return value

    def only(self, key: str, *accepted: Any, why: str) -> None:
        value = self.get(key)
        if value not in (None, *accepted):
            raise self.error(key, f"{self.found(key)}: {why}; allowed is {' or '.join(map(str, (*accepted, 'null')))}")

    def error(self, key: str, sentence: str) -> ConfigError:
        return ConfigError(self.place.at((key,), sentence))


# ---------------------------------------------------------------- families


def _heads(keys: Keys, width: str = "hidden_size", heads: str = "num_attention_heads") -> Facts:
    number = keys.count(heads)
    if keys.get("head_dim") is None and keys.count(width) % number:
        raise keys.error(width, f"{keys.count(width)} is not a multiple of {heads} {number}; say head_dim")
    return {
        "num_heads": number,
        "num_kv_heads": _kv_heads(keys, heads),
        "head_dim": keys.count(width) // number if keys.get("head_dim") is None else keys.count("head_dim"),
    }


def _kv_heads(keys: Keys, heads: str = "num_attention_heads") -> int:
    number, key = keys.count(heads), "num_key_value_heads"
    if keys.get(key) is None:
        return number
    if number % keys.count(key):
        raise keys.error(key, f"{keys.found(key)}, {indivisible(heads, number)}")
    return keys.count(key)


def _decoder(keys: Keys) -> Facts:
    """Read Llama and its relatives: every layer attends all earlier positions."""
    layers, length = keys.layers("num_hidden_layers"), keys.count("max_position_embeddings")
    return {"num_layers": layers, **_heads(keys), "max_length": length, "causal": True}


def _window(keys: Keys) -> Facts:
    """n keys with the query itself: n - 1 before it."""
    return {"sliding_window": None if keys.get("sliding_window") is None else (keys.count("sliding_window") - 1, 0)}


def _windowed(keys: Keys) -> Facts:
    """Read Mistral and Phi-3: the window, where there is one, is in every layer."""
    return _decoder(keys) | _window(keys)


def _layered(keys: Keys, is_local: Callable[[int], bool]) -> Facts:
    """Read layers with and without a window: as `layer_types` has them, else as `is_local` says."""
    facts, given = _decoder(keys), keys.get("layer_types")
    layers = facts["num_layers"]
    if given is None:
        kinds = ["local" if is_local(layer) else "global" for layer in range(layers)]
    elif not isinstance(given, list) or len(given) != layers or not all(kind in _KINDS for kind in map(str, given)):
        entries = (
            f"{len(given)} entries, {', '.join(dict.fromkeys(map(str, given)))}" if isinstance(given, list) else shown(given)
        )
        allowed = f"{layers} entries (num_hidden_layers), each {' or '.join(_KINDS)}"
        raise keys.error("layer_types", f"found {entries}; allowed are {allowed}")
    else:
        kinds = [_KINDS[kind] for kind in given]
    window = _window(keys)
    if "local" in kinds and window["sliding_window"] is None:
        raise keys.error("sliding_window", "found null, and there are layers of sliding_attention; allowed is 1 or more")
    if "global" not in kinds:
        return facts | window
    if "local" not in kinds:
        return facts
    return facts | {"layer_types": {kind: window if kind == "local" else {} for kind in kinds}} | pattern_of(kinds)


def pattern_of(kinds: list[str]) -> Facts:
    """Return the shortest pattern, with its tail, that gives the kinds of layers in order."""
    size = next(n for n in range(1, len(kinds) + 1) if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    return {"pattern": kinds[:size], "pattern_tail": kinds[len(kinds) - len(kinds) % size :]}


def _qwen(keys: Keys) -> Facts:
    window, on, first = keys.get("sliding_window"), keys.get("use_sliding_window"), keys.count("max_window_layers", least=0)
    kinds = keys.get("layer_types")
    if not on and isinstance(kinds, list) and "sliding_attention" in kinds:
        raise keys.error("layer_types", "found sliding_attention, which use_sliding_window turns off; allowed is full_attention")
    return _layered(keys, lambda layer: bool(on) and window is not None and layer >= first)


def _gemma(keys: Keys) -> Facts:
    keys.only("use_bidirectional_attention", False, why="attention to later positions is not read")
    return _decoder(keys)


def _periodic(keys: Keys, period: int) -> Facts:
    """Read Gemma 2 and 3: `period` - 1 layers with a window, then one without."""
    keys.only("use_bidirectional_attention", False, why="attention to later positions is not read")
    keys.seen.add("_sliding_window_pattern")
    scalar = keys.positive("query_pre_attn_scalar")
    facts = _layered(keys, lambda layer: (layer + 1) % period != 0)
    scale = None if scalar is None else scalar**-0.5
    return facts | {"softmax_scale": scale, "logits_soft_cap": keys.positive("attn_logit_softcapping")}


def _gemma2(keys: Keys) -> Facts:
    keys.only("sliding_window_pattern", 2, why="transformers' Gemma 2 has a window in every other layer")
    return _periodic(keys, 2)


def _gemma3(keys: Keys) -> Facts:
    keys.only("attn_logit_softcapping", why="transformers' Gemma 3 has the key and applies no cap in attention")
    return _periodic(keys, keys.count("sliding_window_pattern"))


def _gpt_oss(keys: Keys) -> Facts:
    return _layered(keys, lambda layer: layer % 2 == 0) | {"sinks": True}


def _deepseek(keys: Keys) -> Facts:
    """Read multi-head latent attention with keys and values decompressed, as in training and prefill."""
    width = keys.count("qk_nope_head_dim", most=2**20) + keys.count("qk_rope_head_dim", most=2**20)
    keys.seen |= {"head_dim", "qk_head_dim"}  # derived: the rotary part, and `width`
    key = "rope_scaling" if keys.get("rope_parameters") is None else "rope_parameters"
    rope = keys.get(key) or {}
    if not isinstance(rope, Mapping):
        raise keys.error(key, f"found {shown(rope)}; allowed is a mapping, or null")
    inner, scale = Keys(rope, {"factor": 1.0}, keys.place), None
    mscale, factor = inner.positive("mscale_all_dim") if rope.get("mscale_all_dim") else None, inner.positive("factor") or 1.0
    if mscale and rope.get("rope_type", rope.get("type", "default")) != "default":
        scale = width**-0.5 * (0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0) ** 2
    return {
        "num_layers": keys.layers("num_hidden_layers"),
        "num_heads": keys.count("num_attention_heads"),
        "num_kv_heads": _kv_heads(keys),
        "head_dim": width,
        "value_head_dim": keys.count("v_head_dim"),
        "max_length": keys.count("max_position_embeddings"),
        "causal": True,
        "softmax_scale": scale,
    }


def _bert(keys: Keys) -> Facts:
    keys.only("position_embedding_type", "absolute", why="relative positions act inside attention and are not read")
    keys.only("add_cross_attention", False, why="cross attention is not read")
    return _decoder(keys) | {"causal": bool(keys.get("is_decoder"))}


def _vit(keys: Keys) -> Facts:
    tokens = _patches(keys, "image_size") + 1
    return {"num_layers": keys.layers("num_hidden_layers"), **_heads(keys), "max_length": tokens, "causal": False}


def _patches(keys: Keys, size: str) -> int:
    side = keys.count(size, most=2**15)
    return (side // keys.count("patch_size", most=side)) ** 2


def _whisper(keys: Keys) -> Facts:
    heads = keys.count("decoder_attention_heads")
    keys.count("encoder_attention_heads")
    keys.only("encoder_attention_heads", heads, why=f"the decoder has {heads} heads, and one config has one number")
    encoder, decoder = (keys.count(key, most=3_333) for key in ("encoder_layers", "decoder_layers"))
    frames = keys.count("max_source_positions")
    return {
        "num_layers": encoder + 2 * decoder,
        **_heads(keys, "d_model", "decoder_attention_heads"),
        "max_length": keys.count("max_target_positions"),
        "causal": False,
        "layer_types": {"encoder": {"max_length": frames}, "decoder": {"causal": True}, "cross": {"kv_length": frames}},
        **pattern_of(["encoder"] * encoder + ["decoder", "cross"] * decoder),
    }


def _sd3(keys: Keys) -> Facts:
    keys.only("dual_attention_layers", [], (), why="its second attention, of the image alone, is not read")
    heads = keys.count("num_attention_heads")
    return {
        "num_layers": keys.layers("num_layers"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": keys.count("attention_head_dim"),
        "max_length": _patches(keys, "sample_size") + _SD3_TEXT_TOKENS,
        "causal": False,
    }


@dataclasses.dataclass(frozen=True)
class Family:
    """How to read the config.json of a model type, and transformers' values of keys left out; a key not here has null."""

    read: Callable[[Keys], Facts]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "max_position_embeddings": 2048}
_QWEN = {**_LLAMA, "num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA = {
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_size": 3072,
    "max_position_embeddings": 8192,
}
_GEMMA2 = {
    **_GEMMA,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 2304,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GPT_OSS = {
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
}
_DEEPSEEK = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
}
_BERT = {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768}
_WHISPER = {
    "d_model": 384,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "max_source_positions": 1500,
    "max_target_positions": 448,
}
_SD3 = {"num_layers": 18, "num_attention_heads": 18, "attention_head_dim": 64, "sample_size": 128, "patch_size": 2}
FAMILIES: dict[str, Family] = {
    "llama": Family(_decoder, _LLAMA),
    "mistral": Family(_windowed, {**_LLAMA, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}),
    "phi3": Family(_windowed, {**_LLAMA, "hidden_size": 3072, "max_position_embeddings": 4096}),
    "qwen2": Family(_qwen, _QWEN),
    "qwen3": Family(_qwen, {**_QWEN, "head_dim": 128}),
    "gemma": Family(_gemma, _GEMMA),
    "gemma2": Family(_gemma2, {**_GEMMA2, "attn_logit_softcapping": 50.0}),
    "gemma3_text": Family(_gemma3, {**_GEMMA2, "max_position_embeddings": 131072, "sliding_window_pattern": 6}),
    "gpt_oss": Family(_gpt_oss, _GPT_OSS),
    "deepseek_v3": Family(_deepseek, _DEEPSEEK),
    "bert": Family(_bert, {**_BERT, "max_position_embeddings": 512}),
    "vit": Family(_vit, {**_BERT, "image_size": 224, "patch_size": 16}),
    "whisper": Family(_whisper, _WHISPER),
    "SD3Transformer2DModel": Family(_sd3, _SD3),
}
"""By `model_type`, or `_class_name` for diffusers."""


# ---------------------------------------------------------------- a file


def convert(
    source: str | os.PathLike[str] | Mapping[str, Any], name: str | None, ignore: frozenset[str]
) -> tuple[dict[str, Any], str]:
    """Return the fields of an AttentionConfig, and what to call the source in messages.

    A key that is not known and could change attention is refused, unless `ignore` has it; others are named in one warning.
    """
    data, where = _load(source)
    place = Place(where)
    model_type = data.get("model_type", data.get("_class_name"))
    text = data.get("text_config")
    if model_type == "gemma3" and isinstance(text, Mapping):
        data, model_type, place = {**text, **_top(data)}, "gemma3_text", Place(f"{where}: text_config")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(closest_first(str(model_type), FAMILIES))
        raise ConfigError(place.at(("model_type",), f"found {shown(model_type)}; allowed are {known}"))
    if odd := [key for key in data if not isinstance(key, str)]:
        raise ConfigError(place.at((), f"found the key {shown(odd[0])}; allowed are keys of text"))
    keys = Keys(data, family.defaults, place)
    facts = family.read(keys)
    dtype = next((found for key in ("dtype", "torch_dtype") if (found := keys.get(key)) in _DTYPES), None)
    _name_the_unknown(keys, ignore)
    path = data.get("_name_or_path")
    named = path if isinstance(path, str) and path else None
    label = name or named or (os.path.basename(os.path.dirname(where)) if "config.json" in where else "") or model_type
    origin = f"config.json of {named or label} (model type {model_type})"
    return {"name": label, "source": origin, **facts, "runtime_dtype": dtype}, where


def _top(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: data[key] for key in ("_name_or_path", "dtype", "torch_dtype") if key in data}


def _name_the_unknown(keys: Keys, ignore: frozenset[str]) -> None:
    extra = [key for key in keys.data if key not in keys.seen | WITHOUT_EFFECT | ignore and keys.data[key] is not None]
    suspects = [key for key in extra if _SUSPECT.search(key)]
    if suspects:
        found = ", ".join(f"{key} = {shown(keys.data[key])}" for key in suspects)
        raise ConfigError(
            keys.place.at(
                (), f"has keys that are not known and may change attention: {found}; if they do not, pass ignore={suspects}"
            )
        )
    if extra:
        warnings.warn(f"{keys.place.where}: keys that are not known, not read: {', '.join(extra)}", stacklevel=4)


def _load(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    if isinstance(source, Mapping):
        return source, "config.json"
    where = file_name("source", source, "a path, or the contents of a config.json as a mapping")
    if os.path.isdir(where):
        where = os.path.join(where, "config.json")
    place = Place(where)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
            raise ConfigError(place.at((), f"the key {twice!r} is given twice; keep one"))
        return found

    try:
        with open(where, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ConfigError(place.at((), f"has more than {MAX_BYTES} bytes, the limit; is it a config.json?"))
        data = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(place.at((), f"cannot be read: {error.strerror or error}")) from None
    except UnicodeDecodeError as error:
        raise ConfigError(place.at((), f"is not UTF-8 text (byte {error.start}); a config.json is text in JSON")) from None
    except json.JSONDecodeError as error:
        raise ConfigError(place.at((), f"is not JSON: {error.msg}", error.lineno)) from None
    except (RecursionError, ValueError) as error:
        raise ConfigError(place.at((), f"is not JSON that can be read: {error}")) from None
    if not isinstance(data, dict):
        raise ConfigError(place.at((), f"found {shown(data)}; allowed is a JSON object"))
    return data, where
