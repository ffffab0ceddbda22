"""Memory stays bounded however many plans are made: every cache has a size, and every table of a module a reason."""

from __future__ import annotations

import ast
import gc
import pathlib

import jax
import pytest

import attention_ops as ao
from attention_ops import api

PACKAGE = pathlib.Path(ao.__file__).parent
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}

GROWING = {
    "api.py: _reported": "drops the oldest at _REPORTED_AT_MOST entries, see below",
    "integrations/keras.py: _active": "one for each routing that is in force",
    "selftest/ingredients.py: INGREDIENTS": "filled while the module is imported",
    "selftest/numeric.py: _cache": "cleared at 512 entries",
    "storage.py: _snapshots": "one for each file that is watched, of which there are two",
}
"""The containers of modules that are empty at first, and what bounds them."""


def test_every_cached_function_has_a_size_or_no_parameters():
    for file, tree in TREES.items():
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef):
                continue
            for decorator in map(ast.unparse, function.decorator_list):
                where = f"{file}: {function.name}"
                assert decorator != "functools.lru_cache", f"{where} has the size of a default, say it"
                assert not decorator.startswith("functools.lru_cache(") or "maxsize=None" not in decorator, where
                assert decorator != "functools.cache" or not function.args.args, f"{where} keeps one for each argument"


def test_every_container_that_a_module_fills_is_bounded():
    found = set()
    for file, tree in TREES.items():
        for node in tree.body:
            value = getattr(node, "value", None) if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if value is not None and ast.unparse(value) in ("{}", "[]", "set()", "dict()", "list()"):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                found.add(f"{file}: {ast.unparse(target)}")
    assert found == set(GROWING)


def test_ten_thousand_plans_keep_no_more_objects_than_six_thousand():
    counts = []
    for number in range(10_000):
        x = jax.ShapeDtypeStruct((number + 1, 8, 1, 8), "float32")
        ao.plan("flash", x, x, x, device="cpu", sliding_window=(number, 0), softmax_scale=1.0 + number)
        if number in (5_999, 9_999):
            for _ in range(5):  # a tuple of tuples is no longer looked at once these are not
                gc.collect()
            counts.append(len(gc.get_objects()))
    assert counts[1] <= counts[0] + 100


@pytest.mark.filterwarnings("ignore::attention_ops.FallbackWarning")
def test_the_memory_of_reported_fallbacks_is_bounded(monkeypatch):
    monkeypatch.setattr(api, "_REPORTED_AT_MOST", 20)
    x = jax.ShapeDtypeStruct((1, 8, 1, 8), "float32")
    plan = ao.plan("cudnn_flash", x, x, x, device="cpu")
    for number in range(50):
        different = type(plan)(
            **{**{name: getattr(plan, name) for name in plan.__dataclass_fields__}, "route": f"flash/{number}"}
        )
        api._report(different, ao.OperationMetadata())
    assert len(api._reported) == 20
