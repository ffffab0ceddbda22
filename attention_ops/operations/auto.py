"""auto: the operation for the device and the request."""

from __future__ import annotations

from attention_ops.device import DeviceProfile
from attention_ops.features import Feature
from attention_ops.metadata import OperationMetadata
from attention_ops.operation import OperationImpl
from attention_ops.registry import OperationRegistry
from attention_ops.request import RequestSpec

ORDER = {
    "cuda": ("cudnn_flash", "flash", "blocksparse", "vanilla"),
    "rocm": ("flash", "blocksparse", "vanilla"),
    "tpu": ("blocksparse", "flash", "vanilla"),
    "cpu": ("blocksparse", "flash", "vanilla"),
}
"""Operations in order of preference on each platform."""

DENSE_CELLS = {"gradient": 128 * 128, "forward": 256}
"""Up to this many logits per head, T * S, `vanilla` is tried first: one matrix product beats tiles.

Measured on a CPU by benchmarks/crossover.py (the table is in docs/performance.md) and taken for every platform: with a gradient
tiles win from about 160 x 160, in a forward alone from a step of decoding against some 256 keys.
"""


@OperationRegistry.register
class Auto(OperationImpl):
    """Takes the first operation of the platform's order that honours the request. Never warns: the choice is its purpose.

    Operations registered by others are never chosen; name them.
    """

    name = "auto"
    over_sequence = ("ring", "gather")

    @classmethod
    def candidates(cls, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> tuple[str, ...]:
        order = ORDER[device.platform]
        cells = DENSE_CELLS["gradient" if Feature.GRADIENT in spec.features else "forward"]
        return ("vanilla", *order) if cells >= spec.T * spec.S else order
