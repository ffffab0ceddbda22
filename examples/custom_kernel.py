"""A kernel of one's own: attention with linear biases (ALiBi), registered, refused what it cannot do, and proven.

    python examples/custom_kernel.py

The operation does not add the slopes by itself. An operation is one way to compute *the* attention; were the slopes inside,
its fallbacks would compute another function without a word, and the selftest would fail it. ALiBi is a bias: `alibi_attention`
makes it and hands it to an operation, whichever. What a kernel can know about that bias is that it is the same for every
query, because a row's softmax does not change when one number is added to the whole row:

    -slope * (i - j)  =  slope * j  -  slope * i         the last term is the row's own

So `key_bias` takes a bias [batch, heads, 1, keys], keeps it at that size, and computes a block of query rows at a time.
"""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import attention_ops as ao
from attention_ops import Feature, rules

# ---------------------------------------------------------------- the kernel: arrays in, arrays out


def attend_in_rows(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K Dv"],
    bias: Float[Array, "b H S"],
    *,
    causal: bool,
    scale: float,
    rows: int,
    dtype: Any,
) -> Float[Array, "B T H Dv"]:
    """Softmax attention by `rows` query rows at a time, in `dtype`. The logits in memory are B * H * rows * S.

    The backward pass computes them again. A bias of -inf blocks its key; what no query sees may hold NaN.
    """
    B, T, H, D = query.shape
    S, K = key.shape[1:3]
    bias = bias.reshape(-1, K, H // K, S)
    is_open = bias > -jnp.inf
    bias = jnp.where(is_open, bias, 0).astype(dtype)
    is_seen = jnp.any(is_open, axis=2).swapaxes(1, 2)[..., None]
    key, value = (jnp.where(is_seen, x, 0).astype(dtype) for x in (key, value))

    @jax.checkpoint
    def row(query: Float[Array, "B K G D"], position: Any) -> Float[Array, "B K G Dv"]:
        allowed = is_open & (jnp.arange(S) <= position) if causal else is_open
        sees = jnp.any(allowed, axis=-1, keepdims=True)
        query = jnp.where(sees, query, 0).astype(dtype)
        logits = scale * jnp.einsum("bkgd,bskd->bkgs", query, key, precision="highest") + bias
        logits = jnp.where(allowed, logits, -jnp.inf)
        highest = jnp.max(logits, axis=-1, keepdims=True)
        weights = jnp.exp(logits - jax.lax.stop_gradient(jnp.where(sees, highest, 0)))
        total = jnp.where(sees, jnp.sum(weights, axis=-1, keepdims=True), 1)
        return jnp.einsum("bkgs,bskd->bkgd", weights / total, value, precision="highest")

    by_row = jnp.moveaxis(query.reshape(B, T, K, H // K, D), 1, 0)
    output = jax.lax.map(lambda x: row(*x), (by_row, jnp.arange(T)), batch_size=min(rows, T))
    return jnp.moveaxis(output, 0, 1).reshape(B, T, H, -1)


# ---------------------------------------------------------------- the operation: what it is called, what it takes


@dataclasses.dataclass(frozen=True)
class SameBiasForEveryQuery:
    """A limit of one's own: the bias has one query row."""

    def check(self, spec: ao.RequestSpec, metadata: ao.OperationMetadata, device: ao.DeviceProfile) -> rules.Reason | None:
        found = 1 if spec.bias_shape is None else spec.bias_shape[2]
        if found == 1:
            return None
        return rules.Reason(f"the bias has {found} query rows > 1, the kernel's limit", "pass [batch, heads, 1, keys]")

    def describe(self) -> str:
        return "a bias per head and key only"


@ao.OperationRegistry.register
class KeyBias(ao.OperationImpl):
    """Attention with a bias per head and key, such as ALiBi's, that is never expanded to queries by keys."""

    name = "key_bias"
    fallback = ("blocksparse", "vanilla")

    @ao.forward(
        supports={Feature.CAUSAL, Feature.BIAS, Feature.BIAS_GRADIENT, Feature.GQA, Feature.VALUE_DIM, Feature.GRADIENT},
        rules=(SameBiasForEveryQuery(), rules.SelfAttentionMask()),
    )
    def forward_native(self, request: ao.AttentionRequest) -> Float[Array, "B T H Dv"]:
        spec = request.spec
        bias = jnp.zeros((1, 1, 1, 1)) if request.bias is None else request.bias
        output = attend_in_rows(
            request.query,
            request.key,
            request.value,
            jnp.broadcast_to(bias[:, :, 0], (bias.shape[0], spec.H, spec.S)),
            causal=request.mask is not None,  # causal is the only mask that is declared
            scale=request.scale,
            rows=self.metadata.block_sizes.q or 128,
            dtype=spec.softmax_dtype,
        )
        return output.astype(spec.dtype)


# ---------------------------------------------------------------- ALiBi, by any operation


def slopes(heads: int) -> Float[Array, " H"]:
    """One slope per head, as published: 2 ** (-8 i / n) for a power of two n, every other one of 2 n for the heads left over."""
    power = 1 << (heads.bit_length() - 1)
    first, rest = jnp.arange(1, power + 1) * 2, jnp.arange(1, 2 * (heads - power), 2)
    return 2.0 ** (-4 / power * jnp.concatenate([first, rest]))


def alibi_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K Dv"],
    *,
    impl: str = "key_bias",
    metadata: ao.OperationMetadata | None = None,
    query_offset: Any = None,
    differentiable: bool = True,
) -> ao.AttentionOutput:
    """Causal attention where the logit of query i and key j has -slope * (i - j) added (Press et al., arXiv:2108.12409)."""
    return ao.attention(
        query,
        key,
        value,
        impl=impl,
        metadata=metadata,
        bias=alibi_bias(query.shape[2], key.shape[1]),
        causal=True,
        query_offset=query_offset,
        differentiable=differentiable,
    )


def alibi_bias(heads: int, keys: int) -> Float[Array, "1 H 1 S"]:
    """slope * j, shifted so that the newest key has 0: where float32 is to be finest."""
    return (slopes(heads)[:, None] * jnp.arange(1 - keys, 1))[None, :, None, :]


# ---------------------------------------------------------------- the tour


def main() -> int:
    long = jax.ShapeDtypeStruct((1, 4096, 8, 64), "bfloat16")
    bias = jax.ShapeDtypeStruct((1, 8, 1, 4096), "float32")
    print("An ALiBi request, planned without touching an array:\n")
    print(ao.plan("key_bias", long, long, long, causal=True, bias=bias))

    print("\nWhat the kernel did not declare it is never given:\n")
    whole = jax.ShapeDtypeStruct((1, 8, 4096, 4096), "float32")
    print(ao.plan("key_bias", long, long, long, causal=True, bias=whole, logits_soft_cap=30.0))

    print("\nAnd who wants no fallback is told why:\n")
    query = jax.random.normal(jax.random.key(0), (1, 64, 8, 32))
    try:
        ao.attention(query, query, query, impl="key_bias", sliding_window=8, metadata=ao.OperationMetadata(fallback="error"))
    except ao.NoRouteError as error:
        print(error)

    print("\nThe same ALiBi by three operations, largest difference from key_bias:\n")
    ours = alibi_attention(query, query, query).attention_outputs
    for name in ("vanilla", "flash", "blocksparse"):
        theirs = alibi_attention(query, query, query, impl=name).attention_outputs
        print(f"  {name:<12}{jnp.abs(ours - theirs).max():.1e}")

    print("\nThe proof, every declared feature forward and backward against float64:\n", flush=True)
    command = ["-m", "attention_ops.selftest", "--load", str(Path(__file__)), "--op", "key_bias"]
    return subprocess.run([sys.executable, *command], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
