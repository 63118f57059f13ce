"""Tokens of cases: only an unchanged token of the same secret is read."""

from __future__ import annotations

import base64
import json
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.api.case_token import MAX_TOKEN_LENGTH, CaseSigner
from qkv.errors import InvalidContent
from qkv.testing.case_spec import CaseSpec

SECRET: Final = "0123456789abcdef" * 2
SPEC: Final = CaseSpec("softmax", "mask", "bfloat16", {"causal": True}, {"B": 1}, 2**63 - 1)
SIGNER: Final = CaseSigner(SECRET)
TOKEN: Final = SIGNER.write(SPEC, "d1e5")
REFUSED: Final = "case is invalid: expected an unchanged token of this service and its secret"


def assert_refused(token: str, signer: CaseSigner = SIGNER) -> None:
    with pytest.raises(InvalidContent) as caught:
        signer.read(token)
    assert (caught.value.detail, caught.value.pointer) == (REFUSED, "/case")


def test_token_has_the_case_and_is_the_same_in_every_process() -> None:
    assert CaseSigner(SECRET).read(TOKEN) == (SPEC, "d1e5")
    assert CaseSigner(SECRET).write(SPEC, "d1e5") == TOKEN
    assert SECRET not in base64.urlsafe_b64decode(TOKEN.partition(".")[0] + "==").decode()


def test_another_secret_refuses_the_token() -> None:
    assert_refused(TOKEN, CaseSigner(SECRET[::-1]))


@given(st.integers(0, len(TOKEN) - 1), st.characters())
def test_changed_character_is_refused(at: int, other: str) -> None:
    if TOKEN[at] != other:
        assert_refused(TOKEN[:at] + other + TOKEN[at + 1 :])


@given(st.integers(0, len(TOKEN) - 1))
def test_cut_token_is_refused(length: int) -> None:
    assert_refused(TOKEN[:length])
    assert_refused(TOKEN[-length:] if length else "")


@pytest.mark.parametrize(
    "token",
    ["", ".", "..", "a.b", TOKEN + "=", TOKEN + ".", TOKEN + "\n", " " + TOKEN, TOKEN + TOKEN,
     TOKEN.replace(".", ""), TOKEN.replace(".", "=."), "ä" * 100, "\ud800.\ud800",
     "A" * (MAX_TOKEN_LENGTH + 1)],
)  # fmt: skip
def test_other_text_is_refused(token: str) -> None:
    assert_refused(token)


def test_every_other_spelling_of_the_signature_is_refused() -> None:
    """The last character has two bits that base64 decoders ignore."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    same = [
        TOKEN[:-1] + x for x in letters
        if base64.urlsafe_b64decode((TOKEN[:-1] + x).partition(".")[2] + "=")
        == base64.urlsafe_b64decode(TOKEN.partition(".")[2] + "=")
    ]  # fmt: skip
    assert len(same) == 4
    for token in same:
        if token != TOKEN:
            assert_refused(token)


@pytest.mark.parametrize(
    "fields",
    [{"format": 2}, {"spec": {"variant": "softmax"}}, {"spec": SPEC.to_json() | {"family": "x"}}],
)
def test_case_of_another_version_gets_an_error_that_says_so(fields: dict[str, object]) -> None:
    """It has the right signature: a former version with the same secret wrote it."""
    document = {"format": 1, "spec": SPEC.to_json(), "digest": ""} | fields
    payload = base64.urlsafe_b64encode(json.dumps(document).encode()).rstrip(b"=").decode()
    with pytest.raises(InvalidContent, match="another version") as caught:
        SIGNER.read(f"{payload}.{SIGNER._signature(payload)}")
    assert caught.value.pointer == "/case"


def test_longest_token_is_shorter_than_the_limit() -> None:
    parameters: dict[str, Any] = {
        "causal": True,
        "query_offset": -(2**31),
        "scale": -1.2345678901234567e-300,
    }
    parameters |= {"window": [2**31 - 1, 2**31 - 1], "softcap": 1.2345678901234567e-300, "seed": 0}
    sizes = dict.fromkeys("BHGLSDE", 10**18)
    spec = CaseSpec("softmax", "near-cancelling", "bfloat16", parameters, sizes, 2**63 - 1)
    assert len(SIGNER.write(spec, "0" * 32)) < MAX_TOKEN_LENGTH / 2
