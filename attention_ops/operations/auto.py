"""auto: the operation for the device and the request."""

from __future__ import annotations

from attention_ops.device import DeviceProfile
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

DENSE_CELLS = 128 * 128
"""Up to this many logits per head, T * S, `vanilla` is tried first on every platform: one matrix product beats tiles."""


@OperationRegistry.register
class Auto(OperationImpl):
    """Takes the first operation of the platform's order that honours the request. Never warns: the choice is its purpose.

    Operations registered by others are never chosen; name them.
    """

    name = "auto"

    @classmethod
    def candidates(cls, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> tuple[str, ...]:
        order = ORDER[device.platform]
        return ("vanilla", *order) if spec.T * spec.S <= DENSE_CELLS else order
