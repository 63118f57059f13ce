"""GET / and /playground/{file}: the page that shows attention, from the package's own files."""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files
from typing import Final, NamedTuple

from fastapi import APIRouter, Request, Response

from qkv.errors import NotFound

__all__ = ["PAGE_TYPE", "PATHS", "router"]

PAGE_TYPE: Final = "text/html; charset=utf-8"

_TYPES: Final = {
    ".html": PAGE_TYPE,
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PAGE: Final = "index.html"

# nothing that a page could be made to say runs, goes elsewhere or is shown inside another page
_POLICY: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class _File(NamedTuple):
    content: bytes
    media_type: str
    tag: str


def _read() -> dict[str, _File]:
    """What is served, by name. The package's own files decide: no path that a client sends is ever
    looked up on a disk."""
    found = {}
    for entry in files("qkv").joinpath("playground").iterdir():
        suffix = "." + entry.name.rpartition(".")[2]
        if suffix in _TYPES:
            content = entry.read_bytes()
            tag = f'"{sha256(content).hexdigest()[:16]}"'
            found[entry.name] = _File(content, _TYPES[suffix], tag)
    return found


_FILES: Final = _read()

PATHS: Final = frozenset(("/", *(f"/playground/{name}" for name in _FILES if name != _PAGE)))
"""Every path of the page."""


def router() -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["operations"])

    @routes.get(
        "/",
        operation_id="playground",
        summary="The playground.",
        description="A page that runs variants and draws what they answer.",
    )
    async def page(request: Request) -> Response:
        return _answer(request, _FILES[_PAGE])

    @routes.get("/playground/{name}", include_in_schema=False)
    async def part(name: str, request: Request) -> Response:
        if request.url.path not in PATHS:
            raise NotFound(f"the playground has no file {name[:200]!r}")
        return _answer(request, _FILES[name])

    return routes


def _answer(request: Request, file: _File) -> Response:
    """A file, or that it has not changed: another release may have another of the same name, so it
    is asked for again, at no cost."""
    headers = _POLICY | {"ETag": file.tag, "Cache-Control": "no-cache"}
    known = request.headers.get("If-None-Match", "").split(",")
    if any(k.strip().removeprefix("W/") in (file.tag, "*") for k in known):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers | {"Content-Type": file.media_type})
