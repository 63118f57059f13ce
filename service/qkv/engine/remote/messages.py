"""Messages between workers and the device process, as the payloads of frames. No tensor is in one.

A worker sends the jobs of one turn of its event loop in one frame, and the device process sends the
results of one turn in one frame. `Channel` sends frames.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any, Final, NamedTuple, Self

__all__ = [
    "NO_DEADLINE",
    "JobRequest",
    "JobTimes",
    "MessageType",
    "pack_id",
    "pack_results",
    "pack_times",
    "unpack_id",
    "unpack_results",
]

_JOB_REQUEST: Final = struct.Struct("<QQQBddI")
_JOB_TIMES: Final = struct.Struct("<QddddI")
_ID: Final = struct.Struct("<Q")
_NAME_SIZE: Final = struct.Struct("<H")

NO_DEADLINE: Final = math.inf
"""The deadline of a job that may wait for ever."""


class MessageType(IntEnum):
    """The type of a frame."""

    RUN = 1  # from the worker: run jobs; the payload has a `JobRequest` for each
    CANCEL = 2  # from the worker: cancel a job
    READY = 3  # from the device process: it accepts jobs
    RESULTS = 4  # from the device process: a backend, and a `JobTimes` for each of its jobs
    ERROR = 5  # from the device process: it did not complete a job; the payload has the problem
    RELEASED = 6  # from the device process: it no longer reads a cancelled job's inputs


class JobRequest(NamedTuple):
    """A request to run a job. Frames have as many of them as a worker submits in one turn.

    Attributes:
        id: the worker's number for it.
        inputs_offset: offset of its tensors in the worker's region.
        outputs_offset: offset of the memory for its outputs.
        priority: as `Engine.submit` takes it.
        enqueued_at: time of submission, by `time.perf_counter`, one clock for all processes.
        deadline: time at which it expires, by the same clock, or `NO_DEADLINE`.
        plan: its plan, as `Plan.encoded`.
    """

    id: int
    inputs_offset: int
    outputs_offset: int
    priority: int
    enqueued_at: float
    deadline: float
    plan: bytes

    def pack(self) -> bytes:
        """Returns the request as bytes."""
        return _JOB_REQUEST.pack(*self[:-1], len(self.plan)) + self.plan

    @classmethod
    def unpack_all(cls, data: bytes) -> list[Self]:
        """Returns the requests that `pack` encoded, from the bytes of all of them."""
        requests, first = [], 0
        while first < len(data):
            head = _JOB_REQUEST.unpack_from(data, first)
            plan_at = first + _JOB_REQUEST.size
            first = plan_at + head[-1]
            requests.append(cls._make((*head[:-1], data[plan_at:first])))
        return requests


class JobTimes(NamedTuple):
    """The measured figures of a job whose outputs are in shared memory.

    Attributes:
        id: the worker's number for the job.
        queue_ms, transfer_ms, compute_ms, total_ms, batch_size: as in `JobResult.timing`.
    """

    id: int
    queue_ms: float
    transfer_ms: float
    compute_ms: float
    total_ms: float
    batch_size: int


def pack_id(id: int) -> bytes:
    """Returns the number of a job as bytes."""
    return _ID.pack(id)


def unpack_id(data: bytes) -> tuple[int, bytes]:
    """Returns the number that `pack_id` encoded, and the bytes after it."""
    return _ID.unpack_from(data)[0], data[_ID.size :]


def pack_times(id: int, timing: Mapping[str, Any]) -> bytes:
    """Returns the measured figures of a job as bytes.

    Args:
        id: the worker's number for the job.
        timing: as `JobResult.timing`.
    """
    return _JOB_TIMES.pack(
        id,
        timing["queue_ms"],
        timing["transfer_ms"],
        timing["compute_ms"],
        timing["total_ms"],
        timing["batch_size"],
    )


def pack_results(backend: str, times: Iterable[bytes]) -> bytes:
    """Returns the payload of a RESULTS frame.

    Args:
        backend: the name of the code path that ran its jobs.
        times: of each job, as `pack_times` returns them.
    """
    name = backend.encode()
    return b"".join((_NAME_SIZE.pack(len(name)), name, *times))


def unpack_results(payload: bytes) -> tuple[str, list[JobTimes]]:
    """Returns backend and times of a RESULTS frame."""
    first = _NAME_SIZE.size
    end = first + _NAME_SIZE.unpack_from(payload)[0]
    times = map(JobTimes._make, _JOB_TIMES.iter_unpack(payload[end:]))
    return payload[first:end].decode(), list(times)
