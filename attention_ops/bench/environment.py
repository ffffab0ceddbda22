"""Where it was measured: versions, processor, cores, load."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from typing import Any

from attention_ops.bench.systems import free_memory
from attention_ops.device import cores, processor

PACKAGES = ("jax", "jaxlib", "ejkernel", "torch", "numpy")
BUSY = 0.5
"""A load above this share of the cores, before anything is measured, is remarked on."""


def environment() -> dict[str, Any]:
    """Return what a reader must know to judge the figures."""
    import jax

    import attention_ops

    versions = {"attention_ops": attention_ops.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "processor": processor(),
        "device": f"{jax.default_backend()}: {jax.devices()[0].device_kind}",
        "cores": cores(),
        "free_memory_bytes": free_memory(),
        "load": load(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def load() -> list[float]:
    """Return the load average over 1, 5 and 15 minutes, or nothing where there is none."""
    return [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else []


def describe(facts: dict[str, Any]) -> list[str]:
    """Return the environment in a few lines."""
    averages, free = facts["load"], facts["free_memory_bytes"] / 2**30
    machine = [facts["processor"], f"{facts['cores']} cores", f"{free:.1f} GiB free", f"JAX on {facts['device']}"]
    if averages:
        machine.append(f"load average {' '.join(f'{x:.2f}' for x in averages)}")
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines = [f"{facts['date']}, {versions}", ", ".join(machine)]
    if facts["xla_flags"]:
        lines.append(f"XLA_FLAGS {facts['xla_flags']}")
    if averages and averages[0] > BUSY * facts["cores"]:
        lines.append("The machine is busy with something else: times are too long, and ratios noisy.")
    return lines
