"""The command line: `attention-ops`, also `python -m attention_ops`. A command is imported when it runs; help needs no JAX."""

from __future__ import annotations

import click

from attention_ops import __version__
from attention_ops.cli.lazy import LazyCommand, OneLineErrors

COMMANDS = (
    ("list", "attention_ops.cli.listing:list_operations", "Show the operations: routes, what they support, what runs here."),
    ("explain", "attention_ops.cli.explain:explain", "Show which route a request takes, and why each other one does not."),
    ("show", "attention_ops.cli.show:show", "Draw a mask and its block map."),
    ("config", "attention_ops.cli.configs:config", "Check model configs, or make one from a Hugging Face config.json."),
    ("new", "attention_ops.cli.new:new", "Write a starting operation and its test."),
    ("selftest", "attention_ops.selftest.__main__:main", "Prove every route against a float64 reference on this machine."),
    ("bench", "attention_ops.bench.cli:main", "Measure the operations on this machine."),
    ("tune", "attention_ops.cli.tune:tune", "Measure block sizes on this machine and keep those that win."),
    ("doctor", "attention_ops.cli.doctor:doctor", "Print versions, devices and choices, ready to paste into an issue."),
)


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="attention-ops")
def main() -> None:
    """Choose, explain and prove attention in JAX by name."""


for _name, _target, _summary in COMMANDS:
    main.add_command(LazyCommand(_name, _target, _summary))
