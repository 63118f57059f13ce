"""Messages between workers and the device process, as the payloads of frames. No tensor is in one.

A worker sends the jobs of one turn of its event loop in one frame, and the device process sends the
results of one turn in one frame. `Channel` sends frames.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NamedTuple, Self

import orjson

from qkv.jobs.result import Result
from qkv.jobs.tenant import Tenant
from qkv.telemetry.times import Times

__all__ = [
    "NO_DEADLINE",
    "JobRequest",
    "MessageType",
    "pack_id",
    "pack_result",
    "pack_results",
    "unpack_id",
    "unpack_results",
]

_JOB_REQUEST: Final = struct.Struct("<QQQBdddBI")
_RESULT: Final = struct.Struct("<QIQ5d")
_ID: Final = struct.Struct("<Q")
_TEXTS_SIZE: Final = struct.Struct("<H")

NO_DEADLINE: Final = math.inf
"""The deadline of a job that may wait for ever."""


class MessageType(IntEnum):
    """The type of a frame."""

    RUN = 1  # from the worker: run jobs; the payload has a `JobRequest` for each
    CANCEL = 2  # from the worker: cancel a job
    READY = 3  # from the device process: it accepts jobs
    RESULTS = 4  # from the device process: backend and notes, and what was measured of such jobs
    ERROR = 5  # from the device process: it did not complete a job; the payload has the problem
    RELEASED = 6  # from the device process: it no longer reads a cancelled job's inputs


class JobRequest(NamedTuple):
    """A request to run a job. Frames have as many of them as a worker submits in one turn.

    Attributes:
        id: the worker's number for it.
        inputs_offset: offset of its tensors in the worker's region.
        outputs_offset: offset of the memory for its outputs.
        priority: one of `job.PRIORITIES`.
        submitted_at: time of submission, by `time.perf_counter`, one clock for all processes.
        deadline: time at which it expires, by the same clock, or `NO_DEADLINE`.
        tenant: whose job it is.
        plan: its plan, as `plan_codec.encode` returns it.
    """

    id: int
    inputs_offset: int
    outputs_offset: int
    priority: int
    submitted_at: float
    deadline: float
    tenant: Tenant
    plan: bytes

    def pack(self) -> bytes:
        """Returns the request as bytes."""
        name, weight = self.tenant.name.encode(), self.tenant.weight
        head = _JOB_REQUEST.pack(*self[:-2], weight, len(name), len(self.plan))
        return head + name + self.plan

    @classmethod
    def unpack_all(cls, data: bytes) -> list[Self]:
        """Returns the requests that `pack` encoded, from the bytes of all of them."""
        requests, first = [], 0
        while first < len(data):
            *numbers, weight, name_size, plan_size = _JOB_REQUEST.unpack_from(data, first)
            name_at = first + _JOB_REQUEST.size
            plan_at = name_at + name_size
            first = plan_at + plan_size
            tenant = Tenant(data[name_at:plan_at].decode(), weight)
            requests.append(cls._make((*numbers, tenant, data[plan_at:first])))
        return requests


def pack_id(id: int) -> bytes:
    """Returns the number of a job as bytes."""
    return _ID.pack(id)


def unpack_id(data: bytes) -> tuple[int, bytes]:
    """Returns the number that `pack_id` encoded, and the bytes after it."""
    return _ID.unpack_from(data)[0], data[_ID.size :]


def pack_result(id: int, result: Result) -> bytes:
    """Returns what was measured of a job, without its outputs.

    Args:
        id: the worker's number for the job.
        result: of the job.
    """
    t = result.times
    seconds = t.load_s, t.compute_s, t.split_s, t.queue_s, t.total_s
    return _RESULT.pack(id, result.batch_size, result.peak_bytes, *seconds)


def pack_results(backend: str, notes: Iterable[str], results: Iterable[bytes]) -> bytes:
    """Returns the payload of a RESULTS frame.

    Args:
        backend: the name of the code path that ran its jobs.
        notes: of each of them.
        results: of each job, as `pack_result` returns them.
    """
    texts = orjson.dumps([backend, *notes])
    return b"".join((_TEXTS_SIZE.pack(len(texts)), texts, *results))


def unpack_results(payload: bytes, device: str) -> list[tuple[int, Result]]:
    """Returns the number of each job of a RESULTS frame, and its result without outputs.

    Args:
        payload: of the frame.
        device: the name of the device that ran the jobs.
    """
    first = _TEXTS_SIZE.size
    end = first + _TEXTS_SIZE.unpack_from(payload)[0]
    backend, *notes = orjson.loads(payload[first:end])
    results = []
    for id, batch_size, peak_bytes, *seconds in _RESULT.iter_unpack(payload[end:]):
        result = Result(
            {}, Times(*seconds), backend, batch_size, device=device, notes=tuple(notes),
            peak_bytes=peak_bytes,
        )  # fmt: skip
        results.append((id, result))
    return results
