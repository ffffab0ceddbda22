"""The functional form in Equinox: the example, and beside Equinox' own attention."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import attention_ops as ao

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("equinox_attention")
    sys.path.remove(str(EXAMPLES))


@pytest.mark.parametrize("impl", ["vanilla", "blocksparse"])
def test_it_gives_what_equinox_gives(impl, example, close):
    theirs = eqx.nn.MultiheadAttention(4, 16, key=jax.random.key(0))
    ours = example.Attention(16, heads=4, kv_heads=4, impl=impl, key=jax.random.key(1))
    projections = lambda layer: (layer.query, layer.key, layer.value, layer.out)  # noqa: E731
    ours = eqx.tree_at(projections, ours, (theirs.query_proj, theirs.key_proj, theirs.value_proj, theirs.output_proj))
    x = jax.random.normal(jax.random.key(2), (3, 6, 16))
    causal = jnp.tril(jnp.ones((6, 6), bool))

    @eqx.filter_jit
    def run(layer, call):
        def loss(layer):
            output = jax.vmap(lambda x: call(layer, x))(x)
            return jnp.sum(output**2), output

        (_, output), gradients = eqx.filter_value_and_grad(loss, has_aux=True)(layer)
        return output, jax.tree.leaves(gradients)

    with ao.record_plans() as plans:
        found = run(ours, lambda layer, x: layer(x))
    assert plans[0].operation == impl
    close(found, run(theirs, lambda layer, x: layer(x, x, x, mask=causal)), tolerance=1e-4)


def test_the_example_learns_and_shows_its_plan(example, capsys):
    example.main(["--steps", "40", "--impl", "vanilla"])
    lines = capsys.readouterr().out.splitlines()
    first, last = (float(line.split()[-1]) for line in (lines[0], lines[8]))
    assert last < 0.5 * first
    assert "vanilla on cpu runs vanilla/native" in lines
