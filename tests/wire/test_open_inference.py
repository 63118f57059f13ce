"""The codec of the Open Inference Protocol: the bytes of its specification, and rejection of
invalid bodies."""

from __future__ import annotations

import json as stdlib
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qkv.api.error_responses import error_response
from qkv.errors import InvalidContent, QkvError
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from qkv.wire.open_inference import DATATYPES, decode, encode, json_length
from support.invalid_inference import binary, entry, one
from support.json_values import NAMES, arrays, json_values, same_values
from support.known_requests import DTYPES, Array

GROUPS = ("inputs", "outputs")
FIELDS = st.dictionaries(NAMES.filter(lambda n: n not in GROUPS), json_values, max_size=3)


def raws(named: dict[str, Array]) -> dict[str, RawTensor]:
    return {name: RawTensor.from_numpy(a) for name, a in named.items()}


def same(raw: RawTensor, array: Array) -> bool:
    found = (raw.dtype, raw.shape, bytes(raw.data), raw.is_untyped)
    return found == (array.dtype.name, array.shape, array.tobytes(), False)


# golden bytes

GOLDEN_JSON = (
    b'{"id":"42","parameters":{"causal":true},"inputs":['
    b'{"name":"flat","datatype":"FP32","shape":[2,2],"data":[1,2.5,-3,"Infinity"]},'
    b'{"name":"half","shape":[2],"datatype":"FP16","parameters":{"binary_data_size":4}},'
    b'{"name":"nested","shape":[1,2],"datatype":"INT64","data":[[9007199254740993,-1]]},'
    b'{"name":"brain","shape":[3],"datatype":"BF16","parameters":{"binary_data_size":6}},'
    b'{"name":"yes","shape":[3],"datatype":"BOOL","data":[true,false,true]},'
    b'{"name":"long","shape":[1],"datatype":"INT64","parameters":{"binary_data_size":8}},'
    b'{"name":"no","shape":[2],"datatype":"BOOL","parameters":{"binary_data_size":2}},'
    b'{"name":"wide","shape":[],"datatype":"FP64","parameters":{"binary_data_size":8}},'
    b'{"name":"none","shape":[0,4],"datatype":"FP32","parameters":{"binary_data_size":0}},'
    b'{"name":"single","shape":[1,1],"datatype":"FP32","parameters":{"binary_data_size":4}}'
    b'],"outputs":[{"name":"output","parameters":{"binary_data":true}}]}'
)
GOLDEN_DATA = (
    b"\x00\x3c\x00\xc0"  # half: 1, -2
    b"\x80\x3f\xc0\x7f\x80\xff"  # brain: 1, NaN, -inf
    b"\xfe\xff\xff\xff\xff\xff\xff\xff"  # long: -2
    b"\x00\x01"  # no: false, true
    b"\x00\x00\x00\x00\x00\x00\xe0\x3f"  # wide: 0.5
    b"\x00\x00\x20\xc1"  # single: -10
)


def test_request_matches_the_specification() -> None:
    message = decode(GOLDEN_JSON + GOLDEN_DATA, "inputs", len(GOLDEN_JSON))
    assert message.fields == {
        "id": "42",
        "parameters": {"causal": True},
        "outputs": [{"name": "output", "parameters": {"binary_data": True}}],
    }
    expected = {
        "flat": np.array([[1, 2.5], [-3, np.inf]], "f4"),
        "half": np.array([1, -2], "f2"),
        "nested": np.array([[9007199254740993, -1]], "i8"),
        "brain": np.array([1, np.nan, -np.inf], DTYPES["bfloat16"]),
        "yes": np.array([True, False, True]),
        "long": np.array([-2], "i8"),
        "no": np.array([False, True]),
        "wide": np.array(0.5, "f8"),
        "none": np.zeros((0, 4), "f4"),
        "single": np.array([[-10]], "f4"),
    }
    assert list(message.tensors) == list(expected)  # in the order of the request
    assert all(same(message.tensors[n], a) for n, a in expected.items())


def test_response_matches_the_specification() -> None:
    tensors = {
        "output": np.array([[0.5, -2]], "f4"), "weights": np.array([[1, np.nan]], "f4"),
        "mask": np.array([True, False]), "half": np.array(1, "f2"),
        "count": np.array([-1], "i8"), "brain": np.array([1, 2], DTYPES["bfloat16"]),
        "wide": np.array([0.1], "f8"),
    }  # fmt: skip
    message = Message({"model_name": "softmax", "model_version": "1"}, raws(tensors))
    chunks, length = encode(message, "outputs", {"output", "half", "brain"})
    text = (
        b'{"model_name":"softmax","model_version":"1","outputs":['
        b'{"name":"output","datatype":"FP32","shape":[1,2],"parameters":{"binary_data_size":8}},'
        b'{"name":"weights","datatype":"FP32","shape":[1,2],"data":[1.0,"NaN"]},'
        b'{"name":"mask","datatype":"BOOL","shape":[2],"data":[true,false]},'
        b'{"name":"half","datatype":"FP16","shape":[],"parameters":{"binary_data_size":2}},'
        b'{"name":"count","datatype":"INT64","shape":[1],"data":[-1]},'
        b'{"name":"brain","datatype":"BF16","shape":[2],"parameters":{"binary_data_size":4}},'
        b'{"name":"wide","datatype":"FP64","shape":[1],"data":[0.1]}]}'
    )
    data = b"\x00\x00\x00\x3f\x00\x00\x00\xc0" + b"\x00\x3c" + b"\x80\x3f\x00\x40"
    assert b"".join(chunks) == text + data
    assert length == len(text)
    assert chunks[1] is message.tensors["output"].data  # a view, not a copy


def test_no_length_without_binary_tensors() -> None:
    chunks, length = encode(Message({}, raws({"a": np.zeros((0, 2), "f4")})), "outputs", ())
    text = b'{"outputs":[{"name":"a","datatype":"FP32","shape":[0,2],"data":[]}]}'
    assert (b"".join(chunks), length) == (text, None)


# round trips

CUTS = {
    "as it is": lambda a: a,
    "transposed": lambda a: a.T,
    "backwards": lambda a: a[::-1] if a.ndim else a,
    "every other": lambda a: a[..., ::2] if a.ndim else a,
}


@given(
    FIELDS,
    st.dictionaries(NAMES, st.tuples(arrays(), st.booleans()), max_size=5),
    st.sampled_from(list(CUTS)),
    st.sampled_from(GROUPS),
)
@example({}, {"ключ": (np.zeros((2, 0, 3), "f2"), False), "": (np.array(True), True)}, "transposed",
         "inputs")  # fmt: skip
@example({}, {n: (np.ones((2, 3), DTYPES[n]), False) for n in DATATYPES}, "transposed", "outputs")
@example({}, {n: (np.ones((2, 3), DTYPES[n]), True) for n in DATATYPES}, "every other", "outputs")
def test_messages_survive_a_round_trip(
    fields: dict[str, Any], named: dict[str, tuple[Array, bool]], cut: str, group: str
) -> None:
    tensors = {n: CUTS[cut](a) for n, (a, _) in named.items()}
    binary = {n for n, (_, as_bytes) in named.items() if as_bytes}
    chunks, length = encode(Message(fields, raws(tensors)), group, binary)
    assert (length is None) == (not binary)
    body = b"".join(chunks)
    back = decode(body, group, length)
    assert back.fields == fields
    assert list(back.tensors) == list(tensors)
    for name, array in tensors.items():
        raw = back.tensors[name]
        if name in binary:
            assert same(raw, array)
            whole = np.frombuffer(body, np.uint8)
            assert not array.size or np.shares_memory(whole, raw.numpy())
        else:
            assert (raw.dtype, raw.shape, raw.is_untyped) == (array.dtype.name, array.shape, False)
            assert same_values(raw.numpy(), array)


@given(arrays())
def test_data_may_be_nested(array: Array) -> None:
    """Nested as by numpy."""
    with np.errstate(invalid="ignore"):  # numpy warns when it converts a signalling NaN
        values = (array if array.dtype.kind in "bi" else array.astype("f8")).tolist()
    words = {np.inf: "Infinity", -np.inf: "-Infinity"}

    def spelled(value: Any) -> Any:
        if isinstance(value, list):
            return [spelled(v) for v in value]
        return "NaN" if value != value else words.get(value, value)

    raw = decode(one(DATATYPES[array.dtype.name], array.shape, spelled(values)), "inputs")
    assert raw.tensors["a"].shape == array.shape
    assert same_values(raw.tensors["a"].numpy(), array)


@pytest.mark.parametrize(
    ("datatype", "data"),
    [("BOOL", [0, 1]), ("FP16", [1, 2.0]), ("BF16", [1, 2.0]), ("FP64", [1, 2]),
     ("INT64", [1.0, 2]), ("INT64", [-(2**63), 2**63 - 1]), ("FP32", ["NaN", 1])],
)  # fmt: skip
def test_equal_numbers_are_accepted_in_any_notation(datatype: str, data: list[Any]) -> None:
    array = decode(one(datatype, [2], data), "inputs").tensors["a"].numpy()
    expected = [np.nan if v == "NaN" else v for v in data]
    assert same_values(array, np.array(expected).astype(array.dtype))


def test_list_among_numbers_is_rejected() -> None:
    """A buffer of a long list would have its number in place of it."""
    data: list[Any] = [float(i) for i in range(2000)]
    data[7] = [7.0]
    tensor = {"name": "query", "datatype": "FP32", "shape": [2000], "data": data}
    other = tensor | {"name": "key", "data": data[8:] + data[:7] + [7.0]}
    for entries in ([tensor], [other, tensor]):
        with pytest.raises(InvalidContent, match=r"query is invalid at \[7\]: got a list"):
            decode(stdlib.dumps({"inputs": entries}).encode(), "inputs")


@pytest.mark.parametrize("bare", ["NaN", "Infinity", "-Infinity"])
def test_nan_and_infinity_may_lack_quotes(bare: str) -> None:
    """Triton's client writes them so; words in strings do not change."""
    array = {"name": f"a{bare}", "datatype": "FP32", "shape": [4], "data": 0}
    text = stdlib.dumps({"id": bare, "inputs": [array]}).replace("0}", f"[{bare},1, {bare} , 2]}}")
    message = decode(text.encode(), "inputs")
    assert message.fields == {"id": bare}
    numbers = np.array([float(bare), 1, float(bare), 2], np.float32)
    assert same_values(message.tensors[f"a{bare}"].numpy(), numbers)


@pytest.mark.parametrize(("header", "length"), [(None, None), ("0", 0), ("0123", 123), ("7", 7)])
def test_length_header_is_parsed(header: str | None, length: int | None) -> None:
    assert json_length(header) == length


@pytest.mark.parametrize(
    "header", ["", "-1", "+1", "1.0", "1e3", "0x10", "1_000", " 1", "1, 1", "\u0663", "9" * 21]
)
def test_invalid_length_header_is_rejected(header: str) -> None:
    with pytest.raises(QkvError, match=r"Content-Length is .*integer") as got:
        json_length(header)
    assert 400 <= got.value.status < 500


# invalid messages


def test_error_detail_is_truncated() -> None:
    """Values of the request are truncated in the detail."""
    response = error_response(InvalidContent("a" * 10_000), "/v2")
    assert response.status_code == 400
    assert len(response.body) < 1000


def test_long_name_is_truncated_in_the_error() -> None:
    for bad in (entry(name="a" * 10_000, size=3), entry(name="a" * 10_000, size=None, data=["b"])):
        with pytest.raises(QkvError, match=r"a{60} (has|is)"):
            decode(*binary(bad)[:1], "inputs", binary(bad)[1])
