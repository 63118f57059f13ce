"""Requests in random fragments on several connections: each gets its own response."""

from __future__ import annotations

import random
import threading
from typing import Final

import numpy as np
import pytest

from support.processes import wait_until
from support.raw_connection import (
    RawClient,
    encode_body,
    encode_request,
    in_flight_count,
    random_inputs,
    raw_client,
)
from support.service import Server

SHAPES: Final = ((1, 2, 8, 16), (1, 1, 64, 64), (1, 8, 128, 64), (1, 8, 512, 64))
CLIENTS: Final = 6
EXCHANGES: Final = 25


def cuts(chance: random.Random, requests: list[bytes]) -> list[int]:
    """Returns where to cut consecutive requests: nowhere, after heads, in network-sized pieces, or
    at random."""
    kind, size = chance.randrange(4), sum(map(len, requests))
    if kind == 0:
        return []
    if kind == 1:
        begins = np.cumsum([0, *map(len, requests[:-1])])
        heads = [r.index(b"\r\n\r\n") + 4 for r in requests]
        return [int(b) + h for b, h in zip(begins, heads, strict=True)]
    if kind == 2:
        return list(range(chance.choice([65_536, 256_000]), size, 65_536))
    return sorted(chance.randrange(size) for _ in range(chance.randint(1, 5)))


def exchange(
    chance: random.Random, caller: RawClient, known: list[tuple[bytes, bytes]]
) -> list[bool]:
    """Sends some requests while a thread reads, as the socket buffers may not hold them all."""
    sent = [chance.choice(known) for _ in range(chance.choice([1, 1, 1, 2, 4]))]
    right: list[bool] = []

    def read() -> None:
        right.extend(caller.read_response()[2] == response for _, response in sent)

    reader = threading.Thread(target=read)
    reader.start()
    data, begin = b"".join(request for request, _ in sent), 0
    for end in (*cuts(chance, [request for request, _ in sent]), len(data)):
        caller.send(data[begin:end])
        begin = end
        reader.join(
            chance.choice([0.0, 0.0, 0.003])
        )  # without a pause the next piece arrives with this one
    reader.join()
    assert len(right) == len(sent)
    return right


@pytest.mark.slow
def test_each_request_gets_its_own_response(server: Server) -> None:
    known = []
    with raw_client(server) as caller:
        for i, shape in enumerate(SHAPES * 2):
            outputs = ("output", "weights") if i % 3 == 2 else ("output",)
            request = encode_request(*encode_body(random_inputs(i, shape), outputs))
            caller.send(request)
            known.append((request, bytes(caller.read_response()[2])))
    wrong: list[object] = []

    def run_client(number: int) -> None:
        chance = random.Random(number)
        try:
            for _ in range(EXCHANGES // 5):
                with raw_client(server) as caller:
                    for _ in range(5):
                        if not all(exchange(chance, caller, known)):
                            wrong.append(number)
                    if chance.random() < 0.3:  # the client disconnects in the middle of a request
                        caller.send(chance.choice(known)[0][: chance.randrange(1, 5000)])
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=run_client, args=(i,)) for i in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    wait_until(lambda: in_flight_count(server) == 0)
