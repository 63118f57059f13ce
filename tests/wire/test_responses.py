"""The models of responses: their JSON, and the values that are parsed from it."""

from __future__ import annotations

from typing import Any, Final

import pytest

from qkv.wire import json
from qkv.wire.open_inference_responses import BinarySize, InferTensor
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

ENTROPY: Final = Entropy(mean=1.5, least=0.0, most=2.0)
COST: Final[dict[str, Any]] = {
    "timing": VariantTiming(median_ms=0.5, least_ms=0.25, most_ms=1.0, repeats=5),
    "flops": 1,
    "bytes": 2,
    "peak_bytes": 3,
}
COMPARISON: Final = CompareResponse(
    anchor=BaselineComparison(
        variant="softmax",
        parameters={"causal": True},
        weights_are="stochastic",
        output=None,
        weights=BaselineWeights(entropy=ENTROPY),
        heads=(BaselineHead(output=None, weights=BaselineWeights(entropy=None)),),
        **COST,
    ),
    variants=(
        ComparedVariant(
            variant="linear",
            parameters={},
            weights_are="signed",
            output=OutputError(relative_error=0.25, largest_error=None, cosine=0.5),
            weights=WeightsComparison(
                total_variation=Divergence(mean=0.5, worst=1.0),
                kl_divergence=None,
                js_divergence=None,
                rank_correlation=Divergence(mean=0.5, worst=-1.0),
                entropy=None,
            ),
            **COST,
        ),
        ComparedVariant(
            variant="mean",
            parameters={},
            weights_are="stochastic",
            output=None,
            weights=None,
            heads=(
                ComparedHead(
                    output=OutputError(relative_error=0.5, largest_error=1.0, cosine=None),
                    weights=None,
                ),
                ComparedHead(output=None, weights=None),
            ),
            **COST,
        ),
    ),
    notes=("A note.",),
    timing=CompareTiming(
        queue_ms=0.0, transfer_ms=0.5, compute_ms=1.5, runs=7, device="cpu", total_ms=2.5
    ),
)
MEASURED: Final = Cell(
    index=0,
    parameters={},
    variant="softmax",
    length=8,
    median_ms=1.0,
    least_ms=0.5,
    most_ms=2.0,
    repeats=5,
    flops=10,
    bytes=20,
    peak_bytes=30,
)
FAILED: Final = Cell(
    index=1, parameters={"rank": 2}, variant="linformer", length=8, problem={"status": 413}
)
TIMED: Final = b'"timing":{"median_ms":0.5,"least_ms":0.25,"most_ms":1.0,"repeats":5}'
SIZES: Final = b'"flops":1,"bytes":2,"peak_bytes":3'


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
            b'"device":"cpu","total_ms":2.5}}' % ((TIMED, SIZES) * 3),
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
        (
            Progress(done=1, total=4, variant="mean", length=8),
            b'{"done":1,"total":4,"variant":"mean","length":8}',
        ),
        (
            Done(
                cells=4,
                crossovers=(Crossover(before=0, after=1, length=300.5, between=(256, 512)),),
            ),
            b'{"cells":4,"crossovers":[{"from":0,"to":1,"length":300.5,"between":[256,512]}]}',
        ),
        (
            InferTensor(
                name="output",
                datatype="FP32",
                shape=[1],
                parameters=BinarySize(binary_data_size=4),
            ),
            b'{"name":"output","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":4}}',
        ),
    ],
)
def test_a_response_has_its_fields_in_order_and_is_parsed_back(response: Any, text: bytes) -> None:
    assert response.to_json() == text
    parsed = type(response).parse(json.load(text))
    assert parsed.to_json() == text
    assert parsed == response


def test_baseline_has_no_divergence_from_itself() -> None:
    weights = COMPARISON.anchor.weights
    assert weights is not None
    assert weights.total_variation is weights.kl_divergence is None
    assert weights.js_divergence is weights.rank_correlation is None


def test_unknown_fields_are_ignored_and_missing_ones_are_errors() -> None:
    fields = {"done": 1, "total": 4, "variant": "mean", "length": 8}
    expected = Progress(done=1, total=4, variant="mean", length=8)
    assert Progress.parse(fields | {"new": 5}) == expected
    del fields["total"]
    with pytest.raises(ValueError, match="total"):
        Progress.parse(fields)
    with pytest.raises(ValueError, match="Progress"):
        Progress.parse(5)  # type: ignore[arg-type]


def test_other_objects_are_not_encoded() -> None:
    with pytest.raises(TypeError):
        json.dump({"a": object()})
