"""EasyDeL: its `attn_mechanism` names and the arguments of its attention calls, on the operations of this package.

Facts from EasyDeL's sources of April 2026 (its FlexibleAttentionModule and operations). EasyDeL itself is not needed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention_ops import api, integers, masks
from attention_ops.arrays import array_of
from attention_ops.errors import UnknownOperationError, did_you_mean
from attention_ops.integrations.binding import array, check_dropout, check_precision, shared_dropout, states
from attention_ops.metadata import OperationMetadata
from attention_ops.registry import OperationRegistry
from attention_ops.request import AttentionOutput

DECODE = "autoregressive_decodeattn"

OPERATION_OF = {
    "auto": "auto",
    "vanilla": "vanilla",
    "sdpa": "sdpa",
    "flash_attn2": "flash",
    "blockwise": "flash",
    "blocksparse": "blocksparse",
    "splash": "blocksparse",
    "ring": "ring",
    "cudnn": "cudnn_flash",
    "cuda_flash_attn2": "cudnn_flash",
    DECODE: "blocksparse",
}
"""EasyDeL's name, and the operation here. Any other name may be that of a registered operation."""

_PAGED = "it reads a paged cache, and every operation here takes key and value as arrays [B, S, K, D]; gather the pages first"
_NOT_ATTENTION = "it is no softmax attention"
REFUSED = {
    **dict.fromkeys(
        (
            "page_attention",
            "paged_flash_attention",
            "unified_attention",
            "ragged_page_attention_v2",
            "ragged_page_attention_v3",
            "multi_latent_ragged_page_attention_v1",
            "multi_latent_ragged_page_attention_v2",
        ),
        _PAGED,
    ),
    **dict.fromkeys(
        (
            "gated_delta_rule",
            "gdr",
            "ragged_gated_delta_rule_v2",
            "kda",
            "kernel_delta_attention",
            "ssm1",
            "mamba1",
            "mamba",
            "ssm2",
            "mamba2",
            "ragged_causal_conv1d",
            "glm_moe_dsa_indexer",
            "dsa_indexer",
        ),
        _NOT_ATTENTION,
    ),
}
"""EasyDeL's names without an operation here, and why. One that is registered under such a name is used."""

MODES = ("__train__", "__prefill__", "__autoregressive__")
"""eformer's MODE_TRAIN, MODE_PREFILL and MODE_DECODE."""

_UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "cum_seqlens_q": (None, "give packed sequences as mask_info=MaskInfo.from_segments(...)"),
    "cum_seqlens_k": (None, "give packed sequences as mask_info=MaskInfo.from_segments(...)"),
    "normalize_output": (True, "the output here is always divided by the sum of the softmax"),
    "fused_backward": (False, "each operation has one backward; block sizes are set in the metadata"),
    "compute_dtype": (None, "set runtime_dtype in the metadata"),
    "mask_value": (None, "a hidden key gets exactly no weight"),
    "vmem_limit_bytes": (None, "it belongs to paged kernels"),
    "policy": (None, "wrap the call in jax.checkpoint(..., policy=...)"),
    "prevent_cse": (True, "wrap the call in jax.checkpoint(..., prevent_cse=...)"),
    "optimized": (False, "it belongs to paged kernels"),
    "dropout_seed": (None, "give a jax.random key as dropout_rng"),
}
"""Arguments accepted at EasyDeL's default only: the default, and what to do instead."""


def operation_name(attn_mechanism: str) -> str:
    """Return the operation for one of EasyDeL's `attn_mechanism` strings, or for the name of a registered operation.

    Raises:
        TypeError: it is no string.
        UnknownOperationError: EasyDeL has it and this package does not (the message says why), or nobody knows it.

    >>> operation_name("flash_attn2")
    'flash'
    """
    name = getattr(attn_mechanism, "value", attn_mechanism)  # EasyDeL has an enum of strings
    if not isinstance(name, str):
        raise TypeError(f"attn_mechanism is {name!r}; allowed is one name, EasyDeL's or that of a registered operation")
    if name in OPERATION_OF:
        return OPERATION_OF[name]
    try:
        return OperationRegistry.get(name).name
    except UnknownOperationError:
        if name not in REFUSED:
            raise
    raise UnknownOperationError(f"EasyDeL's {name!r} has no operation here: {REFUSED[name]}. Known: {', '.join(OPERATION_OF)}")


def attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K Dv"],
    *,
    attn_mechanism: str = "auto",
    mode: str | None = None,
    mask_info: Any = None,
    bias: Any = None,
    init_bias: Callable[[], Any] | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    cache_metadata: Any = None,
    cache_view: Any = None,
    causal: bool = True,
    softmax_aux: Any = None,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float | None = None,
    dropout_rng: Any = None,
    deterministic: bool | None = None,
    precision: Any = None,
    metadata: OperationMetadata | None = None,
    **others: Any,
) -> AttentionOutput:
    """Attention with the arguments of EasyDeL's FlexibleAttentionModule. See docs/from_easydel.md for each one.

    Args:
        attn_mechanism: EasyDeL's name, or that of any registered operation.
        mode: one of `MODES`. Decoding must bring a mask_info or the cache's lengths.
        mask_info: ejkernel's MaskInfo. A window or causality that is baked into it is not applied again.
        bias: added after the soft cap; it and `mask_info` both count.
        init_bias: makes the bias when neither `mask_info` nor `bias` is given.
        sliding_window: (left, right) keys, the query not counted; an int is both.
        cache_metadata, cache_view: their `indexs` [B] count the tokens in the cache, those of the query among them; their
            `starts` [B] count the padding before the first. Without them, T != S aligns top-left, and a single query sees
            all that `mask_info` leaves.
        causal: True by default, as in EasyDeL's module.
        softmax_aux: sinks, [H], [K] or [H, n], [K, n] per head, any other [n] or [1, n] for all heads.
        dropout_prob, dropout_rng, deterministic: active with deterministic=False: one draw for all batch rows and heads. It
            needs the attention weights, which "vanilla" alone gives.
        precision: the least precision of the products.
        metadata: of this package: dtypes, block sizes, mesh, backend and fallback policy.
        **others: the other arguments of EasyDeL's operations, at their default.

    Raises:
        TypeError, ValueError: an argument cannot be kept; the message says what to do instead.
        UnknownOperationError: `attn_mechanism` has no operation here.
    """
    _refuse_others(others)
    check_precision(precision)
    name = operation_name(attn_mechanism)
    query, key, value = states("query", query), states("key", key), states("value", value)
    cache = _cache(cache_metadata, cache_view, query.shape[0])
    if mode is not None and mode not in MODES:
        raise ValueError(f"mode is {mode!r}; allowed are {', '.join(MODES)} and None")
    if mode == MODES[2] and mask_info is None and cache is None:
        raise ValueError("decoding with neither mask_info nor cache_metadata: nothing says how much of the cache is filled")
    if attn_mechanism == DECODE and (query.shape[1] != 1 or cache is None):
        raise ValueError(
            f"{DECODE} takes one query per sequence and cache_metadata with indexs; found query length {query.shape[1]} and "
            f"{'no cache_metadata' if cache is None else 'cache_metadata'}"
        )
    if bias is None and mask_info is None and init_bias is not None:
        bias = init_bias()
    probability = 0.0 if deterministic is None or deterministic else dropout_prob or 0.0
    if probability:
        check_dropout(probability, dropout_rng, ("dropout_prob", "dropout_rng"))
    out = api.attention(
        query,
        key,
        value,
        impl=name,
        metadata=metadata,
        mask_info=mask_info,
        bias=bias,
        softmax_aux=_sinks(softmax_aux, query.shape[2], key.shape[2]),
        softmax_scale=softmax_scale,
        logits_soft_cap=logits_soft_cap,
        return_weights=probability > 0,
        **_positions(query.shape[1], key.shape[1], causal, sliding_window, mask_info, cache),
    )
    if not probability:
        return out
    assert out.attention_weights is not None
    dtype = out.attention_outputs.dtype
    return AttentionOutput(shared_dropout(out.attention_weights, value, probability, dropout_rng, dtype), out.attention_weights)


def _refuse_others(others: dict[str, Any]) -> None:
    for name, given in others.items():
        if name not in _UNSUPPORTED:
            known = f"taken at their defaults: {', '.join(sorted(_UNSUPPORTED))}"
            raise TypeError(
                f"unknown argument {name!r}.{did_you_mean(name, _UNSUPPORTED)} Beside those of the signature, {known}"
            )
        default, remedy = _UNSUPPORTED[name]
        if given is not default:
            raise ValueError(f"{name}={given!r} cannot be kept, only {default}: {remedy}")


Cache = tuple[Int[Array, " B"], Int[Array, " B"] | None]
"""(indexs, starts) of a cache."""


def _cache(cache_metadata: Any, cache_view: Any, B: int) -> Cache | None:
    """Read the lengths of a contiguous cache, from the metadata before the view, as EasyDeL does."""
    for name, given in (("cache_metadata", cache_metadata), ("cache_view", cache_view)):
        if given is None:
            continue
        held = getattr(given, "transformer", given)
        if not hasattr(held, "indexs"):
            raise TypeError(f"{name} is a {type(given).__name__} without indexs: {_PAGED}")
        if held.indexs is not None:
            starts = getattr(held, "starts", None)
            return _lengths(f"{name}.indexs", held.indexs, B), None if starts is None else _lengths(f"{name}.starts", starts, B)
    return None


def _lengths(name: str, value: Any, B: int) -> Int[Array, " B"]:
    given = array_of(name, value)
    lengths = jnp.asarray(integers.position(name, given)).reshape(-1)  # a position less the query length may be negative
    if lengths.shape[0] not in (1, B):
        raise ValueError(f"{name} has shape {given.shape}; allowed is [{B}], one for each batch row")
    return lengths


def _positions(
    T: int, S: int, causal: bool, window: int | tuple[int, int] | None, mask_info: Any, cache: Cache | None
) -> dict[str, Any]:
    """Return the options that say where queries and keys stand."""
    if getattr(mask_info, "causal_mask_baked_in", False) or T == 1:  # one query: the newest, it sees what is there
        causal = False
    if getattr(mask_info, "sliding_window_baked_in", False):  # keys are then a slice of the cache, of unknown position
        if causal and T != S:
            raise ValueError(
                f"causal with query length {T} and key length {S}, and a mask_info whose window is baked in: the keys are a "
                "slice of unknown position; apply mask_info.apply_causal(...) before the window and pass causal=False"
            )
        window = cache = None
    options: dict[str, Any] = {"causal": causal, "sliding_window": window, "query_offset": 0}
    if cache is not None:
        indexs, starts = cache
        options |= {"query_offset": indexs - T, "kv_lengths": indexs}
        if starts is not None:
            options["mask"] = masks.Dense((jnp.arange(S) >= starts[:, None])[:, None, None, :])
    elif T == 1 and S > 1 and window is not None:
        raise ValueError(
            f"sliding_window with query length 1 and key length {S}: nothing says where in the cache the query stands; pass "
            "cache_metadata with indexs, or bake the window into mask_info"
        )
    return options


def _sinks(softmax_aux: Any, H: int, K: int) -> Any:
    """Return sinks as [H], [H, n] or [1, n]: ejkernel also takes them per key/value head, and a plain [n] for all heads."""
    if softmax_aux is None:
        return None
    sinks = array("softmax_aux", softmax_aux)
    if sinks.ndim == 1 and sinks.shape[0] not in (H, K):
        return sinks[None]
    return jnp.repeat(sinks, H // K, axis=0) if sinks.ndim in (1, 2) and sinks.shape[0] == K and 0 < K < H else sinks
