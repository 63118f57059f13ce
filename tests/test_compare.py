"""Comparisons: every figure against plain numpy in float64, from full matrices."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Callable
from typing import Any, Final

import httpx
import hypothesis
import numpy as np
import pytest
import torch
from cases import DTYPES, EPS, Array, as_json, explained, refused
from conftest import Process, Server, until
from hypothesis import strategies
from schemas import described, fits, kept

from qkv import catalogue, comparison, divergence, local
from qkv.comparison import Comparison
from qkv.divergence import DivergenceJob
from qkv.errors import QkvError
from qkv.job import Job, Limits
from qkv.measured import PEAK, PeakJob, TimedJob, peak_of
from qkv.message import Message
from qkv.parcel import Opener, head_of, laid_out, room_for, sizes_in, write
from qkv.run import run
from qkv.spread import FIGURES, figures
from qkv.tensors import RawTensor
from qkv.wire import json as wire
from qkv.wire import safetensors

COMPARE: Final = "/v1/compare"
UNLIMITED: Final = Limits(answer=1 << 62, request=1 << 62)
VARIANTS: Final = ("efficient", "linear", "linformer", "mean", "softmax", "taylor")
NEEDED: Final = {"linformer": {"rank": 3}}
APART: Final = ("total_variation", "kl_divergence", "js_divergence", "rank_correlation")
X: Final = [[0.43, 0.15, 0.89], [0.55, 0.87, 0.66], [0.57, 0.85, 0.64]]
INPUTS: Final = {"query": X, "key": X, "value": X}


def drawn(
    dtype: str = "float32", B: int = 2, H: int = 2, G: int = 2, N: int = 9, D: int = 4
) -> dict[str, Array]:
    """Inputs of equal lengths, which every variant takes."""
    numbers = np.random.default_rng(5)
    shapes = {"query": (B, H, N, D), "key": (B, G, N, D), "value": (B, G, N, D)}
    return {n: numbers.normal(0, 2, s).astype(DTYPES[dtype]) for n, s in shapes.items()}


def compare(inputs: dict[str, Array], **fields: Any) -> dict[str, Any]:
    """What this process answers, as JSON has it."""
    raw = {name: RawTensor.from_numpy(array) for name, array in inputs.items()}
    fields.setdefault("repeats", 1)
    answer: dict[str, Any] = json.loads(json.dumps(local.compare(Message(fields, raw))))
    return answer


def named(name: str, **parameters: Any) -> dict[str, Any]:
    return {"variant": name, "parameters": NEEDED.get(name, {}) | parameters}


# ------------------------------------------------------------ the same figures, plainly


def reference(name: str, inputs: dict[str, Array], **parameters: Any) -> Array:
    """A variant's whole weights in float64, (B, H, L, S)."""
    variant = catalogue.find(name)
    arguments = {
        spec.argument: tensor_of(inputs[n]) for n, spec in variant.inputs.items() if n in inputs
    }
    made = variant.module.reference(**arguments, **NEEDED.get(name, {}), **parameters)
    weights: Array = made.weights.numpy()
    return weights


def tensor_of(array: Array) -> torch.Tensor:
    """In its own dtype: what a variant draws is rounded to that."""
    if array.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(array.astype("f4")).bfloat16()
    return torch.from_numpy(array)


def ranks(x: Array) -> Array:
    """How many are smaller, and half of those that are equal."""
    smaller, equal = x[None, :] < x[:, None], x[None, :] == x[:, None]
    rank: Array = smaller.sum(1) + (equal.sum(1) - 1) / 2
    return rank


def entropy(p: Array) -> float:
    return float(-sum(x * math.log(x) for x in p if x > 0))


def by_row(b: Array, a: Array) -> dict[str, float]:
    """The figures of a variant's row b beside an anchor's row a."""
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
    """What is answered of the weights of a variant, b, beside those of an anchor, a."""
    rows = [
        (x, y) for x, y in zip(b.reshape(-1, b.shape[-1]), a.reshape(-1, a.shape[-1]), strict=False)
    ]
    rows = [(x, y) for x, y in rows if x.any() or y.any()]
    each = [by_row(x, y) for x, y in rows]
    said: dict[str, Any] = {}
    for name in APART:
        values = [one[name] for one in each if name in one]
        if name in ("kl_divergence", "js_divergence") and kinds != {"stochastic"}:
            values = []
        worst = min if name == "rank_correlation" else max
        has = bool(values) and bool(np.isfinite(values).all())
        said[name] = {"mean": float(np.mean(values)), "worst": worst(values)} if has else None
    return said


def close(came: Any, right: Any) -> bool:
    """Alike but for what sums of a few float64 are off by."""
    if right is None or came is None:
        return came is right
    if isinstance(right, dict):
        return came.keys() == right.keys() and all(close(came[n], right[n]) for n in right)
    return bool(abs(came - right) <= 1e-11 * max(1.0, abs(right)))


def kind_of(name: str, **parameters: Any) -> str:
    variant = catalogue.find(name)
    return variant.weights_are(variant.parse(NEEDED.get(name, {}) | parameters))


def takes(name: str, **parameters: Any) -> dict[str, Any]:
    """Those of some parameters that a variant has."""
    known = catalogue.find(name).parameters.model_fields
    return {n: v for n, v in parameters.items() if n in known}


@pytest.mark.parametrize("anchor", VARIANTS)
@pytest.mark.parametrize("causal", [False, True])
def test_every_pair_differs_as_the_full_matrices_do(anchor: str, causal: bool) -> None:
    inputs = drawn()
    own = {name: takes(name, causal=causal) for name in VARIANTS}
    answer = compare(
        inputs,
        variants=[named(n, **own[n]) for n in VARIANTS],
        anchor=named(anchor, **own[anchor]),
    )
    full = {n: reference(n, inputs, **own[n]) for n in VARIANTS}
    for name, entry in zip(VARIANTS, answer["variants"], strict=True):
        kinds = {kind_of(name, **own[name]), kind_of(anchor, **own[anchor])}
        right = expected(full[name], full[anchor], kinds)
        assert close({n: entry["weights"][n] for n in APART}, right), (name, entry, right)
        _check_entropy(entry, full[name], kind_of(name, **own[name]))
    _check_entropy(answer["anchor"], full[anchor], kind_of(anchor, **own[anchor]))
    assert answer["anchor"]["weights"].keys() == {"entropy"}


def _check_entropy(entry: dict[str, Any], full: Array, kind: str) -> None:
    assert entry["weights_are"] == kind
    each = [entropy(row) for row in full.reshape(-1, full.shape[-1]) if row.any()]
    right = {"mean": float(np.mean(each)), "least": min(each), "most": max(each)}
    assert close(entry["weights"]["entropy"], right if kind == "stochastic" else None)


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("lengths", [False, True])
def test_grouped_padded_and_half_precision(dtype: str, lengths: bool) -> None:
    """Weights are those of the inputs as they came, in float64, whatever their dtype."""
    inputs = drawn(dtype, H=4, G=2)
    if lengths:
        inputs["key_lengths"] = np.array([9, 4])
        inputs["key"][1, :, 4:] = np.nan
    names = ("linear", "taylor", "efficient", "linformer")
    answer = compare(inputs, variants=[named(n) for n in names])
    clean = dict(inputs)
    if lengths:
        clean["key"] = inputs["key"].copy()
        clean["key"][1, :, 4:] = 0
    anchor = reference("softmax", clean)
    for name, entry in zip(names, answer["variants"], strict=True):
        right = expected(reference(name, clean), anchor, {"stochastic", kind_of(name)})
        assert close({n: entry["weights"][n] for n in APART}, right), (name, entry, right)


@pytest.mark.parametrize("dtype", EPS)
def test_outputs_are_held_against_the_anchor_and_it_against_float64(dtype: str) -> None:
    inputs = drawn(dtype)
    answer = compare(inputs, variants=["linear", "softmax"], anchor=named("softmax", causal=True))

    def output(name: str, wide: bool = False, **parameters: Any) -> Array:
        came = {n: a.astype(np.float64) if wide else a for n, a in inputs.items()}
        raw = {n: RawTensor.from_numpy(a) for n, a in came.items()}
        asked = Message({"outputs": ["output"], "parameters": parameters}, raw)
        made: Array = local.attend(name, asked).tensors["output"].numpy().astype(np.float64)
        return made

    def apart(b: Array, a: Array) -> dict[str, float]:
        return {
            "relative_error": float(np.linalg.norm(b - a) / np.linalg.norm(a)),
            "largest_error": float(np.abs(b - a).max()),
            "cosine": float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)),
        }

    anchor = output("softmax", causal=True)
    for name, entry in zip(("linear", "softmax"), answer["variants"], strict=True):
        assert close(entry["output"], apart(output(name), anchor))
    own = answer["anchor"]["output"]
    if dtype == "float64":
        assert own is None
        assert any("float64 itself" in note for note in answer["notes"])
    else:
        assert close(own, apart(anchor, output("softmax", wide=True, causal=True)))
        assert 0 < own["relative_error"] < 20 * EPS[dtype]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_anchor_is_off_by_no_more_than_its_roundings(name: str, dtype: str) -> None:
    """What it draws by itself is the same in float64."""
    numbers = np.random.default_rng(3)
    inputs = {n: numbers.normal(size=(1, 2, 16, 8)).astype(dtype) for n in INPUTS}
    own = compare(inputs, variants=["softmax"], anchor=named(name))["anchor"]["output"]
    assert 0 < own["relative_error"] < 4 * EPS[dtype]


def test_an_anchor_with_a_mask_and_a_layer() -> None:
    """What is masked counts as unseen; a layer projects for each of them."""
    numbers = np.random.default_rng(2)
    mask = numbers.random((9, 9)) < 0.6
    mask[3] = False
    inputs = drawn() | {"mask": mask}
    answer = compare(inputs, variants=[named("softmax", scale=3.0)])
    anchor, other = reference("softmax", inputs), reference("softmax", inputs, scale=3.0)
    (entry,) = answer["variants"]
    assert not anchor[:, :, 3].any()
    assert close({n: entry["weights"][n] for n in APART}, expected(other, anchor, {"stochastic"}))

    tensors = {
        f"W_{r}": numbers.normal(size=(5, 8)).astype("f4") for r in ("query", "key", "value")
    }
    x = numbers.normal(size=(2, 6, 5)).astype("f4")
    message = Message(
        {"variants": ["linear", "mean"], "layer": {"layout": "v1", "heads": 2}, "repeats": 1},
        {"x": RawTensor.from_numpy(x)},
        {n: RawTensor.from_numpy(a) for n, a in tensors.items()},
    )
    answer = local.compare(message)
    projected = {r: (x.astype("f8") @ tensors[f"W_{r}"]).reshape(2, 6, 2, 4) for r in INPUTS}
    projected = {r: np.ascontiguousarray(p.transpose(0, 2, 1, 3)) for r, p in projected.items()}
    for name, entry in zip(("linear", "mean"), answer["variants"], strict=True):
        full = reference(name, projected), reference("softmax", projected)
        right = expected(*full, {"stochastic"})
        assert close({n: entry["weights"][n] for n in APART}, right)


def test_linear_layer_is_compared_with_its_like() -> None:
    inputs = {"x": np.array([[1.0, -3.0], [2.0, 2.0]]), "weight": np.eye(2)}
    (entry,) = compare(inputs, variants=["linear_layer"], anchor="linear_layer")["variants"]
    assert entry["weights"]["total_variation"] == {"mean": 0.0, "worst": 0.0}
    assert entry["output"]["relative_error"] == 0.0


def test_ties_share_their_ranks() -> None:
    b = np.array([[1.0, 1.0, 2.0, 3.0, 3.0, 3.0, 0.0], [5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]])
    a = np.array([[2.0, 1.0, 1.0, 1.0, 4.0, 5.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]])
    found = figures(torch.from_numpy(b), torch.from_numpy(a), (False, False))
    assert found.keys() == set(FIGURES)
    right = by_row(b[0], a[0])["rank_correlation"]
    assert found["rank_correlation"].tolist() == [pytest.approx(right, rel=1e-14)]


@pytest.mark.parametrize("rows", [0, 1, 5, 16, 40, 64, 100, None])
def test_rows_are_evenly_spread_and_as_many_as_are_asked_for(
    rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However they are cut into jobs and blocks."""
    inputs = drawn(B=1, N=100)
    raw = {name: RawTensor.from_numpy(array) for name, array in inputs.items()}
    asked = Comparison(Message({"variants": ["linear"], "rows": rows}, raw), UNLIMITED)
    chosen = [i for first, last in asked.rows for i in range(first, last)]
    assert len(set(chosen)) == len(chosen) <= (100 if rows is None else rows)
    assert len(chosen) > (99 if rows is None else rows - 16)
    whole = compare(inputs, variants=["linear"], rows=rows)
    if rows == 0:
        assert whole["variants"][0]["weights"] is whole["anchor"]["weights"] is None
        return
    b, a = (reference(n, inputs)[:, :, chosen] for n in ("linear", "softmax"))
    (entry,) = whole["variants"]
    assert close({n: entry["weights"][n] for n in APART}, expected(b, a, {"stochastic"}))
    assert any("evenly spread" in note for note in whole["notes"]) is (len(chosen) < 100)
    monkeypatch.setattr(comparison, "_TOGETHER", 7 * 2 * 100)
    monkeypatch.setattr(divergence, "_BLOCK", 2 * 2 * 100)
    monkeypatch.setattr(divergence, "_PART", 3 * 100)
    cut = Comparison(Message({"variants": ["linear"], "rows": rows}, raw), UNLIMITED)
    jobs = list(cut.divergences(cut.variants[0]))
    assert [i for j in jobs for r in j.rows for i in range(*r)] == chosen
    assert all(job.pairs <= 7 * 2 * 100 for job in jobs)
    again = compare(inputs, variants=["linear"], rows=rows)
    assert close(again["variants"][0]["weights"], entry["weights"])


# ------------------------------------------------------------ what is said of it


def test_random_tensors_make_an_empty_comparison() -> None:
    numbers = np.random.default_rng(0)
    inputs = {n: numbers.normal(size=(1, 2, 256, 64)).astype("f4") for n in INPUTS}
    answer = compare(inputs, variants=["linear", "taylor", "efficient"])
    (note,) = answer["notes"]
    assert note.startswith("Near uniform on these inputs: linear, taylor and efficient. ")
    calm = compare(inputs | {"query": inputs["query"] * 0.01}, variants=["taylor"])
    assert any("comparison is empty" in note for note in calm["notes"])
    meant = {n: np.eye(16, dtype="f4")[None, None] * 8 for n in INPUTS}
    assert compare(meant, variants=["linear"])["notes"] == []


def test_what_has_no_meaning_is_null_and_said() -> None:
    inputs = drawn()
    names = [named("linformer"), named("linear", normalize=False), named("mean")]
    answer = compare(inputs, variants=[*names, named("softmax", causal=True)])
    signed, sums, mean, causal = (entry["weights"] for entry in answer["variants"])
    notes = answer["notes"]
    for weights, kind in ((signed, "signed"), (sums, "unnormalised")):
        assert weights["kl_divergence"] is weights["js_divergence"] is weights["entropy"] is None
        assert weights["total_variation"] is not None
        assert any(f"are {kind}: there is no entropy" in note for note in notes)
    assert causal["kl_divergence"] is None
    assert causal["js_divergence"]["worst"] <= math.log(2)
    assert any("the KL divergence is infinite: mean and softmax." in note for note in notes)
    assert any(note.startswith("Causal where the anchor is not") for note in notes)
    assert any("Of linformer projections did not come" in note for note in notes)
    even = compare(inputs, variants=[named("mean", causal=False)])
    assert even["variants"][0]["weights"]["rank_correlation"] is None
    assert any("no order" in note for note in even["notes"])
    assert mean["rank_correlation"] is not None  # it sees some keys and others not


def test_numbers_that_are_not_finite_are_said() -> None:
    inputs = drawn()
    inputs["value"][0, 0, 0, 0] = np.inf
    answer = compare(inputs, variants=["linear"])
    (entry,) = answer["variants"]
    nothing = {"relative_error": None, "largest_error": None, "cosine": None}
    assert entry["output"] == answer["anchor"]["output"] == nothing
    assert (
        "The output of softmax and linear, or what it is held against, is not finite."
        in (answer["notes"])
    )
    inputs = drawn()
    inputs["query"][0, 0, 0, 0] = np.nan
    json.dumps(compare(inputs, variants=["linear"]), allow_nan=False)


@pytest.mark.parametrize("size", [1e-320, 1e-200, 1e200, 1.7e308, 0.0])
def test_outputs_of_any_size(size: float) -> None:
    inputs = drawn("float64")
    inputs["value"] = np.full_like(inputs["value"], size)
    (entry,) = compare(inputs, variants=["linear"])["variants"]
    if size:
        assert entry["output"]["cosine"] == pytest.approx(1.0)
        assert entry["output"]["relative_error"] < 1e-2
    else:
        assert entry["output"] == {"relative_error": None, "largest_error": 0.0, "cosine": None}


def test_the_cost_is_that_of_a_run_of_the_output() -> None:
    inputs = drawn()
    entry = compare(inputs, variants=["linear"], repeats=3)["variants"][0]
    raw = {name: RawTensor.from_numpy(array) for name, array in inputs.items()}
    alone = local.attend("linear", Message({"outputs": ["output"]}, raw)).fields["timing"]
    assert {n: entry[n] for n in ("flops", "bytes")} == {n: alone[n] for n in ("flops", "bytes")}
    times = entry["timing"]
    assert times["repeats"] == 3
    assert 0 < times["least_ms"] <= times["median_ms"] <= times["most_ms"]


def test_peaks_are_what_torch_held() -> None:
    cpu = torch.device("cpu")

    def work() -> torch.Tensor:
        one, other = torch.empty(1 << 20), torch.empty(1 << 20)
        del one
        return torch.cat([other, torch.empty(1 << 19)])

    before = torch.zeros(1 << 10)
    assert peak_of(work, cpu) == 4 * ((1 << 20) + (1 << 19) + (1 << 20) + (1 << 19))
    assert peak_of(lambda: before, cpu) == 0
    with pytest.raises(ZeroDivisionError):
        peak_of(lambda: 1 / 0, cpu)
    assert peak_of(lambda: torch.empty(8), cpu) == 32


@pytest.mark.gpu
def test_peaks_are_what_torch_held_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    cuda = torch.device("cuda")
    held = peak_of(
        lambda: torch.empty(1 << 20, device=cuda) + torch.empty(1 << 20, device=cuda), cuda
    )
    assert held == 12 << 20


def test_a_peak_has_no_matrix_of_scores() -> None:
    inputs = drawn(B=1, N=1024)
    softmax = compare(inputs, variants=["softmax"], rows=0)["variants"][0]["peak_bytes"]
    loud = compare(inputs, variants=[named("softmax", softcap=3.0)], rows=0)["variants"][0]
    output = 4 * inputs["value"].size
    assert output <= softmax < 1024 * 1024 * 4
    assert softmax < loud["peak_bytes"]


# ------------------------------------------------------------ jobs that cross


def test_every_kind_of_job_is_the_same_on_the_other_side() -> None:
    inputs = drawn() | {"key_lengths": np.array([9, 4])}
    raw = {name: RawTensor.from_numpy(array) for name, array in inputs.items()}
    asked = Comparison(Message({"variants": ["linear"]}, raw), UNLIMITED)
    (contender,) = asked.variants
    for job in (contender.timed, contender.peak, asked.exact, *asked.divergences(contender)):
        data = np.zeros(room_for(sizes_in(job)), np.uint8)
        write(job, data)
        opened = Opener(UNLIMITED).open(head_of(job), data)
        assert type(opened) is type(job)
        assert opened.key != job.key
        assert opened.answers == job.answers
        one, other = (run([j], torch.device("cpu"), False)[0].outputs for j in (job, opened))
        assert one.keys() == other.keys() == job.answers.keys()
        assert all(bytes(one[n].data) == bytes(other[n].data) for n in one)
    assert len(list(laid_out(sizes_in(contender.timed)))) == 4


def test_what_is_measured_runs_alone_and_is_no_inference() -> None:
    raw = {name: RawTensor.from_numpy(array) for name, array in drawn().items()}
    one, other = (TimedJob.like(Job.of("softmax", Message({}, raw), UNLIMITED)) for _ in "12")
    assert one.key != other.key
    assert one.again(raw).key != one.key
    kinds = (TimedJob, PeakJob, DivergenceJob)
    assert Job.is_inference
    assert not any(kind.is_inference for kind in kinds)
    assert PeakJob.like(one).answers == {PEAK: ("int64", (1,))}


# ------------------------------------------------------------ over HTTP


def post(server: Server, body: dict[str, Any], **more: Any) -> httpx.Response:
    return server.http.post(COMPARE, json=body, **more)


def test_a_service_answers_what_this_process_does(server: Server) -> None:
    inputs = drawn()
    fields = {"variants": ["linear", named("taylor", causal=True)], "repeats": 2}
    for encoding in ("lists", "base64"):
        body = {"inputs": {n: as_json(a, encoding) for n, a in inputs.items()}, **fields}
        response = post(server, body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/json"
        assert "x-request-id" in response.headers
        _same(response.json(), compare(inputs, **fields))
    raw = {name: RawTensor.from_numpy(array) for name, array in inputs.items()}
    file = b"".join(safetensors.encode(Message(fields, raw), "inputs"))
    headers = {"Content-Type": safetensors.MEDIA_TYPE}
    response = server.http.post(COMPARE, content=file, headers=headers)
    _same(response.json(), compare(inputs, **fields))
    assert set(response.headers["server-timing"].split(";dur=")) >= {"queue"}
    timing = response.json()["timing"]
    assert timing["runs"] == 3 + 3 * 2 + 1 + 2
    assert timing["device"] == "cpu"
    assert timing["total_ms"] >= timing["compute_ms"] > 0


def _same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for a, b in zip(
        (one["anchor"], *one["variants"]), (other["anchor"], *other["variants"]), strict=True
    ):
        assert {n: v for n, v in a.items() if n != "timing"} == {
            n: v for n, v in b.items() if n != "timing"
        }
    assert one["notes"] == other["notes"]


def test_a_device_process_compares_too(command: Callable[..., Process]) -> None:
    process = command(
        "serve", "--port", "0", "--workers", "1", QKV_DEVICE_PROCESS="one",
        QKV_MAX_QUEUE_BYTES=str(64 << 20),
    )  # fmt: skip
    inputs = drawn() | {"key_lengths": np.array([9, 4])}
    fields = {"variants": ["linear", "taylor"], "repeats": 2}
    body = {"inputs": {n: as_json(a, "base64") for n, a in inputs.items()}, **fields}
    answer = httpx.post(f"{process.url}{COMPARE}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    _same(answer.json(), compare(inputs, **fields))
    assert process.end() == 0, process.lines


L4: Final = [[1, 0, 0]] * 4
WRONG: Final = [
    (422, "/variants", {"variants": []}),
    (422, "/variants", {}),
    (422, "/variants", {"variants": "linear"}),
    (422, "/variants", {"variants": ["linear"] * 17}),
    (422, "/variants/1", {"variants": ["linear", 3]}),
    (404, "/variants/1", {"variants": ["linear", "sotfmax"]}),
    (404, "/variants/0/variant", {"variants": [{"variant": "sotfmax"}]}),
    (422, "/variants/0/variant", {"variants": [{}]}),
    (422, "/variants/0/scale", {"variants": [{"variant": "linear", "scale": 1}]}),
    (422, "/variants/1/parameters/scale", {"variants": ["mean", named("taylor", scale=1)]}),
    (422, "/variants/0/parameters/causal", {"variants": [named("linear", causal=1)]}),
    (422, "/variants/0/parameters", {"variants": [{"variant": "linear", "parameters": 1}]}),
    (404, "/anchor", {"variants": ["linear"], "anchor": "nope"}),
    (422, "/anchor", {"variants": ["linear"], "anchor": None}),
    (422, "/anchor/parameters/window", {"variants": ["mean"], "anchor": named("linear", window=1)}),
    (422, "/repeats", {"variants": ["linear"], "repeats": 0}),
    (422, "/repeats", {"variants": ["linear"], "repeats": 101}),
    (422, "/rows", {"variants": ["linear"], "rows": -1}),
    (422, "/dtype", {"variants": ["linear"], "dtype": "int64"}),
    (422, "/parameters", {"variants": ["linear"], "parameters": {}}),
    (422, "/weights", {"variants": ["linear"], "weights": "none"}),
    (404, "/layer", {"variants": ["linear"], "layer": "encoder"}),
    (422, "/inputs/nope", {"variants": ["linear"], "inputs": INPUTS | {"nope": X}}),
    (422, "/encoding", {"variants": ["linear"], "encoding": "raw"}),
]  # fmt: skip
UNFIT: Final = [  # for tensors that came, which no schema knows
    (422, "/variants/1/parameters/rank", {
        "variants": ["mean", named("linformer", rank=2)], "inputs": INPUTS | {"key_projection": X},
    }),
    (422, "/inputs/mask", {"variants": ["linear"], "inputs": INPUTS | {"mask": [[True] * 3] * 3}}),
    (422, "/inputs/weight", {"variants": ["mean"], "inputs": INPUTS | {"weight": X}}),
    (422, "/inputs/key", {"variants": ["mean"], "inputs": INPUTS | {"key": [[1, 2]]}}),
    (422, "/inputs", {"variants": ["mean"], "inputs": {"value": X}}),
    (422, "/inputs", {"variants": ["linear_layer"]}),
    (422, "/variants/1", {"variants": ["linear", "mean"], "inputs": INPUTS | {"query": L4}}),
]  # fmt: skip


@pytest.mark.parametrize(("status", "pointer", "fields"), [*WRONG, *UNFIT])
def test_what_is_wrong_is_said_and_where(
    server: Server, status: int, pointer: str, fields: dict[str, Any]
) -> None:
    body = {"inputs": INPUTS} | fields
    assert refused(post(server, body), status, body)["pointer"] == pointer


def test_what_only_some_take_goes_to_those(server: Server) -> None:
    half = np.random.default_rng(0).normal(size=(2, 3)).tolist()
    inputs = INPUTS | {"key_projection": half, "value_projection": half}
    response = post(server, {"inputs": inputs, "variants": ["linformer", "mean"]})
    assert response.status_code == 200, response.text


def test_what_is_too_large_is_refused_before_it_runs(serve: Callable[..., Server]) -> None:
    small = serve(max_scores=100, max_queue_bytes=4000, max_answer_bytes=1000)
    inputs = {n: a.tolist() for n, a in drawn(B=1, H=1, G=1, N=12).items()}
    problem = refused(post(small, {"inputs": inputs, "variants": ["linear"]}), 413)
    assert problem["limit"] == 100
    body: dict[str, Any] = {"inputs": inputs, "variants": ["linear"], "anchor": "mean"}
    assert refused(post(small, body), 413)["pointer"] == "/rows"
    assert post(small, body | {"rows": 8}).status_code == 200
    long = {n: a.tolist() for n, a in drawn(B=1, H=1, G=1, N=51).items()}
    body = {"inputs": long, "variants": ["linear"], "anchor": "taylor", "rows": 0}
    assert "own error is found by its output" in refused(post(small, body), 413)["detail"]
    assert post(small, body | {"dtype": "float64", "rows": 0}).status_code == 413


@pytest.mark.parametrize(
    "accept", ["application/json", "*/*", "application/*", "text/html, */*;q=0.1"]
)
def test_json_is_all_that_comes(server: Server, accept: str) -> None:
    body = {"inputs": INPUTS, "variants": ["linear"], "repeats": 1}
    assert post(server, body, headers={"Accept": accept}).status_code == 200
    for other in ("text/html", safetensors.MEDIA_TYPE, "application/json;q=0"):
        refused(post(server, body, headers={"Accept": other}), 406)


ANYTHING: Final = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers(-(2**65), 2**65)
    | strategies.floats() | strategies.text(max_size=8) | strategies.sampled_from(VARIANTS),
    lambda inner: strategies.lists(inner, max_size=4)
    | strategies.dictionaries(
        strategies.sampled_from(["variant", "parameters", "causal", "rank", "scale", "x"]), inner
    ),
    max_leaves=8,
)  # fmt: skip


@hypothesis.settings(max_examples=300)
@hypothesis.given(
    strategies.dictionaries(
        strategies.sampled_from(["variants", "anchor", "repeats", "rows", "dtype", "layer", "no"]),
        ANYTHING,
    ),
    strategies.dictionaries(strategies.sampled_from([*INPUTS, "x", "mask", "weight"]), ANYTHING),
    strategies.booleans(),
)
def test_whatever_comes_is_refused_or_can_run(
    fields: dict[str, Any], inputs: dict[str, Any], are_good: bool
) -> None:
    """With inputs of any kind, and with good ones."""
    asked = {"variants": ["linear"]} | fields | {"inputs": INPUTS if are_good else inputs}
    try:
        message = wire.decode(json.dumps(asked).encode(), "inputs")
        made = Comparison(message, UNLIMITED)
    except QkvError as error:
        explained(error, asked)
    else:
        for contender in made.variants:
            for job in made.divergences(contender):
                assert job.pairs
        assert json.loads(json.dumps(local.compare(message)))["variants"]


def slow(server: Server) -> bytes:
    """A request that takes 1700 runs, and seconds."""
    inputs = dict.fromkeys(INPUTS, X * 200)
    body = json.dumps({"inputs": inputs, "variants": ["softmax"] * 16, "repeats": 100}).encode()
    head = f"POST {COMPARE} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.fixture
def counted(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Every job that is submitted."""
    jobs: list[Job] = []
    submit = server.engine.submit

    def counting(job: Job, **how: Any) -> Any:
        jobs.append(job)
        return submit(job, **how)

    monkeypatch.setattr(server.engine, "submit", counting)
    return jobs


def test_who_leaves_ends_it(server: Server, counted: list[Job]) -> None:
    with socket.create_connection(server.address) as leaver:
        leaver.sendall(slow(server))
        with server.engine.hold():
            until(lambda: server.waiting == 1)
            leaver.close()
            until(lambda: server.waiting == 0)
        seen = len(counted)
        assert post(server, {"inputs": INPUTS, "variants": ["mean"], "repeats": 1}).is_success
    own = 2 + 2 + 1 + 1
    assert len(counted) == seen + own


def test_others_are_answered_meanwhile(server: Server, counted: list[Job]) -> None:
    """Each run waits for its own turn: between two of them there is room for others."""
    with socket.create_connection(server.address) as asking:
        asking.sendall(slow(server))
        until(lambda: len(counted) > 5)
        before = len(counted)
        for _ in range(5):
            response = server.http.post("/v1/attention/softmax", json={"inputs": INPUTS})
            assert response.status_code == 200
        assert before <= len(counted) < 17 * 101
    until(lambda: server.waiting == 0)


def test_a_deadline_is_each_runs_own(server: Server) -> None:
    body = {"inputs": INPUTS, "variants": ["linear"], "repeats": 1}
    with server.engine.hold():
        late = post(server, body, headers={"X-Request-Timeout": "0.05"})
    refused(late, 504)
    refused(post(server, body, headers={"X-Request-Timeout": "soon"}), 400)
    assert post(server, body, headers={"X-Request-Timeout": "30"}).status_code == 200


def test_an_engine_that_fails_is_said(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise QkvError("no")

    monkeypatch.setattr(server.engine, "submit", full)
    assert post(server, {"inputs": INPUTS, "variants": ["linear"]}).status_code == 500


def test_many_at_once_are_all_answered(server: Server) -> None:
    body = {"inputs": INPUTS, "variants": ["linear", "mean"], "repeats": 3}
    answers: list[int] = []

    def ask() -> None:
        answers.append(httpx.post(f"{server.url}{COMPARE}", json=body, timeout=60).status_code)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 8


# ------------------------------------------------------------ as it is described


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    """The OpenAPI document."""
    found: dict[str, Any] = server.http.get("/openapi.json").json()
    return found


def asked_schema(document: dict[str, Any]) -> dict[str, Any]:
    """Of the body."""
    content = document["paths"][COMPARE]["post"]["requestBody"]["content"]
    schema: dict[str, Any] = content["application/json"]["schema"]
    return schema


def test_every_example_runs_and_is_answered_as_shown(
    server: Server, document: dict[str, Any]
) -> None:
    operation = document["paths"][COMPARE]["post"]
    content = operation["requestBody"]["content"]
    assert content.keys() == {"application/json", safetensors.MEDIA_TYPE}
    answers = operation["responses"]["200"]["content"]["application/json"]
    assert content["application/json"]["examples"].keys() == answers["examples"].keys()
    for name, example in content["application/json"]["examples"].items():
        assert fits(example["value"], asked_schema(document), document)
        response = post(server, example["value"])
        assert response.status_code == 200, response.text
        _same(response.json(), answers["examples"][name]["value"])
        assert fits(answers["examples"][name]["value"], answers["schema"], document)
        kept(document, response)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_answer_is_as_described(server: Server, document: dict[str, Any], name: str) -> None:
    inputs = {n: a.tolist() for n, a in drawn().items()}
    fields = {"variants": [named(name), named("softmax", causal=True)], "repeats": 1}
    for more in ({}, {"rows": 0}, {"dtype": "float64"}):
        body = {"inputs": inputs} | fields | more
        assert fits(body, asked_schema(document), document)
        response = post(server, body)
        assert response.status_code == 200, response.text
        kept(document, response)


@pytest.mark.parametrize(
    ("fields", "is_unfit"),
    [(fields, False) for *_, fields in WRONG] + [(fields, True) for *_, fields in UNFIT],
)
def test_what_is_refused_is_described(
    server: Server, document: dict[str, Any], fields: dict[str, Any], is_unfit: bool
) -> None:
    body = {"inputs": INPUTS} | fields
    assert fits(body, asked_schema(document), document) is is_unfit
    kept(document, post(server, body))


def test_its_other_faults_are_described(server: Server, document: dict[str, Any]) -> None:
    for status, how in (
        (400, {"content": b"[]"}),
        (406, {"json": {}, "headers": {"Accept": "text/html"}}),
        (415, {"content": b"x", "headers": {"Content-Type": "text/plain"}}),
    ):
        response = server.http.post(COMPARE, **how)
        assert described(document, response)["example"] == refused(response, status)
        kept(document, response)
