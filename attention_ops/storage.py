"""Small JSON files that outlive a process: what was proven and what was measured on this machine."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
import json
import os
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

Entry = TypeVar("Entry")
Table = TypeVar("Table")

ENVIRONMENT = "ATTENTION_OPS_CACHE_DIR"
"""The folder of the files; without it, the user's data folder as the operating system has it."""


MAX_BYTES = 10_000_000
"""Largest file that is read."""


def folder() -> pathlib.Path:
    """Return the folder, which need not exist yet."""
    if stated := os.environ.get(ENVIRONMENT):
        return pathlib.Path(stated).expanduser()
    import platformdirs

    return pathlib.Path(platformdirs.user_data_dir("attention-ops", appauthor=False))


def path(name: str) -> pathlib.Path:
    """Return the file that holds `name`."""
    return folder() / f"{name}.json"


def load(name: str) -> dict[str, Any]:
    """Return what was saved under `name`; an empty dict when nothing was, or, with a warning, when it cannot be read."""
    file = path(name)
    try:
        with open(file, "rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            return _unreadable(file, f"it has more than {MAX_BYTES} bytes")
        found = json.loads(raw.decode("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:  # ValueError: neither JSON nor text
        return _unreadable(file, f"{type(error).__name__}: {error}")
    return found if isinstance(found, dict) else _unreadable(file, f"it holds a {type(found).__name__}, expected an object")


def _unreadable(file: pathlib.Path, why: str) -> dict[str, Any]:
    warnings.warn(f"{file} cannot be read and is ignored; the next save replaces it ({why})", UserWarning, stacklevel=3)
    return {}


def save(name: str, content: dict[str, Any]) -> pathlib.Path:
    """Replace what is saved under `name`; a reader finds the old file or the new one, never a part. Returns the file.

    Raises:
        OSError: the folder cannot be written.
        TypeError: a value has no form in JSON.
    """
    file = path(name)
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return file


def update(name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> pathlib.Path:
    """Save what `change` makes of what is saved under `name` now. Processes that update at once take turns. Returns the file.

    Raises:
        OSError, TypeError: as `save`.
    """
    with _turn(name):
        return save(name, change(load(name)))


@contextlib.contextmanager
def _turn(name: str) -> Iterator[None]:
    """Hold the lock of a file. Where the system has no `fcntl`, the last of two who write at once wins."""
    file = path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("fcntl") is None:
        yield
        return
    import fcntl

    with open(file.with_suffix(".lock"), "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the file is closed, also by a process that dies
        yield


def entries(name: str, content: Mapping[str, Any], make: Callable[..., Entry], command: str) -> list[Entry]:
    """Return the list that `name` keeps as values that `make` makes; what it refuses is left out, with one warning for all."""
    found, wrong = [], []
    kept = content.get("kept", [])
    for fields in kept if isinstance(kept, list) else [kept]:
        try:
            found.append(make(**fields))
        except (TypeError, ValueError) as error:
            wrong.append(str(error))
    if wrong:
        message = f"{path(name)}: {len(wrong)} entries are not in order and are ignored ({wrong[0]}); `{command}` replaces them"
        warnings.warn(message, UserWarning, stacklevel=3)
    return found


_snapshots: dict[str, tuple[Any, dict[str, Any]]] = {}


def snapshot(name: str) -> dict[str, Any]:
    """Return what `load` returns, the same object until the file changes, for some microseconds. Not to be changed."""
    file = _path(name, os.environ.get(ENVIRONMENT))
    try:
        found = os.stat(file)
        stamp = (file, found.st_ino, found.st_mtime_ns, found.st_size)
    except OSError:  # nothing was saved, or it cannot be reached
        stamp = None
    known = _snapshots.get(name)
    if known is None or known[0] != stamp:
        known = _snapshots[name] = stamp, {} if stamp is None else load(name)
    return known[1]


class Watched(Generic[Table]):
    """The table that a file holds: made anew when the file has changed, and the empty one inside `ignored`."""

    def __init__(self, name: str, make: Callable[[Mapping[str, Any]], Table]):
        self._name, self._make, self._empty = name, make, make({})
        self._is_ignored = contextvars.ContextVar(f"attention_ops.{name}.ignored", default=False)
        self._last: tuple[Any, Table] = (None, self._empty)

    def table(self) -> Table:
        """Return what is kept now. The file is read when it has changed; else this takes some microseconds."""
        if self._is_ignored.get():
            return self._empty
        content, last = snapshot(self._name), self._last
        if last[0] is not content:
            last = self._last = content, (self._make(content) if content else self._empty)
        return last[1]

    @contextlib.contextmanager
    def ignored(self) -> Iterator[None]:
        """Return the empty table to what runs inside, in this context."""
        token = self._is_ignored.set(True)
        try:
            yield
        finally:
            self._is_ignored.reset(token)


@functools.lru_cache(maxsize=64)
def _path(name: str, environment: str | None) -> str:
    return os.fspath(path(name))
