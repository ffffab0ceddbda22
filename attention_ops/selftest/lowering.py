"""What a program becomes for a device that is not here: the custom calls in it, and the matrix products beside them."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from attention_ops.device import DeviceProfile, cudnn_probes

_TYPE = r"tensor<([^>]*)>"
_CALL = re.compile(r"stablehlo\.custom_call @([^\s(]+)\(([^)]*)\)(.*)")
_CONFIG = re.compile(r'backend_config = "((?:[^"\\]|\\.)*)"')
_PRODUCT = re.compile(
    r"stablehlo\.dot_general [^:]*?(?:batching_dims = \[([^\]]*)\] x \[([^\]]*)\], )?"
    rf"contracting_dims = \[([^\]]*)\] x \[([^\]]*)\].*? : \({_TYPE}, {_TYPE}\) -> {_TYPE}"
)
_NO_KERNELS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement")
"""Custom calls that only say where arrays lie."""


@dataclasses.dataclass(frozen=True)
class CustomCall:
    """One custom call: its target, the types of its operands ("2x8x4x64xbf16"), and its backend config as text."""

    target: str
    operands: tuple[str, ...]
    config: str

    def settings(self) -> dict[str, Any]:
        """Return the config, if it is JSON.

        Raises:
            ValueError: it is not.
        """
        return json.loads(re.sub(r"\\([0-9A-F]{2})", lambda code: chr(int(code[1], 16)), self.config))


def custom_calls(text: str) -> tuple[CustomCall, ...]:
    """Return the custom calls of a program in StableHLO, in order."""
    found = []
    for target, _, rest in _CALL.findall(text):
        if target not in _NO_KERNELS:
            config = _CONFIG.search(rest)
            operands = tuple(re.findall(_TYPE, rest.rpartition(" : ")[2].partition(" -> ")[0]))
            found.append(CustomCall(target, operands, config[1] if config else ""))
    return tuple(found)


def matrix_products(text: str) -> tuple[str, ...]:
    """Return the products of two matrices that are computed outside of kernels, each as its types."""
    found = []
    for batch_l, batch_r, sum_l, sum_r, left, right, result in _PRODUCT.findall(text):
        rows, cols = (_free(shape, batch, sums) for shape, batch, sums in ((left, batch_l, sum_l), (right, batch_r, sum_r)))
        if rows > 1 and cols > 1:
            found.append(f"{left} by {right} gives {result}")
    return tuple(found)


def _free(shape: str, batch: str, sums: str) -> int:
    """Return how large an operand is in the axes that are neither summed over nor shared."""
    used = {int(axis) for axis in f"{batch},{sums}".replace(" ", "").split(",") if axis}
    size = 1
    for axis, length in enumerate(shape.split("x")[:-1]):
        size *= 1 if axis in used else int(length)
    return size


def lowered(program: Any, arguments: tuple[Any, ...], device: DeviceProfile) -> str:
    """Return what `jax.jit` makes of a program for the platform of a device, as StableHLO.

    Raises:
        Exception: whatever tracing or lowering raises.
    """
    with cudnn_probes(device):
        return program.trace(*arguments).lower(lowering_platforms=(device.platform,)).as_text()
