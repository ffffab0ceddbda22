"""What one device does and receives when a sequence is split over n: from compiled programs, and modelled for real links.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python benchmarks/scaling.py          # on a CPU, n = 1 to 8
    python benchmarks/scaling.py --model                                                     # n = 8 to 4096, arithmetic only

The temporary memory is what the compiler states for one device. Operations are the plan's, per device. The model divides the
operations by the peak rate and the bytes by the bandwidth; a ring hides the smaller of the two behind the larger at each hop.
"""

from __future__ import annotations

import argparse
import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import attention_ops as ao
from attention_ops.sharding import layout, transfers

WAYS = {"gather": "flash", "ring": "ring", "ulysses": "ulysses"}


@dataclasses.dataclass(frozen=True)
class Chip:
    """Public figures: dense bfloat16 operations a second, and bytes a second that one chip receives."""

    flops: float
    bandwidth: float
    link: str


CHIPS = {
    "H100": Chip(989e12, 450e9, "NVLink 4, up to 8 or a rack"),
    "H100, hosts": Chip(989e12, 50e9, "one 400 Gb/s InfiniBand port per GPU"),
    "TPU v5p": Chip(459e12, 600e9, "ICI, 4,800 Gb/s"),
    "TPU v5e": Chip(197e12, 200e9, "ICI, 1,600 Gb/s"),
}


def measured(T: int, H: int, D: int) -> None:
    """Print operations, temporary memory and bytes received per device."""
    print("| n | way | GFLOP | temporary MiB | with gradient | received MiB |\n|---|---|---|---|---|---|")
    for n in (n for n in (1, 2, 4, 8) if n <= jax.device_count()):
        mesh = jax.make_mesh((n,), ("sp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])
        metadata = ao.OperationMetadata(mesh=mesh)
        x = jax.ShapeDtypeStruct((1, T, H, D), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "sp")))
        for way, name in WAYS.items():

            def forward(*arrays: jax.Array, name: str = name, metadata: ao.OperationMetadata = metadata) -> jax.Array:
                return ao.attention(*arrays, impl=name, metadata=metadata, causal=True).attention_outputs

            def gradient(*arrays: jax.Array, forward=forward) -> tuple[jax.Array, ...]:
                return jax.grad(lambda *arrays: forward(*arrays).sum(), (0, 1, 2))(*arrays)

            memory = [jax.jit(f).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes for f in (forward, gradient)]
            plan = ao.plan(name, x, x, x, metadata=metadata, causal=True)
            hops = 4 * n if way == "ring" and n > 1 else 1  # pairs of pieces
            received = _received(x, metadata, plan.way)
            row = (
                n,
                way,
                f"{plan.estimate.flops * hops / 1e9:.3g}",
                *(f"{m / 2**20:.0f}" for m in memory),
                f"{received / 2**20:.3g}",
            )
            print("| " + " | ".join(map(str, row)) + " |")


def _received(x: jax.ShapeDtypeStruct, metadata: ao.OperationMetadata, way: str) -> int:
    spec = ao.plan("vanilla", x, x, x, causal=True).spec
    return sum(transfer.bytes for transfer in transfers(spec, layout(spec, metadata, way)))


def modelled(T: int, H: int, K: int, D: int) -> None:
    """Print milliseconds of one causal forward in bfloat16: computing, and computing and receiving, per way and chip."""
    shapes = [jax.ShapeDtypeStruct((1, T, heads, D), jnp.bfloat16) for heads in (H, K, K)]
    spec = ao.plan("vanilla", *shapes, causal=True, device="cpu").spec
    print("| chip | n | computing | gather | ring | ulysses |\n|---|---|---|---|---|---|")
    for name, chip in CHIPS.items():
        for n in (8, 64, 512, 4096):
            metadata = ao.OperationMetadata(mesh=AbstractMesh((n,), ("sp",)))
            computing = 2 * T * T * H * D / n / chip.flops
            cells = []
            for way in WAYS:
                split = layout(spec, metadata, way)
                if split.way != way or split.refusals:
                    cells.append("no")
                    continue
                *before, last = (transfer.bytes / chip.bandwidth for transfer in transfers(spec, split))
                cells.append(f"{(sum(before) + (max(computing, last) if way == 'ring' else computing + last)) * 1e3:.3g}")
            print(f"| {name} | {n} | {computing * 1e3:.3g} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="store_true")
    if parser.parse_args().model:
        modelled(T=2**20, H=32, K=8, D=128)
    else:
        measured(T=8192, H=8, D=64)


if __name__ == "__main__":
    main()
