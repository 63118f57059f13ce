"""Tests the playground's tensors in Node.js: JSON forms, base64 and rounding."""

from __future__ import annotations

import base64
import json
from typing import Final

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from qkv.tensors import DTYPES, RawTensor
from qkv.wire import json as wire_json
from qkv.wire.message import Message
from support.examples import examples
from support.javascript import Modules


@examples(60)
@given(st.lists(st.floats(width=64), max_size=20), st.sampled_from(["float16", "bfloat16"]))
def test_numbers_round_to_nearest_ties_to_even(
    modules: Modules, numbers: list[float], dtype: str
) -> None:
    # ml_dtypes rounds to bfloat16 through float32, so the numbers compared are float32
    with np.errstate(all="ignore"):
        near = np.array(numbers, np.float32).astype(np.float64)
        expected = near.astype(np.float32 if dtype == "bfloat16" else np.float64)
        expected = expected.astype(DTYPES[dtype])
    wire, back = modules.evaluate(
        """([numbers, dtype]) => {
            const tensor = tensors.fromNumbers(numbers.map(Number), [numbers.length], dtype);
            return [tensors.toWire(tensor), [...tensors.toNumbers(tensor)].map(String)];
        }""",
        [[str(x).replace("inf", "Infinity") for x in near], dtype],
    )
    read = np.frombuffer(base64.b64decode(wire["data"]), DTYPES[dtype])
    np.testing.assert_array_equal(read.astype(np.float64), expected.astype(np.float64))
    read_back = np.array([float(text.replace("Infinity", "inf")) for text in back])
    np.testing.assert_array_equal(read_back, expected.astype(np.float64))


@examples(30)
@given(st.binary(max_size=200_000))
def test_base64_round_trip(modules: Modules, data: bytes) -> None:
    text = base64.b64encode(data).decode()
    assert modules.evaluate("t => tensors.encodeBase64(tensors.decodeBase64(t))", text) == text


def test_every_form_of_json_is_parsed(modules: Modules) -> None:
    lists = '[[1, 2.5, "NaN"], ["Infinity", "-Infinity", 0]]'
    wire = {
        "dtype": "bfloat16",
        "shape": [2],
        "data": base64.b64encode(b"\x80\x3f\x00\x40").decode(),
    }
    both = json.dumps({"inputs": {"query": json.loads(lists), "mask": [True, False], "key": wire}})
    again = """text => {
        const upload = uploads.readText(text);
        return Object.entries(upload.tensors).map(([n, t]) => [n, tensors.toWire(t)]);
    }"""
    assert modules.evaluate(again, lists) == [["tensor", json.loads(lists)]]
    assert dict(modules.evaluate(again, both)) == json.loads(both)["inputs"]
    assert modules.evaluate("t => tensors.toLists(tensors.fromWire(t))", wire) == [1, 2]
    assert modules.evaluate("t => tensors.toLists(tensors.fromWire(t))", [[], []]) == [[], []]


# JavaScript writes numbers below 1e21 without an exponent; the service parses integers of 64 bits
_WRITTEN: Final = st.floats(width=32).filter(lambda x: not 2**63 <= abs(x) < 1e21)


@examples(30)
@given(
    st_numpy.arrays(
        np.float32,
        st_numpy.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=3),
        elements=_WRITTEN,
    )
)
def test_lists_round_trip(modules: Modules, array: np.ndarray) -> None:
    (written,) = wire_json.encode(Message({}, {"a": RawTensor.from_numpy(array)}), "inputs")
    again = "t => JSON.stringify(tensors.toWire(uploads.readText(t).tensors.a))"
    back = modules.evaluate(again, bytes(written).decode())
    read = wire_json.decode(f'{{"inputs": {{"a": {back}}}}}'.encode(), "inputs").tensors["a"]
    np.testing.assert_array_equal(read.numpy().astype(np.float32), array + 0, strict=True)
