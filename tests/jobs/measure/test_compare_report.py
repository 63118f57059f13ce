"""Comparisons: every figure against plain numpy in float64, from full matrices."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import pytest
import torch

from qkv import local
from qkv.attention import catalogue
from qkv.jobs.measure import compare_request, differences
from qkv.jobs.measure.compare_request import CompareRequest
from qkv.jobs.measure.differences import row_metrics
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support.compare_requests import (
    INPUTS,
    NEEDED,
    UNLIMITED,
    VARIANTS,
    compare,
    random_inputs,
    variant_entry,
)
from support.known_requests import DTYPES, EPS, Array

DIVERGENCES: Final = ("total_variation", "kl_divergence", "js_divergence", "rank_correlation")


def reference(name: str, inputs: dict[str, Array], **parameters: Any) -> Array:
    """Returns a variant's whole weights in float64, (B, H, L, S)."""
    variant = catalogue.find(name)
    arguments = {
        spec.argument: tensor_of(inputs[n]) for n, spec in variant.inputs.items() if n in inputs
    }
    result = variant.reference(**arguments, **NEEDED.get(name, {}), **parameters)
    weights: Array = result.weights.numpy()
    return weights


def tensor_of(array: Array) -> torch.Tensor:
    """Returns a tensor of the same dtype, to which random tensors of a variant are rounded."""
    if array.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(array.astype("f4")).bfloat16()
    return torch.from_numpy(array)


def ranks(x: Array) -> Array:
    """Returns the number of smaller elements, plus half of the number of equal ones."""
    smaller, equal = x[None, :] < x[:, None], x[None, :] == x[:, None]
    rank: Array = smaller.sum(1) + (equal.sum(1) - 1) / 2
    return rank


def entropy(p: Array) -> float:
    return float(-sum(x * math.log(x) for x in p if x > 0))


def row_figures(b: Array, a: Array) -> dict[str, float]:
    """Returns the figures of a variant's row b against a baseline's row a."""
    found = {"total_variation": float(np.abs(a - b).sum() / 2)}
    seen = (a != 0) | (b != 0)
    if (a >= 0).all() and (b >= 0).all():
        with np.errstate(divide="ignore"):
            found["kl_divergence"] = float(
                sum(x * np.log(x / y) for x, y in zip(a, b, strict=False) if x > 0)
            )
        middle = (a + b) / 2
        found["js_divergence"] = entropy(middle) - (entropy(a) + entropy(b)) / 2
    rank_b, rank_a = ranks(b[seen]), ranks(a[seen])
    if rank_b.std() > 0 and rank_a.std() > 0:
        found["rank_correlation"] = float(np.corrcoef(rank_b, rank_a)[0, 1])
    return found


def expected(b: Array, a: Array, kinds: set[str]) -> dict[str, Any]:
    """Returns the expected figures of the weights b of a variant against those of a baseline, a."""
    rows = [
        (x, y) for x, y in zip(b.reshape(-1, b.shape[-1]), a.reshape(-1, a.shape[-1]), strict=False)
    ]
    rows = [(x, y) for x, y in rows if x.any() or y.any()]
    each = [row_figures(x, y) for x, y in rows]
    figures: dict[str, Any] = {}
    for name in DIVERGENCES:
        values = [one[name] for one in each if name in one]
        if name in ("kl_divergence", "js_divergence") and kinds != {"stochastic"}:
            values = []
        worst = min if name == "rank_correlation" else max
        has = bool(values) and bool(np.isfinite(values).all())
        figures[name] = {"mean": float(np.mean(values)), "worst": worst(values)} if has else None
    return figures


def close(actual: Any, right: Any) -> bool:
    """Returns True if both are equal within the rounding of short float64 sums."""
    if right is None or actual is None:
        return actual is right
    if isinstance(right, dict):
        return actual.keys() == right.keys() and all(close(actual[n], right[n]) for n in right)
    return bool(abs(actual - right) <= 1e-11 * max(1.0, abs(right)))


def kind_of(name: str, **parameters: Any) -> str:
    variant = catalogue.find(name)
    return variant.weights_are(variant.parse(NEEDED.get(name, {}) | parameters))


def known_parameters(name: str, **parameters: Any) -> dict[str, Any]:
    """Returns the parameters that a variant has."""
    known = catalogue.find(name).parameters.model_fields
    return {n: v for n, v in parameters.items() if n in known}


@pytest.mark.parametrize("anchor", VARIANTS)
@pytest.mark.parametrize("causal", [False, True])
def test_every_pair_agrees_with_the_full_matrices(anchor: str, causal: bool) -> None:
    inputs = random_inputs()
    own = {name: known_parameters(name, causal=causal) for name in VARIANTS}
    response = compare(
        inputs,
        variants=[variant_entry(n, **own[n]) for n in VARIANTS],
        anchor=variant_entry(anchor, **own[anchor]),
    )
    full = {n: reference(n, inputs, **own[n]) for n in VARIANTS}
    for name, entry in zip(VARIANTS, response["variants"], strict=True):
        kinds = {kind_of(name, **own[name]), kind_of(anchor, **own[anchor])}
        right = expected(full[name], full[anchor], kinds)
        assert close({n: entry["weights"][n] for n in DIVERGENCES}, right), (name, entry, right)
        _check_entropy(entry, full[name], kind_of(name, **own[name]))
    _check_entropy(response["anchor"], full[anchor], kind_of(anchor, **own[anchor]))
    assert response["anchor"]["weights"].keys() == {"entropy"}


def _check_entropy(entry: dict[str, Any], full: Array, kind: str) -> None:
    assert entry["weights_are"] == kind
    each = [entropy(row) for row in full.reshape(-1, full.shape[-1]) if row.any()]
    right = {"mean": float(np.mean(each)), "least": min(each), "most": max(each)}
    assert close(entry["weights"]["entropy"], right if kind == "stochastic" else None)


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("lengths", [False, True])
def test_grouped_padded_and_half_precision(dtype: str, lengths: bool) -> None:
    """The weights are computed in float64 from the inputs as sent, in any dtype."""
    inputs = random_inputs(dtype, H=4, G=2)
    if lengths:
        inputs["key_lengths"] = np.array([9, 4])
        inputs["key"][1, :, 4:] = np.nan
    names = ("linear", "taylor", "efficient", "linformer")
    response = compare(inputs, variants=[variant_entry(n) for n in names])
    clean = dict(inputs)
    if lengths:
        clean["key"] = inputs["key"].copy()
        clean["key"][1, :, 4:] = 0
    anchor = reference("softmax", clean)
    for name, entry in zip(names, response["variants"], strict=True):
        right = expected(reference(name, clean), anchor, {"stochastic", kind_of(name)})
        assert close({n: entry["weights"][n] for n in DIVERGENCES}, right), (name, entry, right)


@pytest.mark.parametrize("anchor", ["softmax", "linear"])
@pytest.mark.parametrize("names", [("alibi_slopes",), ("sinks",), ("alibi_slopes", "sinks")])
def test_slopes_and_sinks_go_to_the_variants_that_take_them(
    anchor: str, names: tuple[str, ...]
) -> None:
    """Rows with sinks sum to less than 1: they have no entropy and no KL divergence."""
    inputs = random_inputs()
    heads = inputs["query"].shape[1]
    inputs |= {n: np.random.default_rng(4).normal(size=heads) for n in names}
    response = compare(inputs, variants=["softmax", "linear", "taylor"], anchor=anchor)
    full = {n: reference(n, inputs) for n in ("softmax", "linear", "taylor")}
    kinds = dict.fromkeys(full, "stochastic")
    if "sinks" in names:
        kinds["softmax"] = "unnormalised"
    for name, entry in zip(full, response["variants"], strict=True):
        right = expected(full[name], full[anchor], {kinds[name], kinds[anchor]})
        assert close({n: entry["weights"][n] for n in DIVERGENCES}, right), (name, entry, right)
        _check_entropy(entry, full[name], kinds[name])
    _check_entropy(response["anchor"], full[anchor], kinds[anchor])
    assert any("unnormalised" in note for note in response["notes"]) == ("sinks" in names)


@pytest.mark.parametrize("dtype", EPS)
def test_outputs_are_compared_with_the_baseline_and_the_baseline_with_float64(dtype: str) -> None:
    inputs = random_inputs(dtype)
    response = compare(
        inputs, variants=["linear", "softmax"], anchor=variant_entry("softmax", causal=True)
    )

    def output(name: str, wide: bool = False, **parameters: Any) -> Array:
        arrays = {n: a.astype(np.float64) if wide else a for n, a in inputs.items()}
        raw = {n: RawTensor.from_numpy(a) for n, a in arrays.items()}
        message = Message({"outputs": ["output"], "parameters": parameters}, raw)
        array: Array = local.attend(name, message).tensors["output"].numpy().astype(np.float64)
        return array

    def errors(b: Array, a: Array) -> dict[str, float]:
        return {
            "relative_error": float(np.linalg.norm(b - a) / np.linalg.norm(a)),
            "largest_error": float(np.abs(b - a).max()),
            "cosine": float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)),
        }

    anchor = output("softmax", causal=True)
    for name, entry in zip(("linear", "softmax"), response["variants"], strict=True):
        assert close(entry["output"], errors(output(name), anchor))
    own = response["anchor"]["output"]
    if dtype == "float64":
        assert own is None
        assert any("ran in float64" in note for note in response["notes"])
    else:
        assert close(own, errors(anchor, output("softmax", wide=True, causal=True)))
        assert 0 < own["relative_error"] < 20 * EPS[dtype]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_error_of_a_baseline_is_its_rounding(name: str, dtype: str) -> None:
    """Random tensors of the variant are the same in float64."""
    numbers = np.random.default_rng(3)
    inputs = {n: numbers.normal(size=(1, 2, 16, 8)).astype(dtype) for n in INPUTS}
    own = compare(inputs, variants=["softmax"], anchor=variant_entry(name))["anchor"]["output"]
    assert 0 < own["relative_error"] < 4 * EPS[dtype]


def test_baseline_with_a_mask_and_a_layer() -> None:
    """Masked keys count as not visible; a layer projects for every variant."""
    numbers = np.random.default_rng(2)
    mask = numbers.random((9, 9)) < 0.6
    mask[3] = False
    inputs = random_inputs() | {"mask": mask}
    response = compare(inputs, variants=[variant_entry("softmax", scale=3.0)])
    anchor, other = reference("softmax", inputs), reference("softmax", inputs, scale=3.0)
    (entry,) = response["variants"]
    assert not anchor[:, :, 3].any()
    assert close(
        {n: entry["weights"][n] for n in DIVERGENCES}, expected(other, anchor, {"stochastic"})
    )

    tensors = {
        f"W_{r}": numbers.normal(size=(5, 8)).astype("f4") for r in ("query", "key", "value")
    }
    x = numbers.normal(size=(2, 6, 5)).astype("f4")
    message = Message(
        {"variants": ["linear", "mean"], "layer": {"layout": "v1", "heads": 2}, "repeats": 1},
        {"x": RawTensor.from_numpy(x)},
        {n: RawTensor.from_numpy(a) for n, a in tensors.items()},
    )
    response = local.compare(message)
    projected = {r: (x.astype("f8") @ tensors[f"W_{r}"]).reshape(2, 6, 2, 4) for r in INPUTS}
    projected = {r: np.ascontiguousarray(p.transpose(0, 2, 1, 3)) for r, p in projected.items()}
    for name, entry in zip(("linear", "mean"), response["variants"], strict=True):
        full = reference(name, projected), reference("softmax", projected)
        right = expected(*full, {"stochastic"})
        assert close({n: entry["weights"][n] for n in DIVERGENCES}, right)


def test_linear_layer_is_compared_with_itself() -> None:
    inputs = {"x": np.array([[1.0, -3.0], [2.0, 2.0]]), "weight": np.eye(2)}
    (entry,) = compare(inputs, variants=["linear_layer"], anchor="linear_layer")["variants"]
    assert entry["weights"]["total_variation"] == {"mean": 0.0, "worst": 0.0}
    assert entry["output"]["relative_error"] == 0.0


def test_equal_weights_share_their_ranks() -> None:
    b = np.array([[1.0, 1.0, 2.0, 3.0, 3.0, 3.0, 0.0], [5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]])
    a = np.array([[2.0, 1.0, 1.0, 1.0, 4.0, 5.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]])
    found = row_metrics(torch.from_numpy(b), torch.from_numpy(a), (False, False))
    values_N, has_N = found["rank_correlation"]
    right = row_figures(b[0], a[0])["rank_correlation"]
    assert has_N.tolist() == [True, False]
    assert values_N[0].item() == pytest.approx(right, rel=1e-14)


@pytest.mark.parametrize("rows", [0, 1, 5, 16, 40, 64, 100, None])
def test_rows_are_evenly_spread_and_at_most_as_many_as_requested(
    rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result does not depend on the sizes of runs and parts."""
    inputs = random_inputs(B=1, N=100)
    raw = {name: RawTensor.from_numpy(array) for name, array in inputs.items()}
    request = CompareRequest(Message({"variants": ["linear"], "rows": rows}, raw), UNLIMITED)
    chosen = list(request.rows)
    assert len(set(chosen)) == len(chosen) <= (100 if rows is None else rows)
    assert len(chosen) > (99 if rows is None else rows - 16)
    whole = compare(inputs, variants=["linear"], rows=rows)
    if rows == 0:
        assert whole["variants"][0]["weights"] is whole["anchor"]["weights"] is None
        return
    b, a = (reference(n, inputs)[:, :, chosen] for n in ("linear", "softmax"))
    (entry,) = whole["variants"]
    assert close({n: entry["weights"][n] for n in DIVERGENCES}, expected(b, a, {"stochastic"}))
    assert any("evenly spread" in note for note in whole["notes"]) is (len(chosen) < 100)
    # the real sizes bound memory: inputs of several jobs take seconds
    monkeypatch.setattr(compare_request, "_PART_SCORES", 7 * 2 * 100)
    monkeypatch.setattr(differences, "_PART", 3 * 100)
    cut = CompareRequest(Message({"variants": ["linear"], "rows": rows}, raw), UNLIMITED)
    parts = list(cut.row_parts)
    assert [row for part in parts for row in part] == chosen
    assert all(len(part) <= 7 for part in parts)
    assert cut.variants[0].rows_plan(parts[0]).bytes_out <= 7 * 2 * 100 * 8
    again = compare(inputs, variants=["linear"], rows=rows)
    assert close(again["variants"][0]["weights"], entry["weights"])
