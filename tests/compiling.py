"""How the tests compile on CPU: without XLA's optimisations. Most of their programs run once, so that halves the time.

`make unit-as-users` compiles as users do. So do always, as far as the process decides, the modules with the fixture `optimised`,
and processes that are started with `environment_of_users()`. To be imported before JAX, by conftest.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

_FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # ejkernel turns on one that outlives the run
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # pytest-xdist has a worker per core, and they inherit this
if os.environ["JAX_PLATFORMS"] == "cpu" and os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") == "1":
    os.environ["XLA_FLAGS"] = f"{_FLAGS} {os.environ.get('XLA_FLAGS', '').replace(_FLAGS, '')}".strip()


def environment_of_users() -> dict[str, str]:
    """Return the environment of a process that compiles as users do."""
    flags = os.environ.get("XLA_FLAGS", "").replace(_FLAGS, "").strip()
    return {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": flags}


def on_devices(count: int, *arguments: str, environment: Mapping[str, str] = os.environ) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own that has so many CPU devices."""
    flags = f"{environment.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    return subprocess.run(
        [sys.executable, *arguments],
        env={**environment, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
