"""Tests of bench/which_heads.py: its page has the numbers that plain computations give."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import which_heads
from head_effects import Effect, effect_of, spearman
from head_sentences import PAIRS, SENTENCES
from line_panels import Line, Panel, draw_panels
from torch.nn.functional import elu, normalize

import qkv
from support import minilm

PAGE = which_heads.PAGE.read_text()


def rows_of(heading: str) -> dict[str, list[str]]:
    """Returns the rows of the page's first table after a heading, by their first cell."""
    section = PAGE.partition(f"## {heading}")[2]
    table = section[section.index("| --- |") :].partition("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()[1:]]
    return {first: rest for first, *rest in cells}


@pytest.mark.slow
def test_command_writes_the_page_and_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "which-heads.md"
    page.write_text(f"# By hand\n{which_heads.START}old{which_heads.END}## Method\n")
    monkeypatch.setattr(which_heads, "PAGE", page)
    which_heads.main(["--quick", "--write"])
    text = page.read_text()
    assert text.startswith(f"# By hand\n{which_heads.START}")
    assert text.endswith(f"{which_heads.END}## Method\n")
    assert capsys.readouterr().out in text
    figures = re.findall(r"\]\((which-heads-\w+\.svg)\)", text)
    assert sorted(figures) == sorted(path.name for path in tmp_path.glob("*.svg"))
    assert len(figures) == 3


def test_page_says_what_made_it_and_shows_its_figures() -> None:
    assert "made by `make which-heads`" in PAGE
    figures = re.findall(r"\]\((which-heads-\w+\.svg)\)", PAGE)
    assert len(figures) == 3
    assert all((which_heads.PAGE.parent / figure).is_file() for figure in figures)
    assert which_heads.EXAMPLE in PAGE


def test_closest_head_of_linear_attention_has_the_figures_of_the_page() -> None:
    """Computes them again from the formula, in float64, with the model's own queries and keys."""
    place, (error, variation, _, _, entropy, baseline_entropy) = next(
        iter(rows_of("linear:").items())
    )
    layer, head = map(int, place.split(", "))
    totals, tokens = torch.zeros(4, dtype=torch.float64), 0
    for sentence in SENTENCES:
        found = minilm.activations_of(sentence)[layer]
        query_LD, key_SD, value_SE = (
            x[0, head].double() for x in (found.query_BHLD, found.key_BGSD, found.value_BGSE)
        )
        softmax_LS = (query_LD @ key_SD.T / query_LD.shape[-1] ** 0.5).softmax(-1)
        weights_LS = (elu(query_LD) + 1) @ (elu(key_SD) + 1).T
        weights_LS /= weights_LS.sum(-1, keepdim=True)
        difference_LE, output_LE = (weights_LS - softmax_LS) @ value_SE, softmax_LS @ value_SE
        figures = (
            difference_LE.norm() / output_LE.norm(),
            (weights_LS - softmax_LS).abs().sum(-1).mean() / 2,
            -torch.xlogy(weights_LS, weights_LS).sum(-1).mean(),
            -torch.xlogy(softmax_LS, softmax_LS).sum(-1).mean(),
        )
        totals += torch.stack(figures) * len(query_LD)
        tokens += len(query_LD)
    printed = error, variation, entropy, baseline_entropy
    assert_printed(printed, (totals / tokens).tolist())


def assert_printed(printed: Sequence[str], numbers: Sequence[float]) -> None:
    """Checks numbers to half a unit of the last digit, and the rounding errors of the model."""
    for text, number in zip(printed, numbers, strict=True):
        digits = len(text.partition(".")[2])
        assert abs(float(text) - number) <= 0.5 * 10**-digits + 1e-5


@pytest.mark.parametrize("k", [1, 6])
def test_six_closest_heads_of_taylor_attention_have_the_effect_on_the_page(k: int) -> None:
    """Computes it again with one sentence after the other, without padding."""
    places = [tuple(map(int, place.split(", "))) for place in list(rows_of("taylor:"))[:k]]
    substitutes: dict[str, dict[str, Any]] = {}
    for layer, head in places:
        substitute = substitutes.setdefault(f"encoder.layer.{layer}", {"variant": "taylor"})
        substitute["heads"] = [*substitute.get("heads", []), head]
    own_NM = torch.stack([minilm.embedding_of(sentence) for sentence in SENTENCES])
    model, tokenizer = minilm.bert(), minilm.tokenizer()
    with torch.no_grad(), qkv.substitute(model, substitutes):
        last_BLM = [
            model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state
            for sentence in SENTENCES
        ]
    changed_NM = torch.stack([normalize(x_BLM.mean((0, 1)), dim=0) for x_BLM in last_BLM])
    effect = effect_of(own_NM.double(), changed_NM.double())
    cell = rows_of("What substitution does")[str(k)][1]
    cosine, worst, correlation, neighbours = re.findall(r"[\d.]+", cell)
    assert_printed((cosine, worst, correlation), effect[:3])
    assert float(neighbours) == round(100 * effect.same_neighbours)


def test_pairs_that_say_the_same_are_neighbours_in_the_model() -> None:
    """The command has the model and its tokenizer, not something like it."""
    x_NM = torch.stack([minilm.embedding_of(sentence) for sentence in SENTENCES])
    nearest = (x_NM @ x_NM.T).fill_diagonal_(-2).argmax(-1)[: 2 * len(PAIRS)]
    assert nearest.tolist() == [n ^ 1 for n in range(2 * len(PAIRS))]


def test_unchanged_embeddings_have_no_effect() -> None:
    x_NM = normalize(torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).double(), dim=-1)
    effect = effect_of(x_NM, x_NM)
    assert effect == pytest.approx(Effect(1, 1, 1, 1), abs=1e-12)


def test_effect_is_measured_on_pairs_and_neighbours() -> None:
    """The last of four sentences on a circle moves from beside the first to beside the third."""
    before, after = (
        torch.tensor([[math.cos(a), math.sin(a)] for a in (0.0, 0.5, 1.2, angle)]).double()
        for angle in (-0.3, 1.4)
    )
    effect = effect_of(before, after)
    assert effect.worst_cosine == pytest.approx(math.cos(1.7), abs=1e-6)
    assert effect.mean_cosine == pytest.approx((3 + math.cos(1.7)) / 4, abs=1e-6)
    assert effect.same_neighbours == 0.25  # only the second keeps the first
    # the pairs 01 02 12 03 13 23, by distance: 2 5 3 1 4 6 before, 2 5 3 6 4 1 after
    assert effect.rank_correlation == pytest.approx(1 - 6 * 50 / (6 * 35), abs=1e-12)


def test_spearman_compares_orders() -> None:
    assert spearman([1, 2, 3, 4], [1, 8, 27, 64]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 3, 4], [2, 1, 3, 4]) == pytest.approx(0.8)


def test_lines_have_names_that_do_not_overlap() -> None:
    lines = [Line(f"line {n}", [(0, 1.0), (4, 0.5 + n / 1000)], n) for n in range(4)]
    svg = draw_panels("Lines", [Panel("a", lines, 0.0)], "x", (0, 2, 4), has_legend=False)
    heights = sorted(float(y) for y in re.findall(r'class="t\d" x="[\d.]+" y="([\d.]+)"', svg))
    assert len(heights) == 4
    assert all(b - a >= 13 for a, b in pairwise(heights))
    assert "prefers-color-scheme:dark" in svg
