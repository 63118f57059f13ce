"""A small server on a real socket that says what a test wrote down, and keeps what it hears."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

__all__ = ["Heard", "Line", "broken", "document", "events", "refusal", "spoken", "sse"]

Line = Callable[[BaseHTTPRequestHandler], None]
"""What is said to one request."""

EVENTS: Final = "text/event-stream"


@dataclass
class Heard:
    """What came.

    Attributes:
        url: where it is said.
        paths: of requests, in order.
        bodies: of requests, as they came.
        headers: of requests, by their names in lower case.
        left: set once a caller has closed its connection while it was spoken to.
    """

    url: str = ""
    paths: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)

    @property
    def said(self) -> Any:
        """The last body, read as JSON."""
        return json.loads(self.bodies[-1])


@contextlib.contextmanager
def spoken(*lines: Line) -> Iterator[Heard]:
    """Says a line to each request in turn, the last one to all that follow."""
    heard, left = Heard(), list(lines)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            heard.paths.append(self.path)
            heard.headers.append({name.lower(): value for name, value in self.headers.items()})
            heard.bodies.append(self.rfile.read(int(self.headers["content-length"])))
            line = left.pop(0) if len(left) > 1 else left[0]
            with contextlib.suppress(ConnectionError):
                line(self)
                return
            heard.left.set()

        def log_message(self, format: str, *words: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Who is spoken to may leave at any time."""
            if not isinstance(sys.exception(), ConnectionError):
                super().handle_error(request, client_address)

    server = Server(("127.0.0.1", 0), Handler)
    heard.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield heard
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def document(content: Any, status: int = 200, kind: str = "application/json", **more: str) -> Line:
    """A whole answer; keywords are further headers."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()

    def say(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        headers = {"content-type": kind, "content-length": str(len(body)), **more}
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return say


def refusal(status: int, name: str, **headers: str) -> Line:
    """A problem document."""
    problem = {"type": f"urn:qkv:problem:{name}", "status": status, "detail": "because"}
    return document(problem, status, "application/problem+json", **headers)


def broken(handler: BaseHTTPRequestHandler) -> None:
    """The connection closes without a word."""
    handler.close_connection = True


def sse(name: str, said: Any) -> bytes:
    """One event."""
    return f"event: {name}\ndata: {json.dumps(said)}\n\n".encode()


def events(*chunks: bytes, end: str = "whole", kind: str = EVENTS) -> Line:
    """A stream of events, chunk by chunk. Its end is "whole"; or "cut", where the connection
    closes amid the answer; or "held", where comments follow until the caller leaves."""

    def say(handler: BaseHTTPRequestHandler) -> None:
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

    return say


def _chunk(handler: BaseHTTPRequestHandler, content: bytes) -> None:
    handler.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
    handler.wfile.flush()
