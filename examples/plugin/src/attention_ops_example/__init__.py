"""A plug-in for attention_ops. Its operation is in `example_einsum`, which the registry imports."""
