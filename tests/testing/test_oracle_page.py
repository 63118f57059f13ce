"""Tests that docs/oracle.md is true and complete."""

from __future__ import annotations

import inspect
import re

import pytest

from qkv.testing import KNOWN_BUGS, verify
from qkv.testing.known_bugs import LOW_PRECISION
from support.paths import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = (ROOT / "docs/oracle.md").read_text()


def test_example_runs() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    exec(example, {"__name__": "example"})


def test_every_known_bug_is_on_the_page() -> None:
    listed = set(re.findall(r"`([a-z-]+)`", PAGE.partition("## The diagnosis")[2]))
    assert {*KNOWN_BUGS, LOW_PRECISION} <= listed


def test_every_option_is_on_the_page() -> None:
    kinds = inspect.signature(verify).parameters.values()
    options = {p.name for p in kinds if p.kind is p.KEYWORD_ONLY}
    assert options <= set(re.findall(r"`(\w+)`", PAGE.partition("## The report")[0]))
