"""Writes the shapes of a figure as SVG, for light and dark pages, without scripts.

Light colours are attributes, which every program for papers reads. A dark page replaces them by
style. The names of the classes begin with `qkv-`, so that a page may contain several figures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final
from xml.sax.saxutils import escape as escape_markup

from qkv.client.figures.colours import DARK, LIGHT
from qkv.client.figures.scene import Cells, Frame, Scene, Slashes, Text, runs_by_shade

__all__ = ["to_svg"]

_SANS: Final = "system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"
_FIXED: Final = "ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"


_NOT_XML: Final = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_svg(scene: Scene) -> str:
    """Returns the SVG of a figure."""
    width, height = scene.width, scene.height
    body: list[str] = []
    for shape in scene.shapes:
        if isinstance(shape, Text):
            body.append(_text(shape))
        elif isinstance(shape, Cells):
            body += _cells(shape)
        elif isinstance(shape, Slashes):
            body += _slashes(shape)
        else:
            body.append(_frame(shape))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-family="{_SANS}">',
        f"<title>{_escape(scene.title)}</title>",
        f"<desc>{_escape(scene.description)}</desc>",
        f"<style>@media(prefers-color-scheme:dark){{{_dark_style(scene)}}}</style>",
        f'<rect class="qkv-page" width="{width}" height="{height}" fill="{LIGHT.page}"/>',
    ]
    return "\n".join([*lines, *body, "</svg>", ""])


def _dark_style(scene: Scene) -> str:
    """Returns the rules for a dark page, for the shades that the figure has."""
    rules = [
        f".qkv-page{{fill:{DARK.page}}}.qkv-strong{{fill:{DARK.strong}}}"
        f".qkv-muted{{fill:{DARK.muted}}}.qkv-line{{stroke:{DARK.line}}}"
    ]
    cells = [shape for shape in scene.shapes if isinstance(shape, Cells)]
    shades = {s for shape in cells for row in shape.shades for s in row if s is not None}
    rules += [f".{_class(shade)}{{fill:{DARK.shade(shade)}}}" for shade in sorted(shades)]
    behind = {s.on_shade for s in scene.shapes if isinstance(s, Text) and s.on_shade is not None}
    rules += [f".{_class(s)}-text{{fill:{DARK.text_on(s)}}}" for s in sorted(behind)]
    return "".join(rules)


def _class(shade: int) -> str:
    return f"qkv-n{-shade}" if shade < 0 else f"qkv-p{shade}"


def _text(text: Text) -> str:
    if text.on_shade is not None:
        name, fill = f"{_class(text.on_shade)}-text", LIGHT.text_on(text.on_shade)
    elif text.is_strong:
        name, fill = "qkv-strong", LIGHT.strong
    else:
        name, fill = "qkv-muted", LIGHT.muted
    attributes = [f'class="{name}"', f'fill="{fill}"', f'font-size="{text.size:g}"']
    if text.is_token:
        attributes.append(f'font-family="{_FIXED}"')
    if text.is_bold:
        attributes.append('font-weight="600"')
    if text.anchor != "start":
        attributes.append(f'text-anchor="{text.anchor}"')
    at = f"{_short(text.x)} {_short(text.y)}"
    turn = f" rotate(-{text.angle})" if text.angle else ""
    tooltip = f"<title>{_escape(text.tooltip)}</title>" if text.tooltip else ""
    words = f"{tooltip}{_escape(text.text)}"
    return f'<text {" ".join(attributes)} transform="translate({at}){turn}">{words}</text>'


def _cells(cells: Cells) -> Iterator[str]:
    """Yields a path for each shade, or for each cell if it has a text of its own."""
    yield (
        f'<g shape-rendering="crispEdges" transform="translate({_short(cells.x)} {_short(cells.y)})'
        f' scale({cells.width:.6g} {cells.height:.6g})">'
    )
    for shade, runs in runs_by_shade(cells.shades).items():
        fill = f'class="{_class(shade)}" fill="{LIGHT.shade(shade)}"'
        if cells.cell_tooltips:
            for i, j, size in runs:
                for column in range(j, j + size):
                    title = f"<title>{_escape(cells.cell_tooltips[i][column])}</title>"
                    yield f'<path {fill} d="M{column} {i}h1v1h-1z">{title}</path>'
        else:
            path = "".join(f"M{j} {i}h{size}v1h-{size}z" for i, j, size in runs)
            words = cells.tooltips.get(shade, "")
            title = f"<title>{_escape(words)}</title>" if words else ""
            yield f'<path {fill} d="{path}">{title}</path>'
    yield "</g>"


def _slashes(slashes: Slashes) -> Iterator[str]:
    """Yields a diagonal line, and a place for the pointer, for each missing cell."""
    width, height = slashes.width, slashes.height
    for (i, j), tooltip in zip(slashes.cells, slashes.tooltips, strict=True):
        x, y = slashes.x + j * width, slashes.y + i * height
        yield (
            f'<g><title>{_escape(tooltip)}</title><path fill="none" pointer-events="all" '
            f'd="M{_short(x)} {_short(y)}h{width:g}v{height:g}h-{width:g}z"/>'
            f'<path class="qkv-line" stroke="{LIGHT.line}" '
            f'd="M{_short(x)} {_short(y + height)}l{width:g} -{height:g}"/></g>'
        )


def _frame(frame: Frame) -> str:
    return (
        f'<rect class="qkv-line" x="{_short(frame.x - 0.5)}" y="{_short(frame.y - 0.5)}" '
        f'width="{_short(frame.width + 1)}" height="{_short(frame.height + 1)}" '
        f'fill="none" stroke="{LIGHT.line}"/>'
    )


def _escape(text: str) -> str:
    """Returns a text for XML 1.0, which does not allow most control characters."""
    return escape_markup(_NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text))


def _short(pixels: float) -> str:
    return f"{round(pixels, 2):g}"
