"""Draws the shapes of a figure with matplotlib, for PDF and PNG, on a light page."""

from __future__ import annotations

import warnings
from pathlib import Path as FilePath
from typing import Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, fontManager, get_font
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path

from qkv.client.figures.colours import LIGHT
from qkv.client.figures.scene import Cells, Frame, Scene, Slashes, Text, runs_by_shade

__all__ = ["save_plot"]

_INCH: Final = 96  # pixels, as in CSS
_POINT: Final = 72 / _INCH  # points of a pixel
_PNG_DPI: Final = 3 * _INCH  # whole pixels: cells have equal sizes
_BOX_CODES: Final = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
_PATH_BOXES: Final = 1000  # in a path: a renderer limits its size
_FONTS: Final = {False: "DejaVu Sans", True: "DejaVu Sans Mono"}  # matplotlib contains them


def save_plot(scene: Scene, path: FilePath) -> None:
    """Writes a figure to a file; its suffix is .pdf or .png.

    Raises:
        OSError: the file cannot be written.
    """
    is_pdf = path.suffix.lower() == ".pdf"
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()  # the user's style does not reach the figure
        mpl.rcParams["pdf.fonttype"] = 42  # TrueType: text can be selected, and journals accept it
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(scene.width / _INCH, scene.height / _INCH), facecolor=LIGHT.page)
        axes: Axes = figure.add_axes((0, 0, 1, 1), xlim=(0, scene.width), ylim=(scene.height, 0))
        axes.set_axis_off()
        families = _families(scene)
        for shape in scene.shapes:
            if isinstance(shape, Text):
                _text(axes, shape, families)
            elif isinstance(shape, Cells):
                _cells(axes, shape)
            elif isinstance(shape, Slashes):
                _slashes(axes, shape)
            else:
                _frame(axes, shape)
        # without times and versions, equal figures have equal bytes
        metadata = {"Title": scene.title, "CreationDate": None, "Creator": "qkv", "Producer": None}
        if not is_pdf:
            metadata = {"Title": scene.title, "Software": "qkv"}
        figure.savefig(path, dpi=_PNG_DPI, metadata=metadata)


def _families(scene: Scene) -> list[str]:
    """Returns installed fonts for the characters that DejaVu lacks, such as Chinese ones."""
    texts = "".join(shape.text for shape in scene.shapes if isinstance(shape, Text))
    wanted = {ord(c) for c in texts} - set(get_font(findfont(_FONTS[True])).get_charmap())
    found: list[str] = []
    for entry in sorted(fontManager.ttflist, key=lambda e: (e.style != "normal", e.name, e.fname)):
        if not wanted:
            break
        if "Last Resort" in entry.name:  # it has a box for each character
            continue
        if held := wanted & set(get_font(entry.fname).get_charmap()):
            found.append(entry.name)
            wanted -= held
    if wanted:
        characters = "".join(map(chr, sorted(wanted)))
        warnings.warn(
            f"no installed font has the characters {characters:.40}: the file shows boxes; install "
            "a font that has them, or save a .svg file",
            stacklevel=5,
        )
    return found


def _text(axes: Axes, text: Text, families: list[str]) -> None:
    if text.on_shade is not None:
        colour = LIGHT.text_on(text.on_shade)
    else:
        colour = LIGHT.strong if text.is_strong else LIGHT.muted
    axes.text(
        text.x, text.y, text.text, fontsize=text.size * _POINT, color=colour,
        family=[_FONTS[text.is_token], *families], weight="bold" if text.is_bold else "normal",
        ha={"start": "left", "middle": "center", "end": "right"}[text.anchor], va="baseline",
        rotation=text.angle, rotation_mode="anchor", parse_math=False,
    )  # fmt: skip


def _cells(axes: Axes, cells: Cells) -> None:
    """Draws paths for each shade. A thin line in their colour closes the seams in viewers."""
    for shade, runs in runs_by_shade(cells.shades).items():
        row, first, count = np.array(runs).T
        left, right = (cells.x + column * cells.width for column in (first, first + count))
        top, bottom = (cells.y + n * cells.height for n in (row, row + 1))
        corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
        boxes = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
        colour = LIGHT.shade(shade)
        for n in range(0, len(boxes), _PATH_BOXES):
            points = boxes[n : n + _PATH_BOXES].reshape(-1, 2)
            path = Path(points, _BOX_CODES * (len(points) // 5))
            box = PathPatch(path, facecolor=colour, edgecolor=colour, linewidth=0.2)
            axes.add_artist(box)  # add_patch would look for the limits, slowly


def _slashes(axes: Axes, slashes: Slashes) -> None:
    for i, j in slashes.cells:
        left, top = slashes.x + j * slashes.width, slashes.y + i * slashes.height
        axes.plot(
            [left, left + slashes.width], [top + slashes.height, top], color=LIGHT.line,
            linewidth=_POINT, scalex=False, scaley=False,
        )  # fmt: skip


def _frame(axes: Axes, frame: Frame) -> None:
    axes.add_patch(
        Rectangle(
            (frame.x, frame.y),
            frame.width,
            frame.height,
            fill=False,
            edgecolor=LIGHT.line,
            linewidth=_POINT,
        )
    )
