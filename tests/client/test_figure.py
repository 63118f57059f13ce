"""Tests of `Run.figure`: tokens on the axes, colour scales, chosen heads, files and errors."""

from __future__ import annotations

import re
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib import image
from matplotlib.colors import same_color
from matplotlib.figure import Figure
from variant_pictures import inputs

from qkv import Client, QkvError, Run
from qkv.attention import catalogue
from qkv.client.tokens import shorten, visible
from support.pictures import colours, column_labels, matrix, norm, panels, row_labels, titles

TIMING: Final = {"compute_ms": 0.1234, "device": "cpu", "backend": "explicit"}
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


def bars(figure: Figure) -> list[Any]:
    """Returns the axes of the colour bars."""
    return [ax for ax in figure.axes if not ax.images]


def test_tokens_label_queries_and_keys_in_order() -> None:
    figure = run(weights=softmax(1, 1, 12, 12)).figure(tokens=WORDS)
    (ax,) = panels(figure)
    assert row_labels(ax) == column_labels(ax) == WORDS
    assert (ax.get_ylabel(), ax.get_xlabel(), ax.get_title()) == ("query", "key", "head 0")
    assert figure.get_suptitle() == "softmax, stochastic weights"
    assert [bar.get_ylabel() for bar in bars(figure)] == ["weight"]


def test_every_cell_shows_a_weight_and_a_weight_of_0_is_empty() -> None:
    weights = softmax(2, 3, 5, 7)
    weights[0, 1, 2, 3] = 0
    figure = run(weights=weights).figure()
    for n, plane in enumerate(weights[0]):
        assert (matrix(panels(figure)[n]).filled(0) == plane).all()
        assert (matrix(panels(figure)[n]).mask == (plane == 0)).all()
    assert colours(panels(figure)[1])[2, 3, 3] == 0  # the opacity


def test_key_tokens_label_the_keys_alone() -> None:
    drawn = run(weights=softmax(1, 1, 2, 3))
    keys = [*"xyz"]
    (ax,) = panels(drawn.figure(tokens=["a", "b"], key_tokens=keys))
    assert (row_labels(ax), column_labels(ax)) == (["a", "b"], keys)
    (ax,) = panels(drawn.figure(key_tokens=keys))
    assert column_labels(ax) == keys
    assert not set(row_labels(ax)) & set("abxyz")
    assert column_labels(panels(drawn.figure(tokens=["a", "b"]))[0])[:1] != ["a"]


@pytest.mark.parametrize(("heads", "columns"), [(12, 4), (5, 3), (8, 4), (24, 8), (26, 6)])
def test_outer_panels_of_a_grid_have_labels(heads: int, columns: int) -> None:
    drawn = run(weights=softmax(1, heads, 5, 5))
    figure = drawn.figure(tokens=[*"abcde"], heads=range(heads))
    assert titles(figure) == [f"head {n}" for n in range(heads)]
    for n, ax in enumerate(panels(figure)):
        assert row_labels(ax) == ([*"abcde"] if n % columns == 0 else [])
        assert column_labels(ax) == ([*"abcde"] if n + columns >= heads else [])


@pytest.mark.parametrize("as_lists", [True, False])
def test_batch_selects_the_sequence_and_its_tokens(as_lists: bool) -> None:
    weights = softmax(3, 2, 4, 4)
    tokens: Any = [[*"abcd"], [*"efgh"], [*"ijkl"]] if as_lists else [*"ijkl"]
    figure = run(weights=weights).figure(tokens=tokens, batch=2)
    assert row_labels(panels(figure)[0]) == [*"ijkl"]
    assert figure.get_suptitle() == "softmax, stochastic weights, sequence 2 of 3"
    assert (matrix(panels(figure)[1]) == weights[2, 1]).all()


def test_batch_of_weights_without_heads_selects_one_matrix() -> None:
    weights = softmax(3, 4, 4)
    figure = run(weights=weights).figure(batch=1)
    assert titles(figure) == [""]
    assert (matrix(panels(figure)[0]) == weights[1]).all()


def test_heads_are_chosen_in_order_and_the_title_has_their_number() -> None:
    weights = softmax(1, 20, 3, 3)
    figure = run(weights=weights).figure(heads=[7, 2])
    assert titles(figure) == ["head 7", "head 2"]
    assert figure.get_suptitle() == "softmax, stochastic weights, 2 of 20 heads"
    assert (matrix(panels(figure)[1]) == weights[0, 2]).all()
    figure = run(weights=weights).figure()
    assert titles(figure) == [f"head {n}" for n in range(16)]
    assert "16 of 20 heads" in figure.get_suptitle()


def test_shared_scale_gives_equal_numbers_equal_colours() -> None:
    first, second = np.array([[0.1, 0.9], [0.2, 0.8]]), np.array([[0.1, 0.2], [0.2, 0.1]])
    drawn = run(weights=np.stack([first, second])[None])
    figure = drawn.figure()
    one, other = map(colours, panels(figure))
    assert same_color(one[0, 0], other[0, 0])
    assert same_color(one[1, 0], other[0, 1])
    assert len(bars(figure)) == 1
    figure = drawn.figure(shared_scale=False)
    one, other = map(colours, panels(figure))
    assert not same_color(one[0, 0], other[0, 0])
    assert same_color(one[0, 1], other[0, 1])
    assert len(bars(figure)) == 2


def test_signed_weights_have_two_colours_around_0() -> None:
    figure = run(weights=np.array([[0.5, -0.25], [0.0, -0.1]])).figure()
    scale = norm(panels(figure)[0])
    assert (scale.vmin, scale.vmax) == (-0.5, 0.5)
    assert scale(0.0) == 0.5
    assert 1 - scale(0.1) == pytest.approx(scale(-0.1))
    found = colours(panels(figure)[0])
    assert found[0, 0, 2] > found[0, 0, 0]  # blue
    assert found[0, 1, 0] > found[0, 1, 2]  # red


def test_colours_follow_the_root_of_a_weight_and_the_map_of_rcparams() -> None:
    with mpl.rc_context({"image.cmap": "magma"}):
        (ax,) = panels(run(weights=np.array([[0.25, 1.0]])).figure())
    assert ax.images[0].get_cmap().name == "magma"
    scale = norm(ax)
    assert (scale.vmin, scale.vmax) == (0, 1)
    assert scale(0.25) == pytest.approx(0.5)


def test_fonts_and_background_are_those_of_rcparams() -> None:
    drawn = run(weights=softmax(1, 1, 12, 12))
    small = drawn.figure(tokens=WORDS)
    assert same_color(small.get_facecolor(), "white")
    with mpl.rc_context({"font.size": 20, "figure.facecolor": "lightgrey"}):
        large = drawn.figure(tokens=WORDS)
        assert same_color(large.get_facecolor(), "lightgrey")
        assert large.axes[0].get_yticklabels()[0].get_fontsize() == 20
    assert len(row_labels(large.axes[0])) < len(row_labels(small.axes[0]))  # as many as fit


def test_one_head_is_drawn_into_given_axes() -> None:
    page = Figure(layout="constrained")
    left, right = page.subplots(1, 2)
    drawn = run(weights=softmax(1, 3, 4, 4))
    assert drawn.figure(ax=right, heads=[2], title="mine") is page
    assert not left.images
    assert right.get_title() == "mine"
    assert (matrix(right) == drawn.weights[0, 2]).all()
    drawn.figure(ax=left, heads=[2])
    assert left.get_title() == "softmax, stochastic weights, head 2 of 3"
    with pytest.raises(ValueError, match="ax holds one panel: got 3 panels"):
        drawn.figure(ax=left)


def test_rows_are_labelled_with_their_own_tokens() -> None:
    weights, output = softmax(1, 1, 3, 12), np.zeros((1, 1, 12, 2))
    drawn = run({"rows": [4, 0, 11]}, weights=weights, output=output)
    (ax,) = panels(drawn.figure(tokens=WORDS))
    assert row_labels(ax) == [WORDS[4], WORDS[0], WORDS[11]]
    assert column_labels(ax) == WORDS
    assert row_labels(panels(drawn.figure())[0]) == ["4", "0", "11"]
    with pytest.raises(ValueError, match=r"got 11 tokens, expected L=12"):
        drawn.figure(tokens=WORDS[:11])
    without_output = run({"rows": [4, 0, 11]}, weights=weights)
    with pytest.raises(ValueError, match=r"too few tokens for row 11: got 11"):
        without_output.figure(tokens=WORDS[:11])


def test_top_k_has_the_tokens_of_all_keys() -> None:
    weights, indices = np.full((2, 1), 0.5), np.array([[1], [0]])
    drawn = run({"top_k": 1}, weights=weights, indices=indices)
    assert column_labels(panels(drawn.figure(tokens=["a", "b"]))[0]) == ["a", "b"]
    figure = drawn.figure(tokens=["a", "b"], key_tokens=[*"xyz"])
    assert column_labels(panels(figure)[0]) == [*"xyz"]
    assert matrix(panels(figure)[0]).filled(0).tolist() == [[0, 0.5, 0], [0.5, 0, 0]]
    with pytest.raises(ValueError, match=r"key_tokens has too few tokens: got 1"):
        drawn.figure(key_tokens=["x"])


def test_row_of_top_k_that_sees_no_key_is_empty() -> None:
    weights = np.array([[0.75, 0.25], [0.0, 0.0]], np.float32)
    indices = np.array([[2, 0], [-1, -1]])
    figure = run({"top_k": 2}, weights=weights, indices=indices).figure()
    assert matrix(panels(figure)[0]).filled(0).tolist() == [[0.25, 0.0, 0.75], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("shape", [(1024, 2048), (257, 256), (3, 5000)])
def test_large_matrix_is_drawn_as_sums_over_keys_and_means_over_queries(
    shape: tuple[int, int],
) -> None:
    weights = softmax(*shape).astype(np.float64)
    figure = run(weights=weights).figure()
    found = matrix(panels(figure)[0])
    assert max(found.shape) <= 256
    tall, wide = (-(-size // 256) for size in shape)
    assert found[0, 0] == pytest.approx(weights[:tall, :wide].sum(1).mean())
    assert np.allclose(found.sum(1), 1)
    (ax,) = panels(figure)
    assert (ax.get_xlim(), ax.get_ylim()) == ((-0.5, shape[1] - 0.5), (shape[0] - 0.5, -0.5))


def test_large_top_k_is_drawn_without_its_whole_matrix() -> None:
    """The whole matrix would take 4 GiB."""
    indices = np.arange(32768)[:, None]
    drawn = run({"top_k": 1}, weights=np.ones((32768, 1), "f4"), indices=indices)
    found = matrix(panels(drawn.figure())[0])
    assert (found.filled(0) == np.eye(256)).all()


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_statistics_have_a_panel_each_and_a_row_for_each_head(lead: tuple[int, ...]) -> None:
    found = statistics(softmax(*lead, 4, 4))
    figure = run("stats", **found).figure(tokens=[*"abcd"], batch=min(1, len(lead)))
    assert titles(figure) == [
        "entropy, nats", "largest weight", "effective keys", "received by a key",
    ]  # fmt: skip
    chosen = found["entropy"][1] if lead else found["entropy"]
    shown = matrix(panels(figure)[0])
    assert np.array_equal(shown.filled(0), np.atleast_2d(chosen).astype(np.float64))
    assert [ax.get_xlabel() for ax in panels(figure)] == ["query"] * 3 + ["key"]
    assert all(column_labels(ax) == [*"abcd"] for ax in panels(figure))
    assert row_labels(panels(figure)[0]) == (["0", "1", "2"] if len(lead) > 1 else [])
    assert len(bars(figure)) == 4


def test_bins_of_a_pool_refuse_tokens() -> None:
    drawn = run({"pool": 4}, weights=softmax(1, 1, 4, 4))
    (ax,) = panels(drawn.figure())
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("bin of queries", "bin of keys")
    with pytest.raises(ValueError, match=r"tokens cannot label the form \{'pool': 4\}"):
        drawn.figure(tokens=[*"abcd"])


def test_numbers_that_are_not_finite_are_empty() -> None:
    figure = run(weights=np.array([[np.nan, 1.0], [np.inf, 0.5]], np.float64)).figure()
    (ax,) = panels(figure)
    assert colours(ax)[:, 0, 3].tolist() == [0, 0]
    assert norm(ax).vmax == 1


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
        ("\n", "↵"), ("a\tb", "a⇥b"), ("\x00", r"\x00"), ("\u200b", r"\u200b"), ("x ", "x␣"),
        ("\xa0x", r"\xa0x"), ("\ud800", r"\ud800"), ("$x_1$", "$x_1$"), ("שלום", "שלום"),
        ("\u0645\u06cc\u200c\u062e", "\u0645\u06cc\u200c\u062e"),
    ],
)  # fmt: skip
def test_every_token_is_visible(token: str, label: str) -> None:
    assert visible(token) == label
    figure = run(weights=softmax(2, 2)).figure(tokens=[token, "x"])
    (ax,) = panels(figure)
    assert row_labels(ax) == column_labels(ax) == [label, "x"]
    assert not any(text.get_parse_math() for text in ax.get_xticklabels())


def test_long_tokens_are_shortened() -> None:
    assert shorten("fourteen chars") == "fourteen chars"
    assert shorten("fifteen letters") == "fifteen lette…"
    assert shorten("日本語のとても長い") == "日本語のとて…"
    figure = run(weights=softmax(2, 2)).figure(tokens=["fifteen letters", "x"])
    assert row_labels(panels(figure)[0]) == ["fifteen lette…", "x"]


@pytest.mark.parametrize(("heads", "length"), [(1, 60), (1, 2), (9, 24), (16, 40), (2, 300)])
def test_labels_are_inside_the_picture_and_none_covers_another(heads: int, length: int) -> None:
    tokens = ["internationalisation" if n % 3 else f"t{n}" for n in range(length)]
    figure = run(weights=softmax(1, heads, length, length)).figure(tokens=tokens)
    figure.draw_without_rendering()
    whole = figure.bbox
    for ax in figure.axes:
        for labels in (ax.get_xticklabels(), ax.get_yticklabels()):
            boxes = [label.get_window_extent() for label in labels if label.get_text()]
            for box in boxes:
                assert 0 <= box.x0 <= box.x1 <= whole.width
                assert 0 <= box.y0 <= box.y1 <= whole.height
            if ax.images:
                pairs = pairwise(boxes)
                assert not any(one.overlaps(other) for one, other in pairs)


def test_title_may_be_given_or_left_out() -> None:
    drawn = run(weights=softmax(2, 2))
    assert drawn.figure(title="of $x").get_suptitle() == "of $x"
    assert drawn.figure(title="").get_suptitle() == ""


def pdf_texts(data: bytes) -> list[str]:
    """Returns the texts of a PDF: the parts between its kernings, in one or two bytes a letter."""
    streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", data, re.DOTALL)
    content = b"".join(zlib.decompress(s) for s in streams if s[:1] == b"x")
    shown = re.findall(rb"\[([^]]*)\]\s*TJ|(\([^)]*\))\s*Tj", content)
    parts = [re.findall(rb"\(([^)]*)\)", array or single) for array, single in shown]
    return [b"".join(found).replace(b"\0", b"").decode("latin1") for found in parts]


@pytest.mark.slow
@pytest.mark.representative
def test_figure_is_saved_with_savefig(tmp_path: Path) -> None:
    figure = run(weights=softmax(1, 1, 12, 12)).figure(tokens=["$x_1$", *WORDS[1:]])
    figure.savefig(tmp_path / "a.pdf")
    pdf = (tmp_path / "a.pdf").read_bytes()
    assert b"/Type3" not in pdf
    assert b"/TrueType" in pdf or b"/CIDFontType2" in pdf
    texts = pdf_texts(pdf)
    assert texts.count("$x_1$") == 2  # no formula
    assert set(WORDS[1:]) <= set(texts)
    figure.savefig(tmp_path / "a.png")
    assert image.imread(tmp_path / "a.png")[0, 0].tolist() == [1, 1, 1, 1]
    figure.savefig(tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text(encoding="utf-8")


PROGRAM: Final = """
import sys
sys.modules["matplotlib"] = None
import numpy as np
import qkv
weights = np.full((2, 2), 0.5)
timing = {"compute_ms": 1.0, "device": "cpu", "backend": "explicit"}
run = qkv.Run("softmax", {"weights": weights}, timing)
for draw in (run.figure, lambda: qkv.head_map(["a"], [[1.0]])):
    try:
        draw()
    except ModuleNotFoundError as error:
        print(error)
print(run._repr_html_())
"""


def test_without_matplotlib_an_error_names_the_extra_and_a_notebook_shows_a_table() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    first, second, *table = done.stdout.splitlines()
    assert first == second
    assert first.startswith("a figure needs matplotlib: run `pip install '.[plot]'`")
    assert table[0].startswith("<table")
    assert "<img" not in done.stdout


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_torch_tensors_are_drawn(dtype: torch.dtype) -> None:
    figure = run(weights=torch.full((1, 2, 3, 3), 0.25, dtype=dtype)).figure()
    assert len(panels(figure)) == 2
    assert (matrix(panels(figure)[1]) == 0.25).all()


FORMS: Final[Sequence[Any]] = ("full", "stats", {"rows": [3, 0]}, {"top_k": 3}, {"pool": 4})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", catalogue.variants())
def test_weights_of_every_variant_and_form_are_drawn(url: str, name: str, form: Any) -> None:
    arrays: dict[str, Any] = inputs(catalogue.find(name))
    with Client(url) as client:
        if name == "linear_layer" and "rows" in form:
            with pytest.raises(QkvError, match="each item is one row"):
                client.attend(name, weights=form, **arrays)
            return
        found = client.attend(name, weights=form, **arrays)
    assert found.form == form
    figure = found.figure()
    assert len(panels(figure)) == (4 if form == "stats" else 1)
    if form == "full":
        weights = found.weights.reshape(found.weights.shape[-2:])
        assert (matrix(panels(figure)[0]).filled(0) == weights).all()
