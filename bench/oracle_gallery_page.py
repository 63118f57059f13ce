"""Writes the text of docs/oracle-gallery.md from the results of bench/oracle_gallery.py."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Sequence

import torch
from oracle_gallery_results import Row, Worked, format_number

import qkv

__all__ = ["build_summary", "build_text"]

_HEAD = (
    "| bug | switch and options | `allclose`: largest error | oracle: failed cases | "
    "largest units | diagnosis |\n| --- | --- | ---: | ---: | --- | --- |"
)


def build_summary(rows: Sequence[Row]) -> str:
    """Returns the figures of the gallery in a sentence or two."""
    close, found = sum(r.is_close for r in rows), sum(not r.report.passed for r in rows)
    named, nameable = sum(r.is_named for r in rows), sum(bool(r.bug.name) for r in rows)
    wrong = sum(r.is_accused for r in rows)
    return (
        f"Of {len(rows)} planted bugs, `torch.allclose(atol=1e-2)` passes {close}. The oracle "
        f"fails {_all_or(found, len(rows))}. It names {_all_or(named, nameable)} bugs that have a "
        f"name, and gives {wrong or 'no'} wrong name{'s' * (wrong > 1)}."
    )


def build_text(right: Sequence[Row], rows: Sequence[Row], worked: Sequence[Worked]) -> str:
    """Returns the generated part of the page.

    Args:
        right: the kernels without a bug.
        rows: the planted bugs.
        worked: the figures of the family `normal`.
    """
    parts = [
        f"qkv {qkv.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, cpu, 1 thread; seed 0.",
        _table("The right kernel", right),
        _table("Bugs that allclose passes", [r for r in rows if r.is_close]),
        _table("Bugs that allclose fails too", [r for r in rows if not r.is_close]),
        "## Blocks larger than the inputs\n\n" + "\n".join(_blocks(rows)),
        "## A worked number\n\n" + "\n".join(_worked(worked)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(heading: str, rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    return "\n".join([f"## {heading}\n", _HEAD, *map(_cells, rows)])


def _cells(row: Row) -> str:
    bug, report = row.bug, row.report
    ran = sum(case.passed is not None for case in report.cases)
    options = [f"{n}={v!r}" for n, v in bug.options.items()] + ["strict=True"] * bug.is_strict
    settings = " ".join(f"`{x}`" for x in [*([bug.switch] if bug.switch else []), *options])
    error = format_number(row.largest_error) if math.isfinite(row.largest_error) else "NaN"
    names = ", ".join(f"`{n}`" for n in report.diagnosis)
    if row.is_accused:
        names = f"wrong: {names}"
    elif not names and not report.passed:
        names = "no name" if not bug.name else "not named"
    cells = (
        bug.text, settings, f"{'passes' if row.is_close else 'fails'}: {error}",
        f"{len(report.failures)} of {ran}", row.worst, names,
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _blocks(rows: Sequence[Row]) -> Iterator[str]:
    """Yields what the oracle misses if its usual inputs are one block of the kernel."""
    missed = [r for r in rows if r.is_missed]
    yield (
        "The kernels above read blocks of 16 keys. Most families have 32 keys, and "
        "`several blocks` has 160. With blocks of "
        f"256 keys, the oracle passes {len(missed)} of the {len(rows)} kernels:"
    )
    yield ""
    for row in missed:
        found = "fails it" if row.fails_with_sizes else "passes it too"
        yield f'- {row.bug.text}; with `sizes={{"L": 600, "S": 600}}` the oracle {found}.'
    if not missed:
        yield "- none."
    yield ""
    yield "Give `sizes` that are more than two blocks of your kernel, and not a multiple of them."


def _worked(worked: Sequence[Worked]) -> Iterator[str]:
    """Yields the table of the family `normal`."""
    yield (
        "The family `normal`, shape (2, 4, 32, 16). The last three columns are the largest errors "
        "in units of the budget."
    )
    yield ""
    yield (
        "| dtype | median output | median budget | torch's kernel | this kernel | "
        "sums in bfloat16 |\n| --- | ---: | ---: | ---: | ---: | ---: |"
    )
    for each in worked:
        yield (
            f"| {each.dtype} | "
            + " | ".join(map(format_number, (each.output, each.budget, *each[3:])))
            + " |"
        )


def _all_or(count: int, total: int) -> str:
    return f"all {total}" if count == total else f"{count} of {total}"
