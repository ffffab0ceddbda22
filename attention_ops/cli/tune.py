"""`attention-ops tune`: block sizes measured on this machine, and what is kept of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from attention_ops.cli import parameters
from attention_ops.cli.lazy import Refused, refusals

if TYPE_CHECKING:
    from attention_ops.bench.tune import Job, Outcome
    from attention_ops.cli.questions import Answer
    from attention_ops.metadata import BlockSizes
    from attention_ops.tuning import Tuned

ROUNDS = 7
_SIZES = parameters.Sizes("N,N,...", tuple(range(1, 17)), minimum=1)


@click.command(short_help="Measure block sizes on this machine and keep those that win.")
@click.argument("name", required=False, shell_complete=parameters.complete_name)
@parameters.config_option
@parameters.layer_option
@parameters.batch_option
@parameters.length_option
@parameters.shape_option
@parameters.kv_option
@parameters.dtype_option
@parameters.settings_option
@click.option("--backward", is_flag=True, help="Time forward and backward together.  [default: the forward]")
@click.option("--block-q", type=_SIZES, help="Query rows to try.  [default: 128 to 1024 over the query heads per kv head]")
@click.option("--block-kv", type=_SIZES, help="Keys to try.  [default: 128 to 2048]")
@click.option("--rounds", type=click.IntRange(min=1), default=ROUNDS, show_default=True, help="Rounds of the best candidates.")
@click.option("--dry-run", is_flag=True, help="Print what would be measured; measure and keep nothing.")
@click.option("--list", "is_list", is_flag=True, help="Print what is kept.")
@click.option("--clear", is_flag=True, help="Forget what is kept: all of it, or what is of NAME.")
@parameters.load_option
@parameters.json_option
def tune(
    name: str | None,
    backward: bool,
    block_q: tuple[int, ...] | None,
    block_kv: tuple[int, ...] | None,
    rounds: int,
    dry_run: bool,
    is_list: bool,
    clear: bool,
    as_json: bool,
    **said: Any,
) -> None:
    """Measure block sizes for a request on this machine, and keep those that beat the kernel's own rule by a clear margin.

    The request is a config's (--config) or said in text (--shape, --kv, --set), as in `explain`. NAME is an operation; without it
    the config's, else auto; what is tuned is the route that its plan takes. Candidates and the default take turns in one run.

    \b
    attention-ops tune --shape 1,4096,8,64 --dtype float32 --set causal
    attention-ops tune --config configs/llama3_2_1b.yaml --length 4096 --backward

    Later plans of such requests take what is kept, and say so in their notes. Sizes in the metadata always win.
    """
    if is_list or clear:
        asked = [f"--{option.replace('_file', '')}" for option in ("config_file", "shape") if said[option]]
        if asked or (is_list and clear):
            raise Refused(
                f"--list and --clear go alone; found {'--clear' if clear else '--list'} with {' '.join(asked) or '--list'}"
            )
        _clear(name, as_json) if clear else _list(name, as_json)
        return
    from attention_ops.bench import tune as bench

    with parameters.precision(said["dtype"]):
        jobs = _jobs(name, said, "gradient" if backward else "forward")
        tried = [bench.candidates(job.plan, block_q or (), block_kv or ()) for job in jobs]
        if dry_run:
            _show_candidates(jobs, tried, as_json)
            return
        _keep([], [])  # an unwritable folder is found out before anything is measured
        outcomes = []
        with _progress(sum(bench.steps(len(sizes), rounds) for sizes in tried)) as step, refusals():
            for job, sizes in zip(jobs, tried, strict=True):
                outcome = bench.measure(job, sizes, rounds, step)
                _keep([outcome.winner] if outcome.winner else [], [job.key])
                outcomes.append(outcome)
    _show_outcomes(outcomes, as_json)


# ---------------------------------------------------------------- what to measure


def _jobs(name: str | None, said: dict[str, Any], work: Any) -> list[Job]:
    from attention_ops import tuning
    from attention_ops.bench.tune import Job
    from attention_ops.cli import questions
    from attention_ops.metadata import BlockSizes

    jobs: dict[Any, Job] = {}
    for question in questions.of_said(said):
        question = dataclasses.replace(question, metadata=dataclasses.replace(question.metadata, block_sizes=BlockSizes()))
        device = parameters.profile_of(None, question.metadata.backend)
        with refusals(), tuning.default_rule():
            answer = question.ask(None if name is None else (name,), device)
        job = Job(_tunable(answer), question.arrays, question.options, question.metadata, work)
        jobs.setdefault(job.key, job)
    return list(jobs.values())


def _tunable(answer: Answer) -> Any:
    """Return the plan of an answer, if its route takes block sizes."""
    from attention_ops.registry import OperationRegistry

    plan = answer.plan
    if plan is None:
        raise Refused(answer.headline)
    if plan.implementation.routes[plan.route.rpartition("/")[2]].declaration.block_sizes:
        if plan.is_fallback:
            click.echo(f"{plan.requested[0]} cannot take this request; {plan.route}, which runs instead, is tuned", err=True)
        return plan
    operations = [OperationRegistry.get(name) for name in OperationRegistry.names()]
    routes = [r.name for operation in operations for r in operation.routes.values() if r.declaration.block_sizes]
    raise Refused(f"{answer.headline}, which takes no block sizes; name one that does: {', '.join(routes) or 'there is none'}")


# ---------------------------------------------------------------- what is kept


def _keep(found: Sequence[Tuned], measured: Sequence[Any]) -> None:
    from attention_ops import storage, tuning

    try:
        tuning.keep(found, dropped=measured)
    except OSError as error:
        fix = f"set {storage.ENVIRONMENT} to a folder that can be written"
        raise Refused(f"tuned block sizes cannot be kept in {storage.folder()} ({error}); {fix}") from error


def _kept(name: str | None) -> list[Tuned]:
    from attention_ops import tuning

    operation = None
    if name is not None:
        from attention_ops.registry import OperationRegistry

        with refusals():
            operation = OperationRegistry.get(name).name
    kept = tuning.table().kept.values()
    return [one for one in kept if operation is None or one.route.partition("/")[0] == operation]


def _list(name: str | None, as_json: bool) -> None:
    from attention_ops import storage, tuning
    from attention_ops.cli.console import emit, table

    kept = _kept(name)
    if as_json:
        click.echo(json.dumps({"kept": [dataclasses.asdict(one) for one in kept]}, indent=2))
        return
    if not kept:
        emit(f"nothing is kept in {storage.path(tuning.FILE)}")
        return
    rows = table("route", "request", "work", "block sizes", "of the default's time", "date", "machine", "versions")
    for one in kept:
        sizes, share = f"{one.q}, {one.kv}", f"{one.ratio:.2f}"
        rows.add_row(one.route, one.request, one.work, sizes, share, one.date, one.machine, one.versions)
    emit(rows)


def _clear(name: str | None, as_json: bool) -> None:
    gone = _kept(name)
    if gone:
        _keep([], [one.key for one in gone])
    click.echo(json.dumps({"forgotten": len(gone)}) if as_json else f"{len(gone)} forgotten")


# ---------------------------------------------------------------- what is shown


def _show_candidates(jobs: Sequence[Job], tried: Sequence[Sequence[BlockSizes]], as_json: bool) -> None:
    from attention_ops.cli.console import emit

    if as_json:
        content = [
            {"request": job.title, "candidates": [dataclasses.asdict(sizes) for sizes in all_sizes]}
            for job, all_sizes in zip(jobs, tried, strict=True)
        ]
        click.echo(json.dumps({"would_measure": content}, indent=2))
        return
    for job, all_sizes in zip(jobs, tried, strict=True):
        emit(job.title, f"  the default rule, and (q, kv) of {', '.join(f'({x.q}, {x.kv})' for x in all_sizes)}")


def _show_outcomes(outcomes: Sequence[Outcome], as_json: bool) -> None:
    from attention_ops.bench.tune import MARGIN
    from attention_ops.cli.console import emit, styled, table

    if as_json:
        click.echo(json.dumps({"tuned": [outcome.to_dict() for outcome in outcomes]}, indent=2))
        return
    for number, outcome in enumerate(outcomes):
        won = outcome.winner
        rows = table("q", "kv", "of the default's time", "rounds", "")
        rows.add_row("default", "", f"1.00 ({outcome.seconds * 1e3:.4g} ms)", "", "" if won else styled("stays", "green"))
        for trial in sorted(outcome.trials, key=lambda trial: (not trial.is_final, trial.ratio if trial.ratios else 0.0)):
            is_kept = won is not None and (trial.sizes.q, trial.sizes.kv) == (won.q, won.kv)
            remark = styled("kept", "green") if is_kept else (trial.failure or "")
            ratio = f"{trial.ratio:.2f}" if trial.ratios else "failed"
            rows.add_row(str(trial.sizes.q), str(trial.sizes.kv), ratio, str(len(trial.ratios)), remark)
        verdict = (
            f"block sizes ({won.q}, {won.kv}) take {won.ratio:.2f} of the default's time and are kept"
            if won
            else f"no candidate saves {MARGIN:.0%} of the default's time in most rounds; the default rule stays"
        )
        emit(*([""] if number else []), styled(outcome.job.title, "bold"), "", rows, "", verdict)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal (standard error), nothing elsewhere; drawn in the steps, by no thread that would be measured too."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn("measuring"), BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    with bar:
        task = bar.add_task("measuring", total=total)

        def step() -> None:
            bar.advance(task)
            bar.refresh()

        yield step
