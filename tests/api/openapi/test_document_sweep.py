"""Requests and events of sweeps match the OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable

from qkv.api.openapi.measure_schemas import EVENTS
from qkv.errors import ServiceUnavailable
from support.known_requests import assert_problem
from support.openapi_schemas import assert_matches_document, fits, with_renamed_fields
from support.service import Server
from support.sweep_requests import REFUSED, SMALL, SWEEP, parse_events, run_sweep


def test_requests_and_events_match_the_document(serve: Callable[..., Server]) -> None:
    small = serve(max_scores=2 * 100 * 100)
    document = small.http.get("/openapi.json").json()
    operation, schemas = document["paths"][SWEEP]["post"], document["components"]["schemas"]
    content = operation["requestBody"]["content"]["application/json"]
    assert fits(content["example"], content["schema"], document)
    assert small.http.post(SWEEP, json=content["example"]).is_success
    body = SMALL | {"variants": ["softmax", "linear"], "lengths": [64, 128]}
    assert fits(body, content["schema"], document)
    for _, _, fields in REFUSED:
        assert not fits(
            {"variants": ["mean"], "lengths": [8]} | fields, content["schema"], document
        )
    events = run_sweep(small, **body)
    assert any("problem" in what for _, what in events)
    events.append(("error", {"problem": ServiceUnavailable("the service is stopping").problem()}))
    response = operation["responses"]["200"]["content"]["text/event-stream"]
    events += list(parse_events(iter(response["example"].split("\n"))))
    for name, what in events:
        component = schemas[EVENTS[name].__name__]
        assert (
            f"`{name}`, whose data is a `{EVENTS[name].__name__}`"
            in (operation["responses"]["200"]["description"])
        )
        assert fits(what, component, document), what
        for other in with_renamed_fields(what):
            assert not fits(other, component, document), other


def test_errors_match_the_document(server: Server) -> None:
    document = server.http.get("/openapi.json").json()
    for status, how in (
        (400, {"content": b"[]"}),
        (404, {"json": {"variants": ["sotfmax"], "lengths": [1]}}),
        (406, {"json": {}, "headers": {"Accept": "text/html"}}),
        (415, {"content": b"x", "headers": {"Content-Type": "text/plain"}}),
        (422, {"json": {}}),
    ):
        response = server.http.post(SWEEP, **how)
        assert_problem(response, status)
        assert_matches_document(document, response)
