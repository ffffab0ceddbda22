"""blocksparse: blockwise attention that skips what the mask hides."""

from __future__ import annotations

from attention_ops.features import Feature
from attention_ops.kernels.splash import KERNELS, PRIVATE, TILE_BYTES, splash_attention
from attention_ops.operation import forward
from attention_ops.registry import OperationRegistry
from attention_ops.request import AttentionOutput, AttentionRequest
from attention_ops.rules import (
    Dtypes,
    HeadDim,
    PrivateFunction,
    SoftmaxDtype,
    StaticBatch,
    TpuBlocks,
)
from attention_ops.tiled import TiledAttention


@OperationRegistry.register
class BlockSparse(TiledAttention):
    """Attention that visits only the tiles its mask leaves visible. Time and memory follow the visible tiles.

    Static masks of any kind are cut into tiles while compiling; segment ids, lengths, traced offsets and boolean arrays known
    only at run time are cut when it runs, and their empty tiles skipped by branches.
    """

    name = "blocksparse"
    aliases = ("splash", "autoregressive_decodeattn")
    fallback = ("flash", "vanilla")
    skip_by_data = True

    @forward(
        supports=Feature.ALL - {Feature.DROPOUT, Feature.WEIGHTS, Feature.BIAS, Feature.BIAS_GRADIENT},
        rules=(
            Dtypes(("bfloat16", "float32")),
            SoftmaxDtype(),
            HeadDim(maximum=512),
            StaticBatch(beside_data=True),
            TpuBlocks(TILE_BYTES),
            *(PrivateFunction(f"{KERNELS}.{name}", parameters) for name, parameters in PRIVATE.items()),
        ),
        interpretable=True,
        lowers_to="tpu_custom_call",
        block_sizes=True,
        because={
            Feature.BIAS: "JAX's splash kernels add nothing to the logits",
            Feature.DROPOUT: "JAX's splash kernels draw no random numbers",
            Feature.WEIGHTS: "the softmax never exists as a whole",
        },
    )
    def forward_tpu(self, request: AttentionRequest) -> AttentionOutput:
        """JAX's splash kernels. They know no bias and no dropout, and return no weights."""
        blocks = self.metadata.block_sizes
        output, logsumexp = splash_attention(
            request.query,
            request.key,
            request.value,
            mask=request.mask,
            sinks=request.sinks,
            scale=request.scale,
            soft_cap=request.soft_cap,
            block_q=blocks.q,
            block_kv=blocks.kv,
        )
        return AttentionOutput(output, logsumexp=logsumexp)
