"""Draws matrices side by side as one SVG heat map, for light and dark pages, without scripts.

The API draws the pictures of variants with `draw`. `client/figures` uses the shades and colours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

import numpy as np

__all__ = ["LEVELS", "Panel", "colour", "draw", "level"]

LEVELS: Final = 32
"""Shades from 0 to a panel's largest number: coarser than the differences between processors."""

_SIDE: Final = 208  # default side of a panel; all lengths are pixels
_LEFT: Final = 48
_TOP: Final = 74
_GAP: Final = 40
_RIGHT: Final = 26
_FOOT: Final = 66
_BETWEEN: Final = 40  # rows of panels

_LIGHT: Final = "text{fill:#59636e}.name{fill:#1f2328}.card{fill:#fff;stroke:#d1d9e0}"
_DARK: Final = "text{fill:#9198a1}.name{fill:#f0f6fc}.card{fill:#0d1117;stroke:#3d444d}"
_FONTS: Final = (
    "text{font:11px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;"
    "text-anchor:middle}"
    ".name{font-size:17px;font-weight:600;text-anchor:start}"
    ".token{font:10px ui-monospace,Menlo,Consolas,monospace}"
    ".low{text-anchor:start}.high{text-anchor:end}.cells{shape-rendering:crispEdges}"
)


class Panel(NamedTuple):
    """A matrix and its labels.

    Attributes:
        title: the text above it.
        matrix: (rows, columns), finite.
        row_axis, column_axis: the names of the axes.
        row_names, column_names: a character for each row and column; "": none.
    """

    title: str
    matrix: np.ndarray
    row_axis: str
    column_axis: str
    row_names: str = ""
    column_names: str = ""


def draw(
    name: str,
    title: str,
    description: str,
    panels: Sequence[Panel],
    *,
    columns: int = 0,
    side: int = _SIDE,
) -> str:
    """Returns the SVG.

    Cells that are exactly 0 are empty. Each shade is one path; its title, which browsers show under
    the pointer, is the number of the shade.

    Args:
        name: the heading.
        title, description: for screen readers.
        panels: at least one.
        columns: panels side by side; 0: all of them.
        side: width and height of a panel in pixels.
    """
    columns = min(columns or len(panels), len(panels))
    rows = math.ceil(len(panels) / columns)
    width = _LEFT + columns * (side + _GAP) - _GAP + _RIGHT
    height = _TOP + rows * (side + _FOOT + _BETWEEN) - _BETWEEN
    signed = any((panel.matrix < 0).any() for panel in panels)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-labelledby="title description">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="description">{escape(description)}</desc>',
        f"<style>{_style(signed)}</style>",
        f'<rect class="card" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="10"/>',
        _text("name", _LEFT, 30, name),
    ]
    for n, panel in enumerate(panels):
        row, column = divmod(n, columns)
        x, y = _LEFT + column * (side + _GAP), _TOP + row * (side + _FOOT + _BETWEEN)
        lines.append(f'<g transform="translate({x} {y})">')
        lines += _words(panel, side, first=column == 0)
        lines += [*_cells(panel.matrix, side), *_scale(panel.matrix, side), "</g>"]
    return "\n".join([*lines, "</svg>", ""])


def level(number: float, most: float) -> int:
    """Returns the shade of a number, -LEVELS to LEVELS.

    The shade is the root of the number's share of `most`, so that small numbers differ from 0.
    """
    # 1e-6 moves the borders of shades off simple fractions, where a last digit would decide
    shade = math.floor(LEVELS * math.sqrt(abs(number) / most) + 0.5 + 1e-6)
    return shade if number >= 0 else -shade


def _number(shade: int, most: float) -> float:
    """Returns the number of a shade."""
    return math.copysign((shade / LEVELS) ** 2 * most, shade)


def _most(matrix: np.ndarray) -> float:
    """Returns the largest absolute value of a matrix, to six digits; 1 if all are 0."""
    return float(f"{np.abs(matrix).max():.6g}") or 1.0


def _words(panel: Panel, side: int, first: bool) -> Iterator[str]:
    """Yields the labels of a panel; labels of rows only for the first panel of a line."""
    rows, columns = panel.matrix.shape
    yield _text("axis", side / 2, -24, panel.title)
    yield _text("axis", side / 2, side + 18, panel.column_axis)
    for j, word in enumerate(panel.column_names):
        yield _text("token", (j + 0.5) * side / columns, -6, word)
    if first:
        yield _text("axis", -side / 2, -28, panel.row_axis, "rotate(-90)")
        for i, word in enumerate(panel.row_names):
            yield _text("token", -10, (i + 0.5) * side / rows + 3, word)


def _cells(matrix: np.ndarray, side: int) -> Iterator[str]:
    """Yields a path for each shade in a matrix."""
    (rows, columns), most = matrix.shape, _most(matrix)
    paths: dict[int, str] = {}
    for i, row in enumerate(matrix.tolist()):
        j = 0
        for shade, run in groupby(None if x == 0 else level(x, most) for x in row):
            size = len(list(run))
            if shade is not None:
                paths[shade] = f"{paths.get(shade, '')}M{j} {i}h{size}v1h-{size}z"
            j += size
    yield f'<g class="cells" transform="scale({side / columns:g} {side / rows:g})">'
    for shade, path in sorted(paths.items()):
        number = f"{_number(shade, most):.3g}"
        yield f'<path class="{_class(shade)}" d="{path}"><title>{number}</title></path>'
    yield "</g>"


def _scale(matrix: np.ndarray, side: int) -> Iterator[str]:
    """Yields a bar of all shades, with numbers at its ends and in the middle."""
    most, signed = _most(matrix), (matrix < 0).any()
    shades = range(-LEVELS if signed else 0, LEVELS + 1)
    width = side / len(shades)
    yield f'<g class="cells" transform="translate(0 {side + 32}) scale({width:.5g} 8)">'
    yield from (f'<path class="{_class(s)}" d="M{i} 0h1v1h-1z"/>' for i, s in enumerate(shades))
    yield "</g>"
    for kind, at in (("low", 0), ("middle", len(shades) // 2), ("high", len(shades) - 1)):
        x = at / (len(shades) - 1) * side
        yield _text(kind, x, side + 54, f"{_number(shades[at], most):.3g}")


def _text(kind: str, x: float, y: float, text: str, transform: str = "") -> str:
    attribute = f' transform="{transform}"' if transform else ""
    return (
        f'<text class="{kind}" x="{x:g}" y="{y:g}"{attribute}>{escape(text)}</text>' if text else ""
    )


def _class(shade: int) -> str:
    return f"n{-shade}" if shade < 0 else f"p{shade}"


def _style(signed: bool) -> str:
    shades = range(-LEVELS if signed else 0, LEVELS + 1)
    light, dark = (
        "".join(f".{_class(s)}{{fill:{colour(s / LEVELS, on_dark)}}}" for s in shades)
        for on_dark in (False, True)
    )
    return f"{_FONTS}{_LIGHT}{light}@media(prefers-color-scheme:dark){{{_DARK}{dark}}}"


def colour(share: float, on_dark: bool) -> str:
    """Returns the colour of a share of the largest number, -1 to 1: blue above 0, orange below.

    Perceived lightness changes evenly, from nearly that of the card to far from it.
    """
    size = abs(share)
    lightness = 0.29 + 0.61 * size if on_dark else 0.955 - 0.6 * size
    chroma = 0.025 + 0.065 * math.sin(math.pi * size) + 0.05 * size  # all of them are in sRGB
    if share >= 0:
        hue = 265 - 65 * size if on_dark else 215 + 60 * size
    else:
        hue = 40 + 45 * size if on_dark else 75 - 40 * size
    return _srgb(lightness, chroma, math.radians(hue))


def _srgb(lightness: float, chroma: float, hue: float) -> str:
    """Returns an sRGB colour from OKLCH, which has perceptually even lightness.

    Source: Ottosson, A perceptual color space for image processing, 2020.
    """
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{round(255 * _encoded(u)):02x}" for u in linear)


def _encoded(linear: float) -> float:
    """Applies the transfer function of sRGB (IEC 61966-2-1)."""
    return 12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055
