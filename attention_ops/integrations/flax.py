"""Flax: an `attention_fn` for `nnx.MultiHeadAttention` and `linen.MultiHeadDotProductAttention`.

layer = nnx.MultiHeadAttention(num_heads=8, in_features=512, attention_fn=attention_fn("blocksparse"), rngs=rngs)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from attention_ops.integrations.binding import (
    Attend,
    array,
    as_bool,
    bind,
    check_dropout,
    check_precision,
    flat_batch,
    renamed,
    shared_dropout,
)
from attention_ops.metadata import OperationMetadata

if TYPE_CHECKING:
    from attention_ops.config import AttentionConfig, ConfiguredAttention
    from attention_ops.operation import OperationImpl


def attention_fn(
    implementation: str | Sequence[str] | AttentionConfig | ConfiguredAttention | OperationImpl | None = None,
    *,
    layer: int | str | None = None,
    metadata: OperationMetadata | None = None,
) -> AttentionFn:
    """Return a function for the `attention_fn` argument of Flax' attention layers, NNX and Linen alike.

    Two made from equal arguments are equal, so that Flax compiles a layer once.

    Args:
        implementation: an operation's name, a sequence of names, an operation, a model config, or None for "auto". What a
            config fixes (causality, window, soft cap, scale) applies to every call.
        layer: the layer of the config.
        metadata: dtypes, block sizes, backend and fallback policy, for names.
    """
    source = f"{__name__}.attention_fn"
    return AttentionFn(bind(implementation, source=source, layer=layer, metadata=metadata))


@dataclasses.dataclass(frozen=True)
class AttentionFn:
    """Attention with the arguments of Flax' `dot_product_attention`. See `attention_fn`."""

    attend: Attend

    def __call__(
        self,
        query: Float[Array, "*B T H D"],
        key: Float[Array, "*B S K D"],
        value: Float[Array, "*B S K Dv"],
        bias: Any = None,
        mask: Any = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        *,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> Float[Array, "*B T H Dv"]:
        """Run attention.

        Args:
            query, key, value: any number of batch axes, or none. K divides H.
            bias, mask: broadcastable to [*B, H, T, S]; in the mask all but 0 may attend.
            broadcast_dropout: one dropout draw for all batch rows and heads. It needs the attention weights, which "vanilla"
                alone gives; so does `module`.
            deterministic: no dropout.
            dtype: of the computation and the output; default the common dtype of query, key and value.
            precision: the least precision of the products.
            module: the layer that sows the attention weights, before dropout.
            is_causal: row i attends columns 0 to i.
            force_fp32_for_softmax: float32 or wider is what the softmax always runs in.
            qk_attn_weights_einsum, attn_weights_value_einsum: refused.
        """
        _refuse_einsums(qk_attn_weights_einsum=qk_attn_weights_einsum, attn_weights_value_einsum=attn_weights_value_einsum)
        check_precision(precision)
        query, key, value = _common_dtype(query, key, value, dtype)
        batch = query.shape[:-3]
        self._check_positions(query.shape[-3], key.shape[-3], is_causal)
        options: dict[str, Any] = {"causal": is_causal, "query_offset": 0} if is_causal else {}
        logits = *batch, query.shape[-2], query.shape[-3], key.shape[-3]
        if bias is not None:
            options["bias"] = flat_batch("bias", array("bias", bias), logits)
        if mask is not None:
            options["mask"] = flat_batch("mask", as_bool(array("mask", mask)), logits)
        drops = not deterministic and dropout_rate != 0.0
        if drops:
            check_dropout(dropout_rate, dropout_rng, ("dropout_rate", "dropout_rng"))
        if drops and not broadcast_dropout:
            options |= {"dropout_prob": dropout_rate, "dropout_rng": dropout_rng, "deterministic": False}
        shared = drops and broadcast_dropout
        query, key, value = (x.reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key, value))
        with renamed({"causal": "is_causal"}):
            out = self.attend(query, key, value, return_weights=shared or module is not None, **options)
        output = out.attention_outputs
        if module is not None:
            _sow(module, out.attention_weights.astype(output.dtype).reshape(*batch, *out.attention_weights.shape[1:]))  # type: ignore[union-attr]
        if shared:
            assert out.attention_weights is not None
            output = shared_dropout(out.attention_weights, value, dropout_rate, dropout_rng, output.dtype)
        return output.reshape(*batch, *output.shape[1:])

    def _check_positions(self, T: int, S: int, is_causal: bool) -> None:
        """Refuse what would need the position of a query that Flax' cache does not tell."""
        if T != 1 or S == 1:
            return
        if is_causal:
            raise ValueError(
                f"is_causal with query length 1 and key length {S}: Flax aligns it top-left, so that only key 0 would be seen; "
                "leave is_causal out, the mask of a decode cache already hides what is not written"
            )
        fixed = getattr(self.attend, "options", {})
        placed = [name for name in ("sliding_window", "mask") if name in fixed]
        if placed:
            what = "chunks" if placed[0] == "mask" else "sliding_window"
            raise ValueError(
                f"the config has {what} and the call query length 1, key length {S}: Flax does not say at which position of "
                "its cache the query stands; call attention_ops.attention with query_offset instead"
            )


def _common_dtype(query: Any, key: Any, value: Any, dtype: Any) -> tuple[Array, Array, Array]:
    arrays = array("query", query), array("key", key), array("value", value)
    shapes = ", ".join(f"{name} {x.shape}" for name, x in zip(("query", "key", "value"), arrays, strict=True))
    if any(x.ndim < 3 for x in arrays) or len({x.shape[:-3] for x in arrays}) > 1:
        raise ValueError(f"found {shapes}; the layout is [*batch, length, heads, dim], with one batch shape for all three")
    common = jnp.result_type(*arrays) if dtype is None else dtype
    return arrays[0].astype(common), arrays[1].astype(common), arrays[2].astype(common)


def _refuse_einsums(**einsums: Any) -> None:
    for name, einsum in einsums.items():
        if einsum is not None:
            raise ValueError(
                f"{name} replaces a product inside the attention, which a kernel does not let out; leave it None, or use Flax' "
                "own attention for that layer"
            )


def _sow(module: Any, weights: Float[Array, "*B H T S"]) -> None:
    from flax import linen, nnx

    if isinstance(module, linen.Module):
        module.sow("intermediates", "attention_weights", weights)
    elif isinstance(module, nnx.Module):
        module.sow(nnx.Intermediate, "attention_weights", weights)
    else:
        raise TypeError(f"module must be a Flax module, found {type(module).__name__}")
