"""Invalid comparisons are rejected with a pointer to the error."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import hypothesis
import pytest
from hypothesis import strategies

from qkv import local
from qkv.errors import QkvError
from qkv.jobs.measure.compare_request import CompareRequest
from qkv.wire import json as wire_json
from support.compare_requests import (
    INPUTS,
    UNLIMITED,
    VARIANTS,
    post,
    random_inputs,
)
from support.examples import examples
from support.known_requests import assert_client_error, assert_problem
from support.service import Server


def test_too_large_comparison_is_rejected_before_it_runs(serve: Callable[..., Server]) -> None:
    small = serve(max_scores=100, max_queue_bytes=4000, max_response_bytes=1000)
    inputs = {n: a.tolist() for n, a in random_inputs(B=1, H=1, G=1, N=12).items()}
    problem = assert_problem(post(small, {"inputs": inputs, "variants": ["linear"]}), 413)
    assert problem["limit"] == 100
    body: dict[str, Any] = {"inputs": inputs, "variants": ["linear"], "anchor": "mean"}
    assert assert_problem(post(small, body), 413)["pointer"] == "/rows"
    assert post(small, body | {"rows": 8}).status_code == 200
    long = {n: a.tolist() for n, a in random_inputs(B=1, H=1, G=1, N=51).items()}
    body = {"inputs": long, "variants": ["linear"], "anchor": "taylor", "rows": 0}
    assert "the float64 run of the baseline" in assert_problem(post(small, body), 413)["detail"]
    assert post(small, body | {"dtype": "float64", "rows": 0}).status_code == 413


ANYTHING: Final = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers(-(2**65), 2**65)
    | strategies.floats() | strategies.text(max_size=8) | strategies.sampled_from(VARIANTS),
    lambda inner: strategies.lists(inner, max_size=4)
    | strategies.dictionaries(
        strategies.sampled_from(["variant", "parameters", "causal", "rank", "scale", "x"]), inner
    ),
    max_leaves=8,
)  # fmt: skip


@pytest.mark.slow
@examples(300)
@hypothesis.given(
    strategies.dictionaries(
        strategies.sampled_from(
            ["variants", "anchor", "repeats", "rows", "per_head", "dtype", "layer", "no"]
        ),
        ANYTHING,
    ),
    strategies.dictionaries(strategies.sampled_from([*INPUTS, "x", "mask", "weight"]), ANYTHING),
    strategies.booleans(),
)
def test_random_requests_are_rejected_or_run(
    fields: dict[str, Any], inputs: dict[str, Any], are_good: bool
) -> None:
    """Covers random inputs and valid ones."""
    document = {"variants": ["linear"]} | fields | {"inputs": INPUTS if are_good else inputs}
    try:
        message = wire_json.decode(json.dumps(document).encode(), "inputs")
        request = CompareRequest(message, UNLIMITED)
    except QkvError as error:
        assert_client_error(error, document)
    else:
        for rows in request.row_parts:
            assert all(entry.rows_plan(rows).bytes for entry in request.variants)
        assert json.loads(json.dumps(local.compare(message)))["variants"]


def test_mask_that_a_variant_does_not_take_points_to_key_lengths() -> None:
    document = {"variants": ["softmax", "linear"], "inputs": INPUTS | {"mask": [[True, False]]}}
    message = wire_json.decode(json.dumps(document).encode(), "inputs")
    with pytest.raises(QkvError, match=r"linear takes no mask.*give key_lengths"):
        CompareRequest(message, UNLIMITED)
