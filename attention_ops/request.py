"""One call, made canonical: every option is checked and every default resolved here, and nowhere else."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float

from attention_ops import integers
from attention_ops.arrays import array_of
from attention_ops.errors import did_you_mean
from attention_ops.features import Feature
from attention_ops.masks import Causal, Dense, Lengths, Mask, Segments, Window, checked_mask_array, reshaped, simplify
from attention_ops.metadata import FLOATS, OperationMetadata

SMALLEST, LARGEST = 1e-30, 1e30
"""Limits of a scale or cap: between them float32 holds the products and quotients with logits."""
_LAYOUT = "the layout is query [B, T, H, D], key [B, S, K, D], value [B, S, K, Dv]"


class AttentionOptions(TypedDict, total=False):
    """The options of a call. Shapes: B batch, T query length, S key length, H query heads, K key/value heads.

    Attributes:
        mask: boolean [T, S] or broadcastable to [B, H, T, S], or a `masks.Mask`; True = may attend.
        mask_info: ejkernel's `MaskInfo`; its attention mask and segment ids are used.
        bias: floating, [T, S] or broadcastable to [B, H, T, S]; added to the logits after scale and cap. -inf blocks.
        causal: a query attends its own position and earlier ones. Default False.
        sliding_window: (left, right) keys before and after the query, itself not counted; an int is both; None is unlimited.
        query_offset: position of query row 0, an int, or an array [] or [B]. Default 0 if T == S, S - 1 if T == 1.
        q_segment_ids: integers [B, T]; equal ids attend, negative ones are padding.
        kv_segment_ids: integers [B, S]. Default: those of the query, if T == S.
        q_lengths: integers [B], the real query rows of each batch row.
        kv_lengths: integers [B], the real keys of each batch row. Either works alone.
        softmax_aux: sinks, [H], [H, n] or [1, n]: extra logits that join the softmax denominator only.
        softmax_scale: a number, at most 1e30 in size. Default D ** -0.5.
        logits_soft_cap: a number from 1e-30 to 1e30; logits become cap * tanh(logits / cap).
        dropout_prob: probability of zeroing an attention weight, 0 <= p < 1. Default 0.
        dropout_rng: a `jax.random` key, needed when dropout is active.
        deterministic: no dropout. Default True.
        return_weights: also return the softmax [B, H, T, S], before dropout.
        return_logsumexp: also return the logsumexp [B, T, H] of the allowed logits.
        differentiable: admit only routes with a backward. Default True.
    """

    mask: Any
    mask_info: Any
    bias: Any
    causal: bool
    sliding_window: int | tuple[int | None, int | None] | None
    query_offset: Any
    q_segment_ids: Any
    kv_segment_ids: Any
    q_lengths: Any
    kv_lengths: Any
    softmax_aux: Any
    softmax_scale: float | None
    logits_soft_cap: float | None
    dropout_prob: float
    dropout_rng: Any
    deterministic: bool
    return_weights: bool
    return_logsumexp: bool
    differentiable: bool


DEFAULTS: dict[str, Any] = dict.fromkeys(AttentionOptions.__annotations__)
DEFAULTS.update(
    causal=False,
    dropout_prob=0.0,
    deterministic=True,
    return_weights=False,
    return_logsumexp=False,
    differentiable=True,
)
_FLAGS = tuple(name for name, value in DEFAULTS.items() if isinstance(value, bool))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionOutput:
    """What a call returns.

    Attributes:
        attention_outputs: [B, T, H, Dv] in the runtime dtype.
        attention_weights: the softmax [B, H, T, S] before dropout in the softmax dtype, if `return_weights`.
        logsumexp: of the allowed logits, sinks not included, [B, T, H] in the softmax dtype, if `return_logsumexp`;
            -inf for a row with no allowed key.
    """

    attention_outputs: Float[Array, "B T H Dv"]
    attention_weights: Float[Array, "B H T S"] | None = None
    logsumexp: Float[Array, "B T H"] | None = None


class Dropout(NamedTuple):
    """Active dropout: each weight is zeroed with `probability`, the others are divided by 1 - probability."""

    probability: float
    key: Array


@dataclasses.dataclass(frozen=True)
class RequestSpec:
    """The static facts of a request: all that planning looks at. Hashable, and the same for arrays and their shapes."""

    B: int
    T: int
    S: int
    H: int
    K: int
    D: int
    Dv: int
    dtype: np.dtype
    softmax_dtype: np.dtype
    features: frozenset[Feature]
    mask: Mask | None
    bias_shape: tuple[int, int, int, int] | None
    bias_dtype: np.dtype | None
    sinks: int
    scale: float
    soft_cap: float | None
    dropout: float
    want_weights: bool
    want_logsumexp: bool

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, name) for name in _SPEC_FIELDS))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:  # hashes of texts and of features differ between processes
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @property
    def groups(self) -> int:
        """Query heads per key/value head."""
        return self.H // self.K

    @property
    def differentiable(self) -> bool:
        return Feature.GRADIENT in self.features

    def visible_fraction(self) -> float:
        """Return the share of T * S in tiles that the host cannot prove empty."""
        return 1.0 if self.mask is None else _visible_fraction(self.mask, self.T, self.S)


_SPEC_FIELDS = tuple(field.name for field in dataclasses.fields(RequestSpec))


@functools.lru_cache(maxsize=1024)
def _visible_fraction(mask: Mask, T: int, S: int) -> float:
    return mask.visible_fraction(T, S)


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionRequest:
    """One call as a forward receives it: nothing optional is left open. A pytree whose leaves are the arrays.

    `mask` is None when every query may attend every key; `bias` is [b, h, t, s] with 1 where it broadcasts; `sinks` is
    [H, n]. `spec` has the static facts, and the properties read them.
    """

    query: Float[Array, "B T H D"]
    key: Float[Array, "B S K D"]
    value: Float[Array, "B S K Dv"]
    mask: Mask | None
    bias: Float[Array, "b h t s"] | None
    sinks: Float[Array, "H n"] | None
    dropout_key: Array | None
    spec: RequestSpec

    @property
    def scale(self) -> float:
        return self.spec.scale

    @property
    def soft_cap(self) -> float | None:
        return self.spec.soft_cap

    @property
    def want_weights(self) -> bool:
        return self.spec.want_weights

    @property
    def want_logsumexp(self) -> bool:
        return self.spec.want_logsumexp

    @property
    def dropout(self) -> Dropout | None:
        return None if self.dropout_key is None else Dropout(self.spec.dropout, self.dropout_key)


jax.tree_util.register_pytree_node(
    AttentionRequest,
    lambda r: ((r.query, r.key, r.value, r.mask, r.bias, r.sinks, r.dropout_key), r.spec),
    lambda spec, leaves: AttentionRequest(*leaves, spec),
)


def make_request(query: Any, key: Any, value: Any, options: Mapping[str, Any], metadata: OperationMetadata) -> AttentionRequest:
    """Check a call and make it canonical. Accepts arrays or `jax.ShapeDtypeStruct`s.

    Raises:
        TypeError: an unknown option, a dtype that is not allowed, mixed dtypes without a runtime_dtype.
        ValueError: shapes that do not fit each other, an option out of its range, a causal call that needs a query_offset.
    """
    given = _known_options(options)
    query, key, value = (_state(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    sizes = _sizes(tuple(query.shape), tuple(key.shape), tuple(value.shape))
    x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    dtype = _runtime_dtype(query.dtype, key.dtype, value.dtype, metadata.runtime_dtype, x64)
    softmax_dtype = metadata.softmax_dtype or np.promote_types(dtype, np.float32)
    B, T, S, H, _, _, _ = sizes
    mask = _mask(given, B, T, S, H)
    bias = _bias(given["bias"], B, H, T, S, softmax_dtype)
    sinks = _sinks(given["softmax_aux"], H, softmax_dtype)
    probability, dropout_key = _dropout(given)
    spec = _spec(
        sizes,
        dtype,
        softmax_dtype,
        None if mask is None else mask.abstract(),
        None if bias is None else (tuple(bias.shape), bias.dtype),
        0 if sinks is None else sinks.shape[1],
        _number("softmax_scale", given["softmax_scale"]),
        _number("logits_soft_cap", given["logits_soft_cap"]),
        probability,
        *(bool(given[name]) for name in ("return_weights", "return_logsumexp", "differentiable")),
    )
    return AttentionRequest(query, key, value, mask, bias, sinks, dropout_key, spec)


@functools.lru_cache(maxsize=4096)
def _spec(
    sizes: tuple[int, int, int, int, int, int, int],
    dtype: np.dtype,
    softmax_dtype: np.dtype,
    mask: Mask | None,
    bias: tuple[tuple[int, int, int, int], Any] | None,
    sinks: int,
    scale: float | None,
    soft_cap: float | None,
    dropout: float,
    want_weights: bool,
    want_logsumexp: bool,
    differentiable: bool,
) -> RequestSpec:
    """Return the static facts; cached, so that a repeated call finds its plan by identity."""
    _, _, _, H, K, D, Dv = sizes
    if softmax_dtype.itemsize < dtype.itemsize:
        raise ValueError(
            f"softmax_dtype {softmax_dtype} is narrower than the runtime dtype {dtype}; leave it None or use {dtype}"
        )
    if soft_cap is not None and not SMALLEST <= soft_cap <= LARGEST:
        allowed = f"a number from {SMALLEST:g} to {LARGEST:g}, or None for no cap"
        raise ValueError(f"logits_soft_cap is {soft_cap}; allowed is {allowed}")
    if scale is not None and not abs(scale) <= LARGEST:
        allowed = f"a number from {-LARGEST:g} to {LARGEST:g}, or None for D ** -0.5 = {D**-0.5:.6g}"
        raise ValueError(f"softmax_scale is {scale}; allowed is {allowed}")
    needs = {
        Feature.BIAS: bias is not None,
        Feature.BIAS_GRADIENT: bias is not None and differentiable,
        Feature.SINKS: sinks > 0,
        Feature.SOFT_CAP: soft_cap is not None,
        Feature.GQA: K < H,
        Feature.VALUE_DIM: Dv != D,
        Feature.DROPOUT: dropout > 0,
        Feature.WEIGHTS: want_weights,
        Feature.LOGSUMEXP: want_logsumexp,
        Feature.GRADIENT: differentiable,
    }
    features = frozenset(feature for feature, needed in needs.items() if needed)
    return RequestSpec(
        *sizes,
        dtype=dtype,
        softmax_dtype=softmax_dtype,
        features=features if mask is None else features | mask.features(),
        mask=mask,
        bias_shape=None if bias is None else bias[0],
        bias_dtype=None if bias is None else np.dtype(bias[1]),
        sinks=sinks,
        scale=D**-0.5 if scale is None else scale,
        soft_cap=soft_cap,
        dropout=dropout,
        want_weights=want_weights,
        want_logsumexp=want_logsumexp,
    )


def _known_options(options: Mapping[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in DEFAULTS:
            raise TypeError(
                f"unknown attention option {name!r}.{did_you_mean(name, DEFAULTS)} Options: {', '.join(sorted(DEFAULTS))}"
            )
    given = {**DEFAULTS, **options}
    for name in _FLAGS:
        if not isinstance(given[name], bool | np.bool_):
            raise TypeError(f"{name} must be True or False, found {type(given[name]).__name__}; it decides what is compiled")
    return given


def _state(name: str, value: Any) -> Any:
    value = array_of(name, value, f"; {_LAYOUT}")
    return jnp.asarray(value) if isinstance(value, np.ndarray) else value


@functools.lru_cache(maxsize=4096)
def _sizes(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> tuple[int, int, int, int, int, int, int]:
    """Return (B, T, S, H, K, D, Dv) of three shapes that fit each other."""
    shapes = f"query {query}, key {key}, value {value}"
    for name, shape in (("query", query), ("key", key), ("value", value)):
        if len(shape) != 4:
            raise ValueError(f"{name} has {len(shape)} dimensions, allowed are 4; found {shapes}; {_LAYOUT}")
        for axis, size in zip(("length", "number of heads", "head dim"), shape[1:], strict=True):
            if is_symbolic_dim(size):
                raise TypeError(
                    f"{name} has the symbolic {axis} {size}; of {name} {shape} only the batch size may be symbolic: "
                    f"export once for each {axis}"
                )
    B, T, H, D = query
    _, S, K, _ = key
    Dv = value[3]
    hint = "; for arrays in [batch, heads, length, dim] pass x.swapaxes(1, 2)" if T == S else ""
    checks = [
        (key[0] == value[0] == B, "batch sizes differ"),
        (value[1] == S, f"key length {S} and value length {value[1]} differ"),
        (value[2] == K, f"key heads {K} and value heads {value[2]} differ"),
        (key[3] == D, f"query head dim {D} and key head dim {key[3]} differ"),
        (H > 0 and K > 0 and D > 0 and Dv > 0, "there must be at least one head and one head dim"),
        (K > 0 and H % K == 0, f"query heads {H} are not a multiple of key/value heads {K}"),
    ]
    for holds, problem in checks:
        if not holds:
            raise ValueError(f"{problem}: found {shapes}; {_LAYOUT}, and K divides H{hint}")
    return B, T, S, H, K, D, Dv


@functools.lru_cache(maxsize=256)
def _runtime_dtype(query: Any, key: Any, value: Any, runtime_dtype: np.dtype | None, x64: bool) -> np.dtype:
    """Return the dtype that a call computes in. `x64` is there for the cache: without it JAX takes float64 for float32."""
    dtypes = [np.dtype(jax.dtypes.canonicalize_dtype(dtype)) for dtype in (query, key, value)]
    if runtime_dtype is not None:
        for name, dtype in zip(("query", "key", "value"), dtypes, strict=True):
            if not jnp.issubdtype(dtype, jnp.floating):
                raise TypeError(f"{name} has dtype {dtype}; allowed are floating dtypes, which runtime_dtype then casts")
        return runtime_dtype
    if len(set(dtypes)) > 1:
        raise TypeError(
            f"the dtypes differ: query {dtypes[0]}, key {dtypes[1]}, value {dtypes[2]}; cast them to one, "
            "or set runtime_dtype in the OperationMetadata"
        )
    if dtypes[0] not in FLOATS:
        raise TypeError(
            f"query, key and value have dtype {dtypes[0]}; allowed are {', '.join(map(str, FLOATS))}; "
            "for another floating dtype set runtime_dtype in the OperationMetadata"
        )
    return dtypes[0]


_MASKS = ("mask", "mask_info", "q_segment_ids", "kv_segment_ids", "q_lengths", "kv_lengths")


def _mask(given: dict[str, Any], B: int, T: int, S: int, H: int) -> Mask | None:
    offset, window = _offset(given["query_offset"]), _window(given["sliding_window"])
    parts = _data_masks(given, T, S) if any(given[name] is not None for name in _MASKS) else []
    if not parts and not isinstance(offset, jax.Array | jax.ShapeDtypeStruct):
        return _position_mask(given["causal"], window, offset, T, S)
    parts = [*_positions(given["causal"], window), *parts]
    return _fitted(functools.reduce(operator.and_, parts), offset, B, H, T, S) if parts else None


@functools.lru_cache(maxsize=4096)
def _position_mask(causal: bool, window: Window | None, offset: int | None, T: int, S: int) -> Mask | None:
    """Return the mask of a call that has only positions, all of them static."""
    parts = _positions(causal, window)
    return _fitted(functools.reduce(operator.and_, parts), offset, 1, 1, T, S) if parts else None


def _positions(causal: bool, window: Window | None) -> list[Mask]:
    return [*([Causal()] if causal else []), *([] if window is None else [window])]


def _fitted(mask: Mask, offset: Any, B: int, H: int, T: int, S: int) -> Mask | None:
    """Give positions their offset, check the shapes, drop what hides nothing."""
    if mask.needs_offset:
        mask = mask.resolve(default_offset(T, S) if offset is None else offset)
    mask.check(B, H, T, S)
    return simplify(mask, T, S)


def _data_masks(given: dict[str, Any], T: int, S: int) -> list[Mask]:
    parts = _segments(given["q_segment_ids"], given["kv_segment_ids"], T, S)
    if given["q_lengths"] is not None or given["kv_lengths"] is not None:
        parts.append(Lengths(_integers("q_lengths", given["q_lengths"]), _integers("kv_lengths", given["kv_lengths"])))
    if given["mask"] is not None:
        parts.append(as_mask(given["mask"]))
    if given["mask_info"] is not None:
        parts += _mask_info(given["mask_info"], T, S)
    return parts


def _window(window: Any) -> Window | None:
    if window is None:
        return None
    sides = tuple(window) if isinstance(window, tuple | list) else (window, window)
    if len(sides) != 2:
        raise ValueError(f"sliding_window has {len(sides)} numbers; allowed is (left, right) or one int for both")
    # Only those are looked up in a cache that are told apart there: True and 1.0 are equal to 1.
    make = _window_of if all(side is None or type(side) is int for side in sides) else Window
    return make(*sides)


_window_of = functools.lru_cache(maxsize=1024)(Window)


def as_mask(mask: Any) -> Mask:
    """Return the mask that a call's `mask=` stands for: an array is run-time data."""
    if isinstance(mask, Mask):
        return mask
    mask = checked_mask_array(mask)
    return Dense(mask if isinstance(mask, jax.ShapeDtypeStruct) else jnp.asarray(mask))


def _segments(q: Any, kv: Any, T: int, S: int) -> list[Mask]:
    if q is None and kv is None:
        return []
    if q is None or (kv is None and T != S):
        missing, have = ("q_segment_ids", "kv_segment_ids") if q is None else ("kv_segment_ids", "q_segment_ids")
        raise ValueError(
            f"{have} is given without {missing}: query length {T}, key length {S}; pass both "
            "(for padding keys alone use kv_lengths)"
        )
    q = _integers("q_segment_ids", q, rank=2)
    return [Segments(q, q if kv is None else _integers("kv_segment_ids", kv, rank=2))]


def _integers(name: str, value: Any, rank: int = 1) -> Any:
    """Return an integer array of `rank`, or None; one that lacks the batch axis gets it."""
    if value is None:
        return None
    value = array_of(name, value)  # one of numpy stays that: JAX would truncate what int32 cannot hold
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, found {value.dtype}; cast with .astype('int32')")
    if value.ndim == rank - 1:
        return reshaped(value, (1, *value.shape))
    if value.ndim != rank:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; allowed is {'[B]' if rank == 1 else '[B, length]'}")
    return value


def _mask_info(info: Any, T: int, S: int) -> list[Mask]:
    """Read ejkernel's MaskInfo. Its mask may be 0/1 integers; its ids follow our rule, -1 is padding."""
    names = ("_attention_mask", "_q_segment_ids", "_kv_segment_ids")
    if not all(hasattr(info, name) for name in names):
        raise TypeError(f"mask_info must be an ejkernel.types.MaskInfo, found {type(info).__name__}; pass arrays as mask=")
    array, q, kv = (getattr(info, name) for name in names)
    parts = _segments(q, kv, T, S)
    if array is not None:
        shape = (array.shape[0], 1, *array.shape[1:]) if array.ndim == 3 else array.shape
        if isinstance(array, jax.ShapeDtypeStruct):
            parts.append(Dense(jax.ShapeDtypeStruct(shape, np.bool_)))
        else:
            parts.append(Dense((array if array.dtype == np.bool_ else array != 0).reshape(shape)))
    if not parts:
        raise ValueError("mask_info holds neither an attention mask nor segment ids; build it with one of them")
    return parts


def _offset(offset: Any) -> Any:
    if offset is None:
        return None
    return integers.data(integers.position("query_offset", offset))


def default_offset(T: int, S: int) -> int:
    """Return the position of query row 0 when the call states none; ValueError where there is no one answer."""
    if T == S:
        return 0
    if T == 1:
        return S - 1
    raise ValueError(
        f"query length {T} and key length {S} differ, so a causal or windowed call must state query_offset, the position of "
        f"query row 0: 0 aligns top-left (jax.nn, PyTorch), {S - T} bottom-right (FlashAttention)"
    )


def _bias(bias: Any, B: int, H: int, T: int, S: int, dtype: np.dtype) -> Any:
    if bias is None:
        return None
    bias = array_of("bias", bias)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"bias must be floating, found {bias.dtype}; a boolean mask goes into mask=")
    bias = _within(dtype, bias)
    shape = tuple(bias.shape)
    if bias.ndim == 2:
        bias = reshaped(bias, (1, 1, *shape))
    elif bias.ndim != 4:
        why = ": three dimensions are ambiguous, use bias[:, None] or bias[None]" if bias.ndim == 3 else ""
        raise ValueError(f"bias has shape {shape}{why}; allowed are [T, S] and [B, H, T, S]")
    for name, found, want in zip(("batch", "heads", "query length", "key length"), bias.shape, (B, H, T, S), strict=True):
        if found not in (1, want):
            raise ValueError(
                f"bias has shape {shape}, which does not broadcast to [B, H, T, S] = {(B, H, T, S)}: its {name} is {found}, "
                f"allowed are 1 and {want}"
            )
    return bias


def _within(dtype: np.dtype, x: Any) -> Any:
    """Return a bias or sinks of a wider dtype in that in which they are added: its largest number for what it cannot hold."""
    if x.dtype.itemsize > dtype.itemsize:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, dtype)
        return _cast_within(x, dtype) if isinstance(x, jax.Array) else jnp.asarray(_clipped(x, dtype, np))
    return x if isinstance(x, jax.Array | jax.ShapeDtypeStruct) else jnp.asarray(x)


def _clipped(x: Any, dtype: np.dtype, xp: Any) -> Any:
    largest = float(jnp.finfo(dtype).max)
    return xp.where(xp.isinf(x), x, xp.clip(x, -largest, largest)).astype(dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _cast_within(x: Array, dtype: np.dtype) -> Array:
    return _clipped(x, dtype, jnp)


@_cast_within.defjvp
def _(dtype: np.dtype, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """The derivative of a cast, also of what was clipped."""
    return _cast_within(*primals, dtype), tangents[0].astype(dtype)


def _sinks(sinks: Any, H: int, dtype: np.dtype) -> Any:
    if sinks is None:
        return None
    sinks = array_of("softmax_aux", sinks)
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise TypeError(f"softmax_aux must be floating, found {sinks.dtype}; cast with .astype('float32')")
    sinks = _within(dtype, sinks)
    shape = tuple(sinks.shape)
    n = shape[-1] if len(shape) == 2 else 1
    if n == 0 or not (shape == (H,) or (len(shape) == 2 and shape[0] in (1, H))):
        raise ValueError(f"softmax_aux has shape {shape}; allowed are [H] = [{H}], [H, n] = [{H}, n] and [1, n]")
    if isinstance(sinks, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((H, n), sinks.dtype)
    return jnp.broadcast_to(sinks[:, None] if sinks.ndim == 1 else sinks, (H, n))


def _dropout(given: dict[str, Any]) -> tuple[float, Any]:
    """Return (0.0, None) unless dropout is active, so that inactive dropout changes nothing."""
    probability = _number("dropout_prob", given["dropout_prob"]) or 0.0
    if not 0.0 <= probability < 1.0:
        raise ValueError(f"dropout_prob is {probability}; allowed is 0 <= p < 1")
    if given["deterministic"] or probability == 0.0:
        return 0.0, None
    if given["dropout_rng"] is None:
        raise ValueError(f"dropout_prob is {probability} with deterministic=False, so dropout_rng must be a jax.random key")
    return probability, _random_key(given["dropout_rng"])


def _random_key(key: Any) -> Any:
    dtype, shape = getattr(key, "dtype", None), tuple(getattr(key, "shape", ()))
    is_new = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
    implementation = jax.config.jax_default_prng_impl  # type: ignore[attr-defined]
    if not is_new and not (dtype == np.uint32 and shape == _raw_key_shape(implementation)):
        found = type(key).__name__ if dtype is None else f"{dtype}{list(shape)}"
        raise TypeError(f"dropout_rng must be one jax.random key, found {found}; make it with jax.random.key(seed)")
    return key


@functools.lru_cache(maxsize=8)
def _raw_key_shape(implementation: str) -> tuple[int, ...]:
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=implementation))).shape


def _number(name: str, value: Any) -> float | None:
    if value is None or type(value) is float:
        return value
    if isinstance(value, Tracer):
        fix = "multiply the query by it instead" if name == "softmax_scale" else "name it in static_argnames of jax.jit"
        raise TypeError(f"{name} is traced, but must be a number known while compiling; {fix}")
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, bool | str | bytes) and np.ndim(value) == 0:
            return float(value)
    raise TypeError(f"{name} must be a number that a float can hold, found {value!r:.60} ({type(value).__name__})")
