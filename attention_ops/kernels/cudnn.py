"""cuDNN's fused attention, given our masks in its own terms.

JAX's public `jax.nn.dot_product_attention` wants Dv == D and refuses a window with lengths; the function behind it does not. It
is private: `FUNCTION`, `PARAMETERS` and `NAMES` are what must be there, for a rule to check before a request is planned.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention_ops.kernels.visibility import visibility, zeroed
from attention_ops.masks import Causal, Lengths, Mask, Window

FUNCTION = "jax._src.cudnn.fused_attention_stablehlo.dot_product_attention"
PARAMETERS = ("query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "scale", "mask_type", "sliding_window_length")
NAMES = tuple(
    f"jax._src.cudnn.fused_attention_stablehlo.{name}"
    for name in ("get_large_negative_number", *(f"MaskType.{x}" for x in ("NO_MASK", "CAUSAL", "PADDING", "PADDING_CAUSAL")))
)


@dataclasses.dataclass(frozen=True)
class NativeMask:
    """What cuDNN masks by itself: causal from position 0, `window` keys up to and with the query, lengths per batch row.

    The lengths are integers [B] or [1], or None for all.
    """

    causal: bool = False
    window: int | None = None
    q_lengths: Any = None
    kv_lengths: Any = None

    @property
    def has_lengths(self) -> bool:
        return self.q_lengths is not None or self.kv_lengths is not None

    @property
    def kind(self) -> str:
        words = (["PADDING"] if self.has_lengths else []) + (["CAUSAL"] if self.causal else [])
        return "_".join(words) or "NO_MASK"


def split(mask: Mask | None) -> tuple[NativeMask, Mask | None]:
    """Return the part of a mask that cuDNN knows, and the rest, which has to become a bias; both must hold.

    Raises:
        ValueError: a window ends after the query and nothing else ends it there.
    """
    left: list[int] = []
    right: list[int] = []
    lengths: dict[str, list[Array]] = {"q": [], "kv": []}
    rest: list[Mask] = []
    for part in () if mask is None else mask.conjuncts():
        if isinstance(part, Causal) and part.offset == 0:
            right.append(0)
        elif isinstance(part, Window) and part.offset == 0:
            left += [] if part.left is None else [part.left]
            right += [] if part.right is None else [part.right]
        elif isinstance(part, Lengths):
            lengths["q"] += [] if part.q is None else [part.q]
            lengths["kv"] += [] if part.kv is None else [part.kv]
        else:
            rest.append(part)
    if (left or right) and min(right, default=None) != 0:
        raise ValueError(f"{mask} does not end at the query, and cuDNN knows only windows that do")
    q_lengths, kv_lengths = (functools.reduce(jnp.minimum, found) if found else None for found in lengths.values())
    native = NativeMask(bool(right), min(left) + 1 if left else None, q_lengths, kv_lengths)
    return native, functools.reduce(operator.and_, rest) if rest else None


def cudnn_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K Dv"],
    *,
    mask: Mask | None,
    bias: Float[Array, "b h t s"] | None,
    scale: float,
) -> Float[Array, "B T H Dv"]:
    """Attention by the cuDNN kernel, in the dtype of the query, with the softmax in float32.

    Causal, windows to the left and lengths go in natively and cost nothing; any other mask becomes a bias of [b, h, T, S] in the
    dtype of the query, b and h being 1 where it does not depend on them.

    cuDNN hides a key by adding a large negative number: it gives some mean of the values for an empty row, and lets NaN behind
    a mask through. Rows and keys that see nothing are therefore zeroed around it.
    """
    T, S, K = query.shape[1], key.shape[1], key.shape[2]
    native, rest = split(mask)
    allowed, added = _as_bias(rest, bias, T, S, query.dtype)
    if allowed is None and not native.has_lengths and T == S:
        return _kernel(query, key, value, native, added, scale)  # every row and every key sees one
    if allowed is None:
        sees, seen = _visibility_of_intervals(native, T, S)
    else:
        sees, seen = visibility(allowed if mask is None else allowed & mask.dense(T, S), K)
    output = _kernel(*zeroed(query, key, value, sees, seen), native, added, scale)
    return jnp.where(sees, output, 0)


def _kernel(query: Array, key: Array, value: Array, native: NativeMask, bias: Array | None, scale: float) -> Array:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    q_lengths, kv_lengths = _lengths(native, query.shape[0], query.shape[1], key.shape[1])
    output: Any = cudnn.dot_product_attention(  # of several types, by options that are not used here
        query,
        key,
        value,
        bias=bias,
        q_seqlen=q_lengths,
        kv_seqlen=kv_lengths,
        scale=scale,
        mask_type=cudnn.MaskType[native.kind],
        sliding_window_length=native.window,
    )
    return output


def _lengths(native: NativeMask, B: int, T: int, S: int) -> tuple[Array | None, Array | None]:
    """Return both lengths as cuDNN wants them, int32 [B] from 1 to T or S, or neither. What has length 0 is zeroed around."""
    if not native.has_lengths:
        return None, None
    pairs = ((native.q_lengths, T), (native.kv_lengths, S))
    return tuple(  # type: ignore[return-value]
        jnp.broadcast_to(jnp.clip(size if lengths is None else lengths, 1, size), (B,)).astype(jnp.int32)
        for lengths, size in pairs
    )


def _as_bias(
    mask: Mask | None, bias: Array | None, T: int, S: int, dtype: Any
) -> tuple[Bool[Array, "b h T S"] | None, Float[Array, "b h T S"] | None]:
    """Return what a mask and the -inf of a bias allow, None for all, and the bias to add.

    Hidden keys get JAX's number for cuDNN, which is far from the lowest of the dtype. A bias that comes near it is raised to half
    of that number, so that what is allowed stays above what is not; the differences of logits that far down are lost in float32.
    """
    if mask is None and bias is None:
        return None, None
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    hidden = cudnn.get_large_negative_number(dtype)
    if bias is None:
        assert mask is not None
        allowed = mask.dense(T, S)
        return allowed, jnp.where(allowed, jnp.zeros((), dtype), hidden)
    bias = jnp.broadcast_to(bias, (*bias.shape[:2], T, S))
    allowed = bias != -jnp.inf
    allowed = allowed if mask is None else allowed & mask.dense(T, S)
    lowest = hidden / 2
    bias = jnp.where(bias < lowest, lowest + (bias - jax.lax.stop_gradient(bias)), bias)  # the derivative stays 1
    return allowed, jnp.where(allowed, bias, hidden)


def _visibility_of_intervals(native: NativeMask, T: int, S: int) -> tuple[Array, Array]:
    """Return which queries see a key and which keys are seen, where a query sees one interval of keys; O(T + S)."""
    right = 0 if native.causal else T + S
    left = T + S if native.window is None else native.window - 1
    q_end = jnp.asarray(T if native.q_lengths is None else native.q_lengths).reshape(-1, 1)
    k_end = jnp.asarray(S if native.kv_lengths is None else native.kv_lengths).reshape(-1, 1)
    q_end, k_end, rows, cols = jnp.minimum(q_end, T), jnp.minimum(k_end, S), jnp.arange(T), jnp.arange(S)
    sees = (rows < q_end) & (jnp.maximum(rows - left, 0) <= jnp.minimum(rows + right, k_end - 1))
    seen = (cols < k_end) & (jnp.maximum(cols - right, 0) <= jnp.minimum(cols + left, q_end - 1))
    return sees[..., None, None], seen[..., None, None]
