"""Every decoder accepts or rejects any bytes, and allocates in proportion to their number, not to
declared sizes."""

from __future__ import annotations

import gzip
import json as stdlib
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from qkv.cli import tensor_files
from qkv.errors import QkvError
from qkv.wire import open_inference
from support.decoder_fuzz import (
    ARRAYS,
    AT_LEAST,
    DECODERS,
    LIMIT,
    PIECE,
    SNIPPETS,
    V2_LENGTH,
    VALID_BODIES,
    MiB,
    assert_allocates_below,
    assert_decodes_or_refuses,
    decompress,
    result_or_refusal,
)
from support.examples import examples
from support.json_values import json_values
from support.safetensors_files import file

assert V2_LENGTH is not None


@st.composite
def mutated(draw: st.DrawFn, names: list[str]) -> bytes:
    """Draws a valid body with a flip, a cut, an insertion, a splice, or another number.

    The length of the header of a safetensors file follows the changes, or is among them.
    """
    name = draw(st.sampled_from(names))
    whole = VALID_BODIES[name]
    is_following = name == "safetensors" and draw(st.booleans())
    body = bytearray(whole[8:] if is_following else whole)
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
                other = VALID_BODIES[draw(st.sampled_from(list(VALID_BODIES)))]
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
    if is_following:
        length = int.from_bytes(whole[:8], "little") + len(body) - len(whole[8:])
        body[:0] = max(0, length).to_bytes(8, "little")
    return bytes(body)


@pytest.mark.parametrize("name", DECODERS)
def test_unchanged_bodies_are_accepted(name: str) -> None:
    decode, valid = DECODERS[name]
    for body in valid:
        assert decode(VALID_BODIES[body]).tensors.keys() == ARRAYS.keys()


@pytest.mark.parametrize("name", DECODERS)
@examples(200)
@given(st.binary(max_size=300) | st.text('[]{},:"01.-etrufalsn').map(str.encode))
def test_any_bytes_are_accepted_or_rejected(name: str, body: bytes) -> None:
    assert_decodes_or_refuses(DECODERS[name][0], body)


@pytest.mark.parametrize("name", DECODERS)
@examples(500)
@given(st.data())
def test_changed_bodies_are_accepted_or_rejected(name: str, data: st.DataObject) -> None:
    decode, valid = DECODERS[name]
    assert_decodes_or_refuses(decode, data.draw(mutated(valid)))


_HEADER_BYTES: Final = int.from_bytes(VALID_BODIES["safetensors"][:8], "little")
DOCUMENTS: Final[dict[str, tuple[str, bytes, Callable[[bytes], bytes]]]] = {
    "lists": ("json", VALID_BODIES["lists"], bytes),
    "base64": ("json", VALID_BODIES["base64"], bytes),
    "v2 in JSON": ("v2 in JSON", VALID_BODIES["v2 in JSON"], bytes),
    "header of safetensors": (
        "safetensors",
        VALID_BODIES["safetensors"][8 : 8 + _HEADER_BYTES],
        lambda header: file(header, VALID_BODIES["safetensors"][8 + _HEADER_BYTES :]),
    ),
}
"""The decoder, the JSON of a valid body, and what makes a body of such JSON."""


@pytest.mark.parametrize("form", DOCUMENTS)
@examples(200)
@given(st.data())
def test_any_value_in_any_place_is_accepted_or_rejected(form: str, data: st.DataObject) -> None:
    name, valid, body_of = DOCUMENTS[form]
    document = stdlib.loads(valid)
    node: Any = document
    while True:
        at = data.draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
        if not (isinstance(node[at], dict | list) and node[at]) or data.draw(st.booleans()):
            break
        node = node[at]
    node[at] = data.draw(json_values | st.integers() | st.lists(st.integers(-1, 40), max_size=3))
    assert_decodes_or_refuses(DECODERS[name][0], body_of(stdlib.dumps(document).encode()))


@examples(300)
@given(mutated(["v2", "v2 in JSON"]), st.none() | st.integers(0, 2**66) | st.integers(0, 1200))
def test_any_json_length_is_accepted_or_rejected(body: bytes, length: int | None) -> None:
    assert_decodes_or_refuses(lambda body: open_inference.decode(body, "inputs", length), body)


@examples(200)
@given(st.text(max_size=30) | st.integers().map(str))
def test_any_length_header_is_accepted_or_rejected(header: str) -> None:
    length = result_or_refusal(lambda: open_inference.json_length(header))
    assert length is None or length == int(header)


@pytest.mark.parametrize("piece", ["[],", "{},", "0,", '"",', "1e1,", "true,", '"NaN",', "[[0]],"])
def test_many_small_values_allocate_in_proportion(piece: str) -> None:
    count = 10_000
    inside = (piece * count)[:-1]
    entry = '"name":"a","datatype":"FP32","shape":[' + f"{count}],"
    assert_decodes_or_refuses(DECODERS["json"][0], f'{{"inputs":{{"a":[{inside}]}}}}'.encode())
    assert_decodes_or_refuses(DECODERS["json"][0], f'{{"parameters":[{inside}]}}'.encode())
    for key in ("data", "parameters", "name", "shape"):
        body = f'{{"inputs":[{{{entry if key == "data" else ""}"{key}":[{inside}]}}]}}'
        assert_decodes_or_refuses(DECODERS["v2 in JSON"][0], body.encode())


@pytest.mark.parametrize("name", ["json", "v2 in JSON"])
@pytest.mark.parametrize("inside", [b'{"a":' * 30 + b"0" + b"}" * 30, b"[" + b"0," * 9000 + b"0]"])
def test_long_name_is_rejected_without_copies(name: str, inside: bytes) -> None:
    """The pointer to each value below would contain it."""
    body = b'{"' + b"n" * MiB + b'":' + inside + b"}"
    with pytest.raises(QkvError, match="got 1048576 characters, expected at most 1024"):
        assert_allocates_below(AT_LEAST + 2 * len(body), lambda: DECODERS[name][0](body))


# compressed bodies


@pytest.mark.slow
@examples(300)
@given(st.binary(max_size=200) | mutated(["gzip", "deflate"]))
def test_compressed_bodies_are_accepted_or_rejected(packed: bytes) -> None:
    whole = result_or_refusal(
        lambda: assert_allocates_below(PIECE + LIMIT, lambda: decompress(packed))
    )
    assert whole is None or sum(map(len, whole)) <= LIMIT


@given(
    st.binary(max_size=100), st.integers(1, 100_000), st.booleans(), st.sampled_from([1, 3, 1024])
)
def test_decompressed_body_is_the_original(part: bytes, times: int, form: bool, grain: int) -> None:
    whole = (part * times)[: 4 * MiB]
    packer = zlib.compressobj(6, wbits=zlib.MAX_WBITS | (16 if form else 0))
    packed = b"".join(packer.compress(whole[i::grain]) for i in range(grain)) + packer.flush()
    expected = b"".join(whole[i::grain] for i in range(grain))
    assert b"".join(decompress(packed, len(whole))) == expected


@pytest.mark.parametrize("size", [MiB - 1, MiB, MiB + 1, 5 * MiB])
def test_incompressible_body_is_decompressed(size: int) -> None:
    """The compressed bytes are decompressed in several chunks."""
    whole = np.random.default_rng(size).bytes(size)
    packed = gzip.compress(whole, 1)
    assert b"".join(decompress(packed, size)) == whole
    for bad, words in [
        (packed[:-1], "too early"),
        (packed + b"\0", "bytes follow"),
        (packed + bytes(2 * MiB), "bytes follow"),
        (packed[:-8] + b"\0\0\0\0" + packed[-4:], "cannot be decompressed"),
    ]:
        with pytest.raises(QkvError, match=words):
            decompress(bad, size)
    with pytest.raises(QkvError, match="the decompressed body is too large"):
        decompress(packed, size - 1)


@pytest.mark.parametrize("limit", [1, 10 * MiB])
@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_decompression_bomb_allocates_no_more_than_the_limit(
    pack: Callable[[bytes], bytes], limit: int
) -> None:
    packed = pack(bytes(64 * MiB))
    with pytest.raises(QkvError, match="the decompressed body is too large") as caught:
        assert_allocates_below(limit + PIECE, lambda: decompress(packed, limit))
    assert caught.value.status == 413


# files


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "names"), [("json", ["lists"]), ("safetensors", ["safetensors"]), ("npz", ["npz"])]
)
@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_changed_files_are_accepted_or_rejected(
    tmp_path: Path, suffix: str, names: list[str], data: st.DataObject
) -> None:
    path = tmp_path / f"file.{suffix}"
    path.write_bytes(data.draw(st.binary(max_size=100) | mutated(names)))
    message = result_or_refusal(lambda: tensor_files.read(path, "inputs"))
    for raw in message.tensors.values() if message else ():
        assert raw.numpy().shape == raw.shape
