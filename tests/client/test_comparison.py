"""Comparisons over a real socket: what is asked, what is made of the answer, and its table."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any, Final

import numpy as np
import pytest
import torch

from qkv import AsyncClient, Client, Comparison, QkvError
from qkv.wire import safetensors
from support.scripted_server import (
    Reply,
    drop_connection,
    json_reply,
    problem_reply,
    scripted_server,
)

Comparing = Callable[..., Comparison]

QUERY: Final = np.arange(6, dtype=np.float32).reshape(3, 2)
TENSORS: Final = {"query": QUERY, "key": QUERY, "value": QUERY}


def spread(mean: float, worst: float) -> dict[str, float]:
    return {"mean": mean, "worst": worst}


def entry(variant: str, **changed: Any) -> dict[str, Any]:
    return {
        "variant": variant, "parameters": {}, "weights_are": "stochastic",
        "output": {"relative_error": 0.25, "largest_error": 1.5, "cosine": 0.99999},
        "weights": {
            "total_variation": spread(0.125, 0.5), "kl_divergence": spread(0.01, 0.02),
            "js_divergence": spread(0.003, 0.004), "rank_correlation": spread(0.9, -0.5),
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
ANSWER: Final = {
    "anchor": ANCHOR,
    "variants": [entry("linear"), entry("mean", weights=None, peak_bytes=None)],
    "notes": ["linear is near uniform <here> & there."],
    "timing": {"device": "cpu", "total_ms": 9.5, "runs": 12},
}


def compared(url: str, variants: Any, **asked: Any) -> Comparison:
    with Client(url) as client:
        return client.compare(variants, **asked)


def compare_async(url: str, variants: Any, **asked: Any) -> Comparison:
    async def run() -> Comparison:
        async with AsyncClient(url) as client:
            return await client.compare(variants, **asked)

    return asyncio.run(run())


@pytest.fixture(params=[compared, compare_async])
def comparing(request: pytest.FixtureRequest) -> Comparing:
    run: Comparing = request.param
    return run


def test_what_is_asked(comparing: Comparing) -> None:
    chosen = ["linear", {"variant": "taylor", "parameters": {"causal": False}}]
    with scripted_server(json_reply(ANSWER)) as received:
        comparing(
            received.url, chosen, anchor={"variant": "softmax", "parameters": {"scale": 1.0}},
            repeats=3, rows=None, causal=True, softcap=None, **TENSORS,
        )  # fmt: skip
    assert received.paths == ["/v1/compare"]
    assert received.headers[0]["accept"] == "application/json"
    asked = safetensors.decode(received.bodies[0], "inputs")
    assert asked.fields == {
        "variants": [
            {"variant": "linear", "parameters": {"causal": True}},
            {"variant": "taylor", "parameters": {"causal": False}},
        ],
        "anchor": {"variant": "softmax", "parameters": {"causal": True, "scale": 1.0}},
        "repeats": 3,
        "rows": None,
    }
    assert {n: t.numpy().tolist() for n, t in asked.tensors.items()} == {
        name: QUERY.tolist() for name in TENSORS
    }


def test_torch_and_layers_too(comparing: Comparing) -> None:
    layer = {"layout": "v2", "heads": 2, "tensors": {"W_query.weight": torch.ones(2, 2)}}
    with scripted_server(json_reply(ANSWER)) as received:
        comparing(received.url, ["linear"], layer=layer, x=torch.ones(3, 2, dtype=torch.bfloat16))
    asked = safetensors.decode(received.bodies[0], "inputs")
    assert asked.fields["layer"] == {"layout": "v2", "heads": 2}
    assert asked.fields["anchor"] == {"variant": "softmax", "parameters": {}}
    assert asked.fields["rows"] == 1024
    assert list(asked.layer) == ["W_query.weight"]
    assert asked.tensors["x"].dtype == "bfloat16"


def test_what_is_answered(comparing: Comparing) -> None:
    with scripted_server(json_reply(ANSWER)) as received:
        comparison = comparing(received.url, ["linear", "mean"], **TENSORS)
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
    assert comparison.notes == tuple(ANSWER["notes"])
    assert comparison.timing["device"] == "cpu"
    with pytest.raises(AttributeError):
        comparison.notes = ()  # type: ignore[misc]


def test_it_is_sent_again_as_any_other_call(comparing: Comparing) -> None:
    with scripted_server(
        drop_connection, problem_reply(503, "not-now", retry_after="0"), json_reply(ANSWER)
    ) as received:
        assert comparing(received.url, ["linear"], **TENSORS).notes
        assert len(received.bodies) == 3


def spoiled(*path: Any) -> Reply:
    """The answer without a part of it."""
    answer = copy.deepcopy(ANSWER)
    at: Any = answer
    for step in path[:-1]:
        at = at[step]
    del at[path[-1]]
    return json_reply(answer)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (problem_reply(422, "invalid-content"), 422),
        (problem_reply(413, "too-large"), 413),
        (spoiled("anchor"), 400),
        (spoiled("variants", 0, "timing"), 400),
        (spoiled("variants", 0, "timing", "median_ms"), 400),
        (spoiled("variants", 0, "weights", "entropy"), 400),
        (spoiled("notes"), 400),
        (json_reply([]), 400),
        (json_reply({"anchor": 1, "variants": 2, "notes": 3, "timing": 4}), 400),
        (json_reply(ANSWER | {"variants": [entry("linear", weights=[1])]}), 400),
        (json_reply(b"<html>"), 400),
    ],
)
def test_whatever_may_answer_is_an_error_of_ours(
    comparing: Comparing, line: Reply, status: int
) -> None:
    with scripted_server(line) as received, pytest.raises(QkvError) as refused:
        comparing(received.url, ["linear"], **TENSORS)
    assert refused.value.status == status


@pytest.mark.parametrize("variants", ["linear", {"variant": "linear"}])
def test_variants_are_a_list(variants: Any) -> None:
    with pytest.raises(QkvError, match="list"):
        compared("http://127.0.0.1:9", variants, **TENSORS)


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
  peak memory                          3 MiB              3 MiB                  –

softmax is the anchor: its own distance is that to itself in float64.
In brackets the worst row, the range of entropies, the range of times.
linear is near uniform <here> & there."""


def words(text: str) -> list[str]:
    return re.sub(r"─+", "", text).split()


def test_the_table_says_all_of_it() -> None:
    table = Comparison.from_json(ANSWER).table()
    assert words(table) == words(TABLE)
    lines = table.splitlines()
    body = [line for line in lines[2:20] if line.startswith("  ")]
    assert len({len(line) for line in [lines[0], lines[1], *body]}) == 1  # in columns
    assert "\x1b" not in table


@pytest.mark.parametrize(("width", "blocks"), [(200, 1), (70, 2), (50, 3), (20, 3)])
def test_columns_that_have_no_room_stand_below(width: int, blocks: int) -> None:
    """Each with the names of the rows, and no line longer, but where one column alone is."""
    table = Comparison.from_json(ANSWER).table(width)
    body = table.partition("softmax is the")[0]
    lines = body.splitlines()
    assert sum(line.startswith("  relative error") for line in lines) == blocks
    assert sum("─" in line for line in lines) == blocks
    assert sorted(words(body).count(name) for name in ("linear", "mean")) == [1, 1]
    if width >= 50:
        assert max(map(len, table.splitlines())) <= width


def test_the_anchor_is_not_shown_twice_and_namesakes_are_told_apart() -> None:
    made = [entry("softmax"), *(entry("taylor", parameters={"causal": c}) for c in (False, True))]
    head = Comparison.from_json(ANSWER | {"variants": made}).table().splitlines()[:2]
    assert [line.split() for line in head] == [
        ["softmax", "taylor", "taylor"], ["causal=false", "causal=true"],
    ]  # fmt: skip


def test_what_there_is_not_is_a_dash() -> None:
    """In float64 the anchor has nothing to be held against; what is not finite has no error."""
    nothing = {"relative_error": None, "largest_error": None, "cosine": None}
    answer = {"anchor": ANCHOR | {"output": None}, "variants": [entry("linear", output=nothing)]}
    comparison = Comparison.from_json(ANSWER | answer)
    assert comparison.anchor.output is None
    for name in ("relative error", "largest error", "cosine"):
        (line,) = (x for x in comparison.table().splitlines() if x.startswith(f"  {name}"))
        assert line.removeprefix(f"  {name}").split() == ["–", "–"]


class Page(HTMLParser):
    """What a page holds.

    Attributes:
        rows: the texts of its table's cells.
        tags: all there are.
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


def test_a_notebook_shows_the_same_escaped_and_inert() -> None:
    answer = json.loads(json.dumps(ANSWER).replace("linear", "<script>alert(1)</script>"))
    page = Page(Comparison.from_json(answer)._repr_html_())
    assert page.tags == {"table", "thead", "tbody", "tr", "th", "td", "p"}
    assert page.rows[0] == ["", "softmax", "<script>alert(1)</script>", "mean"]
    assert ["relative error", "1.00e-07", "0.25", "0.25"] in page.rows
    assert "near uniform <here> & there." in page.text
