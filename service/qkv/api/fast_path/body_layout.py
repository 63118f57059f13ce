"""Positions of tensors in a body whose other bytes equal those of an earlier body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import pybase64

from qkv.api.fast_path.job_cache import LONGEST_HEAD, spans
from qkv.engine.executor import ALIGNMENT
from qkv.jobs.job import SMALL_BYTES, Job
from qkv.tensors import FLOATING

__all__ = ["BodyLayout", "Chunk", "InputBuffer", "Layout", "Places", "behind", "within"]

Chunk = bytes | memoryview

Places = Mapping[str, tuple[int, int]]
"""First and last byte of each tensor in a room."""


class InputBuffer:
    """Memory for the tensors of one small request after another; `data[START:]` is aligned.

    Attributes:
        data: its bytes.
    """

    START: Final = LONGEST_HEAD

    def __init__(self) -> None:
        room = np.empty(self.START + SMALL_BYTES + ALIGNMENT, np.uint8)
        self.data = room[-(room.ctypes.data + self.START) % ALIGNMENT :].data


class Layout(Protocol):
    """A way to split a body into text and tensors; equal layouts split alike."""

    def lay(self, chunks: Sequence[Chunk], room: InputBuffer) -> bytes | None:
        """Lays a body's tensors where they belong, and returns its words; None where it is another
        kind of body."""


class BodyLayout(NamedTuple):
    """A body split into text and tensors.

    Attributes:
        layout: how.
        words: all of it but its tensors.
        places: of its tensors in the room.
    """

    layout: Layout
    words: bytes
    places: Places


class _Behind(NamedTuple):
    """Layout of a body with its tensors after the text."""

    length: int

    def lay(self, chunks: Sequence[Chunk], room: InputBuffer) -> bytes:
        end = start = InputBuffer.START - self.length
        for chunk in chunks:
            end, before = end + len(chunk), end
            room.data[before:end] = chunk
        return bytes(room.data[start : InputBuffer.START])


class _Within(NamedTuple):
    """Layout of a body with base64 tensors between text.

    Attributes:
        cuts: of each tensor the first and last byte in the body, and in the room.
    """

    cuts: tuple[tuple[int, int, int, int], ...]

    def lay(self, chunks: Sequence[Chunk], room: InputBuffer) -> bytes | None:
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        view, words, end = memoryview(body), [], 0
        for first, last, start, stop in self.cuts:
            try:  # nothing but base64, so that no string ends elsewhere than it did
                data = pybase64.b64decode(view[first:last], validate=True)
            except ValueError:
                return None
            if len(data) != stop - start:
                return None
            room.data[start:stop] = data
            words.append(body[end:first])
            end = last
        return b"".join([*words, body[end:]])


def behind(length: int, body: bytes | memoryview, job: Job) -> BodyLayout | None:
    """A body whose first bytes say all but the tensors, which are views of what follows; None where
    they are not, or not aligned."""
    found = spans(body, job)
    if found is None or length > LONGEST_HEAD:
        return None
    shift = InputBuffer.START - length
    places = {span.name: (span.first + shift, span.last + shift) for span in found}
    if any((first - InputBuffer.START) % ALIGNMENT for first, _ in places.values()):
        return None
    return BodyLayout(_Behind(length), bytes(body[:length]), places)


def within(body: bytes, job: Job) -> BodyLayout | None:
    """A body that has every tensor in base64, in the order of the job's; None where it has not."""
    cuts, places, words, end, start = [], {}, b"", 0, InputBuffer.START
    for name, tensor in job.inputs.tensors.items():
        text = pybase64.b64encode(tensor.data)
        first = body.find(b'"%b"' % text, end) + 1
        if not first or not text or tensor.dtype not in FLOATING:
            return None
        words += body[end:first]
        end, stop = first + len(text), start + tensor.nbytes
        cuts.append((first, end, start, stop))
        places[name] = (start, stop)
        start = stop + -stop % ALIGNMENT
    words += body[end:]
    return None if len(words) > LONGEST_HEAD else BodyLayout(_Within(tuple(cuts)), words, places)
