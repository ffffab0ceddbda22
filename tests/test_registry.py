"""Names, aliases, plug-ins."""

from __future__ import annotations

import importlib.metadata
import threading

import jax.numpy as jnp
import pytest

import attention_ops as ao
from attention_ops import registry as registry_module

BUILTIN = {"auto", "blocksparse", "cudnn_flash", "flash", "sdpa", "vanilla"}


class Plain(ao.OperationImpl):
    """Gives the mean of the values, to be told apart."""

    name = "plain"
    aliases = ("simple",)
    fallback = ("vanilla",)

    def forward_native(self, request):
        return jnp.full((*request.query.shape[:3], request.value.shape[3]), 7.0, request.query.dtype)


def test_the_operations_of_the_package_are_there():
    assert set(ao.OperationRegistry.names()) >= BUILTIN
    for alias, name in {"splash": "blocksparse", "cudnn": "cudnn_flash"}.items():
        assert ao.OperationRegistry.get(alias).name == name


def test_file_name_class_name_and_docstring_agree():
    for name in BUILTIN:
        operation = ao.OperationRegistry.get(name)
        assert operation.__module__ == f"attention_ops.operations.{name}"
        assert operation.__doc__


def test_register_create_call_unregister(registry, qkv):
    assert registry.register(Plain) is Plain
    q, k, v = qkv(K=4)
    out = registry.create("simple", ao.OperationMetadata(runtime_dtype=jnp.bfloat16))(q, k, v, differentiable=False)
    assert out.attention_outputs.dtype == jnp.bfloat16
    assert (out.attention_outputs == 7).all()
    registry.unregister("simple")
    with pytest.raises(ao.UnknownOperationError, match="no operation is named 'plain'"):
        registry.get("plain")
    with pytest.raises(ao.UnknownOperationError, match="no operation is named 'simple'"):
        registry.get("simple")


def test_an_unknown_name_lists_the_closest_first():
    with pytest.raises(ao.UnknownOperationError, match="no operation is named 'blocksprase'; known are blocksparse, "):
        ao.OperationRegistry.get("blocksprase")
    with pytest.raises(ao.UnknownOperationError, match="chosen by its name, found int"):
        ao.OperationRegistry.get(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("taken", ["flash", "splash"])
def test_a_taken_name_is_refused_unless_overridden(registry, taken):
    class Mine(Plain):
        name = taken
        aliases = ()

    with pytest.raises(ao.DuplicateOperationError, match=f"the name '{taken}' is taken by attention_ops.operations"):
        registry.register(Mine)
    registry.register(override=True)(Mine)
    assert registry.get(taken) is Mine
    assert registry.get("blocksparse").name == "blocksparse"


def test_a_taken_alias_is_refused(registry):
    class Mine(Plain):
        name = "mine"
        aliases = ("cudnn",)

    with pytest.raises(ao.DuplicateOperationError, match="the name 'cudnn' is taken"):
        registry.register(Mine)
    assert "mine" not in registry.names()


def test_one_class_under_several_names(registry):
    registry.register(Plain)
    other = registry.register(name="other")(Plain)
    assert registry.get("other") is other
    assert issubclass(other, Plain)
    assert registry.get("plain") is Plain
    assert other.routes["native"].name == "other/native"


def test_a_class_without_a_name_is_named_when_registered(registry):
    @registry.register(name="given")
    class Nameless(ao.OperationImpl):
        def forward_native(self, request):
            return request.query

    assert registry.get("given") is Nameless
    assert Nameless.routes["native"].name == "given/native"


def test_what_is_no_operation_is_refused(registry):
    class NoForward(ao.OperationImpl):
        name = "no_forward"

    class NoName(ao.OperationImpl):
        def forward_native(self, request):
            return request.query

    with pytest.raises(TypeError, match="NoForward defines no forward"):
        registry.register(NoForward)
    with pytest.raises(ValueError, match="NoName has the name ''; set `name`"):
        registry.register(NoName)
    with pytest.raises(ValueError, match="has the name 'a/b'"):
        registry.register(name="a/b")(NoName)
    with pytest.raises(TypeError, match="must be a subclass of OperationImpl"):
        registry.register(dict)
    with pytest.raises(TypeError, match=r"forward_gppu is no forward that any device would run; allowed are forward_cuda"):
        type("Typo", (ao.OperationImpl,), {"forward_gppu": lambda self, request: None})


def test_declarations_are_checked():
    with pytest.raises(TypeError, match="supports holds 'causal'; allowed are members of Feature"):
        ao.forward(supports={"causal"})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rules holds <class"):
        ao.forward(rules=(ao.rules.Dtypes,))  # type: ignore[arg-type]


def test_an_undeclared_forward_supports_nothing():
    class Sub(ao.OperationRegistry.get("flash")):
        name = "sub"

        def forward_cuda(self, request):
            return request.query

    assert Sub.routes["native"].declaration.supports
    assert not Sub.routes["cuda"].declaration.supports


class _Entry:
    def __init__(self, name, load):
        self.name, self.load = name, load


def test_plug_ins_and_broken_plug_ins(registry, monkeypatch):
    def broken():
        raise ImportError("no module named cuda_thing")

    entries = [_Entry("broken", broken), _Entry("works", lambda: type("Works", (Plain,), {"name": "works", "aliases": ()}))]
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: entries if group == registry_module.ENTRY_POINTS else []
    )
    monkeypatch.setattr(registry_module._state, "loaded", False)
    monkeypatch.setattr(registry_module._state, "unavailable", {})
    assert "works" in registry.names()
    assert registry.unavailable() == {"broken": "ImportError: no module named cuda_thing"}
    with pytest.raises(
        ao.UnknownOperationError, match="plug-in 'broken' is unavailable: ImportError: no module named cuda_thing"
    ):
        registry.get("brokn")


def test_threads_register_and_look_up(registry):
    errors = []

    def work(index):
        try:
            for step in range(20):
                name = f"op_{index}_{step}"
                registry.register(name=name)(Plain)
                assert registry.get(name).name == name
                assert name in registry.names()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
