"""Requests cut at random, several at once on several connections: each has its own answer."""

from __future__ import annotations

import random
import threading
from typing import Final

import numpy as np
import pytest

from support.processes import wait_until
from support.raw_connection import (
    RawClient,
    asked_of,
    encode_body,
    encode_request,
    random_inputs,
    raw_client,
)
from support.service import Server

SHAPES: Final = ((1, 2, 8, 16), (1, 1, 64, 64), (1, 8, 128, 64), (1, 8, 512, 64))
CALLERS: Final = 6
EXCHANGES: Final = 25


def cuts(chance: random.Random, requests: list[bytes]) -> list[int]:
    """Where a row of requests is cut: nowhere, between heads and bodies, as the network does, or
    anywhere."""
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
    """Sends some requests, and reads meanwhile, as they may be more than fits between both ends."""
    asked = [chance.choice(known) for _ in range(chance.choice([1, 1, 1, 2, 4]))]
    right: list[bool] = []

    def read() -> None:
        right.extend(caller.read_response()[2] == answer for _, answer in asked)

    reader = threading.Thread(target=read)
    reader.start()
    data, begin = b"".join(request for request, _ in asked), 0
    for end in (*cuts(chance, [request for request, _ in asked]), len(data)):
        caller.send(data[begin:end])
        begin = end
        reader.join(chance.choice([0.0, 0.0, 0.003]))  # or the next piece comes with this one
    reader.join()
    assert len(right) == len(asked)
    return right


@pytest.mark.parametrize("seed", range(3))
def test_each_has_its_own_answer(server: Server, seed: int) -> None:
    known = []
    with raw_client(server) as caller:
        for i, shape in enumerate(SHAPES * 2):
            outputs = ("output", "weights") if i % 3 == 2 else ("output",)
            request = encode_request(*encode_body(random_inputs(i, shape), outputs))
            caller.send(request)
            known.append((request, bytes(caller.read_response()[2])))
    wrong: list[object] = []

    def calls(number: int) -> None:
        chance = random.Random(CALLERS * seed + number)
        try:
            for _ in range(EXCHANGES // 5):
                with raw_client(server) as caller:
                    for _ in range(5):
                        if not all(exchange(chance, caller, known)):
                            wrong.append(number)
                    if chance.random() < 0.3:  # and leaves in the middle
                        caller.send(chance.choice(known)[0][: chance.randrange(1, 5000)])
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=calls, args=(i,)) for i in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    wait_until(lambda: asked_of(server) == 0)
