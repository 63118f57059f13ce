"""Tests of comparisons over a real socket: the request, the parsed response, its table."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any, Final

import numpy as np
import pytest
import torch

from qkv import Client, Comparison, QkvError
from qkv.wire import safetensors
from support.clients import in_asyncio, send_sync
from support.scripted_server import (
    Reply,
    json_reply,
    problem_reply,
    scripted_server,
)

RunCompare = Callable[..., Comparison]

QUERY: Final = np.arange(6, dtype=np.float32).reshape(3, 2)
TENSORS: Final = {"query": QUERY, "key": QUERY, "value": QUERY}


def divergence(mean: float, worst: float) -> dict[str, float]:
    return {"mean": mean, "worst": worst}


def entry(variant: str, **changed: Any) -> dict[str, Any]:
    return {
        "variant": variant, "parameters": {}, "weights_are": "stochastic",
        "output": {"relative_error": 0.25, "largest_error": 1.5, "cosine": 0.99999},
        "weights": {
            "total_variation": divergence(0.125, 0.5), "kl_divergence": divergence(0.01, 0.02),
            "js_divergence": divergence(0.003, 0.004), "rank_correlation": divergence(0.9, -0.5),
            "entropy": {"mean": 1.5, "least": 0.0, "most": 2.0},
        },
        "timing": {"median_ms": 0.5, "least_ms": 0.4, "most_ms": 123.4, "repeats": 5},
        "flops": 1_234_567, "bytes": 4096, "peak_bytes": 3 << 20,
    } | changed  # fmt: skip


ANCHOR: Final = entry(
    "softmax",
    output={"relative_error": 1e-7, "largest_error": 2e-7, "cosine": 1.0},
    weights={"entropy": {"mean": 1.5, "least": 0.0, "most": 2.0}},
)
RESPONSE: Final = {
    "anchor": ANCHOR,
    "variants": [entry("linear"), entry("mean", weights=None)],
    "notes": ["linear is near uniform <here> & there."],
    "timing": {
        "queue_ms": 1.5, "transfer_ms": 0.5, "compute_ms": 6.0, "runs": 12, "device": "cpu",
        "total_ms": 9.5,
    },
}  # fmt: skip


@pytest.fixture(params=[send_sync, in_asyncio])
def run_compare(request: pytest.FixtureRequest) -> RunCompare:
    """Returns a function that compares by one of both clients."""

    def run(url: str, variants: Any, **options: Any) -> Comparison:
        found: Comparison = request.param(url, lambda c: c.compare(variants, **options))
        return found

    return run


def test_request_has_variants_parameters_and_tensors(run_compare: RunCompare) -> None:
    chosen = ["linear", {"variant": "taylor", "parameters": {"causal": False}}]
    with scripted_server(json_reply(RESPONSE)) as received:
        run_compare(
            received.url, chosen, anchor={"variant": "softmax", "parameters": {"scale": 1.0}},
            repeats=3, rows=None, causal=True, softcap=None, **TENSORS,
        )  # fmt: skip
    assert received.paths == ["/v1/compare"]
    assert received.headers[0]["accept"] == "application/json"
    request = safetensors.decode(received.bodies[0], "inputs")
    assert request.fields == {
        "variants": [
            {"variant": "linear", "parameters": {"causal": True}},
            {"variant": "taylor", "parameters": {"causal": False}},
        ],
        "anchor": {"variant": "softmax", "parameters": {"causal": True, "scale": 1.0}},
        "repeats": 3,
        "rows": None,
    }
    assert {n: t.numpy().tolist() for n, t in request.tensors.items()} == {
        name: QUERY.tolist() for name in TENSORS
    }


def test_request_may_have_torch_tensors_and_a_layer(run_compare: RunCompare) -> None:
    layer = {"layout": "v2", "heads": 2, "tensors": {"W_query.weight": torch.ones(2, 2)}}
    with scripted_server(json_reply(RESPONSE)) as received:
        run_compare(received.url, ["linear"], layer=layer, x=torch.ones(3, 2, dtype=torch.bfloat16))
    request = safetensors.decode(received.bodies[0], "inputs")
    assert request.fields["layer"] == {"layout": "v2", "heads": 2}
    assert request.fields["anchor"] == {"variant": "softmax", "parameters": {}}
    assert request.fields["rows"] == 1024
    assert list(request.layer) == ["W_query.weight"]
    assert request.tensors["x"].dtype == "bfloat16"


def test_response_is_parsed_to_a_comparison(run_compare: RunCompare) -> None:
    with scripted_server(json_reply(RESPONSE)) as received:
        comparison = run_compare(received.url, ["linear", "mean"], **TENSORS)
    linear, mean = comparison.variants
    assert comparison.anchor.variant == "softmax"
    assert comparison.anchor.output is not None
    assert comparison.anchor.output.relative_error == 1e-7
    assert comparison.anchor.weights is not None
    assert comparison.anchor.weights.total_variation is None
    assert (linear.flops, linear.bytes, linear.peak_bytes) == (1_234_567, 4096, 3 << 20)
    assert linear.weights is not None
    assert linear.weights.rank_correlation is not None
    assert linear.weights.rank_correlation.worst == -0.5
    assert linear.timing.most_ms == 123.4
    assert mean.weights is None
    assert comparison.notes == tuple(RESPONSE["notes"])
    assert comparison.timing.device == "cpu"
    with pytest.raises(ValueError, match="frozen"):
        comparison.notes = ()


def test_fields_of_a_newer_service_are_ignored(run_compare: RunCompare) -> None:
    newer = RESPONSE | {
        "new": 1,
        "variants": [entry("linear", new=[1]), entry("mean", weights=None)],
    }
    with scripted_server(json_reply(newer)) as received:
        comparison = run_compare(received.url, ["linear", "mean"], **TENSORS)
    assert comparison.variants[0].flops == 1_234_567


def incomplete_reply(*path: Any) -> Reply:
    """Returns a reply with a response from which one part is deleted."""
    response = copy.deepcopy(RESPONSE)
    at: Any = response
    for step in path[:-1]:
        at = at[step]
    del at[path[-1]]
    return json_reply(response)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (problem_reply(422, "invalid-content"), 422),
        (incomplete_reply("anchor"), 400),
        (incomplete_reply("variants", 0, "timing"), 400),
        (incomplete_reply("variants", 0, "timing", "median_ms"), 400),
        (incomplete_reply("variants", 0, "weights", "entropy"), 400),
        (incomplete_reply("notes"), 400),
        (json_reply({"anchor": 1, "variants": 2, "notes": 3, "timing": 4}), 400),
        (json_reply(RESPONSE | {"variants": [entry("linear", weights=[1])]}), 400),
    ],
)
def test_invalid_response_is_a_qkv_error(run_compare: RunCompare, line: Reply, status: int) -> None:
    with scripted_server(line) as received, pytest.raises(QkvError) as refused:
        run_compare(received.url, ["linear"], **TENSORS)
    assert refused.value.status == status


@pytest.mark.parametrize("variants", ["linear", {"variant": "linear"}])
def test_variants_that_are_not_a_list_are_an_error(variants: Any) -> None:
    with pytest.raises(QkvError, match="list"):
        Client("http://127.0.0.1:9").compare(variants, query=QUERY, key=QUERY, value=QUERY)


TABLE: Final = """\
                                     softmax             linear               mean
──────────────────────────────────────────────────────────────────────────────────

output: distance to that of softmax
  relative error                    1.00e-07               0.25               0.25
  largest error                     2.00e-07                1.5                1.5
  cosine                           1.0000000          0.9999900          0.9999900

weights, row by row: distance to those of softmax
  are                             stochastic         stochastic         stochastic
  total variation                          –        0.125 (0.5)                  –
  KL divergence, nats                      –        0.01 (0.02)                  –
  Jensen-Shannon, nats                     –      0.003 (0.004)                  –
  rank correlation                         –         0.9 (-0.5)                  –
  entropy, nats                    1.5 (0–2)          1.5 (0–2)                  –

cost
  milliseconds               0.5 (0.4–123)      0.5 (0.4–123)      0.5 (0.4–123)
  floating-point operations           1.23 M             1.23 M             1.23 M
  bytes in and out                     4 KiB              4 KiB              4 KiB
  peak memory                          3 MiB              3 MiB              3 MiB

softmax is the baseline: its own distance is to its run in float64.
In brackets: the worst row, the range of entropies, the range of times.
linear is near uniform <here> & there."""


HEADS_TABLE: Final = """\
           relative error   total variation   KL divergence, nats   Jensen-Shannon, nats   rank correlation   entropy, nats
───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

softmax
  head 0         1.00e-07                 –                     –                      –                  –       1.5 (0–2)
  head 1                –                 –                     –                      –                  –               –

linear, causal=true
  head 0             0.25       0.125 (0.5)           0.01 (0.02)          0.003 (0.004)         0.9 (-0.5)       1.5 (0–2)
  head 1                –                 –                     –                      –                  –               –

linear
  head 0                –                 –                     –                      –                  –               –
  head 1                –                 –                     –                      –                  –               –

In brackets: the worst row, the range of entropies."""  # noqa: E501


def with_heads(entry: dict[str, Any], *heads: dict[str, Any]) -> dict[str, Any]:
    return entry | {"heads": [{n: h[n] for n in ("output", "weights")} for h in heads]}


def test_heads_table_has_a_line_for_each_head_of_each_variant() -> None:
    nothing = entry("linear", output=None, weights=None)
    causal = entry("linear", parameters={"causal": True})
    variants = [with_heads(causal, causal, nothing), with_heads(nothing, nothing, nothing)]
    anchor = with_heads(ANCHOR, ANCHOR, nothing)
    same = with_heads(entry("softmax"), nothing, nothing)  # shown once, as the baseline
    response = RESPONSE | {"anchor": anchor, "variants": [same, *variants]}
    comparison = Comparison.from_json(response)
    assert comparison.heads_table() == HEADS_TABLE
    narrow = comparison.heads_table(60)
    assert max(map(len, narrow.splitlines())) <= 60
    assert words(comparison.table()) == words(Comparison.from_json(response).table())
    head = comparison.variants[1].heads
    assert head is not None
    assert head[0].output == comparison.variants[1].output
    assert head[0].weights == comparison.variants[1].weights


@pytest.mark.parametrize("heads", [{}, {"heads": None}])
def test_comparison_without_heads_has_no_table_of_heads(heads: dict[str, None]) -> None:
    """An older service does not send the field."""
    comparison = Comparison.from_json(RESPONSE | {"anchor": ANCHOR | heads})
    assert comparison.anchor.heads is None
    with pytest.raises(ValueError, match="got per_head=False, expected True"):
        comparison.heads_table()


def test_request_has_per_head_only_if_set(run_compare: RunCompare) -> None:
    with scripted_server(json_reply(RESPONSE), json_reply(RESPONSE)) as received:
        run_compare(received.url, ["linear"], per_head=True, **TENSORS)
        run_compare(received.url, ["linear"], per_head=False, **TENSORS)
    asked = [safetensors.decode(body, "inputs").fields for body in received.bodies]
    assert asked[0]["per_head"] is True
    assert "per_head" not in asked[1]


def words(text: str) -> list[str]:
    return re.sub(r"─+", "", text).split()


def test_table_has_all_measures() -> None:
    table = Comparison.from_json(RESPONSE).table()
    assert words(table) == words(TABLE)
    lines = table.splitlines()
    body = [line for line in lines[2:20] if line.startswith("  ")]
    assert len({len(line) for line in [lines[0], lines[1], *body]}) == 1  # in columns
    assert "\x1b" not in table


@pytest.mark.parametrize(("width", "blocks"), [(200, 1), (70, 2), (50, 3), (20, 3)])
def test_columns_that_do_not_fit_follow_below(width: int, blocks: int) -> None:
    """Each group of columns has the names of the rows. No line is longer than the width."""
    table = Comparison.from_json(RESPONSE).table(width)
    body = table.partition("softmax is the")[0]
    lines = body.splitlines()
    assert sum(line.startswith("  relative error") for line in lines) == blocks
    assert sum("─" in line for line in lines) == blocks
    assert sorted(words(body).count(name) for name in ("linear", "mean")) == [1, 1]
    if width >= 50:
        assert max(map(len, table.splitlines())) <= width


def test_baseline_is_shown_once_and_variants_of_one_name_have_labels() -> None:
    variants = [
        entry("softmax"),
        *(entry("taylor", parameters={"causal": c}) for c in (False, True)),
    ]
    head = Comparison.from_json(RESPONSE | {"variants": variants}).table().splitlines()[:2]
    assert [line.split() for line in head] == [
        ["softmax", "taylor", "taylor"], ["causal=false", "causal=true"],
    ]  # fmt: skip


def test_missing_figures_are_dashes() -> None:
    """In float64 the baseline has no reference; an output that is not finite has no error."""
    nothing = {"relative_error": None, "largest_error": None, "cosine": None}
    changes = {"anchor": ANCHOR | {"output": None}, "variants": [entry("linear", output=nothing)]}
    comparison = Comparison.from_json(RESPONSE | changes)
    assert comparison.anchor.output is None
    for name in ("relative error", "largest error", "cosine"):
        (line,) = (x for x in comparison.table().splitlines() if x.startswith(f"  {name}"))
        assert line.removeprefix(f"  {name}").split() == ["–", "–"]


class Page(HTMLParser):
    """The content of an HTML page.

    Attributes:
        rows: the texts of the table's cells.
        tags: the names of all tags.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()


def test_html_has_the_same_table_escaped_and_without_scripts() -> None:
    response = json.loads(json.dumps(RESPONSE).replace("linear", "<script>alert(1)</script>"))
    page = Page(Comparison.from_json(response)._repr_html_())
    assert page.tags == {"table", "thead", "tbody", "tr", "th", "td", "p"}
    assert page.rows[0] == ["", "softmax", "<script>alert(1)</script>", "mean"]
    assert ["relative error", "1.00e-07", "0.25", "0.25"] in page.rows
    assert "near uniform <here> & there." in page.text
