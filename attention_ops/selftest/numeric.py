"""The numeric proof of one case: run it and hold what comes back to the law."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_ops.features import Feature
from attention_ops.operation import Tolerance
from attention_ops.selftest import dropout, reference
from attention_ops.selftest.calls import DIFFERENTIABLE, MAPPED, Arguments, Asks, Target, arguments
from attention_ops.selftest.cases import Case, Problem


@dataclasses.dataclass(frozen=True)
class Check:
    """One quantity of one case: the largest error anywhere in it, and the largest that is allowed."""

    quantity: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound

    @property
    def ratio(self) -> float:
        return self.error / self.bound if self.bound else (0.0 if self.error == 0 else float("inf"))

    @property
    def sentence(self) -> str:
        if not np.isfinite(self.error):
            return f"{self.quantity} is NaN, infinite or of the wrong shape where the law has numbers, or the reverse"
        return f"{self.quantity} is off by {self.error:.3g}, allowed is {self.bound:.3g}"


# ---------------------------------------------------------------- what should come back


class _Expected:
    """The law and the plain computation of a case, for the same arguments."""

    def __init__(self, case: Case, problems: Sequence[Problem], asks: Asks, keep: np.ndarray | None = None):
        self.case = case
        self.samples: list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]] = []
        self.rounding = 0.0
        for index in range(len(problems)):
            problem = mixed(case, problems, index)
            arrays = (problem.query, problem.key, problem.value, problem.law, keep)
            law, plain = reference.attention(*arrays), reference.plain(*arrays)
            self.samples.append((_quantities(law, problem, asks), _quantities(plain, problem, asks)))
            epsilon = reference.epsilon(reference.softmax_dtype(problem.query.dtype))
            self.rounding = max(self.rounding, epsilon * law.largest_logit)

    def quantities(self) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Yield each quantity by name, as the law and as the plain computation have it."""
        for name in self.samples[0][0]:
            law, plain = ([sample[which][name] for sample in self.samples] for which in (0, 1))
            if self.case.mode == "vmap" and name.startswith("d_") and name[2:] not in MAPPED["vmap"]:
                yield name, sum(law), sum(plain)  # type: ignore[misc]
            elif len(law) > 1:
                yield name, np.stack(law), np.stack(plain)
            else:
                yield name, law[0], plain[0]


def mixed(case: Case, problems: Sequence[Problem], index: int) -> Problem:
    """Return sample `index`: its own mapped arrays and cotangents, all else from the first sample."""
    if index == 0:
        return problems[0]
    first, own, mapped = problems[0], problems[index], MAPPED[case.mode]
    law = {**first.law, **{name: own.law[name] for name in DIFFERENTIABLE if name in mapped and name in own.law}}
    arrays = {name: getattr(own, name) for name in ("query", "key", "value") if name in mapped}
    return dataclasses.replace(
        first, **arrays, law=law, d_output=own.d_output, d_logsumexp=own.d_logsumexp, d_weights=own.d_weights
    )


def _quantities(result: reference.Attention, problem: Problem, asks: Asks) -> dict[str, np.ndarray]:
    found = {"output": result.output}
    if asks.logsumexp:
        found["logsumexp"] = result.logsumexp
    if asks.weights:
        found["weights"] = result.weights
    if asks.gradients:
        d_logsumexp = problem.d_logsumexp if asks.logsumexp else None
        gradients = result.gradients(problem.d_output, d_logsumexp, problem.d_weights if asks.weights else None)
        found |= {"d_query": gradients.query, "d_key": gradients.key, "d_value": gradients.value}
        found |= {"d_bias": gradients.bias} if gradients.bias is not None else {}
        found |= {"d_softmax_aux": gradients.sinks} if gradients.sinks is not None else {}
    return found


_cache_lock = threading.Lock()
_cache: dict[Any, _Expected] = {}


def _expected(case: Case, problems: Sequence[Problem], asks: Asks, seed: int) -> _Expected:
    """Return what a case should give; kept, because several routes are asked the same."""
    key = (case, asks, seed)
    with _cache_lock:
        found = _cache.get(key)
    if found is None:
        found = _Expected(case, problems, asks)
        with _cache_lock:
            if len(_cache) >= 512:
                _cache.clear()
            _cache[key] = found
    return found


# ---------------------------------------------------------------- the verdict


def compare(got: Any, law: np.ndarray, plain: np.ndarray, multiple: float, rounding: float) -> tuple[float, float]:
    """Return the largest error, and its bound: `multiple` times the error of the plain computation.

    That error may be small by luck, so it counts as at least one rounding of the result, and as `rounding` relative to it: one
    rounding of the largest logit, which the exponential passes on.
    """
    rounding = max(reference.epsilon(got.dtype), rounding)
    got = np.asarray(got).astype(np.float64)
    finite = np.isfinite(law)
    if got.shape != law.shape or not np.array_equal(got[~finite], law[~finite]):
        return float("inf"), 0.0
    if not finite.any():
        return 0.0, 0.0
    wrong = np.abs(got[finite] - law[finite])
    error = float("inf") if np.isnan(wrong).any() else float(wrong.max())
    yard = float(np.abs(plain.astype(np.float64)[finite] - law[finite]).max())
    return error, multiple * max(yard, rounding * float(np.abs(law[finite]).max()))


def run(case: Case, target: Target, seed: int, compiled: Mapping[Any, Any], asks: Asks) -> list[Check]:
    """Run a case and return a check per quantity. `compiled` maps the key of the arguments to a program that takes them."""
    problems = [case.problem(seed, sample) for sample in range(case.samples)]
    args = arguments(case, problems, target, asks)
    call = compiled[args.key]
    if case.variant == "cancel":
        return _cancelling(problems[0], args, call, asks)
    if Feature.DROPOUT in case.features:
        return _with_dropout(case, problems[0], args, call, asks, target)
    results, gradients = call(args.inputs, args.traced, args.cotangents)
    return _checks(results, gradients, _expected(case, problems, asks, seed), target.tolerance)


def _checks(results: Any, gradients: Any, expected: _Expected, tolerance: Tolerance) -> list[Check]:
    got = dict(zip(("output", "logsumexp", "weights"), results, strict=True))
    got |= {f"d_{name}": value for name, value in (gradients or {}).items()}
    checks = []
    for name, law, plain in expected.quantities():
        multiple = tolerance.gradient if name.startswith("d_") else tolerance.forward
        checks.append(Check(name, *compare(got[name], law, plain, multiple, expected.rounding)))
    return checks


def _with_dropout(case: Case, problem: Problem, args: Arguments, call: Any, asks: Asks, target: Target) -> list[Check]:
    """Read off which weights were kept, hold everything else to the law with those, and the choice to its statistics."""

    def once(key: int) -> Any:
        return call(args.inputs, {**args.traced, "dropout_rng": jax.random.PRNGKey(key)}, args.cotangents)

    results, gradients = once(0)
    probability = problem.options["dropout_prob"]
    no_dropout = reference.attention(problem.query, problem.key, problem.value, problem.law)
    kept = dropout.kept(results[0], no_dropout)
    expected = _Expected(case, [problem], asks, keep=kept / (1 - probability))
    checks = _checks(results, gradients, expected, target.tolerance)
    checks += [Check(*row) for row in dropout.statistics(lambda key: once(key)[0][0], no_dropout, probability)]
    return checks


_CANCELLING = 0.02


def _cancelling(problem: Problem, args: Arguments, call: Any, asks: Asks) -> list[Check]:
    """Choose d_output almost orthogonal to the gradient of the sinks, so that rounding single terms of the sum shows.

    The sum may use the output as returned or before it was rounded; the bound is relative, per sink.
    """
    (output, _, _), _ = call(args.inputs, args.traced, args.cotangents)
    law = reference.attention(problem.query, problem.key, problem.value, problem.law)
    rounded = np.asarray(output).astype(np.float64)
    weight = law.sink_weights.sum(-1).swapaxes(1, 2)[..., None]
    direction = weight * rounded
    d_output = problem.d_output.astype(np.float64)
    along = (direction * d_output).sum((0, 1, 3)) / (direction**2).sum((0, 1, 3))
    d_output = (d_output - 0.99 * along[:, None] * direction).astype(problem.d_output.dtype)
    zeros = tuple(None if x is None else jnp.zeros_like(x) for x in args.cotangents[1:])
    _, gradients = call(args.inputs, args.traced, (jnp.asarray(d_output), *zeros))
    got = np.asarray(gradients["softmax_aux"]).astype(np.float64)
    errors = []
    for out in (rounded, law.output):
        want = law.d_sinks((d_output.astype(np.float64) * out).sum(-1).swapaxes(1, 2))
        errors.append(float(np.max(np.abs(got - want) / np.abs(want))))
    return [Check("d_softmax_aux", float("inf") if np.isnan(got).any() else min(errors), _CANCELLING)]
