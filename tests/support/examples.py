"""Number of Hypothesis examples: at most 10 in `make test`, else the number of each test."""

from __future__ import annotations

from typing import Any, Final

from hypothesis import HealthCheck, settings

FAST_EXAMPLES: Final = 10
"""Limit of examples per test under the profile `fast`, which `make test` selects."""


def register_profiles() -> None:
    """Registers the profiles `ci` and `fast`, and loads `ci`.

    `ci` is the default: only `--hypothesis-profile=fast` draws fewer examples. Neither has a
    deadline: no property concerns time, and other tests run in parallel.
    """
    settings.register_profile(
        "ci", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=100
    )
    settings.register_profile("fast", settings.get_profile("ci"), max_examples=FAST_EXAMPLES)
    settings.load_profile("ci")


def examples(count: int, **others: Any) -> settings:
    """Returns Hypothesis settings with a number of examples.

    Args:
        count: the number under `ci`; under `fast` at most 10 of them are drawn.
        others: further settings, for `hypothesis.settings`.
    """
    is_fast = settings().max_examples == FAST_EXAMPLES
    return settings(max_examples=min(count, FAST_EXAMPLES) if is_fast else count, **others)
