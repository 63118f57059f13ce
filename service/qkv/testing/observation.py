"""The results of a function on one call, with the exact ones."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from qkv.testing.call import Call
from qkv.testing.truth import Truth


class Observation(NamedTuple):
    """The results of a function on one call.

    Attributes:
        call: the call.
        truth: its exact results and budgets.
        results: the function's results by name, with at least `output`.
        has_failed: True if a result is over budget.
    """

    call: Call
    truth: Truth
    results: dict[str, Tensor]
    has_failed: bool
