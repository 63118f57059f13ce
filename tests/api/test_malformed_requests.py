"""Hundreds of malformed requests are rejected with a reason."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.examples import examples
from support.json_requests import post, run_request
from support.known_requests import assert_problem
from support.malformed_requests import CORRUPTIONS, DOCUMENTS, TEXT, valid
from support.processes import TIMEOUT_S
from support.service import Server

pytestmark = pytest.mark.usefixtures("nothing_is_logged_as_an_error")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_requests_are_valid_before_they_are_changed(server: Server, name: str) -> None:
    run_request(server, valid(name))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_malformed_request_is_rejected_with_a_reason(server: Server, name: str) -> None:
    documents, harmed = CORRUPTIONS[name]

    @examples(25)
    @given(st.data(), st.sampled_from(documents))
    def break_it(data: st.DataObject, kind: str) -> None:
        document = valid(kind)
        sent = harmed(data.draw, document)
        sent = document if sent is None else sent
        response = post(server, sent)
        if isinstance(sent, bytes):
            assert_problem(response, response.status_code if response.status_code == 422 else 400)
        else:
            # 400: an integer beyond 64 bits
            unread = response.status_code == 400 and re.search(r"\d{19}", json.dumps(sent))
            assert_problem(response, 400 if unread else 422, sent)

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


@examples(400)
@given(st.data())
def test_any_value_in_any_place_is_accepted_or_rejected(
    server: Server, data: st.DataObject
) -> None:
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
        assert_problem(response, response.status_code, document)


def test_service_gives_the_same_bits_after_malformed_requests(server: Server) -> None:
    done = threading.Event()
    server.app.state.runtime.engine._loop.call_soon_threadsafe(done.set)
    assert done.wait(TIMEOUT_S)
    assert server.queued_count == 0
    assert server.http.get("/livez").json() == server.http.get("/readyz").json() == {"status": "ok"}
    for name in DOCUMENTS:
        run_request(server, valid(name))
