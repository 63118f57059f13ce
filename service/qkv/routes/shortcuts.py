"""Requests in words that came before: answered at once, where their last byte comes in."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from qkv.job import SMALL_BYTES, Job
from qkv.routes.prepared import LONGEST_HEAD, spans
from qkv.routes.runs import Result, Runs
from qkv.run import ALIGNMENT, Standing
from qkv.tensors import RawTensor

__all__ = ["Asked", "Header", "Reply", "Shortcuts"]

Header = tuple[bytes, bytes]
Chunk = bytes | memoryview

_MOST: Final = 256  # kept, those that came last: what is said before bodies,
_MOST_HEADS: Final = 16  # and heads of bodies behind each of them
_IDLE: Final = frozenset((b"host", b"user-agent", b"traceparent", b"tracestate", b"x-request-id"))
_PLAIN: Final = frozenset(
    (
        *(b"accept", b"accept-encoding", b"accept-language", b"content-length", b"content-type"),
        b"inference-header-content-length",
    )
)


class Asked(NamedTuple):
    """What a request says before its body, but for what changes no answer."""

    url: bytes
    headers: tuple[Header, ...]

    @classmethod
    def of(cls, url: bytes, headers: Iterable[Header]) -> Asked:
        """Of a request's line and its headers, names in lower case."""
        return cls(url, tuple([header for header in headers if header[0] not in _IDLE]))

    @property
    def is_plain(self) -> bool:
        """Whether nothing in it asks for more than an answer: one body of a known length, a
        connection that stays."""
        names = [name for name, _ in self.headers]
        return _PLAIN.issuperset(names) and names.count(b"content-length") == 1


class Reply(NamedTuple):
    """An answer of status 200: lines of headers, each with its end, but for Content-Length; and
    the body."""

    lines: bytes
    body: list[Chunk]


class _Plan(NamedTuple):
    standing: Standing
    is_open: Callable[[], bool]
    written: Callable[[Result], Reply]


class _Known(NamedTuple):
    """What came behind one url and its headers: bytes of their head, and plans by it."""

    length: int
    plans: OrderedDict[bytes, _Plan]


class Shortcuts:
    """Answers what only differs in numbers from what was answered before.

    A body of one head lies where the last one lay, and its tensors stand there already: nothing is
    parsed, checked or placed anew. Jobs are those that the engine runs at once. To be used on the
    event loop alone.

    Args:
        runs: what runs them.
    """

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._known: OrderedDict[Asked, _Known] = OrderedDict()
        room = np.empty(LONGEST_HEAD + SMALL_BYTES + ALIGNMENT, np.uint8)
        start = -(room.ctypes.data + LONGEST_HEAD) % ALIGNMENT
        self._room = room[start:].data  # what lies behind a head begins at LONGEST_HEAD

    def knows(self, asked: Asked) -> bool:
        """Whether such a request came before; only then may it be asked for an answer."""
        return asked in self._known

    def answer(self, asked: Asked, chunks: Sequence[bytes]) -> Reply | None:
        """The answer to a body; None where it has to go the long way."""
        received = time.perf_counter()
        known = self._known.get(asked)
        if known is None:
            return None
        end = start = LONGEST_HEAD - known.length
        for chunk in chunks:
            end, before = end + len(chunk), end
            self._room[before:end] = chunk
        plan = known.plans.get(bytes(self._room[start:LONGEST_HEAD]))
        if plan is None or not plan.is_open():
            return None
        ran = self._runs.run_standing(plan.standing, received)
        return None if ran is None else plan.written(ran)

    def keep(
        self,
        asked: Asked,
        head: bytes,
        body: bytes | memoryview,
        job: Job,
        is_open: Callable[[], bool],
        written: Callable[[Result], Reply],
    ) -> None:
        """Keeps how a request was answered, if the next like it can be answered at once.

        Args:
            asked: what it said before its body.
            head: the first bytes of its body, which say all but the tensors' bytes.
            body: all of it.
            job: what it asked for, its tensors views of the body.
            is_open: whether it may be answered at all, now.
            written: makes an answer of a run.
        """
        if not asked.is_plain or not self._runs.runs_now(job) or job.inputs.layer is not None:
            return
        found = spans(body, job)
        if found is None or any((span.first - len(head)) % ALIGNMENT for span in found):
            return
        known = self._known.setdefault(asked, _Known(len(head), OrderedDict()))
        offset = LONGEST_HEAD - len(head)
        tensors = {
            span.name: RawTensor(
                span.dtype, span.shape, self._room[offset + span.first : offset + span.last]
            )
            for span in found
        }
        together = sum(span.last - span.first for span in found) == len(body) - len(head)
        whole = self._room[LONGEST_HEAD : offset + len(body)] if together else None
        known.plans[head] = _Plan(Standing(job.again(tensors), whole), is_open, written)
        if len(known.plans) > _MOST_HEADS:
            known.plans.popitem(last=False)
        if len(self._known) > _MOST:
            self._known.popitem(last=False)
