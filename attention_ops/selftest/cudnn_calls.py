"""What cuDNN has to be told for a case: read off its options, not off the route, and compared with the lowered calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from attention_ops.selftest.calls import Asks
from attention_ops.selftest.cases import Case, Problem
from attention_ops.selftest.lowering import CustomCall

PREFIX = "__cudnn$fmha"
_OTHER_MASKS = ("mask", "mask_info", "q_segment_ids", "kv_segment_ids")
_ELEMENT = {"bfloat16": ("bf16", "BF16"), "float16": ("f16", "F16")}
_PRODUCTS = {
    "bmm1": ("3", "3", "02", "02"),
    "bmm2": ("3", "1", "01", "02"),
    "bmm1_grad_gemm1": ("2", "1", "01", "02"),
    "bmm1_grad_gemm2": ("3", "1", "01", "02"),
    "bmm2_grad_gemm1": ("2", "1", "01", "02"),
    "bmm2_grad_gemm2": ("3", "3", "02", "02"),
}
"""Axes summed over, and batch axes, of both sides of each product, for arrays [B, T, H, D] and weights [B, H, T, S]."""


def problems(case: Case, problem: Problem, asks: Asks, found: Sequence[CustomCall]) -> list[str]:
    """Return how the custom calls of a lowered case differ from what the case asks for, in sentences."""
    biased = "bias" in problem.options or any(name in problem.options for name in _OTHER_MASKS)
    forward = f"{PREFIX}{'ScaleBias' if biased else ''}Softmax"
    wanted = [forward, *([forward] if case.mode == "remat" else []), *([f"{forward}Backward"] if asks.gradients else [])]
    targets = [call.target for call in found]
    if targets != wanted:
        return [f"the custom calls are {', '.join(targets)}, expected {', '.join(wanted)}"]
    wrong = []
    for call in found:
        wrong += [
            f"{call.target}: {name} is {has!r}, expected {want!r}" for name, has, want in _differences(call, problem, biased)
        ]
    return wrong


def _differences(call: CustomCall, problem: Problem, biased: bool) -> Iterator[tuple[str, Any, Any]]:
    backward = call.target.endswith("Backward")
    settings = call.settings()["cudnn_fmha_backend_config"]
    for name, want in _wanted_settings(problem, backward).items():
        has = _look_up(settings, name)
        if has != want:
            yield name, has, want
    has_lengths = "q_lengths" in problem.options or "kv_lengths" in problem.options
    operands = _wanted_operands(problem, backward, biased, has_lengths)
    if len(operands) != len(call.operands):
        yield "number of operands", len(call.operands), len(operands)
        return
    for (name, want), has in zip(operands, call.operands, strict=True):
        if has not in want:
            yield f"operand {name}", has, " or ".join(sorted(want))


def _wanted_settings(problem: Problem, backward: bool) -> dict[str, Any]:
    (B, T, H, D), S, options = problem.query.shape, problem.key.shape[1], problem.options
    window = options.get("sliding_window")
    left, right = window if isinstance(window, tuple) else (window, window)
    words = ["PADDING"] if "q_lengths" in options or "kv_lengths" in options else []
    words += ["CAUSAL"] if options.get("causal") or right == 0 else []
    wanted = {
        "mask_type": "_".join(words) or "NO_MASK",
        "fmha_scale": options.get("softmax_scale", D**-0.5),
        "sliding_window_length": 0 if left is None else left + 1,
        "dropout_rate": 0.0,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
        "is_flash_attention": True,
        "intermediate_tensor_shape.element_type": _ELEMENT[str(problem.query.dtype)][1],
        "intermediate_tensor_shape.dimensions": [str(n) for n in (B, H, T, S)],
    }
    for product, (left_sum, right_sum, left_batch, right_batch) in _PRODUCTS.items():
        if ("grad" in product) is backward:
            wanted[f"{product}_dot_dimension_numbers"] = {
                "lhs_contracting_dimensions": list(left_sum),
                "rhs_contracting_dimensions": list(right_sum),
                "lhs_batch_dimensions": list(left_batch),
                "rhs_batch_dimensions": list(right_batch),
            }
    return wanted


def _look_up(settings: Any, name: str) -> Any:
    for word in name.split("."):
        settings = settings.get(word) if isinstance(settings, dict) else None
    return settings


def _wanted_operands(problem: Problem, backward: bool, biased: bool, has_lengths: bool) -> list[tuple[str, set[str]]]:
    (B, T, H, _), S, Dv = problem.query.shape, problem.key.shape[1], problem.value.shape[3]
    element = _ELEMENT[str(problem.query.dtype)][0]
    output = {_type((B, T, H, Dv), element)}
    found = [(name, {_type(getattr(problem, name).shape, element)}) for name in ("query", "key", "value")]
    found += [("logsumexp", {_type((B, H, T), "f32")}), ("d_output", output)] if backward else []
    found += [("bias", {_type((b, h, T, S), element) for b in (1, B) for h in (1, H)})] if biased else []
    found += [("output", output)] if backward else []
    return found + ([(name, {_type((B,), "i32")}) for name in ("q_lengths", "kv_lengths")] if has_lengths else [])


def _type(shape: Iterable[int], element: str) -> str:
    return "x".join([*map(str, shape), element])
