"""Whatever bytes come, every decoder reads or refuses them, and allocates by what came, never by
what is claimed."""

from __future__ import annotations

import gzip
import io
import json as stdlib
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qkv.api.request_body import _placed, _unpacked
from qkv.cli import tensor_files as files
from qkv.errors import QkvError
from qkv.tensors import RawTensor
from qkv.wire import json, safetensors
from qkv.wire import open_inference as v2
from qkv.wire.message import Message
from support.known_requests import DTYPES, Array

_T = TypeVar("_T")

KiB, MiB = 1 << 10, 1 << 20
LIMIT: Final = 1 << 16  # of what is unpacked, here
# What Python makes of a JSON text is some dozens of times as large as it: an object, of 56 bytes
# and more, for every two characters.
PER_BYTE, AT_LEAST = 64, 256 * KiB
PIECE: Final = 3 * MiB  # unpacking goes by pieces of 1 MiB, which zlib joins from smaller ones

NAMED: Final[dict[str, Array]] = {
    "query": np.eye(2, dtype="f4"), "mask": np.array([[True, False]]), "key_lengths": np.array([2]),
    "half": np.array(1, "f2"), "brain": np.array([1, np.inf], DTYPES["bfloat16"]),
    "none": np.zeros((0, 2)), "wide": np.array([[[0.1]], [[1e300]]]),
}  # fmt: skip
FIELDS: Final = {"parameters": {"causal": True, "window": [1, None], "scale": 1e-3}, "outputs": []}
RAW: Final = {name: RawTensor.from_numpy(a) for name, a in NAMED.items()}
V2_CHUNKS, V2_LENGTH = v2.encode(Message({"id": "1"} | FIELDS, RAW), "inputs", {*list(RAW)[::2]})
assert V2_LENGTH is not None


def of_json(encoding: str) -> bytes:
    return b"".join(json.encode(Message(FIELDS, RAW, RAW, encoding), "inputs"))


def npz() -> bytes:
    room = io.BytesIO()
    np.savez(room, **{n: a for n, a in NAMED.items() if n != "brain"})  # type: ignore[arg-type]
    return room.getvalue()


VALID: Final[dict[str, bytes]] = {
    "lists": of_json("lists"),
    "base64": of_json("base64"),
    "safetensors": b"".join(safetensors.encode(Message(FIELDS, RAW, RAW), "inputs")),
    "v2": b"".join(V2_CHUNKS),
    "v2 in JSON": b"".join(v2.encode(Message(FIELDS, RAW), "inputs", ())[0]),
    "gzip": gzip.compress(of_json("lists"), mtime=0),
    "deflate": zlib.compress(of_json("lists")),
    "npz": npz(),
}
DECODERS: Final[dict[str, tuple[Callable[[bytes], Any], list[str]]]] = {
    "json": (lambda body: json.decode(body, "inputs"), ["lists", "base64"]),
    "safetensors": (lambda body: safetensors.decode(body, "inputs"), ["safetensors"]),
    "v2": (lambda body: v2.decode(body, "inputs", V2_LENGTH), ["v2"]),
    "v2 in JSON": (lambda body: v2.decode(body, "inputs"), ["v2 in JSON"]),
}
SNIPPETS: Final = [
    b"[", b"]", b"{", b"}", b'"', b",", b":", b"null", b"true", b"1e999", b"-", b"\\u0000", b"1e9",
    b"\\ud800", b"\xff", b"\x00", b"[]", b"{}", b"NaN", b"0", b"99999999999999999999", b'"NaN"',
    b'\\"', b'"a":1,', b"BOOL", b"I64", b"FP16", b"float64", b" ", b"[" * 40, b"-1", b"0.5",
    b"4611686018427387904", b"9223372036854775807", b"1073741824", b"====", b'"binary_data_size":8',
]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, names: list[str]) -> bytes:
    """A valid body with something flipped, cut, put in, spliced, or another number in it."""
    body = bytearray(VALID[draw(st.sampled_from(names))])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(body) - 1)))
        match draw(st.sampled_from(["flip", "cut", "end", "insert", "splice", "number", "length"])):
            case "flip" if body:
                body[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del body[at : at + draw(st.integers(1, 20))]
            case "end":
                del body[at:]
            case "insert":
                stop = at + draw(st.sampled_from([0, 0, 1, 4]))
                body[at:stop] = draw(st.sampled_from(SNIPPETS) | st.binary(max_size=4))
            case "splice":
                other = VALID[draw(st.sampled_from(list(VALID)))]
                first = draw(st.integers(0, len(other)))
                body[at : at + draw(st.integers(0, 50))] = other[first : first + 50]
            case "number":
                numbers = [i for i, byte in enumerate(body) if byte in b"0123456789"]
                if numbers:
                    i = draw(st.sampled_from(numbers))
                    body[i : i + 1] = str(draw(st.integers(-(2**65), 2**65))).encode()
            case "length":
                size = draw(st.sampled_from([2, 4, 8]))
                body[at : at + size] = draw(st.integers(0, 2 ** (8 * size) - 1)).to_bytes(
                    size, "little"
                )
    return bytes(body)


def within(most: int, work: Callable[[], _T]) -> _T:
    """Does it, and sees that never more than so many bytes were allocated.

    Who does this a million times traces all the while: each start and stop leaves some memory
    behind (CPython 3.11: 0.1 to 3 KB).
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


def done(work: Callable[[], _T]) -> _T | None:
    """Does it; None where it is refused, in a document that can be written, as the client's
    fault."""
    try:
        return work()
    except QkvError as error:
        refused = error
    problem = stdlib.loads(json.dump(refused.problem()))
    assert 400 <= problem["status"] < 500
    assert 0 < len(problem["detail"]) < 1000
    return None


def tried(decode: Callable[[bytes], Any], body: bytes) -> None:
    """Reads or refuses it, for memory in proportion to it."""
    message = done(lambda: within(AT_LEAST + PER_BYTE * len(body), lambda: decode(body)))
    if message is None:
        return
    for raw in (*message.tensors.values(), *message.layer.values()):
        assert raw.numpy().shape == raw.shape
    json.dump(message.fields)


@pytest.mark.parametrize("name", DECODERS)
def test_the_bodies_that_are_changed_here_are_read(name: str) -> None:
    decode, valid = DECODERS[name]
    for body in valid:
        assert decode(VALID[body]).tensors.keys() == NAMED.keys()


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=200)
@given(st.binary(max_size=300) | st.text('[]{},:"01.-etrufalsn').map(str.encode))
def test_any_bytes_are_read_or_refused(name: str, body: bytes) -> None:
    tried(DECODERS[name][0], body)


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=500)
@given(st.data())
def test_changed_bodies_are_read_or_refused(name: str, data: st.DataObject) -> None:
    decode, valid = DECODERS[name]
    tried(decode, data.draw(mutated(valid)))


@settings(max_examples=300)
@given(mutated(["v2", "v2 in JSON"]), st.none() | st.integers(0, 2**66) | st.integers(0, 1200))
def test_any_length_of_the_json_is_read_or_refused(body: bytes, length: int | None) -> None:
    tried(lambda body: v2.decode(body, "inputs", length), body)


@settings(max_examples=200)
@given(st.text(max_size=30) | st.integers().map(str))
def test_any_length_header_is_read_or_refused(header: str) -> None:
    length = done(lambda: v2.json_length(header))
    assert length is None or length == int(header)


@pytest.mark.parametrize("count", [10_000, 100_000])
@pytest.mark.parametrize("piece", ["[],", "{},", "0,", '"",', "1e1,", "true,", '"NaN",', "[[0]],"])
def test_many_small_things_cost_what_they_weigh(piece: str, count: int) -> None:
    inside = (piece * count)[:-1]
    entry = '"name":"a","datatype":"FP32","shape":[' + f"{count}],"
    tried(DECODERS["json"][0], f'{{"inputs":{{"a":[{inside}]}}}}'.encode())
    tried(DECODERS["json"][0], f'{{"parameters":[{inside}]}}'.encode())
    for key in ("data", "parameters", "name", "shape"):
        body = f'{{"inputs":[{{{entry if key == "data" else ""}"{key}":[{inside}]}}]}}'
        tried(DECODERS["v2 in JSON"][0], body.encode())


@pytest.mark.parametrize("name", ["json", "v2 in JSON"])
@pytest.mark.parametrize("inside", [b'{"a":' * 30 + b"0" + b"}" * 30, b"[" + b"0," * 9000 + b"0]"])
def test_a_long_name_is_not_repeated_for_all_below_it(name: str, inside: bytes) -> None:
    """It would stand in the pointer to each of them."""
    body = b'{"' + b"n" * MiB + b'":' + inside + b"}"
    with pytest.raises(QkvError, match="1048576 characters; at most 1024"):
        within(AT_LEAST + 2 * len(body), lambda: DECODERS[name][0](body))


# what is packed


def unpack(packed: bytes, limit: int = LIMIT) -> bytes | memoryview:
    return _placed(_unpacked(packed, limit), lambda _: 0)


@settings(max_examples=300)
@given(st.binary(max_size=200) | mutated(["gzip", "deflate"]))
def test_packed_bodies_are_unpacked_or_refused(packed: bytes) -> None:
    whole = done(lambda: within(PIECE + LIMIT, lambda: unpack(packed)))
    assert whole is None or len(whole) <= LIMIT


@given(
    st.binary(max_size=100), st.integers(1, 100_000), st.booleans(), st.sampled_from([1, 3, 1024])
)
def test_what_was_packed_comes_back(part: bytes, times: int, form: bool, grain: int) -> None:
    whole = (part * times)[: 4 * MiB]
    packer = zlib.compressobj(6, wbits=zlib.MAX_WBITS | (16 if form else 0))
    packed = b"".join(packer.compress(whole[i::grain]) for i in range(grain)) + packer.flush()
    expected = b"".join(whole[i::grain] for i in range(grain))
    assert bytes(unpack(packed, len(whole))) == expected
    assert b"".join(_unpacked(packed, len(whole))) == expected


@pytest.mark.parametrize("size", [MiB - 1, MiB, MiB + 1, 5 * MiB])
def test_what_hardly_packs_comes_back(size: int) -> None:
    """The packed bytes, too, are then fed in several pieces."""
    whole = np.random.default_rng(size).bytes(size)
    packed = gzip.compress(whole, 1)
    assert bytes(unpack(packed, size)) == whole
    for bad, words in [
        (packed[:-1], "too early"),
        (packed + b"\0", "bytes follow"),
        (packed + bytes(2 * MiB), "bytes follow"),
        (packed[:-8] + b"\0\0\0\0" + packed[-4:], "cannot be unpacked"),
    ]:
        with pytest.raises(QkvError, match=words):
            unpack(bad, size)
    with pytest.raises(QkvError, match="unpacks to more than"):
        unpack(packed, size - 1)


@pytest.mark.parametrize("limit", [1, 10 * MiB])
@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_a_bomb_allocates_no_more_than_the_limit(
    pack: Callable[[bytes], bytes], limit: int
) -> None:
    packed = pack(bytes(64 * MiB))
    with pytest.raises(QkvError, match="unpacks to more than") as caught:
        within(limit + PIECE, lambda: _unpacked(packed, limit))
    assert caught.value.status == 413


# files


@pytest.mark.parametrize(
    ("suffix", "names"), [("json", ["lists"]), ("safetensors", ["safetensors"]), ("npz", ["npz"])]
)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_changed_files_are_read_or_refused(
    tmp_path: Path, suffix: str, names: list[str], data: st.DataObject
) -> None:
    path = tmp_path / f"file.{suffix}"
    path.write_bytes(data.draw(st.binary(max_size=100) | mutated(names)))
    message = done(lambda: files.read(path, "inputs"))
    for raw in message.tensors.values() if message else ():
        assert raw.numpy().shape == raw.shape
