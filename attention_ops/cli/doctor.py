"""`attention-ops doctor`: what an issue needs to say about a machine. A probe that fails is a line, never an error."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click

from attention_ops.cli import parameters

if TYPE_CHECKING:
    from attention_ops.cli.questions import Question
    from attention_ops.device import DeviceProfile

PACKAGES = ("jax", "jaxlib", "ejkernel", "eformer", "numpy", "jaxtyping", "ml_dtypes", "pydantic", "click", "rich")
OPTIONAL = (
    *("keras", "flax", "equinox", "torch", "matplotlib"),
    *("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "libtpu"),
)
VARIABLES = (
    *("ATTENTION_OPS_IMPL", "ATTENTION_OPS_CACHE_DIR", "JAX_PLATFORMS", "XLA_FLAGS"),
    *("JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION", "CUDA_VISIBLE_DEVICES"),
)
TYPICAL = (
    ("training, causal", (1, 2048, 16, 128), (2048, 4), ("causal=true",)),
    ("decoding, one token", (8, 1, 16, 128), (2048, 4), ("causal=true", "kv_lengths=yes", "differentiable=false")),
    ("soft cap and window", (1, 4096, 8, 256), (4096, 4), ("causal=true", "sliding_window=1023,0", "logits_soft_cap=50")),
)
"""Requests as in `explain`: what it is, query, keys and values, options. All in bfloat16."""

Line = tuple[str, str]


@click.command(short_help="Print versions, devices and choices, ready to paste into an issue.")
@click.option("--load", "modules", metavar="MODULE", multiple=True, help="Import a module that registers operations. Repeatable.")
def doctor(modules: tuple[str, ...]) -> None:
    """Print versions, devices, plug-ins, environment, and what would be chosen for typical requests and why.

    Plain text, ready to paste into an issue. What cannot be found out is a line that says so.
    """
    for title, probe in (
        ("versions", _versions),
        ("devices", _devices),
        *((f"module {module}", _loading(module)) for module in modules),
        ("plug-ins", _plugins),
        ("environment", _environment),
        ("selftest", _verdicts),
        *((f"choices: {what}", _choices(shape, kv, options)) for what, shape, kv, options in TYPICAL),
    ):
        lines = _lines(probe)
        width = max((len(name) for name, _ in lines), default=0)
        click.echo(title)
        for name, text in lines:
            click.echo(f"  {name:<{width}}  {' '.join(text.splitlines())}".rstrip())
        click.echo("")


def _lines(probe: Callable[[], Iterable[Line]]) -> list[Line]:
    """Return what a probe finds, up to where it fails, and then why."""
    lines: list[Line] = []
    try:
        lines.extend(probe())  # extend keeps what came before the exception
    except Exception as error:  # a broken installation may raise anything, and is what doctor is for
        lines.append(("failed", _sentence(error)))
    return lines


def _line(name: str, probe: Callable[[], str]) -> Line:
    """Return what a probe of one line finds, or why it finds nothing."""
    try:
        return name, probe()
    except Exception as error:  # as above
        return name, f"failed, {_sentence(error)}"


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    head = "" if isinstance(error, click.ClickException) else f"{type(error).__name__}: "
    return f"{head}{text[:300]}{'...' if len(text) > 300 else ''}"


def _versions() -> Iterable[Line]:
    from attention_ops import __version__

    yield "python", f"{sys.version.split()[0]} ({platform.python_implementation()}), {platform.system()} {platform.machine()}"
    yield "attention_ops", __version__
    for package in (*PACKAGES, *OPTIONAL):
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package in PACKAGES:
                yield package, "not installed"


def _devices() -> Iterable[Line]:
    import jax

    from attention_ops.device import DeviceProfile, describe

    yield "default backend", jax.default_backend()
    kinds: dict[str, int] = {}
    for device in jax.devices():
        text = f"{describe(device)}" + (f", {device.device_kind}" if device.device_kind != describe(device).name else "")
        kinds[text] = kinds.get(text, 0) + 1
    for text, count in kinds.items():
        yield f"{count} x", text
    yield "processes", f"{jax.process_count()}"
    for note in DeviceProfile.current().notes:
        yield "note", note


def _loading(module: str) -> Callable[[], Iterable[Line]]:
    def probe() -> Iterable[Line]:
        parameters.load(module)
        yield "loaded", "ok"

    return probe


def _plugins() -> Iterable[Line]:
    from attention_ops.registry import ENTRY_POINTS, OperationRegistry

    names = OperationRegistry.names()
    yield "operations", ", ".join(names)
    broken = OperationRegistry.unavailable()
    entries = list(importlib.metadata.entry_points(group=ENTRY_POINTS))
    if not entries:
        yield "plug-ins", f"none installed (entry points {ENTRY_POINTS})"
    for entry in entries:
        source = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown package"
        yield entry.name, f"unavailable, {broken[entry.name]}" if entry.name in broken else f"ok, {source}"


def _environment() -> Iterable[Line]:
    for name in VARIABLES:
        yield name, os.environ.get(name, "not set")


def _verdicts() -> Iterable[Line]:
    from attention_ops import storage, verdicts

    here = [one for one in verdicts.table().kept.values() if one.versions == verdicts.versions()]
    if not here:
        yield "verdicts", f"none saved for these versions in {storage.path(verdicts.FILE)}"
    for one in here:
        yield (
            one.route,
            f"{'passed' if one.passed else f'failed, refused: {one.reason}'} ({one.proof}, {one.machine}, {one.date})",
        )


def _choices(shape: tuple[int, ...], kv: tuple[int, ...], settings: tuple[str, ...]) -> Callable[[], Iterable[Line]]:
    def probe() -> Iterable[Line]:
        from attention_ops.cli.questions import of_shape
        from attention_ops.device import DeviceProfile
        from attention_ops.registry import OperationRegistry

        question, device = of_shape(shape, kv, settings=settings, dtype="bfloat16", backend=None), DeviceProfile.current()
        facts = question.ask(("vanilla",), device).facts()
        yield "request", f"{facts['request']}; needs {facts['needs']}"
        yield _line("no name given", functools.partial(_unnamed, question, device))
        for name in OperationRegistry.names():
            yield _line(name, functools.partial(_named, question, device, name))

    return probe


def _unnamed(question: Question, device: DeviceProfile) -> str:
    answer = question.ask(None, device)
    source = answer.plan.notes[0] if answer.plan and answer.plan.notes else ""
    return f"{answer.plan.route if answer.plan else 'nothing'} ({' > '.join(answer.names)}: {source})"


def _named(question: Question, device: DeviceProfile, name: str) -> str:
    answer = question.ask((name,), device)
    if answer.plan is not None and not answer.plan.is_fallback:
        return answer.plan.route
    own = [decision for decision in answer.decisions if decision.route.partition("/")[0] == name]
    reasons = "; ".join(str(reason) for decision in own for reason in decision.reasons)
    return f"{answer.plan.route if answer.plan else 'nothing'}, a fallback: {reasons}"
