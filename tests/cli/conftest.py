"""The command line in this process."""

from __future__ import annotations

import pathlib

import pytest
from click.testing import CliRunner, Result

from attention_ops.cli import main

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def cli(monkeypatch):
    """Run a command from the root of the repository, and return its result. An exception that is no exit fails the test."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("ATTENTION_OPS_IMPL", raising=False)

    def run(*args: str, code: int | None = 0) -> Result:
        result = CliRunner().invoke(main, args, prog_name="attention-ops", catch_exceptions=False)
        assert code is None or result.exit_code == code, result.output
        return result

    return run


@pytest.fixture
def refused(cli):
    """Run a command that must fail with exit code 2 and one line on stderr, and return that line."""

    def run(*args: str) -> str:
        result = cli(*args, code=2)
        assert result.stdout == ""
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1, result.stderr
        return result.stderr.strip()

    return run
