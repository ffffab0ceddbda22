"""Choose and run attention in JAX by name: see `attention`, `plan` and `OperationRegistry`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention_ops import masks, rules
    from attention_ops.api import attention, plan, record_plans, use
    from attention_ops.config import AttentionConfig, load_config
    from attention_ops.derivatives import Derivatives
    from attention_ops.device import DeviceProfile, compiling_for
    from attention_ops.errors import (
        AttentionOpsError,
        ConfigError,
        DerivativeError,
        DuplicateOperationError,
        FallbackWarning,
        NoRouteError,
        UnknownOperationError,
    )
    from attention_ops.features import Feature
    from attention_ops.integrations.jax_nn import dot_product_attention
    from attention_ops.metadata import BlockSizes, OperationMetadata
    from attention_ops.operation import Estimate, OperationImpl, Tolerance, forward
    from attention_ops.planner import Decision, Plan
    from attention_ops.registry import OperationRegistry
    from attention_ops.request import AttentionOptions, AttentionOutput, AttentionRequest, RequestSpec

__version__ = "0.1.0"

_HOME = {
    "api": ("attention", "plan", "record_plans", "use"),
    "config": ("AttentionConfig", "load_config"),
    "derivatives": ("Derivatives",),
    "device": ("DeviceProfile", "compiling_for"),
    "errors": (
        "AttentionOpsError",
        "ConfigError",
        "DerivativeError",
        "DuplicateOperationError",
        "FallbackWarning",
        "NoRouteError",
        "UnknownOperationError",
    ),
    "features": ("Feature",),
    "integrations.jax_nn": ("dot_product_attention",),
    "metadata": ("BlockSizes", "OperationMetadata"),
    "operation": ("Estimate", "OperationImpl", "Tolerance", "forward"),
    "planner": ("Decision", "Plan"),
    "registry": ("OperationRegistry",),
    "request": ("AttentionOptions", "AttentionOutput", "AttentionRequest", "RequestSpec"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_MODULES = ("masks", "rules")
__all__ = [*_MODULE_OF, *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
