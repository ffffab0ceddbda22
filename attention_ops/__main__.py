"""`python -m attention_ops` is `attention-ops`."""

from attention_ops.cli import main

if __name__ == "__main__":
    main(prog_name="attention-ops")
