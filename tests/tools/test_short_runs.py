"""Short runs of `make soak` and `make fuzz`."""

from __future__ import annotations

from itertools import islice

import pytest

from support.forked_services import forked_service
from tools import soak
from tools.fuzz_decoders import TARGETS, run_random
from tools.soak_requests import LENGTHS, generate_soak_requests


@pytest.mark.slow
def test_short_soak_passes() -> None:
    limits = {
        "QKV_MAX_BODY_BYTES": str(soak.MAX_BODY_BYTES),
        "QKV_MAX_RESPONSE_BYTES": str(soak.MAX_RESPONSE_BYTES),
    }
    requests = list(islice(generate_soak_requests([min(LENGTHS)]), 40))
    with forked_service(QKV_WORKERS="2", **limits) as service:
        results = soak.run_soak(service, requests, seconds := 4.0)
        text, is_passed = soak.format_report(results, seconds, service.workers)
    assert is_passed, text
    assert results.counts["valid 200"]


@pytest.mark.parametrize("name", TARGETS)
def test_fuzzing_finds_no_fault(name: str) -> None:
    assert run_random(name, 0.3) > 0
