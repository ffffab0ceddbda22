"""Plans: which route, why the others not, on this device and on devices that are not here."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest

import attention_ops as ao
from attention_ops import Feature


def _shapes(B=1, T=128, H=8, K=4, D=64, S=None, Dv=None, dtype=jnp.bfloat16):
    S, Dv = S or T, Dv or D
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in ((B, T, H, D), (B, S, K, D), (B, S, K, Dv)))


def _reasons(plan, route):
    return [str(reason) for decision in plan.decisions if decision.route == route for reason in decision.reasons]


GEMMA2 = {"T": 4096, "H": 8, "K": 4, "D": 256}


def test_gemma2_on_a100():
    plan = ao.plan("cudnn_flash", *_shapes(**GEMMA2), device="a100", causal=True)
    assert _reasons(plan, "cudnn_flash/cuda") == ["head_dim 256 > 128, the limit on compute capability 8.0"]
    assert plan.route == "flash/gpu"
    assert plan.is_fallback
    text = str(plan)
    for piece in ("cudnn_flash on a100", "runs flash/gpu", "head_dim 256 > 128", "GFLOP", "causal"):
        assert piece in text
    assert max(map(len, text.splitlines())) < 150


def test_gemma2_on_h100_is_accepted():
    assert ao.plan("cudnn_flash", *_shapes(**GEMMA2), device="h100", causal=True).route == "cudnn_flash/cuda"


def test_a_dtype_that_no_gpu_kernel_has_is_a_reason():
    with jax.enable_x64(True):
        plan = ao.plan("flash", *_shapes(dtype=jnp.float64), device="a100")
    assert plan.route == "flash/native"
    assert any(reason.startswith("dtype float64 is not one of") for reason in _reasons(plan, "flash/gpu"))


A100, KEY = "a100", jax.random.PRNGKey(0)
REFUSALS = [
    ({}, {}, "t4", "compute capability 7.5 < 8.0, the minimum"),
    ({}, {}, ao.DeviceProfile.named("a100", cudnn_version=(8, 9, 0)), "cuDNN 8.9.0 < 9.8, the minimum"),
    ({}, {}, ao.DeviceProfile.named("a100", cudnn_version=None), "no cuDNN found"),
    ({}, {}, ao.DeviceProfile("gb300", "cuda", (10, 3), cudnn_version=(9, 10, 1)), "cuDNN 9.10.1 < 9.11.*10.3"),
    ({"dtype": jnp.float32}, {}, A100, "dtype float32 is not one of bfloat16, float16"),
    ({"D": 72}, {}, A100, None),
    ({"D": 76}, {}, A100, r"head_dim 76 is not a multiple of 8 \(pad to 80 with softmax_scale=76\*\*-0.5\)"),
    ({"D": 136}, {}, A100, "head_dim 136 > 128"),
    ({"D": 264}, {}, "h100", "head_dim 264 > 256, the limit on compute capability 9.0"),
    ({"Dv": 32}, {}, "h100", None),
    ({"Dv": 32}, {}, A100, "value head_dim 32 != head_dim 64 on compute capability 8.0 < 9.0, the minimum"),
    (
        {"Dv": 32},
        {},
        ao.DeviceProfile.named("h100", cudnn_version=(9, 9, 1)),
        "value head_dim .* with cuDNN 9.9.1, 9.10 is needed",
    ),
    ({}, {}, ao.DeviceProfile.named("a100", jax_version=(0, 6, 2)), "JAX 0.6.2 < 0.10, the minimum"),
    ({}, {"logits_soft_cap": 30.0}, A100, "does not support logits_soft_cap"),
    ({}, {"softmax_aux": jax.ShapeDtypeStruct((8,), jnp.float32)}, A100, "does not support attention sinks"),
    ({}, {"return_weights": True}, A100, "does not support return_weights"),
    ({}, {"causal": True, "query_offset": 3}, A100, "does not support a query_offset other than 0"),
    ({}, {"sliding_window": (5, 5)}, A100, "window right size 5 != 0 without causal masking"),
    ({}, {"sliding_window": (5, 0)}, A100, None),
    ({}, {"sliding_window": (5, 5), "causal": True}, A100, None),
    ({}, {"sliding_window": (None, 0)}, A100, None),
    ({}, {"sliding_window": (5, None)}, A100, r"window right size None \(no end\) != 0 without causal masking"),
    (
        {},
        {"dropout_prob": 0.1, "deterministic": False, "dropout_rng": KEY},
        A100,
        "does not support dropout: cuDNN's takes a seed",
    ),
    ({"T": 127}, {}, A100, "query length 127, key length 127: training needs both even"),
    ({"T": 128, "S": 127}, {}, A100, "query length 128, key length 127: training needs both even"),
    ({"T": 127}, {"bias": jax.ShapeDtypeStruct((1, 1, 127, 127), jnp.bfloat16), "differentiable": False}, A100, None),
    ({}, {"bias": jax.ShapeDtypeStruct((1, 1, 1, 128), jnp.float32)}, A100, "bias dtype float32 != runtime dtype bfloat16"),
    ({}, {}, "cpu", "has no route for cpu, only for cuda"),
    ({}, {}, "mi300x", "has no route for rocm, only for cuda"),
    ({}, {}, "tpu-v5e", "has no route for tpu, only for cuda"),
]


@pytest.mark.parametrize(("sizes", "options", "device", "reason"), REFUSALS, ids=[str(case[3])[:40] for case in REFUSALS])
def test_each_limit_of_cudnn_refuses_alone(sizes, options, device, reason):
    plan = ao.plan("cudnn_flash", *_shapes(**sizes), device=device, **options)
    first = plan.decisions[0]
    if reason is None:
        assert plan.route == "cudnn_flash/cuda"
        return
    assert len(first.reasons) == 1
    assert plan.operation != "cudnn_flash"
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(str(first.reasons[0]))


def test_all_reasons_are_given():
    plan = ao.plan("cudnn_flash", *_shapes(D=260, dtype=jnp.float32), device="t4", logits_soft_cap=1.0, return_weights=True)
    assert len(_reasons(plan, "cudnn_flash/cuda")) == 5
    assert plan.route == "vanilla/native"
    assert _reasons(plan, "flash/native") == ["does not support return_weights"]


def test_plan_as_values():
    plan = ao.plan("cudnn_flash", *_shapes(), device="cpu", causal=True)
    values = json.loads(json.dumps(plan.to_dict()))
    assert values["route"] == "flash/native"
    assert values["decisions"][0] == {
        "route": "cudnn_flash",
        "accepted": False,
        "reasons": [{"text": "has no route for cpu, only for cuda", "remedy": ""}],
    }
    assert values["flops"] == 2 * 8 * 128 * 128 * (64 + 64)
    assert values["temporary_bytes"] > 0


def test_estimates_follow_the_mask():
    full, causal, window = (
        ao.plan("blocksparse", *_shapes(T=4096), device="cpu", **options).estimate
        for options in ({}, {"causal": True}, {"causal": True, "sliding_window": (511, 0)})
    )
    assert full.flops > 1.8 * causal.flops > 1.8 * 3 * window.flops
    dense = ao.plan("vanilla", *_shapes(T=4096), device="cpu").estimate
    assert dense.temporary_bytes > 10 * full.temporary_bytes


def test_a_chain_replaces_the_declared_fallbacks():
    plan = ao.plan(["cudnn_flash", "vanilla"], *_shapes(), device="cpu")
    assert plan.route == "vanilla/native"
    assert [decision.route for decision in plan.decisions] == ["cudnn_flash", "vanilla/native"]
    assert not plan.is_fallback
    for one in (["cudnn_flash"], ("cudnn_flash",)):
        with pytest.raises(ao.NoRouteError, match="no route of cudnn_flash takes this request on cpu"):
            ao.plan(one, *_shapes(), device="cpu")
    assert ao.plan("cudnn_flash", *_shapes(), device="cpu").route == "flash/native"
    with pytest.raises(ao.NoRouteError, match="no route of cudnn_flash > sdpa takes this request on cpu") as error:
        ao.plan(["cudnn_flash", "sdpa"], *_shapes(), device="cpu", logits_soft_cap=5.0)
    assert "sdpa/native: does not support logits_soft_cap" in str(error.value)


def test_a_single_route_can_be_named():
    plan = ao.plan("flash/native", *_shapes(), device="cpu")
    assert [decision.route for decision in plan.decisions] == ["flash/native"]
    with pytest.raises(ao.UnknownOperationError, match="no route is named 'flash/tpux'; flash has .*flash/native"):
        ao.plan("flash/tpux", *_shapes(), device="cpu")


@pytest.mark.parametrize(
    ("name", "has"),
    [("auto/native", "auto has none of its own"), ("ring/tpu", "ring has none of its own"), ("flash/", "flash has flash/gpu")],
)
def test_a_route_that_is_not_there_is_an_error_wherever_it_is_named(name, has, monkeypatch):
    error = pytest.raises(ao.UnknownOperationError, match=f"no route is named '{name}'; {has}")
    with error:
        ao.plan(name, *_shapes(), device="cpu")
    with error, ao.use(name):
        pass
    monkeypatch.setenv("ATTENTION_OPS_IMPL", f"vanilla,{name}")
    with pytest.raises(ao.UnknownOperationError, match=f"ATTENTION_OPS_IMPL=vanilla,{name}: no route"):
        ao.attention(*[jnp.ones((1, 4, 2, 8))] * 3)


def test_auto_follows_its_order():
    assert ao.plan("auto", *_shapes(T=64), device="cpu").route == "vanilla/native"
    assert ao.plan("auto", *_shapes(T=2048), device="cpu").route == "blocksparse/native"
    assert ao.plan("auto", *_shapes(T=2048), device="h100").route == "cudnn_flash/cuda"
    weights = ao.plan("auto", *_shapes(T=2048), device="h100", return_weights=True)
    assert weights.route == "vanilla/native"
    assert not weights.is_fallback


@pytest.fixture
def kernel(registry):
    """An operation whose gpu forward takes masks and whose native forward does not."""

    @registry.register
    class Kernel(ao.OperationImpl):
        name = "kernel"
        fallback = ("vanilla",)

        @ao.forward(supports={Feature.MASK, Feature.GRADIENT}, rules=(ao.rules.HeadDim(maximum=256, multiple_of=16),))
        def forward_gpu(self, request):
            return request.query

        @ao.forward(supports={Feature.GRADIENT})
        def forward_native(self, request):
            return request.query

    return Kernel


def test_support_is_asked_of_the_forward_that_would_run(kernel):
    shapes, mask = _shapes(K=8), jax.ShapeDtypeStruct((128, 128), bool)
    assert ao.plan("kernel", *shapes, device="a100", mask=mask).route == "kernel/gpu"
    assert ao.plan("kernel", *shapes, device="mi300x", mask=mask).route == "kernel/gpu"
    for device in ("cpu", "tpu-v5e"):
        plan = ao.plan("kernel", *shapes, device=device, mask=mask)
        assert plan.route == "vanilla/native"
        assert _reasons(plan, "kernel/native") == ["does not support an arbitrary boolean mask"]


def test_eligibility_is_judged_per_call(kernel):
    routes = [ao.plan("kernel", *_shapes(K=8, D=D), device="a100").route for D in (64, 80, 512, 72, 64)]
    assert routes == ["kernel/gpu", "kernel/gpu", "kernel/native", "kernel/native", "kernel/gpu"]


def test_the_backend_of_the_metadata_decides(kernel):
    shapes = _shapes(K=8)
    assert ao.plan("kernel", *shapes, device="a100", metadata=ao.OperationMetadata(backend="native")).route == "kernel/native"
    assert ao.plan("kernel", *shapes, device="cpu", metadata=ao.OperationMetadata(backend="gpu")).route == "kernel/gpu"


def test_a_change_of_the_registry_reaches_cached_plans(registry):
    shapes = _shapes(K=8)
    assert ao.plan("sdpa", *shapes, device="cpu").route == "sdpa/native"

    @registry.register(override=True)
    class Sdpa(ao.OperationImpl):
        name = "sdpa"
        fallback = ("vanilla",)

        def forward_native(self, request):
            return request.query

    assert ao.plan("sdpa", *shapes, device="cpu").route == "vanilla/native"


def test_inactive_dropout_does_not_change_the_route():
    shapes = _shapes()
    plain = ao.plan("flash", *shapes, device="cpu")
    assert ao.plan("flash", *shapes, device="cpu", dropout_prob=0.1, deterministic=True).route == plain.route
    active = ao.plan("flash", *shapes, device="cpu", dropout_prob=0.1, deterministic=False, dropout_rng=jax.random.key(0))
    assert active.route == "vanilla/native"
    assert _reasons(active, "flash/native") == ["does not support dropout"]


def test_forward_only_kernels_need_differentiable_false(registry):
    @registry.register
    class ForwardOnly(ao.OperationImpl):
        name = "forward_only"
        fallback = ("vanilla",)

        def forward_native(self, request):
            return request.query

    refused = ao.plan("forward_only", *_shapes(K=8), device="cpu")
    assert _reasons(refused, "forward_only/native") == [
        "does not support gradients (differentiable=True) (pass differentiable=False where no gradient is taken)"
    ]
    assert ao.plan("forward_only", *_shapes(K=8), device="cpu", differentiable=False).route == "forward_only/native"


def test_a_rule_may_answer_with_a_plain_sentence(registry):
    class Never:
        def check(self, spec, metadata, device):
            return "never today"

        def describe(self):
            return "never"

    @registry.register
    class Shy(ao.OperationImpl):
        name = "shy"
        fallback = ("vanilla",)

        @ao.forward(supports=Feature.ALL, rules=(Never(),))
        def forward_native(self, request):
            return request.query

    assert _reasons(ao.plan("shy", *_shapes(), device="cpu"), "shy/native") == ["never today"]


def test_the_plan_of_an_operation_or_config_says_where_its_name_came_from(monkeypatch):
    config = ao.load_config("configs/gemma2_2b.yaml")
    attend, shapes = config.build(layer=0), config.shapes(batch=1, length=64, layer=0)
    assert attend.plan(*shapes).notes[0].startswith("name chosen by config gemma2_2b")
    op = ao.OperationRegistry.create("flash")
    assert op.plan(*shapes).notes[0] == "name chosen by operation"
    with ao.use("vanilla"):
        for chosen in (op.plan(*shapes), attend.plan(*shapes)):
            assert (chosen.operation, chosen.notes[0]) == ("vanilla", "name chosen by attention_ops.use")
    monkeypatch.setenv("ATTENTION_OPS_IMPL", "sdpa")
    assert op.plan(*shapes).requested == ("sdpa",)
