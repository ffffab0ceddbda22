"""sdpa: `jax.nn.dot_product_attention` on XLA."""

from __future__ import annotations

from jaxtyping import Array, Float

from attention_ops.derivatives import Derivatives
from attention_ops.features import Feature
from attention_ops.kernels.jax_nn import xla_attention
from attention_ops.metadata import OperationMetadata
from attention_ops.operation import Estimate, OperationImpl, forward
from attention_ops.registry import OperationRegistry
from attention_ops.request import AttentionRequest, RequestSpec
from attention_ops.rules import DtypeNotOn, SelfAttentionMask, SoftmaxDtype


@OperationRegistry.register
class Sdpa(OperationImpl):
    """`jax.nn.dot_product_attention(implementation="xla")`, for what it does by our law.

    It gives the mean of the values for a row with no allowed key, lets NaN behind a mask through, and its logsumexp has no
    gradient; so masks that can leave a row empty or hide a key, biases (which may hold -inf) and logsumexp are not declared.
    """

    name = "sdpa"
    fallback = ("flash", "vanilla")

    @forward(
        supports={Feature.CAUSAL, Feature.WINDOW, Feature.GQA, Feature.GRADIENT},
        rules=(SelfAttentionMask(), SoftmaxDtype(), DtypeNotOn("float16", "cpu")),
        derivatives=Derivatives.ANY,
    )
    def forward_native(self, request: AttentionRequest) -> Float[Array, "B T H Dv"]:
        return xla_attention(request.query, request.key, request.value, mask=request.mask, scale=request.scale)

    @classmethod
    def estimate(cls, spec: RequestSpec, metadata: OperationMetadata) -> Estimate:
        cells = spec.B * spec.H * spec.T * spec.S
        return Estimate(2 * cells * (spec.D + spec.Dv), 3 * cells * spec.softmax_dtype.itemsize)
