"""Messages between workers and the device process, as the payloads of frames. No tensor is in one.

A worker sends the jobs of one turn of its event loop in one frame, and the device process sends the
results of one turn in one frame. `Channel` sends frames.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NamedTuple, Self

__all__ = [
    "JobRequest",
    "JobTimes",
    "MessageType",
    "pack_id",
    "pack_plan",
    "pack_results",
    "unpack_id",
    "unpack_plan",
    "unpack_results",
]

_JOB_REQUEST: Final = struct.Struct("<QIQQBdd")
_JOB_TIMES: Final = struct.Struct("<QddddI")
_ID: Final = struct.Struct("<Q")
_NUMBER: Final = struct.Struct("<I")
_LABEL_SIZE: Final = struct.Struct("<H")
_NO_DEADLINE: Final = -1.0


class MessageType(IntEnum):
    """The type of a frame."""

    PLAN = 1  # from the worker: the number of a plan, and its header
    RUN = 2  # from the worker: run jobs; the payload has a `JobRequest` for each
    CANCEL = 3  # from the worker: cancel a job
    READY = 4  # from the device process: it accepts jobs
    RESULTS = 5  # from the device process: a label, and a `JobTimes` for each of its jobs
    ERROR = 6  # from the device process: a job failed; the payload has the problem
    RELEASED = 7  # from the device process: it no longer reads a cancelled job's inputs


class JobRequest(NamedTuple):
    """A request to run a job. Frames have as many of them as a worker submits in one turn.

    Attributes:
        id: the worker's number for it.
        plan: number of its plan, which an earlier frame defines.
        inputs_offset: offset of its tensors in the worker's region.
        outputs_offset: offset of the memory for its outputs.
        priority: as `Engine.submit` takes it.
        enqueued_at: time of submission, by `time.perf_counter`, one clock for all processes.
        wait_s: as `Engine.submit` takes it.
    """

    id: int
    plan: int
    inputs_offset: int
    outputs_offset: int
    priority: int
    enqueued_at: float
    wait_s: float | None

    def pack(self) -> bytes:
        """Returns the request as bytes."""
        *numbers, wait_s = self
        return _JOB_REQUEST.pack(*numbers, _NO_DEADLINE if wait_s is None else wait_s)

    @classmethod
    def unpack_all(cls, data: bytes) -> list[Self]:
        """Returns the requests that `pack` encoded, from the bytes of all of them."""
        requests = map(cls._make, _JOB_REQUEST.iter_unpack(data))
        return [r._replace(wait_s=None) if r.wait_s == _NO_DEADLINE else r for r in requests]


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

    def pack(self) -> bytes:
        """Returns the figures as bytes."""
        return _JOB_TIMES.pack(*self)


def pack_id(id: int) -> bytes:
    """Returns the number of a job as bytes."""
    return _ID.pack(id)


def unpack_id(data: bytes) -> tuple[int, bytes]:
    """Returns the number that `pack_id` encoded, and the bytes after it."""
    return _ID.unpack_from(data)[0], data[_ID.size :]


def pack_plan(number: int, header: bytes) -> bytes:
    """Returns the payload of a PLAN frame."""
    return _NUMBER.pack(number) + header


def unpack_plan(payload: bytes) -> tuple[int, bytes]:
    """Returns number and header of a PLAN frame."""
    return _NUMBER.unpack_from(payload)[0], payload[_NUMBER.size :]


def pack_results(label: bytes, times: Iterable[bytes]) -> bytes:
    """Returns the payload of a RESULTS frame.

    Args:
        label: as `job_codec.encode_label` returns it.
        times: packed `JobTimes` of the jobs.
    """
    return b"".join((_LABEL_SIZE.pack(len(label)), label, *times))


def unpack_results(payload: bytes) -> tuple[bytes, list[JobTimes]]:
    """Returns label and times of a RESULTS frame."""
    first = _LABEL_SIZE.size
    end = first + _LABEL_SIZE.unpack_from(payload)[0]
    times = map(JobTimes._make, _JOB_TIMES.iter_unpack(payload[end:]))
    return payload[first:end], list(times)
