"""The oracle on sinks and on rows of very low scores: right kernels pass, and bugs have names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from qkv.testing import verify
from support.each import each

WINDOW = {"causal": True, "window": (3, 0)}
CAP = {"softcap": 5.0}


def online(*bugs: str, block: int = 8) -> Any:
    """Returns a kernel that reads blocks of keys; a sink is in the first sum."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sinks: Tensor | None = None,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        exact = torch.float64 if query.dtype == torch.float64 else torch.float32
        q, k, v = (x.to(exact) for x in (query, key, value))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        if causal:
            scores = scores.masked_fill(j > i, -torch.inf)
        if window is not None:
            scores = scores.masked_fill(j < i - window[0], -torch.inf)
        least = -1e5 if "finite sentinel" in bugs else -torch.inf
        top = torch.full((*scores.shape[:3], 1), least, dtype=exact)
        total = torch.zeros_like(top)
        sum_: Tensor | float = 0.0
        for part, values in zip(scores.split(block, -1), v.split(block, -2), strict=True):
            higher = torch.maximum(top, part.amax(-1, keepdim=True))
            finite = higher.masked_fill(higher == -torch.inf, 0.0)
            factor, weights = (top - finite).exp(), (part - finite).exp()
            total = total * factor + weights.sum(-1, keepdim=True)
            sum_ = sum_ * factor + weights @ values
            top = higher
        if sinks is None or "ignored" in bugs:
            return (sum_ / total.clamp(min=1e-30)).to(query.dtype)
        sink = sinks.to(exact)[:, None, None]
        if "sigmoid" in bugs:
            return (sum_ / total.clamp(min=1e-30) * sink.sigmoid()).to(query.dtype)
        if "capped" in bugs and softcap is not None:
            sink = softcap * (sink / softcap).tanh()
        top = top.masked_fill(top == -torch.inf, -1e30)
        highest = torch.maximum(top, sink)
        times = 2 if "twice" in bugs else 1
        total = total * (top - highest).exp() + times * (sink - highest).exp()
        return (sum_ * (top - highest).exp() / total).to(query.dtype)

    return attend


def extra_key(query: Tensor, key: Tensor, value: Tensor, *, sinks: Tensor | None = None) -> Tensor:
    """Torch's kernel, with one more key whose score is the sink and whose value is 0."""
    k, v = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    if sinks is None:
        return scaled_dot_product_attention(query, k, v)
    B, H, L, _ = query.shape
    bias = query.new_zeros(B, H, L, k.shape[2])
    bias = torch.cat([bias, sinks[:, None, None].expand(B, H, L, 1)], -1)
    k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
    return scaled_dot_product_attention(query, k, v, attn_mask=bias)


@each("options", [{}, WINDOW, CAP, {**WINDOW, **CAP}])
def test_right_kernels_pass(options: Mapping[str, Any]) -> None:
    report = verify(online(), "softmax", families=["sinks", "low"], gradients=True, **options)
    assert report.passed, report
    assert {check.family for check in report.checks if check.passed} == {"sinks", "low"}


def test_one_more_key_is_a_sink() -> None:
    assert verify(extra_key, "softmax", families=["sinks", "low"]).passed


@pytest.mark.parametrize(
    ("bug", "name", "options"),
    [
        ("ignored", "sink-ignored", {}),
        ("ignored", "sink-ignored", WINDOW),
        ("twice", "sink-counted-twice", {}),
        ("sigmoid", "sink-as-sigmoid", {}),
        ("sigmoid", "sink-as-sigmoid", CAP),
        ("capped", "sink-capped", CAP),
        ("finite sentinel", "finite-sentinel", {}),
    ],
)
def test_bugs_are_found_and_named(bug: str, name: str, options: Mapping[str, Any]) -> None:
    report = verify(online(bug), "softmax", families=["normal", "sinks", "low"], **options)
    assert not report.passed
    assert list(report.diagnosis)[:1] == [name]


def test_a_function_that_does_not_name_sinks_is_not_asked() -> None:
    def plain(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        return scaled_dot_product_attention(query, key, value)

    (check,) = verify(plain, "softmax", dtype="float32", families=["sinks"]).checks
    assert check.not_run == "the function does not take 'sinks'"


def test_low_rows_are_as_low_as_reports_have_them() -> None:
    from qkv.attention.catalogue import find
    from qkv.testing.families import draw

    inputs = draw(find("softmax"), "low", torch.float32).inputs
    scores = inputs["query"] @ inputs["key"].mT / math.sqrt(inputs["query"].shape[-1])
    assert scores[:, :, 0].max() < -2.4e5
    assert scores[:, :, -1].max() > -1e4
