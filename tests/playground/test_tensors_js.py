"""Tests the playground's file parsers in Node.js, with files of numpy and safetensors."""

from __future__ import annotations

import base64
import io
import itertools
import json
import re
from collections.abc import Iterable
from typing import Any, Final

import ml_dtypes
import numpy as np
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from qkv.wire import json as wire_json
from support.examples import examples
from support.javascript import Modules
from support.safetensors_files import INVALID, STRICTER, VALID

_PARSE: Final = """files => Promise.all(files.map(async ([name, data]) => {
    const file = new File([tensors.decodeBase64(data)], name);
    const upload = await uploads.readFile(file).catch((error) => error.message);
    if (typeof upload === "string") return JSON.stringify(upload);
    const wire = ([name, tensor]) => [name, tensors.toWire(tensor)];
    return JSON.stringify(Object.fromEntries(Object.entries(upload.tensors).map(wire)));
}))"""

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


def parse(modules: Modules, files: Iterable[tuple[str, bytes]]) -> list[Any]:
    """Returns the tensors of each file by name, as JSON for the service, or the error message."""
    encoded = [[name, base64.b64encode(data).decode()] for name, data in files]
    return [json.loads(text) for text in modules.evaluate(_PARSE, encoded)]


def arrays_of(tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the tensors of a file as arrays."""
    assert isinstance(tensors, dict), tensors
    message = wire_json.decode(json.dumps({"inputs": tensors}).encode(), "inputs")
    return {name: raw.numpy() for name, raw in message.tensors.items()}


def npy(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


def as_sent(array: np.ndarray) -> np.ndarray:
    """Converts integers to int64, as the page does."""
    return array.astype(np.int64) if array.dtype.kind in "iu" else array


def test_npy_of_every_version_and_byte_and_axis_order_is_parsed(modules: Modules) -> None:
    orders = "float64", "float16", "int64", "bool", "empty", "one"
    written: list[tuple[str, Any, bytes]]
    written = [(k, v, npy(ARRAYS[k], v)) for k in ARRAYS for v in ((1, 0), (2, 0), (3, 0))]
    for name, end, order in itertools.product(orders, "<>", "CF"):
        dtype = ARRAYS[name].dtype.newbyteorder(end)
        written.append((name, (end, order), npy(ARRAYS[name].astype(dtype, order=order))))
    files = parse(modules, [(f"{name}.v1.npy", data) for name, _, data in written])
    for (name, form, _), tensors in zip(written, files, strict=True):
        ((read_name, array),) = arrays_of(tensors).items()
        assert read_name == f"{name}.v1"
        expected = as_sent(ARRAYS[name])
        np.testing.assert_array_equal(array, expected, strict=True, err_msg=f"{name} {form}")


def test_safetensors_is_parsed(modules: Modules) -> None:
    arrays = dict(ARRAYS)
    arrays["bfloat16"] = np.linspace(-3, 3, 6).astype(ml_dtypes.bfloat16).reshape(2, 3)
    arrays["__proto__"] = np.ones(2)
    written = safetensors.numpy.save(arrays, metadata={"format": "pt"})
    read = arrays_of(*parse(modules, [("all.safetensors", written)]))
    assert set(read) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], as_sent(array), strict=True, err_msg=name)


def test_safetensors_that_the_page_writes_is_read_by_the_package(modules: Modules) -> None:
    read = {"bfloat16": torch.linspace(-3, 3, 5).to(torch.bfloat16)}
    read |= {name: torch.from_numpy(as_sent(array)) for name, array in ARRAYS.items()}
    data = base64.b64encode(safetensors.torch.save(read)).decode()
    written = modules.evaluate(
        """async data => {
            const file = new File([tensors.decodeBase64(data)], "all.safetensors");
            const { tensors: read } = await uploads.readFile(file);
            const blob = safetensors.formatSafetensors(read);
            return tensors.encodeBase64(new Uint8Array(await blob.arrayBuffer()));
        }""",
        data,
    )
    found = safetensors.torch.load(base64.b64decode(written))
    assert found.keys() == read.keys()
    for name, tensor in read.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@examples(40)
@given(
    st_numpy.arrays(
        st.sampled_from(["<f8", "<f4", "<f2", ">f4", "<i8", "<i2", "|u1", "|b1"]),
        st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    ),
    st.booleans(),
)
def test_any_npy_is_parsed_exactly(modules: Modules, array: np.ndarray, fortran: bool) -> None:
    array = np.asfortranarray(array) if fortran else array
    (read,) = arrays_of(*parse(modules, [("x.npy", npy(array))])).values()
    np.testing.assert_array_equal(read, as_sent(array).astype(read.dtype), strict=True)


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
    "cut in the magic": ("x.npy", _WHOLE[:5], "the content is not .npy"),
    "cut in the length": ("x.npy", _WHOLE[:9], "cut off inside its header"),
    "cut in the header": ("x.npy", _WHOLE[:40], "cut off inside its header"),
    "cut in the data": ("x.npy", _WHOLE[:-1], "47 bytes .* shape (2, 3) of '<f8' takes 48"),
    "two in one file": ("x.npy", _WHOLE * 2, "bytes of data, but shape"),
    "version 9": (
        "x.npy",
        _WHOLE[:6] + b"\x09" + _WHOLE[7:],
        "version 9 of .npy is not supported: expected 1, 2 or 3",
    ),
    "complex": ("x.npy", npy(np.ones(2, complex)), "'<c16' is not supported"),
    "long double": ("x.npy", npy(np.ones(2, np.longdouble)), "is not supported"),
    "text": ("x.npy", npy(np.array(["a"])), "'<U1' is not supported"),
    "records": ("x.npy", npy(np.zeros(2, [("a", "f4")])), "structured arrays"),
    "bfloat16 in npy": ("x.npy", npy(np.ones(2, ml_dtypes.bfloat16)), "save .safetensors"),
    "too large a whole number": ("x.npy", npy(np.array([2**63], np.uint64)), "too large for int64"),
    "no header": ("x.npy", header("hello"), "header of this .npy is invalid: hello"),
    "negative": ("x.npy", header(_F4.replace("(2,", "(-2,")), "header of this .npy is invalid"),
    "uncountable": ("x.npy", header(_F4.replace("(2,", "(99999999999999999,")), "is too large"),
    "npz": ("x.npz", b"PK\x03\x04rest", "archive is cut off"),
    "picture": (
        "x.png",
        b"\x89PNG\r\n\x1a\n\x00\xff",
        "expected .npy, .npz, .safetensors or a text",
    ),
    "text in a safetensors": ("x.safetensors", b"hello, world", "the content is not .safetensors"),
    "safetensors cut": ("x.safetensors", tensors_of({"a": _ENTRY})[:20], "cut off inside"),
    "safetensors, not JSON": ("x.safetensors", tensors_of(b"{oh"), "is not JSON"),
    "safetensors, no data": (
        "x.safetensors",
        tensors_of({"a": _ENTRY}),
        '"a" has bytes 0 to 8 of 0, but the tensor before it ends at 0: the file is damaged or cut',
    ),
    "safetensors, nothing in it": ("x.safetensors", tensors_of({}), "no tensors"),
    "safetensors, hole": (
        "x.safetensors",
        tensors_of({"a": _ENTRY | {"data_offsets": [4, 12]}}, bytes(12)),
        '"a" has bytes 4 to 12 of 12, but the tensor before it ends at 0',
    ),
    "safetensors, float8": (
        "x.safetensors",
        tensors_of({"a": _ENTRY | {"dtype": "F8_E5M2", "shape": [8]}}, bytes(8)),
        '"a" has the unsupported dtype "F8_E5M2": expected BOOL, U8',
    ),
    "safetensors, fractions": (
        "x.safetensors",
        tensors_of({"a": _ENTRY | {"shape": [0.5]}}, bytes(8)),
        "a number of this header is invalid: expected whole numbers",
    ),
    "safetensors, null": ("x.safetensors", tensors_of({"a": None}), '"a" has the wrong fields'),
    "JSON cut": ("x.json", b"[1, 2", "the text ends inside a list"),
    "JSON, uneven": ("x.json", b"[[1], [2, 3]]", "[1] has 2 entries, but the first list has 1"),
    "JSON, too shallow": ("x.json", b"[[1], 2]", "[1] is 2: all lists of one level"),
    "JSON, a word": ("x.json", b'{"query": [1, "two"]}', 'query: [1] is "two": expected a number'),
    "JSON, null": ("x.json", b"[[1, null]]", "[0][1] is null"),
    "JSON, two kinds": ("x.json", b"[1, true]", "[1] is true, but the entries before are numbers"),
    "JSON, past float64": ("x.json", b"[1e999]", "[0] is too large for float64"),
    "JSON, deep": ("x.json", b"[" * 40 + b"]" * 40, "nested too deep: the limit is 32 levels"),
    "JSON, a number": ("x.json", b"5", "got 5"),
    "JSON, nothing": ("x.json", b"  ", "text is empty"),
    "JSON, dtype": (
        "x.json",
        b'{"dtype": "int8", "shape": [1], "data": "AA=="}',
        '"int8" is not supported: expected float64',
    ),
    "JSON, bytes": (
        "x.json",
        b'{"dtype": "bool", "shape": [2], "data": "AA=="}',
        "shape [2] takes 2 bytes, but data has 1",
    ),
    "JSON, base64": ("x.json", b'{"dtype": "bool", "shape": [1], "data": "%"}', "not base64"),
    "JSON, shape": (
        "x.json",
        b'{"dtype": "bool", "shape": [-1], "data": ""}',
        "shape [-1] is invalid: expected a list",
    ),
}


# in the messages of JavaScript itself
FAULTS: Final = ("undefined", "RangeError", "TypeError", "not a function", "Cannot", "Invalid")

_VERDICTS: Final = """files => Promise.all(files.map(async (data) => {
    const file = new File([tensors.decodeBase64(data)], "x.safetensors");
    const readers = [checkpoint_files.readHeaders([file]), uploads.readFile(file)];
    const name = (error) => error.name + ": " + error.message;
    return Promise.all(readers.map((reader) => reader.then(() => null).catch(name)));
}))"""


def test_page_has_the_verdict_of_the_service_on_a_safetensors_file(modules: Modules) -> None:
    """As a checkpoint and as tensors; it runs less than all dtypes, and wants a tensor."""
    files = VALID | STRICTER | INVALID
    encoded = [base64.b64encode(body).decode() for body in files.values()]
    for name, messages in zip(files, modules.evaluate(_VERDICTS, encoded), strict=True):
        if name not in VALID:
            assert all(messages), name
            assert not any(fault in message for fault in FAULTS for message in messages), messages
        elif files[name].count(b"{") == 1:
            assert all("has no tensors" in message for message in messages), messages
        else:
            assert messages[0] is None, name
            assert messages[1] is None or "has the unsupported dtype" in messages[1], name


def test_message_for_a_malformed_file_names_file_and_problem(modules: Modules) -> None:
    messages = parse(modules, [(name, data) for name, data, _ in MALFORMED.values()])
    for (case, (name, _, words)), message in zip(MALFORMED.items(), messages, strict=True):
        pattern = re.escape(words).replace(r"\ \.\*\ ", " .* ")
        assert isinstance(message, str), (case, message)
        assert re.match(f"{re.escape(name)}: .*{pattern}", message, re.DOTALL), (case, message)


def test_damaged_file_is_parsed_or_rejected_with_a_message(modules: Modules) -> None:
    """Each byte is changed in six ways; each file is cut at each byte."""
    damaged = []
    table = safetensors.numpy.save({"a": np.ones(3)})
    for whole in (_WHOLE, table, b'{"query": [[1, 2], [3, 4]]}'):
        for at, byte in enumerate(whole):
            damaged.append(whole[:at])
            for other in (byte ^ 1, byte ^ 128, *b'\x009"}'):
                damaged.append(whole[:at] + bytes([other]) + whole[at + 1 :])
    results = parse(modules, [("x.bin", data) for data in damaged])
    for data, result in zip(damaged, results, strict=True):
        message = result if isinstance(result, str) else ""
        for fault in FAULTS:
            assert fault not in message, data


def test_too_large_file_is_rejected_unread(modules: Modules) -> None:
    message = modules.evaluate(
        """() => uploads.readFile({
            name: "x.npy", size: 2 ** 40, arrayBuffer: () => { throw new Error("it was read") },
        }).catch((error) => error.message)"""
    )
    assert message == "x.npy: file too large: 1099511627776 bytes, the limit is 268435456"
