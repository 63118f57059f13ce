"""Comparisons and sweeps: ordinary runs of a `Runner`, whose results the host compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from qkv.attention.layers.layer import Layer
from qkv.jobs.plan import Plan
from qkv.jobs.result import Result
from qkv.tensors import RawTensor

_T = TypeVar("_T")


class Runner(Protocol):
    """The place where a comparison or a sweep runs: the engine of a service, or this thread."""

    async def run(
        self, plan: Plan, tensors: Mapping[str, RawTensor], layer: Layer | None = None
    ) -> Result:
        """Runs a plan.

        Raises:
            QkvError: the run failed.
        """

    async def compute(self, work: Callable[[], _T]) -> _T:
        """Returns the result of work of the host. If the caller is cancelled, it still waits for
        work that has begun, which holds memory."""

    def reserve(self, size: int) -> AbstractContextManager[Any]:
        """Reserves `size` bytes for inputs.

        Raises:
            QkvError: the service cannot hold that many bytes now.
        """
