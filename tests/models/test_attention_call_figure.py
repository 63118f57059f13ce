"""Tests of the figure of a captured call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from qkv.errors import InvalidContent
from qkv.models import attention_call
from qkv.models.variants import variant_run
from support.attention_calls import make_call, padding_mask
from support.pictures import column_labels, matrix, panels, row_labels, titles

WORDS = ["the", "dog", "saw", "it", "pad1", "pad2"]


@pytest.mark.parametrize("as_lists", [True, False])
def test_figure_has_the_tokens_of_a_sequence_without_its_padding(as_lists: bool) -> None:
    call = make_call("block.7", B=2, L=6, mask=padding_mask([6, 4], 6))
    tokens: Any = [["x"] * 6, WORDS] if as_lists else WORDS
    figure = call.figure(tokens=tokens, batch=1)
    ax = panels(figure)[0]
    assert column_labels(panels(figure)[-1]) == row_labels(ax) == WORDS[:4]
    assert np.array_equal(matrix(ax), call.weights()[1, 0, :4, :4])
    assert figure.get_suptitle() == "block.7, softmax"
    whole = call.figure(tokens=WORDS, title="mine")
    assert row_labels(panels(whole)[0]) == WORDS
    assert whole.get_suptitle() == "mine"


def test_figure_of_chosen_heads_names_them() -> None:
    call = make_call(H=4, G=2, heads=(2, 3, 6, 7))
    assert "heads 6" in call.figure(heads=[6]).get_suptitle()
    assert "heads 2, 7" in call.figure(heads=[2, 7], variant="linear").get_suptitle()
    assert titles(call.figure(heads=[3, 6])) == ["head 3", "head 6"]
    assert titles(call.figure()) == [f"head {n}" for n in (2, 3, 6, 7)]
    figure = call.figure(heads=[3, 6], weights="stats")
    assert row_labels(panels(figure)[0]) == ["3", "6"]
    assert "heads" not in make_call().figure().get_suptitle()


def test_head_is_drawn_into_given_axes() -> None:
    page = Figure()
    ax = page.subplots()
    assert make_call().figure(heads=[1], ax=ax) is page
    assert "heads 1" in ax.get_title()


def test_figure_of_cross_attention_has_tokens_of_both_sequences() -> None:
    call = make_call("cross_attn", H=1, L=3, S=3)
    french, english = ["un", "chien", "dort"], ["a", "dog", "sleeps"]
    (ax,) = panels(call.figure(tokens=french, key_tokens=english))
    assert (row_labels(ax), column_labels(ax)) == (french, english)
    assert row_labels(panels(call.figure(tokens=french))[0]) == french


def test_figure_of_a_long_sequence_is_computed_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = []

    def recorded(*arguments: Any, **options: Any) -> Any:
        forms.append(options["weights"])
        return variant_run(*arguments, **options)

    monkeypatch.setattr(attention_call, "variant_run", recorded)
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
        ({"heads": [1, 1]}, r"got \[1, 1\], expected different numbers of \[0, 1\] in layer\.0"),
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
