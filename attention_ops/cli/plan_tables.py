"""Plans as tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import RenderableType
from rich.table import Table

from attention_ops.cli.console import bytes_text, emit, facts, flops_text, styled, table
from attention_ops.cli.questions import Answer
from attention_ops.planner import Decision

RUNS, COULD, NO = "green", "dim", "yellow"


def one_by_one(answers: Sequence[Answer]) -> None:
    """Print each answer: the choice, the request, every route with its verdict, reasons and remedies, and the estimates."""
    for number, answer in enumerate(answers):
        after: dict[str, str] = {}
        if answer.plan is not None and answer.plan.estimate is not None:
            after["forward"] = _cost(answer)
        after |= {"note" if not index else " " * index: note for index, note in enumerate(answer.notes())}
        parts: list[RenderableType] = [styled(answer.headline, f"bold {RUNS if answer.runs else NO}"), "", facts(answer.facts())]
        parts += ["", _verdicts(answer.decisions, answer.plan.route if answer.plan else None)]
        if answer.split is not None:
            parts += ["", _placements(answer), *(["", _transfers(answer)] if answer.transfers() else [])]
        emit(*([""] if number else []), *parts, *(["", facts(after)] if after else []))


def _verdicts(decisions: Sequence[Decision], chosen: str | None) -> Table:
    reasons = [reason for decision in decisions for reason in decision.reasons]
    width = 4 if any(reason.remedy for reason in reasons) else 3 if reasons else 2
    rows = table(*("route", "verdict", "reason", "remedy")[:width])
    for decision in decisions:
        if decision.accepted:
            runs = decision.route == chosen
            rows.add_row(decision.route, styled("runs" if runs else "could run", RUNS if runs else COULD))
        for index, reason in enumerate(decision.reasons):
            head = (decision.route, styled("no", NO)) if not index else ("", "")
            rows.add_row(*(*head, reason.text, reason.remedy)[:width])
    return rows


def _placements(answer: Answer) -> Table:
    rows = table("array", "shape", "spec", "on each device")
    for found in answer.placements():
        rows.add_row(found["array"], str(found["shape"]), found["spec"], str(found["local"]))
    return rows


def _transfers(answer: Answer) -> Table:
    rows = table("each device receives", "bytes", "steps", "a step")
    for found in answer.transfers():
        size, steps = found["bytes"], found["steps"]
        rows.add_row(found["what"], bytes_text(size), str(steps), bytes_text(size // steps))
    return rows


def _cost(answer: Answer) -> str:
    assert answer.plan is not None
    assert answer.plan.estimate is not None
    estimate = answer.plan.estimate
    return f"about {flops_text(estimate.flops)}, {bytes_text(estimate.temporary_bytes)} of temporary memory"


def side_by_side(answers: Sequence[Answer]) -> None:
    """Print one row per operation: what runs under its name, what that costs, and why it is not its own route."""
    for number, (_, group) in enumerate(groupby(answers, key=lambda answer: id(answer.question))):
        row_answers = list(group)
        rows = table("operation", "runs", "flops", "temporary", "why not its own")
        for answer in row_answers:
            _add_row(rows, answer)
        first = row_answers[0]
        emit(*([""] if number else []), styled(f"every operation on {first.device}", "bold"), "", facts(first.facts()), "", rows)


def _add_row(rows: Table, answer: Answer) -> None:
    name, plan = answer.names[0], answer.plan
    own = [decision for decision in answer.decisions if decision.route.partition("/")[0] == name]
    reasons = [str(reason) for decision in own for reason in decision.reasons]
    if plan is None:
        cells = (styled("nothing", NO), "", "")
        reasons = [f"{decision.route}: {reason}" for decision in answer.decisions for reason in decision.reasons]
    else:
        estimate = plan.estimate
        costs = (flops_text(estimate.flops), bytes_text(estimate.temporary_bytes)) if estimate else ("unknown", "unknown")
        style = NO if plan.is_fallback else RUNS
        cells = (styled(plan.route + (" (fallback)" if plan.is_fallback else ""), style), *costs)
    shown = reasons if plan is None or plan.is_fallback else []
    for index, reason in enumerate(shown or [""]):
        rows.add_row(*((name, *cells) if not index else ("", "", "", "")), reason)
