"""A short run of tests/fuzz_decoders.py on every decoder."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

import fuzz_decoders
from fuzz_decoders import TARGETS, run_random
from support.decoder_fuzz import VALID_BODIES

SECONDS = 3.0


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_fuzzing_finds_no_fault(name: str) -> None:
    assert run_random(name, SECONDS) > 10


@pytest.mark.parametrize("name", TARGETS)
def test_valid_bodies_pass(name: str) -> None:
    target, valid = TARGETS[name]
    for body in valid:
        target(VALID_BODIES[body])


def test_base64_with_encoding_lists_passes() -> None:
    """Lists have no dtype, so that the round trip needs the encoding of the request."""
    body = VALID_BODIES["base64"]
    for encoding in (b"lists", b"base64"):
        data = body.replace(b'"encoding":"base64"', b'"encoding":"%b"' % encoding)
        TARGETS["json"][0](data)


def test_failing_body_is_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def target(data: bytes) -> None:
        assert data.count(b"[") < 30, "too many"

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(fuzz_decoders.TARGETS, "json", (target, ["lists"]))
    with pytest.raises(AssertionError, match="too many"):
        run_random("json", 30.0)
    (file,) = tmp_path.iterdir()
    assert file.read_bytes().count(b"[") >= 30
