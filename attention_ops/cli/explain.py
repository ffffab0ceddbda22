"""`attention-ops explain`: the plan of a request, said in text or by a config."""

from __future__ import annotations

import json
from typing import Any

import click

from attention_ops.cli import parameters
from attention_ops.cli.lazy import Refused, refusals


@click.command(short_help="Show which route a request takes, and why each other one does not.")
@click.argument("name", required=False, shell_complete=parameters.complete_name)
@parameters.config_option
@parameters.layer_option
@parameters.batch_option
@parameters.length_option
@parameters.shape_option
@parameters.kv_option
@parameters.dtype_option
@parameters.device_option
@parameters.mesh_option
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
    attention-ops explain ring --shape 8,4096,16,128 --mesh dp=2,tp=4,sp=2

    Exit code 0: there is a route. 1: there is none. 2: the request is wrong.
    """
    from attention_ops.cli import plan_tables, questions

    if every and name is not None:
        raise Refused(f"--all explains every operation, and the name {name!r} asks for one; leave one of them out")
    names = None if name is None else tuple(part.strip() for part in name.split(","))
    with parameters.precision(said["dtype"]):
        asked = questions.of_said(said)
        profile = parameters.profile_of(device, asked[0].metadata.backend)
        registered = parameters.operation_names(aliases=False) if every else []
        with refusals():
            if every:
                answers = [question.ask((one,), profile) for question in asked for one in registered]
            else:
                answers = [question.ask(names, profile) for question in asked]
    if as_json:
        click.echo(json.dumps({"plans": [answer.to_dict() for answer in answers]}, indent=2))
    else:
        (plan_tables.side_by_side if every else plan_tables.one_by_one)(answers)
    found = any if every else all
    click.get_current_context().exit(0 if found(answer.runs for answer in answers) else 1)
