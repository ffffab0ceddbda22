"""Attention by name for code written against a framework: `jax_nn`, `keras`, `flax`, `easydel`.

Each module keeps the framework's own arguments and meaning, and refuses with a sentence what it cannot keep. A framework is
imported when a call needs it, never by importing the module.
"""
