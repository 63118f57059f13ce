"""The table of invalid requests of the Open Inference Protocol, with their messages."""

from __future__ import annotations

import json as stdlib
from typing import Any, Final

from support.open_inference_requests import request_with_lists


def text(*entries: Any, **fields: Any) -> bytes:
    return stdlib.dumps(fields | {"inputs": list(entries)}).encode()


def entry(datatype: Any = "FP32", shape: Any = (1,), size: Any = 4, **more: Any) -> dict[str, Any]:
    """Returns an entry with binary data; without a size, `more` has its `data`."""
    parameters = {} if size is None else {"parameters": {"binary_data_size": size}}
    return {"name": "a", "datatype": datatype, "shape": shape} | parameters | more


def one(datatype: Any, shape: Any, data: Any) -> bytes:
    return text(entry(datatype, shape, None, data=data))


def binary(*entries: Any, data: bytes = bytes(4)) -> tuple[bytes, int]:
    head = text(*entries)
    return head + data, len(head)


def raw(inputs: bytes) -> bytes:
    return b'{"inputs":[{"name":"a","datatype":"FP32","shape":[1],' + inputs + b"}]}"


OF_ENTRIES: dict[str, tuple[Any, str]] = {
    "size negative": (entry(size=-4), "binary_data_size: got -4, expected 4 for FP32 of shape [1]"),
    "size too small": (entry(size=3), "binary_data_size: got 3"),
    "size too large": (entry(size=5), "expected 4"),
    "size 2**62": (entry(size=2**62), "expected 4"),
    "size 2**70": (entry(size=2**70), ""),  # simdjson rejects it, or reads a float
    "size a boolean": (entry("BOOL", [1], True), "binary_data_size: got true"),
    "size a float": (entry(size=4.0), "binary_data_size: got 4.0"),
    "size a string": (entry(size="4"), 'binary_data_size: got "4"'),
    "both": (entry(data=[1]), "both data and binary_data_size"),
    "neither": (entry(size=None), "neither data nor binary_data_size"),
    "data null": (entry(size=None, data=None), "neither data nor"),
    "data an object": (entry(size=None, data={}), "wrong shape: got []"),
    "data a number": (entry(size=None, data=1), "wrong shape: got []"),
    "data a string": (entry(shape=[], size=None, data="AAAA"), 'is invalid: got "AAAA"'),
    "unknown key": (entry(size=None, dtype="F32", data=[1]),
                    "unknown field: got 'dtype', expected name"),
    "unknown parameter": (entry(parameters={"binary": 4}), "parameter: got 'binary', expected"),
    "parameters a list": (entry(parameters=[]), "parameters: got [], expected an object"),
    "shared memory": (entry(parameters={"shared_memory_region": "r"}), "shared memory"),
    "shared memory's size": (entry(parameters={"shared_memory_byte_size": 4}), "shared memory"),
    "no name": ({"datatype": "FP32", "shape": [1], "data": [1]},
                "name: got null, expected a string"),
    "name a number": (entry(name=1), "name: got 1, expected a string"),
    "name a list": (entry(name=["a"]), "expected a string"),
    "no datatype": ({"name": "a", "shape": [1], "data": [1]}, "datatype: got null, expected FP64"),
    "no shape": ({"name": "a", "datatype": "FP32", "data": [1]}, "shape: got null"),
    "no object": (1, "inputs/0 must be an object: got 1"),
    "a list": ([], "must be an object: got a list"),
} | {
    f"datatype {d}": (entry(d), "expected FP64, FP32, FP16, BF16, INT64, BOOL")
    for d in ("UINT8", "INT32", "BYTES", "fp32", "float32", "", None, 1, ["FP32"], {"FP32": 1})
} | {
    f"shape {s}": (entry(shape=s), "expected at most 8 integers, 0 or more")
    for s in ([-1], [2**62, 2**62], [2**63], [2**61], [2**61, 0], [1.0], [True], ["1"], [None],
              [[1]], [1] * 9, 1, "1", None, {"0": 1})
}  # fmt: skip
OF_DATA: dict[str, tuple[Any, Any, Any, str]] = {
    "too few": ("FP32", [2, 2], [1, 2, 3], "got [3], expected [2, 2] or [4]"),
    "too many": ("FP32", [2], [1, 2, 3], "got [3], expected [2] or [2]"),
    "nested otherwise": ("FP32", [2, 3], [[1, 2], [3, 4], [5, 6]], "got [3, 2]"),
    "nested in part": ("FP32", [1, 2, 2], [[1, 2], [3, 4]], "got [2, 2]"),
    "nested deeper": ("FP32", [2], [[1], [2]], "got [2, 1]"),
    "ragged": ("FP32", [4], [[1, 2, 3], [4]], "ragged: got lists of 1 and 3 elements on axis 1"),
    "ragged in depth": ("FP32", [2], [1, [2]], "a list"),
    "ragged from depth": ("FP32", [2], [[1], 2], "lists and single values"),
    "10 axes": ("FP32", [1], [[[[[[[[[[1]]]]]]]]]], "more than 8 axes"),
    "a string": ("FP32", [2], [1, "2"], 'at [1]: got "2"'),
    "a word": ("FP32", [2], [1, "nan"], 'got "nan"'),
    "null": ("FP32", [2], [1, None], "at [1]: got null"),
    "an object": ("FP32", [2], [1, {}], "an object"),
    "booleans": ("FP32", [2], [True, False], "got booleans, expected numbers"),
    "booleans for INT64": ("INT64", [2], [True, False], "got booleans"),
    "booleans among numbers": ("FP32", [2], [1, True], "at [1]: got true"),
    "BOOL of 2": ("BOOL", [2], [1, 2], "other than true and false"),
    "BOOL of a half": ("BOOL", [2], [0.5, 1], "other than true and false"),
    "BOOL of NaN": ("BOOL", [2], ["NaN", 1], "other than true and false"),
    "BOOL of strings": ("BOOL", [1], ["true"], 'got "true"'),
    "FP16 past its range": ("FP16", [2], [1, 65520], "outside the range of float16"),
    "BF16 past its range": ("BF16", [1], [1e39], "outside the range of bfloat16"),
    "FP32 past its range": ("FP32", [1], [1e39], "outside the range of float32"),
    "INT64 of a half": ("INT64", [2], [1, 0.5], "got 0.5, expected integers"),
    "INT64 of 2**63": ("INT64", [1], [2**63], "expected integers"),
    "INT64 of NaN": ("INT64", [1], ["NaN"], "expected integers"),
}
DEEP = b"[" * 900 + b"]" * 900
OF_BODIES: dict[str, tuple[bytes, int | None, str]] = {
    "nothing": (b"", None, "not JSON"),
    "length 0": (text(), 0, "not JSON"),
    "length past the body": (text(), 1000, f"got 1000, expected at most {len(text())}"),
    "length 2**62": (text(), 2**62, "is too large: got"),
    "length too short": (text(), len(text()) - 1, "not JSON"),
    "length too long": (binary(entry())[0], len(text(entry())) + 1, "not JSON"),
    "bytes missing": (*binary(entry(), data=b"123"), "got 3, expected binary_data_size 4"),
    "no bytes": (*binary(entry(), data=b""), "got 0, expected"),
    "no length": (binary(entry())[0], None, "not JSON"),
    "bytes in JSON": (text(entry()), None, "got 0, expected"),
    "bytes left": (*binary(entry(), data=bytes(6)), "2 bytes after the JSON belong to no tensor"),
    "bytes of none": (*binary(), "4 bytes after the JSON"),
    "BOOL bytes of 2": (*binary(entry("BOOL", [4]), data=b"\0\1\2\1"), "other than 0 and 1"),
    "names twice": (*binary(entry(), entry(), data=bytes(8)), "'a' is repeated"),
    "257 inputs": (text(*[entry(name=str(i), shape=[0], size=0) for i in range(257)]), None,
                   "more than 256"),
    "inputs an object": (b'{"inputs":{}}', None, "inputs must be a list of tensors: got an object"),
    "inputs null": (b'{"inputs":null}', None, "must be a list of tensors: got null"),
    "inputs twice": (b'{"inputs":[],"inputs":[]}', None, "'inputs' is repeated"),
    "a key twice": (raw(b'"data":[1],"data":[1]'), None, "'data' is repeated"),
    "a list": (b"[]", None, "must be a JSON object"),
    "not UTF-8": (b'{"id":"\xff"}', None, "not JSON"),
    "nan": (raw(b'"data":[nan]'), None, "not JSON"),
    "deep data": (raw(b'"data":' + DEEP), None, "more than 8 axes"),
    "deep shape": (b'{"inputs":[{"shape":' + DEEP + b"}]}", None, "nested deeper than 32"),
    "deep parameters": (b'{"parameters":' + DEEP + b"}", None, "nested deeper than 32"),
    "a depth bomb": (b'{"inputs":' + b"[" * 500_000, None, "not JSON"),
    "junk": (b'{"junk":[' + b"0," * 500_000 + b"0]}", None, "more than 10000 values"),
    "junk among numbers": (raw(b'"data":[' + b"[]," * 50_000 + b"0]"), None, "lists and single"),
    "a long name": (b'{"' + b"n" * 1025 + b'":0}', None,
                    "got 1025 characters, expected at most 1024"),
    "junk names": (stdlib.dumps({str(i): 0 for i in range(257)}).encode(), None, "more than 256"),
    "a list of a million": (b'{"inputs":[' + b"0," * 1_000_000 + b"0]}", None, "more than 256"),
}  # fmt: skip
CRAFTED: dict[str, tuple[bytes, int | None, str]] = (
    {f"entry: {n}": (*binary(e), words) for n, (e, words) in OF_ENTRIES.items()}
    | {f"data: {n}": (one(*e), None, words) for n, (*e, words) in OF_DATA.items()}
    | {f"body: {n}": (b, length, words) for n, (b, length, words) in OF_BODIES.items()}
)


def changed(**fields: Any) -> dict[str, Any]:
    """Returns a valid request whose first input has these fields."""
    query, *others = request_with_lists()["inputs"]
    return {"inputs": [query | fields, *others]}


Rows = list[tuple[dict[str, Any], str]]
OF_FIELDS: Final[Rows] = [
    ({"foo": 1}, "unknown field 'foo'; known are inputs, id"),
    ({"id": 7}, "id is invalid: got 7"),
    ({"inputs": {}}, "inputs must be a list of tensors"),
    ({"inputs": [5]}, "inputs/0 must be an object"),
    ({"inputs": [{}] * 300}, "more than 256"),
    (changed(datatype="FP8"), "expected FP64"),
    (changed(shape=[-1, 2, 3, 4]), "0 or more"),
    (changed(parameters={"shared_memory_region": "a"}), "is in shared memory"),
    (changed(parameters={"size": 96}), "unknown parameter: got 'size'"),
    ({"outputs": "output"}, "outputs is invalid: got"),
    ({"outputs": [{"name": 5}]}, "outputs.0.name is invalid: got 5"),
    ({"outputs": [{}]}, "outputs.0.name is missing"),
    ({"outputs": [{"parameters": {}}]}, "outputs.0.name is missing"),
    ({"outputs": [{"name": "output", "data": 1}]}, "unknown field 'data' of outputs.0"),
    ({"outputs": [{"name": "output", "parameters": {"binary_data": 1}}]}, "a valid boolean"),
    ({"parameters": []}, "parameters is invalid: got"),
]
OF_VALUES: Final[Rows] = [  # which no schema covers
    ({"inputs": []}, "softmax needs query, key, value"),
    (changed(name="kye"), "softmax has no input 'kye'"),
    (changed(name="key"), "'key' is repeated"),
    (changed(datatype="INT64", data=[1] * 24), "query has the wrong dtype: got int64"),
    (changed(shape=[1, 2, 3, 5]), "got [24], expected [1, 2, 3, 5] or [30]"),
    ({"outputs": [{"name": "outptu"}]}, "softmax has no output 'outptu'"),
    ({"outputs": [{"name": "output"}, {"name": "output"}]}, "output is named twice"),
    ({"parameters": {"binary_data_output": "yes"}}, "parameters.binary_data_output"),
    ({"parameters": {"priority": -1}}, "parameters.priority"),
    ({"parameters": {"timeout": 1.5}}, "parameters.timeout"),
    ({"parameters": {"timeout": -1}}, "parameters.timeout is invalid: got -1"),
    ({"parameters": {"timeout": 1 << 63}}, "parameters.timeout"),
    ({"parameters": {"causal": "yes"}}, "causal"),
    ({"parameters": {"window": "{1"}}, "expected JSON"),
    ({"parameters": {"sequence_end": True}}, "no model keeps state"),
]
