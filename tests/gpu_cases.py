"""Cases of the selftest for the GPU routes, run in the interpreter by tests/kernels and on the device by tests/gpu.

`/nan` fills the keys that nothing may attend, and the queries that may attend nothing, with NaN, Inf and huge numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attention_ops.metadata import OperationMetadata
from attention_ops.registry import OperationRegistry
from attention_ops.selftest import calls, numeric, table
from attention_ops.selftest.cases import make, parse

ALONE = (
    "causal/tiles",
    "window/tiles",
    "segments/tiles/nan",
    "lengths/tiles/nan",
    "mask/tiles/nan",
    "bias/tiles",
    "sinks/tiles",
    "soft_cap/tiles",
    "gqa/tiles",
    "value_dim/tiles",
    "causal+offset/tiles/nan",
    "bias_blocks/tiles/nan",
)
TOGETHER = tuple(make(parts.split("+"), sizes, dtype, "nan").name for parts, sizes, dtype in table.PAIRED)
OTHERS = (
    "mask_static+bias_2d+sinks/square/nan",
    "mask_or+bias_blocks+soft_cap/tiles/float16/nan",
    "mask_not+bias_head_keys+gqa/square/nan",
    "causal+window_left+mask_chunked+scale/tiles/bfloat16/nan",
    "causal+offset_negative/small/nan",
    "causal+kv_lengths+gqa/decode/nan",
    "mask_late/decode_long/nan",
    "kv_lengths_zero/tiles/nan",
    "plain/odd",
    "plain/deep/bfloat16/large",
    "causal+bias_lowest/small/float16",
    "sinks_strong/small",
    "sinks/small/bfloat16/cancel",
    "causal+mask_samples+bias_heads/small/float32/vmap",
    "window+sinks+gqa/small/float32/vmap_grad",
    "lengths+soft_cap+gqa/small/float32/remat",
)
CASES = (*ALONE, *TOGETHER, *OTHERS)


def failures(name: str, route: str, compiler_options: Mapping[str, Any]) -> list[str]:
    """Run a case on a route, forward and backward, and return what is further from the law than its tolerance."""
    case, operation = parse(name), OperationRegistry.get(route.partition("/")[0])
    supports = operation.routes[route.partition("/")[2]].declaration.supports
    target = calls.Target(route, supports, operation.tolerance, OperationMetadata())
    asks = calls.asks_of(case, supports)
    arguments = calls.arguments(case, [case.problem(0, sample) for sample in range(case.samples)], target, asks)
    programs = {arguments.key: calls.program(arguments.call, arguments.inputs, compiler_options)}
    checks = numeric.run(case, target, 0, programs, asks)
    assert checks
    return [check.sentence for check in checks if not check.passed]
