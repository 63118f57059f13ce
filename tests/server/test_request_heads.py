"""Heads of requests on connections of the API: repeated, cut anywhere, with garbage after them."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest

from support.engines import output_alone
from support.raw_connection import (
    PATH,
    encode_body,
    encode_request,
    random_inputs,
    raw_client,
)
from support.service import Server


def test_equal_heads_have_their_own_outputs(server: Server) -> None:
    """Also with ids, and with two kinds of body on one connection, in turn."""
    every = [random_inputs(seed) for seed in range(8)]
    outputs = [output_alone(arrays) for arrays in every]
    assert len(set(outputs)) == len(every)
    with raw_client(server) as caller:
        for i, (arrays, output) in enumerate(zip(every, outputs, strict=True)):
            body, length = encode_body(arrays)
            for id in ("mine", f"{length}-{i}"):
                caller.send(encode_request(body, length, PATH, f"X-Request-ID: {id}"))
                headers, _, data = caller.read_response()
                assert data == output
                assert headers["x-request-id"] == id
    causal = encode_request(*encode_body(every[0], parameters={"causal": True}))
    with raw_client(server) as caller:
        for _ in range(4):
            caller.send(encode_request(*encode_body(every[0])))
            assert caller.read_response()[2] == outputs[0]
            caller.send(causal)
            assert caller.read_response()[2] == output_alone(every[0], causal=True) != outputs[0]


@pytest.mark.parametrize("others", [0, 2])
def test_requests_on_one_connection_may_be_cut_anywhere(server: Server, others: int) -> None:
    """Also two at once, after other requests, and with garbage after them."""
    body, length = encode_body(random_inputs(0))
    request, output = encode_request(body, length), output_alone(random_inputs(0))
    with ExitStack() as stack:
        caller, *_ = [stack.enter_context(raw_client(server)) for _ in range(1 + others)]
        for _ in range(4):
            caller.send(request)
            assert caller.read_response()[2] == output
        for cut in (1, 20, len(request) - len(body), len(request) - 1):
            caller.send(request[:cut])
            time.sleep(0.02)
            caller.send(request[cut:])
            assert caller.read_response()[2] == output
        caller.send(request + request + request[:40])
        assert caller.read_response()[2] == caller.read_response()[2] == output
        caller.send(request[40:])
        assert caller.read_response()[2] == output
        caller.send(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert caller.body()
        for _ in range(2):
            caller.send(request)
            assert caller.read_response()[2] == output
        caller.send(request + b"\0\0")  # the request before the garbage gets its response
        assert caller.read_response()[2] == output
        assert caller.status() == 400
