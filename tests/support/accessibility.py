"""Violations that axe reports in a page, and looks of a page: widths and themes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from playwright.sync_api import Page

WIDTHS: Final = {390: 844, 1440: 900, 2560: 1440}
"""Heights of windows, by their widths."""

THEMES: Final[tuple[Literal["light", "dark"], ...]] = ("light", "dark")


def looks(page: Page) -> Iterator[str]:
    """Shows the page in each width and theme; yields their names."""
    for width, height in WIDTHS.items():
        for theme in THEMES:
            page.set_viewport_size({"width": width, "height": height})
            page.emulate_media(color_scheme=theme)
            yield f"{theme} {width}"


def problems(page: Page, context: str | None = None) -> list[tuple[str, list[str]]]:
    """Returns what axe reports in a part of the page, with its elements, and an overflow."""
    from axe_playwright_python.sync_playwright import Axe  # slow to import

    found = Axe().run(page, context=context).response["violations"]
    violations = [(v["id"], [node["html"][:200] for node in v["nodes"]]) for v in found]
    pixels = overflow(page)
    return [*violations, (f"overflow of {pixels} px", [])] if pixels else violations


def overflow(page: Page) -> int:
    """Returns by how many pixels the page is wider than its window."""
    pixels: int = page.evaluate(
        "() => document.scrollingElement.scrollWidth - document.documentElement.clientWidth"
    )
    return pixels
