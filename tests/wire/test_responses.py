"""The structs of responses: their JSON, and the values that are parsed from it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Final

import msgspec
import pytest

from qkv.wire import json, responses
from qkv.wire.open_inference_responses import BinarySize, InferResponse, InferTensor
from qkv.wire.responses import (
    BaselineComparison,
    BaselineHead,
    BaselineWeights,
    Cell,
    ComparedHead,
    ComparedVariant,
    CompareResponse,
    CompareTiming,
    Crossover,
    Divergence,
    Done,
    Entropy,
    OutputError,
    Progress,
    VariantTiming,
    WeightsComparison,
)

ENTROPY: Final = Entropy(1.5, 0.0, 2.0)
TIMES: Final = VariantTiming(0.5, 0.25, 1.0, 5)
COMPARISON: Final = CompareResponse(
    BaselineComparison(
        "softmax",
        {"causal": True},
        "stochastic",
        None,
        BaselineWeights(ENTROPY),
        TIMES,
        1,
        2,
        3,
        (BaselineHead(None, BaselineWeights(None)),),
    ),
    (
        ComparedVariant(
            "linear",
            {},
            "signed",
            OutputError(0.25, None, 0.5),
            WeightsComparison(Divergence(0.5, 1.0), None, None, Divergence(0.5, -1.0), None),
            TIMES,
            1,
            2,
            3,
        ),
        ComparedVariant(
            "mean",
            {},
            "stochastic",
            None,
            None,
            TIMES,
            1,
            2,
            3,
            (ComparedHead(OutputError(0.5, 1.0, None), None), ComparedHead(None, None)),
        ),
    ),
    ("A note.",),
    CompareTiming(0.0, 0.5, 1.5, 7, "cpu", 2.5),
)
MEASURED: Final = Cell(0, {}, "softmax", 8, 1.0, 0.5, 2.0, 5, 10, 20, 30)
FAILED: Final = Cell(1, {"rank": 2}, "linformer", 8, problem={"status": 413})
TIMED: Final = b'"timing":{"median_ms":0.5,"least_ms":0.25,"most_ms":1.0,"repeats":5}'
COST: Final = b'"flops":1,"bytes":2,"peak_bytes":3'


@pytest.mark.parametrize(
    ("response", "text"),
    [
        (
            COMPARISON,
            b'{"anchor":{"variant":"softmax","parameters":{"causal":true},'
            b'"weights_are":"stochastic","output":null,'
            b'"weights":{"entropy":{"mean":1.5,"least":0.0,"most":2.0}},%b,%b,'
            b'"heads":[{"output":null,"weights":{"entropy":null}}]},'
            b'"variants":[{"variant":"linear","parameters":{},"weights_are":"signed",'
            b'"output":{"relative_error":0.25,"largest_error":null,"cosine":0.5},'
            b'"weights":{"total_variation":{"mean":0.5,"worst":1.0},"kl_divergence":null,'
            b'"js_divergence":null,"rank_correlation":{"mean":0.5,"worst":-1.0},"entropy":null},'
            b'%b,%b},{"variant":"mean","parameters":{},"weights_are":"stochastic",'
            b'"output":null,"weights":null,%b,%b,"heads":['
            b'{"output":{"relative_error":0.5,"largest_error":1.0,"cosine":null},"weights":null},'
            b'{"output":null,"weights":null}]}],"notes":["A note."],'
            b'"timing":{"queue_ms":0.0,"transfer_ms":0.5,"compute_ms":1.5,"runs":7,'
            b'"device":"cpu","total_ms":2.5}}' % ((TIMED, COST) * 3),
        ),
        (
            MEASURED,
            b'{"index":0,"parameters":{},"variant":"softmax","length":8,"median_ms":1.0,'
            b'"least_ms":0.5,"most_ms":2.0,"repeats":5,"flops":10,"bytes":20,"peak_bytes":30}',
        ),
        (
            FAILED,
            b'{"index":1,"parameters":{"rank":2},"variant":"linformer","length":8,'
            b'"problem":{"status":413}}',
        ),
        (Progress(1, 4, "mean", 8), b'{"done":1,"total":4,"variant":"mean","length":8}'),
        (
            Done(4, (Crossover(0, 1, 300.5, (256, 512)),)),
            b'{"cells":4,"crossovers":[{"from":0,"to":1,"length":300.5,"between":[256,512]}]}',
        ),
        (
            InferResponse(
                model_name="mean",
                model_version="1",
                parameters={},
                outputs=(InferTensor("output", "FP32", [1], BinarySize(4)),),
            ),
            b'{"model_name":"mean","model_version":"1","parameters":{},"outputs":[{"name":"output",'
            b'"datatype":"FP32","shape":[1],"parameters":{"binary_data_size":4}}]}',
        ),
    ],
)
def test_a_response_has_its_fields_in_order_and_is_parsed_back(response: Any, text: bytes) -> None:
    assert json.dump(response) == text
    parsed = msgspec.convert(json.load(text), type(response))
    assert json.dump(parsed) == text
    if not isinstance(response, InferResponse):  # its sequences are lists after parsing
        assert parsed == response


def test_baseline_has_no_divergence_from_itself() -> None:
    weights = COMPARISON.anchor.weights
    assert weights is not None
    assert weights.total_variation is weights.kl_divergence is None
    assert weights.js_divergence is weights.rank_correlation is None


def test_unknown_fields_are_ignored_and_missing_ones_are_errors() -> None:
    fields = {"done": 1, "total": 4, "variant": "mean", "length": 8}
    assert msgspec.convert(fields | {"new": 5}, Progress) == Progress(1, 4, "mean", 8)
    del fields["total"]
    with pytest.raises(msgspec.ValidationError, match="total"):
        msgspec.convert(fields, Progress)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(5, Progress)


def test_other_objects_are_not_encoded() -> None:
    with pytest.raises(TypeError):
        json.dump({"a": object()})


def test_the_client_needs_no_pydantic_for_responses() -> None:
    code = f"import sys, {responses.__name__}; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
