"""The colours of a figure, on a light and on a dark page."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from qkv.heatmap import LEVELS, colour

__all__ = ["DARK", "LIGHT", "Palette", "luminance"]


class Palette(NamedTuple):
    """Colours as #rrggbb.

    Attributes:
        page: behind the figure.
        strong: of names.
        muted: of labels.
        line: of frames and of the diagonals of missing cells.
        is_dark: True for a dark page.
    """

    page: str
    strong: str
    muted: str
    line: str
    is_dark: bool

    def shade(self, shade: int) -> str:
        """Returns the colour of a shade."""
        return _shade(shade, self.is_dark)

    def text_on(self, shade: int) -> str:
        """Returns white or black, whichever differs more: the contrast is 4.5 or more."""
        behind = luminance(_shade(shade, self.is_dark))
        return "#ffffff" if 1.05 / (behind + 0.05) > (behind + 0.05) / 0.05 else "#000000"


LIGHT = Palette("#ffffff", "#1f2328", "#59636e", "#afb8c1", False)
DARK = Palette("#0d1117", "#f0f6fc", "#9198a1", "#4c545d", True)


@cache
def _shade(shade: int, is_dark: bool) -> str:
    return colour(shade / LEVELS, is_dark)


def luminance(colour: str) -> float:
    """Returns the relative luminance of #rrggbb (WCAG 2.2)."""
    channels = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    red, green, blue = (
        u / 12.92 if u <= 0.04045 else ((u + 0.055) / 1.055) ** 2.4 for u in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
