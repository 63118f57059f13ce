"""A small server on a real socket: it sends scripted replies and records the requests."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

Reply = Callable[[BaseHTTPRequestHandler], None]
"""Writes the response to one request."""

EVENTS: Final = "text/event-stream"


@dataclass
class ReceivedRequests:
    """The requests that a scripted server has received.

    Attributes:
        url: of the server.
        paths: of the requests, in order.
        bodies: of the requests, as received.
        headers: of the requests, by their names in lower case.
        disconnected: set once a client has closed its connection during a reply.
    """

    url: str = ""
    paths: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    disconnected: threading.Event = field(default_factory=threading.Event)

    @property
    def last_json(self) -> Any:
        """The last body, parsed as JSON."""
        return json.loads(self.bodies[-1])


@contextlib.contextmanager
def scripted_server(*replies: Reply, port: int = 0) -> Iterator[ReceivedRequests]:
    """Sends one reply to each request in turn, the last one to all that follow."""
    received, replies_left = ReceivedRequests(), list(replies)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            received.paths.append(self.path)
            received.headers.append({name.lower(): value for name, value in self.headers.items()})
            received.bodies.append(self.rfile.read(int(self.headers.get("content-length", 0))))
            reply = replies_left.pop(0) if len(replies_left) > 1 else replies_left[0]
            with contextlib.suppress(ConnectionError):
                reply(self)
                return
            received.disconnected.set()

        do_GET = do_POST

        def log_message(self, format: str, *words: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignores clients that disconnect during a reply."""
            if not isinstance(sys.exception(), ConnectionError):
                super().handle_error(request, client_address)

    server = Server(("127.0.0.1", port), Handler)
    received.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def json_reply(
    content: Any, status: int = 200, kind: str = "application/json", **more: str
) -> Reply:
    """Returns a reply with this content; keywords are further headers."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()

    def write(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        headers = {"content-type": kind, "content-length": str(len(body)), **more}
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return write


def problem_reply(status: int, name: str, **headers: str) -> Reply:
    """Returns a reply with a problem document."""
    problem = {"type": f"urn:qkv:problem:{name}", "status": status, "detail": "because"}
    return json_reply(problem, status, "application/problem+json", **headers)


def drop_connection(handler: BaseHTTPRequestHandler) -> None:
    """Closes the connection without a response."""
    handler.close_connection = True


def encode_event(name: str, data: Any) -> bytes:
    """Returns one event as bytes."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def event_reply(*chunks: bytes, end: str = "whole", kind: str = EVENTS) -> Reply:
    """Returns a reply that sends a stream of events, chunk by chunk.

    Args:
        end: "whole" ends the response, "cut" closes the connection in the middle of it, and "held"
            sends comments until the client disconnects.
    """

    def write(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("content-type", kind)
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        for chunk in chunks:
            _chunk(handler, chunk)
        if end == "whole":
            handler.wfile.write(b"0\r\n\r\n")
        elif end == "cut":
            handler.close_connection = True
        else:
            pause = threading.Event()
            while not pause.wait(0.01):
                _chunk(handler, b": still here\n\n")

    return write


def _chunk(handler: BaseHTTPRequestHandler, content: bytes) -> None:
    handler.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
    handler.wfile.flush()
