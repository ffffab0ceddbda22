"""The node tests of ONNX's `Attention` operator (opset 23 to 25) as calls: inputs in our layout, options by our names.

The tests come with the package `onnx`, with their inputs and expected outputs. Here they are only renamed: a boolean mask is a
`mask`, a floating one a `bias`; both get four dimensions as ONNX broadcasts them, and are padded with False or -inf where they
are shorter than the keys. Past keys and values are put in front of the new ones, and positions start after them; with
`nonpad_kv_seqlen` the last query of each row stands at its last key. A row with no allowed key is 0, as in our law.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from attention_ops.selftest import reference
from attention_ops.selftest.numeric import compare

MULTIPLE = 4.0
"""How many times the error of the plain computation in the same dtype a result may be off, as in the selftest."""

SCALED, CAPPED, BIASED, SOFTMAX = range(4)
"""What `qk_matmul_output_mode` asks for: logits as scaled, after the cap, after bias and mask, or the softmax."""


@dataclasses.dataclass(frozen=True)
class OnnxCase:
    """One node test.

    Attributes:
        query, key, value: [B, T, H, D], [B, S, K, D], [B, S, K, Dv]; past keys and values included.
        options: options of our call as numpy arrays and Python values.
        softmax_dtype: float64 where the test asks for it, else None.
        output: the expected output [B, T, H, Dv].
        qk_mode, qk: what is asked of the logits, and what is expected [B, H, T, S]; or None.
    """

    name: str
    opset: int
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    options: Mapping[str, Any]
    softmax_dtype: np.dtype | None
    output: np.ndarray
    qk_mode: int | None
    qk: np.ndarray | None

    @functools.cached_property
    def allowed(self) -> np.ndarray:
        """Every mask of the call as one boolean array [B, H, T, S]; a bias of -inf is not counted."""
        (B, T, H, _), S = self.query.shape, self.key.shape[1]
        return reference.visible(B, H, T, S, {name: x for name, x in self.options.items() if name != "bias"})

    @functools.cached_property
    def law(self) -> reference.Attention:
        """The float64 reference of the call."""
        return reference.attention(self.query, self.key, self.value, self.options)

    @functools.cached_property
    def plain(self) -> reference.Attention:
        """The plain computation in the dtype of the inputs."""
        return reference.plain(self.query, self.key, self.value, self.options)

    @property
    def rounding(self) -> float:
        return reference.epsilon(reference.softmax_dtype(self.query.dtype)) * self.law.largest_logit

    def check_output(self, found: Any) -> str | None:
        """Return what is wrong with an output [B, T, H, Dv], or None."""
        return self._check("the output", np.asarray(found), self.output, self.law.output, self.plain.output)

    def check_qk(self, found: Any) -> str | None:
        """Return what is wrong with a qk output [B, H, T, S], or None."""
        assert self.qk is not None
        work = reference.softmax_dtype(self.query.dtype)
        law, plain = self._qk(self.law, np.dtype(np.float64)), self._qk(self.plain, work).astype(self.qk.dtype)
        return self._check("the qk output", np.asarray(found).astype(self.qk.dtype), self.qk, law, plain)

    def _qk(self, result: reference.Attention, work: np.dtype) -> np.ndarray:
        """Return what the mode asks for, computed in `work`."""
        if self.qk_mode == SOFTMAX:
            return result.weights
        groups = self.query.shape[2] // self.key.shape[2]
        query, key = (x.astype(work) for x in (self.query, np.repeat(self.key, groups, axis=2)))
        scale, cap = (self.options.get(name) for name in ("softmax_scale", "logits_soft_cap"))
        logits = np.einsum("bthd,bshd->bhts", query, key) * work.type(query.shape[3] ** -0.5 if scale is None else scale)
        if self.qk_mode != SCALED and cap is not None:
            logits = work.type(cap) * np.tanh(logits / work.type(cap))
        if self.qk_mode != BIASED:
            return logits
        bias = self.options.get("bias")
        finite = 0 if bias is None else np.where(bias == -np.inf, 0, bias).astype(work)
        return np.where(result.allowed, logits + finite, -np.inf)

    def _check(self, name: str, found: np.ndarray, expected: np.ndarray, law: np.ndarray, plain: np.ndarray) -> str | None:
        if found.dtype != expected.dtype:
            return f"{name} is {found.dtype}, expected {expected.dtype}"
        exact = expected.astype(np.float64)
        error, _ = compare(found, exact, exact, 0.0, 0.0)
        own, bound = compare(expected, law, plain, MULTIPLE, self.rounding)
        if error <= bound + own:
            return None
        if not np.isfinite(error):
            return f"{name} is NaN, infinite or of the wrong shape"
        return f"{name} is off by {error:.2g}, allowed is {bound + own:.2g}"


@functools.cache
def cases() -> tuple[OnnxCase, ...]:
    """Return the 93 node tests, in the order of the package. Their expanded forms ask for the same and are left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other operators' tests overflow on purpose
        from onnx.backend.test.case.node import collect_testcases

        found = collect_testcases("Attention")
    return tuple(_case(one) for one in found if one.model.graph.node[0].op_type == "Attention")


def _case(one: Any) -> OnnxCase:
    import onnx

    node = one.model.graph.node[0]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    given, returned = one.data_sets[0]
    by_position = iter(given)
    names = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
    inputs = {name: next(by_position) for name, used in zip(names, node.input, strict=False) if used}
    outputs = dict(zip((name for name in node.output if name), returned, strict=True))
    q_heads, kv_heads = attributes.get("q_num_heads"), attributes.get("kv_num_heads")
    query, key, value = (
        _in_our_layout(inputs[name], heads) for name, heads in (("Q", q_heads), ("K", kv_heads), ("V", kv_heads))
    )
    past = 0
    if "past_key" in inputs:
        past = inputs["past_key"].shape[2]
        key, value = (
            np.concatenate([inputs[name].swapaxes(1, 2), new], axis=1) for name, new in (("past_key", key), ("past_value", value))
        )
        for name, whole in (("present_key", key), ("present_value", value)):
            np.testing.assert_array_equal(outputs[name].swapaxes(1, 2), whole)
    qk = outputs.get("qk_matmul_output")
    double = attributes.get("softmax_precision") == onnx.TensorProto.DOUBLE
    return OnnxCase(
        name=one.name.removeprefix("test_attention_"),
        opset=one.model.opset_import[0].version,
        query=query,
        key=key,
        value=value,
        options=_options(attributes, inputs, query.shape[1], key.shape[1], past),
        softmax_dtype=np.dtype(np.float64) if double else None,
        output=_in_our_layout(outputs["Y"], q_heads),
        qk_mode=None if qk is None else attributes.get("qk_matmul_output_mode", SCALED),
        qk=qk,
    )


def _in_our_layout(x: np.ndarray, heads: int | None) -> np.ndarray:
    """[B, heads, length, d], or [B, length, heads * d], to [B, length, heads, d]."""
    return x.swapaxes(1, 2) if x.ndim == 4 else x.reshape(*x.shape[:2], heads, -1)


def _options(attributes: dict[str, Any], inputs: dict[str, np.ndarray], T: int, S: int, past: int) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": bool(attributes.get("is_causal", 0))}
    window = tuple(attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    if window != (-1, -1):
        options["sliding_window"] = tuple(None if size == -1 else size for size in window)
    lengths = inputs.get("nonpad_kv_seqlen")
    if lengths is not None:
        options["kv_lengths"] = lengths.reshape(-1).astype(np.int32)
    if options["causal"] or "sliding_window" in options:
        options["query_offset"] = past if lengths is None else options["kv_lengths"] - T
    if "scale" in attributes:
        options["softmax_scale"] = attributes["scale"]
    if attributes.get("softcap"):
        options["logits_soft_cap"] = attributes["softcap"]
    mask = inputs.get("attn_mask")
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        hidden = False if mask.dtype == np.bool_ else -np.inf
        short = S - mask.shape[3] if mask.shape[3] > 1 else 0
        mask = np.pad(mask, [(0, 0)] * 3 + [(0, short)], constant_values=hidden)
        options["mask" if mask.dtype == np.bool_ else "bias"] = mask
    return options
