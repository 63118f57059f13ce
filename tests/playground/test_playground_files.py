"""The playground's files: what is served, as what, and under which policy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

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
    return "/" if name == "index.html" else f"/playground/{name}"


def test_every_file_has_a_path_and_every_path_is_open() -> None:
    assert {path_of(name) for name in FILES} == PATHS
    assert PATHS <= PUBLIC_PATHS


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_served_as_it_is(server: Server, name: str) -> None:
    content = (FOLDER / name).read_bytes()
    answer = server.http.get(path_of(name))
    assert answer.status_code == 200
    assert answer.content == content
    assert answer.headers["content-type"] == TYPES[Path(name).suffix]
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-content-type-options"] == "nosniff"
    head = server.http.head(path_of(name))
    assert head.status_code == 200
    assert not head.content
    assert head.headers["content-length"] == str(len(content))
    assert head.headers["etag"] == answer.headers["etag"]


def test_what_has_not_changed_is_not_sent_again(server: Server) -> None:
    tag = server.http.get("/").headers["etag"]
    for said in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        same = server.http.get("/", headers={"If-None-Match": said})
        assert same.status_code == 304
        assert not same.content
        assert same.headers["etag"] == tag
    assert server.http.get("/", headers={"If-None-Match": '"other"'}).status_code == 200
    other = server.http.get("/playground/app.js", headers={"If-None-Match": tag})
    assert other.status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/playground", "/playground/", "/playground/index.html", "/playground/none.js",
        "/playground/..%2fapp.py", "/playground/%2e%2e/app.py", "/playground/app.js%00",
        "/playground//app.js", "/playground/app.js/", "/playground/App.js",
        "/playground/weights", "/playground/weights/", "/playground/weights/none.js",
        "/playground/weights%2f..%2fapp.js",
        "/playground/weights//heatmap.js", "/playground/css/weights/heatmap.js",
        "/playground/app.js%3fx", "/playground/app.js%23x",
    ],
)  # fmt: skip
def test_no_other_path_is_a_file(server: Server, path: str) -> None:
    answer = server.http.get(path)
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("name", ["index.html", "app.js", "weights/heatmap.js", "icon.svg"])
def test_the_policy_lets_in_nothing_from_elsewhere(server: Server, name: str) -> None:
    said = server.http.get(path_of(name)).headers["content-security-policy"]
    policy = dict(directive.strip().split(" ", 1) for directive in said.split(";"))
    assert policy["default-src"] == "'none'"
    assert {*policy.values()} == {"'none'", "'self'"}
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"


@pytest.mark.parametrize("name", FILES)
def test_a_file_names_only_files_that_there_are(name: str) -> None:
    """Nor another host: what is not ours is an XML namespace, or a URL in a comment."""
    text = (FOLDER / name).read_text()
    folder = (FOLDER / name).parent
    for found in re.findall(r'(?:from|import) "(\.\.?/[^"]+)"', text):
        assert (folder / found).resolve().relative_to(FOLDER.resolve()).as_posix() in FILES, found
    for found in re.findall(r'(?:src|href)="/playground/([^"]+)"', text):
        assert found in FILES, found
    assert not set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
    assert len(text.splitlines()) <= 300


def test_the_page_has_no_script_or_style_of_its_own() -> None:
    """The policy would not let it run."""
    page = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", page)
