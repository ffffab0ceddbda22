"""Laws of attention on drawn requests. `make fuzz` tries many more of them: ATTENTION_OPS_FUZZ multiplies the examples."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import Structure, numbered, structure
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attention_ops as ao
from attention_ops.errors import AttentionOpsError
from attention_ops.selftest import reference
from attention_ops.selftest.numeric import compare

FACTOR = int(os.environ.get("ATTENTION_OPS_FUZZ", "1"))
NAMES = ("vanilla", "sdpa", "flash", "blocksparse", "cudnn_flash", "auto")
KERNELS = ("vanilla", "flash", "blocksparse")
SEEDS = st.integers(0, 2**32 - 1)
SILENT = ao.OperationMetadata(fallback="silent")


_examples = itertools.count(1)


def examples(count: int) -> Any:
    limits = settings(
        max_examples=count * FACTOR,
        deadline=None,
        derandomize=FACTOR == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
    )

    def prepare(test: Any) -> Any:
        law = test.hypothesis.inner_test

        @functools.wraps(law)
        def one(*args: Any, **kwargs: Any) -> None:
            if next(_examples) % 1000 == 0:
                jax.clear_caches()  # XLA's compiler crashes in a process that holds too many programs
            law(*args, **kwargs)

        test.hypothesis.inner_test = one
        return limits(test)

    return prepare


@st.composite
def structures(draw: Any, **choices: Any) -> Structure:
    return structure(lambda *options: options[draw(st.integers(0, len(options) - 1))], **choices)


def attend(name: str, call: Any, **changes: Any) -> ao.AttentionOutput:
    metadata = changes.pop("metadata", SILENT)
    return ao.attention(*call.arrays, impl=name, metadata=metadata, **call.given | changes)


def check(got: Any, call: Any, quantity: str = "output", multiple: float = 4.0) -> None:
    """Hold a result to the law: no farther off than a multiple of the error of the plain computation."""
    law, plain = (compute(call.query, call.key, call.value, call.law) for compute in (reference.attention, reference.plain))
    epsilon = reference.epsilon(reference.softmax_dtype(call.query.dtype))
    rounding = epsilon * law.largest_logit
    error, bound = compare(np.asarray(got), getattr(law, quantity), getattr(plain, quantity), multiple, rounding)
    if quantity == "output":
        # Values that cancel leave no scale of their own: that of the terms counts, whose weights are off as the logits are.
        terms = -_without_cancellation(law).output
        bound = max(bound, (epsilon + rounding) * float(terms.max(initial=0.0)))
    assert error <= bound, f"{quantity} is off by {error:.3g}, allowed is {bound:.3g}"


# ---------------------------------------------------------------- planning


@examples(1000)
@given(structures(lengths=(0, 1, 2, 7, 13), batches=(0, 1, 3)), st.sampled_from(NAMES), st.booleans(), SEEDS)
def test_a_plan_is_the_same_for_arrays_and_their_shapes(shape, name, differentiable, seed):
    call = shape.call(seed)

    def plan(abstract: bool) -> Any:
        lift = (lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x) if abstract else lambda x: x
        arrays, options = jax.tree_util.tree_map(lift, (call.arrays, call.given))
        try:
            return ao.plan(name, *arrays, differentiable=differentiable, **options)
        except (ValueError, TypeError, AttentionOpsError) as error:
            return type(error), str(error)

    found = plan(abstract=True)
    assert found == plan(abstract=False)
    assert isinstance(found, ao.Plan), found  # vanilla takes everything
    assert found.route in {decision.route for decision in found.decisions if decision.accepted}
    assert found.decisions[0].accepted or found.reasons


@examples(500)
@given(structures(), SEEDS, st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2, 5, 8]))
def test_a_block_map_never_hides_what_is_visible(shape, seed, block_q, block_kv):
    call = shape.call(seed)
    spec = ao.plan("vanilla", *call.arrays, **call.given).spec
    B, T, S, H, *_ = shape.sizes
    visible = reference.visible(B, H, T, S, {name: x for name, x in call.law.items() if name != "bias"})
    if spec.mask is None:
        assert visible.all() or not shape.is_positional
        return
    kinds = spec.mask.block_map(T, S, block_q, block_kv)
    kinds = np.broadcast_to(kinds, (B, H, *kinds.shape[2:]))
    for i in range(kinds.shape[2]):
        for j in range(kinds.shape[3]):
            tile = visible[:, :, i * block_q : (i + 1) * block_q, j * block_kv : (j + 1) * block_kv]
            assert not tile.any((2, 3))[kinds[:, :, i, j] == 0].any()
            assert tile.all((2, 3))[kinds[:, :, i, j] == 2].all()


# ---------------------------------------------------------------- results


@examples(360)
@given(st.integers(0, 12 * FACTOR - 1), st.sampled_from(NAMES), SEEDS, st.booleans())
def test_results_are_those_of_the_reference(number, name, seed, poison):
    call = structure(numbered(number)).call(seed)
    call = call.poisoned() if poison else call
    out = attend(name, call)
    check(out.attention_outputs, call)
    if out.logsumexp is not None:
        check(out.logsumexp, call, "logsumexp")


@functools.cache
def _pullback(name: str, shape: Structure) -> Any:
    """Return the compiled gradient of a structure: arrays, bias and sinks, and the cotangent."""
    is_data = lambda x: any(isinstance(leaf, jax.Array) for leaf in jax.tree_util.tree_leaves(x))  # noqa: E731
    static = {name: x for name, x in shape.call(0).given.items() if not is_data(x)}

    def pull(arrays: Any, data: Any, cotangent: Any) -> Any:
        wanted = {key: data.pop(key) for key in ("bias", "softmax_aux") if key in data}
        run = lambda arrays, wanted: ao.attention(*arrays, impl=name, metadata=SILENT, **static, **data, **wanted)  # noqa: E731
        return jax.vjp(lambda a, w: run(a, w).attention_outputs, arrays, wanted)[1](cotangent)

    return jax.jit(pull), static


@examples(80)
@given(st.integers(0, 3 * FACTOR - 1), st.sampled_from(KERNELS), SEEDS)
def test_gradients_are_those_of_the_reference(number, name, seed):
    shape = dataclasses.replace(structure(numbered(1000 + number)), dtype="float32")
    call = shape.call(seed).poisoned()
    pull, static = _pullback(name, shape)
    B, T, _, H, _, _, Dv = shape.sizes
    cotangent = np.random.default_rng(seed).standard_normal((B, T, H, Dv)).astype(np.float32)
    data = {key: x for key, x in call.given.items() if key not in static}
    (d_query, d_key, d_value), others = pull(call.arrays, data, jnp.asarray(cotangent))
    exact = reference.attention(call.query, call.key, call.value, call.law)
    law, plain = (found.gradients(cotangent) for found in (exact, reference.plain(call.query, call.key, call.value, call.law)))
    rounding = reference.epsilon(np.float32) * exact.largest_logit
    terms = _without_cancellation(exact).gradients(np.abs(cotangent))
    found = {"query": d_query, "key": d_key, "value": d_value, "bias": others.get("bias"), "sinks": others.get("softmax_aux")}
    for key, gradient in found.items():
        if gradient is not None:
            error, bound = compare(np.asarray(gradient), getattr(law, key), getattr(plain, key), 6.0, rounding)
            allowed = max(bound, (reference.epsilon(np.float32) + rounding) * float(getattr(terms, key).max(initial=0.0)))
            assert error <= allowed, f"{key}: off by {error:.3g}, allowed is {allowed:.3g}"


def _without_cancellation(found: reference.Attention) -> reference.Attention:
    """Return it with absolute values that only add up. Its gradients, of an absolute cotangent, are the sums of the sizes of all
    terms: the scale of what rounding does to a gradient that cancels.
    """
    query, key, value = (np.abs(x) for x in (found._query, found._key, found._value))
    output = -(found.weights @ value).swapaxes(1, 2)
    return dataclasses.replace(found, _query=query, _key=key, _value=value, output=output, _scale=abs(found._scale))


@pytest.mark.filterwarnings("error")
@examples(60)
@given(structures(lengths=(0, 1, 3), batches=(0, 1, 2)), st.sampled_from(KERNELS), SEEDS)
def test_an_empty_axis_gives_zeros(shape, name, seed):
    B, T, S, *_ = shape.sizes
    if 0 not in (B, T, S):
        B, _, S, *rest = shape.sizes
        shape = dataclasses.replace(shape, sizes=(B, 0, S, *rest), offset=0)
    out = attend(name, shape.call(seed))
    assert not np.asarray(out.attention_outputs).astype(np.float32).any()
    assert out.logsumexp is None or np.all(np.isneginf(out.logsumexp))


# ---------------------------------------------------------------- two calls that must agree

KEYS, QUERIES, HEADS = 13, 7, 6


def _plain_call(seed: int, T: int = QUERIES, **changes: Any) -> Any:
    """A call with grouped heads, a full bias, a boolean array, ids and lengths, all run-time data; no positions."""
    wanted = Structure(
        sizes=(2, T, KEYS, HEADS, 2, 8, 5),
        dtype="float32",
        causal=False,
        window=None,
        offset=None,
        mask=("data", 0, None, (True,) * 4),
        bias=(True,) * 4,
        has_ids=True,
        lengths=(False, False),
        sinks="head",
        cap=None,
        scale=None,
        logsumexp=True,
    )
    return dataclasses.replace(wanted, **changes).call(seed)


def _same(name: str, first: ao.AttentionOutput, second: Any, call: Any) -> None:
    """Two ways to the same output: each may be off by the tolerance of one."""
    law, plain = (compute(call.query, call.key, call.value, call.law) for compute in (reference.attention, reference.plain))
    rounding = reference.epsilon(np.float32) * law.largest_logit
    _, bound = compare(law.output.astype(np.float32), law.output, plain.output, 8.0, rounding)
    np.testing.assert_allclose(np.asarray(first), np.asarray(second), rtol=0, atol=bound, err_msg=name)


def _reordered(call: Any, order: dict[str, np.ndarray]) -> Any:
    """Return the call with its axes B, H, K, T, S in another order."""
    axes = {"query": "BTH.", "key": "BSK.", "value": "BSK.", "bias": "BHTS", "mask": "BHTS"}
    axes |= {"softmax_aux": "H", "q_segment_ids": "BT", "kv_segment_ids": "BS"}

    def turn(name: str, x: Any) -> Any:
        for axis, letter in enumerate(axes.get(name, "")):
            if letter in order:
                x = np.take(np.asarray(x), order[letter], axis)
        return x

    law = {name: turn(name, x) for name, x in call.law.items()}
    given = {name: jnp.asarray(law[name]) if name in axes else x for name, x in call.given.items()}
    arrays = {name: turn(name, getattr(call, name)) for name in ("query", "key", "value")}
    return dataclasses.replace(call, given=given, law=law, **arrays)


@examples(60)
@given(st.sampled_from(KERNELS), SEEDS, st.sampled_from(["batch", "heads", "queries", "keys"]))
def test_reordering_commutes(name, seed, what):
    rng, call = np.random.default_rng(seed), _plain_call(seed)
    groups = rng.permutation(2)
    orders = {
        "batch": {"B": rng.permutation(2)},
        "heads": {"K": groups, "H": (groups[:, None] * 3 + rng.permuted(np.tile(np.arange(3), (2, 1)), axis=1)).ravel()},
        "queries": {"T": rng.permutation(QUERIES)},
        "keys": {"S": rng.permutation(KEYS)},
    }
    order = orders[what]
    call = dataclasses.replace(call, given={**call.given, "mask": jnp.asarray(call.law["mask"])})
    other = _reordered(call, order)
    first = np.asarray(attend(name, call).attention_outputs)
    for axis, letter in enumerate("BTH"):
        if letter in order:
            first = np.take(first, order[letter], axis)
    _same(what, first, attend(name, other).attention_outputs, other)


@examples(50)
@given(st.sampled_from(KERNELS), SEEDS, st.booleans())
def test_keys_that_nobody_sees_change_nothing(name, seed, by_length):
    call, more = _plain_call(seed, mask=None, bias=None), 4
    rng = np.random.default_rng(seed)
    garbage = rng.choice([np.nan, np.inf, 1e30], (2, more, 2, 8)).astype(np.float32)
    grown = {
        name: np.concatenate([getattr(call, name), garbage[..., : getattr(call, name).shape[3]]], 1) for name in ("key", "value")
    }
    ids = np.pad(call.law["kv_segment_ids"], ((0, 0), (0, more)), constant_values=1 if by_length else -1)
    law = call.law | {"kv_segment_ids": ids} | ({"kv_lengths": np.full((2,), KEYS, np.int32)} if by_length else {})
    given = call.given | {key: jnp.asarray(law[key]) for key in ("kv_segment_ids", "kv_lengths") if key in law}
    longer = dataclasses.replace(call, given=given, law=law, **grown)
    _same("longer", attend(name, call).attention_outputs, attend(name, longer).attention_outputs, call)


@examples(50)
@given(st.sampled_from(KERNELS), SEEDS)
def test_parts_of_the_keys_merge_by_logsumexp(name, seed):
    call, cut = _plain_call(seed, mask=None, sinks=None), 6
    law, parts = call.law, []
    for keys in (slice(0, cut), slice(cut, None)):
        part_law = law | {"bias": law["bias"][..., keys], "kv_segment_ids": law["kv_segment_ids"][:, keys]}
        given = call.given | {key: jnp.asarray(part_law[key]) for key in ("bias", "kv_segment_ids")}
        part = dataclasses.replace(call, key=call.key[:, keys], value=call.value[:, keys], given=given, law=part_law)
        parts.append(attend(name, part))
    sums = np.stack([np.asarray(part.logsumexp) for part in parts])
    whole = np.logaddexp(*sums)
    weights = np.exp(sums - np.where(np.isneginf(whole), 0, whole))[..., None]
    merged = (weights * np.stack([np.asarray(part.attention_outputs) for part in parts])).sum(0)
    out = attend(name, call)
    _same("merged", out.attention_outputs, merged, call)
    check(whole.astype(np.float32), call, "logsumexp")


@examples(30)
@given(st.sampled_from(KERNELS), SEEDS, st.sampled_from([(None, None), (3, 0)]))
def test_decoding_step_by_step_is_the_prefill(name, seed, window):
    n = 9
    call = _plain_call(
        seed, sizes=(2, n, n, 4, 2, 8, 8), mask=None, bias=None, has_ids=False, causal=True, window=window, offset=0
    )
    prefill = np.asarray(attend(name, call).attention_outputs)
    key, value = (np.full_like(x, np.nan) for x in (call.key, call.value))
    for step in range(n):
        key[:, step], value[:, step] = call.key[:, step], call.value[:, step]
        given = call.given | {"query_offset": jnp.int32(step), "kv_lengths": jnp.full((2,), step + 1, jnp.int32)}
        one = dataclasses.replace(call, query=call.query[:, step : step + 1], key=key, value=value, given=given)
        _same(f"step {step}", attend(name, one).attention_outputs, prefill[:, step : step + 1], call)


@examples(60)
@given(
    st.sampled_from(["flash", "blocksparse"]),
    SEEDS,
    st.sampled_from([(1, 1), (2, 13), (3, 5), (7, 4), (8, 8), (512, None), (None, 2)]),
)
def test_block_sizes_never_change_a_result(name, seed, blocks):
    call = _plain_call(seed, causal=True, offset=KEYS - QUERIES).poisoned()
    out = attend(name, call, metadata=ao.OperationMetadata(block_sizes=blocks))
    check(out.attention_outputs, call)
    check(out.logsumexp, call, "logsumexp")
    _same(str(blocks), out.attention_outputs, attend(name, call).attention_outputs, call)


def test_there_are_2000_examples_and_50_000_under_fuzz():
    tests = [test for name, test in globals().items() if name.startswith("test_") and hasattr(test, "hypothesis")]
    total = sum(test._hypothesis_internal_use_settings.max_examples for test in tests)
    assert total >= 2000 * FACTOR
    (factor,) = re.findall(r"ATTENTION_OPS_FUZZ=(\d+)", (pathlib.Path(__file__).parents[1] / "Makefile").read_text())
    assert total // FACTOR * int(factor) >= 50_000
