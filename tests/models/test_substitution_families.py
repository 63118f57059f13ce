"""Tests of `qkv.substitute` on ten families of transformers."""

from __future__ import annotations

import pytest
import torch

import qkv
from support.captured_models import CASES, FAMILIES, build, run_model, state_of

EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("name", "implementation"), [case for case in CASES if case[1] != "flex_attention"]
)
def test_softmax_for_softmax_changes_nothing_but_rounding(name: str, implementation: str) -> None:
    family, model = FAMILIES[name], build(name, implementation)
    before, state = run_model(model, family.batch()), state_of(model)
    with qkv.substitute(model, "softmax") as report:
        after = run_model(model, family.batch())
    assert [row.layer for row in report.rows] == list(family.layers)
    assert state_of(model) == state
    assert len(after) == len(before) > 0
    for one, other in zip(after, before, strict=True):
        # a few roundings of each of two layers, whose weights have norms of about 1
        assert float((one - other).norm() / other.norm()) < 32 * EPS


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generation_with_a_cache_is_that_of_the_whole_sequence(name: str) -> None:
    model = build(name, "sdpa")
    tokens = FAMILIES[name].batch()["input_ids"]
    with qkv.substitute(model, "linear"):
        found = model.generate(tokens, max_new_tokens=4, do_sample=False, use_cache=True)
        again = model.generate(tokens, max_new_tokens=4, do_sample=False, use_cache=False)
    assert torch.equal(found, again)
