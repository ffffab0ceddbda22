"""flash: blockwise attention with an online softmax."""

from __future__ import annotations

from attention_ops.device import DeviceProfile
from attention_ops.features import Feature
from attention_ops.kernels.blockwise import blockwise_attention, blockwise_cost
from attention_ops.kernels.pallas_gpu_blocks import most_shared_memory
from attention_ops.kernels.tpu_flash import KERNELS, PRIVATE, TILE_BYTES, flash_attention, window_attention
from attention_ops.metadata import OperationMetadata
from attention_ops.operation import Estimate, OperationImpl, forward
from attention_ops.registry import OperationRegistry
from attention_ops.request import AttentionOutput, AttentionRequest, RequestSpec
from attention_ops.rules import (
    ComputeCapability,
    Dtypes,
    HeadDim,
    MaskInKernel,
    NotBeside,
    On,
    OnlyBeside,
    PrivateFunction,
    RequiresAttribute,
    SharedMemory,
    SoftmaxDtype,
    TpuBlocks,
)


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

    @forward(
        supports=Feature.ALL - {Feature.DROPOUT, Feature.WEIGHTS},
        rules=(
            On("cuda", ComputeCapability((8, 0))),
            Dtypes(("bfloat16", "float16", "float32")),
            SoftmaxDtype(),
            HeadDim(maximum=256),
            SharedMemory(most_shared_memory),
        ),
        interpretable=True,
        lowers_to="__gpu$xla.gpu.triton",
        block_sizes=True,
        because={
            Feature.DROPOUT: "the kernel draws no random numbers",
            Feature.WEIGHTS: "the softmax never exists as a whole",
        },
    )
    def forward_gpu(self, request: AttentionRequest) -> AttentionOutput:
        """Our Pallas kernels (Triton). Block sizes are rounded up to powers of two, 16 or more, and halved until they fit."""
        from attention_ops.kernels.pallas_gpu import pallas_gpu_attention

        blocks = self.metadata.block_sizes
        output, logsumexp = pallas_gpu_attention(
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
            shared_memory=DeviceProfile.current().shared_memory,
        )
        return AttentionOutput(output, logsumexp=logsumexp)

    @forward(
        supports=Feature.ALL - {Feature.DROPOUT, Feature.WEIGHTS, Feature.SOFT_CAP},
        rules=(
            Dtypes(("bfloat16", "float32")),
            SoftmaxDtype(),
            HeadDim(maximum=512),
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

    @classmethod
    def estimate(cls, spec: RequestSpec, metadata: OperationMetadata) -> Estimate:
        blocks = metadata.block_sizes
        sizes = (spec.B, spec.T, spec.S, spec.H, spec.K, spec.D, spec.Dv)
        return Estimate(*blockwise_cost(*sizes, spec.visible_fraction(), blocks.q, blocks.kv))
