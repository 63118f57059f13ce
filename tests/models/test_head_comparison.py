"""Tests of comparisons on captured calls: figures, padding, problems, limits, resuming, memory."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from matplotlib.figure import Figure

from qkv import Client
from qkv.errors import InvalidContent, NotFound
from qkv.models import call_pieces
from qkv.models.calls import Calls
from qkv.models.head_comparison import HeadComparison
from qkv.models.head_row import FIGURES, HeadRow
from qkv.models.masks import parts_of, whole_of
from qkv.models.model_call import Missed
from support.attention_calls import (
    calls_of,
    head_figures,
    make_call,
    padding_mask,
    weights_of_head,
)
from support.peak_memory import needs_proc, peaks
from support.pictures import matrix, panels, row_labels, titles
from support.service import Server

EPS = torch.finfo(torch.float64).eps
ROUNDING = 1000 * EPS  # a few hundred operations


def compare(calls: Calls, *variants: Any, **options: Any) -> HeadComparison:
    """Returns the comparison without a progress bar."""
    return calls.compare(list(variants) or ["linear"], progress=False, **options)


def numbers(row: HeadRow) -> dict[str, float | None]:
    """Returns the figures of a row that rounding does not order."""
    found = asdict(row)
    return {name: found[name] for name in FIGURES if name != "rank_correlation"}


def assert_same_rows(one: HeadComparison, other: HeadComparison) -> None:
    """Checks that all rows have the same names and, to within rounding, the same figures."""
    assert len(one.rows) == len(other.rows)
    for a, b in zip(one.rows, other.rows, strict=True):
        assert (a.layer, a.head, a.variant, a.queries) == (b.layer, b.head, b.variant, b.queries)
        expected = numbers(b)
        undefined = {name: None for name, x in expected.items() if x is None}
        assert {name: x for name, x in numbers(a).items() if x is None} == undefined
        for name in expected.keys() - undefined.keys():
            assert getattr(a, name) == pytest.approx(expected[name], rel=ROUNDING, abs=ROUNDING)


@pytest.mark.parametrize("causal", [False, True])
def test_figures_are_those_of_each_head_by_definition(causal: bool) -> None:
    call = make_call(H=4, G=2, L=6, causal=causal)
    (visible,) = torch.ones(1, 6, 6, dtype=torch.bool)
    visible = visible.tril() if causal else visible
    found = compare(calls_of(call)).rows
    for head, row in enumerate(found):
        query, key, value = call.query[0, head], call.key[0, head // 2], call.value[0, head // 2]
        a, b = (
            weights_of_head(name, query, key, visible, call.scale) for name in ("softmax", "linear")
        )
        expected = head_figures(a, b, value.numpy())
        assert (row.layer, row.head, row.variant) == ("layer.0", head, "linear")
        assert row.queries == 6
        assert numbers(row) == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_left_out(causal: bool, left: bool) -> None:
    lengths, S = [3, 7, 5, 3], 7
    mask = padding_mask(lengths, S, left=left)
    padded = make_call(B=4, G=1, L=S, mask=mask.tril() if causal else mask)
    with torch.no_grad():
        for n, length in enumerate(lengths):  # padding far from all other numbers
            hidden = slice(0, S - length) if left else slice(length, S)
            for x in (padded.query, padded.key, padded.value):
                x[n, :, hidden] = 1e6
    alone = []
    for n, length in enumerate(lengths):
        at = slice(S - length, S) if left else slice(0, length)
        rest = {
            k: getattr(padded, k)[n : n + 1, :, at] for k in ("query", "key", "value", "output")
        }
        alone.append(replace(padded, **rest, mask=None, causal=causal, items=(n,)))
    found = compare(calls_of(padded), "linear", "taylor")
    assert {row.queries for row in found.rows} == {sum(lengths)}
    assert_same_rows(found, compare(calls_of(*alone), "linear", "taylor"))


def test_calls_of_a_layer_are_averaged_by_their_numbers_of_queries() -> None:
    long, short = make_call(H=1, L=9), make_call(H=1, L=3)
    (a,), (b,), (both,) = (compare(calls_of(*c)).rows for c in ([long], [short], [long, short]))
    assert both.queries == 12
    for name, mean in numbers(both).items():
        each = [getattr(row, name) for row in (a, b)]
        expected = max(each) if name == "largest_error" else (9 * each[0] + 3 * each[1]) / 12
        assert mean == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.parametrize("masked", ["no", "per sequence", "per head", "per both"])
def test_pieces_of_any_size_have_the_same_figures(
    monkeypatch: pytest.MonkeyPatch, masked: str
) -> None:
    B, H = 3, 6
    shapes = {"no": None, "per sequence": (B, 1), "per head": (1, H), "per both": (B, H)}
    shape = shapes[masked]
    mask = None if shape is None else torch.randn(*shape, 5, 5, dtype=torch.float64)
    sinks = torch.randn(H, dtype=torch.float64)
    calls = calls_of(make_call(B=B, H=H, G=2, mask=mask, sinks=sinks))
    whole = compare(calls, "sigmoid", "softmax")
    for size in (1, 600, 2000):  # the real size is an eighth of the largest request
        monkeypatch.setattr(call_pieces, "_BYTES", size)
        assert_same_rows(compare(calls, "sigmoid", "softmax"), whole)
    assert all(row.relative_error == 0 for row in whole.rows if row.variant == "softmax")


@pytest.mark.parametrize("most", [1, 2, 3, 4, 6, 7, 8, 11, 24])
@pytest.mark.parametrize("H", [8, 6])
def test_pieces_have_every_head_once_and_no_key_head_in_part(
    monkeypatch: pytest.MonkeyPatch, most: int, H: int
) -> None:
    group = H // 2
    call = make_call(B=3, H=H, G=2, L=4)
    # the real limit is 2048 heads
    monkeypatch.setattr(call_pieces, "_HEADS", 2 * most)
    pieces = list(call_pieces.cut(call, whole_of(call), None, 2))
    assert [head for piece in pieces for head in piece.heads] == [*range(H)] * 3
    query = torch.cat([piece.tensors(frozenset())["query"] for piece in pieces], 1)
    assert torch.equal(query, call.query.flatten(0, 1)[None])
    for piece in pieces:
        queries, keys = (piece.tensors(frozenset())[name].shape[1] for name in ("query", "key"))
        assert queries <= most
        assert queries == group * keys or (queries < group and keys == 1)
    while len(pieces) < 3 * H:  # halves are such pieces too
        pieces = [half for piece in pieces for half in piece.halves() or [piece]]
    assert [head for piece in pieces for head in piece.heads] == [*range(H)] * 3


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_piece_holds_its_mask_and_its_heads_in_the_bytes_of_a_request(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    mask = torch.randn(*shape, 6, 6, dtype=torch.float64)  # 288 bytes, and 576 of each head
    call = make_call(B=2, H=4, L=6, mask=mask)
    (part,) = parts_of(call)

    def sizes(limit: int) -> list[int]:
        # the real limit is 32 MiB
        monkeypatch.setattr(call_pieces, "_BYTES", limit)
        pieces = call_pieces.cut(call, part, None, 2)
        return [sum(x.nbytes for x in p.tensors(frozenset()).values()) for p in pieces]

    assert max(sizes(2 * 288 + 2 * 576)) <= 2 * 288 + 2 * 576
    heads = 2 if shape[1] == 1 else 1
    assert max(sizes(288 + 2 * 576)) == 288 + heads * 576
    assert max(sizes(288)) == 288 + 576  # no smaller piece has less


def test_bias_of_a_model_is_a_problem_of_variants_without_a_mask() -> None:
    bias = torch.randn(1, 2, 5, 5, dtype=torch.float64)
    found = compare(calls_of(make_call(mask=bias), make_call("layer.1")), "linear", "sigmoid")
    by_place = {(row.layer, row.variant): row for row in found.rows}
    row = by_place["layer.0", "linear"]
    assert row.problem is not None
    assert "takes no mask" in row.problem
    assert all(getattr(row, name) is None for name in FIGURES)
    assert row.queries == 5
    for place in (("layer.0", "sigmoid"), ("layer.1", "linear")):
        assert by_place[place].problem is None
        assert by_place[place].relative_error is not None
    assert "linear has no figures in 2 heads: linear takes no mask" in found.table()


def test_baseline_has_the_scale_softcap_and_window_of_its_call() -> None:
    call = make_call(L=6, scale=0.3, softcap=2.0, causal=True, window=(2, None))
    calls = calls_of(call)
    (weights_HLS,) = call.weights()
    entropy_H = torch.special.entr(weights_HLS).sum(-1).mean(-1)
    for row in compare(calls, "softmax").rows:
        assert row.relative_error == row.total_variation == 0
        assert row.baseline_entropy == pytest.approx(float(entropy_H[row.head]), rel=ROUNDING)
    assert {row.problem for row in compare(calls).rows} == {"linear takes no window"}


def test_baseline_has_the_sinks_of_its_call() -> None:
    plain = make_call(H=1)
    call = replace(plain, sinks=torch.full((1,), 50.0, dtype=torch.float64))  # most of each row
    (row,) = compare(calls_of(call)).rows
    assert row.baseline_entropy is None  # the rows do not sum to 1
    assert row.total_variation == pytest.approx(0.5, abs=1e-9)


def test_rows_have_the_numbers_of_the_heads_in_the_model() -> None:
    found = compare(calls_of(make_call(heads=(3, 7)), make_call("layer.1", heads=(0, 1))))
    assert [(row.layer, row.head) for row in found.rows] == [
        ("layer.0", 3), ("layer.0", 7), ("layer.1", 0), ("layer.1", 1),
    ]  # fmt: skip
    (ax,) = panels(found.figure())
    assert row_labels(ax) == ["layer.0", "layer.1"]
    assert matrix(ax).shape == (2, 8)


def test_undefined_figures_are_none() -> None:
    zero = make_call(H=1)
    zero.value.zero_()
    (row,) = compare(calls_of(zero, make_call(H=1))).rows
    assert row.relative_error is None
    assert row.cosine is None
    assert row.total_variation is not None
    (row,) = compare(calls_of(make_call(H=1)), rows=0).rows
    assert row.relative_error is not None
    assert row.total_variation is row.entropy is row.baseline_entropy is None


def test_parameters_go_to_the_variants_that_take_them() -> None:
    calls = calls_of(make_call(H=1))
    own = {"variant": "linear", "parameters": {"normalize": True}}
    found = compare(calls, "linear", own, normalize=False)
    labels = ["linear normalize=false", "linear normalize=true"]
    assert [row.variant for row in found.rows] == labels
    plain, normalised = found.rows
    assert plain.kl_divergence is None
    assert normalised.kl_divergence is not None
    (default,) = compare(calls, "linear").rows
    assert numbers(default) == numbers(normalised)


@pytest.mark.parametrize(
    ("variants", "options", "error", "message"),
    [
        (["lineal"], {}, NotFound, "lineal"),
        (["linear"], {"anchor": "soft"}, NotFound, "soft"),
        ("linear", {}, InvalidContent, "not a list"),
        ([], {}, InvalidContent, "empty"),
        (["linear", "linear"], {}, InvalidContent, "linear twice"),
        (["linear"], {"colour": 1}, InvalidContent, "'colour'"),
        (["linear"], {"scale": torch.ones(1)}, InvalidContent, "scale is an array"),
        ([{"variant": "linear", "parameters": {"colour": 1}}], {}, InvalidContent, "'colour'"),
        ([{"name": "linear"}], {}, InvalidContent, "expected a name"),
        (["linear"], {"rows": -1}, InvalidContent, "rows is invalid"),
    ],
)
def test_wrong_arguments_are_errors(
    variants: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        calls_of(make_call()).compare(variants, progress=False, **options)


def test_capture_without_calls_is_an_error() -> None:
    with pytest.raises(InvalidContent, match="no calls"):
        compare(Calls())


def test_variant_that_is_refused_does_not_hide_the_others() -> None:
    wrong = {"variant": "linformer", "parameters": {"rank": -1}}
    found = compare(calls_of(make_call(H=1)), "linear", wrong)
    linear, linformer = found.rows
    assert linear.problem is None
    assert linear.relative_error is not None
    assert linformer.problem is not None
    assert "rank" in linformer.problem


def test_more_variants_than_a_request_takes_are_compared() -> None:
    variants = [{"variant": "sigmoid", "parameters": {"bias": -n / 10}} for n in range(1, 20)]
    found = compare(calls_of(make_call(H=1)), *variants)
    assert len({row.variant for row in found.rows}) == 19
    assert all(row.problem is None for row in found.rows)


def made_rows(*errors: float | None) -> HeadComparison:
    """Returns a comparison with these relative errors, one in each head."""
    rows = [
        HeadRow("layer", n, "linear", relative_error=x, problem=None if x is not None else "why")
        for n, x in enumerate(errors)
    ]
    return HeadComparison(tuple(rows), "softmax")


def test_rows_without_a_value_come_last_in_both_orders() -> None:
    found = made_rows(0.2, None, 0.1, 0.3)
    assert [row.head for row in found.sorted().rows] == [2, 0, 3, 1]
    assert [row.head for row in found.sorted(reverse=True).rows] == [3, 0, 2, 1]
    assert [row.head for row in found.sorted("head", reverse=True).rows] == [3, 2, 1, 0]
    with pytest.raises(InvalidContent, match="the column is invalid: got 'size'"):
        found.sorted("size")


def test_layers_are_sorted_by_their_first_calls() -> None:
    layers = [f"layers.{n}" for n in (2, 10, 0)]
    found = compare(calls_of(*(make_call(layer, H=1) for layer in layers)))
    by_error = found.sorted()
    for rows in (found.sorted("layer"), by_error.sorted("layer"), by_error.sorted("layer")):
        assert [row.layer for row in rows.rows] == layers
    backwards = by_error.sorted("layer", reverse=True).rows
    assert [row.layer for row in backwards] == layers[::-1]


def test_layers_that_were_missed_are_in_table_and_caption() -> None:
    calls = calls_of(make_call())
    calls.missed = [Missed("mamba.0", "no softmax"), Missed("mamba.1", "no softmax")]
    calls.missed.append(Missed("", "a compiled graph"))
    found = compare(calls)
    assert found.missed == tuple(calls.missed)
    for shown in (found, found.sorted()):
        text = shown.table()
        assert "mamba.0, mamba.1 were not captured: no softmax." in text
        assert "the model was not captured: a compiled graph." in text


def test_rows_are_text_csv_and_records(tmp_path: Path) -> None:
    found = compare(calls_of(make_call(), make_call("layer.1")), "linear", "taylor")
    assert found.records() == [asdict(row) for row in found.rows]
    text = found.csv(tmp_path / "rows.csv")
    assert (tmp_path / "rows.csv").read_text() == text
    first = next(csv.DictReader(StringIO(text)))
    assert list(first) == list(found.records()[0])
    assert float(first["relative_error"]) == found.rows[0].relative_error
    assert first["problem"] == ""
    assert found.table().count("layer.") == 8
    limited = found.table(limit=3)
    assert limited.count("layer.") == 3
    assert "5 more rows are not shown" in limited
    assert repr(found) == "HeadComparison(8 rows of 2 layers, anchor='softmax', linear, taylor)"


def test_map_shows_each_variant_and_a_notebook_the_best_heads() -> None:
    found = compare(calls_of(make_call(), make_call("layer.1")), "linear", "taylor")
    figure = found.figure(value="total_variation")
    assert titles(figure) == ["linear", "taylor"]
    assert figure.get_suptitle() == "total variation, compared with softmax"
    shown = [float(x) for ax in panels(figure) for x in matrix(ax).flat]
    rows = sorted(found.rows, key=lambda row: (row.variant, row.layer, row.head))
    assert shown == [row.total_variation for row in rows]
    both = Figure()
    ax = both.subplots()
    assert found.figure(variants=["taylor"], title="", ax=ax) is both
    assert ax.get_title() == "taylor"
    page = found._repr_html_()
    best = found.sorted().rows[0]
    assert page.index("<img") < page.index("<table") < page.index(f"{best.layer} {best.head}")
    with pytest.raises(InvalidContent, match="variants is invalid: got 'cosine'"):
        found.figure(variants=["cosine"])
    with pytest.raises(InvalidContent, match="the column is invalid: got 'size'"):
        found.figure(value="size")


def test_service_has_the_same_rows_as_this_process(url: str) -> None:
    bias = torch.randn(1, 2, 6, 6, dtype=torch.float64)
    mask = padding_mask([4, 6, 4], 6)
    calls = calls_of(make_call(B=3, L=6, mask=mask), make_call("layer.1", L=6, mask=bias))
    with Client(url) as client:
        assert_same_rows(compare(calls, "linear", client=client), compare(calls, "linear"))


def test_pieces_become_smaller_until_the_service_takes_them(serve: Callable[..., Server]) -> None:
    # a head is 2,560 bytes of tensors, and half a kilobyte of names
    calls = calls_of(make_call(H=4, G=2, L=20))
    with Client(serve(max_body_bytes=4000).url) as client:
        assert_same_rows(compare(calls, "linear", client=client), compare(calls, "linear"))
    with Client(serve(max_body_bytes=2000).url) as client:
        rows = compare(calls, "linear", client=client).rows
    assert [row.head for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert row.problem is not None
        assert "2000" in row.problem.replace(",", "")
        assert row.relative_error is None


def test_mask_that_exceeds_the_limit_is_not_sent_again(serve: Callable[..., Server]) -> None:
    mask = torch.randn(1, 1, 24, 24, dtype=torch.float64)  # 4,608 bytes, and 2,304 of each head
    transport = BreakingTransport(set())
    with Client(serve(max_body_bytes=4000).url, transport=transport) as client:
        rows = compare(calls_of(make_call(H=4, L=24, mask=mask)), "sigmoid", client=client).rows
    problem = "the mask alone is too large: got 4608 bytes, expected at most 4000"
    assert [row.problem for row in rows] == [problem] * 4
    assert transport.sent == 1


class BreakingTransport(httpx.HTTPTransport):
    """Sends requests to a service, and loses the connection before each of some requests.

    Args:
        lost: the numbers of comparisons that are lost, counted from 0.
    """

    def __init__(self, lost: set[int]) -> None:
        super().__init__()
        self.lost, self.sent = lost, 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/v1/compare":
            return super().handle_request(request)
        self.sent += 1
        if self.sent - 1 in self.lost:
            raise httpx.ReadError("the connection broke", request=request)
        return super().handle_request(request)


def test_broken_comparison_continues_at_the_piece_where_it_broke(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_pieces, "_BYTES", 1)  # a request for each of eight heads
    calls = calls_of(make_call(B=2), make_call("layer.1", B=2))
    transport = BreakingTransport({3, 4, 7})
    with Client(url, retries=0, transport=transport) as client:
        for sent in (4, 5, 8):
            with pytest.raises(httpx.ReadError):
                compare(calls, client=client)
            assert transport.sent == sent
        found = compare(calls, client=client)
        assert transport.sent == 8 + 3  # three heads were left
        assert_same_rows(found, compare(calls))
        compare(calls, client=client)  # a finished comparison starts anew
        assert transport.sent == 11 + 8


def test_other_arguments_continue_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_pieces, "_BYTES", 1)  # as above
    calls = calls_of(make_call(B=2))
    transport = BreakingTransport({3})
    with Client(url, retries=0, transport=transport) as client:
        with pytest.raises(httpx.ReadError):
            compare(calls, client=client)
        compare(calls, rows=2, client=client)
        assert transport.sent == 4 + 4
        compare(calls, client=client)
        assert transport.sent == 8 + 1


@needs_proc
@pytest.mark.slow
def test_long_sequences_are_compared_in_bounded_memory() -> None:
    """The weights of one head of 4,096 tokens are 64 MiB, those of all heads 384 MiB."""
    script = """
from qkv.models.attention_call import AttentionCall
from qkv.models.calls import Calls
torch.set_num_threads(1)
calls, shape = Calls(), (1, 6, 4096, 8)
calls.append(AttentionCall(
    "layer", torch.randn(shape), torch.randn(shape), torch.randn(shape), causal=True,
    index=0, output=torch.zeros(shape), scale=0.3, heads=tuple(range(6)), items=(0,),
))
start()
calls.compare(["linear"], rows=16, progress=False)
say()
"""
    (peak,) = peaks(script)
    assert peak.above < 128 << 20
