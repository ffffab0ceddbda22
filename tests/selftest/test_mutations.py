"""Every fault planted in our own code is convicted by the case, or the check, that is named for it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import on_devices
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from mutations import MESH, MUTATIONS, PAGE, page

import attention_ops as ao
from attention_ops import masks, rules
from attention_ops.features import Feature
from attention_ops.kernels import splash_masks, tile_work
from attention_ops.selftest import cases, reference, runner, table
from attention_ops.selftest.results import Report, Settings

SELFTEST = [mutation for mutation in MUTATIONS if mutation.route not in ("", MESH)]
OVER_MESH = [mutation for mutation in MUTATIONS if mutation.route == MESH]
CHECKED = [mutation for mutation in MUTATIONS if not mutation.route]
DECLARATIONS = ("refuse/", "inactive_")


def _selftest(route: str, *names: str) -> Report:
    """Run the selftest on cases of one route."""
    operation = route.partition("/")[0]
    if names[0].startswith(DECLARATIONS):
        report = runner.run([operation], Settings(cases=names))
        return dataclasses.replace(report, routes=tuple(found for found in report.routes if found.route == route))
    wanted = [cases.parse(name) for name in names]
    return runner.run(
        [operation],
        Settings(declarations=False),
        source=lambda subject, proof: wanted if subject.name == route and proof != "lowering" else [],
    )


# ---------------------------------------------------------------- checks beside the selftest

SIZES = ((7, 7), (6, 11), (12, 5))
TILINGS = [masks.Tiling(*size, *blocks) for size in SIZES for blocks in ((1, 1), (2, 3), (4, 2), (1, 4))]
STATIC = (
    masks.Causal(0),
    masks.Causal(3),
    masks.Window(2, 1, 0),
    masks.Window(None, 2, -1),
    masks.Window(3, None, 2),
    masks.Window(1, 0, 0) | masks.Window(0, 2, -4),
    masks.PrefixLM(3, 0),
    masks.Chunked(3, 1),
    ~masks.Window(2, 2, 0),
    masks.Causal(0) & ~masks.Window(1, 1, 0),
)


def _tiles(mask: masks.Mask, tiling: masks.Tiling) -> tuple[np.ndarray, np.ndarray]:
    """Return whether something, and whether all, of each tile is visible, from the array."""
    dense = np.asarray(mask.dense(tiling.T, tiling.S))[0, 0]
    rows, cols = tiling.grid
    some, every = np.zeros((2, rows, cols), bool)
    for i, j in np.ndindex(rows, cols):
        tile = dense[i * tiling.block_q : (i + 1) * tiling.block_q, j * tiling.block_kv : (j + 1) * tiling.block_kv]
        some[i, j], every[i, j] = tile.any(), tile.all()
    return some, every


def bounds_hold_what_the_array_says() -> None:
    for mask, tiling in itertools.product(STATIC, TILINGS):
        may, must = (np.broadcast_to(x, (1, 1, *tiling.grid))[0, 0] for x in mask.bounds(tiling, np))
        some, every = _tiles(mask, tiling)
        assert np.all(may | ~some), (mask, tiling)
        assert np.all(every | ~must), (mask, tiling)


def _visits(work: tile_work.TileWork, row: int) -> tuple[list[int], list[int]]:
    """Return the tiles that one outer tile visits as full, and as partial."""
    visited: dict[bool, list[int]] = {True: [], False: []}
    edges = np.asarray(work.bounds)[0, 0, row]
    runs = ((work.has_before, 0, True), (work.has_full, 1, False), (work.has_after, 2, True))
    for present, run, partial in runs:
        places = range(edges[run], edges[run + 1]) if present else ()
        visited[partial] += [place if work.order is None else int(work.order[0, 0, row, place]) for place in places]
    return visited[False], visited[True]


def tile_work_visits_what_is_visible() -> None:
    for mask, tiling in itertools.product(STATIC, TILINGS):
        work = tile_work.tile_work(mask, tiling, by_data=True, never_full=False)
        some, every = _tiles(mask, tiling)
        for row in range(tiling.grid[0]):
            full, partial = _visits(work, row)
            assert len({*full, *partial}) == len(full) + len(partial), (mask, tiling)
            assert {*np.flatnonzero(some[row])} <= {*full, *partial}, (mask, tiling)
            assert {*full} <= {*np.flatnonzero(every[row])}, (mask, tiling)


def hidden_from_all_is_what_the_array_says() -> None:
    for mask, (T, S) in itertools.product(STATIC[:5], SIZES):
        dense = np.asarray(mask.dense(T, S))[0, 0]
        expected = not dense.any(1).all(), not dense.any(0).all()
        assert tile_work.hidden_from_all(mask, T, S) == expected, (mask, T, S)


def gradients_in_16_bits_are_those_of_the_output_before_rounding() -> None:
    """Within one spacing of the largest, of values far from zero: the cotangent of a logit is a small difference of theirs."""
    rng = np.random.default_rng(1)
    query, key, value, cotangent = (jnp.asarray(rng.standard_normal((4, 16, 2, 16)), jnp.bfloat16) for _ in range(4))
    arrays = query, key, value + 4
    pull = jax.vjp(lambda *arrays: ao.attention(*arrays, impl="flash").attention_outputs, *arrays)[1]
    law = reference.attention(*arrays, {}).gradients(cotangent)
    for found, expected in zip(pull(cotangent), (law.query, law.key, law.value), strict=True):
        wrong = np.abs(np.asarray(found).astype(np.float64) - expected).max()
        assert wrong <= reference.epsilon(jnp.bfloat16) * np.abs(expected).max()


def splash_intervals_are_the_mask() -> None:
    offset = jnp.asarray([1, 4], jnp.int32)
    mask, layout = masks.Causal(offset) & masks.Window(3, 2, offset), splash_masks.Layout(2, 8, 12, 4, 4, folded=False)
    numbered = splash_masks._numbered(mask, layout)
    assert numbered is not None
    function, numbers = numbered
    key = np.arange(layout.samples * layout.padded[1])
    found = np.asarray(function(numbers[:, None], key)).reshape(2, 8, 2, 12)
    for sample, expected in enumerate(np.asarray(mask.dense(8, 12))[:, 0]):
        np.testing.assert_array_equal(found[sample, :, sample], expected)
        assert not found[sample, :, 1 - sample].any()


def splash_schedule_visits_what_is_visible() -> None:
    mask = masks.Causal(0)
    static, runtime = splash_masks.lower(mask, 1, 12, 12, 4, 2)
    plan, (some, _) = splash_masks.schedule(static, runtime, transposed=False), _tiles(mask, masks.Tiling(12, 12, 4, 2))
    for row in range(3):
        visited = plan.data_next[0, row][plan.block_mask[0, row] != masks.EMPTY]
        assert sorted(visited) == np.flatnonzero(some[row]).tolist()


def a_plan_follows_what_is_registered() -> None:
    class Probe(ao.OperationImpl):
        name = "probe_of_mutations"

        @ao.forward()
        def forward_native(self, request: ao.AttentionRequest) -> Any:
            return request.query

    class Other(Probe):
        pass

    x = jnp.zeros((1, 4, 1, 8))
    try:
        for cls in (Probe, Other):
            ao.OperationRegistry.register(override=True)(cls)
            assert ao.plan(cls.name, x, x, x, differentiable=False).implementation is cls
    finally:
        ao.OperationRegistry.unregister(Probe.name)


def a_backend_that_is_asked_for_is_planned() -> None:
    x = jnp.zeros((1, 256, 2, 64))
    metadata = ao.OperationMetadata(backend="native")
    assert ao.plan("blocksparse", x, x, x, metadata=metadata, device="tpu-v5e").route == "blocksparse/native"
    assert ao.plan("blocksparse", x, x, x, device="tpu-v5e").route == "blocksparse/tpu"


def rules_refuse_beyond_their_limit_and_not_at_it() -> None:
    x = jnp.zeros((1, 16, 2, 64))
    spec, device = ao.plan("vanilla", x, x, x).spec, ao.DeviceProfile.named("a100")
    with_bias = dataclasses.replace(spec, bias_dtype=spec.dtype)
    for rule, allowed, refused in (
        (rules.HeadDim(maximum=64), (spec, device), (dataclasses.replace(spec, Dv=65), device)),
        (rules.ComputeCapability((8, 0)), (spec, device), (spec, dataclasses.replace(device, compute_capability=(7, 5)))),
        (rules.LengthMultiple(8), (spec, device), (dataclasses.replace(spec, S=17), device)),
        (rules.BiasDtype(), (with_bias, device), (dataclasses.replace(spec, bias_dtype=np.dtype("float16")), device)),
    ):
        for (spec_asked, device_asked), is_refused in ((allowed, False), (refused, True)):
            found = rule.check(spec_asked, ao.OperationMetadata(), device_asked)
            assert (found is not None) == is_refused, rule


def _over(
    impl: str,
    T: int = 16,
    H: int = 4,
    K: int = 2,
    S: int = 16,
    *,
    mesh: dict[str, int],
    on_indivisible: Any = "replicate",
    **options: Any,
) -> ao.Plan:
    """Plan a call of four batch rows over a mesh of no devices."""
    arrays = (jax.ShapeDtypeStruct((4, n, heads, 8), jnp.float32) for n, heads in ((T, H), (S, K), (S, K)))
    metadata = ao.OperationMetadata(mesh=AbstractMesh(tuple(mesh.values()), tuple(mesh)), on_indivisible=on_indivisible)
    return ao.plan(impl, *arrays, metadata=metadata, **options)


def what_does_not_divide_is_replicated_or_refused() -> None:
    assert _over("flash", mesh={"dp": 2, "fsdp": 4}).spec.B == 2
    said = ""
    try:
        _over("flash", mesh={"dp": 2, "fsdp": 4}, on_indivisible="error")
    except ValueError as error:
        said = str(error)
    assert "batch size 4 cannot be split over the mesh axis 'fsdp' of 4 devices" in said


def a_way_that_cannot_be_gone_is_refused() -> None:
    try:
        _refuse_ways()
    except ValueError as error:
        raise AssertionError("what was planned cannot be cut so") from error


def _refuse_ways() -> None:
    plan = _over("ulysses", H=6, mesh={"tp": 2, "sp": 2})
    assert "ulysses needs query heads that 4 devices divide, found 6" in plan.reasons
    dropout = {"dropout_prob": 0.5, "deterministic": False, "dropout_rng": jax.ShapeDtypeStruct((2,), jnp.uint32)}
    in_chunks = {"mask": masks.Chunked(8) & masks.Causal()}
    for options in (dropout, {"return_weights": True}, in_chunks | {"query_offset": 15}):
        plan = _over("vanilla", T=1, mesh={"sp": 4}, **options)
        assert (plan.spec.S, plan.way) == (16, "gather"), options
    assert _over("vanilla", T=1, mesh={"sp": 4}).spec.S == 4
    in_zigzag, in_order = {"causal": True}, {"causal": True, "sliding_window": (3, 0)}
    for options, length in ((in_chunks, 4), (in_zigzag, 2), (in_order, 4), ({"mask": masks.Chunked(4) & masks.Causal()}, 4)):
        plan = _over("ring", mesh={"sp": 4}, **options)
        assert length == plan.spec.T, options
        assert ("would cut the mask's chunks of 8 keys into parts of 4" in plan.reasons) == (options is in_chunks)


def a_route_is_asked_about_one_devices_part() -> None:
    gathered = _over("vanilla", mesh={"sp": 4}, causal=True, bias=jnp.zeros((1, 4, 16, 16))).spec
    assert Feature.OFFSET in gathered.features
    assert gathered.bias_shape == (1, 4, 4, 16)
    merged = _over("flash", T=1, mesh={"sp": 4}, softmax_aux=jnp.zeros(4)).spec
    assert Feature.LOGSUMEXP in merged.features
    assert Feature.SINKS not in merged.features
    assert [_over("vanilla", H=8, K=K, mesh={"tp": 4}).spec.K for K in (2, 4, 8)] == [1, 1, 2]
    assert [_over("vanilla", H=6, K=3, mesh={"tp": n}).spec.K for n in (2, 3, 6)] == [3, 1, 1]


def inside_a_shard_map_arrays_are_local() -> None:
    mesh = AbstractMesh((4,), ("sp",))

    def local(x: Any) -> Any:
        return ao.attention(x, x, x, impl="ring", metadata=ao.OperationMetadata(mesh=mesh)).attention_outputs

    with ao.record_plans() as plans:
        try:
            jax.eval_shape(
                jax.shard_map(local, mesh=mesh, in_specs=P(None, "sp"), out_specs=P(None, "sp"), check_vma=False),
                jax.ShapeDtypeStruct((1, 16, 2, 8), jnp.float32),
            )
        except ValueError as error:
            raise AssertionError("a shard_map within the shard_map") from error
    assert plans[0].spec.T == 4


CHECKS = {
    check.__name__: check
    for check in (
        bounds_hold_what_the_array_says,
        tile_work_visits_what_is_visible,
        hidden_from_all_is_what_the_array_says,
        gradients_in_16_bits_are_those_of_the_output_before_rounding,
        splash_intervals_are_the_mask,
        splash_schedule_visits_what_is_visible,
        a_plan_follows_what_is_registered,
        a_backend_that_is_asked_for_is_planned,
        rules_refuse_beyond_their_limit_and_not_at_it,
        what_does_not_divide_is_replicated_or_refused,
        a_way_that_cannot_be_gone_is_refused,
        a_route_is_asked_about_one_devices_part,
        inside_a_shard_map_arrays_are_local,
    )
}

# ---------------------------------------------------------------- the proof


def _name(mutation) -> str:
    return f"{mutation.where}: {mutation.fault}"


def test_there_are_enough_and_each_is_another():
    assert len(MUTATIONS) >= 40
    assert len({(mutation.where, mutation.old) for mutation in MUTATIONS}) == len(MUTATIONS)
    assert {mutation.case for mutation in CHECKED} == set(CHECKS)


@pytest.mark.parametrize("route", sorted({mutation.route for mutation in SELFTEST}))
def test_the_cases_are_in_the_table_of_the_selftest_and_pass_without_a_fault(route):
    operation, _, backend = route.partition("/")
    declared = ao.OperationRegistry.get(operation).routes[backend].declaration.supports
    names = {mutation.case for mutation in SELFTEST if mutation.route == route}
    checks = {name for name in names if name.startswith(DECLARATIONS)}
    grid = (table.full if backend == "native" else table.interpreted)(declared)
    assert names - checks <= {case.name for case in grid}
    for found in filter(None, (names - checks, checks)):
        report = _selftest(route, *sorted(found))
        assert report.ok, [str(failure) for failure in report.failures]
        assert sum(one.cases for one in report.routes) == len(found)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_the_checks_pass_without_a_fault(check):
    check()


@pytest.mark.parametrize("mutation", SELFTEST, ids=_name)
def test_the_selftest_convicts(mutation):
    with mutation.planted():
        report = _selftest(mutation.route, mutation.case)
    assert not report.ok
    broken = [failure for failure in report.failures if failure.quantity == "raised" and "ValueError" not in failure.problem]
    assert not broken, "the fault does not run, which any call would show"


@pytest.mark.parametrize("mutation", CHECKED, ids=_name)
def test_the_check_convicts(mutation):
    with mutation.planted(), pytest.raises(AssertionError):
        CHECKS[mutation.case]()


def test_cases_over_a_mesh_pass_without_a_fault_and_convict():
    """In one process of four devices, as each start costs more than most faults."""
    found = on_devices(4, "-m", "tests.selftest.mesh_faults")
    lines = found.stdout.splitlines()
    passed, convicted = ([line.removesuffix(end) for line in lines if line.endswith(end)] for end in (": passes", ": convicted"))
    assert (len(passed) + len(convicted), found.returncode) == (len(lines), 0), found.stdout + found.stderr[-2000:]
    assert set(passed) == {mutation.case for mutation in OVER_MESH}
    assert convicted == [_name(mutation) for mutation in OVER_MESH]


def test_the_page_lists_them():
    text = PAGE.read_text()
    assert page(text) == text, "stale: run python tests/selftest/mutations.py"
