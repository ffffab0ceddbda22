"""Write docs/support_matrix.md from the declarations of the registered operations. `--check` only compares."""

from __future__ import annotations

import pathlib
import sys

import attention_ops as ao
from attention_ops.operation import Route
from attention_ops.selftest import provers
from attention_ops.selftest.subject import Subject

TARGET = pathlib.Path(__file__).with_name("support_matrix.md")
HEAD = """# Support matrix

Generated from what each forward declares: `make docs-tables`. A request for something that a route does not support is planned
elsewhere, with that reason. `python -m attention_ops.selftest` proves every route as far as your machine allows.
"""
PROOF = """
## Proofs

How each route is proven on a machine with nothing but a CPU. On the device it is written for, the same command runs it there.

| route | proof | what that leaves open |
|---|---|---|"""


def matrix() -> str:
    routes = [route for name in ao.OperationRegistry.names() for route in ao.OperationRegistry.get(name).routes.values()]
    lines = [HEAD, "| feature | " + " | ".join(f"`{route.name}`" for route in routes) + " |", "|---" * (len(routes) + 1) + "|"]
    for feature in ao.Feature:
        cells = ("yes" if feature in route.declaration.supports else "-" for route in routes)
        lines.append(f"| {feature.name}: {feature.value} | " + " | ".join(cells) + " |")
    lines.append("| derivatives | " + " | ".join(_derivatives(route) for route in routes) + " |")
    lines += ["", *(f"- {member.name}: {member.value}" for member in ao.Derivatives), "", "## Limits", ""]
    for route in routes:
        rules = "; ".join(rule.describe() for rule in route.declaration.rules) or "none"
        lines.append(f"- `{route.name}`: {rules}")
        lines += [f"    - no {feature.name}: {why}" for feature, why in sorted(route.declaration.because.items())]
    lines += PROOF.splitlines() + [_proof(route) for route in routes]
    lines += ["", "## Aliases and fallbacks", "", "| operation | aliases | falls back to |", "|---|---|---|"]
    for name in ao.OperationRegistry.names():
        operation = ao.OperationRegistry.get(name)
        lines.append(f"| `{name}` | {', '.join(operation.aliases) or '-'} | {', '.join(operation.fallback) or '-'} |")
    return "\n".join(lines) + "\n"


def _derivatives(route: Route) -> str:
    found = route.declaration.derivatives
    if ao.Feature.GRADIENT not in route.declaration.supports:
        return "-"
    if isinstance(found, ao.Derivatives):
        return found.name
    return ", ".join(f"{of.name} of {dtype}" for dtype, of in found.items()) + f", else {ao.Derivatives.GRADIENT.name}"


def _proof(route: Route) -> str:
    subject, here = Subject(ao.OperationRegistry.get(route.operation), route), ao.DeviceProfile.named("cpu")
    prover, reason = provers.prover_of(subject, here)
    caveat = provers.caveat(subject, prover, here)
    return f"| `{route.name}` | {prover.proof if prover else 'none'} | {caveat or '-'}{f' ({reason})' if reason else ''} |"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if TARGET.read_text() == matrix() else f"{TARGET.name} is stale: run make docs-tables")
    TARGET.write_text(matrix())
