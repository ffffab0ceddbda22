"""Proofs without the device: planted faults are convicted in the interpreter and by lowering, and right kernels are not."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from attention_ops import Feature, OperationImpl, forward, masks, rules
from attention_ops.kernels.cudnn import cudnn_attention
from attention_ops.kernels.interpreter import is_interpreted
from attention_ops.selftest import lowering, runner, table
from attention_ops.selftest.elsewhere import LOWERS
from attention_ops.selftest.results import Settings

CASES = ("plain/small/float32", "causal/small/float32", "causal/small/bfloat16")
LOWERED = tuple(LOWERS + case for case in CASES)


def _kernel(q_ref, k_ref, v_ref, o_ref, *, scale, causal):
    query, key, value = (ref[0].astype(jnp.float32) for ref in (q_ref, k_ref, v_ref))
    logits = jnp.dot(query, key.T, precision="highest") * scale
    if causal is not None:
        rows, cols = (jax.lax.broadcasted_iota(jnp.int32, logits.shape, axis) for axis in (0, 1))
        logits = jnp.where(cols <= rows + causal, logits, -1e30)
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    o_ref[0] = jnp.dot(weights / weights.sum(-1, keepdims=True), value, precision="highest").astype(o_ref.dtype)


def _pallas(request, *, scale, causal, interpret):
    s = request.spec
    heads_first = [x.swapaxes(1, 2).reshape(s.B * s.H, -1, s.D) for x in (request.query, request.key, request.value)]
    block = pl.BlockSpec((1, s.T, s.D), lambda i: (i, 0, 0))
    call = pl.pallas_call(
        functools.partial(_kernel, scale=scale, causal=causal),
        grid=(s.B * s.H,),
        in_specs=[block] * 3,
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((s.B * s.H, s.T, s.D), s.dtype),
        interpret=interpret,
    )
    return call(*heads_first).reshape(s.B, s.H, s.T, s.D).swapaxes(1, 2)


class RightPallas(OperationImpl):
    name = "planted_pallas"
    fallback = ("vanilla",)
    diagonal, factor, always = 0, 1.0, False

    @forward(supports={Feature.CAUSAL}, rules=(rules.SelfAttentionMask(),), interpretable=True, lowers_to="tpu_custom_call")
    def forward_tpu(self, request):
        causal = None if request.mask is None else self.diagonal
        interpret = self.always or is_interpreted()
        return _pallas(request, scale=request.scale * self.factor, causal=causal, interpret=interpret)


class DiagonalLate(RightPallas):
    name, diagonal = "planted_pallas_diagonal", 1


class ScaleTwice(RightPallas):
    name, factor = "planted_pallas_scale", 0.25


class NeverCompiled(RightPallas):
    """Right in the interpreter, and interpreted on the device too."""

    name, always = "planted_pallas_interpreted", True


class NoKernel(OperationImpl):
    name = "planted_no_kernel"

    @forward(supports={Feature.CAUSAL}, rules=(rules.SelfAttentionMask(),), lowers_to="tpu_custom_call")
    def forward_tpu(self, request):
        return jax.nn.dot_product_attention(request.query, request.key, request.value, is_causal=request.mask is not None)


class ProductBeside(OperationImpl):
    """The kernel runs, and the logits are computed again beside it."""

    name = "planted_product_beside"

    @forward(lowers_to="tpu_custom_call")
    def forward_tpu(self, request):
        logits = jnp.einsum("bthd,bshd->bhts", request.query, request.key)
        return _pallas(request, scale=request.scale, causal=None, interpret=False) + 0 * logits.sum().astype(request.spec.dtype)


class Cudnn(OperationImpl):
    name = "planted_cudnn"
    fallback = ("vanilla",)
    factor = 1.0

    def mask(self, mask):
        return mask

    @forward(
        supports={Feature.CAUSAL, Feature.WINDOW, Feature.LENGTHS, Feature.SEGMENTS, Feature.GRADIENT},
        rules=(rules.Dtypes(("bfloat16",)), rules.EvenLengthsInTraining(), rules.LeftWindowOnly()),
        lowers_to="__cudnn$fmha",
    )
    def forward_cuda(self, request):
        scale = request.scale * self.factor
        return cudnn_attention(request.query, request.key, request.value, mask=self.mask(request.mask), bias=None, scale=scale)


class WindowDropped(Cudnn):
    name = "planted_cudnn_window"

    def mask(self, mask):
        return masks.Causal(0)


class CudnnScaleTwice(Cudnn):
    name, factor = "planted_cudnn_scale", 0.5


class AllAsBias(Cudnn):
    """Right, and without the kernel's own masks."""

    name = "planted_cudnn_bias"

    def mask(self, mask):
        return None if mask is None else masks.Or((mask,))


PLANTED = (RightPallas, DiagonalLate, ScaleTwice, NeverCompiled, NoKernel, ProductBeside)
PLANTED_CUDNN = (Cudnn, WindowDropped, CudnnScaleTwice, AllAsBias)


@pytest.fixture(autouse=True)
def planted(registry):
    for cls in (*PLANTED, *PLANTED_CUDNN):
        registry.register(cls)


def _run(cls, cases):
    (route,) = runner.run([cls.name], Settings(cases=cases)).routes
    return route


def test_a_right_kernel_passes_in_the_interpreter_and_lowers():
    route = _run(RightPallas, (*CASES, *LOWERED, "refuse/bias", "refuse/gradient"))
    assert (route.status, route.proof, route.cases) == ("passed", "interpreter", 8), route.failures
    assert 0 < route.max_error <= 1
    assert route.device.name == "tpu-v5e"
    assert route.caveat == (
        "declared for tpu but never run on the device: its kernel ran in the interpreter, with the rules of tpu-v5e"
    )


@pytest.mark.parametrize(
    ("cls", "convicted"),
    [(DiagonalLate, {"causal/small/float32", "causal/small/bfloat16"}), (ScaleTwice, set(CASES))],
)
def test_a_wrong_kernel_is_convicted_in_the_interpreter(cls, convicted):
    route = _run(cls, CASES)
    assert (route.status, route.proof) == ("failed", "interpreter")
    assert {failure.case for failure in route.failures} == convicted
    assert all("output is off by" in failure.problem for failure in route.failures)


def test_a_kernel_that_is_never_compiled_is_convicted_by_lowering():
    route = _run(NeverCompiled, (*CASES, *LOWERED))
    assert {failure.case for failure in route.failures} == set(LOWERED)
    assert "0 custom calls begin with tpu_custom_call, expected a kernel; custom calls: none" in route.failures[0].problem
    assert f"--op {NeverCompiled.name} --case {LOWERED[0]}" in route.failures[0].reproduce


@pytest.mark.parametrize(("cls", "problem"), [(NoKernel, "0 custom calls"), (ProductBeside, "a matrix product runs outside")])
def test_a_route_that_is_not_its_kernel_is_convicted_by_lowering(cls, problem):
    route = _run(cls, LOWERED[:1])
    assert (route.status, route.proof, route.failed) == ("failed", "lowering", 1)
    assert any(problem in failure.problem for failure in route.failures)
    assert "no number was computed" in route.caveat


ASKED = tuple(f"{LOWERS}{parts}/aligned/bfloat16" for parts in ("plain", "causal+window_left", "causal+lengths", "segments"))


@pytest.mark.parametrize(
    ("cls", "convicted"),
    [
        (Cudnn, {}),
        (WindowDropped, {0: "mask_type is 'CAUSAL', expected 'NO_MASK'", 1: "sliding_window_length is 0, expected 33"}),
        (CudnnScaleTwice, dict.fromkeys(range(4), "fmha_scale is 0.0625, expected 0.125")),
        (AllAsBias, dict.fromkeys((1, 2), "expected __cudnn$fmhaSoftmax, __cudnn$fmhaSoftmaxBackward")),
    ],
)
def test_what_cudnn_is_told_is_what_was_asked_for(cls, convicted):
    route = _run(cls, ASKED)
    failed = {ASKED.index(failure.case): failure.problem for failure in reversed(route.failures)}
    for index, problem in convicted.items():
        assert problem in failed[index]
    if not convicted:
        assert route.status == "passed", route.failures


def test_a_lowering_that_raises_is_a_failure():
    class Raising(Cudnn):
        name = "planted_cudnn_raising"

        def mask(self, mask):
            raise RuntimeError("not today")

    runner.OperationRegistry.register(Raising)
    (failure,) = _run(Raising, ASKED[:1]).failures
    assert failure.problem == "RuntimeError: not today"


# ---------------------------------------------------------------- the parts


def test_the_grids_have_every_feature_with_its_gradient():
    declared = Feature.ALL
    asked = {Feature.BIAS_GRADIENT, Feature.WEIGHTS, Feature.LOGSUMEXP, Feature.GRADIENT, Feature.DROPOUT}
    for grid in (table.sample, table.interpreted):
        found = grid(declared)
        assert frozenset().union(*(case.features for case in found)) >= declared - asked
        assert any(case.variant == "nan" for case in found)
    assert len(table.interpreted(declared)) >= 60
    assert len(table.lowered(declared)) >= 60
    assert all(case.sizes.S < 500 for case in table.interpreted(declared))


def test_products_outside_of_kernels():
    def f(a, b):
        return jnp.einsum("btd,bsd->bts", a, b), jnp.einsum("btd,btd->bt", a, a), a @ b[0].T

    text = jax.jit(f).lower(jnp.ones((2, 3, 4)), jnp.ones((2, 5, 4))).as_text()
    assert lowering.matrix_products(text) == (
        "2x3x4xf32 by 2x5x4xf32 gives 2x3x5xf32",
        "2x3x4xf32 by 4x5xf32 gives 2x3x5xf32",
    )


def test_the_probes_of_jax_answer_for_a_device_in_one_thread_and_inside_only():
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    from attention_ops.device import DeviceProfile, cudnn_probes

    def version_elsewhere():
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(cudnn.check_cudnn_version).exception()

    h100 = DeviceProfile.named("h100", cudnn_version=(9, 13, 2))
    with cudnn_probes(h100):
        assert cudnn.check_cudnn_version() == 91302
        assert [cudnn.check_compute_capability(c) for c in ("8.0", "9.0", "10.0")] == [True, True, False]
        assert cudnn.is_cuda_compute_capability_equal("9.0")
        with cudnn_probes(dataclasses.replace(h100, compute_capability=(10, 3))):
            assert cudnn.is_cuda_compute_capability_equal("10.3")
        assert not cudnn.is_cuda_compute_capability_equal("10.3")
        assert isinstance(version_elsewhere(), RuntimeError)
    with pytest.raises(RuntimeError, match="cuDNN is not detected"):
        cudnn.check_cudnn_version()
