"""The other way round: what a route does not declare never reaches it, and what runs instead is right."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attention_ops.api import record_plans
from attention_ops.device import DeviceProfile
from attention_ops.errors import NoRouteError
from attention_ops.features import Feature
from attention_ops.metadata import OperationMetadata
from attention_ops.operation import OperationImpl, Route
from attention_ops.planner import Plan, make_plan
from attention_ops.rules import Rule
from attention_ops.selftest import calls, cases, numeric, table
from attention_ops.selftest.cases import GEOMETRIES, Case

_PART = {cases.INGREDIENTS[name].feature: name for name in table.ALONE}
_DEFAULT = OperationMetadata()


@dataclasses.dataclass(frozen=True)
class Refusals:
    """What one route must not be given. Each check answers with what is wrong, or with nothing."""

    operation: type[OperationImpl]
    route: Route
    seed: int
    compiler_options: Mapping[str, Any] = dataclasses.field(hash=False)
    runs_here: Callable[[Plan], bool] = lambda plan: True  # whether what a call is planned on can be run to see what it gives

    def checks(self) -> dict[str, Callable[[], str]]:
        """Return the checks by case name."""
        found: dict[str, Callable[[], str]] = {}
        for feature in sorted(Feature.ALL - self.route.declaration.supports):
            found[f"refuse/{feature.name.lower()}"] = functools.partial(self.feature, feature)
        for rule in self.route.declaration.rules:
            if (broken := _breaks(rule)) is not None:
                reason, case, device = broken
                name = f"refuse/{type(rule).__name__}"
                check = functools.partial(_is_refused, self.route.name, reason, case, calls.Asks(False, False, True), device)
                found[f"{name}-{len(found)}" if name in found else name] = check
        if Feature.DROPOUT not in self.route.declaration.supports:
            found["inactive_dropout"] = self.inactive_dropout
        return found

    def feature(self, feature: Feature) -> str:
        """A request with a feature that is not declared goes elsewhere, with that reason, and comes back right."""
        name, reason = self.route.name, f"does not support {feature.value}"
        case, asks = _probe(feature, self.route.declaration.supports)
        if wrong := _is_refused(name, reason, case, asks):
            return wrong
        try:
            chosen = _plan(self.operation.name, case, asks)
        except NoRouteError as error:
            said = any(name in line and reason in line for line in str(error).splitlines())
            return "" if said else f"the error does not say that {name} {reason}: {error}"
        if chosen.route == name:
            return f"{self.operation.name} planned {name}, which {reason}"
        decision = next((d for d in chosen.decisions if d.route == name), None)
        if decision is not None and not any(str(found).startswith(reason) for found in decision.reasons):
            return f"the plan does not say that {name} {reason}:\n{chosen}"
        return self._runs_elsewhere(case, asks, chosen) if self.runs_here(chosen) else ""

    def _runs_elsewhere(self, case: Case, asks: calls.Asks, chosen: Plan) -> str:
        """Make the call by the name of the operation: the route of the plan must run, and give what the law gives."""
        metadata = dataclasses.replace(_DEFAULT, fallback="silent")
        target = calls.Target(self.operation.name, Feature.ALL, chosen.implementation.tolerance, metadata)
        args = calls.arguments(case, [case.problem(self.seed)], target, asks)
        program = calls.program(args.call, args.inputs, self.compiler_options)
        with record_plans() as plans:
            found = numeric.run(case, target, self.seed, {args.key: program}, asks)
        ran = {made.route for made in plans}
        if ran != {chosen.route}:
            return f"the call ran {', '.join(sorted(ran)) or 'nothing'}, the plan says {chosen.route}"
        wrong = [check.sentence for check in found if not check.passed]
        return "; ".join(f"{chosen.route} ran instead, and {sentence}" for sentence in wrong)

    def inactive_dropout(self) -> str:
        """Dropout that is not active changes no plan."""
        plain, asks = cases.make(()), calls.Asks(False, False, False)
        without = _plan(self.operation.name, plain, asks)
        inactive = _plan(self.operation.name, plain, asks, dropout_prob=0.3, deterministic=True)
        return "" if inactive.route == without.route else f"{inactive.route} runs instead of {without.route}"


def _probe(feature: Feature, supports: frozenset[Feature]) -> tuple[Case, calls.Asks]:
    """Return a request that needs the feature and, as far as possible, nothing else that is not declared."""
    gradients = feature in (Feature.GRADIENT, Feature.BIAS_GRADIENT)
    asks = calls.Asks(feature is Feature.LOGSUMEXP, feature is Feature.WEIGHTS, gradients)
    if feature is Feature.OFFSET:
        position = "window" if Feature.WINDOW in supports and Feature.CAUSAL not in supports else "causal"
        return cases.make((position, "offset")), asks
    if feature is Feature.BIAS_GRADIENT:
        return cases.make(("bias",)), asks
    return cases.make((_PART[feature],) if feature in _PART else ()), asks


def _is_refused(name: str, reason: str, case: Case, asks: calls.Asks, device: DeviceProfile | None = None) -> str:
    try:
        chosen = _plan(name, case, asks, device)
    except NoRouteError as error:
        return "" if reason in str(error) else f"the refusal does not say {reason!r}: {error}"
    return f"planned {chosen.route}, although: {reason}"


def _plan(name: str, case: Case, asks: calls.Asks, device: DeviceProfile | None = None, **options: Any) -> Plan:
    spec = calls.spec_of(case, asks, _DEFAULT, **options)
    return make_plan((name,), spec, _DEFAULT, device or DeviceProfile.current())


# ---------------------------------------------------------------- rules


def _breaks(rule: Rule) -> tuple[str, Case, DeviceProfile] | None:
    """Look for a request, or a device, that breaks the rule; return the refusal too."""
    for case, device in _situations():
        reason = rule.check(calls.spec_of(case, calls.Asks(False, False, True), _DEFAULT), _DEFAULT, device)
        if reason is not None:
            return str(reason), case, device
    return None


def _situations() -> Iterator[tuple[Case, DeviceProfile]]:
    here = DeviceProfile.current()
    parts = ((), ("causal",), ("causal", "offset"), ("window",), ("window_open",), ("lengths",), ("bias_float32",))
    for geometry, dtype, ingredients in itertools.product(GEOMETRIES, cases.DTYPES, parts):
        yield cases.make(ingredients, geometry, dtype), here
    old = {"compute_capability": (7, 0)} if here.platform == "cuda" else {}
    for changes in (old, {"cudnn_version": None}, {"jax_version": (0, 4, 0)}):
        yield cases.make(()), dataclasses.replace(here, **changes)
