"""`python -m attention_ops.bench`."""

from attention_ops.bench.cli import main
from attention_ops.cli.lazy import written

with written():
    main(prog_name="python -m attention_ops.bench")
