"""The result of a job: its outputs, and what was measured of its run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from qkv.tensors import RawTensor

__all__ = ["Result", "Times"]


class Times(NamedTuple):
    """The times of the stages of a request, in seconds.

    Attributes:
        queue_s: in the queue.
        transfer_s: aligning the tensors, moving them to the device and back, splitting a batch.
        compute_s: projections and variant; on a GPU between two events.
        total_s: from the last byte of the request, or from the submission of the job.
    """

    queue_s: float
    transfer_s: float
    compute_s: float
    total_s: float


@dataclass(slots=True, eq=False)
class Result:
    """The outputs of a job, and what was measured.

    The executor creates it; the engine adds what it knows of the queue.

    Attributes:
        outputs: tensors with the shapes and dtypes of `Plan.output_specs`.
        backend: name of the variant's code path that ran.
        batch_size: number of jobs in the batch.
        load_s: seconds of aligning the tensors and moving them to the device.
        compute_s: seconds of projections and variant; on a GPU between two events.
        split_s: seconds of moving the outputs back and splitting them.
        started_at: start of its batch, by `time.perf_counter`.
        stacked_count: number of jobs whose outputs are of the same call; they share its seconds.
        call_size: number of jobs in that call, those that ran again included.
        queue_s: seconds from its submission to the start of its batch.
        total_s: seconds from its submission to its result.
        device: name of the device, as responses give it.
    """

    outputs: dict[str, RawTensor]
    backend: str = ""
    batch_size: int = 1
    load_s: float = 0.0
    compute_s: float = 0.0
    split_s: float = 0.0
    started_at: float = 0.0
    stacked_count: int = 1
    call_size: int = 1
    queue_s: float = 0.0
    total_s: float = 0.0
    device: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all outputs."""
        return sum([tensor.nbytes for tensor in self.outputs.values()])

    @property
    def times(self) -> Times:
        """The times of its stages."""
        return Times(self.queue_s, self.load_s + self.split_s, self.compute_s, self.total_s)
