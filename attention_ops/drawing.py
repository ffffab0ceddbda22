"""Pictures of masks: which queries see which keys, and which tiles a blockwise kernel visits. Text, rich text, or a file."""

from __future__ import annotations

import dataclasses
import functools
import html
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_ops import integers
from attention_ops.masks import EMPTY, FULL, PARTIAL, Mask, Tile, Tiling
from attention_ops.request import default_offset

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

MAX_TILES = 2**22
"""Most tiles of a block map. More would be no picture."""
FORMATS = (".pdf", ".png", ".svg")

_CELLS_ACROSS, _CELLS_DOWN = 48, 32  # up to this size the text shows each query and key
_TILES_ACROSS = 40
_PIXELS = 512
_GLYPHS = {EMPTY: "· ", PARTIAL: "▒▒", FULL: "██"}
_ASCII = {EMPTY: ". ", PARTIAL: "++", FULL: "##"}
_STYLES = {EMPTY: "dim", PARTIAL: "yellow", FULL: "blue"}
_COLOURS = {EMPTY: "#eeeeee", PARTIAL: "#e69f00", FULL: "#0072b2"}
_NAMES = {FULL: "full", PARTIAL: "partial", EMPTY: "empty"}


def draw(
    mask: Mask | None,
    T: int,
    S: int,
    *,
    block: int | tuple[int, int] = 128,
    query_offset: Any = None,
    batch: int = 0,
    head: int = 0,
    title: str = "",
) -> MaskPicture:
    """Return the picture of a mask over T queries and S keys, of one batch row and head. None is no mask.

    `block` is the size of the tiles, or (block_q, block_kv). A mask of positions with T != S needs a `query_offset`, as a
    call does. Run-time data must be there, not traced. Cost: the cells of the partial tiles.
    """
    block_q, block_kv = (block, block) if isinstance(block, int) else block
    if min(T, S, block_q, block_kv) < 1:
        raise ValueError(f"T is {T}, S {S}, block ({block_q}, {block_kv}); allowed are 1 or more")
    tiling = Tiling(T, S, min(block_q, T), min(block_kv, S))
    rows, cols = tiling.grid
    if rows * cols > MAX_TILES:
        raise ValueError(
            f"{rows} x {cols} tiles are more than {MAX_TILES}, the limit; choose a larger block than {block_q}, {block_kv}"
        )
    if mask is not None and mask.needs_offset:
        stated = None if query_offset is None else integers.position("query_offset", query_offset)
        mask = mask.resolve(default_offset(T, S) if stated is None else stated)
    return MaskPicture(mask, tiling, batch, head, title or ("no mask" if mask is None else str(mask)))


@dataclasses.dataclass(frozen=True)
class MaskPicture:
    """One mask over one tiling. Its text is the picture: print it, or leave it to the notebook; `save` writes a file."""

    mask: Mask | None
    tiling: Tiling
    batch: int
    head: int
    title: str

    @functools.cached_property
    def tiles(self) -> np.ndarray:
        """int8 [nq, nk] of EMPTY, PARTIAL, FULL, with run-time data as it is."""
        return _tiles(self.mask, self.tiling, self.batch, self.head)

    @functools.cached_property
    def visible(self) -> int:
        """How many of the T * S pairs of query and key may attend. Exact."""
        t, tiles = self.tiling, self.tiles
        q_first, q_last, k_first, k_last = t.edges
        full = int((((q_last - q_first + 1) * (k_last - k_first + 1)) * (tiles == FULL)).sum())
        if self.mask is None or not (tiles == PARTIAL).any():
            return full
        return full + _count(self.mask, t, np.argwhere(tiles == PARTIAL), self.batch, self.head)

    @property
    def visited(self) -> float:
        """The share of T * S in tiles that are not empty: what a blockwise kernel computes, of what a dense one does."""
        q_first, q_last, k_first, k_last = self.tiling.edges
        cells = (q_last - q_first + 1) * (k_last - k_first + 1) * (self.tiles != EMPTY)
        return float(cells.sum()) / (self.tiling.T * self.tiling.S)

    def summary(self) -> list[str]:
        """Return the tiles, the visible share and the cost, a line each."""
        t, (rows, cols) = self.tiling, self.tiling.grid
        counts = ", ".join(f"{int((self.tiles == kind).sum()):,} {name}" for kind, name in _NAMES.items())
        return [
            f"tiles    {rows:,} x {cols:,} of {t.block_q} x {t.block_kv}: {counts}",
            f"visible  {_percent(self.visible / (t.T * t.S))} of T * S, {self.visible:,} of {t.T * t.S:,}",
            f"cost     a kernel that skips empty tiles computes {_percent(self.visited)} of T * S: {self._saving()}",
        ]

    def _saving(self) -> str:
        if not self.visited:
            return "nothing at all"
        return f"{1 / self.visited:.3g} times fewer flops than dense" if self.visited < 1 else "as many flops as dense"

    def __str__(self) -> str:
        grid, scale = self._shown()
        lines = ["".join(_GLYPHS[kind] for kind in row).rstrip() for row in grid.tolist()]
        return "\n".join([self._head(), "", *lines, "", self._legend(_GLYPHS, scale), "", *self.summary()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f'<pre style="line-height: 1.1">{html.escape(str(self))}</pre>'

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        glyphs = _ASCII if options.ascii_only else _GLYPHS
        grid, scale = self._shown(min(_TILES_ACROSS, max(1, options.max_width // 2)))
        yield Text(self._head() + "\n", style="bold")
        for row in grid.tolist():
            yield Text.assemble(*((glyphs[kind], _STYLES[kind]) for kind in row), no_wrap=True)
        yield Text("\n" + self._legend(glyphs, scale) + "\n", style="dim")
        for line in self.summary():
            yield Text(line)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the mask and its block map side by side, as a .png, .svg or .pdf. Needs matplotlib."""
        if os.path.splitext(os.fspath(path))[1].lower() not in FORMATS:
            raise ValueError(f"{os.fspath(path)!r} is no picture file; allowed are {', '.join(FORMATS)}")
        _figure(self).savefig(path, dpi=150)

    def _head(self) -> str:
        return f"{self.title}   T {self.tiling.T}, S {self.tiling.S}"

    @property
    def _by_cells(self) -> bool:
        return self.tiling.T <= _CELLS_DOWN and self.tiling.S <= _CELLS_ACROSS

    def _shown(self, across: int = _TILES_ACROSS) -> tuple[np.ndarray, int]:
        """Return the grid to print, and how many tiles in each direction a cell of it stands for; 0 for one query and key."""
        if self._by_cells:
            return _tiles(self.mask, Tiling(self.tiling.T, self.tiling.S, 1, 1), self.batch, self.head), 0
        scale = -(-max(self.tiles.shape) // across)
        return _merged(self.tiles, scale), scale

    def _legend(self, glyphs: dict[int, str], scale: int) -> str:
        if scale == 0:
            return f"{glyphs[FULL]} visible  {glyphs[EMPTY].strip()} hidden   rows are queries, columns keys"
        each = "a tile" if scale == 1 else f"{scale} x {scale} tiles"
        names = "  ".join(f"{glyphs[kind].strip()} {name}" for kind, name in _NAMES.items())
        return f"{names}   each {each} of {self.tiling.block_q} x {self.tiling.block_kv}; rows are queries, columns keys"


def _tiles(mask: Mask | None, tiling: Tiling, batch: int, head: int) -> np.ndarray:
    if mask is None:
        return np.full(tiling.grid, FULL, np.int8)
    may, must = (_pick(np.asarray(x), batch, head, tiling.grid) for x in mask.bounds(tiling, np if mask.is_static else jnp))
    return np.where(must, FULL, np.where(may, PARTIAL, EMPTY)).astype(np.int8)


def _pick(x: np.ndarray, batch: int, head: int, grid: tuple[int, int]) -> np.ndarray:
    for axis, (name, index) in enumerate((("batch", batch), ("head", head))):
        if x.shape[axis] > 1 and not 0 <= index < x.shape[axis]:
            raise ValueError(f"{name} is {index}; the mask has {x.shape[axis]}, so allowed are 0 to {x.shape[axis] - 1}")
    return np.broadcast_to(x[batch if x.shape[0] > 1 else 0, head if x.shape[1] > 1 else 0], grid)


def _count(mask: Mask, tiling: Tiling, places: np.ndarray, batch: int, head: int) -> int:
    """Return how many cells of the tiles at `places` [n, 2] are visible."""
    rows, cols = tiling.block_q, tiling.block_kv
    grown = mask.padded(tiling.grid[0] * rows, tiling.grid[1] * cols)

    def one(place: jax.Array) -> jax.Array:
        row, col = place[0] * rows, place[1] * cols
        tile = jnp.broadcast_to(grown.tile(Tile(batch, head, row, col, 1, rows, cols)), (1, rows, cols))[0]
        inside = (row + jnp.arange(rows)[:, None] < tiling.T) & (col + jnp.arange(cols) < tiling.S)
        return jnp.sum(tile & inside, dtype=jnp.int32)

    some = max(1, 2**22 // (rows * cols))
    return int(np.asarray(jax.jit(lambda at: jax.lax.map(one, at, batch_size=some))(jnp.asarray(places))).sum(dtype=np.int64))


def _merged(tiles: np.ndarray, scale: int) -> np.ndarray:
    """Return the map with `scale` x `scale` tiles in one: full if all are, empty if all are."""
    if scale == 1:
        return tiles
    starts = [np.arange(0, size, scale) for size in tiles.shape]

    def all_are(kind: int) -> np.ndarray:
        return np.logical_and.reduceat(np.logical_and.reduceat(tiles == kind, starts[0], axis=0), starts[1], axis=1)

    return np.where(all_are(FULL), FULL, np.where(all_are(EMPTY), EMPTY, PARTIAL)).astype(np.int8)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


# ---------------------------------------------------------------- matplotlib


def _figure(picture: MaskPicture) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _mask_panel(left, picture)
    _tile_panel(right, picture)
    cost = f"skipping empty tiles computes {_percent(picture.visited)} of T x S: {picture._saving()}"
    figure.suptitle(f"{picture.title}\n{cost}", fontsize=12, wrap=True)
    return figure


def _mask_panel(axes: Any, picture: MaskPicture) -> None:
    t = picture.tiling
    pixel = Tiling(t.T, t.S, -(-t.T // _PIXELS), -(-t.S // _PIXELS))
    cells = _tiles(picture.mask, pixel, picture.batch, picture.head)
    share = np.where(cells == FULL, 1.0, np.where(cells == PARTIAL, 0.5, 0.0))
    axes.imshow(share, cmap="Greys", vmin=0, vmax=1.25, extent=(0, t.S, t.T, 0), interpolation="nearest", aspect="auto")
    axes.set(title=f"mask: {_percent(picture.visible / (t.T * t.S))} visible (dark)", xlabel="key position", ylabel="query row")
    axes.set_box_aspect(1)


def _tile_panel(axes: Any, picture: MaskPicture) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    t, (rows, cols) = picture.tiling, picture.tiling.grid
    extent = (0, cols * t.block_kv, rows * t.block_q, 0)
    colours = ListedColormap([_COLOURS[kind] for kind in (EMPTY, PARTIAL, FULL)])
    axes.imshow(picture.tiles, cmap=colours, vmin=-0.5, vmax=2.5, extent=extent, interpolation="nearest", aspect="auto")
    if max(rows, cols) <= 64:
        for count, block, line in ((rows, t.block_q, axes.axhline), (cols, t.block_kv, axes.axvline)):
            for index in range(1, count):
                line(index * block, color="white", linewidth=0.6)
    axes.set(title=f"tiles of {t.block_q} x {t.block_kv}", xlabel="key position", xlim=(0, t.S), ylim=(t.T, 0))
    axes.set_box_aspect(1)
    counts = {kind: int((picture.tiles == kind).sum()) for kind in _NAMES}
    patches = [Patch(facecolor=_COLOURS[kind], edgecolor="grey", label=f"{_NAMES[kind]}: {counts[kind]:,}") for kind in _NAMES]
    axes.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, frameon=False)
