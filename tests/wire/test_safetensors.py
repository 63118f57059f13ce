"""The safetensors codec: the files of the reference library, and rejection of invalid ones."""

from __future__ import annotations

import json as stdlib
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import example, given
from hypothesis import strategies as st

from qkv.errors import MalformedRequest, QkvError
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from qkv.wire.safetensors import aligned_offset, decode, encode
from support.decoder_fuzz import assert_allocates_below, result_or_refusal
from support.json_values import NAMES, arrays, json_values
from support.known_requests import DTYPES, Array
from support.safetensors_files import INVALID, STRICTER, file, nested, of_tensors
from support.safetensors_files import tensor as entry

CODES = {"float64": "F64", "float32": "F32", "float16": "F16"} | {
    "bfloat16": "BF16", "int64": "I64", "bool": "BOOL",
}  # fmt: skip
TENSOR_NAMES = NAMES.filter(lambda n: not n.startswith("layer.") and n != "__metadata__")
FIELDS = st.dictionaries(NAMES.filter(lambda n: n not in ("inputs", "encoding")), json_values)


def file_of(message: Message, group: str = "inputs") -> bytes:
    return b"".join(encode(message, group))


def raws(named: dict[str, Array]) -> dict[str, RawTensor]:
    return {name: RawTensor.from_numpy(a) for name, a in named.items()}


def same(raw: RawTensor, array: Array) -> bool:
    found = (raw.dtype, raw.shape, bytes(raw.data), raw.is_untyped)
    return found == (array.dtype.name, array.shape, array.tobytes(), False)


# round trips


@given(
    FIELDS,
    st.dictionaries(TENSOR_NAMES, arrays(), max_size=4),
    st.dictionaries(NAMES, arrays(), max_size=3),
    st.sampled_from([None, "lists", "base64"]),
)
@example({}, {"ключ/~\U0001f511": np.zeros((2, 0, 3), "f2")}, {"": np.array(True)}, None)
def test_messages_survive_a_round_trip(
    fields: dict[str, Any],
    tensors: dict[str, Array],
    layer: dict[str, Array],
    encoding: str | None,
) -> None:
    encoding_field = {} if encoding is None else {"encoding": encoding}
    fields = fields | ({"layer": {"layout": "v2"}} if layer else {})
    body = file_of(Message(fields | encoding_field, raws(tensors), raws(layer)))
    assert aligned_offset(body[:8]) % 64 == 0
    back = decode(body, "inputs")
    assert (back.fields, back.encoding) == (fields, encoding)
    assert back.tensors.keys() == tensors.keys()
    assert back.layer.keys() == layer.keys()
    assert all(same(back.tensors[n], a) for n, a in tensors.items())
    assert all(same(back.layer[n], a) for n, a in layer.items())


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_that_are_not_contiguous_are_encoded_in_row_order(dtype: str) -> None:
    whole = np.arange(4 * 6 * 5).reshape(4, 6, 5).astype(DTYPES[dtype])
    views = [whole.T, whole[::2, ::-1], whole[:, 1:4, ::3], whole[..., 0].T, whole[2:2], whole[0]]
    views += [whole[1, 2, 3:4].reshape(()), np.broadcast_to(whole[:1], (3, 6, 5))]
    if dtype not in ("bool", "bfloat16"):
        views.append(whole.astype(whole.dtype.newbyteorder(">")))
    body = file_of(Message({}, raws({str(i): v for i, v in enumerate(views)})))
    for i, view in enumerate(views):
        assert same(decode(body, "inputs").tensors[str(i)], view.astype(DTYPES[dtype]))


@pytest.mark.slow
@given(st.dictionaries(TENSOR_NAMES, arrays(), max_size=4), FIELDS)
def test_reference_library_reads_our_files(
    tensors: dict[str, Array], fields: dict[str, Any]
) -> None:
    body = file_of(Message(fields, raws(tensors)))
    read = dict(safetensors.deserialize(body))  # type: ignore[no-untyped-call]
    assert read.keys() == tensors.keys()
    for name, array in tensors.items():
        theirs = read[name]
        assert (theirs["dtype"], theirs["shape"]) == (CODES[array.dtype.name], list(array.shape))
        assert bytes(theirs["data"]) == array.tobytes()
    plain = {n: a for n, a in tensors.items() if a.dtype != DTYPES["bfloat16"]}
    loaded = safetensors.numpy.load(file_of(Message(fields, raws(plain))))
    for name, array in plain.items():
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
        assert loaded[name].tobytes() == array.tobytes()


@given(st.dictionaries(TENSOR_NAMES, arrays(), max_size=4), FIELDS)
def test_files_of_the_reference_library_are_read(
    tensors: dict[str, Array], fields: dict[str, Any]
) -> None:
    plain = {n: np.ascontiguousarray(a) for n, a in tensors.items() if a.dtype.name != "bfloat16"}
    plain = {n: a.reshape(tensors[n].shape) for n, a in plain.items()}
    body = safetensors.numpy.save(plain, {"qkv": stdlib.dumps(fields), "format": "pt"})
    back = decode(body, "inputs")
    assert back.fields == fields
    assert back.tensors.keys() == plain.keys()
    assert all(same(back.tensors[n], a) for n, a in plain.items())


@given(arrays("bfloat16"))
def test_bfloat16_of_the_reference_library_is_read(array: Array) -> None:
    """Its numpy interface has no bfloat16: a file of float16 gets the other code."""
    halves = np.frombuffer(array.tobytes(), np.float16).reshape(array.shape)
    body = safetensors.numpy.save({"a": halves})
    length = int.from_bytes(body[:8], "little")
    text = body[8 : 8 + length].replace(b'"F16"', b'"BF16"')
    tensor = decode(file(text, body[8 + length :]), "inputs").tensors["a"]
    assert same(tensor, array)


@given(st.dictionaries(TENSOR_NAMES, arrays(), min_size=1, max_size=4), st.booleans())
def test_tensors_are_views_of_the_body(tensors: dict[str, Array], aligned: bool) -> None:
    written = file_of(Message({}, raws(tensors)))
    body: bytes | memoryview = written
    if aligned:
        memory = np.empty(len(written) + 64, np.uint8)
        first = -(memory.ctypes.data + aligned_offset(written[:8])) % 64
        body = memory.data[first : first + len(written)]
        body[:] = written
    whole = np.frombuffer(body, np.uint8)
    read = [raw.numpy() for raw in decode(body, "inputs").tensors.values()]
    assert all(np.shares_memory(whole, a) for a in read if a.size)
    if aligned and read[0].size:
        assert read[0].ctypes.data % 64 == 0


def test_tensors_of_a_conversion_may_be_named_like_those_of_a_layer_and_have_a_check() -> None:
    """Checkpoints of BERT have names that begin with `layer.`."""
    array = np.ones((1, 2), np.float32)
    names = ("layer.0.query.weight", "check.z")
    message = Message({"from": "v1"}, raws(dict.fromkeys(names, array)))
    message.check.update(raws({"x": array, "y": array}))
    found = decode(file_of(message, "tensors"), "tensors")
    assert (sorted(found.tensors), found.layer, sorted(found.check)) == (
        sorted(names), {}, ["x", "y"],
    )  # fmt: skip
    assert found.fields == {"from": "v1", "check": {}}
    assert sorted(decode(file_of(message, "inputs"), "inputs").layer) == ["0.query.weight"]


def test_header_of_a_long_list_says_what_to_send_instead() -> None:
    """A list of numbers in a field is text in the header; a tensor is bytes behind it."""
    fields = {"parameters": {"bias": [0.123456789] * 100_000}}
    body = b"".join(encode(Message(fields, {}), "inputs"))
    with pytest.raises(MalformedRequest) as caught:
        decode(body, "inputs")
    assert caught.value.detail.startswith("the header is too long: got 12")
    assert "expected at most 1048576. Send numbers as tensors" in caught.value.detail
    with pytest.raises(MalformedRequest, match="wrong length: got more bytes than the 8 that"):
        decode((9).to_bytes(8, "little") + bytes(8), "inputs")


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, None])
def test_other_files_have_no_fields(metadata: dict[str, str] | None) -> None:
    header = {"a": entry()} | ({} if metadata is None else {"__metadata__": metadata})
    assert decode(file(header, bytes(4)), "inputs").fields == {}


# invalid files


def many(count: int, twice: bool = False) -> bytes:
    names = [*range(count), *([count - 1] if twice else [])]
    return b"{" + ",".join(f'"{n}":0' for n in names).encode() + b"}"


def qkv(text: Any) -> bytes:
    return file({"__metadata__": {"qkv": text}})


CRAFTED = INVALID | STRICTER | {
    "length past the limit": file(b"{}" + b" " * (1 << 20)),
    "100,000 names": file(many(100_000)),
    "257 names": file(many(257)),
    "BOOL of 2": file({"a": entry("BOOL", [3], [0, 3])}, b"\0\1\2"),
    "BOOL of 255": file({"a": entry("BOOL", [1], [0, 1])}, b"\xff"),
    "qkv not JSON": qkv("{"),
    "qkv empty": qkv(""),
    "qkv a list": qkv("[]"),
    "qkv null": qkv("null"),
    "qkv not text": qkv({"parameters": {}}),
    "qkv a number": qkv(1),
    "qkv None": qkv(None),
    "qkv with NaN": qkv('{"parameters": {"scale": NaN}}'),
    "qkv with -Infinity": qkv('{"parameters": {"scale": -Infinity}}'),
    "qkv with 1e400": qkv('{"parameters": {"scale": 1e400}}'),
    "qkv with a name twice": qkv('{"outputs": [], "outputs": []}'),
    "qkv nested": qkv('{"a": ' + nested(100_000).decode() + "}"),
    "qkv nested 33": qkv('{"a": ' + nested(34).decode() + "}"),
    "qkv with -1e400 in a list": qkv('{"parameters": {"window": [-1e400, 1]}}'),
    "qkv with an integer of 401 digits": qkv(f'{{"parameters": {{"scale": {10**400}}}}}'),
    "qkv with a name of half a character": qkv('{"\\ud800": 1}'),
    "qkv with half a character": qkv('{"outputs": ["\\ud800"]}'),
    "qkv with a null character in a name": qkv('{"parameters": {"a\\u0000b": 1}}'),
    "qkv with another encoding": qkv('{"encoding": "yaml"}'),
} | {
    f"dtype {code}": of_tensors(a=entry(code, [8], [0, 8])) for code in ("F8_E5M2", "U8", "I8")
}  # fmt: skip


def tried(body: bytes) -> Message | None:
    return result_or_refusal(lambda: decode(body, "inputs"), is_body=True)


@pytest.mark.parametrize("body", CRAFTED.values(), ids=CRAFTED)
def test_invalid_file_is_rejected_before_any_allocation(body: bytes) -> None:
    # Python objects of JSON are dozens of times as large as the text, which is at most 1 MiB
    most = (1 << 18) + 48 * min(len(body), 1 << 20)
    assert assert_allocates_below(most, lambda: tried(body)) is None


@pytest.mark.parametrize("name", ["\ud800", "a/b~c", "\0", "x" * 10_000, "NaN"])
def test_error_may_contain_any_name(name: str) -> None:
    for bad in (entry("U8"), entry(shape=[-1]), entry(shape=[3]), entry(offsets=[4, 8]), 1):
        tried(file({name: bad}, bytes(4)))
    tried(file({name: entry("BOOL", [4])}, b"\2" * 4))
    tried(file({name: entry()}, bytes(4)))
    tried(file({"__metadata__": {"qkv": stdlib.dumps({name: 1})}}))
    tried(file({"__metadata__": {"qkv": stdlib.dumps({"encoding": name})}}))


def test_name_in_a_pointer_is_escaped() -> None:
    with pytest.raises(QkvError) as caught:
        decode(file({"a/b~c": entry("U8")}, bytes(4)), "inputs")
    assert caught.value.pointer is not None
    assert caught.value.pointer.endswith("/a~1b~0c")


@pytest.mark.timeout(30)  # ends a comparison of all names with all others; this takes 0.1 s
def test_repeated_name_is_found_in_linear_time() -> None:
    with pytest.raises(QkvError, match="is repeated"):
        decode(file(many(100_000, twice=True)), "inputs")
