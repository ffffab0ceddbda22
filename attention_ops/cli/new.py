"""`attention-ops new`: a starting operation and its test."""

from __future__ import annotations

import importlib.resources
import importlib.util
import keyword
import os
import pathlib
import re
import shlex
import string
import sys

import click

from attention_ops.cli.lazy import Refused

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@click.command(short_help="Write a starting operation and its test.")
@click.argument("name")
@click.option("--dir", "folder", type=click.Path(file_okay=False), default=".", show_default=True, help="Where to write them.")
def new(name: str, folder: str) -> None:
    """Write NAME.py, an operation that works, and test_NAME.py, its proof, to start from.

    Nothing that is there is overwritten.
    """
    _check_name(name)
    place = pathlib.Path(folder)
    files = {place / f"{name}.py": "operation.txt", place / f"test_{name}.py": "test_operation.txt"}
    for path in files:
        if path.exists():
            raise Refused(f"{path} exists and is not overwritten; choose another name or --dir")
    _check_free(name)
    root, module = _module(pathlib.Path(os.path.abspath(place)), name)
    words = {"name": name, "class_name": "".join(part.capitalize() for part in name.split("_")), "module": module}
    templates = importlib.resources.files("attention_ops.cli") / "templates"
    try:
        place.mkdir(parents=True, exist_ok=True)
        for path, template in files.items():
            with path.open("x", encoding="utf-8") as file:
                file.write(string.Template((templates / template).read_text("utf-8")).substitute(words))
    except OSError as error:
        raise Refused(f"{error.filename or place} cannot be written: {error.strerror or error}") from None
    click.echo("".join(f"wrote {path}\n" for path in files) + "\nnext:")
    _next_steps(name, module, root, list(files)[1])


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        why = "a keyword of Python" if keyword.iskeyword(name) else "no name for a file and an operation"
        fixed = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
        hint = f", for example {fixed}" if _NAME.fullmatch(fixed) and not keyword.iskeyword(fixed) else ""
        raise Refused(f"{name!r} is {why}; use a small letter, then small letters, digits and _{hint}")
    if name in sys.stdlib_module_names or name.startswith("test_"):
        why = (
            "a module of Python, which the new file would hide"
            if name in sys.stdlib_module_names
            else "taken for a test by pytest"
        )
        raise Refused(f"{name!r} is {why}; use another, for example {name.removeprefix('test_')}_attention")


def _check_free(name: str) -> None:
    from attention_ops.errors import UnknownOperationError
    from attention_ops.registry import OperationRegistry

    try:
        holder = OperationRegistry.get(name)
    except UnknownOperationError:
        if importlib.util.find_spec(name) is not None:
            message = (
                f"{name!r} is an installed package, which the new file would hide; use another, for example {name}_attention"
            )
            raise Refused(message) from None
        return
    raise Refused(f"{name!r} is taken by {holder.__module__}.{holder.__qualname__}; use another, for example my_{name}")


def _module(place: pathlib.Path, name: str) -> tuple[pathlib.Path, str]:
    """Return where to import from and as what: in a package, the file is a module of it."""
    parts = [name]
    while (place / "__init__.py").exists():
        parts.insert(0, place.name)
        place = place.parent
    module = ".".join(parts)
    for part in parts:
        if not part.isidentifier() or keyword.iskeyword(part) or (part is parts[0] and part in sys.stdlib_module_names):
            raise Refused(
                f"the file would be the module {module}, and {part!r} cannot be imported as a package; rename that folder, "
                "take its __init__.py away, or choose another --dir"
            )
    return place, module


def _next_steps(name: str, module: str, root: pathlib.Path, test: pathlib.Path) -> None:
    steps = [
        f"pytest {shlex.quote(str(test))}",
        f"attention-ops explain {name} --load {module} --shape 1,1024,8,64 --set causal=true",
        f"attention-ops selftest --load {module} --op {name}",
    ]
    away = os.path.relpath(root)
    if away != ".":
        steps.insert(1, f"cd {shlex.quote(str(root) if away.startswith(os.pardir) else away)}")
    click.echo("".join(f"  {step}\n" for step in steps), nl=False)
