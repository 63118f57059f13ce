"""Runs tests with the plugin of pytest, in this process, on functions that are right or wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

Run = Callable[..., pytest.RunResult]

PLUGIN: Final = ("-p", "qkv_pytest", "-p", "no:cacheprovider", "--strict-markers", "-W", "error")
QUICK: Final = 'families=["normal"], gradients=False'
KERNELS: Final = """\
import pytest, torch

QUICK = dict(families=["normal"], gradients=False)

def right(query, key, value, causal=False):
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ value

def unscaled(query, key, value):
    return (query @ key.mT).softmax(-1) @ value

def only_float32(query, key, value):
    if query.dtype != torch.float32:
        raise RuntimeError("only float32")
    return right(query, key, value)

def broken(query, key, value):
    raise RuntimeError("broken")

def twice(query, key, value):
    return 2 * right(query, key, value)

def without_causal(query, key, value):
    return right(query, key, value)
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs tests in this process, with the functions of `KERNELS` and no other plugin."""
    # The tests find the plugin by -p, whether or not the entry point is installed.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("CI", "BUILD_NUMBER"):  # pytest does not cut lines there
        monkeypatch.delenv(name, raising=False)

    def run(
        tests: str, *words: str, where: str = "inprocess", columns: int = 100
    ) -> pytest.RunResult:
        monkeypatch.setenv("COLUMNS", str(columns))
        pytester.makepyfile(test_kernels=KERNELS + tests)
        result: pytest.RunResult = getattr(pytester, f"runpytest_{where}")(*PLUGIN, *words)
        return result

    return run


def one_test(call: str, *markers: str) -> str:
    """Returns a test with one call."""
    lines = [f"@pytest.mark.{marker}" for marker in markers]
    return "\n".join(["", *lines, "def test_it(qkv_oracle):", f"    {call}", ""])


def summary(result: pytest.RunResult) -> list[str]:
    """Returns the lines of the failed tests at the end of pytest's output."""
    return [line for line in result.outlines if line.startswith(("FAILED", "ERROR"))]
