"""Figures of each head: equal to those of separate comparisons; the whole ones merge them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pytest

from qkv import local
from qkv.errors import InvalidContent, PayloadTooLarge
from qkv.jobs.measure import compare_request, differences
from qkv.jobs.measure.compare_request import CompareRequest
from qkv.jobs.measure.differences import sum_errors
from qkv.jobs.plan import Limits
from qkv.tensors import RawTensor
from qkv.wire.message import Message
from support.compare_requests import (
    INPUTS,
    UNLIMITED,
    assert_same_report,
    compare,
    random_inputs,
    variant_entry,
)
from support.known_requests import DTYPES, EPS, Array

NAMES: Final = ["linear", "sigmoid", "taylor"]


def entries(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [report["anchor"], *report["variants"]]


def pooled(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in ("output", "weights")}


def without_heads(report: dict[str, Any]) -> dict[str, Any]:
    """Returns the report as of a request without `per_head`."""
    anchor, *variants = (
        {name: value for name, value in entry.items() if name != "heads"}
        for entry in (report["anchor"], *report["variants"])
    )
    return report | {"anchor": anchor, "variants": variants}


def one_head(inputs: dict[str, Array], head: int) -> dict[str, Array]:
    """Returns the inputs of one query head, with its key and value head."""
    H, G = inputs["query"].shape[1], inputs["key"].shape[1]
    heads = {"query": head, "key": head * G // H, "value": head * G // H}
    cut = {n: inputs[n][:, h : h + 1] for n, h in heads.items()}
    per_head = {n: inputs[n][head : head + 1] for n in ("sinks", "alibi_slopes") if n in inputs}
    return inputs | cut | per_head


def is_close(one: Any, other: Any, bound: float = 1e-11) -> bool:
    """Returns True if the figures are equal within the rounding of short float64 sums."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_close(one[n], other[n], bound) for n in one)
    if one is None or other is None:
        return one is other
    return bool(abs(one - other) <= bound * max(1.0, abs(other)))


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize(("H", "G"), [(3, 3), (4, 2)])
@pytest.mark.parametrize("lengths", [False, True])
def test_each_head_has_the_figures_of_a_comparison_of_its_own(
    dtype: str, H: int, G: int, lengths: bool
) -> None:
    inputs = random_inputs(dtype, B=2, H=H, G=G)
    if lengths:
        inputs["key_lengths"] = np.array([9, 4])
    fields = {"variants": [variant_entry(n, causal=True) for n in ("linear", "taylor", "softmax")]}
    report = compare(inputs, **fields, per_head=True)
    assert_same_report(without_heads(report), compare(inputs, **fields))
    for head in range(H):
        alone = compare(one_head(inputs, head), **fields)
        for entry, own in zip(entries(report), entries(alone), strict=True):
            assert len(entry["heads"]) == H
            found = entry["heads"][head]
            assert is_close(found["weights"], own["weights"])
            # a kernel may round the outputs of one head and of several differently
            assert (found["output"] is None) == (own["output"] is None)
            if found["output"] is not None:
                assert is_close(found["output"], own["output"], 16 * EPS[dtype])


@pytest.mark.parametrize("dtype", EPS)
def test_output_errors_are_those_of_each_head_of_the_same_outputs(dtype: str) -> None:
    inputs = random_inputs(dtype, H=4, G=2)
    report = compare(inputs, variants=NAMES, per_head=True, rows=0)

    def output(name: str, wide: bool = False) -> Array:
        arrays = {n: a.astype(np.float64) if wide else a for n, a in inputs.items()}
        raw = {n: RawTensor.from_numpy(a) for n, a in arrays.items()}
        message = Message({"outputs": ["output"]}, raw)
        array: Array = local.attend(name, message).tensors["output"].numpy().astype(np.float64)
        return array

    anchor = output("softmax")
    pairs = [(output(n), anchor) for n in NAMES]
    pairs.insert(0, (anchor, output("softmax", wide=True)))
    for (b, a), entry in zip(pairs, entries(report), strict=True):
        for h, head in enumerate(entry["heads"]):
            assert head["weights"] is None
            if entry is report["anchor"] and dtype == "float64":
                assert head["output"] is entry["output"] is None
                continue
            x, y = b[:, h].ravel(), a[:, h].ravel()
            right = {
                "relative_error": float(np.linalg.norm(x - y) / np.linalg.norm(y)),
                "largest_error": float(np.abs(x - y).max()),
                "cosine": float(x @ y / np.linalg.norm(x) / np.linalg.norm(y)),
            }
            assert is_close(head["output"], right)


@pytest.mark.parametrize("name", ["mask", "sinks", "alibi_slopes"])
def test_rows_without_a_figure_do_not_move_figures_to_other_heads(name: str) -> None:
    """Rows that see nothing have no figures, rows with sinks no entropy."""
    inputs = random_inputs("float64", H=3, G=3)
    numbers = np.random.default_rng(2)
    if name == "mask":
        inputs["mask"] = numbers.random((2, 3, 9, 9)) < 0.5
        inputs["mask"][0, 1, 2:7] = False
        inputs["mask"][:, 2] = False
    else:
        inputs[name] = numbers.normal(size=3)
    variants = [variant_entry("softmax", scale=s) for s in (0.0, 3.0)]
    report = compare(inputs, variants=variants, per_head=True)
    for head in range(3):
        own = one_head(inputs, head)
        if name == "mask":
            own["mask"] = inputs["mask"][:, head : head + 1]
        for entry, alone in zip(
            entries(report), entries(compare(own, variants=variants)), strict=True
        ):
            assert is_close(entry["heads"][head]["weights"], alone["weights"])


@pytest.mark.parametrize("rows", [0, 5, 20, None])
def test_rows_are_chosen_as_without_heads(
    rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures do not depend on the sizes of runs and parts."""
    inputs = random_inputs(B=2, H=3, G=3, N=40)
    fields: dict[str, Any] = {"variants": ["linear", "mean"], "rows": rows}
    report = compare(inputs, **fields, per_head=True)
    assert_same_report(without_heads(report), compare(inputs, **fields))
    for head in range(3):
        alone = compare(one_head(inputs, head), **fields)
        for entry, own in zip(entries(report), entries(alone), strict=True):
            assert is_close(entry["heads"][head]["weights"], own["weights"])
    # the real sizes bound memory: inputs of several jobs take seconds
    monkeypatch.setattr(compare_request, "_PART_SCORES", 7 * 6 * 40)
    monkeypatch.setattr(differences, "_PART", 5 * 40)
    for entry, cut in zip(
        entries(report), entries(compare(inputs, **fields, per_head=True)), strict=True
    ):
        for head, own in zip(entry["heads"], cut["heads"], strict=True):
            assert is_close(head, own)


@pytest.mark.parametrize("rank", [2, 3])
def test_inputs_without_an_axis_of_heads_are_one_head(rank: int) -> None:
    inputs = {n: a[:, 0] if rank == 3 else a[0, 0] for n, a in random_inputs("float64").items()}
    for entry in entries(compare(inputs, variants=NAMES, per_head=True)):
        (head,) = entry["heads"]
        assert is_close(head, pooled(entry))


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("has_projection", [False, True])
def test_layer_has_figures_of_its_heads(heads: int, has_projection: bool) -> None:
    """An output projection adds up the heads: then only the weights have figures of a head."""
    draw = np.random.default_rng(1)
    tensors = {f"W_{r}": draw.normal(size=(5, 8)) for r in ("query", "key", "value")}
    x, layer = draw.normal(size=(2, 6, 5)), dict(tensors)
    if has_projection:
        layer["W_output"] = draw.normal(size=(8, 5))
    message = Message(
        {
            "variants": ["linear", "mean"], "layer": {"layout": "v1", "heads": heads},
            "repeats": 1, "per_head": True,
        },
        {"x": RawTensor.from_numpy(x)},
        {n: RawTensor.from_numpy(a) for n, a in layer.items()},
    )  # fmt: skip
    found = local.compare(message)
    projected = {
        r: (x @ tensors[f"W_{r}"]).reshape(2, 6, heads, 8 // heads).transpose(0, 2, 1, 3)
        for r in INPUTS
    }
    contiguous = {n: np.ascontiguousarray(a) for n, a in projected.items()}
    right = compare(contiguous, variants=["linear", "mean"], per_head=True)
    for entry, own in zip(entries(found), entries(right), strict=True):
        assert len(entry["heads"]) == heads
        for head, alone in zip(entry["heads"], own["heads"], strict=True):
            assert is_close(head["weights"], alone["weights"])
            if has_projection:
                assert head["output"] is None
            else:
                assert is_close(head["output"], alone["output"])


def test_head_that_is_not_finite_has_no_figures_and_the_others_have() -> None:
    inputs = random_inputs("float64", H=3, G=3)
    inputs["value"][:, 1] = np.inf
    inputs["query"][:, 2] = np.nan
    fields: dict[str, Any] = {"variants": ["linear"], "per_head": True}
    (entry,) = compare(inputs, **fields)["variants"]
    clean = random_inputs("float64", H=3, G=3)
    (other,) = compare(clean, **fields)["variants"]
    nothing = {"relative_error": None, "largest_error": None, "cosine": None}
    assert entry["output"] == nothing
    assert [head["output"] == nothing for head in entry["heads"]] == [False, True, True]
    assert is_close(entry["heads"][0], other["heads"][0])
    assert is_close(entry["heads"][1]["weights"], other["heads"][1]["weights"])
    assert entry["heads"][2]["weights"]["total_variation"] is None


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_head_errors_are_those_of_each_head_at_any_block(
    dtype: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of very different sizes do not affect each other."""
    # the real block bounds memory: heads of several blocks take seconds
    monkeypatch.setattr(differences, "_BLOCK", block)
    numbers = np.random.default_rng(0)
    sizes = np.array([1e-4, 0.0, 1.0, 1e4])[:, None]
    b, a = ((numbers.normal(size=(3, 4, 5)) * sizes).astype(DTYPES[dtype]) for _ in range(2))
    sums = sum_errors(RawTensor.from_numpy(b), RawTensor.from_numpy(a), (3, 4, 5))
    for h, error in enumerate(sums.heads()):
        _assert_error(error, b[:, h], a[:, h])
    _assert_error(sums.whole(), b, a)


def test_error_of_a_whole_output_holds_for_heads_of_any_size() -> None:
    """Squares of the largest and the smallest head are beyond the range of float64."""
    numbers = np.random.default_rng(0)
    b, a = (numbers.normal(size=(2, 3, 5)) * [[1e-200], [1.0], [1e200]] for _ in range(2))
    sums = sum_errors(RawTensor.from_numpy(b), RawTensor.from_numpy(a), (2, 3, 5))
    for h, scale in enumerate([1e-200, 1.0, 1e200]):
        _assert_error(sums.heads()[h], b[:, h], a[:, h], scale)
    _assert_error(sums.whole(), b, a, 1e200)


def _assert_error(error: Any, b: Array, a: Array, scale: float = 1.0) -> None:
    """Asserts the definitions of the figures, in plain numpy."""
    x, y = (z.astype(np.float64).ravel() / scale for z in (b, a))
    right: tuple[Any, ...] = (None, 0.0, None)  # of zeros
    if y.any():
        norm_x, norm_y = np.linalg.norm(x), np.linalg.norm(y)
        distance = np.linalg.norm(x - y)
        right = distance / norm_y, np.abs(x - y).max() * scale, x @ y / norm_x / norm_y
    for one, other in zip(_figures(error), right, strict=True):
        assert one == other if other is None else abs(one - other) <= 1e-14 * abs(other)


def _figures(error: Any) -> tuple[Any, ...]:
    return error.relative_error, error.largest_error, error.cosine


def request(inputs: dict[str, Array], limits: Limits = UNLIMITED, **fields: Any) -> CompareRequest:
    raw = {name: RawTensor.from_numpy(array) for name, array in inputs.items()}
    return CompareRequest(Message(fields, raw), limits)


def test_variant_without_heads_is_rejected() -> None:
    inputs = {"x": np.array([[1.0, -3.0], [2.0, 2.0]]), "weight": np.eye(2)}
    with pytest.raises(
        InvalidContent, match=r"linear_layer: its output has axes \(B, O\)"
    ) as error:
        request(inputs, variants=["linear_layer"], anchor="linear_layer", per_head=True)
    assert error.value.pointer == "/per_head"


def test_too_many_heads_are_rejected_before_anything_runs() -> None:
    def inputs(H: int) -> dict[str, Array]:
        return dict.fromkeys(INPUTS, np.ones((1, H, 1, 1)))

    assert request(inputs(2048), variants=["mean"], per_head=True).head_count == 2048
    assert request(inputs(100_000), variants=["mean"]).head_bytes == 0
    for H, variants in ((2049, ["mean"]), (1366, ["mean", "linear"]), (100_000, ["mean"])):
        with pytest.raises(PayloadTooLarge, match="per_head would give too many heads") as error:
            request(inputs(H), variants=variants, per_head=True)
        assert error.value.pointer == "/per_head"
        assert error.value.members == {"limit": 4096}
    small = Limits(response_bytes=8 << 10, job_bytes=1 << 62)
    assert request(inputs(4), small, variants=["mean"], per_head=True)
    with pytest.raises(PayloadTooLarge):
        request(inputs(5), small, variants=["mean"], per_head=True)


@pytest.mark.parametrize("H", [1, 300])
def test_figures_of_a_head_take_no_more_room_than_counted(H: int) -> None:
    inputs = random_inputs("float64", B=1, H=H, G=H)
    report = compare(inputs, variants=["linear"], per_head=True)
    counted = request(inputs, variants=["linear"], per_head=True).head_bytes
    text = [str(head) for entry in entries(report) for head in entry["heads"]]
    assert sum(map(len, text)) <= counted
