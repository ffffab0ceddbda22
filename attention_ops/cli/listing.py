"""`attention-ops list`: the operations, what they support, and whether they run here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from attention_ops.cli import parameters

if TYPE_CHECKING:
    from attention_ops.device import DeviceProfile
    from attention_ops.features import Feature
    from attention_ops.operation import Declaration

PLAIN = ((1, 1024, 8, 64), "bfloat16", {"differentiable": False})
"""The plainest request: an operation that cannot take this cannot run on the device."""


@click.command("list", short_help="Show the operations: routes, what they support, what runs here.")
@parameters.device_option
@parameters.load_option
@parameters.json_option
def list_operations(device: str | None, as_json: bool) -> None:
    """Show the operations: their routes, what each route supports, and whether it runs on this device, or why not.

    What a route supports beyond that has limits (dtypes, head dims, lengths): --json has them, `explain` applies them.
    """
    from attention_ops.registry import OperationRegistry

    profile = parameters.profile_of(device)
    entries = [_entry(name, profile) for name in OperationRegistry.names()]
    unavailable = OperationRegistry.unavailable()
    if as_json:
        click.echo(json.dumps({"device": str(profile), "operations": entries, "unavailable": unavailable}, indent=2))
        return
    _print(entries, unavailable, profile, here=device is None)


def _entry(name: str, profile: DeviceProfile) -> dict[str, Any]:
    from attention_ops.cli import saying
    from attention_ops.cli.questions import Question
    from attention_ops.registry import OperationRegistry

    operation = OperationRegistry.get(name)
    shape, dtype, options = PLAIN
    answer = Question(saying.arrays(shape, None, dtype), options).ask((name,), profile)
    own = [decision for decision in answer.decisions if decision.route.partition("/")[0] == name]
    runs = answer.plan.route if answer.plan is not None and not answer.plan.is_fallback else None
    return {
        "name": name,
        "aliases": list(operation.aliases),
        "fallback": list(operation.fallback),
        "summary": (operation.__doc__ or "").strip().split("\n")[0],
        "available": runs is not None,
        "runs": runs,
        "reasons": [] if runs else [str(reason) for decision in own for reason in decision.reasons],
        "routes": [
            {
                "route": route.name,
                "supports": [feature.name for feature in sorted(route.declaration.supports)],
                "limits": [rule.describe() for rule in route.declaration.rules],
            }
            for route in operation.routes.values()
        ],
    }


def supports_text(declaration: Declaration) -> str:
    """Return what a route supports, said the shorter way round."""
    from attention_ops.features import Feature

    def names(features: frozenset[Feature]) -> str:
        return ", ".join(feature.name.lower() for feature in sorted(features))

    missing = Feature.ALL - declaration.supports
    if not declaration.supports or not missing:
        return "plain query, key, value" if missing else "everything"
    return f"all but {names(missing)}" if len(missing) < len(declaration.supports) else names(declaration.supports)


def _print(entries: list[dict[str, Any]], unavailable: dict[str, str], profile: DeviceProfile, here: bool) -> None:
    from attention_ops.cli.console import emit, styled, table
    from attention_ops.registry import OperationRegistry

    rows = table("operation", "aliases", "route", "available here" if here else f"available on {profile.name}", "supports")
    for entry in entries:
        verdict = styled("yes", "green") if entry["available"] else styled("no: " + "; ".join(entry["reasons"]), "yellow")
        head = (entry["name"], ", ".join(entry["aliases"]))
        if not entry["routes"]:
            rows.add_row(*head, "", verdict, entry["summary"].partition(". ")[0])
        for index, (backend, route) in enumerate(OperationRegistry.get(entry["name"]).routes.items()):
            cells = (*head, backend, verdict) if not index else ("", "", backend, "")
            rows.add_row(*cells, supports_text(route.declaration))
    broken = [
        styled(f"plug-in {name} is unavailable: {' '.join(error.splitlines())}", "red") for name, error in unavailable.items()
    ]
    emit(styled(f"device: {profile}", "dim"), "", rows, *([""] if broken else []), *broken)
