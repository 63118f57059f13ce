"""Draws lines in panels as SVG, for light and dark pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

__all__ = ["Line", "Panel", "draw_panels"]

# (light page, dark page): palettes that readers with any kind of colour vision can tell apart
_COLOURS: Final = (
    ("#0072b2", "#58a6ff"),
    ("#c24e00", "#f0883e"),
    ("#00805c", "#3fb98f"),
    ("#a8477d", "#e39ac6"),
    ("#6e7781", "#9198a1"),
)
_PAGE, _STRONG, _MUTED, _GRID = (
    ("#ffffff", "#0d1117"), ("#1f2328", "#f0f6fc"), ("#59636e", "#9198a1"), ("#d8dee4", "#2b323a"),
)  # fmt: skip
_FONT: Final = "system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"

# pixels
_PLOT: Final = (330, 230)  # width and height of the lines of a panel
_LEFT, _ABOVE, _BELOW, _MARGIN = 40, 34, 46, 18
_LABEL: Final = 13  # distance of labels at the ends of lines
_TITLE: Final = 30

Point = tuple[float, float]


class Line(NamedTuple):
    """A line of a panel.

    Attributes:
        name: written at its end, or in the legend.
        points: (x, y), by rising x.
        colour: number of the colour.
        dash: of the stroke, such as "5 4"; "": none.
        width: of the stroke, pixels.
    """

    name: str
    points: Sequence[Point]
    colour: int
    dash: str = ""
    width: float = 2


class Panel(NamedTuple):
    """Lines with their axes.

    Attributes:
        title: above it.
        lines: in the order of drawing.
        low: the lower end of the y axis; the upper end is 1.
    """

    title: str
    lines: Sequence[Line]
    low: float


def draw_panels(
    title: str, panels: Sequence[Panel], x_name: str, x_ticks: Sequence[int], *, has_legend: bool
) -> str:
    """Returns the panels, two in a row, as SVG.

    Args:
        title: above them.
        panels: at least one.
        x_name: of all x axes.
        x_ticks: numbers on the x axes; the first and the last are their ends.
        has_legend: True names the lines above the panels, False at their ends.
    """
    room = 0 if has_legend else 74  # for names at the ends of lines
    pitch = (_LEFT + _PLOT[0] + room + _MARGIN, _ABOVE + _PLOT[1] + _BELOW)
    top = _TITLE + 12 + (24 if has_legend else 0)
    rows = (len(panels) + 1) // 2
    width, height = 2 * pitch[0] + _MARGIN, top + rows * pitch[1] + 4
    body = [_text(_MARGIN, _TITLE, title, 16, "strong", weight=True)]
    if has_legend:
        body += _legend(panels[0].lines, top - 6)
    for n, panel in enumerate(panels):
        left, above = _MARGIN + n % 2 * pitch[0] + _LEFT, top + n // 2 * pitch[1] + _ABOVE
        body += _axes(panel, left, above, x_ticks, x_name)
        place = _Place(left, above, x_ticks[0], x_ticks[-1], panel.low)
        for line in panel.lines:
            body.append(_stroke(line, [place.at(point) for point in line.points]))
        if not has_legend:
            body += _names(panel.lines, place)
    described = f"{title}: {', '.join(panel.title for panel in panels)}, over {x_name}."
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" font-family="{_FONT}">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(described)}</desc>",
            f"<style>{_rules(0)}@media(prefers-color-scheme:dark){{{_rules(1)}}}</style>",
            f'<rect class="page" width="{width}" height="{height}"/>',
            *body,
            "</svg>",
            "",
        ]
    )


class _Place(NamedTuple):
    """The place of a panel's lines: left and upper edge in pixels, and the ends of the axes."""

    left: float
    above: float
    first: float
    last: float
    low: float

    def at(self, point: Point) -> Point:
        """Returns the pixels of a point."""
        x, y = point
        across = (x - self.first) / (self.last - self.first)
        down = (1 - y) / (1 - self.low)
        return self.left + across * _PLOT[0], self.above + down * _PLOT[1]


def _rules(page: int) -> str:
    """Returns the style of a light (0) or dark (1) page."""
    colours = "".join(
        f".l{n}{{stroke:{both[page]}}}.t{n}{{fill:{both[page]}}}" for n, both in enumerate(_COLOURS)
    )
    return (
        f".page{{fill:{_PAGE[page]}}}.strong{{fill:{_STRONG[page]}}}.muted{{fill:{_MUTED[page]}}}"
        f".grid{{stroke:{_GRID[page]}}}{colours}"
    )


def _axes(
    panel: Panel, left: float, above: float, x_ticks: Sequence[int], x_name: str
) -> Iterator[str]:
    """Yields the title, the grid and the numbers of a panel."""
    place = _Place(left, above, x_ticks[0], x_ticks[-1], panel.low)
    yield _text(left, above - 12, panel.title, 13, "strong")
    for tick in _y_ticks(panel.low):
        x, y = place.at((x_ticks[0], tick))
        yield f'<path class="grid" d="M{_short(x)} {_short(y)}h{_PLOT[0]}"/>'
        yield _text(x - 8, y + 4, f"{tick:g}".replace("-", "−"), 11, "muted", "end")
    for number in x_ticks:
        x, y = place.at((number, panel.low))
        yield _text(x, y + 17, str(number), 11, "muted", "middle")
    yield _text(left + _PLOT[0] / 2, above + _PLOT[1] + 35, x_name, 12, "muted", "middle")


def _y_ticks(low: float) -> list[float]:
    """Returns five or six numbers from the lower end to 1, in steps of 0.1 or 0.2."""
    step = 0.1 if low >= 0.5 else 0.2
    return [round(1 - n * step, 1) for n in range(int((1 - low) / step + 1e-9) + 1)]


def _stroke(line: Line, pixels: Sequence[Point]) -> str:
    path = "L".join(f"{_short(x)} {_short(y)}" for x, y in pixels)
    dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
    return (
        f'<path class="l{line.colour}" fill="none" stroke-width="{line.width:g}" '
        f'stroke-linejoin="round"{dash} d="M{path}"><title>{escape(line.name)}</title></path>'
    )


def _names(lines: Sequence[Line], place: _Place) -> Iterator[str]:
    """Yields the names of lines beside their ends, at a distance from each other."""
    ends = sorted((place.at(line.points[-1])[1], n) for n, line in enumerate(lines))
    heights = _space_apart([y for y, _ in ends], _LABEL + 1)
    for y, (_, n) in zip(heights, ends, strict=True):
        line = lines[n]
        x = place.left + _PLOT[0] + 8
        yield _text(x, y + 4, line.name, _LABEL, f"t{line.colour}", weight=True)


def _space_apart(heights: Sequence[float], distance: float) -> list[float]:
    """Returns sorted heights, moved until neighbours are at least `distance` from each other."""
    groups = [[y, 1] for y in heights]  # middles and sizes of labels that touch each other
    merged: list[list[float]] = []
    for group in groups:
        merged.append(group)
        while len(merged) > 1:
            (y, n), (z, m) = merged[-2:]
            if z - y >= distance * (n + m) / 2:
                break
            merged[-2:] = [[(y * n + z * m) / (n + m), n + m]]
    return [y + distance * (i - (n - 1) / 2) for y, n in merged for i in range(int(n))]


def _legend(lines: Sequence[Line], y: float) -> Iterator[str]:
    """Yields a stroke and a name for each line, side by side."""
    x: float = _MARGIN
    for line in lines:
        yield _stroke(line, [(x, y - 4), (x + 28, y - 4)])
        yield _text(x + 35, y, line.name, 12, "strong")
        x += 35 + 6.6 * len(line.name) + 26


def _text(
    x: float, y: float, text: str, size: float, kind: str, anchor: str = "start",
    *, weight: bool = False,
) -> str:  # fmt: skip
    bold = ' font-weight="600"' if weight else ""
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    where = f'x="{_short(x)}" y="{_short(y)}"'
    return f'<text class="{kind}" {where} font-size="{size:g}"{at}{bold}>{escape(text)}</text>'


def _short(pixels: float) -> str:
    return f"{round(pixels, 1):g}"
