"""The playground's tensors in Chromium: files that numpy and safetensors wrote."""

from __future__ import annotations

import base64
import io
import json
import re
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from playwright.sync_api import Page

from qkv.tensors import DTYPES, RawTensor
from qkv.wire import json as wire_json
from qkv.wire.message import Message
from support.examples import examples

_PARSE: Final = """async ([name, data]) => {
    const file = new File([tensors.decodeBase64(data)], name);
    const parsed = await tensors.parseFile(file).catch((error) => error.message);
    if (typeof parsed === "string") return JSON.stringify(parsed);
    const wire = ([name, tensor]) => [name, tensors.toWire(tensor)];
    return JSON.stringify(Object.fromEntries(Object.entries(parsed).map(wire)));
}"""

ARRAYS: Final = {
    "float64": np.linspace(-1, 1, 24).reshape(2, 3, 4),
    "float32": np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 4),
    "float16": np.linspace(-1, 1, 24, dtype=np.float16).reshape(4, 6),
    "int64": np.arange(-12, 12).reshape(4, 6),
    "bool": np.arange(24).reshape(4, 6) % 3 == 0,
    "empty": np.zeros((2, 0, 3), np.float32),
    "one": np.array(2.5),
    **{
        f"whole_{code}": np.array([0, 1, 100], code)
        for code in ("i1", "i2", "i4", "u1", "u2", "u4")
    },
    "whole_u8": np.array([0, 2**63 - 1], np.uint64),
    "least": np.array([-(2**63), -128], np.int64),
}


def parsed(modules: Page, name: str, data: bytes) -> dict[str, np.ndarray] | str:
    """What a file's tensors are as arrays; or what is said of it."""
    answer = json.loads(modules.evaluate(_PARSE, [name, base64.b64encode(data).decode()]))
    if isinstance(answer, str):
        return answer
    message = wire_json.decode(json.dumps({"inputs": answer}).encode(), "inputs")
    return {name: raw.numpy() for name, raw in message.tensors.items()}


def one(modules: Page, name: str, data: bytes) -> np.ndarray:
    arrays = parsed(modules, name, data)
    assert not isinstance(arrays, str), arrays
    (array,) = arrays.values()
    return array


def npy(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


def travelling(array: np.ndarray) -> np.ndarray:
    """As it travels: whole numbers are int64."""
    return array.astype(np.int64) if array.dtype.kind in "iu" else array


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("name", ARRAYS)
def test_npy(modules: Page, name: str, version: tuple[int, int]) -> None:
    array = ARRAYS[name]
    read = parsed(modules, f"{name}.v1.npy", npy(array, version))
    assert not isinstance(read, str), read
    assert list(read) == [f"{name}.v1"]
    np.testing.assert_array_equal(read[f"{name}.v1"], travelling(array), strict=True)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("end", ["<", ">"])
@pytest.mark.parametrize("name", ["float64", "float16", "int64", "bool", "empty", "one"])
def test_npy_in_any_order(modules: Page, name: str, end: str, order: Any) -> None:
    array = ARRAYS[name].astype(ARRAYS[name].dtype.newbyteorder(end), order=order)
    read = one(modules, "x.npy", npy(array))
    np.testing.assert_array_equal(read, ARRAYS[name], strict=True)


def test_safetensors(modules: Page) -> None:
    arrays = {k: v for k, v in ARRAYS.items() if v.dtype.byteorder != ">"}
    arrays["bfloat16"] = np.linspace(-3, 3, 6).astype(ml_dtypes.bfloat16).reshape(2, 3)
    arrays["__proto__"] = np.ones(2)
    written = safetensors.numpy.save(arrays, metadata={"format": "pt"})
    read = parsed(modules, "all.safetensors", written)
    assert not isinstance(read, str), read
    assert set(read) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], travelling(array), strict=True, err_msg=name)


@examples(40)
@given(
    st_numpy.arrays(
        st.sampled_from(["<f8", "<f4", "<f2", ">f4", "<i8", "<i2", "|u1", "|b1"]),
        st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    ),
    st.booleans(),
)
def test_any_array_is_read_as_numpy_wrote_it(
    modules: Page, array: np.ndarray, fortran: bool
) -> None:
    array = np.asfortranarray(array) if fortran else array
    read = one(modules, "x.npy", npy(array))
    np.testing.assert_array_equal(read, travelling(array).astype(read.dtype), strict=True)


@examples(60)
@given(st.lists(st.floats(width=64), max_size=20), st.sampled_from(["float16", "bfloat16"]))
def test_numbers_are_rounded_to_the_nearest_ties_to_even(
    modules: Page, numbers: list[float], dtype: str
) -> None:
    # ml_dtypes rounds to bfloat16 by way of float32: what is held against it is a float32
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
    heard = np.array([float(text.replace("Infinity", "inf")) for text in back])
    np.testing.assert_array_equal(heard, expected.astype(np.float64))


@examples(30)
@given(st.binary(max_size=200_000))
def test_base64_both_ways(modules: Page, data: bytes) -> None:
    text = base64.b64encode(data).decode()
    assert modules.evaluate("t => tensors.encodeBase64(tensors.decodeBase64(t))", text) == text


def header(text: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + data


def tensors_of(entries: Any, data: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


_F4: Final = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"
_WHOLE: Final = npy(np.ones((2, 3)))
_ENTRY: Final = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}

MALFORMED: Final[dict[str, tuple[str, bytes, str]]] = {
    "empty": ("x.npy", b"", "empty"),
    "cut in the magic": ("x.npy", _WHOLE[:5], "does not begin as a .npy does"),
    "cut in the length": ("x.npy", _WHOLE[:9], "ends inside its header"),
    "cut in the header": ("x.npy", _WHOLE[:40], "ends inside its header"),
    "cut in the data": ("x.npy", _WHOLE[:-1], "47 bytes .* shape (2, 3) of '<f8' takes 48"),
    "two in one file": ("x.npy", _WHOLE * 2, "bytes of data where its shape"),
    "version 9": ("x.npy", _WHOLE[:6] + b"\x09" + _WHOLE[7:], "version 9; 1, 2 and 3 are read"),
    "complex": ("x.npy", npy(np.ones(2, complex)), "'<c16' does not travel"),
    "long double": ("x.npy", npy(np.ones(2, np.longdouble)), "does not travel"),
    "text": ("x.npy", npy(np.array(["a"])), "'<U1' does not travel"),
    "records": ("x.npy", npy(np.zeros(2, [("a", "f4")])), "records"),
    "bfloat16 in npy": ("x.npy", npy(np.ones(2, ml_dtypes.bfloat16)), "safetensors keeps its name"),
    "too large a whole number": ("x.npy", npy(np.array([2**63], np.uint64)), "64 bits"),
    "no header": ("x.npy", header("hello"), "not what numpy writes: hello"),
    "negative": ("x.npy", header(_F4.replace("(2,", "(-2,")), "not what numpy writes"),
    "uncountable": ("x.npy", header(_F4.replace("(2,", "(99999999999999999,")), "can be counted"),
    "npz": ("x.npz", b"PK\x03\x04rest", "archive"),
    "picture": ("x.png", b"\x89PNG\r\n\x1a\n\x00\xff", "no .npy, .safetensors or JSON"),
    "text in a safetensors": ("x.safetensors", b"hello, world", "does not begin as"),
    "safetensors cut": ("x.safetensors", tensors_of({"a": _ENTRY})[:20], "ends inside"),
    "safetensors, not JSON": ("x.safetensors", tensors_of(b"{oh"), "is not JSON"),
    "safetensors, no data": ("x.safetensors", tensors_of({"a": _ENTRY}), "0 bytes of data"),
    "safetensors, nothing in it": ("x.safetensors", tensors_of({}), "no tensors"),
    "safetensors, hole": (
        "x.safetensors",
        tensors_of({"a": _ENTRY | {"data_offsets": [4, 12]}}, bytes(12)),
        '"a" .* lies at bytes 4 to 12 where F32 of shape [2] lies at 0 to 8',
    ),
    "safetensors, float8": (
        "x.safetensors",
        tensors_of({"a": _ENTRY | {"dtype": "F8_E5M2"}}, bytes(8)),
        '"a" .* dtype "F8_E5M2"; F64, F32',
    ),
    "safetensors, fractions": (
        "x.safetensors",
        tensors_of({"a": _ENTRY | {"shape": [0.5]}}, bytes(8)),
        "shape and offsets of whole numbers",
    ),
    "safetensors, null": ("x.safetensors", tensors_of({"a": None}), "dtype null"),
    "JSON cut": ("x.json", b"[1, 2", "not JSON"),
    "JSON, uneven": ("x.json", b"[[1], [2, 3]]", "[1] has 2 entries where the first has 1"),
    "JSON, too shallow": ("x.json", b"[[1], 2]", "[1] is 2; lists must be even"),
    "JSON, a word": ("x.json", b'{"query": [1, "two"]}', 'query: [1] is "two"; numbers are read'),
    "JSON, null": ("x.json", b"[[1, null]]", "[0][1] is null"),
    "JSON, two kinds": ("x.json", b"[1, true]", "[1] is true among numbers"),
    "JSON, past float64": ("x.json", b"[1e999]", "[0] is a number past the largest"),
    "JSON, deep": ("x.json", b"[" * 40 + b"]" * 40, "more than 32 deep"),
    "JSON, a number": ("x.json", b"5", "5 came"),
    "JSON, nothing": ("x.json", b"  ", "nothing here"),
    "JSON, dtype": (
        "x.json",
        b'{"dtype": "int8", "shape": [1], "data": "AA=="}',
        '"int8" does not travel; known are float64',
    ),
    "JSON, bytes": (
        "x.json",
        b'{"dtype": "bool", "shape": [2], "data": "AA=="}',
        "shape [2] takes 2 bytes; data has 1",
    ),
    "JSON, base64": ("x.json", b'{"dtype": "bool", "shape": [1], "data": "%"}', "not base64"),
    "JSON, shape": (
        "x.json",
        b'{"dtype": "bool", "shape": [-1], "data": ""}',
        "shape [-1] is not a list",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_named_with_what_is_wrong_with_it(modules: Page, case: str) -> None:
    name, data, words = MALFORMED[case]
    said = parsed(modules, name, data)
    assert isinstance(said, str)
    assert said.startswith(f"{name}: ")
    assert re.search(re.escape(words).replace(r"\ \.\*\ ", " .* "), said), said


@examples(100)
@given(st.data())
def test_a_file_cut_or_changed_is_read_or_refused_in_words(
    modules: Page, data: st.DataObject
) -> None:
    whole = data.draw(
        st.sampled_from(
            [_WHOLE, safetensors.numpy.save({"a": np.ones(3)}), b'{"query": [[1, 2], [3, 4]]}']
        )
    )
    at = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.integers(0, 255))
    changed = data.draw(st.sampled_from([whole[:at], whole[:at] + bytes([byte]) + whole[at + 1 :]]))
    said = modules.evaluate(_PARSE, ["x.bin", base64.b64encode(changed).decode()])
    for fault in ("undefined", "RangeError", "TypeError", "not a function", "Cannot", "Invalid"):
        assert not (isinstance(json.loads(said), str) and fault in said), said


def test_a_file_too_large_is_refused_unread(modules: Page) -> None:
    said = modules.evaluate(
        """() => tensors.parseFile({
            name: "x.npy", size: 2 ** 40, arrayBuffer: () => { throw new Error("it was read") },
        }).catch((error) => error.message)"""
    )
    assert said == "x.npy: this file has 1099511627776 bytes; at most 268435456 are read"


def test_json_in_every_form(modules: Page) -> None:
    lists = '[[1, 2.5, "NaN"], ["Infinity", "-Infinity", 0]]'
    wire = {
        "dtype": "bfloat16",
        "shape": [2],
        "data": base64.b64encode(b"\x80\x3f\x00\x40").decode(),
    }
    both = json.dumps({"inputs": {"query": json.loads(lists), "mask": [True, False], "key": wire}})
    again = (
        "text => Object.entries(tensors.parseText(text)).map(([n, t]) => [n, tensors.toWire(t)])"
    )
    assert modules.evaluate(again, lists) == [["tensor", json.loads(lists)]]
    assert dict(modules.evaluate(again, both)) == json.loads(both)["inputs"]
    assert modules.evaluate("t => tensors.toLists(tensors.fromWire(t))", wire) == [1, 2]
    assert modules.evaluate("t => tensors.toLists(tensors.fromWire(t))", [[], []]) == [[], []]


# JavaScript writes numbers below 1e21 without an exponent, and the service reads whole numbers of
# 64 bits
_WRITTEN: Final = st.floats(width=32).filter(lambda x: not 2**63 <= abs(x) < 1e21)


@examples(30)
@given(
    st_numpy.arrays(
        np.float32,
        st_numpy.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=3),
        elements=_WRITTEN,
    )
)
def test_lists_are_written_as_they_were_read(modules: Page, array: np.ndarray) -> None:
    (written,) = wire_json.encode(Message({}, {"a": RawTensor.from_numpy(array)}), "inputs")
    again = "t => { const p = tensors.parseText(t); return JSON.stringify(tensors.toWire(p.a)) }"
    back = modules.evaluate(again, bytes(written).decode())
    read = wire_json.decode(f'{{"inputs": {{"a": {back}}}}}'.encode(), "inputs").tensors["a"]
    np.testing.assert_array_equal(read.numpy().astype(np.float32), array + 0, strict=True)
