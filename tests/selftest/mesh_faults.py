"""Faults planted in what runs over a mesh, on four devices: `python -m tests.selftest.mesh_faults` prints one line each.

First every case passes on the code as it is, then each fault is planted in turn and its case must fail. A case compares a call
over a mesh with the same call without, or counts. tests/selftest/test_mutations.py starts it.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import attention_ops as ao
from attention_ops import masks, sequence
from tests.mesh_cases import call, difference, mesh_of
from tests.selftest.mutations import MESH, MUTATIONS


@dataclasses.dataclass(frozen=True)
class Compared:
    """A call of tests/mesh_cases.py: over the mesh it has the numbers of one device."""

    mesh: str
    operation: str
    shape: tuple[int, ...]
    options: tuple[str, ...]
    gradient: bool = True

    @functools.cached_property
    def _call(self) -> tuple[Any, Callable[..., Any]]:
        rng = np.random.default_rng(zlib.crc32(f"{self}".encode()))
        return call(self.operation, self.shape, self.options, rng, self.gradient)

    @functools.cached_property
    def _one(self) -> Any:
        inputs, run = self._call
        return jax.jit(run)(inputs)

    def __call__(self) -> str:
        """Return what differs, or ''."""
        (inputs, run), metadata = self._call, ao.OperationMetadata(mesh=mesh_of(self.mesh), fallback="silent")
        return difference(self._one, jax.jit(lambda inputs: run(inputs, metadata))(inputs))


def pieces_a_ring_attends() -> str:
    """Return where a ring attends other pieces than its mask shows, or masks and biases them for another place.

    Each piece adds 1 to the sum whose logarithm the logsumexp is, or NaN. Arrays hold their positions.
    """
    at = jnp.arange(16.0)
    bias = (100 * at[:, None] + at)[None, None]
    piece = np.arange(16) // 2

    def attend(query: Any, key: Any, value: Any, mask: masks.Mask, bias: Any) -> sequence.Found:
        row, col = query[0, 0, 0, 0], key[0, 0, 0, 0]
        is_there = (bias[0, 0, 0, 0] == 100 * row + col) & (value[0, 0, 0, 0] == col)
        for leaf in mask.leaves():
            assert isinstance(leaf, masks.Positional)
            is_there &= leaf.stated_offset == row - col
        return sequence.Found(query, jnp.where(is_there, jnp.zeros(query.shape[:3]), jnp.nan))

    def pieces(mask: masks.Mask, zigzag: bool) -> np.ndarray:
        run = functools.partial(sequence.ring, attend, ("sp",), zigzag=zigzag)
        over_mesh = jax.shard_map(
            lambda x, bias: run(x, x, x, mask, bias).logsumexp,
            mesh=mesh_of("sp=4"),
            in_specs=(P(None, "sp"), P(None, None, "sp")),
            out_specs=P(None, "sp"),
            check_vma=False,
        )
        return np.exp(jax.jit(over_mesh)(at[None, :, None, None], bias))[0, :, 0]

    near = masks.Causal(0) & masks.Window(4, 0, 0)
    found = {
        "causal in zigzag order": (pieces(masks.Causal(0), True), piece + 1),
        "in a window": (pieces(near, False), np.minimum(piece // 2 + 1, 2)),
    }
    return ", ".join(f"{what} {got} of {want}" for what, (got, want) in found.items() if not np.allclose(got, want))


def dropout_of_each_part() -> str:
    """Return along which mesh axis two parts of equal numbers drop the same weights."""
    x, same = jnp.ones((4, 4, 4, 8)), []
    options = {"dropout_prob": 0.5, "deterministic": False, "dropout_rng": jax.random.key(0)}
    for axis, along in (("dp", 0), ("sp", 1), ("tp", 2)):
        key = jnp.ones((4, 64, 4, 8))
        metadata = ao.OperationMetadata(mesh=mesh_of(f"{axis}=4"))
        out = ao.attention(x, key, key, impl="vanilla", metadata=metadata, **options).attention_outputs
        parts = {np.asarray(part).tobytes() for part in jnp.split(out, 4, along)}
        same += [axis] if len(parts) < 4 else []
    return ", ".join(same)


CASES: dict[str, Callable[[], str]] = {
    "ring_with_sinks": Compared("sp=4", "ring", (3, 16, 16, 2, 1), ("window", "lengths", "bias", "sinks_of_some")),
    "ring_with_sinks_forward": Compared(
        "sp=4", "ring", (3, 16, 16, 2, 1), ("window", "lengths", "bias", "sinks_of_some"), gradient=False
    ),
    "keys_merged": Compared("sp=4", "vanilla", (2, 1, 8, 2, 1), ("causal", "lengths", "bias", "sinks_of_some")),
    "keys_gathered": Compared("sp=4", "vanilla", (2, 16, 16, 2, 1), ("causal", "segments", "bias")),
    "heads_of_one_key_head": Compared("tp=4", "vanilla", (1, 4, 4, 8, 2), ("causal",)),
    "heads_of_several_key_heads": Compared("dp=2,tp=2", "vanilla", (2, 4, 4, 6, 3), ("causal", "static", "lengths")),
    "pieces_a_ring_attends": pieces_a_ring_attends,
    "dropout_of_each_part": dropout_of_each_part,
}


def main() -> None:
    failed = 0
    for name, case in CASES.items():
        problem = case()
        failed += bool(problem)
        print(f"{name}: {f'wrong without a fault: {problem}' if problem else 'passes'}", flush=True)
    for mutation in MUTATIONS:
        if mutation.route != MESH:
            continue
        with mutation.planted():
            try:
                problem = CASES[mutation.case]()
                verdict = "convicted" if problem else "not convicted"
            except Exception as error:
                verdict = f"the fault does not run, which any call would show: {type(error).__name__}: {error}"
        failed += verdict != "convicted"
        print(f"{mutation.where}: {mutation.fault}: {verdict}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
