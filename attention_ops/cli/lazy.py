"""Commands that are imported when they run, and errors that are one line."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import click

from attention_ops.errors import AttentionOpsError


class Refused(click.ClickException):
    """What was said cannot be done: one line on stderr, exit code 2."""

    exit_code = 2

    def __init__(self, message: object):
        super().__init__("; ".join(line.strip() for line in str(message).splitlines() if line.strip()))


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Show the library's refusals of what the user said. Only around calls that judge it: elsewhere they would be faults."""
    try:
        yield
    except (AttentionOpsError, ValueError, TypeError) as error:
        raise Refused(error) from error


_UNWRITABLE = {errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPIPE}


@contextlib.contextmanager
def written() -> Iterator[None]:
    """End a command whose output cannot be written with exit code 1, and one line that says so; none where a pipe is closed."""
    if sys.stdout is None:  # it was closed before the start
        _unwritten("standard output is closed")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes what is left once more at its end
        _unwritten(None if error.errno == errno.EPIPE else error.strerror)


def _unwritten(why: str | None) -> NoReturn:
    if why is not None:
        click.echo(f"Error: cannot write the output: {why}", err=True)
    sys.exit(1)


class OneLineErrors(click.Group):
    """A group whose commands stand in the order they were added. An error of usage or of output is one line."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        with written():
            return super().main(*args, **kwargs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _one_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _one_line():
            return super().invoke(ctx)


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        message = error.format_message()
        where = (
            ""
            if error.ctx is None
            else f"{'' if message.endswith(('.', '?', '?)')) else '.'} See {error.ctx.command_path} --help."
        )
        raise Refused(message + where) from error


class LazyCommand(click.Command):
    """Stands for the command at `module:attribute`: its name and summary are known, the rest is imported when it runs."""

    def __init__(self, name: str, target: str, summary: str):
        super().__init__(name, help=summary, short_help=summary)
        self.target = target

    def load(self) -> click.Command:
        """Import the command."""
        module, _, attribute = self.target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if module == missing or module.startswith(f"{missing}."):
                raise Refused(f"this installation of attention_ops has no {self.name}: there is no module {missing}") from error
            raise Refused(f"{self.name} needs the package {missing}, which is not installed") from error

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        return self.load().make_context(*args, **kwargs)
