"""example_einsum: causal attention in two einsums."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import attention_ops as ao
from attention_ops import Feature, rules


@ao.OperationRegistry.register
class ExampleEinsum(ao.OperationImpl):
    """Softmax attention with all logits in memory, for self-attention with or without causality."""

    name = "example_einsum"
    fallback = ("flash", "vanilla")

    @ao.forward(supports={Feature.CAUSAL, Feature.VALUE_DIM, Feature.GRADIENT}, rules=(rules.SelfAttentionMask(),))
    def forward_native(self, request: ao.AttentionRequest) -> Float[Array, "B T H Dv"]:
        spec = request.spec
        query, key, value = (x.astype(spec.softmax_dtype) for x in (request.query, request.key, request.value))
        logits = request.scale * jnp.einsum("bthd,bshd->bhts", query, key, precision="highest")
        if request.mask is not None:
            logits = jnp.where(request.mask.dense(spec.T, spec.S), logits, -jnp.inf)
        output = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), value, precision="highest")
        return output.astype(spec.dtype)
