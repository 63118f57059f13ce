"""Tests how the playground's files are served: content, types, caching and security policy."""

from __future__ import annotations

import filecmp
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

import qkv
from qkv.api.auth import PUBLIC_PATHS
from qkv.api.endpoints.playground import PATHS
from support.paths import ROOT
from support.service import Server

FOLDER: Final = Path(qkv.__file__).parent / "playground"
BUNDLES: Final = FOLDER / "bundles"
SERVED: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/docs": ("docs.html", "text/html; charset=utf-8"),
    "/playground/icon.svg": ("icon.svg", "image/svg+xml"),
    "/playground/page.css": ("bundles/page.css", "text/css; charset=utf-8"),
    "/playground/page.js": ("bundles/page.js", "text/javascript; charset=utf-8"),
    "/playground/docs.js": ("bundles/docs.js", "text/javascript; charset=utf-8"),
}


def test_each_file_has_a_public_path() -> None:
    swagger = {f"/static-offline-docs/swagger-ui{suffix}" for suffix in ("-bundle.js", ".css")}
    assert SERVED.keys() | swagger == PATHS
    assert PATHS <= PUBLIC_PATHS


def test_files_are_served_unchanged(server: Server) -> None:
    for path, (place, media_type) in SERVED.items():
        content, tags = (FOLDER / place).read_bytes(), set()
        for accepted, coding in (
            ("gzip", "gzip"), ("br;q=1, gzip;q=0.5", "gzip"), ("identity", "identity"),
            ("gzip;q=0", "identity"), ("br, gzip; q=0.000, deflate", "identity"),
        ):  # fmt: skip
            response = server.http.get(path, headers={"Accept-Encoding": accepted})
            assert response.status_code == 200
            assert response.content == content
            assert response.headers.get("content-encoding", "identity") == coding
            assert response.headers["content-type"] == media_type
            assert response.headers["cache-control"] == "no-cache"
            assert response.headers["vary"] == "Accept-Encoding"
            assert response.headers["x-content-type-options"] == "nosniff"
            head = server.http.head(path, headers={"Accept-Encoding": accepted})
            assert head.status_code == 200
            assert not head.content
            assert head.headers["content-length"] == response.headers["content-length"]
            assert head.headers["etag"] == response.headers["etag"]
            tags.add(response.headers["etag"].removeprefix("W/"))
        assert len(tags) == 1


def test_unchanged_file_gets_304(server: Server) -> None:
    tag = server.http.get("/").headers["etag"]
    for tags in (tag, tag.removeprefix("W/"), f'"other", {tag}', "*"):
        same = server.http.get("/", headers={"If-None-Match": tags})
        assert same.status_code == 304
        assert not same.content
        assert same.headers["etag"] == tag
    assert server.http.get("/", headers={"If-None-Match": '"other"'}).status_code == 200
    other = server.http.get("/playground/page.js", headers={"If-None-Match": tag})
    assert other.status_code == 200


def test_other_paths_get_404(server: Server) -> None:
    for path in (
        "/playground", "/playground/", "/playground/index.html", "/playground/none.js",
        "/playground/..%2fapp.py", "/playground/%2e%2e/app.py", "/playground/page.js%00",
        "/playground//page.js", "/playground/page.js/", "/playground/Page.js",
        "/playground/app.js", "/playground/bundles/page.js", "/playground/bundles%2fpage.js",
        "/playground/bundles", "/playground/bundles/", "/playground/bundles%2f..%2fapp.js",
        "/playground/page.js%3fx", "/playground/page.js%23x",
    ):  # fmt: skip
        response = server.http.get(path)
        assert response.status_code == 404, path
        assert response.headers["content-type"] == "application/problem+json"


def test_content_security_policy_allows_no_other_host(server: Server) -> None:
    for path in SERVED.keys() - {"/docs"}:
        header = server.http.get(path).headers["content-security-policy"]
        policy = dict(directive.strip().split(" ", 1) for directive in header.split(";"))
        assert policy["default-src"] == "'none'"
        assert {*policy.values()} == {"'none'", "'self'"}
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"


def test_files_refer_only_to_existing_files() -> None:
    """The only other URL is an XML namespace."""
    for file in FOLDER.rglob("*.*"):
        text, name = file.read_text(), file.relative_to(FOLDER).as_posix()
        for found in re.findall(r'(?:src|href)="(/playground/[^"]+)"', text):
            assert found in SERVED, (name, found)
        urls = set(re.findall(r"https?://[^\s\"'`)]+", text))
        assert not urls - {"http://www.w3.org/2000/svg"}, name
        assert file.parent == BUNDLES or len(text.splitlines()) <= 350, name


def test_bundles_are_those_of_the_modules_and_styles(tmp_path: Path) -> None:
    """If this fails, run `make page`."""
    if not shutil.which("npx"):
        pytest.skip("needs npx")
    subprocess.run(["make", "page", f"PAGE={tmp_path}"], cwd=ROOT, check=True)
    made, kept = (sorted(path.name for path in folder.iterdir()) for folder in (tmp_path, BUNDLES))
    assert made == kept
    same, *_ = filecmp.cmpfiles(tmp_path, BUNDLES, made, shallow=False)
    assert same == made


def test_page_is_small(server: Server) -> None:
    """It loads in a few seconds on a slow line: few files, and compressed."""
    sizes = [int(server.http.head(path).headers["content-length"]) for path in SERVED]
    assert sum(sizes) < 100 * 2**10


def test_page_has_no_inline_script_or_style() -> None:
    """The security policy blocks inline code."""
    for name in ("index.html", "docs.html"):
        page = (FOLDER / name).read_text()
        assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", page)
