"""Tests tables, printed arrays and .npz files in the playground: how they are read and shown."""

from __future__ import annotations

import io
import json
import re
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import expect

from support.browser import (
    Open,
    answer,
    choose_example,
    expect_shown,
    open_narrow,
    paste,
    read_weights,
    wait_until_drawn,
)
from support.examples import examples
from support.javascript import Modules
from support.service import Server

TWO: Final = [[1.5, -2.0], [0.25, 3.0]]

TABLES: Final = {
    "1.5,-2\n0.25,3": (TWO, []),
    "1,5\t-2\n0,25\t3\n": (TWO, []),
    "1,5;-2,0\r\n0,25;3\r\n": (TWO, []),
    "1.5 -2\n.25 3.": (TWO, []),
    "word\tx\ty\nNew York\t1,5\t-2\n[CLS]\t0,25\t3": (TWO, ["New York", "[CLS]"]),
    '"a, ""b""",1.5,-2\nc,0.25,3e0': (TWO, ['a, "b"', "c"]),
    "cat,dog\n1.5,-2\n0.25,3": (TWO, ["cat", "dog"]),
    "x,y\n1,2\n3,4\n5,6": ([[1, 2], [3, 4], [5, 6]], []),
    "\tx\ty\nNew York\t1,5\t-2\n[CLS]\t0,25\t3": (TWO, ["New York", "[CLS]"]),
    ",0,1\ncat,1.5,-2\ndog,0.25,3\n": (TWO, ["cat", "dog"]),  # pandas, with names of rows
    ",0,1\n0,1.5,-2\n1,0.25,3\n": (TWO, []),  # pandas
    "[SEP],1,nan\n[CLS],2,inf": ([[1, "NaN"], [2, "Infinity"]], ["[SEP]", "[CLS]"]),
}

PRINTED: Final = {
    "[[1.5, -2], [.25, 3.]]": TWO,
    "[[1.5, -2], [.25, 3],]": TWO,
    "((1.5, -2), (0.25, 3))": TWO,
    str(np.array(TWO)): TWO,
    repr(np.array(TWO, np.float32)): TWO,
    str(torch.tensor(TWO)): TWO,
    repr(torch.tensor(TWO, dtype=torch.float64, requires_grad=True)): TWO,
    "tensor([[1.5, -2], [0.25, 3]], device='cuda:0', grad_fn=<AddBackward0>)": TWO,
    "np.array([[1.5, -2], [0.25, 3]])  # scores": TWO,
    repr(np.array([True, False])): [True, False],
    str(np.array([np.nan, -np.inf])): ["NaN", "-Infinity"],
}


def read_text(modules: Modules, text: str) -> dict[str, Any]:
    """Returns what the page reads from a text: lists by name, and labels."""
    read: dict[str, Any] = modules.evaluate(
        """text => {
            const { tensors: read, labels = [] } = uploads.readText(text);
            const lists = Object.entries(read).map(([name, one]) => [name, tensors.toWire(one)]);
            return { tensors: Object.fromEntries(lists), labels };
        }""",
        text,
    )
    return read


def test_tables_are_read_with_their_words(modules: Modules) -> None:
    for text, (rows, labels) in TABLES.items():
        assert read_text(modules, text) == {"tensors": {"tensor": rows}, "labels": labels}, text


def test_printed_arrays_are_read(modules: Modules) -> None:
    for text, rows in PRINTED.items():
        assert read_text(modules, text) == {"tensors": {"tensor": rows}, "labels": []}, text


def test_names_of_python_are_kept(modules: Modules) -> None:
    for text in (
        "query = np.array([[1, 2]])\nkey = tensor([[3, 4]])",
        "{'query': [[1, 2]], 'key': array([[3, 4]])}",
    ):
        assert read_text(modules, text)["tensors"] == {"query": [[1, 2]], "key": [[3, 4]]}


@examples(60)
@given(st.lists(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=2),
                min_size=2, max_size=4))  # fmt: skip
def test_any_printed_list_and_table_is_read_exactly(modules: Modules, rows: list[Any]) -> None:
    table = "\n".join("\t".join(map(repr, row)) for row in rows)
    for text in (f"x = {rows!r}", table):
        [got] = read_text(modules, text)["tensors"].values()
        assert np.array(got, float).tolist() == rows


WRONG: Final = {
    "1,2\n3": "line 2 of the table has 1 numbers, but the first has 2",
    "a,b\n1,two": "line 2, cell 2 of the table is “two”, expected a number",
    "1,2\n3,": "line 2, cell 2 of the table is “”, expected a number",
    "[[1. 2. ... 3.]]": "leaves out numbers",
    "[[1, 2], [3, x]]": "the text has x, expected a number or a list",
    "tensor([1, 2": "ends inside a list",
    "{'a': 5": "ends inside a list",
    '{"a": [1,}': "this is not JSON",
    "hello": "the text has hello",
}


def test_message_for_a_wrong_text_names_its_place(modules: Modules) -> None:
    for text, message in WRONG.items():
        got = modules.evaluate(
            "text => { try { uploads.readText(text) } catch (e) { return e.message } }", text
        )
        assert message in (got or ""), (text, got)


def payload(name: str, data: bytes) -> Any:
    return {"name": name, "mimeType": "application/octet-stream", "buffer": data}


def test_archives_of_numpy_are_read_and_files_of_torch_refused_with_a_command(
    open_page: Open, server: Server
) -> None:
    opened = open_narrow(open_page, server.url)
    page = opened.page
    rows = np.random.default_rng(0).standard_normal((4, 3))
    for save in (np.savez, np.savez_compressed):
        choose_example(opened, "words")  # the first file's tensors are gone
        file = io.BytesIO()
        save(file, query=rows, key=rows, value=rows)
        page.get_by_label("Upload").set_input_files([payload("x.npz", file.getvalue())])
        expect(page.locator("#status")).to_have_text(re.compile("4 queries, 4 keys"))
        expect(page.locator("#tensors .name")).to_have_text(["query", "key", "value"])
    wait_until_drawn(opened)
    file = io.BytesIO()
    torch.save({"a": torch.ones(2)}, file)
    old = io.BytesIO()
    torch.save({"a": torch.ones(2)}, old, _use_new_zipfile_serialization=False)
    for data in (file.getvalue(), old.getvalue()):
        page.get_by_label("Upload").set_input_files([payload("x.pt", data)])
        expect_shown(page.locator("#inputs-error"), "torch.load('x.pt'")


@pytest.mark.representative
def test_pasted_cells_of_a_spreadsheet_bring_their_words(open_page: Open, server: Server) -> None:
    opened = open_narrow(open_page, server.url)
    page = opened.page
    paste(page, "word\tx\ty\nred\t1,5\t0\ngreen\t0\t1,5\nblue\t1\t1\n")
    wait_until_drawn(opened)
    expect(page.get_by_label("Token labels")).to_have_value("red green blue")
    assert list(read_weights(page)) == ["red", "green", "blue"]


def test_pasted_mask_is_added_to_an_example_and_two_unnamed_tensors_replace_it(
    open_page: Open, server: Server
) -> None:
    opened = open_narrow(open_page, server.url)
    page = opened.page
    words, undo = read_weights(page), page.get_by_role("button", name="Undo")
    expect(undo).to_be_disabled()
    paste(page, json.dumps({"mask": np.tri(6, dtype=bool).tolist()}))
    wait_until_drawn(opened)
    expect(page.locator("#tensors .name")).to_have_text(["words", "mask"])
    masked = read_weights(page)
    assert list(masked) == list(words)
    assert masked["Your"] == [1, 0, 0, 0, 0, 0]
    undo.click()
    expect(page.locator("#tensors .name")).to_have_text(["words"])
    wait_until_drawn(opened)
    assert read_weights(page) == words
    expect(undo).to_be_disabled()

    # two tensors without known names are query and key
    paste(page, "A = [[1, 0], [0, 1]]\nB = [[1, 0], [0, 1], [1, 1]]")
    wait_until_drawn(opened)
    expect(page.locator("#status")).to_have_text(re.compile("2 queries, 3 keys"))
    expect(page.get_by_label("Role of A")).to_have_value("query")
    expect(page.get_by_label("Role of B")).to_have_value("key, value")


def test_tensors_that_are_pasted_one_by_one_are_added_or_replace_one_without_a_name(
    open_page: Open, server: Server
) -> None:
    opened = open_narrow(open_page, server.url)
    page = opened.page
    names, rows = page.locator("#tensors .name"), "[[1, 0], [0, 1]]"
    expected = [["query, key, value"], ["query", "key, value"], ["query", "key", "value"]]
    for name, roles in zip("ABC", expected, strict=True):
        paste(page, f"{name} = {rows}")
        expect(names).to_have_text(list("ABC")[: len(roles)])
        for known, role in zip("ABC", roles, strict=False):
            expect(page.get_by_label(f"Role of {known}")).to_have_value(role)
    wait_until_drawn(opened)
    page.get_by_role("button", name="Remove B").click()
    page.get_by_role("button", name="Remove C").click()
    page.get_by_label("Role of A").select_option("query, key, value")
    paste(page, rows)  # a role that the user chose stays
    answer(page, "Keep both")
    expect(names).to_have_text(["A", "tensor"])
    expect(page.get_by_label("Role of A")).to_have_value("query, key, value")

    choose_example(opened, "words")
    paste(page, "1\t0\n0\t1")
    paste(page, "1\t0\n0\t1\n1\t1")
    question = page.get_by_role("group", name=re.compile("you brought"))
    expect(question).to_contain_text("The new tensor would replace the one that you brought.")
    answer(page, "Keep both")
    expect(names).to_have_text(["tensor", "tensor 2"])
    expect(page.locator("#status")).to_contain_text("2 queries, 3 keys")
    page.get_by_role("button", name="Undo").click()
    expect(names).to_have_text(["tensor"])
    paste(page, "1\t0\n0\t1\n1\t1")
    answer(page, "Replace")
    expect(page.locator("#status")).to_contain_text("3 queries, 3 keys")
    expect(names).to_have_text(["tensor"])
