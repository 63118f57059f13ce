"""The native API's endpoints: a message of any wire format in, one of any out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from fastapi import Request, Response

from qkv.api.fast_path.body_layout import Laid, behind, within
from qkv.api.fast_path.run_cache import Asked, Reply, Shortcuts
from qkv.api.job_runner import Result, Runs
from qkv.api.request_body import Outgoing, Received, elsewhere, read
from qkv.jobs.job import Job
from qkv.settings import Settings
from qkv.wire import json
from qkv.wire.message import Message

__all__ = ["Native"]

_EFFORT: Final = {"base64": 0.1}  # of writing a byte, beside numbers in lists


class Native:
    """Makes endpoints.

    Args:
        runs: what runs their jobs.
        shortcuts: told what may be answered at once when it comes again.
        settings: their limits.
    """

    def __init__(self, runs: Runs, shortcuts: Shortcuts, settings: Settings) -> None:
        self.runs, self._shortcuts = runs, shortcuts
        self._max_body_bytes = settings.max_body_bytes

    def endpoint(
        self, kind: type[Job], variant: str, group: str
    ) -> Callable[[Request], Awaitable[Response]]:
        """What answers a request: the tensors that a kind of job makes, which stand under
        `group`."""

        async def answer(request: Request) -> Response:
            with self.runs.enter(request) as place:
                received = await read(request, "inputs", self._max_body_bytes, place.grow)
                job = await self.runs.job(variant, received.message, kind)
            ran = await self.runs.run(request, received.at, job)
            codec, encoding = received.answer_in, received.message.encoding or "base64"

            def message(ran: Result) -> Message:
                fields = {"variant": variant, group: None, **ran.marks, "timing": ran.timing}
                return Message(fields, ran.outputs, encoding=encoding)

            def reply(ran: Result) -> Reply:
                headers = {"content-type": codec.MEDIA_TYPE, "server-timing": ran.server_timing}
                lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                return Reply(lines.encode(), codec.encode(message(ran), group), variant)

            if self._shortcuts.may_keep(job) and (codec is not json or encoding == "base64"):
                asked = Asked.of(request.scope["raw_path"], request.scope["headers"])
                self._shortcuts.keep(asked, _laid(received, job), job, reply)
            size = ran.nbytes * _EFFORT.get(encoding, 1.0) if codec is json else 0
            chunks = await elsewhere(int(size), lambda: codec.encode(message(ran), group))
            return Outgoing(chunks, codec.MEDIA_TYPE, ran.headers)

        return answer


def _laid(received: Received, job: Job) -> Laid | None:
    """Where the tensors lay in a body; None where it holds numbers in lists."""
    length = received.codec.aligned_at(bytes(received.body[:8]))
    if length is None:
        return within(bytes(received.body), job)
    return behind(length, received.body, job)
