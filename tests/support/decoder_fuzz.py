"""Valid bodies of every decoder, and checks of decoding a changed body."""

from __future__ import annotations

import asyncio
import gzip
import io
import json as stdlib
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, TypeVar

import numpy as np

from qkv.api import compressed_body
from qkv.errors import QkvError
from qkv.tensors import RawTensor
from qkv.wire import json, open_inference, safetensors
from qkv.wire.message import Message
from support.known_requests import DTYPES, Array

_T = TypeVar("_T")


KiB, MiB = 1 << 10, 1 << 20
LIMIT: Final = 1 << 16  # of unpacked bytes in these tests
# Python objects are some dozens of times as large as their JSON text: an object, of 56 bytes
# and more, for every two characters.
PER_BYTE, AT_LEAST = 64, 256 * KiB
_PART: Final = 1 << 16
PIECE: Final = 3 * MiB  # unpacking uses pieces of 1 MiB, which zlib joins from smaller ones
ARRAYS: Final[dict[str, Array]] = {
    "query": np.eye(2, dtype="f4"), "mask": np.array([[True, False]]), "key_lengths": np.array([2]),
    "half": np.array(1, "f2"), "brain": np.array([1, np.inf], DTYPES["bfloat16"]),
    "none": np.zeros((0, 2)), "wide": np.array([[[0.1]], [[1e300]]]),
}  # fmt: skip
FIELDS: Final = {"parameters": {"causal": True, "window": [1, None], "scale": 1e-3}, "outputs": []}
RAW: Final = {name: RawTensor.from_numpy(a) for name, a in ARRAYS.items()}


V2_CHUNKS, V2_LENGTH = open_inference.encode(
    Message({"id": "1"} | FIELDS, RAW), "inputs", {*list(RAW)[::2]}
)


def of_json(encoding: str) -> bytes:
    return b"".join(json.encode(Message(FIELDS, RAW, RAW, encoding), "inputs"))


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, **{n: a for n, a in ARRAYS.items() if n != "brain"})  # type: ignore[arg-type]
    return file.getvalue()


VALID_BODIES: Final[dict[str, bytes]] = {
    "lists": of_json("lists"),
    "base64": of_json("base64"),
    "safetensors": b"".join(safetensors.encode(Message(FIELDS, RAW, RAW), "inputs")),
    "v2": b"".join(V2_CHUNKS),
    "v2 in JSON": b"".join(open_inference.encode(Message(FIELDS, RAW), "inputs", ())[0]),
    "gzip": gzip.compress(of_json("lists"), mtime=0),
    "deflate": zlib.compress(of_json("lists")),
    "npz": npz(),
}
DECODERS: Final[dict[str, tuple[Callable[[bytes], Any], list[str]]]] = {
    "json": (lambda body: json.decode(body, "inputs"), ["lists", "base64"]),
    "safetensors": (lambda body: safetensors.decode(body, "inputs"), ["safetensors"]),
    "v2": (lambda body: open_inference.decode(body, "inputs", V2_LENGTH), ["v2"]),
    "v2 in JSON": (lambda body: open_inference.decode(body, "inputs"), ["v2 in JSON"]),
}
SNIPPETS: Final = [
    b"[", b"]", b"{", b"}", b'"', b",", b":", b"null", b"true", b"1e999", b"-", b"\\u0000", b"1e9",
    b"\\ud800", b"\xff", b"\x00", b"[]", b"{}", b"NaN", b"0", b"99999999999999999999", b'"NaN"',
    b'\\"', b'"a":1,', b"BOOL", b"I64", b"FP16", b"float64", b" ", b"[" * 40, b"-1", b"0.5",
    b"4611686018427387904", b"9223372036854775807", b"1073741824", b"====", b'"binary_data_size":8',
]  # fmt: skip


def assert_allocates_below(most: int, work: Callable[[], _T]) -> _T:
    """Runs `work` and checks that its peak of allocated memory is below `most` bytes.

    For a million calls, start tracing once: each start and stop leaks some memory (CPython 3.11:
    0.1 to 3 KB).
    """
    is_traced = tracemalloc.is_tracing()
    if not is_traced:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    try:
        return work()
    finally:
        peak = tracemalloc.get_traced_memory()[1] - before
        if not is_traced:
            tracemalloc.stop()
        assert peak < most


def result_or_refusal(work: Callable[[], _T], is_body: bool = False) -> _T | None:
    """Returns the result of `work`; None if it raises a `QkvError` with a valid client error.

    Args:
        work: decodes.
        is_body: its fault is at a place of a body, unless nothing of the body can be read.
    """
    try:
        return work()
    except QkvError as error:
        rejection = error
    problem = stdlib.loads(json.dump(rejection.problem()))
    assert 400 <= problem["status"] < 500
    assert 0 < len(problem["detail"]) < 1000
    assert problem.get("pointer", "") == "" or problem["pointer"][0] == "/"
    assert "pointer" in problem or problem["status"] == 400 or not is_body
    return None


def assert_decodes_or_refuses(decode: Callable[[bytes], Any], body: bytes) -> None:
    """Checks that the decoder reads or rejects the body, in memory proportional to its size."""
    message = result_or_refusal(
        lambda: assert_allocates_below(AT_LEAST + PER_BYTE * len(body), lambda: decode(body)),
        is_body=True,
    )
    if message is None:
        return
    for raw in (*message.tensors.values(), *message.layer.values()):
        assert raw.numpy().shape == raw.shape
    json.dump(message.fields)


def decompress(packed: bytes, limit: int = LIMIT) -> list[bytes]:
    """Returns the pieces of a compressed body that arrives in parts of 64 KiB."""

    async def receive() -> AsyncIterator[bytes]:
        for begin in range(0, len(packed), _PART):
            yield packed[begin : begin + _PART]

    return asyncio.run(compressed_body.decompress(receive(), limit, lambda _: None))
