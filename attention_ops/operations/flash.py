"""flash: blockwise attention with an online softmax."""

from __future__ import annotations

from attention_ops.features import Feature
from attention_ops.kernels.blockwise import blockwise_attention, blockwise_cost
from attention_ops.metadata import OperationMetadata
from attention_ops.operation import Estimate, OperationImpl, forward
from attention_ops.registry import OperationRegistry
from attention_ops.request import AttentionOutput, AttentionRequest, RequestSpec


@OperationRegistry.register
class Flash(OperationImpl):
    """Attention by tiles with an online softmax: memory linear in T and S, forward and backward.

    Tiles that causality or a window rule out while compiling are not visited; other masks are applied tile by tile.
    """

    name = "flash"
    aliases = ("flash_attn2", "blockwise")
    fallback = ("vanilla",)

    @forward(supports=Feature.ALL - {Feature.DROPOUT, Feature.WEIGHTS}, block_sizes=True)
    def forward_native(self, request: AttentionRequest) -> AttentionOutput:
        blocks = self.metadata.block_sizes
        output, logsumexp = blockwise_attention(
            request.query,
            request.key,
            request.value,
            mask=request.mask,
            bias=request.bias,
            sinks=request.sinks,
            scale=request.scale,
            soft_cap=request.soft_cap,
            block_q=blocks.q,
            block_kv=blocks.kv,
            skip_by_data=False,
            softmax_dtype=request.spec.softmax_dtype,
        )
        return AttentionOutput(output, logsumexp=logsumexp)

    @classmethod
    def estimate(cls, spec: RequestSpec, metadata: OperationMetadata) -> Estimate:
        blocks = metadata.block_sizes
        sizes = (spec.B, spec.T, spec.S, spec.H, spec.K, spec.D, spec.Dv)
        return Estimate(*blockwise_cost(*sizes, spec.visible_fraction(), blocks.q, blocks.kv))
