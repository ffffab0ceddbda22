"""From a name to an operation."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, overload

from attention_ops.device import DeviceProfile
from attention_ops.errors import DuplicateOperationError, UnknownOperationError, closest_first
from attention_ops.metadata import OperationMetadata
from attention_ops.operation import OperationImpl
from attention_ops.request import RequestSpec

if TYPE_CHECKING:
    from attention_ops.planner import Plan

ENTRY_POINTS = "attention_ops.operations"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.\-]*")
_Impl = TypeVar("_Impl", bound=type[OperationImpl])


class _State:
    """The registrations of this process. `generation` grows with each change, so that cached plans of before are not used."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.operations: dict[str, type[OperationImpl]] = {}
        self.aliases: dict[str, str] = {}
        self.unavailable: dict[str, str] = {}
        self.generation = 0
        self.loaded = False


_state = _State()


class OperationRegistry:
    """The operations by name: those of this package, those of installed plug-ins, and those registered by hand."""

    @overload
    @staticmethod
    def register(operation: _Impl) -> _Impl: ...

    @overload
    @staticmethod
    def register(*, name: str | None = None, override: bool = False) -> Callable[[_Impl], _Impl]: ...

    @staticmethod
    def register(operation: Any = None, *, name: str | None = None, override: bool = False) -> Any:
        """Register an operation class: `@register`, or `@register(name=..., override=True)`.

        Raises:
            DuplicateOperationError: the name or an alias belongs to another operation and `override` is not set.
            TypeError, ValueError: the class is no OperationImpl, defines no forward, or has no usable name.
        """
        if operation is None:
            return lambda cls: _add(_named(cls, name), override)
        return _add(operation, override)

    @staticmethod
    def unregister(name: str) -> None:
        """Forget an operation and its aliases."""
        with _state.lock:
            operation = OperationRegistry.get(name)
            _free(operation.name)
            _state.generation += 1

    @staticmethod
    def get(name: str) -> type[OperationImpl]:
        """Return the class registered under a name or an alias.

        Raises:
            UnknownOperationError: there is none; the message lists the names, the closest first.
        """
        if _find(name) is None:
            _load()
        operation = _find(name)
        if operation is None:
            raise UnknownOperationError(_unknown(name))
        return operation

    @staticmethod
    def create(name: str, metadata: OperationMetadata | None = None) -> OperationImpl:
        """Return the operation of that name, ready to call."""
        return OperationRegistry.get(name)(metadata)

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the registered names, sorted, without aliases."""
        _load()
        return tuple(sorted(_state.operations))

    @staticmethod
    def unavailable() -> dict[str, str]:
        """Return the plug-ins that could not be imported, each with its error."""
        _load()
        return dict(_state.unavailable)

    @staticmethod
    def plan(name: str, spec: RequestSpec, metadata: OperationMetadata, device: DeviceProfile) -> Plan:
        """Return the plan for a spec: which route would run on that device, and why."""
        from attention_ops.planner import make_plan

        return make_plan((name,), spec, metadata, device)


def generation() -> int:
    """Return the number of changes to the registry so far."""
    return _state.generation


def _find(name: str) -> type[OperationImpl] | None:
    return _state.operations.get(_state.aliases.get(name, name))


def _named(cls: Any, name: str | None) -> Any:
    """Return the class under another name: a subclass, so that one class can be registered under several."""
    if name is None or (isinstance(cls, type) and getattr(cls, "name", None) == name):
        return cls
    _check(cls, name)
    if not cls.__dict__.get("name"):
        cls.name = name
        cls.__init_subclass__()
        return cls
    return type(cls.__name__, (cls,), {"name": name, "aliases": (), "__module__": cls.__module__, "__doc__": cls.__doc__})


def _check(cls: Any, name: Any) -> None:
    if not isinstance(cls, type) or not issubclass(cls, OperationImpl):
        raise TypeError(f"an operation must be a subclass of OperationImpl, found {cls!r}")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{cls.__name__} has the name {name!r}; set `name` to a letter followed by letters, digits, '_', '-' or '.'"
        )


def _add(operation: Any, override: bool) -> Any:
    _check(operation, getattr(operation, "name", None))
    if not operation.routes and operation.candidates.__func__ is OperationImpl.candidates.__func__:
        raise TypeError(f"{operation.__name__} defines no forward; define at least forward_native(self, request)")
    for alias in operation.aliases:
        _check(operation, alias)
    with _state.lock:
        _load_builtin()
        for name in (operation.name, *operation.aliases):
            holder = _find(name)
            if holder is not None and not override and not _same_class(holder, operation):
                raise DuplicateOperationError(
                    f"the name {name!r} is taken by {holder.__module__}.{holder.__qualname__}; "
                    "choose another, or register(override=True) to replace it"
                )
        for name in (operation.name, *operation.aliases):
            _free(name)
        _state.operations[operation.name] = operation
        _state.aliases.update(dict.fromkeys(operation.aliases, operation.name))
        _state.generation += 1
    return operation


def _same_class(a: type, b: type) -> bool:
    """Whether b is a again: its module was reloaded, or a notebook cell was run twice."""
    return (a.__module__, a.__qualname__) == (b.__module__, b.__qualname__) and "<locals>" not in a.__qualname__


def _free(name: str) -> None:
    """Take a name from whoever has it; an operation that loses its name, rather than an alias, loses its aliases too."""
    _state.aliases.pop(name, None)
    _state.operations.pop(name, None)
    for alias in [alias for alias, target in _state.aliases.items() if target == name]:
        del _state.aliases[alias]


def _unknown(name: Any) -> str:
    if not isinstance(name, str):
        return f"an operation is chosen by its name, found {type(name).__name__}"
    known = [*_state.operations, *_state.aliases]
    broken = "".join(f"; plug-in {plugin!r} is unavailable: {error}" for plugin, error in _state.unavailable.items())
    return f"no operation is named {name!r}; known are {', '.join(closest_first(name, known))}{broken}"


_builtin_loading = False


def _load_builtin() -> None:
    global _builtin_loading
    if _builtin_loading or _state.loaded:
        return
    _builtin_loading = True
    package = importlib.import_module("attention_ops.operations")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def _load() -> None:
    """Import the operations of this package and of the plug-ins, once."""
    if _state.loaded:
        return
    with _state.lock:
        if _state.loaded:
            return
        _load_builtin()
        for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
            try:
                loaded = entry.load()
                if isinstance(loaded, type) and loaded.__dict__.get("name") not in _state.operations:
                    _add(loaded, override=False)
            except Exception as error:  # a plug-in may raise anything; it must not break the others
                _state.unavailable[entry.name] = f"{type(error).__name__}: {error}"
        _state.loaded = True
