"""Tests of bench/soak.py: a short run, and the errors that it must find."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import pytest
import soak
from questions import LENGTHS, Question, questions
from service import serving
from soak import Caller, Seen, internal, medians, report, slope

from support.service import Server

SECONDS = 20.0


@pytest.fixture(scope="module")
def asked() -> list[Question]:
    return list(questions([n for n in LENGTHS if n < 100]))


@pytest.mark.slow
def test_short_soak_passes(asked: list[Question]) -> None:
    limits = {"QKV_MAX_BODY_BYTES": str(soak.LIMIT), "QKV_MAX_ANSWER_BYTES": str(soak.ANSWER)}
    with serving(QKV_WORKERS="2", **limits) as service:
        seen = soak.soak(service, asked, SECONDS)
        text, good = report(seen, SECONDS, service.workers)
    assert good, text
    assert set(seen.counts) >= {"ask 200", "spoil 200", "spoil 400", "leave left", "too large 413"}
    assert not [what for what in seen.counts if what.endswith(" 500")]
    assert len(seen.memory) > SECONDS / 2
    assert "p99" in text
    assert "too short to judge" in text


def asking(server: Server, question: Question) -> Seen:
    """Returns the results of one client that sends one request at least once."""
    caller = Caller(server.address, [question], 0, time.monotonic() + 0.2)
    return caller.run()


@pytest.mark.slow
def test_soak_finds_wrong_responses(server: Server, asked: list[Question]) -> None:
    """Errors beyond rounding, bits that differ from earlier ones, and unexpected outputs."""
    for question in asked[:4]:  # one of each format
        right = {name: x + 1e-1 for name, x in question.right.items()}
        none = dict.fromkeys(question.right, b"")
        for wrong, words in [
            (dataclasses.replace(question, right=right), "is off by"),
            (dataclasses.replace(question, bits=none), "has other bits"),
            (dataclasses.replace(question, right={"output": right["output"]}), "outputs are"),
        ]:
            seen = asking(server, wrong)
            assert any(words in fault for fault in seen.faults), seen.faults[:3]
            assert not report(seen, 1.0, 1)[1]


def test_soak_finds_rejected_requests(server: Server, asked: list[Question]) -> None:
    missing = dataclasses.replace(asked[0], path="/v1/attention/sotfmax")
    seen = asking(server, missing)
    assert seen.counts["ask 404"]
    text, good = report(seen, 1.0, 1)
    assert not good
    assert "sotfmax" in text


def test_soak_finds_internal_errors_in_metrics(
    serve: Callable[..., Server], asked: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError

    served = serve()
    assert internal(served.address) == 0
    with monkeypatch.context() as patch:
        patch.setattr(served.engine, "execute", failing)
        seen = asking(served, asked[0])
    assert 0 < seen.counts["ask 500"] <= internal(served.address)


@pytest.mark.parametrize(("growth", "flat"), [(0.0, True), (0.02, True), (0.05, False)])
def test_growing_memory_is_not_flat(growth: float, flat: bool) -> None:
    """The warm-up does not count, and neither do short peaks."""
    draw = np.random.default_rng(0)
    seen = Seen(seconds={"safetensors": [0.001]})
    for i in range(1200):
        warm, peak = min(1.0, 0.5 + i / 400), draw.exponential(0.02)
        held = 1 + growth * (i - 400) / 800
        seen.memory.append((float(i), int((warm * held + peak) * 2**30)))
    assert slope(seen.memory).rise == pytest.approx(growth, abs=0.005)
    text, good = report(seen, 1200.0, 1)
    assert good is flat
    assert ("NOT FLAT" not in text) is flat
    _, middle, last = medians(seen.memory)
    assert last / middle - 1 == pytest.approx(growth / 2, abs=0.005)
