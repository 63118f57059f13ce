"""Tests of the figure of a captured call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qkv.errors import InvalidContent
from qkv.models import call_figure
from qkv.models.variant_signature import variant_run
from support.attention_calls import make_call, padding_mask

WORDS = ["the", "dog", "saw", "it", "pad1", "pad2"]


def test_figure_has_the_tokens_of_a_sequence_without_its_padding(tmp_path: Path) -> None:
    call = make_call("block.7", B=2, L=6, mask=padding_mask([6, 4], 6))
    figure = call.figure(tmp_path / "call.svg", tokens=WORDS, batch=1)
    assert (tmp_path / "call.svg").read_text() == figure.svg
    assert all(word in figure.svg for word in WORDS[:4])
    assert "pad" not in figure.svg
    assert "block.7, softmax" in figure.svg
    whole = call.figure(tokens=WORDS, title="mine").svg
    assert all(word in whole for word in (*WORDS, "mine"))


def test_figure_of_chosen_heads_names_them() -> None:
    call = make_call(H=4, G=2, heads=(2, 3, 6, 7))
    assert "heads 6" in call.figure(heads=[6]).svg
    assert "heads 2, 7" in call.figure(heads=[2, 7], variant="linear").svg
    svg = call.figure(heads=[3, 6]).svg
    assert all(f">head {n}<" in svg for n in (3, 6))
    assert not any(f">head {n}<" in svg for n in (0, 1, 2, 7))
    assert all(f">head {n}<" in call.figure().svg for n in (2, 3, 6, 7))
    rows = call.figure(heads=[3, 6], weights="stats").svg
    assert all(f">{n}</text>" in rows for n in (3, 6))
    alone = make_call()
    assert "heads" not in alone.figure().svg


def test_figure_of_cross_attention_has_tokens_of_both_sequences() -> None:
    call = make_call("cross_attn", L=3, S=3)
    svg = call.figure(tokens=["un", "chien", "dort"], key_tokens=["a", "dog", "sleeps"]).svg
    assert "chien" in svg
    assert "sleeps" in svg
    assert "dort" in call.figure(tokens=["un", "chien", "dort"]).svg


def test_figure_of_a_long_sequence_is_computed_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = []

    def recorded(*arguments: Any, **options: Any) -> Any:
        forms.append(options["weights"])
        return variant_run(*arguments, **options)

    monkeypatch.setattr(call_figure, "variant_run", recorded)
    call = make_call(H=1, L=1025, dtype=torch.float32)
    call.figure()
    call.figure(weights={"rows": [0, 1024]})
    make_call(H=1).figure()
    assert forms == [{"pool": 128}, {"rows": [0, 1024]}, "full"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 1}, "batch is invalid: got 1, expected 0 to 0"),
        ({"heads": [2]}, r"heads is invalid: got \[2\]"),
        ({"heads": []}, "heads is invalid"),
        ({"heads": 1}, "heads is invalid: got 1, expected a list of integers"),
        ({"heads": [[1]]}, r"heads is invalid: got \[\[1\]\], expected a list of integers"),
        ({"tokens": ["a"]}, "tokens has the wrong length: got 1, expected 5"),
    ],
)
def test_wrong_arguments_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidContent, match=message):
        make_call().figure(**options)


def test_call_without_sequences_has_no_figure() -> None:
    with pytest.raises(InvalidContent, match=r"layer\.0 has no sequences: expected at least one"):
        make_call(B=0).figure()


def test_sequence_of_padding_has_no_figure() -> None:
    call = make_call(B=2, mask=padding_mask([0, 5], 5))
    with pytest.raises(InvalidContent, match=r"sequence 0 of layer\.0 is all padding"):
        call.figure()
