"""The error classes: their titles, and the way from a problem document back to an error."""

from __future__ import annotations

import re
from http import HTTPStatus
from pathlib import Path
from typing import Final

import pytest

from qkv.errors import QkvError, from_problem

RENAMED: Final = {413: "Content Too Large", 422: "Unprocessable Content"}  # by RFC 9110
OWN: Final = {499: "Client Closed Request"}
KINDS: Final = [QkvError, *QkvError.__subclasses__()]


@pytest.mark.parametrize("kind", KINDS)
def test_title_is_the_reason_phrase_of_the_status(kind: type[QkvError]) -> None:
    known = {status.value: status.phrase for status in HTTPStatus} | RENAMED | OWN
    assert kind.title == known[kind.status]


def test_page_lists_every_problem_type() -> None:
    page = (Path(__file__).parents[1] / "docs" / "errors.md").read_text()
    rows = re.findall(r"^\| `([a-z-]+)` \| ([45]\d\d) \|", page, re.M)
    kinds = {kind.name: kind.status for kind in QkvError.__subclasses__()}
    assert {name: int(status) for name, status in rows} == kinds
    assert len(rows) == len(kinds) == len(QkvError.__subclasses__())


@pytest.mark.parametrize("kind", QkvError.__subclasses__())
def test_problem_document_reads_back_as_its_error(kind: type[QkvError]) -> None:
    error = from_problem(kind.status, _problem(kind))
    assert type(error) is kind
    assert error.problem() == _problem(kind)


def _problem(kind: type[QkvError]) -> dict[str, object]:
    return {
        "type": f"urn:qkv:problem:{kind.name}",
        "title": kind.title,
        "status": kind.status,
        "detail": "reason",
    }
