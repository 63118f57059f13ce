"""Tests of files of captured calls."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import qkv
from qkv.client.arrays import to_raw
from qkv.errors import InvalidContent
from qkv.models import call_files
from qkv.models.attention_call import AttentionCall
from qkv.models.calls import Calls
from qkv.models.model_call import Missed
from support.attention_calls import calls_of, make_call, padding_mask

TENSORS = ("query", "key", "value", "output", "mask", "sinks")


def saved(tmp_path: Path, calls: Calls) -> Calls:
    """Returns the calls after they were written to a file and read."""
    path = tmp_path / "calls.safetensors"
    calls.save(path)
    return qkv.load_calls(path)


def assert_same_calls(found: Calls, expected: Calls) -> None:
    """Checks that calls have the same fields, dtypes and bits."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        for name in AttentionCall.__dataclass_fields__:
            x, y = getattr(a, name), getattr(b, name)
            if isinstance(y, torch.Tensor):
                assert x.dtype == y.dtype, name
                assert torch.equal(x, y), name
            elif name != "index":
                assert x == y, name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_calls_without_padding_come_back_as_they_were(tmp_path: Path, dtype: torch.dtype) -> None:
    bias = torch.randn(1, 2, 5, 5, dtype=torch.float32)
    calls = calls_of(
        make_call("a", B=2, H=4, G=2, dtype=dtype, causal=True, window=(3, None), scale=0.25),
        make_call("b", dtype=dtype, mask=bias, heads=(3, 7), items=(4,), dropout=0.1, is_self=True),
        make_call(
            "c", L=3, S=5, dtype=dtype, causal=True, query_offset=2, softcap=30.0, is_self=False
        ),
        make_call("d", dtype=dtype, mask=~torch.eye(5, dtype=torch.bool)[None, None]),
        make_call("e", dtype=dtype, sinks=torch.randn(2, dtype=dtype)),
    )
    found = saved(tmp_path, calls)
    assert_same_calls(found, calls)
    assert [call.index for call in found] == [*range(5)]
    assert repr(found) == repr(calls)


def test_file_has_the_documented_tensors_and_facts(tmp_path: Path) -> None:
    mask = padding_mask([3, 5, 3], 5).tril()
    call = make_call("a", B=3, H=4, G=2, mask=mask, dtype=torch.float32, is_self=True)
    sinks = make_call("b", sinks=torch.zeros(2))
    calls_of(call, sinks).save(tmp_path / "calls.safetensors")
    with safe_open(tmp_path / "calls.safetensors", framework="pt") as file:
        assert set(file.metadata()) == {"qkv_calls"}
        facts = file.metadata()["qkv_calls"]
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    first, second, third = json.loads(facts)
    assert first == {
        "layer": "a", "causal": True, "query_offset": 0, "window": None, "scale": 0.5,
        "softcap": None, "heads": [0, 1, 2, 3], "items": [0, 2], "dropout": 0.0, "is_self": True,
    }  # fmt: skip
    assert (second["items"], third["layer"]) == ([1], "b")
    assert (second["is_self"], third["is_self"]) == (True, None)
    assert set(tensors) == {
        *(f"calls.{n}.{name}" for n in range(3) for name in TENSORS[:4]), "calls.2.sinks",
    }  # fmt: skip
    assert torch.equal(tensors["calls.0.query"], call.query[[0, 2], :, :3])
    assert torch.equal(tensors["calls.0.key"], call.key[[0, 2], :, :3])
    assert torch.equal(tensors["calls.1.value"], call.value[[1]])


def test_tokens_come_back_without_padding(tmp_path: Path) -> None:
    mask = padding_mask([3, 5], 5, left=True)
    calls = calls_of(
        make_call("self", B=2, mask=mask, is_self=True), make_call("cross", B=2, L=2, S=4)
    )
    tokens = [["<pad>", "<pad>", "a", " cat", "\n"], [*"vwxyz"]]
    path = tmp_path / "calls.safetensors"
    calls.save(path, tokens=tokens)
    found = qkv.load_calls(path)
    expected = {0: ["a", " cat", "\n"], 1: [*"vwxyz"]}
    assert found.tokens == expected
    found.save(path)  # the calls of a file keep its tokens
    assert qkv.load_calls(path).tokens == expected
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["qkv_tokens"]) == {"0": expected[0], "1": expected[1]}
    one = calls_of(make_call("self"))
    one.save(path, tokens=[*"abcde"])
    assert qkv.load_calls(path).tokens == {0: [*"abcde"]}
    one.save(path)
    assert qkv.load_calls(path).tokens == {}


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([*"abc"], "tokens of sequence 0 have the wrong length: got 3, expected 5, with padding"),
        ("abcde", "tokens is one string"),
        ([[*"abcde"]] * 3, "expected a list of strings, or one such list for each of B=2"),
        ([[*"abcde"], [1, 2, 3, 4, 5]], r"tokens\[0\] is no string: got 1"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(tmp_path: Path, tokens: Any, message: str) -> None:
    path = tmp_path / "calls.safetensors"
    with pytest.raises(ValueError, match=message):
        calls_of(make_call("a", B=2)).save(path, tokens=tokens)
    assert not path.exists()


def test_wrong_tokens_of_a_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "calls.safetensors"
    calls_of(make_call()).save(path)
    with safe_open(path, framework="pt") as file:
        facts = file.metadata()["qkv_calls"]
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata={"qkv_calls": facts, "qkv_tokens": '{"0": [1]}'})
    with pytest.raises(InvalidContent, match="qkv_tokens"):
        qkv.load_calls(path)


def test_loaded_calls_have_the_same_comparison_rollout_and_mass(tmp_path: Path) -> None:
    lengths = [3, 5, 3]
    mask = padding_mask(lengths, 5, left=True)
    calls = calls_of(*(make_call(f"layer.{n}", B=3, mask=mask) for n in range(2)))
    found = saved(tmp_path, calls)
    variants: list[Any] = ["linear", "taylor"]
    rows = found.compare(variants, progress=False).rows
    assert rows == calls.compare(variants, progress=False).rows
    expected, mass = calls.rollout(), calls.received()
    for items in ([0, 2], [1]):
        at = slice(5 - lengths[items[0]], 5)
        torch.testing.assert_close(found.rollout(items=items), expected[items][:, at, at])
        received = found.received(items=items)["layer.1"]
        torch.testing.assert_close(received, mass["layer.1"][items][:, :, at])
    with pytest.raises(InvalidContent, match="choose sequences with `items`"):
        found.rollout()


def test_tensors_are_aligned_to_their_numbers(tmp_path: Path) -> None:
    mask = ~torch.eye(5, dtype=torch.bool)[None, None]
    kinds = torch.bfloat16, torch.float64, torch.float32
    calls_of(*(make_call(mask=mask, L=5, D=3, dtype=kind) for kind in kinds)).save(
        tmp_path / "calls.safetensors"
    )
    content = (tmp_path / "calls.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    sizes = {"F64": 8, "F32": 4, "BF16": 2, "BOOL": 1}
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    assert len(entries) == 15
    assert all((8 + length + e["data_offsets"][0]) % sizes[e["dtype"]] == 0 for e in entries)


def test_older_file_does_not_say_if_a_call_is_self_attention(tmp_path: Path) -> None:
    path = tmp_path / "calls.safetensors"
    calls_of(make_call(is_self=True)).save(path)
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["qkv_calls"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del facts[0]["is_self"]
    save_file(tensors, path, metadata={"qkv_calls": json.dumps(facts)})
    assert qkv.load_calls(path)[0].is_self is None


def test_layers_that_were_missed_are_kept(tmp_path: Path) -> None:
    calls = calls_of(make_call())
    calls.missed = [Missed("mamba.0", "it has no attention")]
    assert saved(tmp_path, calls).missed == calls.missed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no file of calls"),
        (b"\x10\0\0\0\0\0\0\0{}", "is no file of calls"),
        ({}, "has no calls: expected a file of Calls.save"),
        ({"qkv_calls": "["}, "is no file of calls: qkv_calls is invalid"),
        ({"qkv_calls": "7"}, "is no file of calls: qkv_calls is invalid: got 7, expected a"),
        ({"qkv_calls": "[{}]"}, r"is no file of calls: qkv_calls\.0\.layer is missing"),
        ({"qkv_calls": '[{"layer": "a"}]'}, r"is no file of calls: qkv_calls\.0\.causal is"),
        ({"qkv_calls": "{}"}, "is no file of calls: qkv_calls is invalid: got {}, expected a"),
        ({"qkv_calls": "[" * 100_000}, "is no file of calls: qkv_calls is invalid: got "),
        (
            {"qkv_calls": "[]", "qkv_missed": "[" * 100_000},
            "is no file of calls: qkv_missed is invalid: got ",
        ),
        (
            {"qkv_calls": "[]", "qkv_missed": '[["a"]]'},
            r"is no file of calls: qkv_missed\.0\.1 is missing",
        ),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "other.safetensors"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        save_file({"x": torch.zeros(1)}, path, metadata=content or None)
    with pytest.raises(InvalidContent, match=rf"other\.safetensors {message}"):
        qkv.load_calls(path)


def test_missing_file_and_wrong_suffix_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors"):
        qkv.load_calls(tmp_path / "none.safetensors")
    with pytest.raises(InvalidContent, match=r"wrong suffix: expected \.safetensors"):
        calls_of(make_call()).save(tmp_path / "calls.pt")


def test_missing_folder_is_an_error_with_the_given_path(tmp_path: Path) -> None:
    path = tmp_path / "none" / "calls.safetensors"
    with pytest.raises(FileNotFoundError) as caught:
        calls_of(make_call()).save(path)
    assert caught.value.filename == str(path)


def test_threads_save_to_one_path_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, both = tmp_path / "calls.safetensors", Barrier(2)

    def met(x: torch.Tensor, name: str) -> Any:
        both.wait(60)  # each thread has an unfinished file here
        return to_raw(x, name)

    monkeypatch.setattr(call_files, "to_raw", met)
    with ThreadPoolExecutor(2) as pool:
        saves = [pool.submit(calls_of(make_call(name)).save, path) for name in ("a", "b")]
        for each in saves:
            each.result()
    assert qkv.load_calls(path).layers in (["a"], ["b"])
    assert [each.name for each in tmp_path.iterdir()] == ["calls.safetensors"]


def test_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "calls.safetensors"
    calls_of(make_call("old")).save(path)
    wrong = make_call("new")
    object.__setattr__(wrong, "query", wrong.query.to(torch.complex64))
    with pytest.raises(InvalidContent, match=r"calls\.0\.query has the dtype torch\.complex64"):
        calls_of(wrong).save(path)
    assert qkv.load_calls(path).layers == ["old"]
    assert [each.name for each in tmp_path.iterdir()] == ["calls.safetensors"]
    calls_of(make_call("new")).save(path)
    assert qkv.load_calls(path).layers == ["new"]


def test_any_number_of_a_head_has_a_table_in_a_notebook(tmp_path: Path) -> None:
    """A map has a column for each number up to the largest one: this one would fill the memory."""
    found = saved(tmp_path, calls_of(make_call("a", heads=(0, 2**63 - 1))))
    compared = found.compare(["linear"], progress=False)
    assert str(2**63 - 1) in compared._repr_html_()
    with pytest.raises(InvalidContent, match="the map is too large: got 9,223,372,036,854,775,808"):
        compared.figure()
