"""How a forward may be differentiated, an error that says so where it may not, and names for what a backward needs.

JAX finds out late, and in its own words, that a function with a custom backward has no other derivative: when a linearised
program is compiled, after everything was traced. Here a marker goes through the program beside the arrays, an identity that
leaves nothing in what is compiled. Its rules of differentiation know the route and raise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters.partial_eval import DynamicJaxprTracer

from attention_ops.errors import DerivativeError
from attention_ops.varying import varying_like

OUTPUT_NAME = "attention_output"
"""The name, for the policies of `jax.checkpoint`, of every attention output."""
RESIDUALS_NAME = "attention_residuals"
"""The name of what a custom backward needs beside its inputs and the output: of ours, the statistics of each row."""


class Derivatives(enum.Enum):
    """Which derivatives a forward that declares `Feature.GRADIENT` has. The value is the phrase used in docs."""

    GRADIENT = "gradients (grad, vjp, jacrev), once"
    HESSIAN = "gradients, and forward mode over them (hessian, jvp of grad)"
    ANY = "gradients and forward mode (jvp, jacfwd, linearize), in any order and number"


@dataclasses.dataclass(frozen=True)
class Subject:
    """Whose derivatives they are: a route by its name."""

    route: str
    derivatives: Derivatives

    def no_forward_mode(self) -> DerivativeError:
        return self._error("no forward-mode derivative (jvp, jacfwd, linearize)", "take gradients (grad, vjp, jacrev)")

    def no_second(self) -> DerivativeError:
        return self._error("no second derivative")

    def no_reverse_over_reverse(self) -> DerivativeError:
        forward_over_reverse = "take it forward over reverse (hessian, jvp of grad)"
        return self._error("no reverse-mode derivative of its gradient", forward_over_reverse)

    def _error(self, what: str, instead: str = "") -> DerivativeError:
        instead = f"{instead}, or " if instead else ""
        return DerivativeError(f'{self.route} has {what}; {instead}use impl="vanilla", which has every derivative')


# ---------------------------------------------------------------- the marker


class _Stage(enum.Enum):
    """What the marker stands on. FORWARD is the inputs of a forward whose backward follows: moving them is the second time."""

    INPUT = enum.auto()
    FORWARD = enum.auto()
    TANGENT = enum.auto()
    GRADIENT = enum.auto()
    TANGENT_OF_GRADIENT = enum.auto()


_marker = Primitive("attention_ops_marker")
_marker.multiple_results = True


def _mark(arrays: Iterable[Any], stage: _Stage, subject: Subject, beside: Iterable[Any] = ()) -> list[Any]:
    """Bind the marker: it returns `arrays`, and `beside` only tells whether what they depend on is differentiated."""
    arrays = list(arrays)
    return _marker.bind(*arrays, *beside, count=len(arrays), stage=stage, subject=subject)


def marked(arrays: Mapping[str, Any], subject: Subject) -> dict[str, Any]:
    """Return the arrays, such that differentiating what is computed from them in a way that the subject has not is an error."""
    return dict(zip(arrays, _mark(arrays.values(), _Stage.INPUT, subject), strict=True))


def _evaluated(*arrays: Any, count: int, stage: _Stage, subject: Subject) -> list[Any]:
    if stage is _Stage.TANGENT:  # in reverse mode it is transposed, and neither evaluated nor batched
        raise subject.no_forward_mode()
    return list(arrays[:count])


def _jvp(primals: Any, tangents: Any, *, count: int, stage: _Stage, subject: Subject) -> tuple[list[Any], list[Any]]:
    if stage is _Stage.TANGENT:
        raise subject.no_forward_mode()
    is_second = stage in (_Stage.FORWARD, _Stage.GRADIENT) or any(hasattr(_unbatched(array), "tangent") for array in primals)
    if is_second and subject.derivatives is Derivatives.GRADIENT:
        raise subject.no_second()
    moving = [x for x in tangents[:count] if not isinstance(x, ad.Zero)]
    if stage is _Stage.INPUT:
        # The inputs are handed on as they are: as residuals they are then known to be inputs, and not kept twice.
        found, moved = list(primals), _mark(moving, _Stage.TANGENT, subject, beside=primals)
    else:
        found = _mark(primals[:count], stage, subject, beside=primals[count:])
        moved = _mark(moving, _Stage.TANGENT_OF_GRADIENT, subject)
    rest = iter(moved)
    return found, [x if isinstance(x, ad.Zero) else next(rest) for x in tangents[:count]]


def _transpose(cotangents: Any, *operands: Any, count: int, stage: _Stage, subject: Subject) -> list[Any]:
    if stage is _Stage.TANGENT_OF_GRADIENT:
        raise subject.no_reverse_over_reverse()
    known, nonzero = operands[count:], [x for x in cotangents if not isinstance(x, ad.Zero)]
    found = iter(_mark(nonzero, _Stage.GRADIENT, subject, beside=known))
    return [x if isinstance(x, ad.Zero) else next(found) for x in cotangents] + [None] * len(known)


def _batched(arrays: Any, axes: Any, **parameters: Any) -> tuple[list[Any], Any]:
    _evaluated(*arrays, **parameters)
    return _marker.bind(*arrays, **parameters), axes[: parameters["count"]]


def _lowered(_: Any, *arrays: Any, **parameters: Any) -> list[Any]:
    return _evaluated(*arrays, **parameters)


_marker.def_impl(_evaluated)
_marker.def_abstract_eval(lambda *arrays, count, **_: list(arrays[:count]))
ad.primitive_jvps[_marker] = _jvp
ad.primitive_transposes[_marker] = _transpose
batching.primitive_batchers[_marker] = _batched
mlir.register_lowering(_marker, _lowered)


def refuse_forward_mode(arrays: Iterable[Any], subject: Subject) -> None:
    """Raise before anything is traced, if it can be seen on the arrays that the call is being differentiated forward."""
    tops = {type(_unbatched(array)) for array in arrays if isinstance(array, Tracer)}
    if ad.JVPTracer in tops and tops <= {ad.JVPTracer, DynamicJaxprTracer}:
        raise subject.no_forward_mode()


def _unbatched(tracer: Any) -> Any:
    while hasattr(tracer, "val") and not isinstance(tracer, DynamicJaxprTracer):  # vmap's, whose class has no public name
        tracer = tracer.val
    return tracer


@contextlib.contextmanager
def own_promotion() -> Iterator[None]:
    """Let what is traced inside broadcast and mix dtypes as it means to, whatever the caller allows in code of their own."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


# ---------------------------------------------------------------- names for jax.checkpoint


def with_named_residuals(run: Callable[[Any, Any], Any], subject: Subject, inputs: Any, others: Any) -> Any:
    """Return `run(inputs, others)`, with names on the output and on what its custom backward keeps beside the inputs.

    The names must stand where the residuals are made: on the output of the whole they would not keep the forward from running
    again. So the forward and the backward of `run` are taken apart here, whatever kernel is inside. Differentiable in `inputs`.
    """
    arrays = varying_like((inputs, others), (inputs, others))
    return _with_named_residuals(run, subject, *arrays)  # type: ignore[misc]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_named_residuals(run: Callable[[Any, Any], Any], subject: Subject, inputs: Any, others: Any) -> Any:
    return run(inputs, others)


def _forward(run: Callable[[Any, Any], Any], subject: Subject, inputs: Any, others: Any) -> Any:
    leaves, tree = jax.tree_util.tree_flatten(inputs)
    own = _mark(leaves, _Stage.FORWARD, subject) if subject.derivatives is Derivatives.GRADIENT else leaves
    output, pull_back = jax.vjp(lambda inputs: run(inputs, others), tree.unflatten(own))
    given = {id(leaf): leaf for leaf in jax.tree_util.tree_leaves(others)} | dict(zip(map(id, own), leaves, strict=True))
    kept = jax.tree_util.tree_leaves((pull_back, output.logsumexp))
    names = {id(leaf): (leaf, RESIDUALS_NAME) for leaf in kept if id(leaf) not in given}
    names |= {id(output.attention_outputs): (output.attention_outputs, OUTPUT_NAME)}
    named = given | {key: checkpoint_name(leaf, name) for key, (leaf, name) in names.items()}
    return jax.tree_util.tree_map(lambda leaf: named.get(id(leaf), leaf), (output, pull_back))


def _backward(run: Callable[[Any, Any], Any], subject: Subject, pull_back: Any, cotangents: Any) -> Any:
    pull_back = jax.tree_util.tree_map(jnp.asarray, pull_back)  # inputs that JAX keeps as they were given may be numpy arrays
    with own_promotion():
        (d_inputs,) = pull_back(cotangents)
    return d_inputs, None


_with_named_residuals.defvjp(_forward, _backward)
