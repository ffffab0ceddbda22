"""cudnn_flash: NVIDIA's fused kernel, through `jax.nn.dot_product_attention(implementation="cudnn")`."""

from __future__ import annotations

from jaxtyping import Array, Float

from attention_ops.features import Feature
from attention_ops.kernels.jax_nn import cudnn_attention
from attention_ops.metadata import OperationMetadata
from attention_ops.operation import Estimate, OperationImpl, forward
from attention_ops.registry import OperationRegistry
from attention_ops.request import AttentionRequest, RequestSpec
from attention_ops.rules import (
    BiasDtype,
    ComputeCapability,
    CudnnVersion,
    Dtypes,
    EvenLengthsWithBiasGradient,
    HeadDim,
    LeftWindowOnly,
    SoftmaxDtype,
)


@OperationRegistry.register
class CudnnFlash(OperationImpl):
    """cuDNN's fused attention on NVIDIA GPUs. There is no other route: elsewhere its fallbacks run.

    The limits are those that JAX 0.10 checks before it calls the kernel. JAX's public function offers no soft cap, sinks,
    dropout, query offset or differentiable logsumexp, and wants Dv == D.
    """

    name = "cudnn_flash"
    aliases = ("cudnn", "cuda_flash_attn2")
    fallback = ("flash", "sdpa", "vanilla")

    @forward(
        supports={
            Feature.MASK,
            Feature.CAUSAL,
            Feature.WINDOW,
            Feature.SEGMENTS,
            Feature.LENGTHS,
            Feature.BIAS,
            Feature.BIAS_GRADIENT,
            Feature.GQA,
            Feature.GRADIENT,
        },
        rules=(
            ComputeCapability((8, 0)),
            CudnnVersion((9, 8), minimum_for=(((10, 3), (9, 11)),)),
            Dtypes(("bfloat16", "float16")),
            SoftmaxDtype(),
            BiasDtype(),
            HeadDim(maximum=128, multiple_of=8, maximum_from=(((9, 0), 256),)),
            LeftWindowOnly(),
            EvenLengthsWithBiasGradient(),
        ),
    )
    def forward_cuda(self, request: AttentionRequest) -> Float[Array, "B T H Dv"]:
        return cudnn_attention(
            request.query, request.key, request.value, mask=request.mask, bias=request.bias, scale=request.scale
        )

    @classmethod
    def estimate(cls, spec: RequestSpec, metadata: OperationMetadata) -> Estimate:
        cells = spec.B * spec.H * spec.T * spec.S
        statistics = 4 * spec.B * spec.H * spec.T
        as_bias = spec.features & {Feature.MASK, Feature.SEGMENTS, Feature.BIAS}
        materialised = cells * spec.dtype.itemsize if as_bias else 0  # at most: axes that broadcast stay so
        return Estimate(int(2 * cells * (spec.D + spec.Dv) * spec.visible_fraction()), statistics + materialised)
