"""`config`, `new`, `doctor`, the commands of other packages, completion, and the two ways in."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
import typing

import jax
import numpy as np
import pytest
from click.testing import CliRunner

import attention_ops as ao
from attention_ops.cli import COMMANDS, main, parameters
from attention_ops.config import Dtype
from attention_ops.metadata import BACKEND_NAMES

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "max_position_embeddings": 128,
}


def run(*args, cwd=ROOT, **variables):
    environment = {**os.environ, "PYTHONPATH": ROOT, **variables}
    return subprocess.run([sys.executable, *args], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def shell(script, cwd):
    """Run lines of a shell, `attention-ops` being the installed script, which does not look for modules where it is run."""
    scripts = sysconfig.get_path("scripts")
    environment = {**os.environ, "PYTHONPATH": ROOT, "JAX_PLATFORMS": "cpu", "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-e", "-o", "pipefail", "-c", script]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


# ---------------------------------------------------------------- the ways in


def test_help_is_fast_to_come_and_imports_no_jax():
    code = (
        "import sys, attention_ops.__main__ as command\n"
        "try: command.main(['--help'])\n"
        "finally: print(sorted({'jax', 'rich'} & set(sys.modules)))"
    )
    result = run("-c", code)
    assert result.stdout.splitlines()[-1] == "[]", result.stderr
    for name, _, summary in COMMANDS:
        assert f"  {name:<8}  {summary}" in result.stdout


@pytest.mark.parametrize(("name", "target", "summary"), COMMANDS)
def test_every_command_is_there_and_has_help(cli, name, target, summary):
    assert "Usage: attention-ops " + name in cli(name, "--help").stdout
    own = main.commands[name].load().short_help
    assert target.split(".")[1] != "cli" or own == summary


def test_the_choices_are_those_of_the_library():
    assert set(parameters.BACKENDS) == set(BACKEND_NAMES)
    assert set(parameters.DTYPES) == set(typing.get_args(Dtype))


def test_version(cli):
    assert ao.__version__ in cli("--version").stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full, whose every write fails, on this system")
@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("attention-ops explain flash --shape 1,8,2,8 > /dev/full", "No space left on device"),
        ("attention-ops list --help > /dev/full", "No space left on device"),
        ("attention-ops config check configs/gemma2_2b.yaml >&-", "standard output is closed"),
        ("python -m attention_ops.selftest --help > /dev/full", "No space left on device"),
        ("python -m attention_ops.bench --help > /dev/full", "No space left on device"),
    ],
)
def test_output_that_cannot_be_written_is_one_line(script, why):
    result = shell(script, cwd=ROOT)
    assert (result.returncode, result.stderr) == (1, f"Error: cannot write the output: {why}\n")


def test_a_reader_that_leaves_is_no_error():
    result = shell("set +o pipefail; attention-ops --help | true; python -m attention_ops.selftest --help | true", cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("command", ["list", "selftest"])
def test_a_file_with_the_name_of_another_module_is_refused(refused, registry, tmp_path, command):
    """It would not be imported, or in the place of that module."""
    for name, holder in {"queue": "a module of Python", "numpy": np.__file__}.items():
        file = tmp_path / f"{name}.py"
        file.write_text("raise SystemExit")
        expected = f"Error: --load {file}: the name {name!r} belongs to {holder}; rename your file"
        assert refused(command, "--load", str(file)) == expected
    assert "the name 'queue' belongs to a module of Python" in refused(command, "--load", "queue")
    dotted = tmp_path / "my.kern.py"
    dotted.touch()
    expected = f"Error: --load {dotted}: a module's name has no dot, and 'my.kern' has one; rename it"
    assert refused(command, "--load", str(dotted)) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("attention-ops ex", {"explain"}),
        ("attention-ops explain fl", {"flash", "flash_attn2"}),
        ("attention-ops explain --device tpu-v5", {"tpu-v5e", "tpu-v5p"}),
        ("attention-ops list --device h", {"h100", "h200"}),
        ("attention-ops explain --set ca", {"causal=true"}),
        ("attention-ops explain --set soft", {"softmax_aux=", "softmax_scale="}),
        ("attention-ops show m", {"mask"}),
    ],
)
def test_completion(words, expected):
    variables = {"_ATTENTION_OPS_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    result = CliRunner().invoke(main, [], prog_name="attention-ops", env=variables)
    assert {line.partition(",")[2] for line in result.stdout.splitlines()} == expected


# ---------------------------------------------------------------- config


def test_check_says_ok_of_each_file(cli):
    result = cli("config", "check", "configs/gemma2_2b.yaml", "configs/llama3_2_1b.yaml")
    assert result.stdout.splitlines()[0] == (
        "configs/gemma2_2b.yaml: ok, gemma2_2b: 26 layers (13 local, 13 global), blocksparse"
    )
    assert result.stdout.count(": ok, ") == 2


def test_check_says_what_is_wrong_in_which_line_and_checks_the_others(cli, tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: bad\nnum_layers: 1\nnum_heads: 4\nnum_kv_heads: 3\nhead_dim: 8\nmax_length: 8\ncausl: true\n")
    result = cli("config", "check", str(bad), "no/such.yaml", "configs/gemma2_2b.yaml", code=1)
    assert f"{bad}:4: num_kv_heads: found 3, which does not divide num_heads 4" in result.stderr
    assert f"{bad}:7: causl: is no key of a config; the nearest is 'causal'" in result.stderr
    assert "no/such.yaml: no such file" in result.stderr
    assert "2 of 3 files cannot be used" in result.stderr
    assert "configs/gemma2_2b.yaml: ok" in result.stdout


def test_check_refuses_a_route_that_is_not_there(cli, tmp_path):
    bad = tmp_path / "bad.yaml"
    fields = {"num_layers": 1, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "max_length": 8, "causal": "true"}
    bad.write_text("".join(f"{key}: {value}\n" for key, value in {"name": "bad", **fields, "operation": "flash/natve"}.items()))
    result = cli("config", "check", str(bad), code=1)
    assert f"{bad}:8: operation: no route is named 'flash/natve'; flash has " in result.stderr


def test_from_hf_to_the_terminal_and_to_a_file_that_check_accepts(cli, tmp_path):
    source, out = tmp_path / "config.json", tmp_path / "my model.yaml"
    source.write_text(json.dumps(LLAMA | {"some_new_key": 1}))
    result = cli("config", "from-hf", str(source), "--name", "mine")
    assert "name: mine" in result.stdout
    assert result.stderr.startswith("Warning: ")
    assert "some_new_key" in result.stderr
    written = cli("config", "from-hf", str(tmp_path), "--name", "mine", "--out", str(out)).stdout
    assert written == f"wrote {out}; next: attention-ops config check '{out}'\n"
    found = ao.load_config(out)
    assert (found.name, found.num_heads, found.head_dim, found.causal) == ("mine", 4, 16, True)
    again = ("config", "from-hf", str(source), "--out", str(out))
    assert f"{out} exists; choose another place, or replace it with --force" in cli(*again, code=2).stderr
    assert "wrote" in cli(*again, "--force").stdout
    cli("config", "check", str(out))


# ---------------------------------------------------------------- new


def test_what_new_writes_works_by_the_lines_it_prints(tmp_path):
    wrote = shell("attention-ops new my_kernel --dir 'a folder'", cwd=tmp_path).stdout.splitlines()
    assert wrote[:4] == ["wrote a folder/my_kernel.py", "wrote a folder/test_my_kernel.py", "", "next:"]
    tested, *steps = wrote[4:]
    assert steps[-1] == "  attention-ops selftest --load my_kernel --op my_kernel"
    result = shell("\n".join([f"{tested} -q -p no:cacheprovider", *steps]) + " --case causal", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    for words in ("6 passed", "my_kernel on cpu runs my_kernel/native", "1 passed of 1 routes"):
        assert words in result.stdout


@pytest.mark.parametrize("name", ["my-pkg", "class", "queue"])
def test_new_refuses_a_package_that_cannot_be_imported(refused, tmp_path, name):
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert refused("new", "mine", "--dir", str(package)) == (
        f"Error: the file would be the module {name}.mine, and {name!r} cannot be imported as a package; rename that "
        "folder, take its __init__.py away, or choose another --dir"
    )
    assert len(list(package.iterdir())) == 1


def test_new_overwrites_nothing(refused, tmp_path):
    for name in ("mine.py", "test_mine.py"):
        (tmp_path / name).write_text("mine")
        assert f"{tmp_path / name} exists and is not overwritten" in refused("new", "mine", "--dir", str(tmp_path))
        (tmp_path / name).unlink()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert "is a file" in refused("new", "mine", "--dir", str(tmp_path / "file"))


def test_in_a_package_the_operation_is_a_module_of_it(cli, tmp_path):
    package = tmp_path / "outer" / "inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    result = cli("new", "mine", "--dir", str(package / os.pardir / "inner"))
    assert "from outer.inner.mine import Mine\n" in (package / "test_mine.py").read_text()
    assert f"cd {tmp_path}\n" in result.stdout
    assert "selftest --load outer.inner.mine --op mine" in result.stdout


# ---------------------------------------------------------------- doctor


def test_doctor_has_what_an_issue_needs(cli, monkeypatch):
    jax.devices()  # XLA reads its flags when it starts, and ends the process at one that it does not know
    monkeypatch.setenv("XLA_FLAGS", "--xla_something")
    result = cli("doctor")
    assert "\x1b" not in result.stdout
    for words in (
        f"  attention_ops  {ao.__version__}\n",
        f"  jax            {jax.__version__}\n",
        "  1 x              cpu\n",
        "  ATTENTION_OPS_IMPL            not set\n",
        "  XLA_FLAGS                     --xla_something\n",
        "choices: decoding, one token\n",
        "  no name given  blocksparse/native (auto: name chosen by default)\n",
        "flash/native, a fallback: has no route for cpu, only for cuda\n",
    ):
        assert words in result.stdout


def raising(error):
    def function(*args):
        raise error

    return function


def test_doctor_reports_what_fails_and_goes_on(cli, monkeypatch):
    class Broken:
        name, dist = "mine", None

        def load(self):
            raise ImportError("libmine.so\nis not there")

    from attention_ops import registry as module

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Broken()])
    monkeypatch.setattr(module._state, "loaded", False)
    monkeypatch.setattr(module._state, "unavailable", {})
    monkeypatch.setattr(jax, "devices", raising(RuntimeError("no devices\nat all")))
    monkeypatch.setattr(importlib.metadata, "version", raising(importlib.metadata.PackageNotFoundError("any")))
    monkeypatch.setenv("ATTENTION_OPS_IMPL", "vanila")
    printed = cli("doctor", "--load", "no_such_module").stdout
    assert "  jaxlib         not installed\n" in printed
    assert "  default backend  cpu\n  failed           RuntimeError: no devices at all\n" in printed
    assert "  failed  --load no_such_module: ModuleNotFoundError" in printed
    assert "  mine        unavailable, ImportError: libmine.so is not there\n" in printed
    assert "  no name given  failed, UnknownOperationError: ATTENTION_OPS_IMPL=vanila: no operation is named 'vanila'" in printed
    assert "  vanilla        vanilla/native\n" in printed
