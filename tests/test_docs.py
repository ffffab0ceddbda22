"""The snippets of the documentation run and print what is shown; generated pages are not stale."""

from __future__ import annotations

import contextlib
import io
import pathlib
import re
import subprocess
import sys
import types

import pytest

ROOT = pathlib.Path(__file__).parents[1]
ELSEWHERE = {"upstream.md"}
"""Its snippets change settings of the process; `test_upstream.py` runs them in others."""
PAGES = sorted([ROOT / "README.md", *(page for page in (ROOT / "docs").glob("*.md") if page.name not in ELSEWHERE)])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore::attention_ops.FallbackWarning")
@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_snippets(page, registry, monkeypatch):
    monkeypatch.chdir(ROOT)
    module = types.ModuleType(f"docs_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    printed = ""
    for language, body in BLOCK.findall(page.read_text()):
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(body, str(page), "exec"), module.__dict__)
            printed = out.getvalue()
        elif language == "text" and printed:
            for line in body.splitlines():
                assert line in printed, f"{page.name} shows {line!r}, printed was:\n{printed}"
            printed = ""


def test_the_support_matrix_is_not_stale():
    subprocess.run([sys.executable, "docs/make_tables.py", "--check"], cwd=ROOT, check=True)
