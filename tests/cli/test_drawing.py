"""Pictures of masks: the counts are those of the dense mask, the language is parsed and never run."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from attention_ops import masks
from attention_ops.cli.expression import FORMS, parse
from attention_ops.drawing import draw
from attention_ops.masks import EMPTY, FULL, PARTIAL

RNG = np.random.default_rng(0)
PICTURES = {
    "causal": (masks.Causal(), 37, 37),
    "window": (masks.Causal() & masks.Window(7, 0), 40, 40),
    "open window": (masks.Window(3, None), 20, 33),
    "prefix or chunks": (masks.PrefixLM(5) | masks.Chunked(8), 29, 29),
    "not": (~masks.Causal(), 21, 21),
    "segments": (masks.Segments(jnp.asarray([[0] * 9 + [1] * 14 + [-1] * 4])), 27, 27),
    "lengths": (masks.Lengths(jnp.asarray([5, 11]), jnp.asarray([9, 17])), 16, 24),
    "static array": (masks.Dense(RNG.random((23, 19)) > 0.5), 23, 19),
    "traced array": (masks.Dense(jnp.asarray(RNG.random((2, 3, 23, 19)) > 0.9)), 23, 19),
}


@pytest.mark.parametrize("name", PICTURES)
def test_the_counts_are_those_of_the_dense_mask(name):
    mask, T, S = PICTURES[name]
    mask = mask.resolve(2)
    dense = np.asarray(mask.dense(T, S))
    batch, head = dense.shape[0] - 1, dense.shape[1] - 1
    picture = draw(mask, T, S, block=(8, 16), batch=batch, head=head)
    dense = np.broadcast_to(dense[batch, head], (T, S))
    assert picture.visible == dense.sum()
    for (row, col), kind in np.ndenumerate(picture.tiles):
        tile = dense[row * 8 : row * 8 + 8, col * 16 : col * 16 + 16]
        assert kind != FULL or tile.all()
        assert kind != EMPTY or not tile.any()
    assert picture.visited >= dense.mean()


def test_the_cost_is_that_of_the_tiles_that_are_not_empty():
    picture = masks.Causal().show(100, block=40)
    assert picture.tiles.tolist() == [[PARTIAL, EMPTY, EMPTY], [FULL, PARTIAL, EMPTY], [FULL, FULL, PARTIAL]]
    assert picture.visited == (100 * 100 - 40 * 40 - 2 * 40 * 20) / 100**2
    assert picture.summary() == [
        "tiles    3 x 3 of 40 x 40: 3 full, 3 partial, 3 empty",
        "visible  50.5 % of T * S, 5,050 of 10,000",
        "cost     a kernel that skips empty tiles computes 68 % of T * S: 1.47 times fewer flops than dense",
    ]


def test_short_masks_are_shown_cell_by_cell_and_long_ones_by_tiles():
    text = str(masks.Causal().show(3))
    assert text.splitlines()[:5] == ["causal   T 3, S 3", "", "██· ·", "████·", "██████"]
    long = masks.Causal().show(1_000, block=10)
    assert "each 3 x 3 tiles of 10 x 10" in str(long)
    assert repr(long) == str(long)
    assert "<pre" in long._repr_html_()


def test_rich_text_fits_the_width_and_the_encoding():
    from rich.console import Console

    console = Console(width=30, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(masks.Causal().show(8192))
    picture = [line for line in capture.get().splitlines() if line and set(line) <= set("█▒· ")]
    assert len(picture) == 13
    assert max(map(len, picture)) <= 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"T": 4, "S": 8}, "must state query_offset"),
        ({"T": 0}, "T is 0, S 0, block"),
        ({"T": 10**7, "block": 8}, "tiles are more than 4194304, the limit; choose a larger block"),
    ],
)
def test_what_cannot_be_drawn(arguments, message):
    with pytest.raises(ValueError, match=message):
        masks.Causal().show(**arguments)


def test_a_batch_row_that_is_not_there():
    with pytest.raises(ValueError, match="batch is 2; the mask has 2, so allowed are 0 to 1"):
        str(masks.Lengths(kv=jnp.asarray([3, 5])).show(8, batch=2))


def test_the_picture_is_written_and_has_the_colours_of_the_tiles(cli, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    out = tmp_path / "mask.png"
    result = cli("show", "mask", "--expr", "causal & window(511, 0)", "--length", "4096", "--out", str(out))
    assert result.stdout.splitlines()[:2] == [f"wrote {out}", "tiles    32 x 32 of 128 x 128: 90 full, 60 partial, 874 empty"]
    pixels = (image.imread(out)[..., :3] * 255).round().astype(int)
    for colour in ((0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00), (0xEE, 0xEE, 0xEE)):
        assert (pixels == colour).all(-1).mean() > 0.005
    for suffix in (".svg", ".pdf"):
        masks.Causal().show(64).save(tmp_path / f"mask{suffix}")
        assert (tmp_path / f"mask{suffix}").stat().st_size > 1000


def test_the_mask_of_a_layer_with_its_blocks_and_its_flops(cli):
    printed = cli("show", "mask", "--config", "configs/gemma2_2b.yaml", "--layer", "0").stdout
    assert printed.startswith("gemma2_2b, layer 0: causal & window(4095, 0)   T 8192, S 8192\n")
    assert "tiles    16 x 16 of 512 x 512: 84 full, 24 partial, 148 empty\n" in printed
    assert "flops    232 GFLOP instead of 550 GFLOP, forward, batch 1, 8 heads" in printed
    printed = cli("show", "mask", "--config", "configs/vit_b16.yaml", "--block", "64,32").stdout
    assert "no mask" in printed
    assert "of 64 x 32" in printed
    assert "as many flops as dense" in printed


# ---------------------------------------------------------------- the language


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("causal", masks.Causal()),
        ("causal()", masks.Causal()),
        (" causal &\n window( 511 , 0 ) ", masks.Causal() & masks.Window(511, 0)),
        ("window(3)", masks.Window(3, 3)),
        ("window(left=3, right=none)", masks.Window(3, None)),
        ("window(None, 2)", masks.Window(None, 2)),
        ("prefix(4) | ~chunked(8) & causal", masks.PrefixLM(4) | (~masks.Chunked(8) & masks.Causal())),
        ("(prefix(4) | causal) & chunked(8)", (masks.PrefixLM(4) | masks.Causal()) & masks.Chunked(8)),
    ],
)
def test_the_language(text, mask):
    assert parse(text, 16, 16) == mask


def test_lengths_and_segments_are_the_rows_they_say():
    lengths = np.asarray(parse("lengths(kv=5) & lengths(3)", 8, 8).dense(8, 8))[0, 0]
    assert lengths.sum() == 15
    assert lengths[:3, :5].all()
    segments = np.asarray(parse("segments(2, 3)", 6, 6).dense(6, 6))[0, 0]
    assert segments.sum() == 4 + 9
    assert not segments[5].any()


ERRORS = {
    "": "invalid syntax",
    "causal &": "invalid syntax at character 8",
    "causal & (window(3)": "'(' was never closed at character 10",
    "causal & windw(3)": "'windw', at character 10 of 'causal & windw(3)', is no mask. Did you mean 'window'?",
    "causal and window(3)": "'and', at character 8 of 'causal and window(3)', is no operator here; write &",
    "causal or chunked(3)": "'or', at character 8 of 'causal or chunked(3)', is no operator here; write |",
    "not causal": "'not', at character 1 of 'not causal', is no operator here; write ~",
    "causal + 1": "'causal + 1', at character 1, is no mask",
    "causal & 1": "'1', at character 10 of 'causal & 1', is no mask",
    "window": "'window', at character 1, has the wrong arguments; write window(left, right)",
    "window(1, 2, 3)": "has the wrong arguments; write window(left, right)",
    "window(1, wide=2)": "has the argument 'wide'; write window(left, right)",
    "window(1, left=2)": "has the argument 'left'; write window(left, right)",
    "window(left=1, left=2)": "'window(left=1, left=2)', at character 1, has left twice; keep one",
    "window(-1)": "'-1', at character 8 of 'window(-1)', is below 0",
    "window(1.5)": "'1.5', at character 8 of 'window(1.5)', is no whole number, nor none",
    "window(9999999999)": "is more than 2147483647, the largest number",
    "window(True)": "'True', at character 8 of 'window(True)', is no whole number",
    "chunked(0)": "'chunked(0)', at character 1, cannot be: chunk size is 0; allowed is an integer of 1 or more",
    "prefix(none)": "'prefix(none)', at character 1, has none for a number; write prefix(n)",
    "lengths(17)": "cannot be: q is 17, more than the 16 there are",
    "segments(9, 9)": "cannot be: the segments have 18 positions, more than the 16 there are",
    "segments()": "has the wrong arguments; write segments(n, n, ...)",
    "window(*[1])": "is no whole number, nor none",
    "window(**{})": "is no whole number, nor none",
    "é & causal": "'é', at character 1 of 'é & causal', is no mask",
    "causal & é(1)": "'é', at character 10 of 'causal & é(1)', is no mask",
    "__import__('os').system('true')": "is no mask",
    "__import__('os')": "is no whole number",
    "(lambda: causal)()": "is no mask",
    "[causal for _ in causal]": "is no mask",
    "causal if causal else causal": "is no mask",
    "~" * 1900 + "causal": "nested too deeply",
    "causal & " * 300: "the mask has 2700 characters, more than 2000, the limit",
    "(" * 300 + "causal" + ")" * 300: "too many nested parentheses",
    "causal\0": "is no mask: a null character at character 7",
}


@pytest.mark.parametrize("text", ERRORS, ids=lambda text: ascii(text)[:40])
def test_an_error_of_the_language_points_at_the_token_and_lists_what_is_allowed(text):
    with pytest.raises(ValueError) as caught:
        parse(text, 16, 16)
    message = str(caught.value)
    assert ERRORS[text] in message
    assert len(text) > 2000 or all(form.written in message for form in FORMS.values())
