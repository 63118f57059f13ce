"""Parser for the numbers in a variant's SVG picture."""

from __future__ import annotations

import re
from typing import Final
from xml.etree import ElementTree

SVG: Final = "{http://www.w3.org/2000/svg}"


def parse_svg(svg: str | None) -> ElementTree.Element:
    """Returns the parsed picture."""
    assert svg is not None
    return ElementTree.fromstring(svg)


def panel_cells(svg: str | None) -> list[dict[tuple[int, int], float]]:
    """Returns the numbers of each panel by (row, column); empty cells are absent."""
    panels = []
    for group in parse_svg(svg).iter(f"{SVG}g"):
        titled = [p for p in group.findall(f"{SVG}path") if p.find(f"{SVG}title") is not None]
        if not titled:
            continue
        found: dict[tuple[int, int], float] = {}
        for path in titled:
            number = float(path.findtext(f"{SVG}title") or "nan")
            runs = re.findall(r"M(\d+) (\d+)h(\d+)v1h-(\d+)z", path.get("d") or "")
            assert runs
            for column, row, size, back in runs:
                assert size == back
                for j in range(int(column), int(column) + int(size)):
                    assert found.setdefault((int(row), j), number) == number
        panels.append(found)
    return panels
