"""`attention-ops show mask`: a mask and its block map, as text or as a picture."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import click

from attention_ops.cli import parameters
from attention_ops.cli.lazy import Refused, refusals

if TYPE_CHECKING:
    from attention_ops.drawing import MaskPicture
    from attention_ops.request import RequestSpec

DEFAULT_LENGTH = 1024


@click.group(short_help="Draw a mask and its block map.")
def show() -> None:
    """Draw a mask and its block map."""


@show.command(short_help="Draw a mask and its block map: empty, partial and full tiles.")
@parameters.config_option
@parameters.layer_option
@click.option("--expr", metavar="MASK", help='A mask in words: "causal & window(511, 0)".')
@click.option(
    "--length",
    type=parameters.Sizes("T[,S]", (1, 2), minimum=1),
    help=f"Queries and keys.  [default: the config's max_length, or {DEFAULT_LENGTH}]",
)
@click.option("--query-offset", type=int, metavar="N", help="The position of the first query, where T != S.")
@click.option(
    "--block",
    type=parameters.Sizes("N[,N]", (1, 2), minimum=1),
    help="Tile size, query and key.  [default: the config's, or 128]",
)
@click.option("--out", type=click.Path(dir_okay=False), metavar="FILE", help="Write a .png, .svg or .pdf.  [default: text here]")
def mask(
    config_file: str | None,
    layer: str | None,
    expr: str | None,
    length: tuple[int, ...] | None,
    query_offset: int | None,
    block: tuple[int, ...] | None,
    out: str | None,
) -> None:
    """Draw a mask and its block map: what is visible, which tiles are empty, partial or full, and the cost that implies.

    The mask is a layer's (--config), or made of causal, window(left, right), prefix(n), chunked(size), lengths(q, kv) and
    segments(n, n, ...), joined by & | ~ and parentheses (--expr).

    \b
    attention-ops show mask --expr "causal & window(511, 0)" --length 4096 --out mask.png
    attention-ops show mask --config configs/gemma2_2b.yaml --layer local
    """
    if (config_file is None) == (expr is None):
        which = "found both" if expr else "found neither"
        raise Refused(f'a mask is --config FILE or --expr MASK, {which}; for example --expr "causal & window(511, 0)"')
    if layer is not None and config_file is None:
        raise Refused("--layer goes with --config; leave it out with --expr")
    if out is not None:
        _check_out(out)
    with refusals():
        if expr is not None:
            picture, more = _of_expression(expr, length, query_offset, block), ""
        else:
            picture, more = _of_config(str(config_file), layer, length, query_offset, block)
        picture.tiles  # noqa: B018  # what the text or file needs is judged here
    if out is None:
        from attention_ops.cli.console import emit

        emit(picture, *([more] if more else []))
        return
    try:
        picture.save(out)
    except OSError as error:
        raise Refused(f"{out} cannot be written: {error.strerror or error}") from None
    click.echo("\n".join([f"wrote {out}", *picture.summary(), *([more] if more else [])]))


def _check_out(out: str) -> None:
    from attention_ops.drawing import FORMATS

    if os.path.splitext(out)[1].lower() not in FORMATS:
        raise Refused(f"{out!r} is no picture file; allowed are {', '.join(FORMATS)}")
    folder = os.path.dirname(out) or "."
    if not os.path.isdir(folder):
        raise Refused(f"{out} cannot be written: there is no folder {folder}")
    if importlib.util.find_spec("matplotlib") is None:
        raise Refused("pictures need matplotlib, which is not installed: pip install 'attention-ops[plot]', or leave out --out")


def _of_expression(
    expr: str, length: tuple[int, ...] | None, query_offset: int | None, block: tuple[int, ...] | None
) -> MaskPicture:
    from attention_ops.cli.expression import parse
    from attention_ops.drawing import draw

    T, S = (length or (DEFAULT_LENGTH,))[0], (length or (DEFAULT_LENGTH,))[-1]
    title = " ".join(expr.split())
    return draw(parse(expr, T, S), T, S, block=_pair(block) or 128, query_offset=query_offset, title=title)


def _of_config(
    path: str, layer: str | None, length: tuple[int, ...] | None, query_offset: int | None, block: tuple[int, ...] | None
) -> tuple[MaskPicture, str]:
    from attention_ops.cli.questions import of_config
    from attention_ops.config import load_config
    from attention_ops.drawing import draw
    from attention_ops.request import make_request

    config = load_config(path)
    if layer is None and len(config.kinds) > 1:
        raise Refused(f"{path}: its layers differ; choose one: {', '.join(f'--layer {kind}' for kind in config.kinds)}")
    settings = () if query_offset is None else (f"query_offset={query_offset}",)
    question = of_config(path, layer, lengths=length, settings=settings)[0]
    spec = make_request(*question.arrays, question.options, question.metadata).spec
    sizes = question.metadata.block_sizes
    blocks = _pair(block) or (sizes.q or 128, sizes.kv or 128)
    what = "no mask" if spec.mask is None else str(spec.mask)
    title = f"{config.name}{'' if layer is None else f', layer {layer}'}: {what}"
    picture = draw(spec.mask, spec.T, spec.S, block=blocks, title=title)
    return picture, _flops(spec, picture)


def _flops(spec: RequestSpec, picture: MaskPicture) -> str:
    from attention_ops.cli.console import flops_text

    dense = 2 * spec.B * spec.H * spec.T * spec.S * (spec.D + spec.Dv)
    return (
        f"flops    {flops_text(dense * picture.visited)} instead of {flops_text(dense)}, forward, batch {spec.B}, {spec.H} heads"
    )


def _pair(block: tuple[int, ...] | None) -> tuple[int, int] | None:
    return None if block is None else (block[0], block[-1])
