"""A document has the values of the standard library's parser, refuses repeated names, and has
limits."""

from __future__ import annotations

import json as stdlib
from typing import Any, Final

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qkv.errors import InvalidContent, MalformedRequest, PayloadTooLarge, QkvError
from qkv.wire import json
from qkv.wire.plain_json import RepeatedName, load_names
from support.examples import examples

MAX_DEPTH: Final = 32
MAX_NAMES: Final = 256
MAX_NAME_LENGTH: Final = 1024
MAX_VALUES: Final = 10_000
FIELDS: Final = b'{"parameters":{"causal":true,"window":[1,null]},"outputs":["output"],"id":"7"}'


@pytest.mark.parametrize(
    "text",
    [
        b"{}", b'{"":""}', FIELDS, b' {\n"a" : {"a": [{"a": 1}, {"a": 1}]}\t} ',
        b'{"a":{"b":1},"b":{"b":2},"c":[{"b":1},{"b":2}]}', b'{"a":":","b:c":"d:"}',
        b'{"a":"\\"\\\\\\/\\n"}', '{"é":"日本"}'.encode(), b'{"a":"\\u00e9"}',
        b'{"a":[-0,-0.0,1e5,1.5,9223372036854775807,-9223372036854775808,18446744073709551615]}',
    ],
)  # fmt: skip
def test_fields_have_the_values_of_other_parsers(text: bytes) -> None:
    found = repr(
        json.decode_fields(text)
    )  # unlike ==, tells 1 from 1.0 and True, and has the order
    assert found == repr(orjson.loads(text)) == repr(stdlib.loads(text))


def nested(inner: str, depth: int) -> str:
    """Returns objects and lists in turn around a value; `depth` of them."""
    for level in range(depth):
        inner = f'{{"n":{inner}}}' if level % 2 else f"[{inner}]"
    return inner


REPEATED: Final = {
    "at the top": '{"a":1,"a":2}',
    "of equal values": '{"a":1,"a":1}',
    "with another between": '{"a":1,"b":2,"a":3}',
    "with objects as values": '{"a":{"b":1,"c":2},"a":{"b":1}}',
    "one name escaped": '{"a":1,"\\u0061":2}',
    "a solidus escaped": '{"/":1,"\\/":2}',
    "a quote in the name": '{"\\"":1,"\\"":2}',
    "an escaped backslash": '{"\\\\":1,"\\\\":2}',
    "three times": '{"a":1,"a":2,"a":3}',
}


@pytest.mark.parametrize("text", REPEATED.values(), ids=REPEATED)
@pytest.mark.parametrize("depth", [0, 1, 20])
def test_repeated_name_is_refused_at_any_level(text: str, depth: int) -> None:
    for body in (text, f'{{"first":1,"deep":{nested(text, depth)},"last":"x:y"}}'):
        with pytest.raises(InvalidContent, match="is repeated"):
            json.decode_fields(body.encode())
        with pytest.raises(RepeatedName):
            load_names(body.encode())


@pytest.mark.parametrize("depth", [MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1, 100])
@pytest.mark.parametrize("beside", ["[]", "[[],[],[],[],[]]", nested("[]", 8)])
def test_depth_is_limited(depth: int, beside: str) -> None:
    """Also where the brackets are many but not within one another."""
    body = f'{{"deep":{nested("1", depth)},"beside":{beside}}}'
    if depth <= MAX_DEPTH:
        assert json.decode_fields(body.encode()) == stdlib.loads(body)
        return
    with pytest.raises(MalformedRequest, match=f"nested deeper than {MAX_DEPTH}"):
        json.decode_fields(body.encode())


@pytest.mark.parametrize("length", [MAX_NAME_LENGTH, MAX_NAME_LENGTH + 1])
@pytest.mark.parametrize("letter", ["a", "é", "😀", "\\n"])
@pytest.mark.parametrize("depth", [0, 3])
def test_length_of_a_name_is_limited(length: int, letter: str, depth: int) -> None:
    """In characters."""
    inner = f'{{"{letter * length}":1}}'
    body = f'{{"deep":{nested(inner, depth)}}}'
    if length <= MAX_NAME_LENGTH:
        assert json.decode_fields(body.encode()) == stdlib.loads(body)
        return
    with pytest.raises(InvalidContent, match=f"at most {MAX_NAME_LENGTH}"):
        json.decode_fields(body.encode())


@pytest.mark.parametrize("count", [MAX_NAMES, MAX_NAMES + 1, 100_000])
@pytest.mark.parametrize("depth", [0, 3])
def test_number_of_names_is_limited(count: int, depth: int) -> None:
    inner = stdlib.dumps({f"n{i}": i for i in range(count)})
    body = f'{{"deep":{nested(inner, depth)}}}'
    if count <= MAX_NAMES:
        assert json.decode_fields(body.encode()) == stdlib.loads(body)
        return
    with pytest.raises(InvalidContent, match=f"more than {MAX_NAMES} names"):
        json.decode_fields(body.encode())


@pytest.mark.parametrize("count", [MAX_VALUES - 2, MAX_VALUES])
@pytest.mark.parametrize("value", [0, "", [], {}])
def test_number_of_values_is_limited(count: int, value: Any) -> None:
    body = orjson.dumps({"a": [value] * (count // 2), "b": [[value] * (count // 2 - 1)]})
    if count < MAX_VALUES:
        assert json.decode_fields(body) == orjson.loads(body)
        return
    with pytest.raises(PayloadTooLarge, match=f"more than {MAX_VALUES} values"):
        json.decode_fields(body)


def test_long_strings_are_values() -> None:
    body = orjson.dumps({"a": "x" * (1 << 18), "b": ["[" * (1 << 18)]})
    assert json.decode_fields(body) == orjson.loads(body)


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


def as_64_bits(digits: str) -> int | float:
    whole = int(digits)
    return whole if -(2**63) <= whole < 2**64 else float(digits)


@pytest.mark.slow
@examples(250)
@given(OBJECTS)
@example('{"a":{"b":":","b":1}}')
@example('{"a":"\\u003a","a":1}')
def test_object_equals_that_of_the_standard_library(text: str) -> None:
    body = text.encode()
    try:
        expected = repr(load_names(body, parse_int=as_64_bits))
        is_valid = "inf" not in expected  # 1e400
    except ValueError:
        is_valid = False
    try:
        found = repr(json.decode_fields(body))
    except QkvError:
        assert not is_valid
    else:
        assert is_valid
        assert found == expected
