"""`attention-ops explain`: the plan of a request, said in text or by a config."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from attention_ops.cli import parameters
from attention_ops.cli.lazy import Refused, refusals

if TYPE_CHECKING:
    from attention_ops.cli.questions import Question


@click.command(short_help="Show which route a request takes, and why each other one does not.")
@click.argument("name", required=False, shell_complete=parameters.complete_name)
@parameters.config_option
@parameters.layer_option
@click.option("--batch", type=click.IntRange(min=1), metavar="B", help="With --config: batch size.  [default: 1]")
@click.option(
    "--length",
    type=parameters.Sizes("T[,S]", (1, 2), minimum=1),
    help="With --config: query and key length.  [default: its max_length]",
)
@click.option("--shape", type=parameters.Sizes("B,T,H,D", (4,)), help="The query: batch, length, heads, head dim.")
@click.option(
    "--kv", type=parameters.Sizes("S,K[,Dv]", (2, 3)), help="Keys and values: length, heads, value head dim.  [default: as query]"
)
@click.option("--dtype", type=click.Choice(parameters.DTYPES), help="[default: the config's, or bfloat16]")
@parameters.device_option
@parameters.settings_option
@click.option("--backend", type=click.Choice(parameters.BACKENDS), help="The forwards to look for.  [default: the device's]")
@click.option("--all", "every", is_flag=True, help="Every operation, side by side.")
@parameters.load_option
@parameters.json_option
def explain(name: str | None, every: bool, as_json: bool, device: str | None, **said: Any) -> None:
    """Show which route a request takes, and why each other one does not.

    NAME is an operation, an alias, one route (flash/native), or several with commas between, tried in order. Without it: the
    config's operation, else auto. The request is a config's (--config) or said in text (--shape, --kv, --set).

    \b
    attention-ops explain cudnn_flash --shape 1,4096,8,256 --kv 4096,4 --set causal=true --device a100
    attention-ops explain --config configs/gemma2_2b.yaml --layer local --device tpu-v5e

    Exit code 0: there is a route. 1: there is none. 2: the request is wrong.
    """
    from attention_ops.cli import plan_tables

    if every and name is not None:
        raise Refused(f"--all explains every operation, and the name {name!r} asks for one; leave one of them out")
    names = None if name is None else tuple(part.strip() for part in name.split(","))
    with _precision(said["dtype"]):
        questions = _questions(said)
        profile = parameters.profile_of(device, questions[0].metadata.backend)
        registered = parameters.operation_names(aliases=False) if every else []
        with refusals():
            if every:
                answers = [question.ask((one,), profile) for question in questions for one in registered]
            else:
                answers = [question.ask(names, profile) for question in questions]
    if as_json:
        click.echo(json.dumps({"plans": [answer.to_dict() for answer in answers]}, indent=2))
    else:
        (plan_tables.side_by_side if every else plan_tables.one_by_one)(answers)
    found = any if every else all
    click.get_current_context().exit(0 if found(answer.runs for answer in answers) else 1)


@contextlib.contextmanager
def _precision(dtype: str | None) -> Iterator[None]:
    """Let JAX know float64 while a float64 request is planned."""
    import jax

    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        yield


_INSTEAD = {
    "kv": "--length T,S",
    "layer": "--shape and --set",
    "batch": "--shape",
    "length": "--shape and --kv",
}


def _questions(said: Mapping[str, Any]) -> list[Question]:
    from attention_ops.cli import questions

    config, shape = said["config_file"], said["shape"]
    if (config is None) == (shape is None):
        which = "found both" if config else "found neither"
        raise Refused(f"a request is --config FILE or --shape B,T,H,D, {which}; for example --shape 1,4096,8,128")
    for option in ("kv",) if config else ("layer", "batch", "length"):
        if said[option] is not None:
            raise Refused(f"--{option} goes with {'--shape' if config else '--config'}; use {_INSTEAD[option]}")
    common = {name: said[name] for name in ("settings", "dtype", "backend")}
    with refusals():
        if shape is not None:
            return [questions.of_shape(shape, said["kv"], **common)]
        return questions.of_config(config, said["layer"], said["batch"], said["length"], **common)
