"""Tile sizes of the Pallas GPU kernels: the first of a list that the registers and the shared memory of the device hold.

Of one program, with D and Dv rounded up to powers of two, shared memory holds in the dtype of the inputs
  forward    the query tile, and `stages` tiles each of key and value
  query      (its gradient) the tiles of query and output cotangent, and `stages` tiles each of key and value
  key_value  (their gradients) the tiles of key and value, and `stages` tiles each of query and output cotangent
and one tile [q, kv] of weights on its way between two products, and 2 KiB for sums over warps. Bfloat16 at head dim 256, forward,
tiles of 64 by 32, 2 stages: (64 * 256 + 2 * 32 * (256 + 256) + 64 * 32) * 2 + 2048 bytes = 102 KiB, where an A100 has 163 KiB.
Triton keeps `stages` tiles from compute capability 9.0 and one less before, so this is what a program takes at most.
Registers hold the sums in float32 and the logits. The candidates were compiled by Triton for capabilities 8.0 to 10.0 and spill
few registers or none; they have not been timed.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Kernel = Literal["forward", "query", "key_value"]
KERNELS: tuple[Kernel, ...] = ("forward", "query", "key_value")
_REGISTERS = {2: 32 * 1024, 4: 9000}  # by bytes of the dtype: products of float32 keep their operands in registers too
_EXCHANGE = 2048
LEAST = 16
"""Triton multiplies no blocks smaller than this."""


def padded(dim: int) -> int:
    """Return the power of two, at least what Triton multiplies, that holds a dimension."""
    return max(LEAST, 1 << (dim - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Rows of query and columns of key in a tile, loads that are in flight, and the warps of a program."""

    q: int
    kv: int
    stages: int
    warps: int = 8


_HALF: dict[Kernel, tuple[Blocks, ...]] = {
    "forward": tuple(Blocks(*x) for x in ((128, 64, 3), (128, 64, 2), (64, 64, 2), (64, 32, 2), (32, 32, 2), (32, 16, 2))),
    "query": tuple(Blocks(*x) for x in ((64, 64, 2), (64, 32, 2), (32, 32, 2), (32, 16, 2), (16, 16, 2))),
    "key_value": tuple(Blocks(*x) for x in ((64, 64, 2), (32, 64, 2), (32, 32, 2), (16, 32, 2), (16, 16, 2))),
}
_SINGLE = tuple(Blocks(*x) for x in ((64, 32, 2), (32, 32, 2), (32, 16, 2), (16, 16, 2)))


def shared_memory(kernel: Kernel, blocks: Blocks, D: int, Dv: int, itemsize: int) -> int:
    """Return the bytes of shared memory that a program takes at most."""
    D, Dv = padded(D), padded(Dv)
    kept = {"forward": blocks.q * D, "query": blocks.q * (D + Dv), "key_value": blocks.kv * (D + Dv)}[kernel]
    loaded = blocks.q if kernel == "key_value" else blocks.kv
    return (kept + blocks.stages * loaded * (D + Dv) + blocks.q * blocks.kv) * itemsize + _EXCHANGE


def _registers(kernel: Kernel, blocks: Blocks, D: int, Dv: int) -> tuple[int, int]:
    """Return how many float32 numbers a program sums in registers, and how many of a tile's it has beside them."""
    D, Dv = padded(D), padded(Dv)
    sums = {"forward": blocks.q * Dv, "query": blocks.q * D, "key_value": blocks.kv * (D + Dv)}[kernel]
    return sums, blocks.q * blocks.kv * (1 if kernel == "forward" else 2)


def choose(
    kernel: Kernel, T: int, S: int, D: int, Dv: int, itemsize: int, limit: int, block_q: int | None, block_kv: int | None
) -> Blocks:
    """Return the tiles of a kernel where a program may take `limit` bytes of shared memory; the smallest where none fits.

    Sizes that the caller states are rounded up to powers of two, 16 or more, and halved until they fit.
    """
    candidates = _HALF[kernel] if itemsize == 2 else _SINGLE
    if block_q or block_kv:
        candidates = _halved(padded(block_q or candidates[0].q), padded(block_kv or candidates[0].kv), candidates[0].stages)
    options = [dataclasses.replace(x, q=min(x.q, padded(T)), kv=min(x.kv, padded(S))) for x in candidates]
    options.append(dataclasses.replace(options[-1], stages=1))

    def fits(blocks: Blocks) -> bool:
        registers = sum(_registers(kernel, blocks, D, Dv))
        return shared_memory(kernel, blocks, D, Dv, itemsize) <= limit and registers <= _REGISTERS[2 if itemsize == 2 else 4]

    chosen = next(filter(fits, options), options[-1])
    few = _registers(kernel, chosen, D, Dv)[0] <= (64 * 128 if itemsize == 2 else 16 * 64)
    return dataclasses.replace(chosen, warps=4 if few else 8)


def _halved(q: int, kv: int, stages: int) -> tuple[Blocks, ...]:
    """Return tiles of q by kv and smaller ones, the longer side halved each time."""
    sizes = [(q, kv)]
    while max(q, kv) > LEAST:
        q, kv = (q // 2, kv) if q > kv else (q, kv // 2)
        sizes.append((q, kv))
    return tuple(Blocks(*size, n) for size in sizes for n in (stages, 2))


def most_shared_memory(
    T: int, S: int, D: int, Dv: int, itemsize: int, limit: int, block_q: int | None, block_kv: int | None, gradient: bool
) -> int:
    """Return the bytes of shared memory that the kernels of a call take with the tiles chosen for `limit`; more if none fit."""
    kernels = KERNELS if gradient else KERNELS[:1]
    return max(
        shared_memory(kernel, choose(kernel, T, S, D, Dv, itemsize, limit, block_q, block_kv), D, Dv, itemsize)
        for kernel in kernels
    )
