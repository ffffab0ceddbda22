"""vanilla: the whole softmax matrix, in plain XLA operations."""

from __future__ import annotations

from attention_ops.derivatives import Derivatives
from attention_ops.features import Feature
from attention_ops.kernels.dense import dense_attention
from attention_ops.metadata import OperationMetadata
from attention_ops.operation import Estimate, OperationImpl, forward
from attention_ops.registry import OperationRegistry
from attention_ops.request import AttentionOutput, AttentionRequest, RequestSpec


@OperationRegistry.register
class Vanilla(OperationImpl):
    """Attention with all logits in memory. Takes every request; costs T * S in time and memory whatever the mask says.

    Everything, the two matrix products included, is computed in the softmax dtype.
    """

    name = "vanilla"
    aliases = ("xla",)

    @forward(supports=Feature.ALL, derivatives=Derivatives.ANY)
    def forward_native(self, request: AttentionRequest) -> AttentionOutput:
        spec, dropout = request.spec, request.dropout
        output, weights, logsumexp = dense_attention(
            request.query,
            request.key,
            request.value,
            allowed=None if request.mask is None else request.mask.dense(spec.T, spec.S),
            bias=request.bias,
            sinks=request.sinks,
            scale=request.scale,
            soft_cap=request.soft_cap,
            dropout_probability=0.0 if dropout is None else dropout.probability,
            dropout_key=None if dropout is None else dropout.key,
            softmax_dtype=spec.softmax_dtype,
        )
        return AttentionOutput(output, weights, logsumexp)

    @classmethod
    def estimate(cls, spec: RequestSpec, metadata: OperationMetadata) -> Estimate:
        cells = spec.B * spec.H * spec.T * spec.S
        upcast = spec.B * (spec.T * spec.H * spec.D + spec.S * spec.K * (spec.D + spec.Dv))
        return Estimate(2 * cells * (spec.D + spec.Dv), (3 * cells + upcast) * spec.softmax_dtype.itemsize)
