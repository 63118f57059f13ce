"""Tests of bench/tables.py: the form of cells, JSON, and the places of tables in a page."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import tables
from tables import Results, Table, format_cell, quartiles, spread, write_page

FIRST = Table("first", ["", "rate", "ms"], [["a", 12345.6, [1.5, 1.0, 2.0]], ["b", None, [3, 4]]])
SECOND = Table("second", ["", "ratio"], [["c", 0.123456]], digits=2, note="A note.")
RESULTS = Results("make it", {"qkv": "1.0", "warm-up": "5 calls"}, [FIRST, SECOND])


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (None, ""),
        ("text", "text"),
        (0, "0"),
        (0.0, "0"),
        (27_391, "27,391"),
        (27391.4, "27,391"),
        (1.0, "1.00"),
        (99.96, "100"),
        (0.0519, "0.0519"),
        (2.7e-7, "2.7e-7"),
        (float("inf"), "inf"),
        ([0.35, 5.8], "0.350 / 5.80"),
        ([2.0, 1.0, 4.0], "2.00 (1.00–4.00)"),
    ],
)
def test_cell_is_formatted_for_readers(cell: tables.Cell, text: str) -> None:
    assert format_cell(cell) == text


def test_several_values_are_a_median_with_limits() -> None:
    assert spread([3.0, 1.0, 2.0]) == [2.0, 1.0, 3.0]
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == [3.0, 1.5, 4.5]


def test_table_in_markdown() -> None:
    assert FIRST.markdown == (
        "|  | rate | ms |\n| --- | ---: | ---: |\n"
        "| a | 12,346 | 1.50 (1.00–2.00) |\n| b |  | 3 / 4 |"
    )
    assert SECOND.markdown.endswith("| c | 0.12 |\n\nA note.")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    marks = (f"{RESULTS.mark(title)}old\n<!-- end -->\n" for title in RESULTS.texts)
    path.write_text("# By hand\n" + "\nprose\n".join(marks) + "the end\n")
    return path


def test_page_keeps_its_hand_written_text(page: Path) -> None:
    for _ in range(2):
        write_page(page, RESULTS)
        text = page.read_text()
        assert "<!-- made by `make it`: about -->\nqkv 1.0; warm-up 5 calls.\n<!-- end -->" in text
        assert SECOND.markdown in text
        assert text.count("prose") == 2
        assert text.startswith("# By hand\n")
        assert text.endswith("the end\n")
        assert "old" not in text


def test_table_without_a_place_is_an_error(page: Path) -> None:
    other = Results("make it", {}, [Table("third", ["a"], [])])
    with pytest.raises(ValueError, match=r"page\.md has no <!-- made by `make it`: third -->"):
        write_page(page, other)


def test_results_are_read_from_the_json_that_was_written(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    tables.add_options(parser)
    file = page.with_suffix(".json")
    tables.finish(RESULTS, page, parser.parse_args(["--json", str(file), "--write"]))
    assert FIRST.markdown in capsys.readouterr().out
    assert tables.read_results(file).texts == RESULTS.texts
    assert SECOND.markdown in page.read_text()
