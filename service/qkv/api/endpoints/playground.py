"""GET /, /docs and /playground/{name}: serves the files of the pages. `create_app` uses `router`.

The files are read and compressed once, from the package, when this module is imported. `make page`
makes those in `bundles` from the modules and the styles beside them: of a hundred files, a browser
would load six at a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from gzip import compress
from hashlib import sha256
from importlib.resources import files
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
_PLACES: Final = {
    "/": "index.html",
    "/docs": "docs.html",
    "/playground/icon.svg": "icon.svg",
    "/playground/page.css": "bundles/page.css",
    "/playground/page.js": "bundles/page.js",
    "/playground/docs.js": "bundles/docs.js",
}
"""The file of each path, in the folder `playground`. No path that a client sends is looked up on a
disk."""

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

_GZIP: Final = re.compile(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))")  # unless it is refused

_SWAGGER_PATHS: Final = ("swagger-ui-bundle.js", "swagger-ui.css")


class _File(NamedTuple):
    content: bytes
    compressed: bytes
    media_type: str
    etag: str


def _read_file(place: str) -> _File:
    content = files("qkv").joinpath("playground", place).read_bytes()
    etag = f'"{sha256(content).hexdigest()[:16]}"'
    media_type = _TYPES["." + place.rpartition(".")[2]]
    return _File(content, compress(content, mtime=0), media_type, etag)


_FILES: Final = {path: _read_file(place) for path, place in _PLACES.items()}

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
    """Returns the file, compressed if the client allows it, or 304 if it has this version.

    Clients revalidate each time: another release may have another file of the same name.

    Args:
        request: the request.
        file: the file.
        policy: headers that differ from those of other files.
    """
    headers = {**_POLICY, **policy, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    content, headers["ETag"] = file.content, file.etag
    if _GZIP.search(request.headers.get("Accept-Encoding", "")):
        content, headers["ETag"] = file.compressed, f"W/{file.etag}"
        headers["Content-Encoding"] = "gzip"
    known_etags = request.headers.get("If-None-Match", "").split(",")
    if any(etag.strip().removeprefix("W/") in (file.etag, "*") for etag in known_etags):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers | {"Content-Type": file.media_type})
