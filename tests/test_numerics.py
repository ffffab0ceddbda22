"""Ours are nowhere much further from float64 than the better of jax.nn and, where it is installed, PyTorch: docs/numerics.md."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from benchmarks import numerics
from benchmarks.numerics import CASES, Case, Sizes

pytestmark = pytest.mark.usefixtures("optimised")

SIZES = {
    "causal": Sizes(),
    "long rows": Sizes(B=2, T=4, S=12_000, H=2, K=2, D=16),
    "cancelling sinks": Sizes(T=48, S=96, H=16, K=16, D=16),
    "shared keys": Sizes(B=8, T=64, S=64, H=16, K=1, D=32),
}
WANTED = {name: system for name, system in numerics.systems().items() if name not in ("sdpa", "blocksparse")}
"""sdpa is jax.nn and blocksparse the kernel of flash, each with the same numbers."""


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_errors_are_at_most_one_and_a_half_times_those_of_the_better_peer(case):
    case = case.smaller(SIZES.get(case.name, Sizes(B=2, T=128, S=128, H=8, K=8, D=32)))
    for dtype in case.dtypes[:2]:
        if dtype == np.float16 and "PyTorch" not in WANTED:
            continue  # jax.nn does not take it on the CPU, so there is no peer
        errors = numerics.measure(case, dtype, WANTED, seeds=2)
        assert not list(numerics.breaches(case, dtype, errors))


def test_an_error_is_counted_in_spacings_at_the_largest_number_of_the_head():
    want = np.array([[[[4.0, 0.001]], [[2.0, 1.0]]]])  # [1, 2, 1, 2]: one head
    got = want.astype(ml_dtypes.bfloat16)
    assert numerics.wrong(got, want).max() < 0.5
    got[0, 1, 0, 1] = 1.03125
    np.testing.assert_allclose(numerics.wrong(got, want).max(), 1.0)  # bfloat16 has 2**-5 above 4
    got[0, 1, 0, 1] = np.nan
    assert np.isinf(numerics.wrong(got, want).max())


def test_overflow_counts_where_the_exact_result_is_finite():
    want = np.array([65000.0, 70000.0])
    assert np.array_equal(numerics.wrong(np.array([np.inf, np.inf], np.float16), want)[:, 0], [np.inf, 0])


def test_a_worse_result_is_a_breach():
    case = Case("test", "", (np.dtype(np.float32),), Sizes(T=16, S=16, H=2, K=2, D=8))

    def rounded(problem):
        return {name: x.astype(np.float16).astype(np.float32) for name, x in problem.law.items()}

    wanted = {"vanilla": rounded, "jax.nn": numerics.jax_nn}
    errors = numerics.measure(case, case.dtypes[0], wanted, seeds=1)
    assert len(list(numerics.breaches(case, case.dtypes[0], errors))) == 4
