"""Valid requests with any value in any place are accepted or rejected, never an internal error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.examples import examples
from support.json_requests import post, random_layer, run_request, tensors
from support.known_requests import Case, as_json, assert_problem
from support.service import Server

pytestmark = pytest.mark.usefixtures("nothing_is_logged_as_an_error")


def valid(name: str) -> dict[str, Any]:
    """Returns a valid request."""
    draw = np.random.default_rng(7)
    mask = np.where(draw.random((4, 1, 5)) < 0.7, 0.5, -np.inf).astype(np.float32)
    document: dict[str, Any]
    if name == "lists":
        document = Case(tensors(2), {"causal": True, "scale": 0.5}, encoding="lists").document
        document["inputs"]["mask"] = [[True, True, False, True, True]] * 3
        document["inputs"]["key_lengths"] = [4]
    elif name == "base64":
        parameters = {"window": [2, None], "query_offset": "end", "dropout": 0.1, "seed": 3}
        more = {"mask": mask, "key_lengths": np.array([3, 5])}
        document = Case(tensors(4) | more, parameters).document
    elif name == "x":
        document = {
            "inputs": {"x": [[[1, 2, 3, 4.5], [0, -1, 0, 2]]]},
            "layer": random_layer("v1", 4, 6) | {"heads": 2},
            "parameters": {"softcap": 5},
        }
    else:
        embeddings = {
            n: as_json(np.ones((2, 4), "f4"), "base64") for n in ("query", "key", "value")
        }
        document = {"inputs": embeddings, "layer": random_layer("v2", 4, 6, bias=True)}
    return document


DOCUMENTS = ("lists", "base64", "x", "embeddings")
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_requests_are_valid_before_they_are_changed(server: Server, name: str) -> None:
    run_request(server, valid(name))


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


@pytest.mark.slow
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
    server.wait_until_queued(0)
    assert server.http.get("/livez").json() == server.http.get("/readyz").json() == {"status": "ok"}
    for name in DOCUMENTS:
        run_request(server, valid(name))
