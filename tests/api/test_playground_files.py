"""Tests how the playground's files are served: content, types, caching and security policy."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Final

import qkv
from qkv.api.auth import PUBLIC_PATHS
from qkv.api.endpoints.playground import PATHS
from support.service import Server

FOLDER: Final = Path(qkv.__file__).parent / "playground"
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FILES: Final = sorted(
    path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file()
)


def path_of(name: str) -> str:
    return {"index.html": "/", "docs.html": "/docs"}.get(name, f"/playground/{name}")


def test_each_file_has_a_public_path() -> None:
    swagger = {f"/static-offline-docs/swagger-ui{suffix}" for suffix in ("-bundle.js", ".css")}
    assert {path_of(name) for name in FILES} | swagger == PATHS
    assert PATHS <= PUBLIC_PATHS


def test_files_are_served_unchanged(server: Server) -> None:
    for name in FILES:
        content = (FOLDER / name).read_bytes()
        response = server.http.get(path_of(name))
        assert response.status_code == 200
        assert response.content == content
        assert response.headers["content-type"] == TYPES[Path(name).suffix]
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-content-type-options"] == "nosniff"
        head = server.http.head(path_of(name))
        assert head.status_code == 200
        assert not head.content
        assert head.headers["content-length"] == str(len(content))
        assert head.headers["etag"] == response.headers["etag"]


def test_unchanged_file_gets_304(server: Server) -> None:
    tag = server.http.get("/").headers["etag"]
    for tags in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        same = server.http.get("/", headers={"If-None-Match": tags})
        assert same.status_code == 304
        assert not same.content
        assert same.headers["etag"] == tag
    assert server.http.get("/", headers={"If-None-Match": '"other"'}).status_code == 200
    other = server.http.get("/playground/app.js", headers={"If-None-Match": tag})
    assert other.status_code == 200


def test_other_paths_get_404(server: Server) -> None:
    for path in (
        "/playground", "/playground/", "/playground/index.html", "/playground/none.js",
        "/playground/..%2fapp.py", "/playground/%2e%2e/app.py", "/playground/app.js%00",
        "/playground//app.js", "/playground/app.js/", "/playground/App.js",
        "/playground/weights", "/playground/weights/", "/playground/weights/none.js",
        "/playground/weights%2f..%2fapp.js",
        "/playground/weights//heatmap.js", "/playground/css/weights/heatmap.js",
        "/playground/app.js%3fx", "/playground/app.js%23x",
    ):  # fmt: skip
        response = server.http.get(path)
        assert response.status_code == 404, path
        assert response.headers["content-type"] == "application/problem+json"


def test_content_security_policy_allows_no_other_host(server: Server) -> None:
    for name in ("index.html", "app.js", "weights/heatmap.js", "icon.svg"):
        header = server.http.get(path_of(name)).headers["content-security-policy"]
        policy = dict(directive.strip().split(" ", 1) for directive in header.split(";"))
        assert policy["default-src"] == "'none'"
        assert {*policy.values()} == {"'none'", "'self'"}
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"


def test_files_refer_only_to_existing_files() -> None:
    """The only other URL is an XML namespace."""
    for name in FILES:
        text = (FOLDER / name).read_text()
        folder = (FOLDER / name).parent
        for found in re.findall(r'(?:from|import) "(\.\.?/[^"]+)"', text):
            file = (folder / found).resolve().relative_to(FOLDER.resolve())
            assert file.as_posix() in FILES, (name, found)
        for found in re.findall(r'(?:src|href)="/playground/([^"]+)"', text):
            assert found in FILES, (name, found)
        urls = set(re.findall(r"https?://[^\s\"'`)]+", text))
        assert not urls - {"http://www.w3.org/2000/svg"}, name
        assert len(text.splitlines()) <= 300, name


def test_page_is_small() -> None:
    """It loads at once on a slow line: a proxy compresses its files."""
    every = (gzip.compress((FOLDER / name).read_bytes()) for name in FILES)
    assert sum(map(len, every)) < 250 * 2**10


def test_page_has_no_inline_script_or_style() -> None:
    """The security policy blocks inline code."""
    for name in ("index.html", "docs.html"):
        page = (FOLDER / name).read_text()
        assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", page)
