"""Violations that axe reports in a page, and looks of a page: widths and themes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from playwright.sync_api import Page

HEIGHTS: Final = {390: 844, 1440: 900, 2560: 1440}
"""Heights of windows, by their widths."""

THEMES: Final[tuple[Literal["light", "dark"], ...]] = ("light", "dark")

LOOKS: Final = ((390, THEMES[1]), (1440, THEMES[0]))
"""Widths and themes in which axe reads a page. A theme has the same colours in every width, and
a width the same elements in every theme: two looks have each of both."""

# all rules run, and only violations are described: 1.9 s of CPU time instead of 4.1
_RUN_AXE: Final = """async context => {
    const options = { resultTypes: ["violations"] };
    const { violations } = await axe.run(context ?? document, options);
    return violations.map(({ id, nodes }) => [id, nodes.map(({ html }) => html.slice(0, 200))]);
}"""


def looks(page: Page) -> Iterator[str]:
    """Shows the page in each look; yields their names."""
    for width, theme in LOOKS:
        page.set_viewport_size({"width": width, "height": HEIGHTS[width]})
        page.emulate_media(color_scheme=theme)
        yield f"{theme} {width}"


def problems(page: Page, context: str | None = None) -> list[tuple[str, list[str]]]:
    """Returns what axe reports in a part of the page, with its elements, and an overflow."""
    from axe_playwright_python.base import AXE_SCRIPT  # slow to import

    # once for each document: compiled anew for each run, it takes half as long again
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(AXE_SCRIPT)
    found = page.evaluate(_RUN_AXE, context)
    violations = [(rule, list(elements)) for rule, elements in found]
    pixels = overflow(page)
    return [*violations, (f"overflow of {pixels} px", [])] if pixels else violations


def small_targets(page: Page) -> list[str]:
    """Returns the visible controls below 24 by 24 pixels, with their labels (WCAG 2.5.8).

    Terms in a sentence and symbols in a formula are not among them: the line limits their size.
    """
    found: list[str] = page.evaluate(
        """() => {
            const kinds =
                "a, button, input, select, textarea, summary, label.button, [tabindex='0']";
            const isShown = (e) =>
                e.checkVisibility({ visibilityProperty: true }) &&
                !e.matches(".unseen, .skip, p .term, p .symbol");
            const isSmall = (e) => {
                const boxes = [e, ...(e.labels ?? [])].map((one) => one.getBoundingClientRect());
                const most = (side) => Math.max(...boxes.map((box) => box[side]));
                const least = (side) => Math.min(...boxes.map((box) => box[side]));
                const width = most("right") - least("left");
                return width < 23.99 || most("bottom") - least("top") < 23.99;
            };
            const small = [...document.querySelectorAll(kinds)].filter(isShown).filter(isSmall);
            return small.map((e) => e.outerHTML.slice(0, 150));
        }"""
    )
    return found


def overflow(page: Page) -> int:
    """Returns by how many pixels the page is wider than its window."""
    pixels: int = page.evaluate(
        "() => document.scrollingElement.scrollWidth - document.documentElement.clientWidth"
    )
    return pixels
