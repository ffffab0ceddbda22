"""Measure the operations beside their peers, in one process: `python -m attention_ops.bench`, or `attention-ops bench`."""
