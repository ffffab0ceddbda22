"""The law, written out densely in float64 numpy.

It shares no code with the kernels, with `attention_ops.masks` or with JAX, so that no fault can hide in both. Options are the raw
options of a call, as numpy arrays and Python values; `mask` is a boolean array [T, S] or one that broadcasts to [B, H, T, S].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

Options = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The dtype of sums and exponentials; and, if not None, the dtype to which probabilities and results are rounded."""

    work: np.dtype
    storage: np.dtype | None = None

    def stored(self, x: np.ndarray, dtype: Any = None) -> np.ndarray:
        """Return x as it comes back from being stored, in `dtype` if that is given."""
        return x if self.storage is None else x.astype(dtype or self.storage).astype(self.work)


EXACT = Arithmetic(np.dtype(np.float64))


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Cotangents of the inputs, each in the shape of its input; None for one that was not given."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    bias: np.ndarray | None
    sinks: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Attention:
    """What one call returns, and what its gradients need.

    Attributes:
        output: [B, T, H, Dv].
        weights: the softmax [B, H, T, S], sinks in the denominator, before dropout.
        logsumexp: over the allowed keys, without sinks, [B, T, H]; -inf where there is none.
        allowed: [B, H, T, S].
        sink_weights: the share of each sink in the softmax, [B, H, T, n].
        largest_logit: the largest absolute logit that counts, before the cap or after the bias.
    """

    output: np.ndarray
    weights: np.ndarray
    logsumexp: np.ndarray
    allowed: np.ndarray
    sink_weights: np.ndarray
    largest_logit: float
    _query: np.ndarray  # these three are [B, H, length, head dim], with one key/value head per query head
    _key: np.ndarray
    _value: np.ndarray
    _slope: np.ndarray
    _keep: np.ndarray
    _scale: float
    _options: Options
    _arithmetic: Arithmetic

    def gradients(self, d_output: Any, d_logsumexp: np.ndarray | None = None, d_weights: np.ndarray | None = None) -> Gradients:
        """Pull cotangents back: d_output [B, T, H, Dv], d_logsumexp [B, T, H], d_weights [B, H, T, S]."""
        a, work = self._arithmetic, self._arithmetic.work
        d_out = _swap(np.asarray(d_output).astype(work))
        kept = a.stored(self.weights * self._keep)
        d_value = kept.swapaxes(2, 3) @ d_out
        d_softmax = (d_out @ self._value.swapaxes(2, 3)) * self._keep
        delta = (d_out * _swap(self.output)).sum(-1)
        if d_weights is not None:
            d_softmax = d_softmax + d_weights.astype(work)
            delta = delta + (self.weights * d_weights.astype(work)).sum(-1)
        d_biased = self.weights * (d_softmax - delta[..., None])
        if d_logsumexp is not None:
            among_keys = np.where(self.allowed, _safe_divide(self.weights, self.weights.sum(-1, keepdims=True)), 0)
            d_biased = d_biased + among_keys * d_logsumexp.astype(work).swapaxes(1, 2)[..., None]
        d_logits = a.stored(d_biased * self._slope)
        d_query = d_logits @ self._key * work.type(self._scale)
        d_key = d_logits.swapaxes(2, 3) @ self._query * work.type(self._scale)
        bias, sinks, K = self._options.get("bias"), self._options.get("softmax_aux"), self._options["key_heads"]
        return Gradients(
            query=a.stored(_swap(d_query)),
            key=a.stored(_over_groups(_swap(d_key), K)),
            value=a.stored(_over_groups(_swap(d_value), K)),
            bias=None if bias is None else a.stored(_sum_to(d_biased, bias.shape), bias.dtype),
            sinks=None if sinks is None else a.stored(self.d_sinks(delta), sinks.dtype),
        )

    def d_sinks(self, delta: np.ndarray) -> np.ndarray:
        """Return the gradient of the sinks from delta [B, H, T], the sum of d_output * output over the head dim."""
        d_sinks, shape = -(self.sink_weights * delta[..., None]).sum((0, 2)), self._options["softmax_aux"].shape
        return d_sinks[:, 0] if len(shape) == 1 else _sum_to(d_sinks, shape)


def attention(query: Any, key: Any, value: Any, options: Options, keep: np.ndarray | None = None) -> Attention:
    """Return the result of a call in float64. `keep` [B, H, T, S] multiplies the weights: a dropout that has happened."""
    return _evaluate(query, key, value, options, keep, EXACT)


def plain(query: Any, key: Any, value: Any, options: Options, keep: np.ndarray | None = None) -> Attention:
    """Return the result of the plain low-precision computation: the yardstick of tolerances.

    Dense, sums and softmax in float32 or wider, probabilities and results rounded to the dtype of the query.
    """
    dtype = np.asarray(query).dtype
    arithmetic = Arithmetic(softmax_dtype(dtype), dtype)
    return _evaluate(query, key, value, options, keep, arithmetic)


def softmax_dtype(dtype: Any) -> np.dtype:
    """Return the dtype of softmax and sums for inputs of a dtype."""
    return np.promote_types(dtype, np.float32)


def epsilon(dtype: Any) -> float:
    """Return the spacing of a floating dtype above 1."""
    return float(ml_dtypes.finfo(dtype).eps)


def visible(B: int, H: int, T: int, S: int, options: Options) -> np.ndarray:
    """Return [B, H, T, S]: whether a query may attend a key."""
    allowed = np.ones((B, H, T, S), bool)
    position = np.arange(T)[:, None] + _offset(T, S, options).reshape(-1, 1, 1, 1)
    distance = np.arange(S)[None, :] - position
    if options.get("causal"):
        allowed &= distance <= 0
    window = options.get("sliding_window")
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        allowed &= (left is None) | (distance >= -(left or 0))
        allowed &= (right is None) | (distance <= (right or 0))
    q_ids, kv_ids = options.get("q_segment_ids"), options.get("kv_segment_ids")
    if q_ids is not None:
        q_ids = np.atleast_2d(q_ids)
        kv_ids = q_ids if kv_ids is None else np.atleast_2d(kv_ids)
        same = (q_ids[:, :, None] == kv_ids[:, None, :]) & (q_ids[:, :, None] >= 0)
        allowed &= same[:, None]
    if options.get("q_lengths") is not None:
        allowed &= np.arange(T)[:, None] < np.reshape(options["q_lengths"], (-1, 1, 1, 1))
    if options.get("kv_lengths") is not None:
        allowed &= np.arange(S)[None, :] < np.reshape(options["kv_lengths"], (-1, 1, 1, 1))
    if options.get("mask") is not None:
        allowed &= options["mask"]
    if options.get("bias") is not None:
        allowed &= np.asarray(options["bias"]).astype(np.float64) != -np.inf
    return allowed


def _offset(T: int, S: int, options: Options) -> np.ndarray:
    offset = options.get("query_offset")
    if offset is not None:
        return np.asarray(offset)
    positional = options.get("causal") or options.get("sliding_window") is not None
    if positional and T not in (1, S):
        raise ValueError(f"a positional mask with T {T} and S {S} has no default query_offset")
    return np.asarray(S - 1 if T == 1 else 0)


def _evaluate(query: Any, key: Any, value: Any, options: Options, keep: np.ndarray | None, arithmetic: Arithmetic) -> Attention:
    query, key, value = (np.asarray(x) for x in (query, key, value))
    B, T, H, D = query.shape
    S, K = key.shape[1:3]
    work = arithmetic.work
    allowed = visible(B, H, T, S, options)
    sees = np.any(allowed, axis=3).swapaxes(1, 2)[..., None]
    seen = np.repeat(allowed.reshape(B, K, H // K, T, S).any((2, 3)), H // K, axis=1).swapaxes(1, 2)[..., None]
    query = _swap(np.where(sees, query.astype(work), 0))
    key, value = (_swap(np.where(seen, np.repeat(x.astype(work), H // K, axis=2), 0)) for x in (key, value))

    scale, cap, bias = options.get("softmax_scale"), options.get("logits_soft_cap"), options.get("bias")
    scale = D**-0.5 if scale is None else scale
    logits = query @ key.swapaxes(2, 3) * work.type(scale)
    slope, uncapped = np.ones_like(logits), np.abs(logits)
    if cap is not None:
        squashed = np.tanh(logits / work.type(cap))
        logits, slope = work.type(cap) * squashed, 1 - squashed**2
    if bias is not None:
        bias = np.asarray(bias).astype(work)
        logits = logits + np.where(bias == -np.inf, 0, bias)

    weights, sink_weights, logsumexp = _softmax(logits, allowed, _sinks(options.get("softmax_aux"), H, work))
    keep = np.ones_like(weights) if keep is None else keep.astype(work)
    output = arithmetic.stored(_swap(arithmetic.stored(weights * keep) @ value))
    return Attention(
        output=output,
        weights=weights,
        logsumexp=logsumexp.swapaxes(1, 2),
        allowed=allowed,
        _query=query,
        _key=key,
        _value=value,
        _slope=slope,
        sink_weights=sink_weights,
        largest_logit=float(np.maximum(uncapped, np.abs(logits)).max(initial=0.0, where=weights > 0)),
        _keep=keep,
        _scale=float(scale),
        _options={**options, "key_heads": K},
        _arithmetic=arithmetic,
    )


def _swap(x: np.ndarray) -> np.ndarray:
    """Exchange the sequence and the head axis."""
    return np.ascontiguousarray(x.swapaxes(1, 2))


def _softmax(logits: np.ndarray, allowed: np.ndarray, sinks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return weights [B, H, T, S], those of the sinks [B, H, T, n], and the logsumexp [B, H, T] of the keys alone."""
    logits = np.where(allowed, logits, -np.inf)
    sinks = np.broadcast_to(sinks[None, :, None, :], (*logits.shape[:3], sinks.shape[1]))
    joined = np.concatenate([logits, sinks], axis=-1)
    weights = _exponentials(joined)
    weights = _safe_divide(weights, weights.sum(-1, keepdims=True))
    highest = np.max(logits, axis=-1, initial=-np.inf)
    with np.errstate(divide="ignore"):
        logsumexp = np.where(highest == -np.inf, 0, highest) + np.log(_exponentials(logits).sum(-1))
    return weights[..., : logits.shape[3]], weights[..., logits.shape[3] :], logsumexp


def _exponentials(logits: np.ndarray) -> np.ndarray:
    highest = np.max(logits, axis=-1, keepdims=True, initial=-np.inf)
    return np.exp(logits - np.where(highest == -np.inf, 0, highest))


def _safe_divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a / np.where(b == 0, 1, b)


def _sinks(sinks: Any, H: int, work: np.dtype) -> np.ndarray:
    """Return sinks [H, n]; n is 0 when there are none."""
    if sinks is None:
        return np.zeros((H, 0), work)
    sinks = np.asarray(sinks).astype(work)
    return np.broadcast_to(sinks[:, None] if sinks.ndim == 1 else sinks, (H, sinks.size // sinks.shape[0]))


def _sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum over the axes along which an array of `shape` was broadcast."""
    full = (1,) * (x.ndim - len(shape)) + tuple(shape)
    axes = tuple(axis for axis, size in enumerate(full) if size == 1)
    return x.sum(axes, keepdims=True).reshape(shape)


def _over_groups(x: np.ndarray, K: int) -> np.ndarray:
    """Sum the gradient of each query head into that of its key/value head."""
    B, S, H, d = x.shape
    return x.reshape(B, S, K, H // K, d).sum(3)
