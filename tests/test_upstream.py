"""The faults of docs/upstream.md are still there, by the page's own snippets; when one has gone, so can what avoids it."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "upstream.md"
SNIPPET = re.compile(r"^```python\n(.*?)^```\n+^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
GONE = "When it is gone: "
NOT_RUN = "\nNot run: "

RUN = """
import contextlib, io, json, sys
answers = []
for snippet in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            exec(compile(snippet, "docs/upstream.md", "exec"), {"__name__": "upstream"})
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
    answers.append(printed.getvalue())
print(json.dumps(answers))
"""
"""A fault raises nothing that its snippet does not catch, so an exception is a difference like any other."""

QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def sections() -> dict[str, dict[str, str]]:
    """Return the text of each fault by its heading, by the heading of its section."""
    _, *parts = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    found = {}
    for part in parts:
        _, *faults = re.split(r"^### ", part, flags=re.MULTILINE)
        found[part.partition("\n")[0]] = {heading: text for heading, _, text in (fault.partition("\n") for fault in faults)}
    return found


SECTIONS = sections()
FAULTS = {heading: text for faults in SECTIONS.values() for heading, text in faults.items()}


@pytest.mark.parametrize("section", SECTIONS)
def test_faults_are_still_there(section, tmp_path):
    """One process for each section: its snippets change the settings of JAX and Keras."""
    snippets = {heading: SNIPPET.findall(text)[0] for heading, text in SECTIONS[section].items() if NOT_RUN not in text}
    own = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "XLA_FLAGS": QUICK}
    own |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false", "KERAS_BACKEND": "jax"}
    codes = json.dumps([code for code, _ in snippets.values()])
    done = subprocess.run([sys.executable, "-c", RUN], input=codes, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    changed = [
        f"{heading!r} prints {printed!r} and not {shown!r}. If the fault is gone upstream: {when_gone(heading)}"
        for (heading, (_, shown)), printed in zip(snippets.items(), answers, strict=True)
        if printed != shown
    ]
    assert not changed, "\n".join(changed)


def when_gone(heading: str) -> str:
    return FAULTS[heading].partition(GONE)[2].strip()


@pytest.mark.parametrize("heading", FAULTS)
def test_every_fault_is_run_or_says_why_not(heading):
    text = FAULTS[heading]
    assert "\nMeanwhile: " in text
    assert when_gone(heading)
    assert len(SNIPPET.findall(text)) == text.count("```python") <= 1
    assert ("```python" in text) or (NOT_RUN in text)
