"""The JSON codec: round trips, and rejection of invalid bodies."""

from __future__ import annotations

import base64
import json as stdlib
import re
import string
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.errors import InvalidContent, MalformedRequest, PayloadTooLarge, QkvError
from qkv.tensors import RawTensor
from qkv.wire import json
from qkv.wire.casting import cast_untyped
from qkv.wire.message import Message
from support.json_values import NAMES, arrays, json_values, same_values
from support.known_requests import DTYPES, FLOATING, Array, as_array, as_json

GROUPS = ("inputs", "outputs", "tensors")


def there_and_back(message: Message, group: str = "inputs") -> Message:
    return json.decode(b"".join(json.encode(message, group)), group)


@given(arrays(), st.sampled_from(GROUPS))
def test_base64_keeps_every_bit(array: Array, group: str) -> None:
    raw = RawTensor.from_numpy(array)
    back = there_and_back(Message({}, {"a": raw}, encoding="base64"), group).tensors["a"]
    assert (back.dtype, back.shape, back.is_untyped) == (raw.dtype, raw.shape, False)
    assert bytes(back.data) == bytes(raw.data) == array.tobytes()


@given(arrays(), st.sampled_from(GROUPS))
def test_lists_keep_every_value(array: Array, group: str) -> None:
    raw = RawTensor.from_numpy(array)
    back = there_and_back(Message({}, {"a": raw}, encoding="lists"), group).tensors["a"]
    assert back.is_untyped
    if 0 in array.shape:  # empty axes leave no trace in lists
        assert back.shape == array.shape[: array.shape.index(0) + 1]
        return
    assert back.shape == array.shape
    if raw.dtype in FLOATING:
        back = cast_untyped(back, "a", FLOATING, raw.dtype, "/inputs/a")
    assert back.dtype == raw.dtype
    assert same_values(back.numpy(), array)


def test_value_that_is_no_tensor_is_named_without_an_index() -> None:
    with pytest.raises(InvalidContent) as caught:
        json.decode(b'{"inputs": {"x": null}}', "inputs")
    assert caught.value.detail.startswith(
        "x is invalid: got null, expected nested lists of numbers"
    )
    with pytest.raises(InvalidContent, match=r"x is invalid at \[1, 0\]: got null"):
        json.decode(b'{"inputs": {"x": [[1], [null]]}}', "inputs")


@pytest.mark.parametrize("encoding", ["lists", "base64"])
def test_check_of_a_conversion_survives_a_round_trip(encoding: str) -> None:
    raw = RawTensor.from_numpy(np.ones((1, 2), np.float32))
    message = Message({"from": "v1", "check": {}}, {"W": raw}, encoding=encoding)
    message.check.update(x=raw, y=raw)
    found = there_and_back(message, "tensors")
    assert {n: t.shape for n, t in found.check.items()} == {"x": (1, 2), "y": (1, 2)}
    assert found.fields["check"] == {}


def test_check_in_the_response_of_a_conversion_has_plain_values() -> None:
    body = b'{"check": {"elements": 16, "dtype": "float64"}}'
    found = json.decode(body, "tensors")
    assert (found.fields, found.check) == (
        {"check": {"elements": 16, "dtype": "float64"}}, {},
    )  # fmt: skip
    assert json.decode(b'{"check": {"x": [1]}}', "inputs").fields == {"check": {"x": [1]}}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("encoding", ["lists", "base64"])
def test_arrays_that_are_not_contiguous_are_encoded_in_row_order(dtype: str, encoding: str) -> None:
    whole = np.arange(4 * 6 * 5).reshape(4, 6, 5).astype(DTYPES[dtype])
    for view in (whole.T, whole[::2, ::-1], whole[:, 1:4, ::3], whole[..., 0].T, whole[2:2]):
        raw = RawTensor.from_numpy(view)
        back = there_and_back(Message({}, {"a": raw}, encoding=encoding)).tensors["a"]
        assert np.array_equal(back.numpy().astype(float).reshape(view.shape), view.astype(float))


@given(arrays())
def test_other_codecs_agree_on_both_encodings(array: Array) -> None:
    """Other codecs read ours, and ours reads theirs."""
    raw = {"a": RawTensor.from_numpy(array)}
    for encoding in ("lists", "base64"):
        document = stdlib.loads(
            b"".join(json.encode(Message({}, raw, encoding=encoding), "outputs")),
            parse_constant=pytest.fail,  # NaN and Infinity are not JSON
        )
        read = as_array(document["outputs"]["a"])
        if array.size and array.dtype != np.int64:  # not exact as floats
            with np.errstate(invalid="ignore"):  # numpy warns when it converts a signalling NaN
                assert same_values(read.astype(array.dtype), array)
        body = stdlib.dumps({"inputs": {"a": as_json(array, encoding)}}, allow_nan=False).encode()
        back = json.decode(body, "inputs").tensors["a"].numpy()
        assert same_values(back.reshape(array.shape), array) or not array.size


@given(
    st.dictionaries(NAMES.filter(lambda n: n not in (*GROUPS, "layer", "encoding")), json_values),
    st.dictionaries(NAMES, arrays(), max_size=3),
    st.dictionaries(NAMES, arrays("float32"), min_size=1, max_size=3),
    st.sampled_from(["lists", "base64"]),
)
def test_messages_survive_a_round_trip(
    fields: dict[str, Any], tensors: dict[str, Array], layer: dict[str, Array], encoding: str
) -> None:
    sent = Message(
        fields | {"layer": {"layout": "v2", "heads": 2}},
        {name: RawTensor.from_numpy(a) for name, a in tensors.items()},
        {name: RawTensor.from_numpy(a) for name, a in layer.items()},
        encoding,
    )
    back = there_and_back(sent)
    assert back.fields == sent.fields
    assert back.encoding == sent.encoding
    assert list(back.tensors) == list(tensors)
    assert list(back.layer) == list(layer)
    if encoding == "base64":
        for name, raw in {**sent.tensors}.items():
            assert bytes(back.tensors[name].data) == bytes(raw.data)


@pytest.mark.parametrize(
    ("document", "encoding"),
    [
        ('{"inputs": {"a": [1], "b": {"dtype": "bool", "shape": [0], "data": ""}}}', "lists"),
        ('{"inputs": {"b": {"dtype": "bool", "shape": [0], "data": ""}, "a": [1]}}', "base64"),
        ('{"inputs": {"a": [1]}, "encoding": "base64"}', "base64"),
        ('{"encoding": "lists", "inputs": {"a": [1]}}', "lists"),
        ('{"inputs": {}}', "lists"),
        ("{}", "lists"),
    ],
)
def test_default_encoding_is_that_of_the_first_tensor(document: str, encoding: str) -> None:
    assert json.decode(document.encode(), "inputs").encoding == encoding


@pytest.mark.parametrize(
    ("text", "dtype", "values"),
    [
        ("[1, 2]", "int64", [1, 2]),
        ("[1, 2.5]", "float64", [1, 2.5]),
        ("[2.5, 1]", "float64", [2.5, 1]),
        ("[true, false]", "bool", [True, False]),
        ('["NaN", "Infinity", "-Infinity", 1]', "float64", [np.nan, np.inf, -np.inf, 1]),
        ('[[1], ["-Infinity"]]', "float64", [[1], [-np.inf]]),
        ('"NaN"', "float64", np.nan),
        ("3", "int64", 3),
        ("false", "bool", False),
        ("[-0.0]", "float64", [-0.0]),
        ("[9223372036854775807]", "int64", [2**63 - 1]),
        ("[-9223372036854775808]", "int64", [-(2**63)]),
        ("[9223372036854775808]", "float64", [2.0**63]),
        ("[1, 18446744073709551615]", "float64", [1, 2.0**64]),
        ("[1, 18446744073709551616]", "float64", [1, 2.0**64]),
        ("[[-9223372036854775809 ],\n[ 1]]", "float64", [[-(2.0**63)], [1]]),
        ("[100000000000000000000,-100000000000000000000,0.5]", "float64", [1e20, -1e20, 0.5]),
        ("123456789012345678901234567890", "float64", 123456789012345678901234567890.0),
        ("[1e308, 5e-324]", "float64", [1e308, 5e-324]),
        ("[]", "float64", []),
        ("[[], []]", "float64", [[], []]),
        ("[[[[[[[[1]]]]]]]]", "int64", [[[[[[[[1]]]]]]]]),
    ],
)
@pytest.mark.parametrize("beside", ["", ', "note": "[[["'])
def test_every_notation_of_numbers_is_accepted(
    text: str, dtype: str, values: Any, beside: str
) -> None:
    body = f'{{"inputs": {{"a": {text}}}{beside}}}'.encode()
    raw = json.decode(body, "inputs").tensors["a"]
    assert raw.dtype == dtype
    assert raw.is_untyped
    assert same_values(raw.numpy(), np.array(values, DTYPES[dtype]))


def test_only_integers_beyond_64_bits_become_floats() -> None:
    wide = "123456789012345678901234567890"
    note = f'[1, {wide}, 2] \\" , {wide} , '
    body = (
        f'{{"inputs": {{"a": [{wide}, 1], "b": [1234567890123456789], "{wide}": [1]}}, '
        f'"note": "{note}", "{"9" * 18}": -9223372036854775808, "seed": 18446744073709551615}}'
    )
    read = json.decode(body.encode(), "inputs")
    assert read.tensors["b"].numpy().tolist() == [1234567890123456789]
    assert read.tensors["a"].numpy().tolist() == [float(wide), 1.0]
    assert list(read.tensors) == ["a", "b", wide]
    expected = {"note": stdlib.loads(f'"{note}"'), "9" * 18: -(2**63), "seed": 2**64 - 1}
    assert read.fields == expected


def test_search_for_wide_integers_is_bounded() -> None:
    text = b'{"inputs": {"a": [' + b'"NaN", ' * (1 << 20) + b"18446744073709551616]}}"
    with pytest.raises(MalformedRequest, match="number"):
        json.decode(text, "inputs")


def test_long_lists_are_parsed_completely() -> None:
    array = np.random.default_rng(0).normal(size=(40, 50, 7))
    body = stdlib.dumps({"inputs": {"a": array.tolist()}}).encode()
    assert np.array_equal(json.decode(body, "inputs").tensors["a"].numpy(), array)


def base64_tensor(dtype: Any = "float32", shape: Any = (2,), data: Any = "AAAAAAAAAAA=") -> str:
    return stdlib.dumps({"dtype": dtype, "shape": shape, "data": data})


NOT_TENSORS = [
    # text, part of the detail, end of the pointer (...: shape or data)
    ("[1, [2], 3]", "at [1]: got a list", ""),
    ("[[1], 2]", "ragged: got lists and single values on axis 1", ""),
    ("[[1], [2, 3]]", "ragged: got lists of 1 and 2 elements on axis 1", ""),
    ("[[1, 2], [3]]", "ragged: got lists of 1 and 2 elements on axis 1", ""),
    ("[[], [1]]", "ragged: got lists of 0 and 1 elements on axis 1", ""),
    ("[[[]], 1]", "ragged", ""),
    ("[[[1]], [[1, 2]]]", "ragged: got lists of 1 and 2 elements on axis 2", ""),
    ("[[1, []], [2, [3, 4]]]", "at [0, 1]: got a list", ""),
    ("[1, []]", "at [1]: got a list", ""),
    ("[1.5, [[]]]", "at [1]: got a list", ""),
    ("[true, []]", "at [0]: got true", ""),
    ("null", "null", ""),
    ("[null]", "at [0]: got null", ""),
    ("[[1, 2], [3, null]]", "at [1, 1]: got null", ""),
    ("[1, true]", "at [1]: got true", ""),
    ("[0.0, false]", "at [1]: got false", ""),
    ("[[1, 0], [0, true]]", "at [1, 1]: got true", ""),
    ("[true, 1]", "at [0]: got true", ""),
    ('["one"]', 'at [0]: got "one"', ""),
    ('["nan"]', 'at [0]: got "nan"', ""),
    ('["NaN", true]', "at [1]: got true", ""),
    ('"text"', '"text"', ""),
    ("[{}]", "at [0]: got an object", ""),
    ('[1, {"a": [1]}]', "at [1]: got an object", ""),
    ("[[[[[[[[[1]]]]]]]]]", "more than 8 axes", ""),
    ("{}", "got none", ""),
    ('{"dtype": "float32", "shape": [2]}', "got dtype, shape, expected", ""),
    (base64_tensor()[:-1] + ', "order": "C"}', "got dtype, shape, data, order, expected", ""),
    (base64_tensor("float31"), '"float31"', "/dtype"),
    (base64_tensor("FLOAT32"), '"FLOAT32"', "/dtype"),
    (base64_tensor(None), "dtype: got null", "/dtype"),
    (base64_tensor(["float32"]), '["float32"]', "/dtype"),
    (base64_tensor({}), "{}", "/dtype"),
    (base64_tensor(shape=2), "shape: got 2", "/shape"),
    (base64_tensor(shape=None), "shape: got null", "/shape"),
    (base64_tensor(shape=[-1]), "[-1]", "/shape"),
    (base64_tensor(shape=[2, -1]), "[2, -1]", "/shape"),
    (base64_tensor(shape=[True]), "[true]", "/shape"),
    (base64_tensor(shape=[2.0]), "[2.0]", "/shape"),
    (base64_tensor(shape=["2"]), '["2"]', "/shape"),
    (base64_tensor(shape=[[2]]), "[[2]]", "/shape"),
    (base64_tensor(shape=[1] * 9), "at most 8", "/shape"),
    (base64_tensor(shape=[2**63]), str(2**63), "/shape"),
    (base64_tensor(shape=[2**60]), f"expected {4 * -(-(2**62) // 3)} for float32", "/data"),
    (base64_tensor(shape=[2**62] * 3), str(2**62), "..."),
    (base64_tensor(shape=[2**62] * 8), str(2**62), "..."),
    (base64_tensor(shape=[2**62, 4, 0], data=""), str(2**62), "..."),
    (base64_tensor(shape=[0] * 4 + [2**62] * 4, data=""), str(2**62), "..."),
    (base64_tensor(shape=[0]), "got 12 characters", "/data"),
    (base64_tensor(shape=[3]), "got 12 characters", "/data"),
    (base64_tensor(shape=[1]), "got 12 characters", "/data"),
    (base64_tensor(data=None), "data: got null", "/data"),
    (base64_tensor(data=[0, 0]), "data: got [0,", "/data"),
    (base64_tensor(data=""), "got 0 characters", "/data"),
    (base64_tensor(data="AAAAAAAAAA=="), "got 7 bytes", "/data"),
    (base64_tensor(data="AAAAAAAAAAAA"), "got 9 bytes", "/data"),
    (base64_tensor(data="AAAAAAAAAAA"), "got 11 characters", "/data"),
    (base64_tensor(data="AAAAAAAA*AA="), "not base64", "/data"),
    (base64_tensor(data="AAAAAAAA_-A="), "not base64", "/data"),
    (base64_tensor(data="AAAA AAAAAA="), "not base64", "/data"),
    (base64_tensor(data="AAAAAAAAAA\n="), "not base64", "/data"),
    (base64_tensor(data="============"), "not base64", "/data"),
    (base64_tensor(data="AAAA=AAAAAAA"), "", "/data"),
    (base64_tensor(data="AAAAAAAAAAÄ="), "not base64", "/data"),
    (base64_tensor("bool", [3], "AAEC"), "bytes other than 0 and 1", "/data"),
    (base64_tensor("bool", [1], "/w=="), "bytes other than 0 and 1", "/data"),
    ('{"dtype": "float32", "dtype": "float32", "shape": [0], "data": ""}', "repeated", "/dtype"),
]


@pytest.mark.parametrize(
    ("text", "detail", "where", "group"),
    [(*row, "inputs") for row in NOT_TENSORS]
    # a list, bytes and a repeated name: the code of each names the group
    + [(*row, g) for row in (NOT_TENSORS[0], *NOT_TENSORS[-2:]) for g in ("tensors", "layer")],
)
def test_invalid_tensor_is_rejected(text: str, detail: str, where: str, group: str) -> None:
    body = f'{{"{group}": {{"a~/b": {text}}}}}'
    pointer = f"/{group}/a~0~1b"
    if group == "layer":
        body = f'{{"layer": {{"tensors": {{"a~/b": {text}}}}}}}'
        pointer = "/layer/tensors/a~0~1b"
    with pytest.raises(InvalidContent) as caught:
        json.decode(body.encode(), "inputs" if group == "layer" else group)
    assert detail in caught.value.detail
    ends = ("/shape", "/data") if where == "..." else (where,)
    assert caught.value.pointer in [pointer + end for end in ends]
    assert len(caught.value.detail) < 1000


NOT_MESSAGES = [
    # body, class, part of the detail, pointer
    (b"", MalformedRequest, "empty", None),
    (b" \n", MalformedRequest, "empty", None),
    (b"{", MalformedRequest, "not JSON", None),
    (b'{"inputs": {"a": [1, 2', MalformedRequest, "not JSON", None),
    (b'{"inputs": {"a": [1, 2]}', MalformedRequest, "not JSON", None),
    (b'{"inputs": {"a": [1, 2]}}}', MalformedRequest, "not JSON", None),
    (b'{"inputs": {}} {"inputs": {}}', MalformedRequest, "not JSON", None),
    (b'{"inputs": {"a": [1,, 2]}}', MalformedRequest, "not JSON", None),
    (
        b'{"inputs":\n {"a": [1, 2],}}',
        MalformedRequest,
        "trailing comma is not allowed: line 2",
        None,
    ),
    (b"{'inputs': {}}", MalformedRequest, "not JSON", None),
    (b'{"a": NaN}', MalformedRequest, "not JSON", None),
    (b'{"a": Infinity}', MalformedRequest, "not JSON", None),
    (b'{"a": 01}', MalformedRequest, "leading zero is not allowed: line 1 column 7", None),
    (b'{"a": +1}', MalformedRequest, "not JSON", None),
    (b'{"a": 1.}', MalformedRequest, "not JSON", None),
    (b'{"inputs": {"a": [1e400]}}', MalformedRequest, "too large: got 1e400, expected", None),
    (b'{"a": "1e400", "b": -12.5E+0400}', MalformedRequest, "large: got -12.5E+0400, expe", None),
    (b'{"a": "\\"", "b": 9' + b"0" * 300 + b".5e8}", MalformedRequest, "too large: got 900", None),
    (b'{"inputs": {"a": [' + b"9" * 5000 + b"]}}", MalformedRequest, "number is too large", None),
    (b'{"inputs": {"a": [' + b"1.5," * 2000 + b"-1e999]}}", MalformedRequest, "got -1e999", None),
    (b'{"a": "1e400", "b": 01}', MalformedRequest, "leading zero is not allowed", None),
    (b'{"inputs": {"a": [0' + b"9" * 20 + b"]}}", MalformedRequest, "number", None),
    (b'{"inputs": {"a": [' + b"9" * 20 + b' "]}}', MalformedRequest, "not JSON", None),
    (b'{"a": "\xff"}', MalformedRequest, "UTF-8", None),
    (b'{"\xc3": 1}', MalformedRequest, "UTF-8", None),
    (b'{"a": "\\ud800"}', MalformedRequest, "string", None),
    (b'{"a": "\n"}', MalformedRequest, "not JSON", None),
    (b"\x00", MalformedRequest, "not JSON", None),
    (b"{}\x00", MalformedRequest, "not JSON", None),
    ('{"a": 1}'.encode("utf-16"), MalformedRequest, "not", None),
    (b"\x93NUMPY", MalformedRequest, "not", None),
    (b"[]", MalformedRequest, "object", None),
    (b"1", MalformedRequest, "object", None),
    (b"null", MalformedRequest, "object", None),
    (b'"inputs"', MalformedRequest, "object", None),
    (b'{"inputs": ' + b"[" * 5000 + b"]" * 5000 + b"}", MalformedRequest, "depth", None),
    (b'{"inputs": {"a": ' + b"[" * 900 + b"]" * 900 + b"}}", InvalidContent, "axes", "/inputs/a"),
    (
        b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}",
        MalformedRequest,
        "deeper than 32",
        "/a" + "/0" * 32,
    ),
    (b"[" * 1000, MalformedRequest, "improper structure", None),
    (b'\xef\xbb\xbf{"a": 01}', MalformedRequest, "leading zero", None),
    (b'{"b": ' * 40 + b"1" + b"}" * 40, MalformedRequest, "deeper than 32", "/b" * 33),
    (b'{"inputs": []}', InvalidContent, "got a list", "/inputs"),
    (b'{"inputs": null}', InvalidContent, "got null", "/inputs"),
    (b'{"layer": {"tensors": 1}}', InvalidContent, "must be an object", "/layer/tensors"),
    (b'{"encoding": "yaml"}', InvalidContent, '"yaml"', "/encoding"),
    (b'{"encoding": ["lists"]}', InvalidContent, '["lists"]', "/encoding"),
    (b'{"encoding": 1}', InvalidContent, "1", "/encoding"),
    (b'{"a": 1, "a": 1}', InvalidContent, "'a' is repeated", "/a"),
    (b'{"a": 1, "\\u0061": 1}', InvalidContent, "'a' is repeated", "/a"),
    (b'{"inputs": {}, "inputs": {}}', InvalidContent, "repeated", "/inputs"),
    (b'{"inputs": {"a": [1], "a": [1]}}', InvalidContent, "repeated", "/inputs/a"),
    (b'{"layer": {"heads": 1, "heads": 1}}', InvalidContent, "repeated", "/layer/heads"),
    (b'{"layer": {"tensors": {"a": 1, "a": 1}}}', InvalidContent, "repeated", "/layer/tensors/a"),
    (b'{"a": {"b": [{"c": 1, "c": 2}]}}', InvalidContent, "repeated", "/a/b/0/c"),
    (b'{"a\\u0000b": 1}', InvalidContent, "not a valid name", "/a\0b"),
    (b'{"a": 1, "a\\u0000b": 2}', InvalidContent, "not a valid name", "/a\0b"),
    (b'{"\\u0000": 2}', InvalidContent, "not a valid name", "/\0"),
]


@pytest.mark.parametrize(("body", "kind", "detail", "pointer"), NOT_MESSAGES)
def test_invalid_message_is_rejected(
    body: bytes, kind: type[QkvError], detail: str, pointer: str | None
) -> None:
    with pytest.raises(kind) as caught:
        json.decode(body, "inputs")
    assert detail.lower() in caught.value.detail.lower()
    assert caught.value.pointer == pointer
    assert not re.search("[A-Z0-9]+_[A-Z]+", caught.value.detail)  # an error name of the parser


def test_long_invalid_body_is_parsed_once() -> None:
    with pytest.raises(
        MalformedRequest, match=r"^the body is not JSON: The JSON document"
    ) as caught:
        json.decode(b'{"a": "%b",}' % bytes(1 << 20).replace(b"\0", b"a"), "inputs")
    assert caught.value.detail.endswith("etc.")


@pytest.mark.parametrize("where", ['{"%s"}', '{"inputs": {"%s"}}', '{"parameters": {"a": {"%s"}}}'])
def test_too_many_names_are_rejected(where: str) -> None:
    names = '": 1, "'.join(map(str, range(100_000))) + '": 1, "last": "'
    with pytest.raises(InvalidContent, match="more than 256 names"):
        json.decode((where % names).encode(), "inputs")


@pytest.mark.parametrize(
    "text",
    [
        "[" + "[1], " * 2**20 + "[1]]",
        "[" + "true, " * 2**20 + "true]",
        "[" + "1, " * 2**20 + '"NaN"]',
    ],
    ids=["lists", "booleans", "words"],
)
def test_too_many_python_objects_are_rejected(text: str) -> None:
    with pytest.raises(PayloadTooLarge, match="send it as base64") as caught:
        json.decode(f'{{"inputs": {{"a": {text}}}}}'.encode(), "inputs")
    assert caught.value.pointer == "/inputs/a"


def test_byte_order_mark_is_ignored() -> None:
    """RFC 8259, section 8.1, permits it."""
    assert json.decode(b'\xef\xbb\xbf{"inputs": {"a": 1}}', "inputs").tensors["a"].shape == ()


@given(st.text(string.ascii_letters + string.digits + "+/=", max_size=16), st.integers(0, 4))
def test_only_exact_base64_is_accepted(text: str, size: int) -> None:
    body = f'{{"inputs": {{"a": {base64_tensor("float16", [size], text)}}}}}'.encode()
    try:
        exact = base64.b64decode(text, validate=True)
    except ValueError:
        exact = None
    fits = exact is not None and len(exact) == 2 * size
    try:
        raw = json.decode(body, "inputs").tensors["a"]
    except InvalidContent:
        assert not fits or len(text) != 4 * -(-2 * size // 3)
    else:
        assert fits
        assert bytes(raw.data) == exact
