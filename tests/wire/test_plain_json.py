"""Short JSON that is parsed at once equals JSON that `Document` visits, under the same limits."""

from __future__ import annotations

import json as stdlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final
from unittest.mock import patch

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qkv.errors import QkvError
from qkv.wire import json
from qkv.wire.json_document import Document
from qkv.wire.message import Message
from qkv.wire.plain_json import MAX_DEPTH, MAX_NAME_LENGTH, MAX_NAMES, load_object
from support.decoder_fuzz import DECODERS, SNIPPETS, VALID_BODIES
from support.examples import examples

USERS: Final = ("qkv.wire.json_document.load_object", "qkv.wire.safetensors_header.load_object")
"""The names by which the codecs call it."""
FIELDS: Final = b'{"parameters":{"causal":true,"window":[1,null]},"outputs":["output"],"id":"7"}'


def outcome(work: Callable[[], Any]) -> Any:
    """Returns all that a client could see: the result, or the error."""
    try:
        result = work()
    except QkvError as error:
        return type(error).__name__, error.detail, error.pointer
    if not isinstance(result, Message):
        return repr(result)  # unlike ==, tells 1 from 1.0 and True, and has the order of names
    groups = [
        {n: (t.dtype, t.shape, bytes(t.data), t.is_untyped) for n, t in group.items()}
        for group in (result.tensors, result.layer)
    ]
    return repr(result.fields), groups, result.encoding


def visited(work: Callable[[], Any]) -> Any:
    """Returns the outcome if no text is parsed at once."""
    with patch(USERS[0], lambda _: None), patch(USERS[1], lambda _: None):
        return outcome(work)


# ---------------------------------------------------------------- what it accepts and what not


@pytest.mark.parametrize(
    "text",
    [
        b"{}", b'{"":""}', FIELDS, b' {\n"a" : {"a": [{"a": 1}, {"a": 1}]}\t} ',
        b'{"a":{"b":1},"b":{"b":2},"c":[{"b":1},{"b":2}]}', b'{"a":":","b:c":"d:"}',
        b'{"a":"\\"\\\\\\/\\n"}', '{"é":"日本"}'.encode(),
        b'{"a":[-0,-0.0,1e5,1.5,9223372036854775807,-9223372036854775808,18446744073709551615]}',
    ],
)  # fmt: skip
def test_short_object_is_parsed_at_once(text: bytes) -> None:
    assert repr(load_object(text)) == repr(orjson.loads(text))
    assert outcome(lambda: json.decode_fields(text)) == visited(lambda: json.decode_fields(text))


def nested(inner: str, depth: int) -> str:
    """Returns objects and lists in turn around a value; `depth` of them."""
    for level in range(depth):
        inner = f'{{"n":{inner}}}' if level % 2 else f"[{inner}]"
    return inner


REPEATED: Final = {
    "at the top": '{"a":1,"a":2}',
    "of equal values": '{"a":1,"a":1}',
    "with another between": '{"a":1,"b":2,"a":3}',
    "with a colon in the name": '{"a:b":1,"a:b":2}',
    "with colons in the first value": '{"a":"::::","a":1}',
    "with colons in the second value": '{"a":1,"a":"::::"}',
    "with objects as values": '{"a":{"b":1,"c":2},"a":{"b":1}}',
    "one name escaped": '{"a":1,"\\u0061":2}',
    "a colon escaped": '{"a":"\\u003a","a":1}',
    "a colon escaped in the name": '{":":1,"\\u003a":2}',
    "a solidus escaped": '{"/":1,"\\/":2}',
    "a quote in the name": '{"\\"":1,"\\"":2}',
    "an escaped backslash": '{"\\\\":1,"\\\\":2}',
    "three times": '{"a":1,"a":2,"a":3}',
}


@pytest.mark.parametrize("text", REPEATED.values(), ids=REPEATED)
@pytest.mark.parametrize("depth", [0, 1, 2, 7, 20])
def test_repeated_name_is_found_at_any_level(text: str, depth: int) -> None:
    body = f'{{"first":1,"deep":{nested(text, depth)},"last":"x:y"}}'.encode()
    assert load_object(body) is None
    assert load_object(text.encode()) is None
    kind, detail, _ = outcome(lambda: json.decode_fields(body))
    assert kind == "InvalidContent"
    assert "repeated" in detail


@pytest.mark.parametrize(
    "text",
    [
        b"", b" ", b"[]", b"1", b"null", b'"a"', b"{", b"{}}", b"{}{}", b'{"a":1,}', b'{"a"}',
        b"{'a':1}", b'{"a":NaN}', b'{"a":Infinity}', b'{"a":1e400}', b'{"a":01}', b'{"a":.5}',
        b'{"a":"\n"}', b'{"a":"\xff"}', b'{"a":"\xed\xa0\x80"}', b'{"a":"\\ud800"}',
        b'{"a":"\\x41"}', b'\xef\xbb\xbf{"a":1}', b'{"a":1}\0', b'{"a\\u0000":1}', b'{"a\0":1}',
        b'{"a":"\\u00e9"}',
    ],
)  # fmt: skip
def test_anything_else_is_left_to_the_document(text: bytes) -> None:
    """Which accepts some of it, and has the error for the rest."""
    assert load_object(text) is None
    assert outcome(lambda: json.decode_fields(text)) == visited(lambda: json.decode_fields(text))


@pytest.mark.parametrize("depth", [MAX_DEPTH - 2, MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1, 100])
@pytest.mark.parametrize("padding", [0, 2 * MAX_NAME_LENGTH])
def test_depth_is_limited(depth: int, padding: int) -> None:
    """Also of a long text, and where the brackets are many but not within one another."""
    for beside in ("[]", "[[],[],[],[],[]]", nested("[]", 8)):
        text = f'{{"deep":{nested("1", depth)},"beside":{beside},"pad":"{"x" * padding}"}}'
        body = text.encode()
        is_too_deep = depth >= MAX_DEPTH + 1
        assert load_object(body) is None or not is_too_deep
        found = outcome(partial(json.decode_fields, body))
        assert found == visited(partial(json.decode_fields, body))
        assert (found[0] == "MalformedRequest") == is_too_deep


@pytest.mark.parametrize("length", [MAX_NAME_LENGTH, MAX_NAME_LENGTH + 1])
@pytest.mark.parametrize("letter", ["a", "é", "😀", "\\n"])
@pytest.mark.parametrize("depth", [0, 3])
def test_length_of_a_name_is_limited(length: int, letter: str, depth: int) -> None:
    """In characters, as the document counts them."""
    inner = f'{{"{letter * length}":1}}'
    body = f'{{"deep":{nested(inner, depth)}}}'.encode()
    is_too_long = length > MAX_NAME_LENGTH
    assert (load_object(body) is None) == is_too_long
    found = outcome(lambda: json.decode_fields(body))
    assert found == visited(lambda: json.decode_fields(body))
    assert (found[0] == "InvalidContent") == is_too_long


@pytest.mark.parametrize("count", [MAX_NAMES - 1, MAX_NAMES, MAX_NAMES + 1, 5000])
def test_number_of_names_is_limited(count: int) -> None:
    body = orjson.dumps({f"n{i}": i for i in range(count)})
    assert (load_object(body) is None) == (count > MAX_NAMES)
    found = outcome(lambda: json.decode_fields(body))
    assert found == visited(lambda: json.decode_fields(body))
    assert (found[0] == "InvalidContent") == (count > MAX_NAMES)


@pytest.mark.parametrize("value", [[0] * 1000, [[]] * 300, "x" * (1 << 18)])
def test_long_text_is_left_to_the_document(value: Any) -> None:
    body = orjson.dumps({"a": value})
    assert load_object(body) is None
    assert json.decode_fields(body) == {"a": value}


# ---------------------------------------------------------------- any text

CHARACTERS: Final = ':,"\\{}[] \n\x7fab/\u00e9\u65e5\U0001f600\u2028'
NUMBERS: Final = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(["-0", "-0.0", "1e400", "1E2", "0.1e-400", "NaN", "Infinity", "01", "1."]),
)


@st.composite
def json_strings(draw: st.DrawFn) -> str:
    """Draws a string as JSON; some of its characters are escaped by their numbers."""
    text = draw(st.text(CHARACTERS, max_size=5))
    if draw(st.booleans()):
        return stdlib.dumps(text, ensure_ascii=draw(st.booleans()))
    return '"' + "".join(f"\\u{ord(c):04x}" for c in text if ord(c) < 1 << 16) + '"'


def containers(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    space = st.sampled_from(["", "", " ", "\n\t"])
    name = st.one_of(st.sampled_from(['"a"', '"b"', '"a:b"', '"\\u0061"']), json_strings())
    pair = st.tuples(space, name, space, values).map(lambda p: f"{p[0]}{p[1]}{p[2]}:{p[3]}")
    lists = st.lists(values, max_size=4).map(lambda parts: f"[{','.join(parts)}]")
    return lists | st.lists(pair, max_size=4).map(lambda parts: f"{{{','.join(parts)}}}")


VALUES: Final = st.recursive(
    st.sampled_from(["true", "false", "null"]) | NUMBERS | json_strings(), containers, max_leaves=12
)
OBJECTS: Final = st.lists(
    st.tuples(st.sampled_from(['"a"', '"b"', '"c:d"', '"e"', '"\\u0061"']), VALUES), max_size=5
).map(lambda pairs: f"{{{','.join(f'{name}:{value}' for name, value in pairs)}}}")


@pytest.mark.slow
@examples(1500)
@given(OBJECTS)
@example('{"a":{"b":":","b":1}}')
@example('{"a":"\\u003a","a":1}')
def test_object_equals_that_of_the_document(text: str) -> None:
    body = text.encode()
    plain = load_object(body)
    found = outcome(lambda: json.decode_fields(body))
    assert found == visited(lambda: json.decode_fields(body))
    if plain is not None:
        assert Document(body).is_plain
        assert repr(plain) == found


@pytest.mark.slow
@examples(1000)
@given(st.data())
def test_changed_body_has_the_same_outcome_in_every_codec(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(DECODERS)))
    decode, valid = DECODERS[name]
    body = bytearray(VALID_BODIES[data.draw(st.sampled_from(valid))])
    for _ in range(data.draw(st.integers(0, 3))):
        first = data.draw(st.integers(0, max(0, len(body) - 1)))
        size = data.draw(st.sampled_from([0, 1, 4, 20]))
        body[first : first + size] = data.draw(st.sampled_from(SNIPPETS) | VALUES.map(str.encode))
    whole = bytes(body)
    found, expected = outcome(lambda: decode(whole)), visited(lambda: decode(whole))
    if name == "safetensors" and isinstance(expected[0], str) and found != expected:
        # its header has the standard library's parser, with exact integers in error messages
        found, expected = found[0], expected[0]
    assert found == expected
