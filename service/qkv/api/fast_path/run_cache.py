"""Cache of repeated small requests: they run as soon as their last byte is received."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from qkv.api.fast_path.body_layout import BodyLayout, Chunk, InputBuffer, Layout
from qkv.api.fast_path.job_cache import LONGEST_HEAD
from qkv.api.job_runner import JobRunner, RunResult, to_run_result
from qkv.engine.accounting import InlineRun
from qkv.engine.executor import PreparedRun
from qkv.jobs.job import Job
from qkv.tensors import RawTensor

__all__ = ["CachedRuns", "Done", "Header", "Reply", "RequestKey", "RunCache"]

Header = tuple[bytes, bytes]

_MOST: Final = 256  # kept, those that came last: what is said before bodies,
_MOST_HEADS: Final = 16  # and heads of bodies behind each of them; each a few KiB, 16 at most
_IDLE: Final = frozenset(  # a key was looked at before
    (
        *(b"authorization", b"host", b"user-agent", b"x-request-id"),
        *(b"traceparent", b"tracestate", b"baggage"),
    )
)
_PLAIN: Final = frozenset(
    (
        *(b"accept", b"accept-encoding", b"accept-language", b"content-length", b"content-type"),
        b"inference-header-content-length",
    )
)


class RequestKey(NamedTuple):
    """Request line and headers, without those that change no response."""

    url: bytes
    headers: tuple[Header, ...]

    @classmethod
    def of(cls, url: bytes, headers: Iterable[Header]) -> RequestKey:
        """Of a request's line and its headers, names in lower case."""
        return cls(url, tuple([header for header in headers if header[0] not in _IDLE]))

    @property
    def is_plain(self) -> bool:
        """True for one body of a known length on a connection that stays open."""
        names = [name for name, _ in self.headers]
        return _PLAIN.issuperset(names) and names.count(b"content-length") == 1

    @property
    def size(self) -> int:
        """Bytes of the body, which is plain."""
        return int(dict(self.headers)[b"content-length"])

    @property
    def length(self) -> int:
        """Bytes of the request line and all headers."""
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)


class Reply(NamedTuple):
    """An answer of status 200: lines of headers, each with its end, but for Content-Length; the
    body; and the variant that gave it."""

    lines: bytes
    body: list[Chunk]
    variant: str


class _Plan(NamedTuple):
    prepared_run: PreparedRun
    is_open: Callable[[], bool]
    written: Callable[[RunResult], Reply]


class Done(NamedTuple):
    """A completed run, and the time of the request's last byte."""

    plan: _Plan
    inline_run: InlineRun
    received: float


class CachedRuns(NamedTuple):
    """Body layout of one URL with its headers, and cached runs by text of the body."""

    layout: Layout
    plans: OrderedDict[bytes, _Plan]


class RunCache:
    """Runs requests that differ from earlier ones in numbers only.

    The tensors of such a body are laid where the last ones lay, and stand there already: nothing
    is parsed, checked or placed anew. Jobs are those that the engine runs at once. To be used
    on the event loop alone.

    Args:
        job_runner: what job_runner them.
    """

    def __init__(self, job_runner: JobRunner) -> None:
        self._job_runner, self._room = job_runner, InputBuffer()
        self._known: OrderedDict[RequestKey, CachedRuns] = OrderedDict()

    def find(self, asked: RequestKey) -> CachedRuns | None:
        """Returns the cached runs of such a request; None for a new one."""
        return self._known.get(asked)

    def run(self, known: CachedRuns, chunks: Sequence[Chunk]) -> Done | None:
        """Runs the request of a body; None if it must take the ordinary path."""
        received = time.perf_counter()
        words = known.layout.lay(chunks, self._room)
        plan = None if words is None else known.plans.get(words)
        if plan is None or not plan.is_open():
            return None
        inline_run = self._job_runner.run_prepared(plan.prepared_run)
        return None if inline_run is None else Done(plan, inline_run, received)

    def reply(self, done: Done) -> Reply:
        """Returns the response to a run, after counting it."""
        plan, inline_run, received = done
        reply = plan.written(to_run_result(inline_run.to_result(), received, inline_run.job))
        self._job_runner.record_inline_run(inline_run)
        return reply

    def keep(
        self,
        asked: RequestKey,
        laid: BodyLayout | None,
        job: Job,
        written: Callable[[RunResult], Reply],
        is_open: Callable[[], bool] = lambda: True,
    ) -> None:
        """Caches the run of a request if its repetition can run at once.

        Args:
            asked: what it said before its body.
            laid: how its body was told apart; None: it was not.
            job: what it asked for.
            written: makes an answer of a run.
            is_open: whether it may be answered at all, now.
        """
        if laid is None or not asked.is_plain or asked.length > LONGEST_HEAD:
            return
        if not self.may_keep(job):
            return
        known = self._known.get(asked)
        if known is None or known.layout != laid.layout:
            known = self._known[asked] = CachedRuns(laid.layout, OrderedDict())
        inputs, room = job.inputs.tensors, self._room.data
        tensors = {
            name: RawTensor(inputs[name].dtype, inputs[name].shape, room[first:last])
            for name, (first, last) in laid.places.items()
        }
        first = min(first for first, _ in laid.places.values())
        last = max(last for _, last in laid.places.values())
        together = sum(tensor.nbytes for tensor in tensors.values()) == last - first
        prepared_run = PreparedRun(
            job.with_tensors(tensors), room[first:last] if together else None
        )
        known.plans[laid.words] = _Plan(prepared_run, is_open, written)
        if len(known.plans) > _MOST_HEADS:
            known.plans.popitem(last=False)
        if len(self._known) > _MOST:
            self._known.popitem(last=False)

    def may_keep(self, job: Job) -> bool:
        """True if such a job can run at once when it is repeated."""
        return job.inputs.layer is None and self._job_runner.can_run_inline(job)
