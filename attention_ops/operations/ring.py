"""ring: over a mesh axis of the sequence, keys and values travel while they are attended."""

from __future__ import annotations

from attention_ops.device import DeviceProfile
from attention_ops.metadata import OperationMetadata
from attention_ops.operation import OperationImpl
from attention_ops.registry import OperationRegistry
from attention_ops.request import RequestSpec


@OperationRegistry.register
class Ring(OperationImpl):
    """Attention whose keys go round the sequence axis of the mesh: each device holds one part of the sequence, O(T / n) memory.

    The parts are attended by `blocksparse` or `flash`, whichever takes them. On one device, and where the mesh has no sequence
    axis, it is those.
    """

    name = "ring"
    fallback = ("blocksparse", "flash", "vanilla")
    over_sequence = ("ring",)

    @classmethod
    def candidates(cls, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> tuple[str, ...]:
        return ("blocksparse", "flash")
