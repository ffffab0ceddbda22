"""`python -m attention_ops.bench`."""

from attention_ops.bench.cli import main

main(prog_name="python -m attention_ops.bench")
