"""Requests and events of sweeps match the OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from qkv.api.endpoints.sweep import EVENTS
from qkv.errors import ServiceUnavailable
from support.openapi_schemas import fits, with_renamed_fields
from support.service import Server
from support.sweep_requests import SMALL, SWEEP, parse_events, run_sweep


@pytest.mark.slow
def test_requests_and_events_match_the_document(serve: Callable[..., Server]) -> None:
    small = serve(max_scores=2 * 100 * 100)
    document = small.http.get("/openapi.json").json()
    operation, schemas = document["paths"][SWEEP]["post"], document["components"]["schemas"]
    content = operation["requestBody"]["content"]["application/json"]
    (example,) = content["examples"].values()
    assert fits(example["value"], content["schema"], document)
    assert small.http.post(SWEEP, json=example["value"]).is_success
    body = SMALL | {"variants": ["softmax", "linear"], "lengths": [64, 128]}
    assert fits(body, content["schema"], document)
    events = run_sweep(small, **body)
    assert any("problem" in what for _, what in events)
    events.append(("error", {"problem": ServiceUnavailable("the service is stopping").problem()}))
    response = operation["responses"]["200"]["content"]["text/event-stream"]
    (example,) = response["examples"].values()
    events += list(parse_events(iter(example["value"].split("\n"))))
    for name, what in events:
        component = schemas[EVENTS[name].__name__]
        assert (
            f"`{name}`, whose data is a `{EVENTS[name].__name__}`"
            in (operation["responses"]["200"]["description"])
        )
        assert fits(what, component, document), what
        for other in with_renamed_fields(what):
            assert not fits(other, component, document), other
