"""Cache of validated jobs by request head: a known head is not validated again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np

from qkv.jobs.job import Job
from qkv.tensors import FLOATING, RawTensor

__all__ = ["LONGEST_HEAD", "JobCache", "TensorSpan", "spans"]

_T = TypeVar("_T")

LONGEST_HEAD: Final = 4096
"""Bytes; longer heads are not kept."""

_MOST: Final = 256  # heads that are kept, those that came last


class TensorSpan(NamedTuple):
    """Position, dtype and shape of a tensor in a body."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int


class _Known(NamedTuple, Generic[_T]):
    asked: _T
    job: Job
    spans: tuple[TensorSpan, ...]
    length: int


class JobCache(Generic[_T]):
    """Cache of jobs by the head of a request: everything before the bytes of its tensors.

    Two bodies of one head and one length differ in numbers alone. What is not checked in numbers
    (any float is welcome) need not be checked twice. Answers are not kept.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, _Known[_T]] = OrderedDict()

    def again(self, key: Hashable, body: bytes | memoryview) -> tuple[_T, Job] | None:
        """Returns the cached job of this head with the numbers of this body, or None."""
        known = self._known.get(key)
        if known is None or known.length != len(body):
            return None
        self._known.move_to_end(key)
        view = memoryview(body)
        tensors = {
            name: RawTensor(dtype, shape, view[first:last])
            for name, dtype, shape, first, last in known.spans
        }
        return known.asked, known.job.with_tensors(tensors)

    def keep(self, key: Hashable, body: bytes | memoryview, asked: _T, job: Job) -> None:
        """Keeps a job whose tensors are views of the body, and floats; others are let be.

        Args:
            key: the head, and whatever else says what becomes of it.
            body: it was made of.
            asked: what else is to be known again; nothing of the body.
        """
        found = spans(body, job)
        if found is None or job.inputs.layer is not None:
            return
        _ = job.is_small, job.bytes_out, job.arguments  # found of the shapes, once
        self._known[key] = _Known(asked, job.with_tensors({}), found, len(body))
        if len(self._known) > _MOST:
            self._known.popitem(last=False)


def spans(body: bytes | memoryview, job: Job) -> tuple[TensorSpan, ...] | None:
    """Returns the positions of a job's tensors; None if one lies elsewhere or is checked."""
    start = np.frombuffer(body, np.uint8).ctypes.data
    found = []
    for name, tensor in job.inputs.tensors.items():
        first = np.frombuffer(tensor.data, np.uint8).ctypes.data - start
        last = first + tensor.nbytes
        if tensor.dtype not in FLOATING or not 0 <= first <= last <= len(body):
            return None
        found.append(TensorSpan(name, tensor.dtype, tensor.shape, first, last))
    return tuple(found)
