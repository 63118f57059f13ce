"""Requests that are malformed, in hundreds of ways, are refused and told why."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import PATIENCE, Server
from support.json_requests import ask, post
from support.known_requests import refused
from support.malformed_requests import DOCUMENTS, HARMS, TEXT, valid

pytestmark = pytest.mark.usefixtures("nothing_is_logged_as_an_error")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_is_about_to_be_broken_is_whole(server: Server, name: str) -> None:
    ask(server, valid(name))


@pytest.mark.parametrize("name", HARMS)
def test_what_is_malformed_is_refused_and_says_why(server: Server, name: str) -> None:
    documents, harmed = HARMS[name]

    @settings(max_examples=25)
    @given(st.data(), st.sampled_from(documents))
    def break_it(data: st.DataObject, kind: str) -> None:
        document = valid(kind)
        sent = harmed(data.draw, document)
        sent = document if sent is None else sent
        response = post(server, sent)
        if isinstance(sent, bytes):
            refused(response, response.status_code if response.status_code == 422 else 400)
        else:
            # a number past 64 bits is not parsed; a layer's name that is not there is not found
            unread = response.status_code == 400 and re.search(r"\d{19}", json.dumps(sent))
            refused(response, 400 if unread else 422, sent)

    break_it()


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["NaN", "Infinity", "v1", "v2", "output", "float64", "end", "none", "AAAA"])
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=400)
@given(st.data())
def test_anything_anywhere_is_answered_or_refused(server: Server, data: st.DataObject) -> None:
    document = valid(data.draw(st.sampled_from(DOCUMENTS)))
    for _ in range(data.draw(st.integers(1, 2))):
        node: Any = document
        while True:
            at = data.draw(
                st.sampled_from(list(node) if isinstance(node, dict) else range(len(node)))
            )
            if not (isinstance(node[at], dict | list) and node[at]) or data.draw(st.booleans()):
                break
            node = node[at]
        node[at] = data.draw(ANYTHING)
    response = post(server, document)
    if response.status_code != 200:
        assert response.status_code in (400, 404, 413, 422)
        refused(response, response.status_code, document)


def test_after_all_that_it_answers_as_before(server: Server) -> None:
    done = threading.Event()
    server.app.state.engine._loop.call_soon_threadsafe(done.set)
    assert done.wait(PATIENCE)
    assert server.waiting == 0
    assert server.http.get("/livez").json() == server.http.get("/readyz").json() == {"status": "ok"}
    for name in DOCUMENTS:
        ask(server, valid(name))
