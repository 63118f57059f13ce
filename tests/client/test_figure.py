"""Tests of `Run.figure`: tokens on the axes, colour scales, chosen heads, files and errors."""

from __future__ import annotations

import re
import sys
import warnings
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from qkv import Client, Figure, Run
from qkv.client.figures.colours import DARK, LIGHT, luminance
from qkv.client.figures.labels import Axis, shorten, visible
from qkv.client.figures.scale import Scale
from qkv.heatmap import LEVELS
from support.pictures import SVG, panel_cells, parse_svg

TIMING: Final = {"compute_ms": 0.1, "device": "cpu", "backend": "explicit"}
WORDS: Final = [
    "The", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "near", "a", "river",
]  # fmt: skip


def softmax(*shape: int) -> np.ndarray:
    scores = 3 * np.random.default_rng(0).normal(size=shape)
    exact = np.exp(scores - scores.max(-1, keepdims=True))
    weights: np.ndarray = (exact / exact.sum(-1, keepdims=True)).astype(np.float32)
    return weights


def run(form: Any = "full", **outputs: Any) -> Run:
    return Run("softmax", outputs, TIMING, "stochastic", form)


def statistics(weights: np.ndarray) -> dict[str, np.ndarray]:
    entropy = -(weights * np.log(weights)).sum(-1)
    return {
        "entropy": entropy, "largest": weights.max(-1), "largest_index": weights.argmax(-1),
        "effective_keys": np.exp(entropy), "received": weights.sum(-2),
    }  # fmt: skip


def words(figure: Figure) -> list[str]:
    """Returns the texts of a figure in the order of drawing, without their tooltips."""
    return ["".join(e.itertext()) for e in parse_svg(figure.svg).iter(f"{SVG}text")]


def labels(figure: Figure) -> list[str]:
    """Returns the shortened texts of the labels, which have a fixed width."""
    texts = [e for e in parse_svg(figure.svg).iter(f"{SVG}text") if e.get("font-family")]
    return ["".join([e.text or "", *((c.tail or "") for c in e)]) for e in texts]


def panel_fills(figure: Figure) -> list[dict[tuple[int, int], str]]:
    """Returns the colour of each cell of each panel."""
    panels = []
    for group in parse_svg(figure.svg).iter(f"{SVG}g"):
        found: dict[tuple[int, int], str] = {}
        for path in group.findall(f"{SVG}path"):
            if path.find(f"{SVG}title") is None:
                continue
            for column, row, size in re.findall(r"M(\d+) (\d+)h(\d+)", path.get("d") or ""):
                for j in range(int(column), int(column) + int(size)):
                    found[int(row), j] = path.get("fill") or ""
        if found:
            panels.append(found)
    return panels


def test_tokens_label_queries_and_keys_in_order() -> None:
    figure = run(weights=softmax(1, 1, 12, 12)).figure(tokens=WORDS)
    assert labels(figure) == WORDS + WORDS
    assert {"softmax, stochastic weights", "head 0", "query", "key", "weight"} <= set(words(figure))


def test_key_tokens_label_the_keys_alone() -> None:
    drawn = run(weights=softmax(1, 1, 2, 3))
    assert labels(drawn.figure(tokens=["a", "b"])) == ["a", "b", "0", "1", "2"]
    assert labels(drawn.figure(key_tokens=["x", "y", "z"])) == ["0", "1", "x", "y", "z"]
    assert labels(drawn.figure(tokens=["a", "b"], key_tokens=["x", "y", "z"])) == [*"abxyz"]


def test_outer_panels_of_a_grid_have_labels() -> None:
    """Twelve heads in three rows of four: rows are labelled three times, columns four times."""
    figure = run(weights=softmax(1, 12, 5, 5)).figure(tokens=[*"abcde"])
    assert len(panel_cells(figure.svg)) == 12
    assert sorted(labels(figure)) == sorted(7 * "abcde")
    assert [w for w in words(figure) if w.startswith("head ")] == [f"head {n}" for n in range(12)]


@pytest.mark.parametrize("as_lists", [True, False])
def test_batch_selects_the_sequence_and_its_tokens(as_lists: bool) -> None:
    weights = softmax(3, 2, 4, 4)
    tokens: Any = [[*"abcd"], [*"efgh"], [*"ijkl"]] if as_lists else [*"ijkl"]
    figure = run(weights=weights).figure(tokens=tokens, batch=2)
    assert set(labels(figure)) == set("ijkl")
    assert "Only sequence 2 of 3 is shown." in figure.caption
    alone = run(weights=weights[2:]).figure(tokens=[*"ijkl"])
    assert panel_cells(figure.svg) == panel_cells(alone.svg)


def test_batch_of_weights_without_heads_selects_one_matrix() -> None:
    weights = softmax(3, 4, 4)
    figure = run(weights=weights).figure(batch=1)
    assert panel_cells(figure.svg) == panel_cells(run(weights=weights[1]).figure().svg)


def test_heads_are_chosen_in_order_and_the_others_are_named() -> None:
    weights = softmax(1, 20, 3, 3)
    figure = run(weights=weights).figure(heads=[7, 2])
    assert [w for w in words(figure) if w.startswith("head ")] == ["head 7", "head 2"]
    assert "18 of 20 heads are left out." in figure.caption
    own = run(weights=weights[:, [7, 2]]).figure()
    assert panel_cells(figure.svg) == panel_cells(own.svg)
    figure = run(weights=weights).figure()
    assert len(panel_cells(figure.svg)) == 16
    assert "Heads 16 to 19 of 20 are left out." in figure.caption
    assert len(panel_cells(run(weights=weights).figure(heads=range(20)).svg)) == 20


def test_shared_scale_gives_equal_numbers_equal_colours() -> None:
    first, second = np.array([[0.1, 0.9], [0.2, 0.8]]), np.array([[0.1, 0.2], [0.2, 0.1]])
    drawn = run(weights=np.stack([first, second])[None])
    one, other = panel_fills(drawn.figure())
    assert one[0, 0] == other[0, 0] == other[1, 1]
    assert one[1, 0] == other[0, 1]
    one, other = panel_fills(drawn.figure(shared_scale=False))
    assert one[0, 0] != other[0, 0]
    assert one[0, 1] == other[0, 1] == LIGHT.shade(LEVELS)
    assert words(drawn.figure()).count("0.9") == 1
    assert {"0.9", "0.2"} <= set(words(drawn.figure(shared_scale=False)))


def test_signed_weights_have_two_colours_around_0() -> None:
    figure = run(weights=np.array([[0.5, -0.5], [0.0, -0.1]])).figure()
    (fills,) = panel_fills(figure)
    assert fills == {
        (0, 0): LIGHT.shade(LEVELS), (0, 1): LIGHT.shade(-LEVELS),
        (1, 1): LIGHT.shade(Scale(-0.5, 0.5, True).shade(-0.1)),
    }  # fmt: skip
    assert {"0.5", "0", "−0.5"} <= set(words(figure))
    assert "Negative weights are orange." in figure.caption


def test_rows_are_labelled_with_their_own_tokens() -> None:
    weights, output = softmax(1, 1, 3, 12), np.zeros((1, 1, 12, 2))
    drawn = run({"rows": [4, 0, 11]}, weights=weights, output=output)
    assert labels(drawn.figure(tokens=WORDS)) == [WORDS[4], WORDS[0], WORDS[11], *WORDS]
    assert labels(drawn.figure())[:3] == ["4", "0", "11"]
    with pytest.raises(ValueError, match=r"got 11 tokens, expected L=12"):
        drawn.figure(tokens=WORDS[:11])
    without_output = run({"rows": [4, 0, 11]}, weights=weights)
    with pytest.raises(ValueError, match=r"too few tokens for row 11: got 11"):
        without_output.figure(tokens=WORDS[:11])


def test_top_k_has_the_tokens_of_all_keys() -> None:
    weights, indices = np.full((2, 1), 0.5), np.array([[1], [0]])
    drawn = run({"top_k": 1}, weights=weights, indices=indices)
    assert labels(drawn.figure(tokens=["a", "b"])) == [*"abab"]
    figure = drawn.figure(tokens=["a", "b"], key_tokens=[*"xyz"])
    assert labels(figure) == [*"abxyz"]
    assert panel_cells(figure.svg) == [{(0, 1): 0.5, (1, 0): 0.5}]
    with pytest.raises(ValueError, match=r"key_tokens has too few tokens: got 1"):
        drawn.figure(key_tokens=["x"])


def test_statistics_have_tokens_and_a_row_for_each_head() -> None:
    figure = run("stats", **statistics(softmax(2, 3, 4, 4))).figure(tokens=[*"abcd"], batch=1)
    assert len(panel_cells(figure.svg)) == 4
    assert labels(figure).count("a") == 4
    assert {"entropy, nats", "received by a key", "query", "key", "head"} <= set(words(figure))


def test_bins_of_a_pool_refuse_tokens() -> None:
    drawn = run({"pool": 4}, weights=softmax(1, 1, 4, 4))
    assert labels(drawn.figure()) == [*"0123", *"0123"]
    with pytest.raises(ValueError, match=r"tokens cannot label the form \{'pool': 4\}"):
        drawn.figure(tokens=[*"abcd"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": [*"ab"]}, "tokens has the wrong length: got 2 tokens, expected L=3"),
        ({"key_tokens": [*"abc"]}, "key_tokens has the wrong length: got 3 tokens, expected S=4"),
        ({"tokens": "abc"}, "tokens is one string: got 'abc', expected a list of strings"),
        ({"tokens": ["a", 1, "b"]}, "tokens[1] is no string: got 1"),
        ({"tokens": [[*"abc"]]}, "tokens does not fit the batch: got 1 items"),
        ({"batch": 2}, "batch is out of range: got 2, expected 0 to 1 (B=2)"),
        ({"batch": -1}, "batch is out of range: got -1"),
        ({"heads": [5]}, "heads has a head that does not exist: got 5, expected 0 to 4 (H=5)"),
        ({"heads": []}, "heads is empty"),
    ],
)
@pytest.mark.parametrize("form", ["full", "stats"])
def test_errors_name_the_argument(form: str, arguments: Mapping[str, Any], message: str) -> None:
    weights = softmax(2, 5, 3, 4)
    drawn = run(form, **(statistics(weights) if form == "stats" else {"weights": weights}))
    with pytest.raises(ValueError, match=re.escape(message)):
        drawn.figure(**arguments)


def test_run_without_weights_or_heads_says_so() -> None:
    with pytest.raises(ValueError, match="no matrix of weights to draw: got the outputs output"):
        run("none", output=np.zeros((2, 3))).figure()
    with pytest.raises(ValueError, match="have no heads"):
        run(weights=softmax(3, 3)).figure(heads=[0])


@pytest.mark.parametrize(
    ("token", "label"),
    [
        ("word", "word"), (" the", "␣the"), ("New York", "New York"), ("  ", "␣␣"), ("", '""'),
        ("\n", "↵"), ("a\tb", "a⇥b"), ("\x00", r"\x00"), ("\u200b", r"\u200b"), ("\xa0x", "␣x"),
        ("\ud800", r"\ud800"), ("<b>&\"'", "<b>&\"'"), ("שלום", "שלום"), ("日本", "日本"),
        ("\u0645\u06cc\u200c\u062e", "\u0645\u06cc\u200c\u062e"),
    ],
)  # fmt: skip
def test_every_token_is_visible_and_valid_xml(token: str, label: str) -> None:
    assert visible(token) == label
    figure = run(weights=softmax(2, 2)).figure(tokens=[token, "x"], title=f"of {token}")
    assert labels(figure) == [label, "x"] * 2


@pytest.mark.parametrize(
    ("token", "label"),
    [
        ("fourteen chars", "fourteen chars"), ("fifteen letters", "fifteen lette…"),
        ("日本語のとても長い", "日本語のとて…"), ("e\u0301" * 20, "e\u0301" * 13 + "…"),
    ],
)  # fmt: skip
def test_long_tokens_are_shortened_and_whole_in_the_tooltip(token: str, label: str) -> None:
    assert shorten(token) == label
    figure = run(weights=softmax(2, 2)).figure(tokens=[token, "x"])
    tooltips = [e.findtext(f"{SVG}title") for e in parse_svg(figure.svg).iter(f"{SVG}text")]
    assert labels(figure) == [label, "x"] * 2
    assert tooltips.count(token) == (2 if label != token else 0)


@pytest.mark.parametrize(("pitch", "numbers", "tokens"), [(12, 1, 1), (6, 2, 2), (4, 5, 3)])
def test_labels_are_thinned_out_if_rows_are_small(pitch: float, numbers: int, tokens: int) -> None:
    """Labels of 11 pixels: numbers keep round steps."""
    assert Axis.of_numbers("", range(40)).shown(pitch, 11).step == numbers
    assert Axis.of_tokens("", ["x"] * 40).shown(pitch, 11).step == tokens


def test_all_labels_are_inside_the_picture() -> None:
    """The widths are estimates for a font of fixed width: 0.61 of its size for each letter."""
    tokens = ["W" * 14, *"bcdefghijklmno"]
    figure = run(weights=softmax(1, 3, 15, 15)).figure(tokens=tokens)
    root = parse_svg(figure.svg)
    for text in root.iter(f"{SVG}text"):
        place = re.fullmatch(
            r"translate\((\S+) (\S+)\)(?: rotate\(-(\d+)\))?", text.get("transform") or ""
        )
        assert place is not None
        x, y, angle = float(place[1]), float(place[2]), np.radians(float(place[3] or 0))
        length = 0.61 * float(text.get("font-size") or 0) * len("".join(text.itertext()))
        part = {"end": -1.0, "middle": 0.5}.get(text.get("text-anchor") or "", 1.0)
        for end in (x, x + part * length * np.cos(angle)):
            assert 0 <= end <= float(root.get("width") or 0)
        for end in (y, y - part * length * np.sin(angle)):
            assert 0 <= end <= float(root.get("height") or 0)


def test_a_large_matrix_with_tokens_is_pooled_and_keeps_the_first_token_of_a_cell() -> None:
    tokens = [f"t{n}" for n in range(320)]
    figure = run(weights=softmax(320, 320)).figure(tokens=tokens)
    assert "A cell is 2 queries by 2 keys" in figure.caption
    shown = labels(figure)
    assert shown[0] == "t0"
    assert all(int(text[1:]) % 2 == 0 for text in shown)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_numbers_contrast_with_every_shade(palette: Any) -> None:
    """Contrast is at least 4.5, which WCAG 2.2 requires for text."""
    for shade in range(-LEVELS, LEVELS + 1):
        text, behind = (luminance(c) for c in (palette.text_on(shade), palette.shade(shade)))
        assert (max(text, behind) + 0.05) / (min(text, behind) + 0.05) >= 4.5


@pytest.mark.parametrize("high", [1.0, 0.987, 3e-7, 12345.0])
@pytest.mark.parametrize("low", [0, -1])
@pytest.mark.parametrize("is_root", [True, False])
def test_ticks_have_the_ends_and_room(high: float, low: int, is_root: bool) -> None:
    scale = Scale(low * high, high, is_root)
    ticks = scale.ticks(0.08)
    assert {low * high, 0, high} <= set(ticks)
    assert len(ticks) >= 4
    assert np.diff([scale.share(tick) for tick in ticks]).min() >= 0.08


def test_svg_is_the_same_each_time_and_follows_light_and_dark() -> None:
    drawn = run(weights=softmax(1, 2, 3, 3))
    one, other = drawn.figure(tokens=[*"abc"]), drawn.figure(tokens=[*"abc"])
    assert one.svg == other.svg
    assert one == other
    assert "prefers-color-scheme:dark" in one.svg
    assert "<script" not in one.svg
    assert one._repr_svg_() == one.svg
    assert one._repr_html_().startswith("<img ")
    with pytest.raises(AttributeError):
        one.svg = ""  # type: ignore[misc]


def test_title_is_wrapped_and_may_be_empty() -> None:
    drawn = run(weights=softmax(2, 2))
    title = "A long sentence about these weights. " * 8
    figure = drawn.figure(title=title)
    assert parse_svg(figure.svg).findtext(f"{SVG}title") == title
    lines = [w for w in words(figure) if w in title and w != "weight"]
    assert " ".join(lines) == title.strip()
    assert len(lines) > 1
    untitled = drawn.figure(title="")
    assert parse_svg(untitled.svg).findtext(f"{SVG}title") == "Attention weights of softmax"
    assert "softmax, stochastic weights" not in words(untitled)


def pdf_texts(data: bytes) -> list[str]:
    """Returns the texts of a PDF: the parts between its kernings, in one or two bytes a letter."""
    streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", data, re.DOTALL)
    content = b"".join(zlib.decompress(s) for s in streams if s[:1] == b"x")
    shown = re.findall(rb"\[([^]]*)\]\s*TJ|(\([^)]*\))\s*Tj", content)
    parts = [re.findall(rb"\(([^)]*)\)", array or single) for array, single in shown]
    return [b"".join(found).replace(b"\0", b"").decode("latin1") for found in parts]


@pytest.mark.slow
@pytest.mark.representative
def test_figure_is_saved_as_svg_pdf_and_png(tmp_path: Path) -> None:
    from matplotlib import image

    drawn = run(weights=softmax(1, 1, 12, 12))
    figure = drawn.figure(tmp_path / "a.svg", tokens=["$x_1$", *WORDS[1:]])
    assert (tmp_path / "a.svg").read_text(encoding="utf-8") == figure.svg
    figure.save(tmp_path / "a.PDF")
    pdf = (tmp_path / "a.PDF").read_bytes()
    assert pdf.startswith(b"%PDF-")
    assert b"/Type3" not in pdf
    assert b"/Subtype /Image" not in pdf
    texts = pdf_texts(pdf)
    assert [t for t in texts if t in WORDS] == [*WORDS[1:], *WORDS[1:]]
    assert texts.count("$x_1$") == 2  # no formula
    figure.save(str(tmp_path / "b.pdf"))
    assert (tmp_path / "b.pdf").read_bytes() == pdf
    figure.save(tmp_path / "a.png")
    pixels = image.imread(tmp_path / "a.png")
    root = parse_svg(figure.svg)
    height, width = int(root.get("height") or 0), int(root.get("width") or 0)
    assert pixels.shape[:2] == (3 * height, 3 * width)
    assert pixels[0, 0, :3].tolist() == [1, 1, 1]
    # the first cell has its colour
    (place,) = re.findall(r"translate\((\S+) (\S+)\) scale\((\S+) (\S+)\)", figure.svg)[:1]
    x, y, cell, _ = map(float, place)
    colour = panel_fills(figure)[0][0, 0]
    middle = pixels[int(3 * (y + cell / 2)), int(3 * (x + cell / 2)), :3]
    assert np.round(255 * middle).tolist() == [int(colour[n : n + 2], 16) for n in (1, 3, 5)]


def test_unknown_suffix_is_refused(tmp_path: Path) -> None:
    message = r"path has an unknown suffix: got '.*fig\.gif', expected \.svg, \.pdf or \.png"
    with pytest.raises(ValueError, match=message):
        run(weights=softmax(2, 2)).figure(tmp_path / "fig.gif")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", ["pdf", "png"])
def test_without_matplotlib_the_error_names_the_command_to_install_it(
    suffix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figure = run(weights=softmax(2, 2)).figure()
    monkeypatch.delitem(sys.modules, "qkv.client.figures.plot", raising=False)
    for name in ["matplotlib", *(n for n in sys.modules if n.startswith("matplotlib."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[plot\]'"):
        figure.save(tmp_path / f"fig.{suffix}")
    figure.save(tmp_path / "fig.svg")


def test_characters_that_no_font_has_give_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from matplotlib.font_manager import fontManager

    only = [entry for entry in fontManager.ttflist if entry.name.startswith("DejaVu")]
    monkeypatch.setattr(fontManager, "ttflist", only)
    drawn = run(weights=softmax(2, 2))
    with pytest.warns(UserWarning, match=r"no installed font has the characters 日本"):
        drawn.figure(tmp_path / "fig.png", tokens=["日本", "x"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn.figure(tmp_path / "fig.png", tokens=["שלום", "x"])


def test_figure_of_a_service(url: str) -> None:
    x = np.random.default_rng(0).normal(size=(1, 2, 4, 8)).astype(np.float32)
    forms: Sequence[Any] = ("full", "stats", {"rows": [3, 0]}, {"top_k": 2})
    with Client(url) as client:
        for form in forms:
            found = client.attend("softmax", query=x, key=x, value=x, causal=True, weights=form)
            assert {*"abcd"} <= set(labels(found.figure(tokens=[*"abcd"])))
