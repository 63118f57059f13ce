"""Number of examples of property tests."""

from __future__ import annotations

from typing import Any, Final

from hypothesis import HealthCheck, settings

_TESTS: Final = settings(
    deadline=None,  # no property concerns time, and other tests run in parallel
    suppress_health_check=[HealthCheck.too_slow],
)


def load_profile() -> None:
    """Makes these settings the default of Hypothesis."""
    settings.register_profile("tests", _TESTS)
    settings.load_profile("tests")


def examples(count: int, **others: Any) -> settings:
    """Returns the settings of a property test: its number of examples, and others."""
    return settings(_TESTS, max_examples=count, **others)
