"""What the operations that work tile by tile have in common: the native route, the one for GPUs, and what a forward costs."""

from __future__ import annotations

from typing import ClassVar

from attention_ops.derivatives import Derivatives
from attention_ops.device import DeviceProfile
from attention_ops.features import Feature
from attention_ops.kernels.blockwise import blockwise_attention, blockwise_cost
from attention_ops.kernels.pallas_gpu_blocks import most_shared_memory
from attention_ops.metadata import OperationMetadata
from attention_ops.operation import Estimate, OperationImpl, forward
from attention_ops.request import AttentionOutput, AttentionRequest, RequestSpec
from attention_ops.rules import ComputeCapability, Dtypes, HeadDim, On, SharedMemory, SoftmaxDtype, StaticBatch

HESSIAN_OF_WIDE = {"float32": Derivatives.HESSIAN, "float64": Derivatives.HESSIAN}
"""Of 16-bit floats the kernel moves the bits as integers, which have no derivative."""


class TiledAttention(OperationImpl):
    """Attention by tiles with an online softmax. Not an operation itself: a subclass has the name and the routes of its own.

    Class attributes:
        skip_by_data: whether tiles that only run-time data leave empty are skipped too.
    """

    skip_by_data: ClassVar[bool]

    @forward(supports=Feature.ALL - {Feature.DROPOUT, Feature.WEIGHTS}, derivatives=HESSIAN_OF_WIDE, block_sizes=True)
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
            skip_by_data=self.skip_by_data,
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
            StaticBatch(),
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
            skip_by_data=self.skip_by_data,
            shared_memory=DeviceProfile.current().shared_memory,
        )
        return AttentionOutput(output, logsumexp=logsumexp)

    @classmethod
    def estimate(cls, spec: RequestSpec, metadata: OperationMetadata) -> Estimate:
        blocks = metadata.block_sizes
        sizes = (spec.B, spec.T, spec.S, spec.H, spec.K, spec.D, spec.Dv)
        return Estimate(*blockwise_cost(*sizes, spec.visible_fraction(), blocks.q, blocks.kv))
