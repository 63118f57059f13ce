"""Numbers of many digits in JSON: a few are read exactly, too many are refused by name."""

from __future__ import annotations

import json as stdlib
from collections.abc import Callable
from typing import Final

import numpy as np
import pytest

from qkv.errors import MalformedRequest, PayloadTooLarge
from qkv.wire import json, open_inference
from qkv.wire.message import Message

MOST: Final = 4096
LONG: Final = (
    "9" * 300,
    "1234567890123456789",
    "-1.234567890123456789e-5",
    "0." + "9" * 300,
    "0.0000001234567890123456789",
    "1234567890.123456789",
    "2.4703282292062327208e-324",
    "2.47032822920623272" + "0" * 300 + "e-324",
)
SHORT: Final = (
    "0.00000012345678901234567",
    "0." + "0" * 100 + "123",
    "-1.23456789012345678e+300",
    "123456789012345678",
)


def v1(numbers: str) -> bytes:
    return f'{{"inputs": {{"a": [{numbers}]}}}}'.encode()


def v2(numbers: str) -> bytes:
    count = numbers.count(",") + 1
    tensor = f'{{"name": "a", "datatype": "FP64", "shape": [{count}], "data": [{numbers}]}}'
    return f'{{"inputs": [{tensor}]}}'.encode()


def decode_v1(body: bytes) -> Message:
    return json.decode(body, "inputs")


def decode_v2(body: bytes) -> Message:
    return open_inference.decode(body, "inputs", None)


FORMATS: Final = {"v1": (v1, decode_v1), "v2": (v2, decode_v2)}
formats = pytest.mark.parametrize(("encode", "decode"), FORMATS.values(), ids=FORMATS)
Encode = Callable[[str], bytes]
Decode = Callable[[bytes], Message]


@formats
@pytest.mark.parametrize("number", LONG)
def test_too_many_long_numbers_are_refused(encode: Encode, decode: Decode, number: str) -> None:
    def numbers(count: int) -> str:
        """Returns long numbers among others, in several parts of the text."""
        return ", ".join([number, *["0.5"] * 100] * count)

    found = decode(encode(numbers(MOST))).tensors["a"].numpy()[::101]
    assert (found == float(number)).all()
    with pytest.raises(PayloadTooLarge, match="long numbers: got more than 4096"):
        decode(encode(numbers(MOST + 1)))


@formats
@pytest.mark.parametrize("number", SHORT)
def test_any_number_of_short_numbers_is_read(encode: Encode, decode: Decode, number: str) -> None:
    found = decode(encode(",".join([number] * 100_000))).tensors["a"].numpy()
    assert found.shape == (100_000,)
    assert (found == float(number)).all()


@formats
def test_float64_as_python_writes_it_is_read_exactly(encode: Encode, decode: Decode) -> None:
    random = np.random.default_rng(0)
    values = random.normal(size=50_000) * 10.0 ** random.integers(-320, 300, 50_000)
    found = decode(encode(stdlib.dumps(values.tolist())[1:-1])).tensors["a"].numpy()
    assert np.array_equal(found, values)


@formats
def test_integer_beyond_64_bits_needs_an_exponent_in_a_long_text(
    encode: Encode, decode: Decode
) -> None:
    """The expression that finds such integers would keep the event loop from running."""
    short = "0.5," * 100
    for wide in (str(10**20), str(2**64)):
        assert decode(encode(short + wide)).tensors["a"].numpy()[-1] == float(wide)
        with pytest.raises(MalformedRequest, match="an integer beyond 64 bits: got it in"):
            decode(encode(short * 45_000 + wide))


def test_names_without_quotes_need_a_short_text() -> None:
    assert np.isnan(decode_v2(v2("0.5,NaN")).tensors["a"].numpy()[-1])
    with pytest.raises(MalformedRequest, match="not JSON"):
        decode_v2(v2("0.5," * 4_500_000 + "NaN"))
