"""Our masks in the words of `jax.nn.dot_product_attention`."""

from __future__ import annotations

import pytest

from attention_ops import masks
from attention_ops.kernels.jax_nn import native_options


def test_options_of_jax_nn():
    options = native_options(masks.Window(5, None, 0) & masks.Window(9, 2, 0), 8, 8)
    assert options == {"local_window_size": (5, 2)}
    assert native_options(masks.Causal(0) & masks.Window(None, 2, 0), 6, 8) == {"is_causal": True, "local_window_size": (14, 2)}
    with pytest.raises(TypeError, match="chunked.* has no form in jax.nn; allowed are causal masks and windows"):
        native_options(masks.Chunked(2, 0), 8, 8)
