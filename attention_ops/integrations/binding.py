"""What the integrations share: an implementation made callable, arrays made four-dimensional, Flax's kind of dropout."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from attention_ops import api
from attention_ops.arrays import array_of
from attention_ops.metadata import OperationMetadata, as_metadata
from attention_ops.operation import OperationImpl
from attention_ops.planner import Chain
from attention_ops.registry import OperationRegistry
from attention_ops.request import AttentionOptions, AttentionOutput, make_request

Attend = Callable[..., AttentionOutput]
"""Called as `attend(query, key, value, **options)` in the layout and with the options of `attention_ops.attention`."""


@dataclasses.dataclass(frozen=True)
class Named:
    """Attention by the operations of some names. As for an operation object, `ao.use` and the environment win over them."""

    names: tuple[str, ...]
    metadata: OperationMetadata
    source: str

    def __call__(self, query: Any, key: Any, value: Any, **options: Unpack[AttentionOptions]) -> AttentionOutput:
        return api.dispatch(query, key, value, options, self.metadata, default=self.names, source=self.source)


def bind(
    implementation: Any, *, source: str, layer: int | str | None = None, metadata: OperationMetadata | None = None
) -> Attend:
    """Return the callable for a name, a chain of names, an operation, a model config, or None for "auto".

    `source` is what plans say of where a name came from; `layer` picks one of a config's layers; `metadata` goes with names.

    Raises:
        TypeError: it is none of these, or `layer` or `metadata` is given where it means nothing.
        UnknownOperationError: a name is not registered.
    """
    if implementation is None or isinstance(implementation, str | Sequence):
        _only_with("a model config", layer=layer)
        names = ("auto",) if implementation is None else named(implementation)
        return Named(names, as_metadata(metadata), source)
    _only_with("names: an operation and a config have their own", metadata=metadata)
    if isinstance(implementation, OperationImpl):
        _only_with("a model config", layer=layer)
        return implementation
    from attention_ops.config import AttentionConfig, ConfiguredAttention

    if isinstance(implementation, AttentionConfig):
        return implementation.build(layer)
    _only_with("a model config", layer=layer)
    if isinstance(implementation, ConfiguredAttention):
        return implementation
    raise TypeError(
        f"implementation is of type {type(implementation).__name__}; allowed are an operation's name, a sequence of names, an "
        "operation, an AttentionConfig or its build(), and None for 'auto'"
    )


def named(implementation: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names as a tuple, each of them registered. Of a sequence the declared fallbacks are left out."""
    is_chain = isinstance(implementation, Sequence) and not isinstance(implementation, str)
    names: tuple[Any, ...] = Chain(implementation) if is_chain else (implementation,)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"implementation is {implementation!r}; allowed is an operation's name or a non-empty sequence of names")
    for name in names:
        OperationRegistry.resolve(name)
    return names


def _only_with(what: str, **argument: Any) -> None:
    ((name, value),) = argument.items()
    if value is not None:
        raise TypeError(f"{name}={value!r} goes with {what}; leave it out")


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Let an error begin with the framework's name for the argument, where it begins with ours.

    Only the errors of `make_request` are changed, the caller's own, and in them the first word alone: the rest may quote
    what the caller gave.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        name, _, rest = str(error).partition(" ")
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        if name not in names or not any(frame.f_globals.get("__name__") == make_request.__module__ for frame in frames):
            raise
        raise type(error)(f"{names[name]} {rest}") from None


def array(name: str, value: Any) -> Array:
    """Return an argument as a JAX array."""
    return value if isinstance(value, jax.Array) else jnp.asarray(array_of(name, value))


def states(name: str, value: Any) -> Array:
    """Return query, key or value as an array of four dimensions."""
    value = array(name, value)
    if value.ndim != 4:
        raise ValueError(f"{name} has shape {value.shape}; allowed is [batch, length, heads, dim]")
    return value


def broadcasting(
    name: str, value: Array, shape: tuple[int, ...], axes: str = "[*batch, heads, query length, key length]"
) -> Array:
    """Return an array that broadcasts to `shape`, with leading axes of length 1 up to as many dimensions."""
    lifted = (1,) * (len(shape) - value.ndim) + value.shape
    if not _fits(lifted, shape):
        without_heads = value.ndim == len(shape) - 1 and _fits((*value.shape[:-2], 1, *value.shape[-2:]), shape)
        fix = f"; pass {name}[{':, ' * (value.ndim - 2)}None] for one of all heads" if without_heads else ""
        raise ValueError(f"{name} has shape {value.shape}; allowed is what broadcasts to {axes} = {shape}{fix}")
    return value.reshape(lifted)


def _fits(found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(found) == len(shape) and all(size in (1, want) for size, want in zip(found, shape, strict=True))


def with_scale(query: Array, scale: Any) -> tuple[Array, float | None]:
    """Return query and a static scale. A traced scale is multiplied into the query, which rounds once to its dtype."""
    if not isinstance(scale, Tracer):
        return query, scale
    if scale.shape != () or not (jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer)):
        raise TypeError(
            f"scale must be one real number, found a traced {scale.dtype}{list(scale.shape)}; for a scale of each head or dim "
            "multiply the query by it and pass scale=1.0"
        )
    wide = jnp.promote_types(query.dtype, jnp.float32)
    return (query.astype(wide) * scale.astype(wide)).astype(query.dtype), 1.0


def check_precision(precision: Any) -> None:
    """Refuse an algorithm that a kernel cannot be told to use. Any other precision is the least asked for: ours is higher.

    The routes of this package multiply float32 at full precision, and 16-bit floats exactly with float32 sums.
    """
    several = precision if isinstance(precision, tuple) else (precision,)
    for one in several:
        if isinstance(one, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset):
            raise ValueError(
                f"precision={one} names an algorithm, which an attention kernel does not take; leave precision out: products of "
                "float32 run at full precision here, those of 16-bit floats with float32 sums"
            )


def shared_dropout(
    weights: Float[Array, "B H T S"], value: Float[Array, "B S K Dv"], probability: float, rng: Any, dtype: Any
) -> Float[Array, "B T H Dv"]:
    """Return (weights with dropout) @ value, one draw for all batch rows and heads: Flax's `broadcast_dropout`.

    The draw is Flax's and ejkernel's own, bit for bit. Keys without any weight are left out, whatever they hold.
    """
    B, H, T, S = weights.shape
    K = value.shape[2]
    keep = jax.random.bernoulli(rng, 1.0 - probability, (1, 1, T, S))
    kept = jnp.where(keep, weights / (1.0 - probability), 0).reshape(B, K, H // K, T, S)
    seen = jnp.any(weights.reshape(B, K, -1, S) > 0, axis=2).swapaxes(1, 2)[..., None]
    value = jnp.where(seen, value.astype(weights.dtype), 0)
    output = jnp.einsum("bkgts,bskd->btkgd", kept, value, precision=jax.lax.Precision.HIGHEST)
    return output.reshape(B, T, H, -1).astype(dtype)


def check_dropout(probability: float, rng: Any, names: tuple[str, str]) -> None:
    """Raise ValueError for a probability outside [0, 1) or a missing key, by the framework's `names` for the two."""
    is_allowed = False
    with contextlib.suppress(TypeError, ValueError):  # of what is no number
        is_allowed = bool(0.0 <= probability < 1.0)
    if not is_allowed:
        raise ValueError(f"{names[0]} is {probability}; allowed is 0 <= p < 1")
    if rng is None:
        raise ValueError(f"{names[0]} is {probability} and dropout is active, so {names[1]} must be a jax.random key")


def flat_batch(name: str, value: Array, shape: tuple[int, ...]) -> Array:
    """Merge the batch axes of what broadcasts to `shape`, [*batch, H, T, S], into one: length 1 where none of them varies."""
    value = broadcasting(name, value, shape)
    batch, rest = shape[:-3], value.shape[-3:]
    if all(size == 1 for size in value.shape[:-3]):
        return value.reshape(1, *rest)
    return jnp.broadcast_to(value, (*batch, *rest)).reshape(math.prod(batch), *rest)


def as_bool(mask: Array) -> Array:
    """Return a mask of 0 and 1 as booleans."""
    return mask if mask.dtype == np.bool_ else mask != 0
