"""ONNX's node tests of Attention: every operation by name, and the native routes themselves, give what is expected."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pytest

from attention_ops.selftest.numeric import compare
from benchmarks import conformance
from benchmarks.onnx_cases import cases

ROOT = pathlib.Path(__file__).parents[1]


def test_there_are_93_and_the_law_gives_what_each_expects():
    assert len({case.name for case in cases()}) == 93
    assert {case.opset for case in cases()} == {23, 24, 25}
    for case in cases():
        error, bound = compare(case.output, case.law.output, case.plain.output, 1.25, case.rounding)
        assert error <= bound, case.name
        assert case.check_output(case.output) is None
        assert case.qk is None or case.check_qk(case.qk) is None


@pytest.mark.parametrize(
    "names", [("vanilla", "auto"), ("flash/native", "flash", "cudnn_flash", "sdpa"), ("blocksparse/native", "blocksparse")]
)  # names that share compiled programs stay together
def test_every_case_is_right(names):
    failures = []
    for case in cases():
        for name in names:
            verdict = conformance.judge(conformance.SYSTEMS[name], case)
            if verdict.status != "right":
                failures.append(f"{name}: {case.name}: {verdict.status}, {verdict.reason}")
            if case.qk is not None and conformance.judge_qk(name, case).status != "right":
                failures.append(f"{name}: {case.name}: {conformance.judge_qk(name, case).reason}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(
    ("dropped", "asked", "wrong"),
    [
        ("mask", 10, 7),  # three hold nothing but True
        ("bias", 41, 41),
        ("logits_soft_cap", 11, 11),
        ("softmax_scale", 6, 6),
        ("kv_lengths", 13, 2),  # in the others causality hides the same keys, or the bias does
        ("sliding_window", 10, 9),
        ("query_offset", 15, 14),
        ("causal", 32, 28),
    ],
)
def test_a_system_that_drops_an_argument_is_found_wrong(dropped, asked, wrong):
    """The law without the argument stands for such a system. How many tests can tell is a fact about them."""

    def forgetful(case):
        options = {name: x for name, x in case.options.items() if name != dropped}
        if dropped == "query_offset":
            options["query_offset"] = 0
        return dataclasses.replace(case, options=options).law.output.astype(case.output.dtype)

    concerned = [case for case in cases() if np.any(case.options.get(dropped, 0))]
    assert len(concerned) == asked
    assert sum(conformance.judge(forgetful, case).status == "wrong" for case in concerned) == wrong


def test_verdicts_of_what_raises_returns_nan_or_has_another_dtype():
    case = cases()[0]
    assert conformance.judge(lambda _: 1 / 0, case) == conformance.Verdict("refused", "ZeroDivisionError: division by zero")
    wrong = conformance.judge(lambda case: np.full_like(case.output, np.nan), case)
    assert wrong == conformance.Verdict("wrong", "the output is NaN, infinite or of the wrong shape")
    other = conformance.judge(lambda case: case.output.astype(np.float16), case)
    assert other == conformance.Verdict("wrong", "the output is float16, expected float32")


def test_the_page_says_what_holds():
    page = (ROOT / "docs" / "conformance.md").read_text()
    for name in (*conformance.NAMES, *conformance.NATIVE):
        assert f"| `{name}` | 93 of 93 | 0 | 0 |" in page
        assert f"| `{name}` | 18 of 18 |" in page
    for name in conformance.PEERS:
        assert f"\n| {name} | " in page
