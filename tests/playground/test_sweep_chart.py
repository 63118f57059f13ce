"""Tests the chart of a sweep in Chromium: scales, labels, descriptions, incremental drawing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.examples import examples
from support.javascript import Modules
from support.paths import ROOT

pytestmark = pytest.mark.representative

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

LENGTHS: Final = [256, 512, 1024, 2048, 4096]
VARIANTS: Final = ["softmax", "linear", "taylor"]

Draw = Callable[..., "Page"]


def cell(index: int, length: int, ms: float) -> dict[str, Any]:
    return {
        "index": index,
        "length": length,
        "median_ms": ms,
        "least_ms": ms * 0.9,
        "most_ms": ms * 1.5,
    }


# softmax and linear take the same time at length 1000
CELLS: Final = [cell(0, n, n * n * 1e-6) for n in LENGTHS] + [cell(1, n, n * 1e-3) for n in LENGTHS]
REFUSED: Final = {"index": 2, "length": 4096, "problem": {"detail": "it can never fit"}}


@pytest.fixture(scope="module")
def empty_page(browser: Browser) -> Iterator[Page]:
    """Returns an empty page with the modules of the chart, from the disk."""

    def send_file(route: Route) -> None:
        name = route.request.url.removeprefix("http://127.0.0.1/")
        if name:
            route.fulfill(path=ROOT / "service/qkv/playground" / name)
        else:
            route.fulfill(
                content_type="text/html", body="<!doctype html><html style='font-size: 15px'>"
            )

    page = browser.new_page()
    page.route("**", send_file)
    page.goto("http://127.0.0.1/")
    for name in ("sweep_chart", "sweep_table"):
        page.evaluate(f"async () => {{ window.{name} = await import('/compare/{name}.js') }}")
    yield page
    page.close()


@pytest.fixture
def draw(empty_page: Page) -> Iterator[Draw]:
    """Returns a function that draws a sweep into an SVG of a width and into a table."""

    def drawn(cells: list[dict[str, Any]], width: int = 1000, **options: Any) -> Page:
        empty_page.evaluate(
            """([sweep, width]) => {
                if (!document.querySelector("svg")) {
                    document.body.innerHTML = "<svg id='s'></svg><table></table>";
                }
                document.querySelector("svg").style.width = `${width}px`;
                sweep_chart.drawSweep(document.querySelector("svg"), sweep);
                sweep_chart.fillSweepTable(document.querySelector("table"), sweep);
            }""",
            [{"cells": cells, "variants": VARIANTS, "lengths": LENGTHS} | options, width],
        )
        return empty_page

    yield drawn
    empty_page.evaluate("() => document.body.replaceChildren()")


def boxes(page: Page, selector: str) -> list[dict[str, float]]:
    found: list[dict[str, float]] = page.eval_on_selector_all(
        selector,
        """all => all.map((element) => {
            const { left, right, top, bottom } = element.getBoundingClientRect();
            return { left, right, top, bottom, x: (left + right) / 2, y: (top + bottom) / 2 };
        })""",
    )
    return found


def test_cells_are_added_without_moving_the_axis(draw: Draw) -> None:
    first: float | None = None
    for count in range(len(CELLS) + 1):
        markers = boxes(draw(CELLS[:count]), "svg [data-cell]")
        assert len(markers) == count
        if count:
            first = first or markers[0]["x"]
            assert markers[0]["x"] == pytest.approx(first, abs=0.1)


def test_both_axes_are_logarithmic(draw: Draw) -> None:
    markers = boxes(draw(CELLS), "svg [data-cell]")
    softmax, linear = markers[: len(LENGTHS)], markers[len(LENGTHS) :]
    for line in (softmax, linear):
        steps = [b["x"] - a["x"] for a, b in itertools.pairwise(line)]
        rises = [a["y"] - b["y"] for a, b in itertools.pairwise(line)]
        assert steps == pytest.approx([steps[0]] * len(steps), abs=0.5)
        assert rises == pytest.approx([rises[0]] * len(rises), abs=0.5)
    # N^2 rises twice as fast as N
    rise = [line[0]["y"] - line[-1]["y"] for line in (softmax, linear)]
    assert rise[0] == pytest.approx(2 * rise[1], abs=1)


def test_crossover_is_marked_where_the_lines_meet(draw: Draw) -> None:
    page = draw(CELLS, crossovers=[{"from": 0, "to": 1, "length": 1000.0, "between": [512, 1024]}])
    (ring,) = boxes(page, "svg [data-crossover]")
    markers = boxes(page, "svg [data-cell]")
    for line in (markers[:5], markers[5:]):
        before, after = line[1], line[2]  # 512 and 1024
        part = math.log(1000 / 512) / math.log(2)
        assert ring["x"] == pytest.approx(before["x"] + part * (after["x"] - before["x"]), abs=1)
        assert ring["y"] == pytest.approx(before["y"] + part * (after["y"] - before["y"]), abs=1)
    assert "linear becomes faster than softmax between 512 and 1,024" in str(
        page.text_content("svg desc")
    )


def test_band_spans_the_minimum_and_the_maximum(draw: Draw) -> None:
    band = draw(CELLS).get_attribute("svg [data-band=softmax]", "d") or ""
    upper, lower = band.strip("Mz").split("L")[0], band.strip("Mz").split("L")[-1]
    markers = boxes(draw(CELLS), "svg [data-cell]")
    pixels = (markers[0]["y"] - markers[4]["y"]) / math.log(256)  # of a factor of e
    height = float(lower.split()[1]) - float(upper.split()[1])
    assert height == pytest.approx(pixels * math.log(1.5 / 0.9), rel=0.05)


@pytest.mark.parametrize("width", [340, 1000])
def test_labels_do_not_overlap_and_stay_inside(draw: Draw, width: int) -> None:
    variants = [f"variant {index} causal" for index in range(8)]
    cells = [cell(i, n, n * (1 + i / 1000)) for i in range(8) for n in LENGTHS]
    page = draw(cells, width, variants=variants)
    labels = boxes(page, "svg [data-label]")
    (edge,) = boxes(page, "svg")
    assert len(labels) == 8
    for a, b in itertools.pairwise(sorted(labels, key=lambda box: box["top"])):
        assert b["top"] >= a["top"] + 14
    assert max(box["right"] for box in labels) <= edge["right"]
    assert min(box["top"] for box in labels) >= edge["top"]
    assert max(box["bottom"] for box in labels) <= edge["bottom"]
    looks = "all => new Set(all.map((m) => m.getAttribute('fill') + m.getAttribute('d'))).size"
    assert page.eval_on_selector_all("svg [data-cell]", looks) == 8


def test_failed_cell_is_a_cross_with_its_reason(draw: Draw) -> None:
    page = draw([*CELLS, REFUSED])
    assert page.text_content("svg [data-problem] title") == "taylor, 4,096: it can never fit"
    assert page.locator("svg [data-cell]").count() == len(CELLS)
    assert page.locator("tr", has_text="4,096").locator("td").all_inner_texts() == [
        "16.8 (15.1 to 25.2)",
        "4.1 (3.69 to 6.14)",
        "it can never fit",
    ]


def test_chart_has_an_accessible_name_and_description(draw: Draw) -> None:
    page = draw(CELLS)
    picture = page.get_by_role("img", name="Time per call by length")
    described = page.text_content(f"#{picture.get_attribute('aria-describedby')}")
    assert described == (
        "softmax: 0.0655 ms at 256, 16.8 ms at 4,096. linear: 0.256 ms at 256, 4.1 ms at 4,096."
    )
    assert page.get_by_role("columnheader").all_inner_texts() == ["length", *VARIANTS]
    assert page.get_by_role("rowheader").all_inner_texts() == [f"{n:,}" for n in LENGTHS]
    draw([])
    assert page.text_content("svg desc") == "Nothing has been measured yet."


_MS: Final = st.one_of(st.just(0.0), st.floats(1e-6, 1e7))


@examples(50)
@given(
    st.lists(
        st.builds(
            lambda i, n, ms, least, most: cell(i, n, ms) | {"least_ms": least, "most_ms": most},
            st.integers(0, 2),
            st.sampled_from([1, *LENGTHS, 10**6]),
            _MS,
            _MS,
            _MS,
        ),
        max_size=6,
    ),
    st.floats(1, 1e6),
    st.booleans(),
)
def test_chart_has_no_nan_or_infinity(
    empty_page: Page, cells: list[dict[str, Any]], length: float, known: bool
) -> None:
    sweep = {
        "cells": cells,
        "variants": VARIANTS,
        "crossovers": [{"from": 0, "to": 1, "length": length, "between": [1, length]}],
        "lengths": LENGTHS if known else [],
    }
    markup = empty_page.evaluate(
        """sweep => {
            const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
            sweep_chart.drawSweep(svg, sweep);
            return svg.outerHTML;
        }""",
        sweep,
    )
    assert "NaN" not in markup
    assert "Infinity" not in markup


NO_CROSSOVER = "No two lines cross outside the range of their repeats."


@pytest.mark.parametrize(
    ("times", "crossed", "expected"),
    [
        (((1, 4), (2, 3)), [176], "linear becomes faster than softmax between 64 and 256."),
        (((3, 9), (2, 3)), [], "linear is faster than softmax at every length measured."),
        (((3, 9), (2, None)), [], NO_CROSSOVER),  # it could not run everywhere
        (((3, 3), (3, 3)), [], NO_CROSSOVER),
        (((1, 4), (2, 3), (0.5, 1)), [176],
         "taylor is the fastest at every length measured. "
         "linear becomes faster than softmax between 64 and 256."),
        (((1, 4),), [], NO_CROSSOVER),
    ],
)  # fmt: skip
def test_fastest_variant_is_described(
    modules: Modules, times: Sequence[Sequence[float | None]], crossed: list[int], expected: str
) -> None:
    cells = [
        {"index": i, "length": length} | ({} if time is None else {"median_ms": time})
        for i, line in enumerate(times)
        for length, time in zip((64, 256), line, strict=True)
    ]
    sweep = {
        "cells": cells,
        "variants": ["softmax", "linear", "taylor"][: len(times)],
        "crossovers": [
            {"from": 0, "to": 1, "length": length, "between": [64, 256]} for length in crossed
        ],
        "lengths": [64, 256],
    }
    assert modules.evaluate("sweep => sweep_table.describeFastest(sweep)", sweep) == expected
