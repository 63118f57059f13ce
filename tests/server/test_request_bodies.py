"""Bodies on connections of the API: cut anywhere, pipelined, large, left in the middle."""

from __future__ import annotations

import itertools
import time

import pytest

from qkv.jobs.job import Job
from support.engines import output_alone
from support.processes import wait_until
from support.raw_connection import (
    PATH,
    encode_body,
    encode_request,
    in_flight_count,
    random_inputs,
    raw_client,
)
from support.raw_connection import server_jobs as server_jobs
from support.service import Server


def test_requests_may_be_cut_anywhere_and_pipelined(server: Server, server_jobs: list[Job]) -> None:
    """Requests to several paths."""
    names = ("softmax", "linear", "softmax", "efficient") * 3
    requests = [
        encode_request(*encode_body(random_inputs(seed)), f"/v2/models/{name}/infer")
        for seed, name in enumerate(names)
    ]
    outputs = [output_alone(random_inputs(seed), name) for seed, name in enumerate(names)]
    with raw_client(server) as caller:
        for size in (100, 999, 1400, 4000, 100_000):
            for request, expected in zip(requests, outputs, strict=True):
                caller.send(*(request[i : i + size] for i in range(0, len(request), size)))
                assert caller.read_response()[2] == expected
        caller.send(b"".join(requests))
        assert [caller.read_response()[2] for _ in requests] == outputs
    assert len(server_jobs) == len(requests) * 6
    wait_until(lambda: in_flight_count(server) == 0)


def test_large_bodies_are_received_whole(server: Server) -> None:
    """One after the other, pipelined, in pieces, and with small ones between them."""
    large = [
        encode_request(*encode_body(random_inputs(seed, (1, 8, 256, 64)))) for seed in range(3)
    ]
    small = [encode_request(*encode_body(random_inputs(seed))) for seed in range(3)]
    requests = [one for pair in zip(large, small, strict=True) for one in pair]
    expect = encode_request(
        *encode_body(random_inputs(0, (1, 8, 256, 64))), PATH, "Expect: 100-continue"
    )
    with raw_client(server) as caller:
        whole = []
        for request in requests:
            caller.send(request)
            whole.append(caller.read_response()[2])
        assert len(set(whole)) == 6
        caller.send(b"".join(requests))
        assert [caller.read_response()[2] for _ in requests] == whole
        together = b"".join(requests)
        for size in (7_001, 65_537, 300_000):
            caller.send(*(together[i : i + size] for i in range(0, len(together), size)))
            assert [caller.read_response()[2] for _ in requests] == whole
        end = expect.index(b"\r\n\r\n") + 4
        caller.send(expect[:end])
        assert caller.socket.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        caller.send(expect[end:])
        assert caller.read_response()[2] == whole[0]
    for size in (1000, 100_000, 1_000_000):
        with raw_client(server) as caller:
            caller.send(large[0][:size])
            wait_until(lambda: in_flight_count(server) == 1)
        wait_until(lambda: in_flight_count(server) == 0)


@pytest.mark.parametrize("shape", [(1, 2, 8, 16), (1, 8, 128, 64)])
def test_body_in_pieces_is_counted_once(server: Server, shape: tuple[int, ...]) -> None:
    """Also with the next request close behind."""
    counters = server.runtime.worker.shared_state.counters
    body, length = encode_body(random_inputs(0, shape))
    request = encode_request(body, length)
    head = len(request) - len(body)
    with raw_client(server) as caller:
        caller.send(request)
        first = caller.read_response()[2]
        for cuts in ([head], [head + 9], [head + 1, head + 77], [head // 2, len(request) - 1]):
            before, ends = counters.total("request_body_bytes"), [0, *cuts, len(request)]
            for begin, end in itertools.pairwise(ends):
                caller.send(request[begin:end])
                time.sleep(0.02)
            assert caller.read_response()[2] == first
            assert counters.total("request_body_bytes") - before == len(body)
        caller.send(request[: head + 9])
        time.sleep(0.02)
        caller.send(request[head + 9 :] + request)
        assert caller.read_response()[2] == caller.read_response()[2] == first


def test_body_of_a_refused_upgrade_is_read_once(server: Server) -> None:
    """Its head is parsed twice, the second time without the upgrade."""
    body, length = encode_body(random_inputs(0))
    request = encode_request(body, length)
    upgrade = encode_request(body, length, PATH, "Connection: upgrade", "Upgrade: h2c")
    admission = server.engine.admission
    with raw_client(server) as caller:
        for _ in range(2):
            caller.send(request)
            first = caller.read_response()[2]
        for _ in range(2):
            caller.send(upgrade[: -len(body)])
            wait_until(lambda: len(admission.admitted) == 1)
            caller.send(body)
            assert caller.read_response()[2] == first
            assert not admission.admitted


def test_disconnect_in_the_middle_of_a_body_runs_nothing(
    server: Server, server_jobs: list[Job]
) -> None:
    request = encode_request(*encode_body(random_inputs(0)))
    with raw_client(server) as caller:
        caller.send(request)
        caller.read_response()
    server_jobs.clear()
    for _ in range(20):
        with raw_client(server) as caller:
            caller.send(request[:-100])
            wait_until(lambda: in_flight_count(server) == 1)
        wait_until(lambda: in_flight_count(server) == 0)
    assert not server_jobs
