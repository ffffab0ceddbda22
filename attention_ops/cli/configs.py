"""`attention-ops config`: check model configs, or make one from a Hugging Face config.json."""

from __future__ import annotations

import shlex
import warnings
from typing import TYPE_CHECKING

import click

from attention_ops.cli import parameters
from attention_ops.cli.lazy import Refused, refusals

if TYPE_CHECKING:
    from attention_ops.config import AttentionConfig


@click.group(short_help="Check model configs, or make one from a Hugging Face config.json.")
def config() -> None:
    """Check model configs, or make one from a Hugging Face config.json."""


@config.command(short_help="Say of each file whether it is a config, or what is wrong in which line.")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path())
@parameters.load_option
def check(files: tuple[str, ...]) -> None:
    """Say of each file whether it is a config, or what is wrong in which line.

    Exit code 0: all are. 1: some are not. Operations of your own that a config names are made known with --load.
    """
    from attention_ops.config import load_config
    from attention_ops.errors import ConfigError

    bad = 0
    for file in files:
        try:
            click.echo(f"{file}: ok, {_summary(load_config(file))}")
        except ConfigError as error:
            click.echo(str(error), err=True)
            bad += 1
    if bad and len(files) > 1:
        click.echo(f"{bad} of {len(files)} files cannot be used", err=True)
    click.get_current_context().exit(1 if bad else 0)


def _summary(config: AttentionConfig) -> str:
    kinds = ", ".join(f"{config.layer_kinds.count(kind)} {kind}" for kind in config.kinds)
    layers = f"{config.num_layers} layers" + (f" ({kinds})" if len(config.kinds) > 1 else "")
    operations = dict.fromkeys(config.build(kind).name for kind in config.kinds)
    return f"{config.name}: {layers}, {' and '.join(operations)}"


@config.command("from-hf", short_help="Write the config of a Hugging Face config.json.")
@click.argument("path", type=click.Path())
@click.option("--out", type=click.Path(dir_okay=False), metavar="FILE", help="Where to write it.  [default: the terminal]")
@click.option("--name", help="The model's name.  [default: from the file]")
@click.option("--ignore", multiple=True, metavar="KEY", help="A key that is not known and may be left out. Repeatable.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
def from_hf(path: str, out: str | None, name: str | None, ignore: tuple[str, ...], force: bool) -> None:
    """Write the config of a Hugging Face config.json: a file, or the folder that holds it."""
    from attention_ops.config import AttentionConfig

    with warnings.catch_warnings(record=True) as caught, refusals():
        warnings.simplefilter("always")
        text = AttentionConfig.from_hf(path, name=name, ignore=ignore).to_yaml()
    for warning in caught:
        click.echo(f"Warning: {' '.join(str(warning.message).split())}", err=True)
    if out is None:
        click.echo(text, nl=False)
        return
    write(out, text, force)
    click.echo(f"wrote {out}; next: {shlex.join(('attention-ops', 'config', 'check', out))}")


def write(path: str, text: str, force: bool = False) -> None:
    """Write a new file. A file that is there stays, unless forced."""
    try:
        with open(path, "w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise Refused(f"{path} exists; choose another place" + ("" if force else ", or replace it with --force")) from None
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror or error}") from None
