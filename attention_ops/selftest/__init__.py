"""`python -m attention_ops.selftest`: every route of every operation against the law in float64, on the device at hand."""
