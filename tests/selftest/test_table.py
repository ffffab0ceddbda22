"""The table itself: it covers what it claims, and every ingredient changes the result."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from attention_ops import Feature
from attention_ops.selftest import cases, reference, table
from attention_ops.selftest.cases import INGREDIENTS, parse

_ASKED = {Feature.BIAS_GRADIENT, Feature.WEIGHTS, Feature.LOGSUMEXP, Feature.GRADIENT}
"""Asked for by every case of a route that declares them."""


def test_quick_has_each_feature_alone_and_every_pair():
    names = table.quick(Feature.ALL)
    alone = {frozenset(case.features) for case in names}
    wanted = Feature.ALL - _ASKED
    assert {frozenset({feature}) for feature in wanted - {Feature.OFFSET}} <= alone
    assert frozenset({Feature.CAUSAL, Feature.OFFSET}) in alone
    pairs = {pair for case in names for pair in itertools.combinations(sorted(case.features), 2)}
    assert set(itertools.combinations(sorted(wanted), 2)) <= pairs


@pytest.mark.parametrize("declared", [{Feature.CAUSAL, Feature.GQA}, {Feature.BIAS, Feature.SINKS, Feature.VALUE_DIM}, set()])
def test_a_route_gets_no_case_that_it_does_not_declare_but_all_pairs_it_does(declared):
    names = table.quick(frozenset(declared))
    assert all(case.features <= declared for case in names)
    assert set(itertools.combinations(sorted(declared), 2)) <= {
        pair for case in names for pair in itertools.combinations(sorted(case.features), 2)
    }
    assert len({case.name for case in names}) == len(names)


def test_full_has_more():
    quick, full = set(table.quick(Feature.ALL)), set(table.full(Feature.ALL))
    assert quick < full
    assert {part for case in full for part in case.parts} == set(INGREDIENTS)
    found = {(frozenset(case.features), case.dtype) for case in full}
    for dtype in cases.DTYPES:
        assert (frozenset({Feature.SEGMENTS}), dtype) in found
    by_themselves = {features for features, _ in found}
    for one, other in itertools.combinations(sorted(Feature.ALL - _ASKED - {Feature.OFFSET}), 2):
        assert frozenset({one, other}) in by_themselves
    for geometry, mode in itertools.zip_longest(cases.GEOMETRIES, cases.MODES):
        assert any(case.geometry == geometry for case in full)
        assert mode is None or any(case.mode == mode for case in full)


@pytest.mark.parametrize("case", table.quick(Feature.ALL), ids=lambda case: case.name)
def test_names_lead_back(case):
    assert parse(case.name) == case


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("casual/small/float32", "Did you mean 'causal'"),
        ("plain/smal/float32", "Did you mean 'small'"),
        ("plain/small/small", "'small'"),
        ("plain/small/float23", "Did you mean 'float32'"),
    ],
)
def test_unknown_words_are_named(name, message):
    with pytest.raises(cases.UnknownCaseError, match=message):
        parse(name)


def test_data_depends_on_the_seed_and_on_nothing_else():
    case = parse("causal+gqa/small/bfloat16")
    one, same, other = case.problem(3), case.problem(3), case.problem(4)
    np.testing.assert_array_equal(one.query, same.query)
    assert not np.array_equal(one.query, other.query)


@pytest.mark.parametrize(
    "name", sorted(name for name, item in INGREDIENTS.items() if item.feature not in (None, Feature.DROPOUT))
)
def test_every_ingredient_bites(name):
    """Without the option, or with its law ignored, the result is another: a kernel that drops it is seen."""
    position = ("causal",) if INGREDIENTS[name].needs else ()
    problem = cases.make((*position, name)).problem()
    law = reference.attention(problem.query, problem.key, problem.value, problem.law)
    options = ("mask", "bias", "softmax_aux", "logits_soft_cap", "sliding_window", "q_segment_ids", "q_lengths", "kv_lengths")
    dropped = {key: value for key, value in problem.law.items() if key not in (*options, *(() if position else ("causal",)))}
    if position:
        dropped["query_offset"] = 0
    without = reference.attention(problem.query, problem.key, problem.value, dropped)
    if INGREDIENTS[name].feature in (Feature.GQA, Feature.VALUE_DIM):
        assert problem.key.shape[2] < 6 or problem.value.shape[3] != 16
    else:
        assert np.abs(law.output - without.output).max() > 0.05


@pytest.mark.parametrize("case", [case for case in table.quick(Feature.ALL) if case.variant == "nan"], ids=lambda case: case.name)
def test_most_rows_see_something_and_something_is_hidden(case):
    problem = case.problem()
    B, T, H, _ = problem.query.shape
    allowed = reference.visible(B, H, T, problem.key.shape[1], problem.law)
    assert allowed.any(3).mean() > 0.3
    hidden = [np.isnan(array.astype(np.float32)).any() for array in (problem.query, problem.key, problem.value)]
    assert any(hidden)
