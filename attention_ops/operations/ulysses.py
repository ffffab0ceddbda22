"""ulysses: over a mesh axis of the sequence, heads and sequence change places before and after."""

from __future__ import annotations

from attention_ops.device import DeviceProfile
from attention_ops.metadata import OperationMetadata
from attention_ops.operation import OperationImpl
from attention_ops.registry import OperationRegistry
from attention_ops.request import RequestSpec


@OperationRegistry.register
class Ulysses(OperationImpl):
    """Attention with whole sequences of fewer heads: the sequence axis of the mesh splits the heads while they are attended.

    The heads are attended by `blocksparse` or `flash`, whichever takes them. On one device, and where the mesh has no sequence
    axis, it is those.
    """

    name = "ulysses"
    fallback = ("blocksparse", "flash", "vanilla")
    over_sequence = ("ulysses",)

    @classmethod
    def candidates(cls, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> tuple[str, ...]:
        return ("blocksparse", "flash")
