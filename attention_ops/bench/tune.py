"""Measure block sizes for one request: candidates beside the kernel's own rule, taking turns, judged by medians of ratios."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_ops import api, tuning
from attention_ops.bench.systems import reason_of
from attention_ops.bench.timing import Call, interleave, ratios
from attention_ops.errors import AttentionOpsError
from attention_ops.metadata import BlockSizes, OperationMetadata
from attention_ops.planner import Plan
from attention_ops.tuning import Tuned, Work

MARGIN = 0.05
"""A candidate is kept when it saves at least this share of the default's time."""

STEADY = 0.75
"""And is the faster of the two in at least this share of the rounds."""

SCREENING_ROUNDS, FINALISTS = 2, 3
"""Every candidate is timed in a few rounds; the best of them, with the default, again in as many as asked for."""

ROWS = (128, 256, 512, 1024)
COLUMNS = (128, 256, 512, 1024, 2048)
"""Block sizes tried: rows of one key/value head, so query rows times query heads per key/value head; and keys."""


class CannotTune(AttentionOpsError):
    """There is nothing to choose, or the default rule itself does not run; the message says why."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One request to tune, as shapes: the plan it has by the default rule, and the call it stands for.

    Run-time data that options hold as shapes is made to hide nothing: lengths are full, ids are all 0, masks all True, and a
    traced offset puts the last query at the last key.
    """

    plan: Plan
    arrays: tuple[Any, Any, Any]
    options: Mapping[str, Any]
    metadata: OperationMetadata
    work: Work

    @property
    def title(self) -> str:
        s = self.plan.spec
        mask = "" if s.mask is None else f", {s.mask}"
        what = "forward" if self.work == "forward" else "forward and backward"
        return f"{self.plan.route}, {what}: B {s.B}, T {s.T}, S {s.S}, H {s.H}, K {s.K}, D {s.D}, Dv {s.Dv}, {s.dtype}{mask}"

    @property
    def key(self) -> tuning.Key:
        return self.result(BlockSizes(1, 1), 1.0).key

    def admitted(self, sizes: BlockSizes) -> BlockSizes:
        """Return the sizes that the route is given when `sizes` are kept; CannotTune when its rules refuse them."""
        plan = self.plan
        route = plan.implementation.routes[plan.route.rpartition("/")[2]]
        given = tuning.admitted(sizes, route, plan.spec, self.metadata, plan.device)
        if given is None:
            stated = dataclasses.replace(self.metadata, block_sizes=sizes)
            raise CannotTune("; ".join(map(str, route.refusals(plan.spec, stated, plan.device))))
        return given

    def result(self, sizes: BlockSizes, ratio: float) -> Tuned:
        """Return what is to be kept when `sizes` win."""
        assert sizes.q is not None
        assert sizes.kv is not None
        return Tuned(
            machine=tuning.machine_of(self.plan.device),
            versions=tuning.versions(),
            route=self.plan.route,
            request=tuning.request_of(self.plan.spec),
            work=self.work,
            q=sizes.q,
            kv=sizes.kv,
            ratio=round(ratio, 3),
            date=datetime.date.today().isoformat(),
        )

    def prepare(self) -> Callable[[BlockSizes], Call]:
        """Make the inputs, and return what compiles the call for given block sizes."""
        rng, (query, key, value) = np.random.default_rng(0), self.arrays
        sizes = {"q_lengths": query.shape[1], "kv_lengths": key.shape[1], "query_offset": max(key.shape[1] - query.shape[1], 0)}

        def made(shape: jax.ShapeDtypeStruct, number: int = 0) -> jax.Array:
            if jnp.issubdtype(shape.dtype, jnp.floating):
                return jnp.asarray(rng.standard_normal(shape.shape, np.float32), shape.dtype)
            return jnp.full(shape.shape, shape.dtype == np.bool_ or number, shape.dtype)

        def option(name: str, value: Any) -> Any:
            return jax.tree_util.tree_map(lambda x: made(x, sizes.get(name, 0)) if _is_shape(x) else x, value)

        arrays = made(query), made(key), made(value)
        data = {name: option(name, value) for name, value in self.options.items() if _has_shapes(value)}
        static = {name: value for name, value in self.options.items() if name not in data}
        out = jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), self.plan.spec.dtype)
        cotangent = made(out) if self.work == "gradient" else None

        def compile_with(block_sizes: BlockSizes) -> Call:
            metadata = dataclasses.replace(self.metadata, block_sizes=block_sizes, fallback="error")

            def attend(data: Any, query: Any, key: Any, value: Any) -> jax.Array:
                options = {**static, **data}
                return api.attention(query, key, value, impl=self.plan.route, metadata=metadata, **options).attention_outputs

            def run(arrays: Any, data: Any, cotangent: Any) -> Any:
                if cotangent is None:
                    return attend(data, *arrays)
                output, pull = jax.vjp(functools.partial(attend, data), *arrays)
                return output, pull(cotangent)

            function = jax.jit(run)
            with tuning.default_rule():
                jax.block_until_ready(function(arrays, data, cotangent))
            return lambda: jax.block_until_ready(function(arrays, data, cotangent))

        return compile_with


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _has_shapes(value: Any) -> bool:
    return any(map(_is_shape, jax.tree_util.tree_leaves(value)))


@dataclasses.dataclass(frozen=True)
class Trial:
    """One candidate: its times over the default's, round by round, or why there are none. `is_final`: it was among the best."""

    sizes: BlockSizes
    ratios: tuple[float, ...] = ()
    is_final: bool = False
    failure: str | None = None

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a job found. `winner` is None when the default rule stands; `seconds` is the default's median."""

    job: Job
    seconds: float
    trials: tuple[Trial, ...]
    winner: Tuned | None

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as plain values, ready for JSON."""
        return {
            "request": self.job.title,
            "default_seconds": self.seconds,
            "trials": [
                {
                    **dataclasses.asdict(trial.sizes),
                    "ratio": None if trial.failure else trial.ratio,
                    "rounds": len(trial.ratios),
                    "final": trial.is_final,
                    "failure": trial.failure,
                }
                for trial in self.trials
            ],
            "kept": None if self.winner is None else dataclasses.asdict(self.winner),
        }


def candidates(plan: Plan, q: Sequence[int] = (), kv: Sequence[int] = ()) -> tuple[BlockSizes, ...]:
    """Return the block sizes to try for a request; `q` and `kv` replace `ROWS` and `COLUMNS`.

    Of the sizes that hold the whole length in one block only the smallest is tried.
    """
    s = plan.spec
    rows = q or tuple(max(rows // s.groups, 1) for rows in ROWS)
    return tuple(BlockSizes(*pair) for pair in itertools.product(_distinct(rows, s.T), _distinct(kv or COLUMNS, s.S)))


def _distinct(sizes: Sequence[int], length: int) -> list[int]:
    ordered = sorted(set(sizes))
    parts = [size for size in ordered if size < length]
    return ordered[: len(parts) + 1]


def steps(count: int, rounds: int) -> int:
    """Return how often `measure` calls `step` at most for `count` candidates."""
    return (count + 1) * (SCREENING_ROUNDS + 2) + (min(FINALISTS, count) + 1) * (rounds + 1)


def measure(job: Job, tried: Sequence[BlockSizes], rounds: int, step: Callable[[], None] = lambda: None) -> Outcome:
    """Time the candidates against the default rule.

    Raises:
        CannotTune: the default rule does not run; a candidate that fails is a result.
    """
    compile_with = job.prepare()
    calls: dict[Any, Call] = {}
    trials = {sizes: Trial(sizes) for sizes in tried}
    for sizes in (None, *tried):
        try:
            calls[sizes] = compile_with(BlockSizes() if sizes is None else job.admitted(sizes))
        except Exception as error:  # a kernel may refuse a size in any way
            if sizes is None:
                raise CannotTune(f"{job.title}: it fails with its default block sizes ({reason_of(error)})") from error
            trials[sizes] = Trial(sizes, failure=reason_of(error))
        step()
    trials |= _timed(calls, SCREENING_ROUNDS, step)[0]
    best = sorted((trial for trial in trials.values() if trial.failure is None), key=lambda trial: trial.ratio)[:FINALISTS]
    finals, seconds = _timed({sizes: calls[sizes] for sizes in (None, *(trial.sizes for trial in best))}, rounds, step)
    trials |= {sizes: dataclasses.replace(trial, is_final=True) for sizes, trial in finals.items()}
    won = clear_winner(trials.values())
    return Outcome(job, seconds, tuple(trials.values()), None if won is None else job.result(won.sizes, won.ratio))


def _timed(calls: Mapping[Any, Call], rounds: int, step: Callable[[], None]) -> tuple[dict[BlockSizes, Trial], float]:
    """Time candidates beside the default, which is called None; return them, and the default's median in seconds."""
    samples: dict[Any, Any] = dict(interleave(calls, rounds, step=step))
    default = samples.pop(None)
    if default.failure:
        raise CannotTune(f"the default block sizes fail when run again ({default.failure})")
    trials = {
        sizes: Trial(sizes, () if x.failure else ratios(x.seconds, default.seconds), failure=x.failure)
        for sizes, x in samples.items()
    }
    return trials, default.median


def clear_winner(trials: Iterable[Trial]) -> Trial | None:
    """Return the fastest of those that were timed to the end, if it is faster than the default by a clear margin."""
    timed = [trial for trial in trials if trial.is_final and trial.failure is None]
    best = min(timed, key=lambda trial: trial.ratio, default=None)
    if best is None or best.ratio > 1 - MARGIN:
        return None
    faster = sum(ratio < 1 for ratio in best.ratios)
    return best if faster >= STEADY * len(best.ratios) else None
