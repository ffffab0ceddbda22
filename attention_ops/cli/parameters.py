"""Parameters that several commands take: names, devices, sizes, files; with their completion."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from attention_ops.cli.lazy import Refused

if TYPE_CHECKING:
    from attention_ops.config import AttentionConfig
    from attention_ops.device import DeviceProfile

Completer = Callable[[click.Context, click.Parameter, str], list[str]]
DTYPES = ("float16", "bfloat16", "float32", "float64")
BACKENDS = ("cpu", "cuda", "gpu", "native", "rocm", "tpu")
_LARGEST = 2**31


class Sizes(click.ParamType):
    """Whole numbers with commas between."""

    name = "sizes"

    def __init__(self, written: str, counts: tuple[int, ...], minimum: int = 0):
        self.written, self.counts, self.minimum = written, counts, minimum

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return self.written

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        for part in parts:
            if not part.isdecimal() or not self.minimum <= int(part) < _LARGEST:
                self.fail(f"{part!r} is no whole number of {self.minimum} or more; write {self.written}", param, ctx)
        if len(parts) not in self.counts:
            self.fail(f"{value!r} has {len(parts)} numbers; write {self.written}", param, ctx)
        return tuple(map(int, parts))


def _completing(candidates: Callable[[], list[str]]) -> Completer:
    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        return [name for name in candidates() if name.startswith(incomplete)]

    return complete


def operation_names(aliases: bool = True) -> list[str]:
    from attention_ops.registry import OperationRegistry

    names = OperationRegistry.names()
    others = [alias for name in names for alias in OperationRegistry.get(name).aliases] if aliases else []
    return sorted({*names, *others})


def device_names() -> list[str]:
    from attention_ops.device import DeviceProfile

    return list(DeviceProfile.names())


def _settings() -> list[str]:
    from attention_ops.cli.saying import FLAG, SAYABLE

    return [f"{name}=true" if kind is FLAG else f"{name}=" for name, kind in SAYABLE.items()]


complete_name = _completing(operation_names)

device_option = click.option(
    "--device",
    metavar="NAME",
    shell_complete=_completing(device_names),
    help="A device that need not be here: a100, h100, tpu-v5e, ...  [default: the one here]",
)


class MeshAxes(click.ParamType):
    """`dp=2,tp=4`: the axes of a device mesh, which need not be here."""

    name = "AXIS=N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        sizes: dict[str, int] = {}
        for part in value.split(","):
            axis, _, size = (text.strip() for text in part.partition("="))
            if not axis.isidentifier() or not size.isdecimal() or int(size) < 1 or axis in sizes:
                self.fail(f"found {part!r}; allowed are axes of the mesh, each once, with their sizes, as in dp=2,tp=4,sp=2")
            sizes[axis] = int(size)
        return tuple(sizes.items())


mesh_option = click.option(
    "--mesh",
    type=MeshAxes(),
    help="A mesh of devices that need not be here; dp and fsdp split the batch, tp heads, sp the sequence.",
)
config_option = click.option(
    "--config", "config_file", metavar="FILE", type=click.Path(), help="A model config in YAML, as in configs/."
)
layer_option = click.option("--layer", metavar="LAYER", help="A layer of the config: its number, or its kind.")
settings_option = click.option(
    "--set",
    "settings",
    metavar="OPTION=VALUE",
    multiple=True,
    shell_complete=_completing(_settings),
    help="An option of the call, repeatable: causal=true, sliding_window=511,0, bias=1,1,T,S, softmax_aux=H, kv_lengths=yes.",
)
batch_option = click.option("--batch", type=click.IntRange(min=1), metavar="B", help="With --config: batch size.  [default: 1]")
length_option = click.option(
    "--length", type=Sizes("T[,S]", (1, 2), minimum=1), help="With --config: query and key length.  [default: its max_length]"
)
shape_option = click.option("--shape", type=Sizes("B,T,H,D", (4,)), help="The query: batch, length, heads, head dim.")
kv_option = click.option(
    "--kv", type=Sizes("S,K[,Dv]", (2, 3)), help="Keys and values: length, heads, value head dim.  [default: as query]"
)
dtype_option = click.option("--dtype", type=click.Choice(DTYPES), help="[default: the config's, or bfloat16]")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _load(ctx: click.Context, param: click.Parameter, modules: tuple[str, ...]) -> tuple[str, ...]:
    if ctx.resilient_parsing:
        return modules
    for module in modules:
        load(module)
    return modules


load_option = click.option(
    "--load",
    metavar="MODULE",
    multiple=True,
    callback=_load,
    is_eager=True,
    expose_value=False,
    help="Import a module, or a .py file, that registers operations. Repeatable.",
)


def load(module: str) -> None:
    """Import what registers a user's operations: a module, also one of the current folder, or a file."""
    is_file = module.endswith(".py")
    folder, name = os.path.split(module.removesuffix(".py")) if is_file else ("", module)
    if is_file and not os.path.isfile(module):
        raise Refused(f"--load {module}: no such file")
    if is_file and "." in name:
        raise Refused(f"--load {module}: a module's name has no dot, and {name!r} has one; rename it")
    try:
        holder = _holder(name, module if is_file else None)
        if holder is None:
            sys.path.insert(0, os.path.abspath(folder))
            importlib.import_module(name)
    except Exception as error:  # the user's own code may raise anything
        raise Refused(f"--load {module}: {type(error).__name__}: {error}") from error
    if holder is not None:
        raise Refused(f"--load {module}: the name {name!r} belongs to {holder}; rename your file")


def _holder(name: str, file: str | None) -> str | None:
    """Return what other module has the name: it would be imported in place of the user's, or hidden by it."""
    if name.partition(".")[0] in sys.stdlib_module_names:
        return "a module of Python"
    spec = None if file is None else importlib.util.find_spec(name)
    if file is None or spec is None or spec.origin is None:
        return None
    return None if os.path.realpath(spec.origin) == os.path.realpath(file) else spec.origin


def profile_of(device: str | None, backend: str | None = None) -> DeviceProfile:
    """Return the profile of `--device`, or of the device here."""
    from attention_ops.device import DeviceProfile, as_profile

    try:
        if device is not None:
            return as_profile(device)
        return DeviceProfile.current(None if backend in (None, "native") else backend)
    except ValueError as error:
        raise Refused(error) from error
    except RuntimeError as error:  # JAX has no such platform here, or cannot start it
        why = str(error.__cause__ or error).splitlines()[0]
        raise Refused(f"there is no {backend or 'usable'} device here ({why}); name one, for example --device a100") from error


def layers_of(config: AttentionConfig, layer: str | None) -> tuple[str | int | None, ...]:
    """Return the layer asked for, or one of each kind."""
    if layer is None:
        return config.kinds if len(config.kinds) > 1 else (None,)
    return (int(layer) if layer.isdecimal() else layer,)


@contextlib.contextmanager
def precision(dtype: str | None) -> Iterator[None]:
    """Let JAX know float64 while a float64 request is looked at."""
    import jax

    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        yield
