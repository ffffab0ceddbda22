"""Attention in Equinox: the functional form in an `eqx.Module`, its operation named by a static field.

    pip install 'attention-ops[equinox]'
    python examples/equinox_attention.py --impl blocksparse

Trains one causal layer to repeat the previous token of its input, and prints the loss and the plan of its attention.
"""

import argparse
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

import attention_ops as ao


class Attention(eqx.Module):
    """Grouped-query self-attention over one sequence. Vmap it over the batch."""

    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    out: eqx.nn.Linear
    heads: int = eqx.field(static=True)
    kv_heads: int = eqx.field(static=True)
    impl: str | tuple[str, ...] = eqx.field(static=True)

    def __init__(self, width: int, heads: int, kv_heads: int, impl: str | tuple[str, ...] = "auto", *, key: PRNGKeyArray):
        head_dim, keys = width // heads, jax.random.split(key, 4)
        linear = partial(eqx.nn.Linear, use_bias=False)
        self.query = linear(width, heads * head_dim, key=keys[0])
        self.key = linear(width, kv_heads * head_dim, key=keys[1])
        self.value = linear(width, kv_heads * head_dim, key=keys[2])
        self.out = linear(heads * head_dim, width, key=keys[3])
        self.heads, self.kv_heads, self.impl = heads, kv_heads, impl

    def __call__(self, x: Float[Array, "T width"], *, causal: bool = True) -> Float[Array, "T width"]:
        query = jax.vmap(self.query)(x).reshape(1, len(x), self.heads, -1)
        key, value = (jax.vmap(linear)(x).reshape(1, len(x), self.kv_heads, -1) for linear in (self.key, self.value))
        attended = ao.attention(query, key, value, impl=self.impl, causal=causal).attention_outputs
        return jax.vmap(self.out)(attended.reshape(len(x), -1))


class Model(eqx.Module):
    """Embeddings, one layer of attention, logits."""

    tokens: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    attention: Attention
    logits: eqx.nn.Linear

    def __init__(self, vocabulary: int, length: int, width: int, impl: str, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 4)
        self.tokens = eqx.nn.Embedding(vocabulary, width, key=keys[0])
        self.positions = eqx.nn.Embedding(length, width, key=keys[1])
        self.attention = Attention(width, heads=4, kv_heads=2, impl=impl, key=keys[2])
        self.logits = eqx.nn.Linear(width, vocabulary, key=keys[3])

    def __call__(self, tokens: Int[Array, " T"]) -> Float[Array, "T vocabulary"]:
        x = jax.vmap(self.tokens)(tokens) + self.positions.weight[: len(tokens)]
        return jax.vmap(self.logits)(x + self.attention(x))


def loss(model: Model, tokens: Int[Array, "B T"]) -> Float[Array, ""]:
    """Return the mean cross entropy of naming, at each position, the token before it."""
    log_probabilities = jax.nn.log_softmax(jax.vmap(model)(tokens)[:, 1:])
    return -jnp.mean(jnp.take_along_axis(log_probabilities, tokens[:, :-1, None], axis=-1))


@eqx.filter_jit
def step(model: Model, tokens: Int[Array, "B T"], rate: float) -> tuple[Model, Float[Array, ""]]:
    """Take one step of gradient descent; return the loss before it."""
    value, gradients = eqx.filter_value_and_grad(loss)(model, tokens)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -rate * g, gradients)), value


def train(impl: str, steps: int, length: int = 16, vocabulary: int = 8) -> list[float]:
    """Return the loss at every step."""
    keys = jax.random.split(jax.random.key(0), steps + 1)
    model = Model(vocabulary, length, width=32, impl=impl, key=keys[0])
    losses = []
    for key in keys[1:]:
        model, value = step(model, jax.random.randint(key, (16, length), 0, vocabulary), 1.0)
        losses.append(float(value))
    return losses


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--impl", default="auto", help="an operation's name (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="default: %(default)s")
    options = parser.parse_args(arguments)
    with ao.record_plans() as plans:
        losses = train(options.impl, options.steps)
    for number in range(0, len(losses), max(1, len(losses) // 8)):
        print(f"step {number:4}  loss {losses[number]:.3f}")
    print(f"step {len(losses) - 1:4}  loss {losses[-1]:.3f}\n\n{plans[0]}")


if __name__ == "__main__":
    main()
