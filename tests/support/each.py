"""A decorator that runs a test for each of several values, as one test."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


def each(
    names: str | Sequence[str], values: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test for each value, with the same random numbers; a failure names its case.

    It has the arguments of `pytest.mark.parametrize`, for cases that take milliseconds: hundreds of
    tests take longer to collect and report than their cases take to run.
    """
    keys = [names] if isinstance(names, str) else list(names)
    cases = [dict(zip(keys, v if len(keys) > 1 else [v], strict=True)) for v in values]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(**others: Any) -> None:
            for case in cases:
                torch.manual_seed(0)
                try:
                    test(**case, **others)
                except Exception as error:
                    error.add_note(f"case: {case}")
                    raise

        signature = inspect.signature(test)
        left = [p for n, p in signature.parameters.items() if n not in keys]
        run.__dict__.update(test.__dict__)
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        return run

    return decorate
