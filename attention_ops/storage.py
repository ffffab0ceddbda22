"""Small JSON files that outlive a process: what was proven and what was measured on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import tempfile
import warnings
from typing import Any

ENVIRONMENT = "ATTENTION_OPS_CACHE_DIR"
"""The folder of the files; without it, the user's data folder as the operating system has it."""


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
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # ValueError: neither JSON nor text
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
