"""Keras 3 on its JAX backend: `dot_product_attention` with Keras' signature, and `use_attention_ops` for whole models.

with use_attention_ops("blocksparse"):
    model.fit(...)          # MultiHeadAttention, GroupedQueryAttention and keras.ops.dot_product_attention run it
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import Any, Self

import jax.numpy as jnp
from jaxtyping import Array, Float

from attention_ops import api
from attention_ops.errors import NoRouteError
from attention_ops.integrations.binding import array, as_bool, broadcasting, named, renamed, states, with_scale
from attention_ops.metadata import OperationMetadata, as_metadata

FLASH = ("cudnn_flash", "flash", "blocksparse")
"""What `flash_attention=True` requires: operations whose memory does not grow with T * S."""

DENSE = ("sdpa", "vanilla")
"""What `flash_attention=False` asks for: operations that keep all logits in memory."""

_NAMES = {"softmax_scale": "scale", "causal": "is_causal", "logits_soft_cap": "attn_logits_soft_cap"}
"""Options here, and what Keras calls them."""

_SOURCE = "attention_ops.integrations.keras"


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
) -> Float[Array, "B T N H"]:
    """Attention with the arguments of `keras.ops.dot_product_attention`. See docs/from_keras.md for where answers differ.

    Args:
        query: [B, T, N, H].
        key, value: [B, S, K, H], where K divides N. The value may have a head dim of its own.
        bias: floating, broadcastable to [B, N, T, S]; cast to the common dtype of query, key and value.
        mask: booleans or 0/1 integers, [B, T, S], [T, S] or broadcastable to [B, N, T, S].
        scale: default H ** -0.5.
        is_causal: row i attends columns 0 to i, also where T and S differ (top-left).
        flash_attention: True requires one of `FLASH`, False one of `DENSE`; None takes what `use_attention_ops`,
            `attention_ops.use` or the environment names, "auto" by default.
        attn_logits_soft_cap: logits become cap * tanh(logits / cap).

    Raises:
        RuntimeError: Keras runs on another backend than JAX.
        NoRouteError: flash_attention=True and no operation of `FLASH` can take the call; every reason is given.
    """
    _require_jax(_keras())
    options = {"bias": bias, "mask": mask, "scale": scale, "is_causal": is_causal, "soft_cap": attn_logits_soft_cap}
    return _attend(query, key, value, options, flash_attention, None, OperationMetadata())


class use_attention_ops:
    """Run Keras' attention through the registry, from this call on: in a `with` block, or until `restore()`.

    It takes the place of the function behind `keras.ops.dot_product_attention`, in every thread of the process. The last one
    made that has not been restored decides. What Keras has compiled before keeps the attention it was compiled with: call
    `model.compile(...)` again, or `model.make_train_function(force=True)`.

    Args:
        implementation: an operation's name or a sequence of names, for calls with flash_attention=None. None is "auto".
            `attention_ops.use` and the environment win over it.
        metadata: dtypes, block sizes, backend and fallback policy.

    Raises:
        RuntimeError: Keras runs on another backend than JAX.
        UnknownOperationError: a name is not registered.
    """

    def __init__(self, implementation: str | Sequence[str] | None = None, *, metadata: OperationMetadata | None = None):
        self.names = None if implementation is None else named(implementation)
        self.metadata = as_metadata(metadata)
        _install(self)

    def restore(self) -> None:
        """End this routing; the one made before it, or Keras' own attention, is back. A second call does nothing."""
        _remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.restore()


# ---------------------------------------------------------------- the place in Keras


_lock = threading.RLock()
_active: list[use_attention_ops] = []
_original: Any = None


def _backend_module() -> ModuleType:
    """Return the module in which Keras looks its attention up at every call."""
    keras = _keras()
    _require_jax(keras)
    module = importlib.import_module("keras.src.backend.jax.nn")
    if not hasattr(module, "dot_product_attention"):
        raise RuntimeError(
            f"Keras {keras.__version__} has no keras.src.backend.jax.nn.dot_product_attention to replace; "
            "pip install 'attention-ops[keras]' installs one that has"
        )
    return module


def _install(routing: use_attention_ops) -> None:
    global _original
    module = _backend_module()
    with _lock:
        if module.dot_product_attention is not _routed:
            _original = module.dot_product_attention
            module.__dict__["dot_product_attention"] = _routed
        _active.append(routing)


def _remove(routing: use_attention_ops) -> None:
    with _lock:
        if routing not in _active:
            return
        _active.remove(routing)
        module = _backend_module()
        if not _active and module.dot_product_attention is _routed:
            module.__dict__["dot_product_attention"] = _original


def _routed(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
) -> Array:
    """Stand in for `keras.src.backend.jax.nn.dot_product_attention`."""
    with _lock:
        routing = _active[-1] if _active else None
    if routing is None:  # someone else wrapped this function and kept it
        return _original(query, key, value, bias, mask, scale, is_causal, flash_attention, attn_logits_soft_cap)
    options = {"bias": bias, "mask": mask, "scale": scale, "is_causal": is_causal, "soft_cap": attn_logits_soft_cap}
    return _attend(query, key, value, options, flash_attention, routing.names, routing.metadata)


def _keras() -> ModuleType:
    if importlib.util.find_spec("keras") is None:
        raise ModuleNotFoundError("Keras is not installed; pip install 'attention-ops[keras]'")
    try:
        return importlib.import_module("keras")  # not this file: imports are absolute
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"Keras cannot be imported: {error}. Set the environment variable KERAS_BACKEND=jax before Keras is first imported"
        ) from error


def _require_jax(keras: ModuleType) -> None:
    found = keras.config.backend()
    if found != "jax":
        raise RuntimeError(
            f"Keras runs on its {found} backend, and these operations take JAX arrays; set the environment variable "
            "KERAS_BACKEND=jax before Keras is first imported"
        )


# ---------------------------------------------------------------- one call


def _attend(
    query: Any,
    key: Any,
    value: Any,
    options: dict[str, Any],
    flash_attention: bool | None,
    names: tuple[str, ...] | None,
    metadata: OperationMetadata,
) -> Array:
    query, key, value, dtype = _common_dtype(query, key, value)
    query, scale = with_scale(query, options["scale"])
    bias, mask = options["bias"], options["mask"]
    B, T, N, _ = query.shape
    canonical = {
        "bias": None if bias is None else array("bias", bias).astype(dtype),
        "mask": None if mask is None else _mask(array("mask", mask), (B, N, T, key.shape[1])),
        "softmax_scale": scale,
        "causal": options["is_causal"],
        "query_offset": 0,
        "logits_soft_cap": options["soft_cap"],
    }
    call = (query, key, value)
    with renamed(_NAMES):
        if flash_attention is None:
            chosen = ("auto",) if names is None else names
            source = "default" if names is None else f"{_SOURCE}.use_attention_ops"
            return api.dispatch(*call, canonical, metadata, default=chosen, source=source).attention_outputs
        chain = _chain(names or (), bool(flash_attention))
        try:
            return api.attention(*call, impl=chain, metadata=metadata, **canonical).attention_outputs  # type: ignore[arg-type]
        except NoRouteError as error:
            raise NoRouteError(f"flash_attention={flash_attention} leaves {' > '.join(chain)}, and {error}") from None


def _chain(names: tuple[str, ...], flash_attention: bool) -> tuple[str, ...]:
    """Return the operations that the flag admits, those that were named first.

    True admits every operation but `DENSE` (and "auto", which may choose one); False only `DENSE`.
    """
    from attention_ops.registry import OperationRegistry

    def admitted(name: str) -> bool:
        operation, _ = OperationRegistry.resolve(name)
        return bool(operation.routes) and (operation.name in DENSE) is not flash_attention

    return tuple(dict.fromkeys([*filter(admitted, names), *(FLASH if flash_attention else DENSE)]))


def _common_dtype(query: Any, key: Any, value: Any) -> tuple[Array, Array, Array, Any]:
    """Cast to the dtype that Keras computes in: its own promotion, not JAX's."""
    keras = _keras()
    for name, given in (("query", query), ("key", key), ("value", value)):
        if isinstance(given, keras.KerasTensor):
            raise TypeError(
                f"{name} is a symbolic KerasTensor; to build a functional model call keras.ops.dot_product_attention, which "
                "use_attention_ops() routes here"
            )
    query, key, value = states("query", query), states("key", key), states("value", value)
    dtype = jnp.dtype(keras.backend.result_type(query.dtype, key.dtype, value.dtype))
    return query.astype(dtype), key.astype(dtype), value.astype(dtype), dtype


def _mask(mask: Array, shape: tuple[int, int, int, int]) -> Array:
    """Return the mask in four dimensions: [B, T, S] as Keras' layers have it, fewer as numpy broadcasts them."""
    if jnp.issubdtype(mask.dtype, jnp.floating):
        raise TypeError(
            f"mask has dtype {mask.dtype}; allowed are booleans and 0/1 integers: what is added to the logits is bias="
        )
    mask = as_bool(mask)
    if mask.ndim == 3:
        B, _, T, S = shape
        return broadcasting("mask", mask, (B, T, S), "[batch, query length, key length]")[:, None]
    return broadcasting("mask", mask, shape)
