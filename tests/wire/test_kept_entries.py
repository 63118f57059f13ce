"""Entries of tensors that are kept: the same for many requests, without numbers, in little memory.

The entries are those of the Open Inference Protocol, in `qkv.wire.open_inference`.
"""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import orjson
import pytest

from qkv.errors import InvalidContent, QkvError
from qkv.tensors import RawTensor
from qkv.wire import open_inference
from qkv.wire.message import Message
from qkv.wire.open_inference import _known_tensors


def encode(arrays: dict[str, Any], binary: bool) -> tuple[bytes, int | None]:
    raw = {name: RawTensor.from_numpy(array) for name, array in arrays.items()}
    chunks, length = open_inference.encode(Message({}, raw), "inputs", set(raw) if binary else ())
    return b"".join(chunks), length


def binary_entries(**changed: Any) -> bytes:
    """Returns the JSON of a request with one tensor of 8 bytes."""
    parameters = {"binary_data_size": 8}
    entry = {"name": "a", "datatype": "FP32", "shape": [2], "parameters": parameters}
    return orjson.dumps({"inputs": [entry | changed]})


@pytest.mark.parametrize("is_binary", [True, False])
def test_requests_with_equal_entries_have_their_own_numbers(is_binary: bool) -> None:
    for seed in range(5):
        random = np.random.default_rng(seed)
        arrays = {name: random.normal(size=(2, 3)).astype("f4") for name in "ab"}
        body, length = encode(arrays, is_binary)
        tensors = open_inference.decode(body, "inputs", length).tensors
        assert {n: bytes(t.data) for n, t in tensors.items()} == {
            n: a.tobytes() for n, a in arrays.items()
        }


def test_numbers_in_lists_are_not_kept() -> None:
    """Nor do they displace entries that other requests have."""
    before = _known_tensors.cache_info()
    for seed in range(20):
        arrays = {"a": np.random.default_rng(seed).normal(size=3)}
        open_inference.decode(encode(arrays, False)[0], "inputs")
    assert _known_tensors.cache_info() == before


def test_kept_entries_take_little_memory() -> None:
    """1024 lists of entries, each of 2 KiB of JSON at most: less than 16 MiB."""
    count = 200
    texts = [binary_entries(name=f"{i:04}" + "x" * 900) for i in range(count)]
    open_inference.decode(texts[0] + bytes(8), "inputs", len(texts[0]))
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for text in texts:
        open_inference.decode(text + bytes(8), "inputs", len(text))
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert held / count * 1024 < 16 << 20


def test_invalid_entries_are_rejected_every_time() -> None:
    """Also between requests with valid ones of the same length."""
    good = binary_entries()
    for changed in ({"datatype": "FP31"}, {"shape": [3]}, {"name": 7}, {"shape": [True]}):
        bad = binary_entries(**changed)
        details = set()
        for _ in range(3):
            assert open_inference.decode(good + bytes(8), "inputs", len(good)).tensors
            with pytest.raises(QkvError) as error:
                open_inference.decode(bad + bytes(8), "inputs", len(bad))
            details.add((error.value.detail, error.value.pointer))
        assert len(details) == 1


def test_bytes_of_a_bool_tensor_are_checked_every_time() -> None:
    text = binary_entries(datatype="BOOL", shape=[8])
    for _ in range(3):
        assert open_inference.decode(text + bytes(8), "inputs", len(text)).tensors
        with pytest.raises(InvalidContent, match="other than 0 and 1"):
            open_inference.decode(text + bytes([2] * 8), "inputs", len(text))


def test_names_that_are_repeated_in_kept_entries_are_rejected() -> None:
    entry = orjson.loads(binary_entries())["inputs"][0]
    text = orjson.dumps({"inputs": [entry, entry]})
    for _ in range(2):
        with pytest.raises(InvalidContent, match="'a' is repeated"):
            open_inference.decode(text + bytes(16), "inputs", len(text))
