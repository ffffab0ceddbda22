"""A row of the table made concrete: the arrays every system is given, and how much work they are. NumPy only."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from attention_ops.bench.cases import Case

BACKWARD_WORK = 3.5
"""Matrix products of forward and backward over those of the forward: 2, and 5 more with the logits recomputed."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Inputs in the public layout, float32 before any cast, and what is visible. Made when first asked for.

    `pairs` counts the visible (query, key) pairs of one head over the whole batch.
    """

    case: Case
    seed: int = 0

    @functools.cached_property
    def query(self) -> np.ndarray:
        return self._normal(0, self.case.T, self.case.H)

    @functools.cached_property
    def key(self) -> np.ndarray:
        return self._normal(1, self.case.S, self.case.K)

    @functools.cached_property
    def value(self) -> np.ndarray:
        return self._normal(2, self.case.S, self.case.K)

    @functools.cached_property
    def cotangent(self) -> np.ndarray:
        return self._normal(3, self.case.T, self.case.H)

    def _normal(self, stream: int, length: int, heads: int) -> np.ndarray:
        rng = np.random.default_rng((self.seed, stream))
        return rng.standard_normal((self.case.B, length, heads, self.case.D), dtype=np.float32)

    @functools.cached_property
    def document_lengths(self) -> np.ndarray | None:
        """Lengths of the packed documents, or None. They add up to T."""
        count, T = min(self.case.pattern.documents, self.case.T), self.case.T
        if not count:
            return None
        if self.case.pattern.even:
            return np.diff(np.arange(count + 1) * T // count)
        cuts = np.sort(np.random.default_rng((self.seed, 4)).choice(np.arange(1, T), count - 1, replace=False))
        return np.diff(np.concatenate([[0], cuts, [T]]))

    @functools.cached_property
    def segment_ids(self) -> np.ndarray | None:
        """[B, T] document of each position, or None."""
        lengths = self.document_lengths
        if lengths is None:
            return None
        ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        return np.broadcast_to(ids, (self.case.B, self.case.T)).copy()

    @functools.cached_property
    def kv_lengths(self) -> np.ndarray | None:
        """[B] visible keys of each row, or None."""
        B, S = self.case.B, self.case.S
        return (S * np.arange(B, 0, -1) // B).astype(np.int32) if self.case.pattern.lengths else None

    @functools.cached_property
    def raster(self) -> np.ndarray | None:
        """[T, S] the visible blocks, or None: the diagonal, so that no row is empty, and others at random up to the share."""
        pattern, T, S = self.case.pattern, self.case.T, self.case.S
        if not pattern.blocks:
            return None
        grid = min(pattern.grid, T, S)
        blocks = np.eye(grid, dtype=bool)
        others = np.flatnonzero(~blocks)
        count = max(round(pattern.blocks * grid * grid) - grid, 0)
        blocks.flat[np.random.default_rng((self.seed, 5)).choice(others, count, replace=False)] = True
        return blocks[np.arange(T)[:, None] * grid // T, np.arange(S)[None] * grid // S]

    def allowed(self) -> np.ndarray | None:
        """Return what is visible as one boolean array [B or 1, 1, T, S], for peers that know no better; None is all."""
        pattern, T, S = self.case.pattern, self.case.T, self.case.S
        rows, cols, parts = np.arange(T)[:, None], np.arange(S)[None], []
        if pattern.causal:
            parts.append((cols <= rows)[None])
        if pattern.window:
            parts.append((cols > rows - pattern.window)[None])
        if self.segment_ids is not None:
            ids = self.segment_ids[:1]
            parts.append(ids[:, :, None] == ids[:, None])
        if self.raster is not None:
            parts.append(self.raster[None])
        if self.kv_lengths is not None:
            parts.append(np.broadcast_to(cols < self.kv_lengths[:, None, None], (self.case.B, T, S)))
        return functools.reduce(np.logical_and, parts)[:, None] if parts else None

    @functools.cached_property
    def pairs(self) -> int:
        case, pattern = self.case, self.case.pattern
        if self.kv_lengths is not None:
            return int(self.kv_lengths.sum()) * case.T
        if self.raster is not None:
            return case.B * int(self.raster.sum())
        lengths = np.asarray([case.T]) if self.document_lengths is None else self.document_lengths
        if not pattern.causal:
            return case.B * int((lengths**2).sum())
        seen = np.minimum(lengths, pattern.window or case.T)
        return case.B * int((seen * (seen + 1) // 2 + (lengths - seen) * seen).sum())

    @property
    def flops(self) -> int:
        """Floating point operations of the matrix products that are needed, an addition and a multiplication being two."""
        forward = 2 * self.pairs * self.case.H * 2 * self.case.D
        return int(forward * BACKWARD_WORK) if self.case.kind == "gradient" else forward
