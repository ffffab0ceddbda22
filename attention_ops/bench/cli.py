"""The command. Everything heavy is imported once the options are known to be good."""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import click

from attention_ops.bench.cases import SUITES, Case, select

SHORT_REPEATS, FULL_REPEATS = 3, 7
SHORT_LIMIT, FULL_LIMIT = 10.0, 60.0
_FILE = click.Path(dir_okay=False, writable=True, path_type=pathlib.Path)


@click.command("bench")
@click.option("--suite", "suites", multiple=True, type=click.Choice(SUITES), help="Repeatable. Default: all, in the short form.")
@click.option(
    "--row", "rows", multiple=True, metavar="PATTERN", help="Only rows of this name, for example 'forward/*_bf16'. Repeatable."
)
@click.option(
    "--op", "operations", multiple=True, metavar="NAME", help="Operation of ours. Repeatable. Default: blocksparse, auto."
)
@click.option(
    "--short/--full", "short", default=None, help="Fewer rows, peers and rounds, or all. Default: short unless --suite or --row."
)
@click.option(
    "--length", type=click.IntRange(min=16), metavar="N", help="No sequence longer than N: a quick look, without targets."
)
@click.option("--repeats", type=click.IntRange(min=1), help=f"Rounds. Default: {SHORT_REPEATS} short, {FULL_REPEATS} full.")
@click.option(
    "--limit", type=float, help=f"Seconds per call in the suite scaling. Default: {SHORT_LIMIT:g} short, {FULL_LIMIT:g} full."
)
@click.option("--json", "json_file", type=_FILE, help="Write everything that was measured.")
@click.option("--plot", "plot_file", type=_FILE, help="Draw the suite scaling (matplotlib).")
@click.option("--list", "is_list", is_flag=True, help="Print the rows and measure nothing.")
def main(
    suites: tuple[str, ...],
    rows: tuple[str, ...],
    operations: tuple[str, ...],
    short: bool | None,
    length: int | None,
    repeats: int | None,
    limit: float | None,
    json_file: pathlib.Path | None,
    plot_file: pathlib.Path | None,
    is_list: bool,
) -> None:
    """Measure our operations beside their peers, in one process, interleaved; print ratios of medians.

    Peers: jax.nn, ejkernel's flash, attention and blocksparse, PyTorch when it is installed, and a matrix product of the same
    floating point operations as the ceiling. Exits with 1 when one of ours failed or differs from another of ours.
    """
    short = not (suites or rows) if short is None else short
    cases = select(suites, rows, short, length)
    if not cases:
        raise click.UsageError(f"no row matches {', '.join(rows)}; --list prints them")
    if is_list:
        for case in cases:
            click.echo(f"{case.name}: {case.title}")
        return
    for file in filter(None, (json_file, plot_file)):
        if not file.resolve().parent.is_dir():
            raise click.UsageError(f"{file} cannot be written: there is no folder {file.parent}")
    if plot_file:
        _check_plot(cases)
    from attention_ops.bench.runner import Settings

    settings = Settings(
        operations=_known(operations or ("blocksparse", "auto")),
        repeats=repeats or (SHORT_REPEATS if short else FULL_REPEATS),
        limit=(SHORT_LIMIT if short else FULL_LIMIT) if limit is None else limit,
    )
    facts, results, is_whole = _measure(cases, settings)
    if json_file:
        content = {"version": 1, "environment": facts, "repeats": settings.repeats, "operations": settings.operations}
        json_file.write_text(json.dumps(content | {"rows": [result.to_dict() for result in results]}, indent=1))
    if plot_file and results:
        from attention_ops.bench.plot import draw

        draw(results, plot_file)
    if not is_whole:
        raise SystemExit(130)
    if any(result.is_broken for result in results):
        raise SystemExit(1)


def _check_plot(cases: Sequence[Case]) -> None:
    from attention_ops.bench.plot import MISSING, is_available

    if not any(case.suite == "scaling" and case.pattern.is_plain for case in cases):
        raise click.UsageError("--plot draws the suite scaling, which is not among the rows; add --suite scaling")
    if not is_available():
        raise click.UsageError(MISSING)


def _known(operations: tuple[str, ...]) -> tuple[str, ...]:
    from attention_ops.errors import UnknownOperationError
    from attention_ops.registry import OperationRegistry

    for name in operations:
        try:
            OperationRegistry.resolve(name)
        except UnknownOperationError as error:
            raise click.BadParameter(str(error), param_hint="--op") from None
    return tuple(dict.fromkeys(operations))


def _measure(cases: Sequence[Case], settings: Any) -> tuple[dict[str, Any], list[Any], bool]:
    """Measure and print as rows are finished; return the environment, the results, and whether it was not interrupted."""
    from rich.console import Console

    from attention_ops.bench import report
    from attention_ops.bench.environment import describe, environment, load
    from attention_ops.bench.runner import run

    console, results, is_whole = Console(), [], True
    facts = environment()
    for line in describe(facts):
        click.echo(line)
    click.echo(f"{len(cases)} rows, medians of {settings.repeats} rounds, systems interleaved\n")
    try:
        with _progress(cases, settings) as (step, pause):
            for case, result in zip(cases, run(cases, settings, step), strict=True):
                results.append(result)
                with pause(case):
                    if console.is_terminal:
                        console.print(report.rich_table(result, settings.operations))
                    else:
                        click.echo(report.plain(result, settings.operations) + "\n")
    except KeyboardInterrupt:
        is_whole = False
    click.echo(report.plain_summary(results))
    facts["load_at_end"] = load()
    click.echo(
        f"load average at the end {', '.join(f'{x:.2f}' for x in facts['load_at_end'])}" + ("" if is_whole else "; interrupted")
    )
    return facts, results, is_whole


@contextlib.contextmanager
def _progress(cases: Sequence[Case], settings: Any) -> Iterator[tuple[Any, Any]]:
    """A bar on a terminal (standard error), nothing elsewhere.

    Yields what to call at each step, and a context that takes the bar away to print a finished row. The bar is drawn in the steps
    and by no thread of its own, which would be measured too.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from attention_ops.bench.runner import steps

    console = Console(stderr=True)
    if not console.is_terminal:
        yield (lambda: None), (lambda case: contextlib.nullcontext())
        return
    ends = dict(zip(cases, itertools.accumulate(steps(case, settings) for case in cases), strict=True))
    following = dict(itertools.pairwise(cases))
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    with bar:
        task = bar.add_task(cases[0].name, total=ends[cases[-1]])

        def step() -> None:
            bar.advance(task)
            bar.refresh()

        @contextlib.contextmanager
        def pause(case: Case) -> Iterator[None]:
            bar.update(task, completed=ends[case], description=following.get(case, case).name)
            bar.stop()
            yield
            bar.start()
            bar.refresh()

        yield step, pause
