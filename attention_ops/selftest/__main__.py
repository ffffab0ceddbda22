"""The command `python -m attention_ops.selftest`."""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
from typing import Any

import click


@click.command()
@click.option("--op", "operations", multiple=True, metavar="NAME", help="Test this operation only. Repeatable.")
@click.option("--load", "modules", multiple=True, metavar="MODULE", help="Import a module first: a dotted name or a .py file.")
@click.option("--config", "config", metavar="FILE", help="Prove what a model config asks for, at reduced size.")
@click.option("--quick/--full", "quick", default=True, help="The table of cases (default), or the whole grid.")
@click.option("--seed", default=0, show_default=True, help="Seed of all data.")
@click.option("--case", "cases", multiple=True, metavar="NAME", help="Run this case only. Repeatable.")
@click.option("--save", is_flag=True, help="Keep the verdicts: a route that fails is refused on this device until it passes.")
@click.option("--json", "json_file", metavar="FILE", help="Also write the report as JSON.")
def main(
    operations: tuple[str, ...],
    modules: tuple[str, ...],
    config: str | None,
    quick: bool,
    seed: int,
    cases: tuple[str, ...],
    save: bool,
    json_file: str | None,
) -> None:
    """Prove every attention route against the law in float64, as far as this machine allows.

    Routes for the device here run on it. Others run in the interpreter of their kernels, or are lowered for their device and the
    kernel calls compared with what was asked for; a route that has never run on its device is named with that at the end.

    On CPU most cases are compiled without XLA's optimisations. --full takes some ten times as long. Exit status: 0 all proven as
    far as that, 1 a failure, 2 bad usage.
    """
    from attention_ops.cli.parameters import load

    with _errors_in_one_line():
        if save and (cases or config):
            raise click.UsageError(f"--save keeps verdicts on whole routes; leave out {'--case' if cases else '--config'}")
        if json_file is not None and not pathlib.Path(json_file).absolute().parent.is_dir():
            raise click.UsageError(f"--json {json_file}: there is no such folder")
        for module in modules:
            load(module)
        names = _known(operations)

    from attention_ops.selftest import report, runner
    from attention_ops.selftest.results import Settings

    rerun = [word for module in modules for word in ("--load", module)] + (["--config", config] if config else [])
    settings = Settings(not quick, seed, cases, declarations=config is None, rerun=tuple(rerun))
    with _errors_in_one_line():
        given: dict[str, Any] = {}
        if config is not None:
            configured, given = _configured(config, cases)
            names = tuple(name for name in configured if names is None or name in names)
        with report.progress(sys.stderr) as progress:
            found = runner.run(names, settings, progress=progress, **given)
        if not any(route.cases or route.status != "passed" for route in found.routes):
            what = f"the case {', '.join(cases)}" if cases else f"a case of {config}"
            raise click.UsageError(f"no route of {', '.join(operations) or 'any operation'} takes {what}")
        if json_file is not None:
            pathlib.Path(json_file).write_text(json.dumps(found.to_dict(), indent=2) + "\n")
    report.show(found, sys.stdout)
    if save:
        with _errors_in_one_line():
            report.show_saved(*runner.save(found, settings), sys.stdout)
    sys.exit(0 if found.ok else 1)


@contextlib.contextmanager
def _errors_in_one_line() -> Any:
    """Turn the errors of a caller into one line and exit status 2."""
    from attention_ops.errors import AttentionOpsError
    from attention_ops.selftest.cases import UnknownCaseError

    try:
        yield
    except (AttentionOpsError, UnknownCaseError, OSError) as error:
        _refuse(str(error))
    except click.ClickException as error:
        _refuse(error.message)


def _refuse(message: str) -> None:
    click.echo(f"Error: {' '.join(message.split())}", err=True)
    sys.exit(2)


def _known(operations: tuple[str, ...]) -> tuple[str, ...] | None:
    from attention_ops.registry import OperationRegistry

    found = tuple(dict.fromkeys(OperationRegistry.get(name).name for name in operations))
    return found or None


def _configured(path: str, cases: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the operations a config leads to, and what a run of its cases needs."""
    import dataclasses

    from attention_ops.config import load_config
    from attention_ops.metadata import OperationMetadata
    from attention_ops.selftest.config_cases import operations_of, source_of

    config = load_config(path).reduced()
    metadata = dataclasses.replace(OperationMetadata.from_config(config), backend=None)
    operations = operations_of(config, metadata)
    names = tuple(dict.fromkeys(name for group in operations.values() for name in group))
    return names, {"metadata": metadata, "source": source_of(config, operations, cases)}


if __name__ == "__main__":
    from attention_ops.cli.lazy import written

    with written():
        main(prog_name="python -m attention_ops.selftest")
