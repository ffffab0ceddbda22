"""Draw the scaling suite: time and peak memory against T, one line per system."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Sequence
from typing import Any

from attention_ops.bench.results import CaseResult

MISSING = "matplotlib is not installed, and --plot needs it: pip install matplotlib"


def is_available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


_MARKERS = ("o", "s", "^", "D", "v", "P", "X")

Series = dict[str, list[tuple[int, float]]]


def series(results: Sequence[CaseResult]) -> tuple[Series, Series]:
    """Return milliseconds per call and peak MB above the inputs, by system, as points (T, value) in order of T."""
    times: Series = {}
    peaks: Series = {}
    chosen = [r for r in results if r.case.suite == "scaling" and r.case.pattern.is_plain]
    for result in sorted(chosen, key=lambda r: r.case.T):
        for m in result.measurements:
            if m.samples.seconds:
                times.setdefault(m.label, []).append((result.case.T, m.samples.median * 1e3))
            if m.peak and m.peak.above_inputs:
                peaks.setdefault(m.label, []).append((result.case.T, m.peak.above_inputs / 1e6))
    return times, peaks


def draw(results: Sequence[CaseResult], path: pathlib.Path) -> None:
    """Write the picture; the ending of `path` chooses the format."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5.5), layout="constrained", sharex=True)
    labels = ("time per call (ms)", "peak memory beyond the inputs (MB)")
    chosen = [result for result in results if result.case.suite == "scaling" and result.case.pattern.is_plain]
    order = list(dict.fromkeys(m.label for result in chosen for m in result.measurements))
    lengths = sorted({result.case.T for result in chosen})
    lines: dict[str, Any] = {}
    for axis, drawn, label in zip(axes, series(results), labels, strict=True):
        for system, points in drawn.items():
            index = order.index(system)
            style = {"marker": _MARKERS[index % len(_MARKERS)], "color": f"C{index % 10}", "alpha": 0.85}
            lines[system] = axis.plot(*zip(*points, strict=True), label=system, **style)[0]
        axis.set(xscale="log", yscale="log", xlabel="sequence length T", ylabel=label)
        axis.set_xticks(lengths, [str(T) for T in lengths])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
        axis.grid(True, which="major", alpha=0.3)
    case = chosen[0].case
    figure.suptitle(f"Causal attention, forward: B {case.B}, H {case.H}, D {case.D}, {case.dtype}")
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=len(lines) or 1, frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
