"""Memory that requests to /v2 leave behind."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from support.open_inference_requests import error_of, post, request_with_lists
from support.service import Server


@pytest.mark.slow
def test_rejected_parameters_leave_little_behind(server: Server) -> None:
    """Each request has 600 empty objects in 1.8 KiB of JSON; parsed, they take 50 KiB."""

    def send(number: int) -> None:
        parameters: dict[str, object] = {"unknown": [{}] * 600 + [number]}
        assert "unknown" in error_of(post(server, request_with_lists(parameters=parameters)))

    send(1000)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(200):
        send(number)
    gc.collect()
    left = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert left < 6 << 20
