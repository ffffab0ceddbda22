"""blocksparse: blockwise attention that skips what the mask hides."""

from __future__ import annotations

from attention_ops.device import DeviceProfile
from attention_ops.features import Feature
from attention_ops.kernels.blockwise import blockwise_attention, blockwise_cost
from attention_ops.kernels.pallas_gpu_blocks import most_shared_memory
from attention_ops.kernels.splash import KERNELS, PRIVATE, TILE_BYTES, splash_attention
from attention_ops.metadata import OperationMetadata
from attention_ops.operation import Estimate, OperationImpl, forward
from attention_ops.registry import OperationRegistry
from attention_ops.request import AttentionOutput, AttentionRequest, RequestSpec
from attention_ops.rules import (
    ComputeCapability,
    Dtypes,
    HeadDim,
    On,
    PrivateFunction,
    SharedMemory,
    SoftmaxDtype,
    TpuBlocks,
)


@OperationRegistry.register
class BlockSparse(OperationImpl):
    """Attention that visits only the tiles its mask leaves visible. Time and memory follow the visible tiles.

    Static masks of any kind are cut into tiles while compiling; segment ids, lengths, traced offsets and boolean arrays known
    only at run time are cut when it runs, and their empty tiles skipped by branches.
    """

    name = "blocksparse"
    aliases = ("splash", "autoregressive_decodeattn")
    fallback = ("flash", "vanilla")

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
            skip_by_data=True,
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
            skip_by_data=True,
            shared_memory=DeviceProfile.current().shared_memory,
        )
        return AttentionOutput(output, logsumexp=logsumexp)

    @forward(
        supports=Feature.ALL - {Feature.DROPOUT, Feature.WEIGHTS, Feature.BIAS, Feature.BIAS_GRADIENT},
        rules=(
            Dtypes(("bfloat16", "float32")),
            SoftmaxDtype(),
            HeadDim(maximum=512),
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

    @classmethod
    def estimate(cls, spec: RequestSpec, metadata: OperationMetadata) -> Estimate:
        blocks = metadata.block_sizes
        sizes = (spec.B, spec.T, spec.S, spec.H, spec.K, spec.D, spec.Dv)
        return Estimate(*blockwise_cost(*sizes, spec.visible_fraction(), blocks.q, blocks.kv))
