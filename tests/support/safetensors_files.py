"""Safetensors files, and the one verdict that each reader of the project has on them.

The safetensors library is the reference: it reads `VALID` and refuses `INVALID`.
"""

from __future__ import annotations

import json
from typing import Any, Final


def file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """Returns a file; a header of bytes is used unchanged."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4), **more: Any) -> Any:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets} | more


def of_tensors(size: int = 8, **tensors: Any) -> bytes:
    return file(tensors, bytes(size))


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def of_shape(shape: Any) -> bytes:
    return of_tensors(a=tensor(shape=shape, offsets=[0, 8]))


def at_offsets(offsets: Any) -> bytes:
    return of_tensors(a=tensor(shape=[2], offsets=offsets))


_ENTRY: Final = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
_BYTES: Final = {  # of four elements
    "F4": 2, "F6_E2M3": 3, "F6_E3M2": 3, "BOOL": 4, "U8": 4, "I8": 4, "F8_E4M3": 4,
    "F8_E4M3FNUZ": 4, "F8_E5M2": 4, "F8_E5M2FNUZ": 4, "F8_E8M0": 4, "U16": 8, "I16": 8, "F16": 8,
    "BF16": 8, "U32": 16, "I32": 16, "F32": 16, "U64": 32, "I64": 32, "F64": 32, "C64": 32,
}  # fmt: skip

VALID: Final[dict[str, bytes]] = {
    "no tensor": file({}),
    "spaces behind the header": file(b"{} \n\t\r"),
    "a scalar": of_tensors(4, a=tensor(shape=[])),
    "names in another order": of_tensors(a=tensor(offsets=[4, 8]), b=tensor()),
    "empty tensors": of_tensors(
        a=tensor(), b=tensor(offsets=[4, 8]), c=tensor(shape=[0], offsets=[4, 4]),
        d=tensor("F64", [3, 0], [0, 0]), e=tensor("BF16", [0], [8, 8]),
    ),
    "no name": file({"": tensor()}, bytes(4)),
    "a name with a colon, a number and a brace": file({'":-0.5e1{\\': tensor()}, bytes(4)),
    "a name of the prototype": file({"__proto__": tensor()}, bytes(4)),
    "a name that is escaped": file(b'{"\\u0061\\ud83d\\ude00\\"\\/":' + _ENTRY + b"}", bytes(4)),
    "metadata": file({"__metadata__": {"a": '{"b": -0.5}'}, "a": tensor()}, bytes(4)),
    "no metadata but null": file({"__metadata__": None, "a": tensor()}, bytes(4)),
} | {
    f"four of {code}": of_tensors(size, a=tensor(code, [2, 2], [0, size]))
    for code, size in _BYTES.items()
}  # fmt: skip

STRICTER: Final[dict[str, bytes]] = {
    # the format forbids these, and its library reads them
    "a header that begins with a space": file(b" {}"),
    "a name twice": file(b'{"a":' + _ENTRY + b',"a":' + _ENTRY + b"}", bytes(4)),
    "a name of the metadata twice": file(b'{"__metadata__":{"a":"1","a":"2"}}'),
    # it does not describe these
    "a field more": of_tensors(a=tensor(shape=[2], offsets=[0, 8], order="C")),
    "a list for an entry": of_tensors(a=["F32", [2], [0, 8]]),
    # nothing computes with these
    "9 axes": of_tensors(a=tensor("F64", [1] * 9, [0, 8])),
    "none of 2**62": of_tensors(0, a=tensor("U8", [0, 2**62], [0, 0])),
    "a name of 1025 characters": of_tensors(4, **{"a" * 1025: tensor()}),
}
"""Files that the library reads and the project refuses."""

INVALID: Final[dict[str, bytes]] = {
    "no bytes": b"",
    "7 bytes": bytes(7),
    "length 0": bytes(8),
    "length 0 with data": bytes(16),
    "length past the file": file(b"{}", length=3),
    "length of 100,000,001": file(b"{}", length=100_000_001),
    "length of a gigabyte": file(b"{}", length=1 << 30),
    "length 2**63": file(b"{}", length=1 << 63),
    "length 2**64-1": b"\xff" * 16,
    "text": b"hello, world",
    "not JSON": file(b"{'a': 1}"),
    "not UTF-8": file(b'{"\xff": 1}'),
    "a byte-order mark": file(b"\xef\xbb\xbf{}"),
    "half a character": file(b'{"\\ud800":' + _ENTRY + b"}", bytes(4)),
    "half a character in the metadata": file(b'{"__metadata__":{"a":"\\ud800"}}'),
    "a control character": file(b'{"a\n":' + _ENTRY + b"}", bytes(4)),
    "trailing": file(b"{} {}"),
    "trailing zeros": file(b"{}\0\0"),
    "a list": file([]),
    "a number": file(1),
    "null": file(None),
    "a string": file("a"),
    "NaN": file(b'{"a":NaN}'),
    "nested 1000": file(nested(1000)),
    "nested 500000": file(nested(500_000)),
    "nested in a tensor": file(b'{"a":' + nested(100_000) + b"}"),
    "a long number": file(b'{"a":' + b"9" * 100_000 + b"}"),
    "twice with other bytes": file(b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":1}'),
    "a field twice": file(b'{"a":{"dtype":"F32",' + _ENTRY[1:] + b"}", bytes(4)),
    "metadata twice": file(b'{"__metadata__":{},"__metadata__":{}}'),
    "metadata of a number": file({"__metadata__": {"a": 1}, "a": tensor()}, bytes(4)),
    "metadata of null": file({"__metadata__": {"a": None}, "a": tensor()}, bytes(4)),
    "metadata of a list": file({"__metadata__": {"a": ["b"]}, "a": tensor()}, bytes(4)),
    "metadata of an object": file({"__metadata__": {"a": {"b": "c"}}}),
    "metadata a list": file({"__metadata__": []}),
    "metadata a text": file({"__metadata__": "pt"}),
    "metadata a tensor": file({"__metadata__": tensor()}, bytes(4)),
    "one range": of_tensors(
        256, q=tensor(shape=[8, 8], offsets=[0, 256]), k=tensor(shape=[8, 8], offsets=[0, 256])
    ),
    "overlapping": of_tensors(a=tensor(), b=tensor(shape=[2], offsets=[0, 8])),
    "overlapping in part": of_tensors(a=tensor(), b=tensor("F16", [3], [2, 8])),
    "overlapping at the end": of_tensors(
        a=tensor(shape=[2], offsets=[0, 8]), b=tensor(offsets=[4, 8])
    ),
    "empty in another": of_tensors(
        a=tensor(shape=[2], offsets=[0, 8]), b=tensor(shape=[0], offsets=[4, 4])
    ),
    "empty past the end": of_tensors(0, a=tensor(shape=[0], offsets=[4, 4])),
    "gap before": of_tensors(a=tensor(offsets=[4, 8])),
    "gap between": of_tensors(a=tensor("F16", [1], [0, 2]), b=tensor(offsets=[4, 8])),
    "gap after": of_tensors(a=tensor()),
    "one byte more": of_tensors(5, a=tensor()),
    "one byte less": of_tensors(3, a=tensor()),
    "no tensor but data": of_tensors(),
    "past the end": of_tensors(a=tensor(shape=[3], offsets=[0, 12])),
    "far past the end": of_tensors(a=tensor("U8", shape=[2**50], offsets=[0, 2**50])),
    "offset negative": of_tensors(a=tensor(offsets=[-4, 0])),
    "offsets negative": at_offsets([-8, -1]),
    "offsets reversed": of_tensors(a=tensor(offsets=[8, 4])),
    "offsets reversed, of none": of_tensors(4, a=tensor(shape=[0], offsets=[4, 0])),
    "offset 2**64": at_offsets([0, 2**64]),
    "offset -2**64": at_offsets([-(2**64), 8]),
    "offset -0": file(_ENTRY.join([b'{"a":', b"}"]).replace(b"[0,", b"[-0,"), bytes(4)),
    "offsets of floats": at_offsets([0.0, 8.0]),
    "offsets of booleans": of_tensors(1, a=tensor("BOOL", [1], [False, True])),
    "offsets of text": at_offsets(["0", "8"]),
    "three offsets": at_offsets([0, 8, 8]),
    "one offset": at_offsets([0]),
    "no offsets": at_offsets([]),
    "offsets null": at_offsets(None),
    "offsets an object": at_offsets({"0": 0}),
    "a field missing": of_tensors(a={"dtype": "F32", "shape": [2]}),
    "a field misspelled": of_tensors(a={"dtype": "F32", "shape": [2], "offsets": [0, 8]}),
    "no field": of_tensors(a={}),
    "an empty list for an entry": of_tensors(a=[]),
    "null for an entry": of_tensors(a=None),
    "a number for an entry": of_tensors(a=1),
    "too few bytes": of_shape([3]),
    "too many bytes": of_shape([1]),
    "too few bytes of U8": of_tensors(a=tensor("U8", [9], [0, 8])),
    "a half byte of F4": of_tensors(4, a=tensor("F4", [7], [0, 4])),
    "a half byte less of F4": of_tensors(3, a=tensor("F4", [7], [0, 3])),
    "a wider dtype": of_tensors(a=tensor("F64", [2], [0, 8])),
    "none in the shape": of_shape([0]),
    "shape [2**62, 4]": of_shape([2**62, 4]),
    "shape [2**62, 4] of none": file({"a": tensor(shape=[2**62, 4], offsets=[0, 0])}),
    "shape [2**62, 4, 0]": file({"a": tensor(shape=[2**62, 4, 0], offsets=[0, 0])}),
    "shape [2**62] * 8": of_shape([2**62] * 8),
    "shape [2**64]": of_shape([2**64]),
    "shape negative": of_shape([-1, -2]),
    "shape of floats": of_shape([2.0]),
    "shape of 2e0": file(b'{"a":{"dtype":"F32","shape":[2e0],"data_offsets":[0,8]}}', bytes(8)),
    "shape of 2E0": file(b'{"a":{"dtype":"F32","shape":[2E0],"data_offsets":[0,8]}}', bytes(8)),
    "shape of booleans": of_tensors(a=tensor("F64", [True], [0, 8])),
    "shape a number": of_shape(2),
    "shape null": of_shape(None),
    "shape nested": of_shape([[2]]),
    "dtype in lower case": of_tensors(a=tensor("f64", [1], [0, 8])),
    "dtype a list": of_tensors(a=tensor(["F64"], [1], [0, 8])),
    "dtype null": of_tensors(a=tensor(None, [1], [0, 8])),
    "dtype a number": of_tensors(a=tensor(64, [1], [0, 8])),
    "dtype of no bits": of_tensors(0, a=tensor("", [0], [0, 0])),
    "dtype F128": of_tensors(16, a=tensor("F128", [1], [0, 16])),
    "dtype of the prototype": of_tensors(a=tensor("constructor", [8], [0, 8])),
    "dtype of half a character": of_tensors(a=tensor("\ud800", [8], [0, 8])),
}  # fmt: skip
