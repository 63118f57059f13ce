"""The legends of a figure: one bar of all shades for it, or a small one for each panel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from qkv.client.figures.labels import text_width
from qkv.client.figures.scale import Scale
from qkv.client.figures.scene import Cells, Frame, Shape, Slashes, Text

__all__ = ["legend_height", "legend_width", "panel_legend", "panel_legend_width", "shared_legend"]

# pixels
_BAR: Final = 12  # width of the bar of a figure
_MOST, _LEAST = 200, 96  # its height
_SMALL_BAR, _SMALL_HEIGHT = 64, 8  # of a panel
_SIZE: Final = 10
_NAME: Final = 12
_MISSING: Final = "no value"


def _format_tick(number: float) -> str:
    """Returns the number in three digits."""
    return f"{number:.3g}".replace("-", "−")


def _ticks(scale: Scale, height: float) -> list[float]:
    """Returns the numbers beside a bar of this height, in pixels."""
    return scale.ticks(1.5 * _SIZE / height)


def legend_height(room: float, name: str) -> float:
    """Returns the height of the legend of a figure, if the panels have this height."""
    return max(min(room, _MOST), _LEAST, text_width(name, _NAME))


def legend_width(scale: Scale, height: float, name: str, has_missing: bool) -> float:
    """Returns the width of the legend of a figure."""
    ticks = max(text_width(_format_tick(number), _SIZE) for number in _ticks(scale, height))
    missing = text_width(_MISSING, _SIZE) if has_missing else 0
    return _BAR + 6 + max(ticks + (8 + _NAME if name else 0), missing)


def shared_legend(
    scale: Scale, x: float, y: float, height: float, name: str, has_missing: bool
) -> Iterator[Shape]:
    """Yields an upright bar of all shades with numbers, and the name of the numbers."""
    shades = scale.shades
    pitch = height / len(shades)
    yield Cells(x, y, _BAR, pitch, [[shade] for shade in reversed(shades)])
    yield Frame(x, y, _BAR, height)
    widest = 0.0
    for number in _ticks(scale, height):
        text = _format_tick(number)
        widest = max(widest, text_width(text, _SIZE))
        middle = y + pitch / 2 + (1 - scale.share(number)) * (height - pitch)
        yield Text(x + _BAR + 6, middle + 0.35 * _SIZE, text, _SIZE)
    if name:
        left = x + _BAR + 6 + widest + 8 + 0.7 * _NAME
        yield Text(left, y + height / 2, name, _NAME, "middle", 90)
    if has_missing:
        top = y + height + 14
        yield Slashes(x, top, _BAR, _BAR, [(0, 0)], [_MISSING])
        yield Frame(x, top, _BAR, _BAR)
        yield Text(x + _BAR + 6, top + 9.5, _MISSING, _SIZE)


def panel_legend_width(scale: Scale) -> float:
    """Returns the width of the legend of a panel."""
    low, high = (text_width(_format_tick(number), _SIZE) for number in (scale.low, scale.high))
    return low + high + _SMALL_BAR + 8


def panel_legend(scale: Scale, right: float, y: float) -> Iterator[Shape]:
    """Yields a level bar of all shades between its ends, left of `right` on a base line."""
    low, high = map(_format_tick, (scale.low, scale.high))
    shades = scale.shades
    x = right - text_width(high, _SIZE) - 4 - _SMALL_BAR
    yield Cells(x, y - 8, _SMALL_BAR / len(shades), _SMALL_HEIGHT, [list(shades)])
    yield Frame(x, y - 8, _SMALL_BAR, _SMALL_HEIGHT)
    yield Text(x - 4, y, low, _SIZE, "end")
    yield Text(right, y, high, _SIZE, "end")
