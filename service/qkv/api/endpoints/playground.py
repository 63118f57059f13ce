"""GET /, /docs and /playground/{name}: serves the files of the pages. `create_app` uses `router`.

The files are read once, from the package, when this module is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final, NamedTuple

from fastapi import APIRouter, Request, Response

from qkv.api.openapi.operation import CACHE_HEADERS, NOT_MODIFIED, problem_responses
from qkv.errors import NotFound

PAGE_TYPE: Final = "text/html; charset=utf-8"

_TYPES: Final = {
    ".html": PAGE_TYPE,
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PAGES: Final = {"index.html": "/", "docs.html": "/docs"}

# injected content cannot run scripts, send data to other hosts or be framed by another page
_POLICY: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


# Swagger UI has pictures in its style sheet, and sets styles in the HTML that it creates
_DOCS_POLICY: Final = {
    "Content-Security-Policy": _POLICY["Content-Security-Policy"]
    .replace("style-src 'self'", "style-src 'self' 'unsafe-inline'")
    .replace("img-src 'self'", "img-src 'self' data:")
}

_SWAGGER_PATHS: Final = ("swagger-ui-bundle.js", "swagger-ui.css")


class _File(NamedTuple):
    content: bytes
    media_type: str
    etag: str


def _read_files() -> dict[str, _File]:
    """Returns every file of the pages, by the path it is served at.

    The table is fixed: no path that a client sends is looked up on a disk.
    """
    top = files("qkv").joinpath("playground")
    entries = {entry.name: entry for entry in top.iterdir() if not entry.is_dir()}
    for folder in top.iterdir():
        if folder.is_dir():
            entries |= {f"{folder.name}/{entry.name}": entry for entry in folder.iterdir()}
    return {
        _PAGES.get(name, f"/playground/{name}"): _read_file(entry)
        for name, entry in entries.items()
        if _suffix(name) in _TYPES
    }


def _read_file(entry: Traversable) -> _File:
    content = entry.read_bytes()
    etag = f'"{sha256(content).hexdigest()[:16]}"'
    return _File(content, _TYPES[_suffix(entry.name)], etag)


def _suffix(name: str) -> str:
    return "." + name.rpartition(".")[2]


_FILES: Final = _read_files()

SWAGGER_PATH: Final = "/static-offline-docs"
"""The path of Swagger UI's files, which the package `fastapi_offline` has."""

PATHS: Final = frozenset(_FILES) | {f"{SWAGGER_PATH}/{name}" for name in _SWAGGER_PATHS}
"""Every path of the pages."""


def router() -> APIRouter:
    """Returns the routes of the pages and their files."""
    routes = APIRouter(tags=["operations"])

    @routes.get(
        "/",
        operation_id="playground",
        summary="The playground.",
        description="A page that runs variants and draws their outputs and weights.",
        response_class=Response,
        responses={
            200: {
                "description": "The playground.",
                "headers": CACHE_HEADERS,
                "content": {PAGE_TYPE: {"schema": {"type": "string"}}},
            },
            304: NOT_MODIFIED,
            **problem_responses(500, 503),
        },
    )
    async def get_page(request: Request) -> Response:
        return _file_response(request, _FILES["/"])

    @routes.get("/docs", include_in_schema=False)
    async def get_docs(request: Request) -> Response:
        return _file_response(request, _FILES["/docs"], _DOCS_POLICY)

    @routes.get("/playground/{name:path}", include_in_schema=False)
    async def get_file(name: str, request: Request) -> Response:
        file = _FILES.get(f"/playground/{name}")
        if file is None:
            raise NotFound(f"the playground has no file {name[:200]!r}")
        return _file_response(request, file)

    return routes


def _file_response(request: Request, file: _File, policy: Mapping[str, str] = {}) -> Response:
    """Returns the file, or 304 if the client has this version of it.

    Clients revalidate each time: another release may have another file of the same name.

    Args:
        request: the request.
        file: the file.
        policy: headers that differ from those of other files.
    """
    headers = {**_POLICY, **policy, "ETag": file.etag, "Cache-Control": "no-cache"}
    known_etags = request.headers.get("If-None-Match", "").split(",")
    if any(etag.strip().removeprefix("W/") in (file.etag, "*") for etag in known_etags):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers | {"Content-Type": file.media_type})
