"""The result of a job: its outputs, and what was measured of its run."""

from __future__ import annotations

from dataclasses import dataclass

from qkv.telemetry.times import Times
from qkv.tensors import RawTensor


@dataclass(slots=True, eq=False)
class Result:
    """The outputs of a job, and what was measured.

    The executor creates it; the engine adds what it knows of the queue.

    Attributes:
        outputs: tensors with the shapes and dtypes of `Plan.output_specs`.
        times: of its stages.
        backend: name of the variant's code path that ran.
        batch_size: number of jobs in the batch.
        started_at: start of its batch, by `time.perf_counter`.
        call_size: number of jobs in the call of its outputs, those that ran again included.
        device: name of the device, as responses give it.
        notes: sentences on its numbers, from the variant.
        peak_bytes: the memory that the run took beside its inputs; 0 if it was not measured.
    """

    outputs: dict[str, RawTensor]
    times: Times
    backend: str
    batch_size: int
    started_at: float = 0.0
    call_size: int = 1
    device: str = ""
    notes: tuple[str, ...] = ()
    peak_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all outputs."""
        return sum([tensor.nbytes for tensor in self.outputs.values()])
