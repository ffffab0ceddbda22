"""The other way round: what a route does not declare never reaches it, and what runs instead is right."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from attention_ops.api import record_plans
from attention_ops.device import DeviceProfile
from attention_ops.errors import NoRouteError
from attention_ops.features import Feature
from attention_ops.metadata import OperationMetadata
from attention_ops.operation import OperationImpl, Route
from attention_ops.planner import Plan, make_plan
from attention_ops.rules import Rule
from attention_ops.selftest import cases, numeric
from attention_ops.selftest.cases import GEOMETRIES, Case

_PART = {cases.INGREDIENTS[name].feature: name for name in cases.ALONE}
_DEFAULT = OperationMetadata()


def checks(operation: type[OperationImpl], route: Route, seed: int, compiler_options: Any) -> dict[str, Callable[[], str]]:
    """Return, by case name, functions that answer with what is wrong, or with nothing."""
    found: dict[str, Callable[[], str]] = {}
    for feature in sorted(Feature.ALL - route.declaration.supports):
        probe = _probe(feature, route.declaration.supports)
        if probe is not None:
            found[f"refuse/{feature.name.lower()}"] = _bound(
                _check_feature, operation, route, feature, *probe, seed, compiler_options
            )
    for rule in route.declaration.rules:
        if (broken := _breaks(rule)) is not None:
            found[f"refuse/{type(rule).__name__}"] = _bound(_check_rule, operation, route, rule, *broken)
    if Feature.DROPOUT not in route.declaration.supports:
        found["inactive_dropout"] = _bound(_check_inactive_dropout, operation)
    return found


def _bound(function: Callable[..., str], *args: Any) -> Callable[[], str]:
    return lambda: function(*args)


def _probe(feature: Feature, supports: frozenset[Feature]) -> tuple[Case, numeric.Asks] | None:
    """Return a request that needs the feature and, as far as possible, nothing else that is not declared."""
    gradients = feature in (Feature.GRADIENT, Feature.BIAS_GRADIENT)
    asks = numeric.Asks(feature is Feature.LOGSUMEXP, feature is Feature.WEIGHTS, gradients)
    if feature is Feature.OFFSET:
        position = "window" if Feature.WINDOW in supports and Feature.CAUSAL not in supports else "causal"
        return cases.make((position, "offset")), asks
    if feature is Feature.BIAS_GRADIENT:
        return cases.make(("bias",)), asks
    return cases.make((_PART[feature],) if feature in _PART else ()), asks


def _check_feature(
    operation: type[OperationImpl],
    route: Route,
    feature: Feature,
    case: Case,
    asks: numeric.Asks,
    seed: int,
    compiler_options: Any,
) -> str:
    reason = f"does not support {feature.value}"
    problem = case.problem(seed)
    if wrong := _is_refused(route.name, reason, case, asks):
        return wrong
    try:
        chosen = _plan(operation.name, case, asks)
    except NoRouteError as error:
        return "" if _names(str(error), route.name, reason) else f"the error does not say that {route.name} {reason}: {error}"
    if chosen.route == route.name:
        return f"{operation.name} planned {route.name}, which {reason}"
    decision = next((d for d in chosen.decisions if d.route == route.name), None)
    if decision is not None and not any(str(found).startswith(reason) for found in decision.reasons):
        return f"the plan does not say that {route.name} {reason}:\n{chosen}"
    return _runs_elsewhere(operation, route, case, problem, asks, seed, compiler_options)


def _runs_elsewhere(
    operation: type[OperationImpl],
    route: Route,
    case: Case,
    problem: cases.Problem,
    asks: numeric.Asks,
    seed: int,
    compiler_options: Any,
) -> str:
    """Make the call by the name of the operation: another route must run, and give what the law gives."""
    target = numeric.Target(operation.name, Feature.ALL, operation.tolerance)
    target = dataclasses.replace(target, metadata=dataclasses.replace(target.metadata, fallback="silent"))
    args = numeric.arguments(case, [problem], target, asks)
    with record_plans() as plans:
        found = numeric.run(case, target, seed, {args.key: numeric.program(args.call, args.inputs, compiler_options)}, asks)
    if not plans or any(made.route == route.name for made in plans):
        return f"the call ran {', '.join(made.route for made in plans) or 'nothing'}, not another route"
    wrong = [check for check in found if not check.passed]
    return "; ".join(f"{plans[0].route} ran instead, and {check.sentence}" for check in wrong)


def _is_refused(name: str, reason: str, case: Case, asks: numeric.Asks, **settings: Any) -> str:
    try:
        chosen = _plan(name, case, asks, **settings)
    except NoRouteError as error:
        return "" if reason in str(error) else f"the refusal does not say {reason!r}: {error}"
    return f"planned {chosen.route}, although it {reason}"


def _plan(name: str, case: Case, asks: numeric.Asks, device: DeviceProfile | None = None, **options: Any) -> Plan:
    spec = numeric.spec_of(case, asks, _DEFAULT, **options)
    return make_plan((name,), spec, _DEFAULT, device or DeviceProfile.current())


def _names(text: str, route: str, reason: str) -> bool:
    return any(route in line and reason in line for line in text.splitlines())


def _check_inactive_dropout(operation: type[OperationImpl]) -> str:
    """Dropout that is not active changes no plan."""
    plain, asks = cases.make(()), numeric.Asks(False, False, False)
    without = _plan(operation.name, plain, asks)
    inactive = _plan(operation.name, plain, asks, dropout_prob=0.3, deterministic=True)
    return "" if inactive.route == without.route else f"{inactive.route} runs instead of {without.route}"


# ---------------------------------------------------------------- rules


def _breaks(rule: Rule) -> tuple[str, Case, dict[str, Any]] | None:
    """Look for a request that breaks the rule; return its refusal, the case, and the device if that is what breaks it."""
    for case, device in _situations():
        asks = numeric.Asks(False, False, True)
        spec = numeric.spec_of(case, asks, _DEFAULT)
        reason = rule.check(spec, _DEFAULT, device)
        if reason is not None:
            return str(reason), case, {"device": device}
    return None


def _situations() -> Iterator[tuple[Case, DeviceProfile]]:
    here = DeviceProfile.current()
    parts = ((), ("causal",), ("causal", "offset"), ("window",), ("window_open",), ("lengths",), ("bias_float32",))
    for geometry, dtype, ingredients in itertools.product(GEOMETRIES, cases.DTYPES, parts):
        yield cases.make(ingredients, geometry, dtype), here
    old = {"compute_capability": (7, 0)} if here.platform == "cuda" else {}
    for changes in (old, {"cudnn_version": None}, {"jax_version": (0, 4, 0)}):
        yield cases.make(()), dataclasses.replace(here, **changes)


def _check_rule(
    operation: type[OperationImpl], route: Route, rule: Rule, reason: str, case: Case, settings: dict[str, Any]
) -> str:
    return _is_refused(route.name, reason, case, numeric.Asks(False, False, True), **settings)
