"""Where dense attention stops being the faster: the table behind the choice of `auto` in operations/auto.py.

python benchmarks/crossover.py
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import attention_ops as ao
from attention_ops.bench.timing import interleave, median_ratio

PREFILL = (64, 96, 128, 192, 256, 384, 512, 1024)
DECODE = (128, 256, 512, 1024, 2048, 4096, 8192)


def ratio(B: int, T: int, S: int, H: int, K: int, gradient: bool) -> float:
    """Return the time of vanilla over that of blocksparse, medians of one interleaved run."""
    rng = np.random.default_rng(0)
    shapes = (B, T, H, 64), (B, S, K, 64), (B, S, K, 64)
    arrays = [jax.numpy.asarray(rng.standard_normal(shape), np.float32) for shape in shapes]

    def compiled(name: str):
        def output(query, key, value):
            return ao.attention(query, key, value, impl=name, causal=True).attention_outputs

        function = jax.grad(lambda *x: output(*x).sum(), argnums=(0, 1, 2)) if gradient else output
        return jax.jit(function)

    functions = {name: compiled(name) for name in ("vanilla", "blocksparse")}
    calls = {name: functools.partial(_call, function, arrays) for name, function in functions.items()}
    for call in calls.values():
        call()
    times = interleave(calls, repeats=5)
    return median_ratio(times["vanilla"].seconds, times["blocksparse"].seconds)


def _call(function, arrays) -> None:
    jax.block_until_ready(function(*arrays))


def main() -> None:
    table = Table("T", "S", "heads", "batch", "forward", "forward + backward", title="time of vanilla over blocksparse")
    for B, H in ((1, 8), (8, 8)):
        for T in PREFILL:
            table.add_row(*map(str, (T, T, H, B)), f"{ratio(B, T, T, H, H, False):.2f}", f"{ratio(B, T, T, H, H, True):.2f}")
    for B in (1, 8):
        for S in DECODE:
            table.add_row("1", str(S), "32 of 8", str(B), f"{ratio(B, 1, S, 32, 8, False):.2f}", "")
    Console().print(table)


if __name__ == "__main__":
    main()
