"""cudnn_flash: NVIDIA's fused kernel, as JAX calls it."""

from __future__ import annotations

from jaxtyping import Array, Float

from attention_ops.device import cudnn_of_assumed
from attention_ops.features import Feature
from attention_ops.kernels import cudnn
from attention_ops.metadata import OperationMetadata
from attention_ops.operation import Estimate, OperationImpl, forward
from attention_ops.registry import OperationRegistry
from attention_ops.request import AttentionRequest, RequestSpec
from attention_ops.rules import (
    BiasDtype,
    ComputeCapability,
    CudnnVersion,
    Dtypes,
    EvenLengthsInTraining,
    HeadDim,
    JaxVersion,
    LeftWindowOnly,
    PrivateFunction,
    SoftmaxDtype,
    ValueHeadDim,
)


@OperationRegistry.register
class CudnnFlash(OperationImpl):
    """cuDNN's fused attention on NVIDIA GPUs. There is no other route: elsewhere its fallbacks run.

    Causal, windows to the left and lengths are the kernel's own and cost nothing. Any other mask, segment ids included, becomes a
    bias of T * S numbers: packed sequences would go in as offsets, but how many there are is not known while compiling.

    The limits are those that JAX 0.10 checks before it calls the kernel (in training it wants even lengths, which is cuDNN's rule
    for a bias, of every request), and three that it leaves to the library: compute capability 8.0, cuDNN 9.8 (JAX's installation
    page), and the value head dim. Under `jax.vmap` JAX's batching rule applies:
    query, key and value are mapped together, a bias or mask has all four axes, and Dv == D; anything else is its error.
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
            Feature.VALUE_DIM,
            Feature.GRADIENT,
        },
        rules=(
            ComputeCapability((8, 0)),
            CudnnVersion((9, 8), minimum_for=(((10, 3), (9, 11)),)),
            JaxVersion((0, 10)),
            PrivateFunction(cudnn.FUNCTION, cudnn.PARAMETERS, cudnn.NAMES),
            Dtypes(("bfloat16", "float16")),
            SoftmaxDtype(),
            BiasDtype(),
            HeadDim(maximum=128, multiple_of=8, maximum_from=(((9, 0), 256),)),
            ValueHeadDim((9, 0), (9, 10)),
            LeftWindowOnly(),
            EvenLengthsInTraining(),
        ),
        lowers_to="__cudnn$fmha",
        because={
            Feature.DROPOUT: "cuDNN's takes a seed that is fixed while compiling, so every step would drop the same weights, "
            "whatever dropout_rng is",
            Feature.OFFSET: "its causal mask and windows start at position 0",
            Feature.LOGSUMEXP: "JAX drops the gradient of cuDNN's",
        },
    )
    def forward_cuda(self, request: AttentionRequest) -> Float[Array, "B T H Dv"]:
        with cudnn_of_assumed():
            return cudnn.cudnn_attention(
                request.query, request.key, request.value, mask=request.mask, bias=request.bias, scale=request.scale
            )

    @classmethod
    def estimate(cls, spec: RequestSpec, metadata: OperationMetadata) -> Estimate:
        cells = spec.B * spec.H * spec.T * spec.S
        statistics = 4 * spec.B * spec.H * spec.T
        as_bias = spec.features & {Feature.MASK, Feature.SEGMENTS, Feature.BIAS}
        materialised = cells * spec.dtype.itemsize if as_bias else 0  # at most: axes that broadcast stay so
        return Estimate(int(2 * cells * (spec.D + spec.Dv) * spec.visible_fraction()), statistics + materialised)
