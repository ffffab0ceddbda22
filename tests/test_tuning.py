"""Tuned block sizes: which plans take them, what is said of them, and what happens to the file they stand in."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

import attention_ops as ao
from attention_ops import storage, tiled, tuning
from attention_ops.bench import tune
from attention_ops.bench.tune import Trial, clear_winner
from attention_ops.device import DeviceProfile
from attention_ops.metadata import BlockSizes
from attention_ops.rules import Reason
from attention_ops.selftest import reference


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(storage.ENVIRONMENT, str(tmp_path / "kept"))
    return tmp_path / "kept"


def shapes(B=1, T=64, S=None, H=2, K=None, D=8, dtype="float32"):
    kv = jax.ShapeDtypeStruct((B, S or T, K or H, D), dtype)
    return jax.ShapeDtypeStruct((B, T, H, D), dtype), kv, kv


def tuned_for(plan, q=32, kv=16, work="forward", **changes) -> tuning.Tuned:
    facts = {
        "machine": tuning.machine_of(DeviceProfile.current()),
        "versions": tuning.versions(),
        "route": plan.route,
        "request": tuning.request_of(plan.spec),
        **changes,
    }
    return tuning.Tuned(**facts, work=work, q=q, kv=kv, ratio=0.8, date="2026-01-31")


def keep_for(*arrays, op="blocksparse", q=32, kv=16, work="forward", **options) -> tuning.Tuned:
    one = tuned_for(ao.plan(op, *arrays, **options), q, kv, work)
    tuning.keep([one])
    return one


# ---------------------------------------------------------------- plans


def test_the_next_plan_takes_the_sizes_and_says_so():
    before = ao.plan("blocksparse", *shapes(), causal=True)
    assert before.block_sizes == BlockSizes()
    assert not any("block sizes" in note for note in before.notes)
    keep_for(*shapes(), causal=True)
    after = ao.plan("blocksparse", *shapes(), causal=True)
    assert after.block_sizes == BlockSizes(32, 16)
    note = "block sizes (32, 16) tuned on 2026-01-31 by `attention-ops tune`: 0.80 of the default's time, forward"
    assert note in after.notes
    assert f"  note     {note}" in str(after)
    assert after.to_dict()["block_sizes"] == {"q": 32, "kv": 16}
    stated = ao.OperationMetadata(block_sizes=(32, 16))
    assert after.estimate == ao.plan("blocksparse", *shapes(), causal=True, metadata=stated).estimate


@pytest.mark.parametrize("stated", [(16, 16), (16, None), (None, 64)])
def test_sizes_in_the_metadata_win(stated):
    keep_for(*shapes(), causal=True)
    plan = ao.plan("blocksparse", *shapes(), causal=True, metadata=ao.OperationMetadata(block_sizes=stated))
    assert plan.block_sizes == BlockSizes(*stated)
    assert not any("tuned" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("arrays", "options"),
    [
        (shapes(T=128), {"causal": True}),
        (shapes(S=128), {"causal": True, "query_offset": 0}),
        (shapes(D=16), {"causal": True}),
        (shapes(H=4, K=2), {"causal": True}),
        (shapes(dtype="bfloat16"), {"causal": True}),
        (shapes(), {}),
        (shapes(), {"causal": True, "logits_soft_cap": 5.0}),
        (shapes(), {"causal": True, "kv_lengths": jax.ShapeDtypeStruct((1,), "int32")}),
        (shapes(T=0), {"causal": True}),
    ],
)
def test_another_kind_of_request_keeps_the_default(arrays, options):
    keep_for(*shapes(), causal=True)
    assert ao.plan("blocksparse", *arrays, **options).block_sizes == BlockSizes()


def test_what_shares_a_kind_of_request_shares_the_sizes():
    keep_for(*shapes(), causal=True)
    for arrays in (shapes(B=3), shapes(H=8), shapes(T=40)):
        assert ao.plan("blocksparse", *arrays, causal=True).block_sizes != BlockSizes()
    assert ao.plan("blocksparse", *shapes(T=40), causal=True).block_sizes == BlockSizes(24, 16)
    assert ao.plan("auto", *shapes(T=40), causal=True).block_sizes == BlockSizes()  # vanilla runs


@pytest.mark.parametrize(
    "change", [{"machine": "another, 64 cores"}, {"versions": "attention_ops 0, jax 0"}, {"route": "flash/native"}]
)
def test_what_was_measured_elsewhere_is_not_taken(change):
    plan = ao.plan("blocksparse", *shapes(), causal=True)
    tuning.keep([tuned_for(plan, **change)])
    assert ao.plan("blocksparse", *shapes(), causal=True).block_sizes == BlockSizes()


def test_a_device_that_is_not_here_has_the_default():
    keep_for(*shapes(), causal=True)
    plan = ao.plan("blocksparse", *shapes(), causal=True, device="tpu-v5e", metadata=ao.OperationMetadata(backend="native"))
    assert plan.block_sizes == BlockSizes()


def test_a_plan_with_gradients_prefers_sizes_measured_with_them():
    keep_for(*shapes(), causal=True)
    assert ao.plan("blocksparse", *shapes(), causal=True).block_sizes == BlockSizes(32, 16)
    keep_for(*shapes(), causal=True, q=16, work="gradient")
    assert ao.plan("blocksparse", *shapes(), causal=True).block_sizes == BlockSizes(16, 16)
    assert ao.plan("blocksparse", *shapes(), causal=True, differentiable=False).block_sizes == BlockSizes(32, 16)


def test_the_sizes_reach_the_kernel_and_the_result_is_right(qkv, monkeypatch):
    given, kernel = [], tiled.blockwise_attention

    def spy(*args, block_q, block_kv, **options):
        given.append((block_q, block_kv))
        return kernel(*args, block_q=block_q, block_kv=block_kv, **options)

    monkeypatch.setattr(tiled, "blockwise_attention", spy)
    q, k, v = qkv(T=56, S=56)
    keep_for(q, k, v, causal=True, q=16, kv=24)
    op = ao.OperationRegistry.create("blocksparse")
    out = op(q, k, v, causal=True).attention_outputs
    assert given == [(16, 24)]
    np.testing.assert_allclose(out, reference.attention(q, k, v, {"causal": True}).output, atol=2e-6)
    stated = ao.OperationRegistry.create("blocksparse", ao.OperationMetadata(block_sizes=(32, 8)))
    stated(q, k, v, causal=True)
    assert given == [(16, 24), (32, 8)]


def test_an_operation_of_ones_own_is_given_sizes_if_it_declares_that_it_takes_them(registry, qkv):
    given = {}

    def make(name, **declaration):
        class Own(ao.OperationImpl):
            @ao.forward(supports={ao.Feature.GRADIENT}, **declaration)
            def forward_native(self, request):
                given[name] = self.metadata.block_sizes
                return request.query

        Own.name = name
        return registry.register(Own)

    make("takes", block_sizes=True)
    make("takes_not")
    q, k, v = qkv(T=32, K=4, H=4)
    for name in ("takes", "takes_not"):
        keep_for(q, k, v, op=name)
        ao.attention(q, k, v, impl=name)
    assert given == {"takes": BlockSizes(32, 16), "takes_not": BlockSizes()}


@dataclasses.dataclass(frozen=True)
class Multiples:
    """A rule like those of accelerators."""

    def check(self, spec, metadata, device):
        q = metadata.block_sizes.q or 32
        return Reason(f"block_sizes.q {q} is not a multiple of 32") if q % 32 else None

    def describe(self):
        return "multiples of 32"


def test_tuned_sizes_that_the_rules_refuse_are_not_taken(registry):
    class Picky(ao.OperationImpl):
        name = "picky"

        @ao.forward(supports={ao.Feature.GRADIENT}, rules=(Multiples(),), block_sizes=True)
        def forward_native(self, request):
            return request.query

    registry.register(Picky)
    keep_for(*shapes(T=64), op="picky", q=32)
    assert ao.plan("picky", *shapes(T=40)).block_sizes == BlockSizes(32, 16)  # evened out it would be 24
    keep_for(*shapes(T=64), op="picky", q=20)
    assert ao.plan("picky", *shapes(T=64)).block_sizes == BlockSizes()
    job = tune.Job(ao.plan("picky", *shapes(T=64)), shapes(T=64), {}, ao.OperationMetadata(), "forward")
    outcome = tune.measure(job, [BlockSizes(20, 16), BlockSizes(32, 16)], 1)
    assert [trial.failure for trial in outcome.trials] == ["CannotTune: block_sizes.q 20 is not a multiple of 32", None]


def test_inside_default_rule_nothing_is_tuned():
    keep_for(*shapes(), causal=True)
    with tuning.default_rule():
        assert ao.plan("blocksparse", *shapes(), causal=True).block_sizes == BlockSizes()
    assert ao.plan("blocksparse", *shapes(), causal=True).block_sizes == BlockSizes(32, 16)


@pytest.mark.parametrize("length", [1, 7, 40, 100, 1000, 2100, 4096])
@pytest.mark.parametrize("size", [1, 8, 100, 512, 2048])
def test_fitted_sizes_make_no_more_blocks_and_none_larger(length, size):
    fitted = tuning.fitted(BlockSizes(size, None), length, 1).q
    assert fitted is not None
    assert fitted <= size
    assert -(-length // fitted) == -(-length // size)


# ---------------------------------------------------------------- the file


def test_what_another_process_keeps_is_seen(folder):
    one = keep_for(*shapes(), causal=True)
    folder.joinpath("block_sizes.json").write_text(json.dumps({"kept": [dataclasses.asdict(one) | {"q": 8}]}))
    assert ao.plan("blocksparse", *shapes(), causal=True).block_sizes == BlockSizes(8, 16)
    folder.joinpath("block_sizes.json").unlink()
    assert ao.plan("blocksparse", *shapes(), causal=True).block_sizes == BlockSizes()


def test_the_file_is_read_once(monkeypatch):
    keep_for(*shapes(), causal=True)
    reads, load = [], storage.load
    monkeypatch.setattr(storage, "load", lambda name: reads.append(name) or load(name))
    for length in range(33, 60):
        ao.plan("blocksparse", *shapes(T=length), causal=True)
    assert reads == ["block_sizes"]
    assert tuning.table() is tuning.table()


def test_a_truncated_file_is_a_warning_and_is_rebuilt(folder):
    one = keep_for(*shapes(), causal=True)
    file = folder / "block_sizes.json"
    file.write_text(file.read_text()[:-20])
    with pytest.warns(UserWarning, match=r"block_sizes.json cannot be read and is ignored.*JSONDecodeError"):
        assert ao.plan("blocksparse", *shapes(), causal=True).block_sizes == BlockSizes()
    with pytest.warns(UserWarning, match="cannot be read"):
        tuning.keep([one])
    assert ao.plan("blocksparse", *shapes(), causal=True).block_sizes == BlockSizes(32, 16)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"q": 0}, "block_sizes.q is 0"),
        ({"kv": "16"}, "block_sizes.kv is '16'"),
        ({"work": "both"}, "work is 'both'; allowed are forward, gradient"),
        ({"ratio": -1.0}, "ratio is -1.0; allowed is a number above 0"),
        ({"colour": 1}, "unexpected keyword argument 'colour'"),
        ({"route": ["flash"]}, r"route is \['flash'\]; allowed is text"),
        (None, "must be a mapping"),
    ],
)
def test_an_entry_that_is_none_is_a_warning_and_the_others_count(folder, change, why):
    one = keep_for(*shapes(), causal=True)
    wrong = None if change is None else dataclasses.asdict(one) | {"route": "flash/native"} | change
    storage.save("block_sizes", {"kept": [wrong, dataclasses.asdict(one)]})
    with pytest.warns(UserWarning, match=f"1 entries are not in order and are ignored .*{why}"):
        assert ao.plan("blocksparse", *shapes(), causal=True).block_sizes == BlockSizes(32, 16)


def test_a_folder_that_cannot_be_is_an_error_to_keep_and_nothing_to_a_plan(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(storage.ENVIRONMENT, str(tmp_path / "file"))
    plan = ao.plan("blocksparse", *shapes(), causal=True)
    assert plan.block_sizes == BlockSizes()
    with pytest.raises(OSError):
        tuning.keep([tuned_for(plan)])


WRITER = """
import sys
from attention_ops import storage
for number in range(40):
    storage.update("shared", lambda content: content | {f"{sys.argv[1]}{number}": number})
"""


def test_processes_that_write_at_once_lose_nothing():
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, name]) for name in "ab"]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert set(storage.load("shared")) == {f"{name}{number}" for name in "ab" for number in range(40)}


def test_kept_sizes_are_dropped_by_key():
    first = keep_for(*shapes(), causal=True)
    second = keep_for(*shapes(T=128), causal=True)
    tuning.keep(dropped=[first.key])
    assert list(tuning.table().kept.values()) == [second]


# ---------------------------------------------------------------- the choice


def trial(*ratios, final=True, q=8):
    return Trial(BlockSizes(q, 8), ratios, is_final=final)


def test_a_winner_must_be_clear():
    assert clear_winner([]) is None
    assert clear_winner([trial(0.96, 0.96, 0.96)]) is None  # saves too little
    assert clear_winner([trial(0.9, 0.9, 0.9)]) == trial(0.9, 0.9, 0.9)
    assert clear_winner([trial(0.5, 0.9, 1.1, 0.8, 1.2)]) is None  # the slower one in too many rounds
    assert clear_winner([trial(0.1, final=False), trial(0.9, q=16)]) == trial(0.9, q=16)  # only screened
    assert clear_winner([Trial(BlockSizes(8, 8), failure="no"), trial(0.8, q=16), trial(0.7)]) == trial(0.7)


def job_of(*arrays, work="forward", **options):
    plan = ao.plan("blocksparse", *arrays, **options)
    return tune.Job(plan, arrays, options, ao.OperationMetadata(), work)


def test_candidates_fit_the_request():
    plan = ao.plan("blocksparse", *shapes(T=300, S=200, H=8, K=2))
    found = tune.candidates(plan)
    assert {sizes.q for sizes in found} == {32, 64, 128, 256}  # up to 1024 rows of 4 query heads
    assert {sizes.kv for sizes in found} == {128, 256}  # the smallest that holds all 200
    assert len(set(found)) == len(found)
    assert tune.candidates(plan, q=(64, 500, 400), kv=(100,)) == (BlockSizes(64, 100), BlockSizes(400, 100))
    decode = ao.plan("blocksparse", *shapes(T=1, S=512))
    assert {sizes.q for sizes in tune.candidates(decode)} == {128}


RUN_TIME = {
    "kv_lengths": jax.ShapeDtypeStruct((1,), "int32"),
    "q_segment_ids": jax.ShapeDtypeStruct((1, 32), "int32"),
    "mask": jax.ShapeDtypeStruct((32, 32), "bool"),
    "bias": jax.ShapeDtypeStruct((1, 1, 32, 32), "float32"),
    "query_offset": jax.ShapeDtypeStruct((), "int32"),
    "causal": True,
}


@pytest.mark.parametrize(("work", "options"), [("forward", RUN_TIME), ("gradient", {"causal": True})])
def test_every_candidate_is_measured_and_a_failing_one_is_a_result(work, options, monkeypatch):
    kernel, steps = tiled.blockwise_attention, []

    def picky(*args, block_q, **rest):
        if block_q == 8:
            raise RuntimeError("no such tile\nand a long story")
        return kernel(*args, block_q=block_q, **rest)

    monkeypatch.setattr(tiled, "blockwise_attention", picky)
    job = job_of(*shapes(T=32), work=work, **options)
    tried = tune.candidates(job.plan, (8, 16, 32), (16,))
    outcome = tune.measure(job, tried, 2, lambda: steps.append(1))
    assert [one.sizes for one in outcome.trials] == list(tried)
    failed, *others = outcome.trials
    assert failed.failure == "RuntimeError: no such tile"
    assert all(one.is_final and len(one.ratios) == 2 and one.ratio > 0 for one in others)
    assert 0 < len(steps) <= tune.steps(len(tried), 2)
    assert outcome.winner is None or outcome.winner.key == job.key
    nothing = {"ratio": None, "rounds": 0, "final": False}
    assert outcome.to_dict()["trials"][0] == {"q": 8, "kv": 16, "failure": "RuntimeError: no such tile", **nothing}


def test_a_default_that_fails_is_an_error(monkeypatch):
    def never(*args, **rest):
        raise RuntimeError("broken")

    monkeypatch.setattr(tiled, "blockwise_attention", never)
    with pytest.raises(tune.CannotTune, match="it fails with its default block sizes .RuntimeError: broken"):
        tune.measure(job_of(*shapes(T=16)), [BlockSizes(8, 8)], 1)


def test_what_is_tuned_already_does_not_change_the_default(monkeypatch):
    given, kernel = [], tiled.blockwise_attention

    def spy(*args, block_q, **rest):
        given.append(block_q)
        return kernel(*args, block_q=block_q, **rest)

    monkeypatch.setattr(tiled, "blockwise_attention", spy)
    arrays = shapes(T=16, D=4)
    keep_for(*arrays, q=8)
    tune.measure(job_of(*arrays), [BlockSizes(16, 16)], 1)
    assert given == [None, 16]
