"""Measure errors in units of the last place against float64 and write the tables of docs/numerics.md.

    python -m benchmarks.numerics [--only CASE ...]

Ours by their native routes, `jax.nn.dot_product_attention` and, where PyTorch is installed, its `scaled_dot_product_attention`,
on the same rounded inputs. A unit is the spacing of the result's dtype at the largest magnitude of the same head and batch row:
at each number's own magnitude, what cancels to nothing would decide.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import importlib.util
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import attention_ops as ao
from attention_ops.selftest import reference

OURS = ("vanilla", "flash", "blocksparse")
PEERS = ("jax.nn", "PyTorch")
ALLOWED = 1.5
"""Ours may be this many times as far off as the better peer."""
HALF = 0.5
"""What rounding the exact result costs: a peer that is nearer counts as this far off."""
SEEDS = 3
TARGET = pathlib.Path(__file__).parents[1] / "docs" / "numerics.md"
BEGIN, END = "<!-- errors: begin, written by benchmarks/numerics.py -->", "<!-- errors: end -->"
FLOAT32, BFLOAT16, FLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)


# ---------------------------------------------------------------- inputs


@dataclasses.dataclass(frozen=True)
class Sizes:
    B: int = 1
    T: int = 256
    S: int = 256
    H: int = 4
    K: int = 4
    D: int = 64


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call with its cotangent, all rounded to the dtype of the case; sinks are float32."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    d_output: np.ndarray
    causal: bool = False
    sinks: np.ndarray | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {"causal": self.causal} | ({} if self.sinks is None else {"softmax_aux": self.sinks})

    @functools.cached_property
    def law(self) -> dict[str, np.ndarray]:
        """Return output and gradients in float64."""
        found = reference.attention(self.query, self.key, self.value, self.options)
        gradients = found.gradients(self.d_output)
        law = {"output": found.output, "d_query": gradients.query, "d_key": gradients.key, "d_value": gradients.value}
        return law if gradients.sinks is None else law | {"d_sinks": gradients.sinks}

    def d_sinks(self, output: np.ndarray) -> np.ndarray:
        """Return the gradient of the sinks that is exact for an output as it was returned, after rounding."""
        found = reference.attention(self.query, self.key, self.value, self.options)
        delta = (self.d_output.astype(np.float64) * output.astype(np.float64)).sum(-1)
        return found.d_sinks(delta.swapaxes(1, 2))


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of one kind. `spread` scales query, key, value and cotangent, which are normal otherwise."""

    name: str
    about: str
    dtypes: tuple[np.dtype, ...]
    sizes: Sizes = Sizes()
    spread: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
    causal: bool = False
    sinks: bool = False

    def problem(self, dtype: np.dtype, seed: int = 0) -> Problem:
        s, rng = self.sizes, np.random.default_rng(seed)
        shapes = ((s.B, s.T, s.H, s.D), (s.B, s.S, s.K, s.D), (s.B, s.S, s.K, s.D), (s.B, s.T, s.H, s.D))
        arrays = [(spread * rng.standard_normal(shape)).astype(dtype) for spread, shape in zip(self.spread, shapes, strict=True)]
        sinks = rng.standard_normal(s.H).astype(np.float32) if self.sinks else None
        problem = Problem(*arrays, self.causal, sinks)
        return _cancelling(problem) if self.sinks else problem

    def smaller(self, sizes: Sizes) -> Case:
        return dataclasses.replace(self, sizes=sizes)


def _cancelling(problem: Problem) -> Problem:
    """Turn the cotangent so that the gradient of every sink is a sum of which 99 parts in 100 cancel."""
    law = reference.attention(problem.query, problem.key, problem.value, problem.options)
    direction = law.sink_weights.sum(-1).swapaxes(1, 2)[..., None] * law.output
    d_output, total = problem.d_output.astype(np.float64), lambda x: x.sum((0, 1, 3), keepdims=True)
    along = total(direction * d_output) - 0.01 * total(np.abs(direction * d_output))
    return dataclasses.replace(
        problem, d_output=(d_output - along / total(direction**2) * direction).astype(problem.d_output.dtype)
    )


EVERY, WIDE = (FLOAT32, BFLOAT16, FLOAT16), (FLOAT32, BFLOAT16)
CASES = (
    Case("ordinary", "normal inputs, T = S = 256", EVERY),
    Case("causal", "normal inputs, causal", EVERY, causal=True),
    Case("large logits", "logits up to several hundred", EVERY, spread=(11.0, 11.0, 1.0, 1.0)),
    Case("long rows", "4 queries, S = 100,000", WIDE, Sizes(T=4, S=100_000, H=2, K=2)),
    Case(
        "cancelling sinks",
        "the gradient of every sink is a sum of which 99 parts in 100 cancel",
        WIDE,
        Sizes(B=1, T=128, S=192, H=32, K=32, D=32),
        sinks=True,
    ),
    Case("shared keys", "32 query heads on one key/value head", EVERY, Sizes(T=128, S=128, H=32, K=1)),
    Case("near overflow", "values up to 65,000, q . k beyond", (FLOAT16,), spread=(40.0, 40.0, 13000.0, 1e-4)),
    Case("subnormal", "values below the least normal number", (FLOAT32, BFLOAT16), spread=(1.0, 1.0, 1e-39, 1.0)),
    Case("subnormal, float16", "values below the least normal number", (FLOAT16,), spread=(1.0, 1.0, 1e-5, 1.0)),
)


# ---------------------------------------------------------------- systems

System = Callable[[Problem], "Mapping[str, np.ndarray] | None"]


def ours(name: str, problem: Problem) -> dict[str, np.ndarray] | None:
    """Return what the native route of an operation gives, or None for what it does not take."""
    try:
        return _run(_our_program(name, problem.causal), problem)
    except ao.NoRouteError:
        return None


def jax_nn(problem: Problem) -> dict[str, np.ndarray] | None:
    """Return what `jax.nn.dot_product_attention` gives, or None in float16: XLA's CPU backend lacks the product it asks for."""
    if problem.query.dtype == FLOAT16 and jax.default_backend() == "cpu":
        return None
    return _run(_program_of_jax_nn(problem.causal), problem)


def _run(program: Callable[..., Any], problem: Problem) -> dict[str, np.ndarray]:
    inputs = (problem.query, problem.key, problem.value, *(() if problem.sinks is None else (problem.sinks,)))
    return dict(zip(problem.law, map(np.asarray, program(inputs, problem.d_output)), strict=True))


def _with_gradients(attend: Callable[..., Any]) -> Callable[..., Any]:
    @jax.jit
    def both(inputs: Any, d_output: Any) -> Any:
        output, pull = jax.vjp(attend, *inputs)
        return output, *pull(d_output)

    return both


@functools.cache
def _our_program(name: str, causal: bool) -> Callable[..., Any]:
    def attend(query: Any, key: Any, value: Any, sinks: Any = None) -> Any:
        return ao.attention(query, key, value, impl=f"{name}/native", causal=causal, softmax_aux=sinks).attention_outputs

    return _with_gradients(attend)


@functools.cache
def _program_of_jax_nn(causal: bool) -> Callable[..., Any]:
    """Sinks, of which it knows nothing, are one more key of zeros with a bias."""

    def attend(query: Any, key: Any, value: Any, sinks: Any = None) -> Any:
        bias = None
        if sinks is not None:
            key, value = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (key, value))
            bias = jnp.zeros((1, query.shape[2], 1, key.shape[1])).at[..., -1].set(sinks[None, :, None])
        return jax.nn.dot_product_attention(query, key, value, bias=bias, is_causal=causal, implementation="xla")

    return _with_gradients(attend)


def torch_sdpa(problem: Problem) -> dict[str, np.ndarray]:
    """`scaled_dot_product_attention`; sinks as one more key of zeros with a mask of numbers."""
    import torch

    def tensor(x: np.ndarray) -> Any:
        made = torch.from_numpy(x.swapaxes(1, 2).astype(np.float32)).to(getattr(torch, str(x.dtype))).contiguous()
        return made.requires_grad_()

    leaves = [tensor(x) for x in (problem.query, problem.key, problem.value)]
    query, key, value = leaves
    mask = None
    if problem.sinks is not None:
        leaves.append(torch.from_numpy(problem.sinks).requires_grad_())
        key, value = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (key, value))
        columns = torch.zeros(problem.sinks.size, key.shape[2] - 1)
        mask = torch.cat([columns, leaves[3][:, None]], 1)[None, :, None].to(query.dtype).expand(-1, -1, query.shape[2], -1)
    output = torch.nn.functional.scaled_dot_product_attention(
        *(query, key, value), attn_mask=mask, is_causal=problem.causal, enable_gqa=query.shape[1] != key.shape[1]
    )
    output.backward(tensor(problem.d_output).detach())
    found = [output.detach(), *(leaf.grad for leaf in leaves)]
    arrays = [x.swapaxes(1, 2) if x.ndim == 4 else x for x in found]
    dtypes = [problem.query.dtype] * 4 + [FLOAT32] * (len(found) - 4)
    return {name: x.float().numpy().astype(dtype) for name, x, dtype in zip(problem.law, arrays, dtypes, strict=True)}


def systems() -> dict[str, System]:
    names = ("vanilla", "sdpa", "flash", "blocksparse")
    found: dict[str, System] = {name: functools.partial(ours, name) for name in names} | {"jax.nn": jax_nn}
    return found | ({"PyTorch": torch_sdpa} if importlib.util.find_spec("torch") else {})


# ---------------------------------------------------------------- errors


@dataclasses.dataclass(frozen=True)
class Error:
    """Errors of one quantity in units of the last place: the median, the largest in a head on average, the largest of all."""

    median: float
    in_a_head: float
    largest: float

    def __str__(self) -> str:
        return " / ".join(_short(x) for x in (self.median, self.in_a_head, self.largest))


def _short(x: float) -> str:
    return "inf" if not np.isfinite(x) else f"{x:.2f}" if x < 10 else f"{x:.0f}" if x < 1000 else f"{x:.1e}"


def wrong(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Return the errors [heads, numbers] of a result [B, n, heads, d], or [heads], against float64.

    Where a result is not finite but should be, the error is infinite.
    """
    info = ml_dtypes.finfo(got.dtype)
    got, want = (x.swapaxes(1, 2).reshape(-1, x.shape[1] * x.shape[3]) if x.ndim == 4 else x[:, None] for x in (got, want))
    with np.errstate(over="ignore"):
        rounded = want.astype(got.dtype).astype(np.float64)
    largest = np.abs(want).max(axis=1, keepdims=True, initial=1e-300)
    unit = np.maximum(2.0 ** np.floor(np.log2(largest)) * float(info.eps), float(info.smallest_subnormal))
    got = got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        found = np.where(np.isfinite(rounded), np.abs(got - want) / unit, np.where(got == rounded, 0, np.inf))
    return np.where(np.isnan(found), np.inf, found)


def measure(case: Case, dtype: np.dtype, wanted: Mapping[str, System], seeds: int = SEEDS) -> dict[str, dict[str, Error]]:
    """Return the errors by quantity and system; a system that does not take the case is left out."""
    pooled: dict[str, dict[str, list[np.ndarray]]] = {}
    for seed in range(seeds):
        problem = case.problem(dtype, seed)
        for name, system in wanted.items():
            result = system(problem)
            for quantity, want in problem.law.items() if result is not None else ():
                found = wrong(result[quantity], want)
                if quantity == "d_sinks":
                    found = min(found, wrong(result[quantity], problem.d_sinks(result["output"])), key=np.median)
                pooled.setdefault(quantity, {}).setdefault(name, []).append(found)
    return {
        quantity: {name: _error(np.concatenate(parts)) for name, parts in by_system.items()}
        for quantity, by_system in pooled.items()
    }


def _error(found: np.ndarray) -> Error:
    return Error(float(np.median(found)), float(found.max(axis=1).mean()), float(found.max()))


def ratio(errors: Mapping[str, Error], name: str, peers: tuple[str, ...] = PEERS) -> float:
    """Return how many times as far off a system is as the better peer, in the median or in a head's largest error.

    The largest of all is one number's luck, and is not asked. Without a peer it is 0.
    """
    ratios = [0.0]
    for which in ("median", "in_a_head") if any(peer in errors for peer in peers) else ():
        better = min(getattr(errors[peer], which) for peer in peers if peer in errors)
        ratios.append(getattr(errors[name], which) / max(better, HALF))
    return max(ratios)


# ---------------------------------------------------------------- where the rule does not hold


@dataclasses.dataclass(frozen=True)
class Known:
    """Against one peer ours are further off than the rule allows. Against the other one they keep it."""

    peer: str
    why: str


_ORDER = Known(
    "PyTorch",
    "XLA's CPU backend adds the rows of a product one after another and PyTorch in parts of 32 to 64; jax.nn is as far off as "
    "ours",
)
_FLUSHED = Known(
    "PyTorch", "XLA's CPU backend takes subnormal numbers for 0, those of the inputs included; jax.nn is as far off as ours"
)
KNOWN: dict[tuple[str, str, str], Known] = {
    ("shared keys", "float32", "d_key"): _ORDER,
    ("shared keys", "float32", "d_value"): _ORDER,
    **{("subnormal", dtype, name): _FLUSHED for dtype in ("float32", "bfloat16") for name in ("output", "d_query", "d_key")},
}
"""By case, dtype and quantity."""


def breaches(case: Case, dtype: np.dtype, errors: Mapping[str, Mapping[str, Error]]) -> Iterator[str]:
    """Yield what breaks the rule and is not known, as sentences. sdpa is not asked: it is jax.nn."""
    for quantity, by_system in errors.items():
        known = KNOWN.get((case.name, str(dtype), quantity))
        peers = tuple(peer for peer in PEERS if known is None or peer != known.peer)
        for name in OURS:
            if name in by_system and (found := ratio(by_system, name, peers)) > ALLOWED:
                far = f"{name} is {found:.2f} times as far off as {' or '.join(peers)}"
                yield f"{case.name}, {dtype}, {quantity}: {far}: {by_system}"


# ---------------------------------------------------------------- the page


def page(measured: Mapping[tuple[Case, np.dtype], Mapping[str, Mapping[str, Error]]]) -> str:
    """Return the generated part of the page."""
    packages = ("jax", "torch") if "PyTorch" in systems() else ("jax",)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    lines = [BEGIN, "", f"Run on the CPU with {versions}; {SEEDS} draws of each case.", ""]
    columns = list(systems())
    for case in dict.fromkeys(case for case, _ in measured):
        header = ["dtype", "of", *(f"`{name}`" if name not in PEERS else name for name in columns), "ratio"]
        about = f"{case.about[0].upper()}{case.about[1:]}."
        lines += [f"### {case.name.capitalize()}", "", about, "", f"| {' | '.join(header)} |"]
        lines.append("|---" * len(header) + "|")
        why: dict[str, list[str]] = {}
        for (_, dtype), errors in ((key, value) for key, value in measured.items() if key[0] is case):
            for quantity, by_system in errors.items():
                cells = [str(by_system[name]) if name in by_system else "-" for name in columns]
                found = max(ratio(by_system, name) for name in OURS if name in by_system)
                lines.append(f"| {dtype} | {quantity} | {' | '.join(cells)} | {_short(found)} |")
                known = KNOWN.get((case.name, str(dtype), quantity))
                if known is not None and found > ALLOWED:
                    why.setdefault(known.why, []).append(f"{quantity} in {dtype}")
        lines += ["", *(f"Above {ALLOWED}: {', '.join(where)}, because {reason}." for reason, where in why.items())]
        lines += [""] if why else []
    return "\n".join([*lines, END])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="print these cases and write nothing")
    args = parser.parse_args()
    measured, wanted, broken = {}, systems(), []
    for case in CASES:
        for dtype in case.dtypes if args.only is None or case.name in args.only else ():
            measured[case, dtype] = measure(case, dtype, wanted)
            broken += breaches(case, dtype, measured[case, dtype])
            for quantity, by_system in measured[case, dtype].items():
                print(f"{case.name:18} {dtype!s:9} {quantity:8}", "  ".join(f"{n} {e}" for n, e in by_system.items()), flush=True)
    for sentence in broken:
        print("unknown:", sentence)
    if args.only is None:
        before, _, rest = TARGET.read_text().partition(BEGIN)
        TARGET.write_text(before + page(measured) + rest.partition(END)[2])


if __name__ == "__main__":
    main()
