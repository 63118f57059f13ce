"""The results of all checks of a variant, for `qkv check-variant` and the tests.

`check_file` and `check` are the entry points.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from qkv.attention import catalogue
from qkv.attention.contract import CHECKS, Skipped, Violation
from qkv.attention.variant import Variant
from qkv.attention.variant_file import BrokenVariant, one_line


class CheckResult(NamedTuple):
    """The result of one check.

    Attributes:
        reason: of a failure or a skip; else a remark, which may be empty.
    """

    name: str
    status: Literal["pass", "FAIL", "skip"]
    reason: str


def check_file(path: Path) -> Iterator[CheckResult]:
    """Loads a variant file and yields the result of each check.

    If the file is broken, the only result is a failure of `loads`, whose reason has an example.
    """
    try:
        variant = catalogue.load(path)
    except BrokenVariant as error:
        yield CheckResult("loads", "FAIL", str(error))
        return
    yield CheckResult("loads", "pass", variant.summary)
    yield from check(variant)


def check(variant: Variant) -> Iterator[CheckResult]:
    """Yields the result of each check of `CHECKS`. An exception of the variant is a failure."""
    for name, function in CHECKS.items():
        try:
            yield CheckResult(name, "pass", function(variant) or "")
        except Skipped as reason:
            yield CheckResult(name, "skip", str(reason))
        except Violation as reason:
            yield CheckResult(name, "FAIL", str(reason))
        except Exception as error:  # the variant's file may raise anything
            yield CheckResult(name, "FAIL", f"it raises {type(error).__name__}: {one_line(error)}")
