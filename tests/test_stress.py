"""The registry under stress: threads, imports that fail or meet each other, a thousand operations, names of all kinds."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from test_copies import VALUES

import attention_ops as ao
from attention_ops import registry as registry_module
from attention_ops.errors import closest_first, did_you_mean
from attention_ops.selftest import reference

SECONDS = 60
"""How long a thread may take before it counts as hanging."""


class Sevens(ao.OperationImpl):
    """Gives sevens, to be told apart."""

    name = "sevens"
    fallback = ("vanilla",)

    def forward_native(self, request: ao.AttentionRequest) -> Any:
        return jnp.full((*request.query.shape[:3], request.value.shape[3]), 7.0, request.query.dtype)


def together(*works: Callable[[], None]) -> None:
    """Run functions in threads that start at once and change places as often as they can; fail if one fails or hangs."""
    errors, barrier, interval = [], threading.Barrier(len(works)), sys.getswitchinterval()

    def run(work: Callable[[], None]) -> None:
        try:
            barrier.wait(SECONDS)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    assert not errors, errors


# ---------------------------------------------------------------- threads


def _inputs(seed: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal((1, 6, heads, 8)).astype(np.float32) for heads in (2, 1, 1))


def test_threads_register_plan_and_call_at_once(registry):
    def work(number: int) -> Callable[[], None]:
        def run() -> None:
            arrays = _inputs(number)
            for step in range(3):
                name = f"op_{number}_{step}"
                registry.register(name=name)(Sevens)
                assert name in registry.names()
                plan = ao.plan([name], *arrays[:1] * 3, differentiable=False)
                assert plan.route == f"{name}/native"
                impl = ("vanilla", "flash", "blocksparse")[(number + step) % 3]
                found = ao.attention(*arrays, impl=impl, causal=True).attention_outputs
                np.testing.assert_allclose(found, reference.attention(*arrays, {"causal": True}).output, atol=2e-6)
            sevens = ao.attention(*arrays[:1] * 3, impl=name, differentiable=False).attention_outputs
            assert (sevens == 7).all()

        return run

    together(*map(work, range(8)))
    assert {f"op_{number}_{step}" for number in range(8) for step in range(3)} <= set(registry.names())


def test_a_name_is_never_missed_while_it_is_replaced(registry):
    registry.register(Sevens)
    done = threading.Event()

    def replace() -> None:
        for _ in range(300):
            registry.register(override=True)(type("Sevens", (Sevens,), {"name": "sevens", "aliases": ("seven",)}))
        done.set()

    def look_up(name: str) -> Callable[[], None]:
        def run() -> None:
            while not done.is_set():
                assert registry.get(name).name == "sevens"

        return run

    registry.register(override=True)(type("Sevens", (Sevens,), {"name": "sevens", "aliases": ("seven",)}))
    together(replace, look_up("sevens"), look_up("seven"))


def test_threads_that_name_one_class_each_get_their_own(registry):
    class Nameless(ao.OperationImpl):
        def forward_native(self, request: ao.AttentionRequest) -> Any:
            return request.query

    names = [f"nameless_{number}" for number in range(16)]
    together(*(lambda name=name: registry.register(name=name)(Nameless) for name in names))
    assert [registry.get(name).routes["native"].name for name in names] == [f"{name}/native" for name in names]


# ---------------------------------------------------------------- plug-ins


@pytest.fixture
def plugins(registry, monkeypatch, tmp_path):
    """Make the registry see plug-ins, each a module with its source and what of it the entry point names."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry_module._state, "loaded", False)
    monkeypatch.setattr(registry_module._state, "unavailable", {})

    def install(**sources: str) -> None:
        entries = []
        for name, source in sources.items():
            target, _, source = source.partition("\n")
            tmp_path.joinpath(f"{name}.py").write_text(source)
            entries.append(importlib.metadata.EntryPoint(name, name + target, registry_module.ENTRY_POINTS))
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)

    yield install
    for entry in importlib.metadata.entry_points(group=registry_module.ENTRY_POINTS):
        sys.modules.pop(entry.module, None)


OPERATION = """
import attention_ops as ao
{before}
class Op(ao.OperationImpl):
    name = "{name}"
    def forward_native(self, request):
        return request.query
"""


def test_a_plug_in_that_raises_anything_is_named_and_breaks_nobody(registry, plugins):
    plugins(
        plug_import=":Op\nimport no_such_library",
        plug_exits=":Op\nraise SystemExit('no licence')",
        plug_panics=":Op\nclass Panic(BaseException): pass\nraise Panic('at line 3')",
        plug_mute=":Op\nclass Mute(Exception):\n    def __str__(self): raise ValueError\nraise Mute",
        plug_syntax=":Op\nclass Op(:",
        plug_lines=":Op\nraise RuntimeError('one\\n  two')",
        plug_gone=":Op\n",
        plug_function=":help\ndef help(): pass",
        plug_taken=":Op" + OPERATION.format(before="", name="flash"),
        plug_odd=":Op" + OPERATION.format(before="", name="a b"),
        plug_works=":Op" + OPERATION.format(before="", name="works"),
        plug_module=OPERATION.format(before="@ao.OperationRegistry.register", name="works_too"),
    )
    assert {"works", "works_too", "flash"} <= set(registry.names())
    assert registry.get("flash").__module__ == "attention_ops.operations.flash"
    assert registry.unavailable() == {
        "plug_import": "ModuleNotFoundError: No module named 'no_such_library'",
        "plug_exits": "SystemExit: no licence",
        "plug_panics": "plug_panics.Panic: at line 3",
        "plug_mute": "plug_mute.Mute: <exception str() failed>",
        "plug_syntax": "SyntaxError: invalid syntax",
        "plug_lines": "RuntimeError: one two",
        "plug_gone": "AttributeError: module 'plug_gone' has no attribute 'Op'",
        "plug_function": "TypeError: the entry point is of type function; allowed are an operation class, and a module that "
        "registers some",
        "plug_taken": "attention_ops.errors.DuplicateOperationError: the name 'flash' is taken by "
        "attention_ops.operations.flash.Flash; choose another, or register(override=True) to replace it",
        "plug_odd": "ValueError: Op has the name 'a b'; set `name` to a letter followed by letters, digits, '_', '-' or '.'",
    }
    with pytest.raises(ao.UnknownOperationError, match="plug-in 'plug_exits' is unavailable: SystemExit: no licence"):
        registry.get("nobody")


def test_an_interrupt_while_a_plug_in_is_loaded_is_the_users_and_the_next_call_loads_it(registry, plugins):
    first = "import builtins\nif not hasattr(builtins, 'plug_once'):\n    builtins.plug_once = True\n    raise KeyboardInterrupt"
    plugins(plug_interrupted=":Op" + OPERATION.format(before=first, name="interrupted"))
    with pytest.raises(KeyboardInterrupt):
        registry.names()
    assert "interrupted" in registry.names()
    assert registry.unavailable() == {}


def test_a_plug_in_may_ask_for_operations_while_it_is_imported(registry, plugins):
    asks = "assert 'flash' in ao.OperationRegistry.names()\n@ao.OperationRegistry.register"
    plugins(plug_asks=":Op" + OPERATION.format(before=asks, name="asks"))
    importlib.import_module("plug_asks")  # as a user may, before the registry does
    assert "asks" in registry.names()
    assert registry.unavailable() == {}


def test_a_plug_in_that_takes_long_is_named_in_the_log(registry, plugins, monkeypatch):
    monkeypatch.setattr(registry_module, "SLOW", 0.02)
    seen, records = threading.Event(), []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())
            seen.set()

    monkeypatch.setattr(sys, "plug_slow_may_end", seen, raising=False)
    plugins(plug_slow=":Op" + OPERATION.format(before="import sys\nassert sys.plug_slow_may_end.wait(60)", name="slow"))
    handler = Handler()
    logging.getLogger("attention_ops").addHandler(handler)
    try:
        assert "slow" in registry.names()
    finally:
        logging.getLogger("attention_ops").removeHandler(handler)
    assert records == ["the plug-in 'plug_slow', an entry point of attention_ops.operations, has been loading for 0.02 seconds"]


def test_a_thread_that_imports_a_plug_in_and_one_that_loads_it_do_not_wait_for_each_other(registry, plugins, monkeypatch):
    """The importing thread holds the lock of the module and wants to register; the loading one waits for the module."""
    importing, loading = threading.Event(), threading.Event()
    monkeypatch.setattr(sys, "plug_events", (importing, loading), raising=False)
    wait = "import sys\nsys.plug_events[0].set()\nassert sys.plug_events[1].wait(60)\n@ao.OperationRegistry.register"
    plugins(plug_met=":Op" + OPERATION.format(before=wait, name="met"))
    load = importlib.metadata.EntryPoint.load

    def noted(entry: importlib.metadata.EntryPoint) -> Any:
        loading.set()
        return load(entry)

    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", noted)
    monkeypatch.setattr(registry_module, "_is_being_imported", lambda module: False)

    def load_all() -> None:
        assert importing.wait(SECONDS)
        assert "met" in registry.names()

    together(lambda: importlib.import_module("plug_met"), load_all)


# ---------------------------------------------------------------- imports in a process of their own

SCRIPT = """
import dataclasses, importlib, json, pickle, sys, threading
import numpy as np
import attention_ops as ao

q = np.random.default_rng(0).standard_normal((1, 8, 2, 8)).astype(np.float32)
found, barrier = {}, threading.Barrier(4)

def first_call(name):
    barrier.wait()
    if name == "module":
        from attention_ops.operations.vanilla import Vanilla
        return
    found[name] = np.asarray(ao.attention(q, q, q, impl=name, causal=True).attention_outputs).tolist()

threads = [threading.Thread(target=first_call, args=(name,)) for name in ("vanilla", "flash", "blocksparse", "module")]
for thread in threads: thread.start()
for thread in threads: thread.join()

with open(sys.argv[1], "rb") as file:
    for name, value in pickle.load(file).items():
        made = dataclasses.replace(value) if dataclasses.is_dataclass(value) else value.model_copy()  # keeps no cached hash
        found[f"equal {name}"] = bool(made == value and hash(made) == hash(value))
        found[f"text {name}"] = str(value)

def call(name):
    import attention_ops
    return np.asarray(attention_ops.attention(q, q, q, impl=name, causal=True).attention_outputs).tolist()

old = ao.OperationRegistry.get("vanilla")
importlib.reload(ao)
found["after a reload of the package"] = call("vanilla")
importlib.reload(sys.modules["attention_ops.operations.vanilla"])
new = ao.OperationRegistry.get("vanilla")
found["after a reload of the operation"] = call("vanilla")
found["the class is the new one"] = new is not old and new is sys.modules["attention_ops.operations.vanilla"].Vanilla
found["names"] = ao.OperationRegistry.names()
for name in [name for name in sys.modules if name.partition(".")[0] == "attention_ops"]:
    del sys.modules[name]
found["imported anew"] = call("flash")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """What a new process with other hashes of texts finds: first calls from threads, pickles from here, reloads, new imports."""
    path = tmp_path_factory.mktemp("fresh") / "values.pkl"
    for value in VALUES.values():
        hash(value)  # as in use, with what it caches
    path.write_bytes(pickle.dumps(VALUES))
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    ran = subprocess.run([sys.executable, "-c", SCRIPT, path], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout)


@pytest.mark.parametrize(
    "how",
    [
        *("vanilla", "flash", "blocksparse"),
        *("after a reload of the package", "after a reload of the operation", "imported anew"),
    ],
)
def test_first_calls_from_threads_reloads_and_new_imports_give_the_law(fresh, how):
    q = np.random.default_rng(0).standard_normal((1, 8, 2, 8)).astype(np.float32)
    np.testing.assert_allclose(fresh[how], reference.attention(q, q, q, {"causal": True}).output, atol=2e-6)


def test_a_reload_registers_the_new_class_and_loses_none(fresh):
    assert fresh["the class is the new one"]
    assert set(fresh["names"]) >= {"auto", "blocksparse", "cudnn_flash", "flash", "sdpa", "vanilla"}


def test_what_was_pickled_is_equal_in_another_process_and_has_the_hash_of_what_is_made_there(fresh):
    for name, value in VALUES.items():
        assert fresh[f"equal {name}"], name
        assert fresh[f"text {name}"] == str(value) or name == "spec"  # which holds a set, in any order


# ---------------------------------------------------------------- many, and odd


def _steps(function: Callable[[], Any], everywhere: bool = False) -> int:
    """Return how many instructions of Python a call takes, in this package or everywhere."""
    steps = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal steps
        if not everywhere and "attention_ops" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(None)
    return steps


def test_a_thousand_operations_cost_no_more_each_than_ten(registry):
    def register(number: int) -> None:
        aliases = (f"a_{number}", f"b_{number}")
        registry.register(type("Many", (Sevens,), {"name": f"op_{number}", "aliases": aliases}))

    costs = {}
    for number in range(1000):
        costs[number] = _steps(lambda number=number: register(number)) if number in (10, 990) else register(number)
    assert costs[990] <= 1.05 * costs[10]
    assert _steps(lambda: registry.get("b_990")) <= 1.05 * _steps(lambda: registry.get("b_10"))
    assert len(registry.names()) >= 1000
    assert all(registry.get(f"a_{number}").name == f"op_{number}" for number in range(1000))
    x = jnp.ones((1, 4, 2, 8))
    assert ao.plan("op_999", x, x, x, differentiable=False).route == "op_999/native"
    with pytest.raises(ao.UnknownOperationError, match=r"no operation is named 'op_9999'; known are op_999, .* and 29\d\d more$"):
        registry.get("op_9999")
    for number in range(1000):
        registry.unregister(f"b_{number}")
    assert not set(registry.names()) & {f"op_{number}" for number in range(1000)}
    with pytest.raises(ao.UnknownOperationError):
        registry.get("a_5")


@pytest.mark.parametrize("search", [closest_first, did_you_mean])
def test_the_search_for_the_closest_name_grows_with_the_number_of_names_and_not_with_the_length_asked_for(search):
    few, many = ([f"operation_{number}" for number in range(count)] for count in (30, 300))
    costs = [_steps(lambda names=names: search("operatoin_7", names), everywhere=True) for names in (few, many)]
    assert costs[1] <= 11 * costs[0]
    costs = [_steps(lambda size=size: search("x" * size, few), everywhere=True) for size in (200, 200_000)]
    assert costs[1] <= 1.05 * costs[0]


@pytest.mark.parametrize("name", ["a", "Z9", "my_kernel-2.1", "A.b", "flash2", "x" * 200])
def test_names_that_are_allowed(registry, name):
    assert registry.get(registry.register(name=name)(Sevens).name).name == name
    assert registry.get(name).routes["native"].name == f"{name}/native"


@pytest.mark.parametrize(
    "name", ["", " ", "a b", "a/b", "/a", "a,b", "é", "名", "1a", "_a", "-a", ".a", "a\n", "a\x00", "a>b", 3, None, b"a", ("a",)]
)
def test_names_that_are_not_allowed(registry, name):
    odd = type("Odd", (Sevens,), {"name": name})
    with pytest.raises(ValueError, match="Odd has the name .*; set `name` to a letter followed by letters, digits, '_', '-' or"):
        registry.register(odd)
    with pytest.raises(ValueError, match="Even has the name .*; set `name` to a letter"):
        registry.register(type("Even", (Sevens,), {"name": "even", "aliases": (name,)})) if isinstance(name, str) else (
            registry.register(type("Even", (Sevens,), {"name": name}))
        )
    assert "even" not in registry.names()


@pytest.mark.parametrize("attribute", ["aliases", "fallback"])
@pytest.mark.parametrize("wrong", ["vanilla", None, (1,), {"vanilla"}])
def test_names_of_others_come_in_a_tuple(registry, attribute, wrong):
    with pytest.raises(TypeError, match=rf"Odd.{attribute} is .*; allowed is a tuple of names, as in \('vanilla',\)"):
        registry.register(type("Odd", (Sevens,), {"name": "odd", attribute: wrong}))
    assert "odd" not in registry.names()


@pytest.mark.parametrize("name", ["", " flash", "flash ", "FLASH", "flash\n", "vanilla,flash", "é", "../flash", "x" * 100_000])
def test_a_name_that_nobody_has_is_an_error_with_names_however_odd(registry, name):
    with pytest.raises(ao.UnknownOperationError, match="(?s)no operation is named .*; known are ") as error:
        registry.get(name)
    assert len(str(error.value)) < 2000
