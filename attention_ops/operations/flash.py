"""flash: blockwise attention with an online softmax."""

from __future__ import annotations

from attention_ops.features import Feature
from attention_ops.kernels.tpu_flash import KERNELS, PRIVATE, TILE_BYTES, flash_attention, window_attention
from attention_ops.operation import forward
from attention_ops.registry import OperationRegistry
from attention_ops.request import AttentionOutput, AttentionRequest
from attention_ops.rules import (
    Dtypes,
    HeadDim,
    MaskInKernel,
    NotBeside,
    OnlyBeside,
    PrivateFunction,
    RequiresAttribute,
    SoftmaxDtype,
    StaticBatch,
    TpuBlocks,
)
from attention_ops.tiled import TiledAttention


@OperationRegistry.register
class Flash(TiledAttention):
    """Attention by tiles with an online softmax: memory linear in T and S, forward and backward.

    Tiles that causality or a window rule out while compiling are not visited; other masks are applied tile by tile.
    """

    name = "flash"
    aliases = ("flash_attn2", "blockwise")
    fallback = ("vanilla",)
    skip_by_data = False

    @forward(
        supports=Feature.ALL - {Feature.DROPOUT, Feature.WEIGHTS, Feature.SOFT_CAP},
        rules=(
            Dtypes(("bfloat16", "float32")),
            SoftmaxDtype(),
            HeadDim(maximum=512),
            StaticBatch(),
            TpuBlocks(TILE_BYTES, "float32"),
            MaskInKernel(),
            OnlyBeside(Feature.GQA, Feature.BIAS, "the kernel would need keys and values repeated for each query head"),
            RequiresAttribute(
                "jax.experimental.pallas.tpu", "repeat", "ejkernel's TPU flash kernel", Feature.WINDOW, Feature.BIAS
            ),
            NotBeside(
                Feature.WINDOW,
                Feature.BIAS,
                (Feature.SEGMENTS, Feature.LENGTHS, Feature.SINKS, Feature.LOGSUMEXP, Feature.VALUE_DIM),
                "ejkernel's TPU flash kernel returns no logsumexp, by which empty rows are found, and takes one head_dim",
            ),
            *(PrivateFunction(f"{KERNELS}.{name}", parameters) for name, parameters in PRIVATE.items()),
        ),
        interpretable=True,
        lowers_to="tpu_custom_call",
        block_sizes=True,
        because={
            Feature.DROPOUT: "the kernel draws no random numbers",
            Feature.WEIGHTS: "the softmax never exists as a whole",
            Feature.SOFT_CAP: "JAX's TPU flash kernel has none, blocksparse does",
        },
    )
    def forward_tpu(self, request: AttentionRequest) -> AttentionOutput:
        """JAX's TPU flash kernel; ejkernel's for a window without a bias, which JAX's would need as an array [B, H, T, S]."""
        arrays, blocks = (request.query, request.key, request.value), self.metadata.block_sizes
        options = {"mask": request.mask, "scale": request.scale, "block_q": blocks.q, "block_kv": blocks.kv}
        if Feature.WINDOW in request.spec.features and request.bias is None:
            return AttentionOutput(window_attention(*arrays, **options))
        output, logsumexp = flash_attention(*arrays, bias=request.bias, sinks=request.sinks, **options)
        return AttentionOutput(output, logsumexp=logsumexp)
