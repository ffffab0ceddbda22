"""From a name to an operation."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import pkgutil
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from attention_ops.device import DeviceProfile
from attention_ops.errors import DuplicateOperationError, UnknownOperationError, closest_first
from attention_ops.metadata import BACKEND_NAMES, OperationMetadata
from attention_ops.operation import OperationImpl
from attention_ops.request import RequestSpec

if TYPE_CHECKING:
    from attention_ops.planner import Plan

ENTRY_POINTS = "attention_ops.operations"
SLOW = 10.0
"""Seconds after which a plug-in that is still being loaded is named in the log."""
MOST_NAMES = 50
"""Most names that the error about an unknown one lists."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.\-]*")
_Impl = TypeVar("_Impl", bound=type[OperationImpl])


class _State:
    """The registrations of this process. `generation` grows with each change, so that cached plans of before are not used.

    The lock is held while they are changed, and never while a module is imported: another thread may be importing that module,
    and register from within.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.operations: dict[str, type[OperationImpl]] = {}
        self.aliases: dict[str, str] = {}
        self.unavailable: dict[str, str] = {}
        self.generation = 0
        self.has_builtin = False
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
            return lambda cls: _add(cls, override, name)
        return _add(operation, override)

    @staticmethod
    def unregister(name: str) -> None:
        """Forget an operation and its aliases."""
        operation = OperationRegistry.get(name)
        with _state.lock:
            _free(operation.name)
            _state.generation += 1

    @staticmethod
    def get(name: str) -> type[OperationImpl]:
        """Return the class registered under a name or an alias.

        Raises:
            UnknownOperationError: there is none; the message lists the names, the closest first.
        """
        if not isinstance(name, str):
            raise UnknownOperationError(f"an operation is chosen by its name, found {type(name).__name__}")
        operation = _find(name)
        if operation is None:
            _load()
            with _state.lock:  # without it, a name that is just being replaced may be missed
                operation = _find(name)
        if operation is None:
            raise UnknownOperationError(_unknown(name))
        return operation

    @staticmethod
    def resolve(name: str) -> tuple[type[OperationImpl], str]:
        """Return the operation of a name as calls give it, and the backend if it is that of one route ("flash/native"), else "".

        Raises:
            UnknownOperationError: there is no such operation, or it has no such route.
        """
        stem, slash, backend = name.partition("/")
        operation = OperationRegistry.get(stem)
        if slash and backend not in operation.routes:
            routes = ", ".join(f"{stem}/{found}" for found in operation.routes)
            raise UnknownOperationError(
                f"no route is named {name!r}; {stem} has {routes or 'none of its own'} (of {', '.join(BACKEND_NAMES)})"
            )
        return operation, backend

    @staticmethod
    def create(name: str, metadata: OperationMetadata | None = None) -> OperationImpl:
        """Return the operation of that name, ready to call."""
        return OperationRegistry.get(name)(metadata)

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the registered names, sorted, without aliases."""
        _load()
        with _state.lock:
            return tuple(sorted(_state.operations))

    @staticmethod
    def unavailable() -> dict[str, str]:
        """Return the plug-ins that could not be loaded, each with its error."""
        _load()
        with _state.lock:
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
    _check(cls, getattr(cls, "name", None) if name is None else name)
    if name is None or cls.name == name:
        return cls
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


def _add(cls: Any, override: bool, name: str | None = None) -> Any:
    module = getattr(cls, "__module__", "")
    if not (module.startswith(f"{_BUILTIN}.") and _is_being_imported(module)):
        _load_builtin()
    with _state.lock:
        operation = _named(cls, name)
        _check_names(operation)
        for taken in (operation.name, *operation.aliases):
            holder = _find(taken)
            if holder is not None and not override and not _same_class(holder, operation):
                raise DuplicateOperationError(
                    f"the name {taken!r} is taken by {holder.__module__}.{holder.__qualname__}; "
                    "choose another, or register(override=True) to replace it"
                )
        for taken in (operation.name, *operation.aliases):
            _free(taken)
        _state.operations[operation.name] = operation
        _state.aliases.update(dict.fromkeys(operation.aliases, operation.name))
        _state.generation += 1
    return operation


def _check_names(operation: type[OperationImpl]) -> None:
    if not operation.routes and operation.candidates.__func__ is OperationImpl.candidates.__func__:  # type: ignore[attr-defined]
        raise TypeError(f"{operation.__name__} defines no forward; define at least forward_native(self, request)")
    for attribute in ("aliases", "fallback"):
        names = getattr(operation, attribute)
        if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"{operation.__name__}.{attribute} is {names!r}; allowed is a tuple of names, as in ('vanilla',)")
    for alias in operation.aliases:
        _check(operation, alias)


def _same_class(a: type, b: type) -> bool:
    """Whether b is a again: its module was reloaded, or a notebook cell was run twice."""
    return (a.__module__, a.__qualname__) == (b.__module__, b.__qualname__) and "<locals>" not in a.__qualname__


def _free(name: str) -> None:
    """Take a name from whoever has it; an operation that loses its name, rather than an alias, loses its aliases too."""
    _state.aliases.pop(name, None)
    operation = _state.operations.pop(name, None)
    for alias in () if operation is None else operation.aliases:
        if _state.aliases.get(alias) == name:
            del _state.aliases[alias]


def _unknown(name: str) -> str:
    with _state.lock:
        names, unavailable = [*_state.operations, *_state.aliases], dict(_state.unavailable)
    known = closest_first(name, names)
    more = f" and {len(known) - MOST_NAMES} more" if len(known) > MOST_NAMES else ""
    broken = "".join(f"; plug-in {plugin!r} is unavailable: {error}" for plugin, error in unavailable.items())
    return f"no operation is named {name!r:.80}; known are {', '.join(known[:MOST_NAMES])}{more}{broken}"


# ---------------------------------------------------------------- what is imported

_BUILTIN = "attention_ops.operations"


def _load_builtin() -> None:
    """Import the operations of this package. Several threads may: each waits for what another is importing."""
    if _state.has_builtin:
        return
    package = importlib.import_module(_BUILTIN)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{_BUILTIN}.{module.name}")
    _state.has_builtin = True


def _load() -> None:
    """Import the operations of this package and of the plug-ins, once."""
    if _state.loaded:
        return
    _load_builtin()
    waiting = False
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if _is_being_imported(getattr(entry, "module", "")):  # and asks for operations from within: it is loaded the next time
            waiting = True
        else:
            _load_plugin(entry)
    _state.loaded = not waiting


def _load_plugin(entry: importlib.metadata.EntryPoint) -> None:
    """Load a plug-in; one that fails is listed."""
    try:
        with _named_when_slow(entry.name):
            loaded = entry.load()
        if isinstance(loaded, type):
            if _state.operations.get(getattr(loaded, "name", "")) is not loaded:
                _add(loaded, override=False)
        elif not isinstance(loaded, ModuleType):
            found = type(loaded).__name__
            raise TypeError(
                f"the entry point is of type {found}; allowed are an operation class, and a module that registers some"
            )
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plug-in may raise anything, SystemExit included; it must not break the others
        sentence = next(line for line in traceback.format_exception_only(error) if not line.startswith(" "))
        with _state.lock:
            _state.unavailable[entry.name] = " ".join(sentence.split())
    else:
        with _state.lock:
            _state.unavailable.pop(entry.name, None)


def _is_being_imported(module: str) -> bool:
    return getattr(getattr(sys.modules.get(module), "__spec__", None), "_initializing", False)


@contextlib.contextmanager
def _named_when_slow(plugin: str) -> Iterator[None]:
    """Name a plug-in in the log if it is still being loaded after a while: it may hang."""
    message = "the plug-in %r, an entry point of %s, has been loading for %g seconds"
    logger = logging.getLogger("attention_ops")
    timer = threading.Timer(SLOW, logger.warning, (message, plugin, ENTRY_POINTS, SLOW))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
