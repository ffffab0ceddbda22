"""The rules of cudnn_flash against the checks that JAX itself makes, on random requests, in both directions.

JAX's function runs as it is, on shapes alone; only the call of the kernel behind its checks is taken out. What its checks leave
to the library is declared in `LEFT_TO_THE_LIBRARY`. A release of JAX that changes a check fails here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax._src.cudnn import fused_attention_stablehlo as cudnn

import attention_ops as ao
from attention_ops import rules
from attention_ops.device import cudnn_probes
from attention_ops.kernels.cudnn import cudnn_attention, split
from attention_ops.metadata import OperationMetadata
from attention_ops.request import make_request

PROFILES = [
    ao.DeviceProfile.named(name, cudnn_version=version)
    for name, versions in {
        "t4": [(9, 10, 1)],
        "v100": [(9, 10, 1)],
        "a100": [(9, 8, 0), (9, 10, 1)],
        "l4": [(9, 10, 1), (9, 5, 0)],
        "h100": [(9, 8, 0), (9, 10, 1)],
        "b200": [(9, 10, 1), (9, 13, 0)],
    }.items()
    for version in versions
] + [ao.DeviceProfile("b300", "cuda", (10, 3), cudnn_version=version) for version in ((9, 10, 1), (9, 11, 0))]

LEFT_TO_THE_LIBRARY = {
    rules.ComputeCapability: "JAX leaves it to the library, whose fused attention starts at 8.0",
    rules.CudnnVersion: "JAX's installation page asks for 9.8; its check covers only capability 10.3",
    rules.HeadDim: "JAX checks the query's head dim only; the library has the same limits for the value's",
    rules.SoftmaxDtype: "a setting of ours, which the kernel does not have",
    rules.BiasDtype: "JAX hands the bias on; the library reads it in the dtype of the query",
    rules.LeftWindowOnly: "JAX checks it one level up, in jax.nn.dot_product_attention; compared by itself below",
}
"""Rules that may refuse what JAX's checks accept, and why."""

Request = tuple[dict, jnp.dtype, dict]
_SIZES = st.sampled_from([1, 2, 7, 64, 127, 128])
_DIMS = st.sampled_from([8, 12, 64, 72, 128, 136, 192, 256, 264])


@st.composite
def requests(draw) -> Request:
    T, S = draw(_SIZES), draw(_SIZES)
    S = T if draw(st.booleans()) else S
    D = draw(_DIMS)
    K, groups = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    sizes = {"T": T, "S": S, "H": K * groups, "K": K, "D": D, "Dv": draw(st.one_of(st.just(D), _DIMS))}
    dtype = draw(st.sampled_from([jnp.bfloat16, jnp.float16, jnp.float32]))
    options: dict = {"differentiable": draw(st.booleans())}
    if draw(st.booleans()):
        options["causal"] = True
    if draw(st.booleans()):
        options["sliding_window"] = draw(st.sampled_from([(3, 0), (3, 2), (None, 0), (None, 5), (4, None), (1, 1)]))
    if "causal" in options or "sliding_window" in options:
        options["query_offset"] = 0
    if draw(st.booleans()):
        shape = (draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, K * groups])), T, S)
        options["bias"] = jax.ShapeDtypeStruct(shape, draw(st.sampled_from([dtype, jnp.float32])))
    if draw(st.booleans()):
        options["kv_lengths"] = jax.ShapeDtypeStruct((2,), jnp.int32)
    if draw(st.booleans()):
        options["mask"] = jax.ShapeDtypeStruct((2, 1, T, S), jnp.bool_)
    return sizes, dtype, options


def _shapes(sizes, dtype):
    B, T, S, H, K, D, Dv = 2, *(sizes[name] for name in ("T", "S", "H", "K", "D", "Dv"))
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in ((B, T, H, D), (B, S, K, D), (B, S, K, Dv)))


class _Kernel:
    """In place of the kernel behind the checks."""

    @staticmethod
    def bind(*args, **settings):
        return None, None


def _jax_accepts(spec, device) -> bool:
    """Return whether the checks of JAX's function pass."""
    native, rest = split(spec.mask)
    biased = rest is not None or spec.bias_shape is not None
    query, key, value = _shapes({name: getattr(spec, name) for name in ("T", "S", "H", "K", "D", "Dv")}, spec.dtype)
    lengths = np.ones(spec.B, np.int32) if native.has_lengths else None
    rule = cudnn._dot_product_attention_fwd_rule if spec.differentiable else cudnn._dot_product_attention_fwd
    with cudnn_probes(device), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudnn, "_dot_product_attention", rule)  # as jax.grad, or no jax.grad, would call it
        patch.setattr(cudnn, "_dot_product_attention_fwd_p_wrapper", _Kernel)
        try:
            cudnn.dot_product_attention(
                query,
                key,
                value,
                bias=np.broadcast_to(np.zeros((), spec.dtype), (1, 1, spec.T, spec.S)) if biased else None,
                q_seqlen=lengths,
                kv_seqlen=lengths,
                mask_type=cudnn.MaskType[native.kind],
                sliding_window_length=native.window,
            )
        except (NotImplementedError, ValueError):
            return False
    return True


ROUTE = ao.OperationRegistry.get("cudnn_flash").routes["cuda"]


def _refusing(spec, device):
    """Return the rules of ours that refuse."""
    found = [rule for rule in ROUTE.declaration.rules if rule.check(spec, OperationMetadata(), device) is not None]
    assert bool(found) == bool(ROUTE.refusals(spec, OperationMetadata(), device))
    return found


@settings(max_examples=2000, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(request=requests())
def test_we_accept_exactly_what_jax_accepts(request):
    sizes, dtype, options = request
    spec = make_request(*_shapes(sizes, dtype), options, OperationMetadata()).spec
    without_end = rules.LeftWindowOnly().check(spec, OperationMetadata(), PROFILES[0])
    for device in PROFILES:
        refusing = _refusing(spec, device)
        if without_end is not None:
            assert [type(rule) for rule in refusing].count(rules.LeftWindowOnly) == 1
            continue  # has no form as a call of JAX's function
        if _jax_accepts(spec, device):
            unexplained = [rule for rule in refusing if type(rule) not in LEFT_TO_THE_LIBRARY]
            assert not unexplained, f"JAX accepts it on {device}, {unexplained} refuses: {spec}"
            if any(isinstance(rule, rules.HeadDim) for rule in refusing):
                assert spec.Dv > 128 or spec.Dv % 8
        else:
            assert refusing, f"JAX refuses it on {device}, and no rule of ours does: {spec}"
            assert any(type(rule) not in (rules.SoftmaxDtype, rules.BiasDtype) for rule in refusing)


@pytest.mark.parametrize("window", [(3, 0), (3, 2), (0, 0), (4, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_against_the_public_function(window, causal, monkeypatch):
    """jax.nn checks the window itself, above the function that the route calls."""
    shapes = _shapes({"T": 64, "S": 64, "H": 2, "K": 2, "D": 64, "Dv": 64}, jnp.bfloat16)
    options = {"sliding_window": window, "causal": causal, "differentiable": False}
    spec = make_request(*shapes, options, OperationMetadata()).spec
    device = ao.DeviceProfile.named("a100")

    def public(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, local_window_size=window, implementation="cudnn")

    with cudnn_probes(device):
        try:
            jax.eval_shape(public, *shapes)
            accepted = True
        except ValueError:
            accepted = False
    assert (ROUTE.refusals(spec, OperationMetadata(), device) == ()) is accepted


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(request=requests(), device=st.sampled_from(PROFILES))
def test_what_we_accept_traces_with_its_gradient(request, device):
    """The route's own code on JAX's own function, nothing taken out but the machine."""
    sizes, dtype, options = request
    request = make_request(*_shapes(sizes, dtype), options, OperationMetadata())
    if _refusing(request.spec, device):
        return

    def run(query, key, value, bias, mask):
        return cudnn_attention(query, key, value, mask=mask, bias=bias, scale=request.scale)

    arrays = (request.query, request.key, request.value, request.bias)
    with cudnn_probes(device):
        if request.spec.differentiable:
            trained = (0, 1, 2) if request.bias is None else (0, 1, 2, 3)
            loss = lambda *args: run(*args).astype(jnp.float32).sum()  # noqa: E731
            gradients = jax.eval_shape(jax.grad(loss, argnums=trained), *arrays, request.mask)
            assert [x.shape for x in gradients] == [x.shape for x in arrays if x is not None]
        found = jax.eval_shape(run, *arrays, request.mask)
    assert found.shape == (*request.query.shape[:3], request.value.shape[3])


def test_the_head_dims_of_the_table():
    """The rule that decides the published table: 128 below capability 9.0, 256 from there."""
    for device, wanted in (("a100", 128), ("l4", 128), ("h100", 256), ("b200", 256)):
        largest = max(
            D
            for D in range(8, 300, 8)
            if not _refusing(
                make_request(
                    *_shapes({"T": 64, "S": 64, "H": 2, "K": 2, "D": D, "Dv": D}, jnp.bfloat16), {}, OperationMetadata()
                ).spec,
                ao.DeviceProfile.named(device),
            )
        )
        assert largest == wanted
