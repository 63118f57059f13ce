"""The application of a replica: what Ray's proxy in front of it changes."""

from __future__ import annotations

import asyncio
import re
from typing import Final

from ray.exceptions import RayError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qkv.api.error_responses import error_response
from qkv.api.observability import REQUEST_ID_HEADER
from qkv.errors import InvalidContent

_CHANGE: Final = re.compile(r"/v2/repository/models/[^/]+/(?:load|unload)")
_REFUSAL: Final = (
    "loading and unloading of models is not allowed under Ray Serve: it would reach one replica, "
    "or miss those that start later; deploy another configuration instead"
)


class ReplicaApp:
    """The service as a replica serves it.

    Ray's proxy gives each request an id, which the log has too, and adds it to the response. The
    service's own header is removed: a response has the id once. Bodies become bytes: Ray pickles
    them, and views do not pickle. A cancelled request becomes one whose client has disconnected.
    Loading and unloading of models is refused, with the status of
    Triton if its models cannot be changed by requests.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def send_to_proxy(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.get("headers", ())
                message["headers"] = [h for h in headers if h[0].lower() != REQUEST_ID_HEADER]
            elif not isinstance(message.get("body", b""), bytes):
                message["body"] = bytes(message["body"])
            await send(message)

        if scope["method"] == "POST" and _CHANGE.fullmatch(scope["path"]):
            refusal = error_response(InvalidContent(_REFUSAL), scope["path"])
            return await refusal(scope, receive, send_to_proxy)
        return await _run(self._app, scope, receive, send_to_proxy)


async def _run(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Runs the application; whatever Ray does if a client disconnects becomes a disconnect.

    Ray sends this message, cancels the request, and makes `receive` fail, in any order. Without
    this function, the application counted the last two as 503 or as an error of its own.
    """
    is_cancelled, pending = False, set[asyncio.Future[Message]]()

    async def receive_or_disconnect() -> Message:
        message = asyncio.ensure_future(receive())
        pending.add(message)
        try:
            if is_cancelled:
                message.cancel()
            return await message
        except RayError:  # the request is cancelled, or the proxy has died
            return {"type": "http.disconnect"}
        except asyncio.CancelledError:
            if not is_cancelled:
                raise
            return {"type": "http.disconnect"}
        finally:
            pending.discard(message)

    task = asyncio.ensure_future(app(scope, receive_or_disconnect, send))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        is_cancelled = True
        for message in pending:
            message.cancel()
        await task  # a second cancellation ends it
        raise
