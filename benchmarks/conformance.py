"""Run ONNX's Attention node tests through every system and write the tables of docs/conformance.md.

    python -m benchmarks.conformance [--check] [--only NAME ...]

Ours get every argument as it is. Peers too, but for what each of them aligns in its own way or has no word for, which is put into
the boolean mask: causality and windows where T != S or positions do not start at 0, and lengths. What a peer has no argument for,
or raises on, is a refusal; what it takes and gets wrong is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import pathlib
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import attention_ops as ao
from benchmarks.onnx_cases import BIASED, SCALED, SOFTMAX, OnnxCase, cases

NAMES = ("vanilla", "sdpa", "flash", "blocksparse", "cudnn_flash", "auto")
NATIVE = ("flash/native", "blocksparse/native")
PEERS = ("PyTorch SDPA", "jax.nn (XLA)", "ejkernel attention", "ejkernel flash", "ejkernel blocksparse")
TARGET = pathlib.Path(__file__).parents[1] / "docs" / "conformance.md"
BEGIN, END = "<!-- onnx: begin, written by benchmarks/conformance.py -->", "<!-- onnx: end -->"


class Refused(Exception):
    """A system has no argument for what a test asks; the message says what."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of one test in one system: "right", "wrong" or "refused", and why."""

    status: str
    reason: str = ""


# ---------------------------------------------------------------- ours


def options_of(case: OnnxCase) -> dict[str, Any]:
    """Return the options of our call; arrays are run-time data."""
    return {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in case.options.items()}


def attend(impl: str, case: OnnxCase, value: Any = None, **changes: Any) -> ao.AttentionOutput:
    """Call attention with the arguments of a test, and `changes` to them."""
    metadata = ao.OperationMetadata(softmax_dtype=case.softmax_dtype)
    options = {name: x for name, x in (options_of(case) | changes).items() if x is not None}
    value = jnp.asarray(case.value if value is None else value)
    return ao.attention(jnp.asarray(case.query), jnp.asarray(case.key), value, impl=impl, metadata=metadata, **options)


def ours(impl: str, case: OnnxCase) -> jax.Array:
    """Return the output of one of our operations, or of one route."""
    with jax.enable_x64(case.softmax_dtype == np.float64), warnings.catch_warnings():
        warnings.simplefilter("ignore", ao.FallbackWarning)
        try:
            return attend(impl, case).attention_outputs
        except ao.NoRouteError as error:
            raise Refused(str(error).splitlines()[1].strip()) from error


def our_qk(impl: str, case: OnnxCase) -> jax.Array:
    """Return the qk output of a test, [B, H, T, S].

    The softmax is `return_weights`; a route that does not return it gives it as the output for values that are the unit matrix.
    Logits are the logarithm of that plus the logsumexp, without what the mode leaves out.
    """
    changes: dict[str, Any] = {"return_logsumexp": True}
    if case.qk_mode != BIASED and case.qk_mode != SOFTMAX:
        changes |= dict.fromkeys(("mask", "bias", "kv_lengths", "sliding_window", "query_offset")) | {"causal": False}
    if case.qk_mode == SCALED:
        changes["logits_soft_cap"] = None
    with jax.enable_x64(case.softmax_dtype == np.float64), warnings.catch_warnings():
        warnings.simplefilter("ignore", ao.FallbackWarning)
        if case.qk_mode == SOFTMAX and "/" not in impl:
            weights = attend(impl, case, return_weights=True).attention_weights
            assert weights is not None
            return weights
        S, K = case.key.shape[1:3]
        unit = np.broadcast_to(np.eye(S, dtype=case.value.dtype)[:, None], (len(case.key), S, K, S))
        out = attend(impl, case, value=unit, **changes)
        weights = out.attention_outputs.swapaxes(1, 2)
        assert out.logsumexp is not None
        return weights if case.qk_mode == SOFTMAX else jnp.log(weights) + out.logsumexp.swapaxes(1, 2)[..., None]


# ---------------------------------------------------------------- peers


def _positions(case: OnnxCase) -> tuple[bool, Any, np.ndarray | None]:
    """Return causal, window and mask as a peer takes them: native positions where all systems agree on where queries stand."""
    options = case.options
    causal, window = options.get("causal", False), options.get("sliding_window")
    is_square = case.query.shape[1] == case.key.shape[1] and np.all(options.get("query_offset", 0) == 0)
    is_agreed = is_square and (window is None or None not in window)
    if "kv_lengths" in options or ((causal or window is not None) and not is_agreed):
        return False, None, case.allowed
    return causal, window, options.get("mask")


def _full(array: np.ndarray | None, case: OnnxCase, heads: bool = False) -> Any:
    """Broadcast [b, h, t, s] to [B, h, T, S], or with `heads` to [B, H, T, S]."""
    if array is None:
        return None
    (B, T, H, _), S = case.query.shape, case.key.shape[1]
    return jnp.asarray(np.broadcast_to(array, (B, H if heads else array.shape[1], T, S)))


def torch_sdpa(case: OnnxCase) -> np.ndarray:
    """`scaled_dot_product_attention` takes one `attn_mask`: a bias with -inf where the mask says no, else the mask."""
    import torch

    if "logits_soft_cap" in case.options:
        raise Refused("no argument for a soft cap")
    causal, window, mask = _positions(case)
    if window is not None or (causal and (mask is not None or "bias" in case.options)):
        causal, mask = False, case.allowed  # it has no window, and no mask beside is_causal

    def tensor(x: np.ndarray, dtype: Any = None) -> Any:
        made = torch.from_numpy(np.ascontiguousarray(x.astype(np.float32) if x.dtype != np.bool_ else x))
        return made if dtype is None else made.to(getattr(torch, str(dtype)))

    dtype, bias = case.query.dtype, case.options.get("bias")
    given = None
    if bias is not None:
        given = tensor(bias if mask is None else np.where(mask, bias, -np.inf), dtype)
    elif mask is not None:
        given = tensor(mask)
    query, key, value = (tensor(x.swapaxes(1, 2), dtype) for x in (case.query, case.key, case.value))
    out = torch.nn.functional.scaled_dot_product_attention(
        *(query, key, value),
        attn_mask=given,
        is_causal=causal,
        scale=case.options.get("softmax_scale"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.float().numpy().swapaxes(1, 2).astype(case.output.dtype)


def jax_nn(case: OnnxCase) -> jax.Array:
    if "logits_soft_cap" in case.options:
        raise Refused("no argument for a soft cap")
    causal, window, mask = _positions(case)
    bias = case.options.get("bias")
    return jax.nn.dot_product_attention(
        *map(jnp.asarray, (case.query, case.key, case.value)),
        bias=None if bias is None else jnp.asarray(bias),
        mask=None if mask is None else jnp.asarray(mask),
        scale=case.options.get("softmax_scale"),
        is_causal=causal,
        local_window_size=window,
        implementation="xla",
    )


def _ejkernel(algorithm: str) -> Callable[..., Any]:
    import ejkernel.kernels  # noqa: F401  registers the kernels
    from ejkernel.kernels._registry import Backend, Platform, kernel_registry

    return kernel_registry.get(algorithm=algorithm, platform=Platform.XLA, backend=Backend.ANY)


def _ej_options(case: OnnxCase) -> dict[str, Any]:
    causal, window, mask = _positions(case)
    given = {
        "attention_mask": _full(mask, case),
        "bias": _full(case.options.get("bias"), case, heads=True),
        "softmax_scale": case.options.get("softmax_scale"),
        "logits_soft_cap": case.options.get("logits_soft_cap"),
        "causal": causal,
        "sliding_window": window,
    }
    return {name: x for name, x in given.items() if x is not None}


def ej_attention(case: OnnxCase) -> jax.Array:
    arrays = map(jnp.asarray, (case.query, case.key, case.value))
    settings = {"dtype": case.query.dtype, "softmax_dtype": jnp.float32}
    return _ejkernel("attention")(*arrays, **_ej_options(case), **settings)[0]


def ej_flash(case: OnnxCase) -> jax.Array:
    return _ejkernel("flash_attention")(*map(jnp.asarray, (case.query, case.key, case.value)), **_ej_options(case))


def ej_blocksparse(case: OnnxCase) -> jax.Array:
    arrays = (jnp.asarray(x.swapaxes(1, 2)) for x in (case.query, case.key, case.value))
    return _ejkernel("blocksparse_attention")(*arrays, **_ej_options(case)).swapaxes(1, 2)


# ---------------------------------------------------------------- all of them

System = Callable[[OnnxCase], Any]
SYSTEMS: dict[str, System] = {
    **{name: functools.partial(ours, name) for name in (*NAMES, *NATIVE)},
    **dict(zip(PEERS, (torch_sdpa, jax_nn, ej_attention, ej_flash, ej_blocksparse), strict=True)),
}


def judge(system: System, case: OnnxCase) -> Verdict:
    """Run a test through a system. An exception of a peer is a refusal: it says no, and gives no wrong answer."""
    try:
        found = np.asarray(system(case))
    except Refused as error:
        return Verdict("refused", str(error))
    except Exception as error:
        return Verdict("refused", _reason(error))
    wrong = case.check_output(found)
    return Verdict("right") if wrong is None else Verdict("wrong", wrong)


def _reason(error: Exception) -> str:
    """Return what an exception says in one line, without sizes, so that tests refused for the same reason stand together."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    line = next((line for line in lines if "typechecking parameter" in line), lines[0])
    return re.sub(r"[\[(]\d[\d, ]*[\])]", "...", f"{type(error).__name__}: {line}")


def judge_qk(impl: str, case: OnnxCase) -> Verdict:
    """Check the qk output of one of our operations."""
    wrong = case.check_qk(our_qk(impl, case))
    return Verdict("right") if wrong is None else Verdict("wrong", wrong)


# ---------------------------------------------------------------- the page


def page(results: Mapping[str, Sequence[Verdict]], qk: Mapping[str, Sequence[Verdict]]) -> str:
    """Return the generated part of the page."""
    total = len(cases())
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("onnx", "jax", "torch", "ejkernel"))
    lines = [BEGIN, "", f"Run on the CPU with {versions}.", "", "| system | right | wrong | refused |", "|---|---|---|---|"]
    for name, verdicts in results.items():
        counts = Counter(verdict.status for verdict in verdicts)
        label = f"`{name}`" if name in (*NAMES, *NATIVE) else name
        lines.append(f"| {label} | {counts['right']} of {total} | {counts['wrong']} | {counts['refused']} |")
    asked = sum(case.qk is not None for case in cases())
    lines += [
        "",
        f"{asked} of the tests ask for logits or weights as well. Ours give them:",
        "",
        "| system | right |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {sum(v.status == 'right' for v in verdicts)} of {asked} |" for name, verdicts in qk.items()]
    lines += ["", "### What is not right, and why", ""]
    for name, verdicts in results.items():
        groups: dict[tuple[str, str], list[str]] = {}
        for case, verdict in zip(cases(), verdicts, strict=True):
            if verdict.status != "right":
                reason = verdict.reason.replace("|", "\\|")
                groups.setdefault((verdict.status, reason), []).append(case.name)
        if groups:
            lines += [f"{name}:", ""]
            lines += [
                f"- {status}, {reason}: {', '.join(f'`{one}`' for one in names)}" for (status, reason), names in groups.items()
            ]
            lines.append("")
    return "\n".join([*lines, END])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the page and write nothing")
    parser.add_argument("--only", nargs="+", choices=list(SYSTEMS), help="print the counts of these systems and write nothing")
    args = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)  # programs run once; compiling them is all the time there is
    names = args.only or list(SYSTEMS)
    results = {}
    for name in names:
        results[name] = [judge(SYSTEMS[name], case) for case in cases()]
        print(f"{name:22}", dict(Counter(verdict.status for verdict in results[name])), flush=True)
    if args.only:
        for name in names:
            for case, verdict in zip(cases(), results[name], strict=True):
                if verdict.status != "right":
                    print(f"  {name}: {case.name}: {verdict.status}, {verdict.reason}")
        return
    asked = [case for case in cases() if case.qk is not None]
    qk = {name: [judge_qk(name, case) for case in asked] for name in (*NAMES, *NATIVE)}
    text = TARGET.read_text()
    before, _, rest = text.partition(BEGIN)
    new = before + page(results, qk) + rest.partition(END)[2]
    if args.check:
        sys.exit(0 if new == text else f"{TARGET.name} is stale: run python -m benchmarks.conformance")
    TARGET.write_text(new)


if __name__ == "__main__":
    main()
