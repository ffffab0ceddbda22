"""What dropout must do. With values that are a unit matrix the output shows every weight by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from attention_ops.selftest.reference import Attention

KEYS = 128
_DEVIATIONS = 6.0


def kept(output: Any, law: Attention) -> np.ndarray:
    """Return [B, H, T, S]: which weights were kept. A weight too small to be represented counts as kept."""
    output = np.asarray(output)
    return (output != 0).transpose(0, 2, 1, 3) | (law.weights < ml_dtypes.finfo(output.dtype).tiny)


def statistics(run: Callable[[int], Any], law: Attention, probability: float) -> list[tuple[str, float, float]]:
    """Return (name, error, bound) of what holds over many keys."""
    outputs = np.stack([np.asarray(run(key)).astype(np.float64) for key in range(1, KEYS + 1)])
    rows = []
    again = np.asarray(run(1)).astype(np.float64)
    rows.append(("dropout with the same key", float(np.abs(again - outputs[0]).max()), 0.0))

    shown = law.weights > 1e-4
    patterns = (outputs != 0).transpose(0, 1, 3, 2, 4)[:, shown]
    share, cells = patterns.mean(), patterns.size
    bound = _DEVIATIONS * np.sqrt(probability * (1 - probability) / cells)
    rows.append(("share of weights kept", float(abs(share - (1 - probability))), float(bound)))

    large = law.output > 1e-3
    deviation = law.output[large] * np.sqrt(probability / (1 - probability) / KEYS)
    excess = np.abs(outputs.mean(0)[large] - law.output[large]) - 0.01 * law.output[large]
    rows.append(("mean over keys", float((excess / deviation).max()), _DEVIATIONS))

    B, H = law.weights.shape[:2]
    drawn = (outputs[0] != 0).transpose(0, 2, 1, 3).reshape(B * H, -1)
    same = any(np.array_equal(drawn[0], other) for other in drawn[1:])
    rows.append(("heads and rows that share a pattern", float(same), 0.0))
    return rows
