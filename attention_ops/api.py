"""The front door: `attention`, `plan`, `use`, `record_plans`."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from attention_ops.derivatives import (
    OUTPUT_NAME,
    Derivatives,
    Subject,
    marked,
    own_promotion,
    refuse_forward_mode,
    with_named_residuals,
)
from attention_ops.device import DeviceProfile, JaxDevice, as_profile, describe, is_assumed
from attention_ops.errors import FallbackWarning, NoRouteError, UnknownOperationError
from attention_ops.metadata import BlockSizes, OperationMetadata, as_metadata
from attention_ops.operation import Declaration, OperationImpl
from attention_ops.planner import Chain, Plan, make_plan
from attention_ops.registry import OperationRegistry
from attention_ops.request import AttentionOptions, AttentionOutput, AttentionRequest, make_request
from attention_ops.sharding import elsewhere, is_local, over_context, run_sharded, sequence_devices
from attention_ops.varying import varying_axes

Impl = str | Sequence[str]
ENVIRONMENT = "ATTENTION_OPS_IMPL"
"""A name, or several with commas between, for every call that names none itself."""

_override: contextvars.ContextVar[tuple[str, ...] | None] = contextvars.ContextVar("attention_ops.use", default=None)
_records: contextvars.ContextVar[tuple[list[Plan], ...]] = contextvars.ContextVar("attention_ops.records", default=())


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    impl: Impl | None = None,
    metadata: OperationMetadata | None = None,
    **options: Unpack[AttentionOptions],
) -> AttentionOutput:
    """Scaled dot-product attention by the implementation of a name.

    The law (docs/numerics.md): logits are scaled, capped, biased, masked; the softmax runs in float32 or wider; a row with
    no allowed key gives 0.

    Args:
        query: [B, T, H, D].
        key: [B, S, K, D], where K divides H; query head h reads key/value head h // (H // K).
        value: [B, S, K, Dv].
        impl: an operation name, "auto" (the default), or a sequence of names to try in order.
        metadata: dtypes, block sizes, backend and fallback policy.
        **options: see `AttentionOptions`.

    Raises:
        TypeError, ValueError: the call itself is wrong. Raised before anything is planned.
        UnknownOperationError: no operation has that name.
        NoRouteError: no route can honour the request, or a fallback is needed and the policy is "error".

    Examples:
        >>> import jax.numpy as jnp
        >>> q = jnp.ones((1, 4, 2, 8))
        >>> attention(q, q, q, impl="vanilla", causal=True).attention_outputs.shape
        (1, 4, 2, 8)
    """
    metadata = as_metadata(metadata)
    if impl is not None:
        return _run(query, key, value, options, metadata, _names(impl), "the call")
    return dispatch(query, key, value, options, metadata, default=("auto",), source="default")


def dispatch(
    query: Any,
    key: Any,
    value: Any,
    options: Mapping[str, Any],
    metadata: OperationMetadata,
    *,
    default: tuple[str, ...],
    source: str,
) -> AttentionOutput:
    """Run a call whose name comes from outside it: `use`, then the environment, then `default`."""
    return _run(query, key, value, options, metadata, *_chosen(default, source))


def _chosen(default: tuple[str, ...], source: str) -> tuple[tuple[str, ...], str]:
    """Return the names to plan for and where they come from."""
    override = _override.get()
    if override is not None:
        return override, "attention_ops.use"
    environment = os.environ.get(ENVIRONMENT)
    return (_environment_names(environment), ENVIRONMENT) if environment else (default, source)


def _environment_names(value: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split(","))
    try:
        _known(names)
    except UnknownOperationError as error:
        raise UnknownOperationError(f"{ENVIRONMENT}={value}: {error}") from None
    return names


def plan(
    impl: Impl,
    query: Any,
    key: Any,
    value: Any,
    *,
    device: DeviceProfile | JaxDevice | str | None = None,
    metadata: OperationMetadata | None = None,
    **options: Unpack[AttentionOptions],
) -> Plan:
    """Return the plan of a call without running it.

    Arrays may be `jax.ShapeDtypeStruct`s, and `device` one that is not here: "a100", "tpu-v5e", or a `DeviceProfile`.
    """
    metadata = as_metadata(metadata)
    return _plan(query, key, value, options, metadata, device, _names(impl), "the call")


def plan_dispatch(
    query: Any,
    key: Any,
    value: Any,
    options: Mapping[str, Any],
    metadata: OperationMetadata,
    device: DeviceProfile | JaxDevice | str | None,
    *,
    default: tuple[str, ...],
    source: str,
) -> Plan:
    """Return the plan of what `dispatch` would run."""
    return _plan(query, key, value, options, metadata, device, *_chosen(default, source))


def _plan(
    query: Any,
    key: Any,
    value: Any,
    options: Mapping[str, Any],
    metadata: OperationMetadata,
    device: DeviceProfile | JaxDevice | str | None,
    names: tuple[str, ...],
    source: str,
) -> Plan:
    metadata, source = _for_here(metadata, source)
    request = make_request(query, key, value, options, metadata)
    profile = _device_of(request.query, metadata) if device is None else as_profile(device)
    return make_plan(names, request.spec, metadata, profile, source)


@contextlib.contextmanager
def use(impl: Impl) -> Iterator[None]:
    """Choose the implementation for calls made, or traced, inside. Wins over operation objects and configs; innermost wins.

    An unknown name is an error here. An explicit `attention(..., impl=...)` still decides for itself. A function that was
    compiled before keeps its plan.
    """
    names = _known(_names(impl))
    token = _override.set(names)
    try:
        yield
    finally:
        _override.reset(token)


@contextlib.contextmanager
def record_plans() -> Iterator[list[Plan]]:
    """Collect the plan of every call made, or traced, inside."""
    plans: list[Plan] = []
    token = _records.set((*_records.get(), plans))
    try:
        yield plans
    finally:
        _records.reset(token)


def _names(impl: Impl) -> tuple[str, ...]:
    names = (impl,) if isinstance(impl, str) else Chain(impl) if isinstance(impl, Sequence) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"impl is {impl!r}; allowed is an operation name or a non-empty sequence of names")
    return names


def _known(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        OperationRegistry.resolve(name)
    return names


def _device_of(query: Any, metadata: OperationMetadata) -> DeviceProfile:
    """Return where a call would run: on the device of `compiling_for`, else on the backend of the metadata, else where the query
    is, else on JAX's default device.
    """
    if is_assumed():
        return DeviceProfile.current()
    if metadata.backend not in (None, "native"):
        return DeviceProfile.current(metadata.backend)
    if isinstance(query, jax.Array) and not isinstance(query, Tracer):
        return describe(next(iter(query.devices())))
    return DeviceProfile.current()


def _run(
    query: Any,
    key: Any,
    value: Any,
    options: Mapping[str, Any],
    metadata: OperationMetadata,
    names: tuple[str, ...],
    source: str,
) -> AttentionOutput:
    metadata, source = _for_here(metadata, source)
    request = make_request(query, key, value, options, metadata)
    metadata = over_context(metadata, _is_traced(request))
    chosen = make_plan(names, request.spec, metadata, _device_of(request.query, metadata), source)
    for plans in _records.get():
        plans.append(chosen)
    if chosen.is_fallback:
        _report(chosen, metadata)
    executable = _executable(chosen.implementation, chosen.route, metadata, chosen.block_sizes, chosen.way)
    try:
        return _execute(_marked(request, executable), executable)
    except TypeError:
        _refuse_shapes(request)
        raise
    except ValueError as error:
        found = elsewhere(error, list(_given(request)), metadata.mesh)
        if found is None:
            raise
        raise found from error


def _refuse_shapes(request: AttentionRequest) -> None:
    for argument, leaf in _given(request):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"{argument} is a jax.ShapeDtypeStruct, which has no values; give arrays, or plan the call with "
                "attention_ops.plan, or trace it with jax.eval_shape"
            ) from None


def _given(request: AttentionRequest) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of a request, each with the name of the argument that a call gives it by."""
    for name, argument in {**_ARGUMENTS, "mask": "mask", "dropout_key": "dropout_rng"}.items():
        yield from ((argument, leaf) for leaf in jax.tree_util.tree_leaves(getattr(request, name)))


def _for_here(metadata: OperationMetadata, source: str) -> tuple[OperationMetadata, str]:
    """Return the metadata without the mesh inside a `jax.shard_map` over it: the arrays are one device's part already."""
    if metadata.mesh is None or not is_local(metadata.mesh):
        return metadata, source
    source = f"{source}, inside a shard_map over the mesh: the arrays are one device's part"
    return dataclasses.replace(metadata, mesh=None), source


def _marked(request: AttentionRequest, executable: _Executable) -> AttentionRequest:
    """Return the request, such that a derivative which the route has not is an error that says so."""
    if not _is_traced(request) or (subject := executable.subject(request.spec.dtype)).derivatives is Derivatives.ANY:
        return request
    arrays = {name: getattr(request, name) for name in _ARGUMENTS if getattr(request, name) is not None}
    refuse_forward_mode(arrays.values(), subject)
    return dataclasses.replace(request, **marked(arrays, subject))


_ARGUMENTS = {"query": "query", "key": "key", "value": "value", "bias": "bias", "sinks": "softmax_aux"}
"""The arrays of a request that may be differentiated, and what a call names them."""


def _is_traced(request: AttentionRequest) -> bool:
    return any(isinstance(getattr(request, name), Tracer) for name in _ARGUMENTS)


@dataclasses.dataclass(frozen=True)
class _Executable:
    """What decides, beside the request, the program that is compiled."""

    implementation: type[OperationImpl]
    route: str
    metadata: OperationMetadata
    way: str

    @property
    def method(self) -> str:
        return f"forward_{self.backend}"

    @property
    def backend(self) -> str:
        return self.route.rpartition("/")[2]

    @property
    def is_ring(self) -> bool:
        return self.way == "ring" and sequence_devices(self.metadata) > 1

    def subject(self, dtype: Any) -> Subject:
        """Return the route with its derivatives; those of a ring, which has a backward of its own, are gradients."""
        if self.is_ring:
            return Subject(f"{self.route} in a ring", Derivatives.GRADIENT)
        return Subject(self.route, self.declaration.derivatives_of(dtype))

    @property
    def declaration(self) -> Declaration:
        return self.implementation.routes[self.backend].declaration


@functools.lru_cache(maxsize=4096)
def _executable(
    implementation: type[OperationImpl], route: str, metadata: OperationMetadata, block_sizes: BlockSizes, way: str
) -> _Executable:
    """Return the same object for the same settings: JAX's look-up of the compiled program is fast by identity."""
    return _Executable(implementation, route, dataclasses.replace(metadata, block_sizes=block_sizes), way)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _execute(request: AttentionRequest, executable: _Executable) -> AttentionOutput:
    """Run a route. Inlined, so that inside an outer jit only the kernel's own operations remain."""
    spec = request.spec
    if 0 in (spec.B, spec.T, spec.S):
        return _empty(request)
    request = dataclasses.replace(
        request,
        query=request.query.astype(spec.dtype),
        key=request.key.astype(spec.dtype),
        value=request.value.astype(spec.dtype),
    )
    operation, mesh = executable.implementation(executable.metadata), executable.metadata.mesh
    if executable.declaration.interpretable and (axes := varying_axes(request)):
        raise ValueError(
            f"{executable.route} is a Pallas kernel, which does not say over which mesh axes its output varies, and the arrays "
            f"vary over {', '.join(sorted(axes))} in a jax.shard_map that checks it; pass check_vma=False to that"
        )
    subject = executable.subject(spec.dtype)
    is_plain = subject.derivatives is Derivatives.ANY

    def run(request: AttentionRequest) -> AttentionOutput:
        with _as_route(executable):
            output = getattr(operation, executable.method)(request)
        return _checked(output, request, executable.route)

    def run_on_mesh(request: AttentionRequest) -> AttentionOutput:
        on_one_device = run if is_plain or executable.is_ring else functools.partial(_with_names, run, subject)
        with _as_route(executable):
            return run_sharded(on_one_device, request, executable.metadata, executable.way)

    if is_plain:
        output = run(request) if mesh is None else run_on_mesh(request)
        return dataclasses.replace(output, attention_outputs=checkpoint_name(output.attention_outputs, OUTPUT_NAME))
    if mesh is not None and not executable.is_ring:
        return run_on_mesh(request)  # what is kept has its names on each device, where it is told from the inputs
    return _with_names(run if mesh is None else run_on_mesh, subject, request)


@contextlib.contextmanager
def _as_route(executable: _Executable) -> Iterator[None]:
    with jax.named_scope(f"attention_ops/{executable.route}"), own_promotion():
        yield


def _with_names(
    run: Callable[[AttentionRequest], AttentionOutput], subject: Subject, request: AttentionRequest
) -> AttentionOutput:
    """Run a route with a custom backward, with names on what that keeps."""
    spec = request.spec  # JAX keeps `run_parts`, which must hold no array

    def run_parts(inputs: tuple[Any, ...], others: tuple[Any, ...]) -> AttentionOutput:
        query, key, value, bias, sinks = inputs
        return run(AttentionRequest(query, key, value, others[0], bias, sinks, others[1], spec))

    inputs = tuple(getattr(request, name) for name in _ARGUMENTS)
    return with_named_residuals(run_parts, subject, inputs, (request.mask, request.dropout_key))


def _empty(request: AttentionRequest) -> AttentionOutput:
    s = request.spec
    return AttentionOutput(
        attention_outputs=jnp.zeros((s.B, s.T, s.H, s.Dv), s.dtype),
        attention_weights=jnp.zeros((s.B, s.H, s.T, s.S), s.softmax_dtype) if s.want_weights else None,
        logsumexp=jnp.full((s.B, s.T, s.H), -jnp.inf, s.softmax_dtype) if s.want_logsumexp else None,
    )


def _checked(output: Any, request: AttentionRequest, route: str) -> AttentionOutput:
    """Hold a route to its contract: shapes, dtype, and that what was asked for is there."""
    if not isinstance(output, AttentionOutput):
        if not hasattr(output, "dtype"):
            raise TypeError(f"{route} returned {type(output).__name__}; allowed are an AttentionOutput and the output array")
        output = AttentionOutput(output)
    s = request.spec
    contract = (
        ("attention_outputs", output.attention_outputs, (s.B, s.T, s.H, s.Dv), s.dtype, True),
        ("attention_weights", output.attention_weights, (s.B, s.H, s.T, s.S), s.softmax_dtype, s.want_weights),
        ("logsumexp", output.logsumexp, (s.B, s.T, s.H), s.softmax_dtype, s.want_logsumexp),
    )
    for name, array, shape, dtype, wanted in contract:
        if array is None and wanted:
            raise TypeError(f"{route} returned no {name}, which it declares")
        if array is not None and wanted and (array.shape != shape or array.dtype != dtype):
            raise TypeError(f"{route} returned {name} of {array.shape} {array.dtype}, expected {shape} {dtype}")
    return AttentionOutput(*(array if wanted else None for _, array, _, _, wanted in contract))  # type: ignore[arg-type]


_reported: dict[Any, None] = {}
_reported_lock = threading.Lock()
_REPORTED_AT_MOST = 4096


def _report(plan: Plan, metadata: OperationMetadata) -> None:
    """Raise, warn once, or stay silent about a fallback, as the metadata says."""
    if metadata.fallback == "silent":
        return
    message = f"{plan.requested[0]} cannot take this request on {plan.device}, {plan.route} runs instead:\n{plan.reasons}"
    if metadata.fallback == "error":
        raise NoRouteError(message.replace("runs instead", "could run, but the fallback policy is 'error'"), plan.decisions)
    key = (plan.requested, plan.route, plan.decisions)
    with _reported_lock:
        if key in _reported:
            return
        if len(_reported) >= _REPORTED_AT_MOST:
            _reported.pop(next(iter(_reported)))
        _reported[key] = None
    warnings.warn(message, FallbackWarning, stacklevel=_frames_of_this_package())


def _frames_of_this_package() -> int:
    """Return the stacklevel of the caller outside this package."""
    here, level, frame = os.path.dirname(__file__), 1, sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(here):
        level, frame = level + 1, frame.f_back
    return level
