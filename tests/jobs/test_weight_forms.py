"""Each form of the weights agrees with the whole matrix, at any length, in every wire format."""

from __future__ import annotations

import json as stdlib
import math
from collections.abc import Mapping
from typing import Any, Final

import httpx
import numpy as np
import pytest

from qkv import local
from qkv.attention.catalogue import variants
from qkv.attention.variant import Variant
from qkv.client.arrays import to_raw
from qkv.engine import weight_blocks
from qkv.jobs import weight_forms
from qkv.jobs.job import Job
from qkv.jobs.plan import Limits, Plan
from qkv.tensors import RawTensor
from qkv.wire import json, safetensors
from qkv.wire.message import Message
from support.drawn_requests import sample
from support.known_requests import EPS, Array, as_array, as_json
from support.peak_memory import needs_proc, peaks
from support.seen_weights import largest_weights
from support.sent_jobs import send
from support.service import Server

SIZES: Final = dict(zip("BHGLSDEIOR", (2, 6, 2, 14, 23, 6, 3, 23, 5, 8), strict=True))
LIMITS: Final = Limits(response_bytes=1 << 30, job_bytes=1 << 30)
FORMS: Final[list[Any]] = [
    {"rows": [13, 0, 3, 3, 4]}, {"top_k": 1}, {"top_k": 5}, {"top_k": 23}, {"pool": 1},
    {"pool": 4}, {"pool": 18}, {"pool": 99}, "stats",
]  # fmt: skip


BLOCKS: Final = (None, 200, 1600, 1)
"""Numbers of elements of a block: the real one, and three that cut the drawn requests: a group
of heads, some rows, a head."""
SEEDS: Final = 12


def request_of(variant: Variant, seed: int) -> Message:
    """Returns the request of a seed, of these sizes."""
    drawn = sample(variant, seed, SIZES, is_tame=True)
    tensors = {name: to_raw(tensor) for name, tensor in drawn.named_tensors().items()}
    parameters = stdlib.loads(stdlib.dumps(drawn.parameters))  # lists for tuples
    return Message({"parameters": parameters}, tensors)


def run_form(variant: Variant, message: Message, weights: Any) -> dict[str, Array]:
    """Returns the tensors of a form, without other outputs."""
    fields = message.fields | {"weights": weights, "outputs": ["weights"]}
    response = local.attend(variant.name, Message(fields, message.tensors))
    return {name: tensor.numpy() for name, tensor in response.tensors.items()}


class Truth:
    """The forms of the whole matrix in float64, with bounds of the rounding errors.

    Args:
        whole: (..., L, S); the error of each number is at most 64 eps of its row's mass times the
            number of terms.
        eps: that of the dtype of the weights.
    """

    def __init__(self, whole: Array, eps: float) -> None:
        self.whole = whole.astype(np.float64)
        self.L, self.S = whole.shape[-2:]
        self.mass = np.abs(self.whole).sum(-1, keepdims=True)
        self.share_off = 64 * eps * (self.S + SIZES["D"])  # of a weight divided by its row's mass
        self.off = self.share_off * max(self.mass.max(), 1e-30)

    def check(self, form: Any, found: Mapping[str, Array]) -> None:
        if form == "stats":
            return self._check_stats(found)
        ((kind, value),) = form.items()
        getattr(self, f"_check_{kind}")(value, found)
        return None

    def _check_rows(self, rows: list[int], found: Mapping[str, Array]) -> None:
        assert found.keys() == {"weights"}
        near(found["weights"], self.whole[..., rows, :], self.off)

    def _check_top_k(self, k: int, found: Mapping[str, Array]) -> None:
        assert found.keys() == {"weights", "indices"}
        weights, indices = found["weights"], found["indices"]
        assert indices.dtype == np.int64
        near(weights, largest_weights(self.whole, k), self.off)
        has_key = weights != 0
        assert ((indices == -1) == ~has_key).all()
        at_index = np.take_along_axis(self.whole, indices.clip(0), -1)
        near(np.where(has_key, at_index, 0), weights, self.off)
        for row in indices.reshape(-1, k):
            assert len({*row[row >= 0]}) == np.count_nonzero(row >= 0)
        assert (has_key[..., :-1] | ~has_key[..., 1:]).all()  # places without a key come last
        assert (np.diff(weights)[has_key[..., 1:]] <= 0).all()
        equal = has_key[..., 1:] & (np.diff(weights) == 0)
        assert (np.diff(indices)[equal] > 0).all()  # the first of equal weights

    def _check_pool(self, bins: int, found: Mapping[str, Array]) -> None:
        assert found.keys() == {"weights"}
        P, Q = min(bins, self.L), min(bins, self.S)
        query_bin, key_bin = np.arange(self.L) * P // self.L, np.arange(self.S) * Q // self.S
        first_query = np.searchsorted(query_bin, np.arange(P))
        sums = np.add.reduceat(self.whole, first_query, -2)
        sums = np.add.reduceat(sums, np.searchsorted(key_bin, np.arange(Q)), -1)
        expected = sums / np.bincount(query_bin)[:, None]
        near(found["weights"], expected, self.off * -(-self.S // Q))

    def _check_stats(self, found: Mapping[str, Array]) -> None:
        names = ["entropy", "largest", "largest_index", "effective_keys", "received"]
        assert sorted(found) == sorted(names)
        entropy, largest, index, effective, received = (found[name] for name in names)
        assert index.dtype == np.int64
        sees = self.mass[..., 0] > 0
        share = np.abs(self.whole) / np.where(self.mass == 0, 1, self.mass)
        terms = np.where(share > 0, share * np.log(np.where(share > 0, share, 1)), 0)
        # if x changes by d, x log x changes by at most d (1 - log d)
        d = 2 * self.share_off
        off = self.S * d * (1 + abs(math.log(d)))
        near(entropy, -terms.sum(-1), off)
        near(effective, np.where(sees, np.exp(-terms.sum(-1)), 0), self.S * math.expm1(2 * off))
        expected = largest_weights(self.whole, 1)[..., 0]
        near(largest, expected, self.off)
        assert ((index == -1) == (largest == 0)).all()
        at = np.take_along_axis(self.whole, index.clip(0)[..., None], -1)[..., 0]
        near(np.where(index >= 0, at, 0), expected, 2 * self.off)
        assert (entropy[~sees] == 0).all()
        near(received, self.whole.sum(-2), self.off * self.L)


def near(found: Array, expected: Array, off: float) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= off


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("variant", variants().values(), ids=lambda v: v.name)
def test_form_agrees_with_the_whole_matrix(
    variant: Variant, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers masks, causal, grouped heads, padding that holds NaN, and rows that see nothing.

    Blocks of rows, heads and items have any size; pooling runs with and without attention.
    """
    if (elements := BLOCKS[seed % len(BLOCKS)]) is not None:
        # the real sizes bound memory: tensors of several blocks take seconds
        for name in ("_CPU_BLOCK_ELEMENTS", "_MAX_POOL_ELEMENTS"):
            monkeypatch.setattr(weight_blocks, name, elements)
        monkeypatch.setattr(weight_blocks, "_MIN_BLOCK_ROWS", 2 if elements == 200 else 5)
        monkeypatch.setattr(weight_blocks, "_BINS_PER_CALL", 7)
        monkeypatch.setattr(weight_blocks, "_FEW_BINS", 0 if elements == 1 else 128)
    message = request_of(variant, seed)
    whole = run_form(variant, message, "full")["weights"]
    one_row = weight_forms.query_axis(variant.outputs["weights"]) is None
    truth = Truth(whole[:, None] if one_row else whole, EPS[whole.dtype.name])
    for form in FORMS:
        if one_row and "rows" in form:
            continue
        found = run_form(variant, message, form)
        for name, array in found.items():
            assert array.dtype in (whole.dtype, np.int64), name
            if one_row and name != "received":
                found[name] = array[:, None]
        truth.check(form, found)


def test_equal_weights_are_ordered_by_key() -> None:
    """The first of equal weights counts, within the k, at its edge, and beyond."""
    ones, mean = {"value": RawTensor.from_numpy(np.ones((1, 2, 50, 3)))}, variants()["mean"]
    for k in (1, 7, 49, 50):
        found = run_form(mean, Message({}, ones), {"top_k": k})["indices"]
        sees = np.arange(k) <= np.arange(50)[:, None]  # `mean` is causal
        assert (found == np.where(sees, np.arange(k), -1)).all()
    query = np.ones((1, 1, 4, 1))
    key = np.array([0.0, 2, 1, 2, 1, 0, 2, 1])[None, None, :, None]
    tensors = {"query": query, "key": key, "value": key}
    message = Message({}, {n: RawTensor.from_numpy(a) for n, a in tensors.items()})
    for k in range(1, 9):
        found = run_form(variants()["softmax"], message, {"top_k": k})["indices"]
        assert (found == [1, 3, 6, 2, 4, 7, 0, 5][:k]).all()


@pytest.mark.parametrize("form", [{"top_k": 3}, {"pool": 2}, "stats", {"rows": [0]}], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_nan_has_a_response(form: Any, seed: int) -> None:
    for variant in variants().values():
        if "rows" in form and weight_forms.query_axis(variant.outputs["weights"]) is None:
            continue
        message = request_of(variant, seed)
        first = next(iter(message.tensors))
        array = message.tensors[first].numpy().copy()
        array[0, ..., 0] = np.nan
        tensors = message.tensors | {first: RawTensor.from_numpy(array)}
        whole = run_form(variant, Message(message.fields, tensors), "full")["weights"]
        for name, found in run_form(variant, Message(message.fields, tensors), form).items():
            if name == "weights" and np.isnan(whole).any():
                assert np.isnan(found).any()


# ---------------------------------------------------------------- over the wire

SQUARE: Final = np.array([[1, 0], [0, 2], [1, 1]], np.float32)
INPUTS: Final = {"query": SQUARE, "key": SQUARE, "value": SQUARE}
PATH: Final = "/v1/attention/softmax"
NAMES: Final = {
    "stats": {"entropy", "largest", "largest_index", "effective_keys", "received"},
    "rows": {"weights"}, "top_k": {"weights", "indices"}, "pool": {"weights"},
}  # fmt: skip
SUMMARIES: Final[list[Any]] = ["stats", {"rows": [2, 0]}, {"top_k": 2}, {"pool": 2}]


@pytest.mark.parametrize("form", SUMMARIES, ids=str)
@pytest.mark.parametrize("encoding", ["lists", "base64", "safetensors"])
def test_every_wire_format_has_every_form(server: Server, form: Any, encoding: str) -> None:
    local_tensors = run_form(variants()["softmax"], Message({}, _raw(INPUTS)), form)
    kind = form if isinstance(form, str) else next(iter(form))
    for _ in range(2):  # the second request uses the plan of the first
        found, fields = _post(server, {"weights": form}, encoding)
        assert found.keys() == {"output"} | NAMES[kind]
        assert fields["weights_are"] == "stochastic"
        for name in NAMES[kind]:
            if encoding != "lists":
                assert found[name].dtype == local_tensors[name].dtype
            assert np.array_equal(
                found[name].astype(local_tensors[name].dtype), local_tensors[name]
            ), name


def _raw(arrays: Mapping[str, Array]) -> dict[str, RawTensor]:
    return {name: RawTensor.from_numpy(array) for name, array in arrays.items()}


def _post(
    server: Server, fields: dict[str, Any], encoding: str
) -> tuple[dict[str, Array], dict[str, Any]]:
    if encoding == "safetensors":
        content = b"".join(safetensors.encode(Message(fields, _raw(INPUTS)), "inputs"))
        headers = {"Content-Type": safetensors.MEDIA_TYPE}
        response = server.http.post(PATH, content=content, headers=headers)
        assert response.status_code == 200, response.text
        reply = safetensors.decode(response.content, "outputs")
        return {n: t.numpy() for n, t in reply.tensors.items()}, reply.fields
    inputs = {name: as_json(array, encoding) for name, array in INPUTS.items()}
    response = server.http.post(PATH, json={"inputs": inputs} | fields)
    assert response.status_code == 200, response.text
    body = response.json()
    if "indices" in body["outputs"] and encoding == "lists":
        assert isinstance(body["outputs"]["indices"][0][0], int)
    return {n: as_array(t) for n, t in body["outputs"].items()}, body


@pytest.mark.parametrize("form", SUMMARIES, ids=str)
def test_forms_have_the_rank_of_the_inputs(server: Server, form: Any) -> None:
    """Covers inputs without heads or batch, and layers with and without heads."""
    whole, fewer = np.stack([np.stack([SQUARE] * 2)] * 2), SQUARE
    for layer, inputs, lead in (
        (None, dict.fromkeys(INPUTS, whole), (2, 2)),
        (None, dict.fromkeys(INPUTS, whole[0]), (2,)),
        (None, INPUTS, ()),
        ({"heads": 1}, {"x": fewer}, (1,)),
        ({"heads": None}, {"x": whole[0]}, (2,)),
    ):
        fields: dict[str, Any] = {"weights": form, "outputs": ["weights"]}
        if layer is not None:
            square = np.eye(2).tolist()
            weights = {f"W_{n}": square for n in INPUTS}
            fields["layer"] = {"layout": "v1", "tensors": weights, **layer}
        body = {"inputs": {n: a.tolist() for n, a in inputs.items()}} | fields
        response = server.http.post(PATH, json=body)
        assert response.status_code == 200, response.text
        for tensor in response.json()["outputs"].values():
            assert np.shape(tensor)[: len(lead)] == lead
            assert np.ndim(tensor) - len(lead) in (1, 2)


def test_equal_forms_batch_and_other_processes_decode_them() -> None:
    def job(form: Any) -> Job:
        return Job.new(Plan, "softmax", Message({"weights": form}, _raw(INPUTS)), LIMITS)

    keys = [
        job(form).batch_key for form in [*SUMMARIES, "full", "none", {"top_k": 1}, {"rows": [0, 2]}]
    ]
    assert len(set(keys)) == len(keys)
    for form in SUMMARIES:
        assert job(form).batch_key == job(form).batch_key
        one = job(form)
        other = send(one)
        assert other.plan.form == one.plan.form
        assert other.plan.output_specs == one.plan.output_specs


def test_response_in_lists_can_be_decoded(server: Server) -> None:
    body = {"inputs": {n: a.tolist() for n, a in INPUTS.items()}, "weights": {"top_k": 3}}
    response: httpx.Response = server.http.post(PATH, json=body)
    reply = json.decode(response.content, "outputs")
    assert reply.tensors["indices"].dtype == "int64"


# ---------------------------------------------------------------- memory

WHOLE: Final = ("softmax", "sigmoid", "linear", "taylor", "efficient", "linformer", "mean")
"""Variants that are measured at 5,120 tokens of a head, whose whole matrix has 100 MiB."""
LONG: Final = (
    *((name, ("rows", "pool-64")) for name in ("linear", "taylor", "efficient", "linformer")),
    *((name, ("rows",)) for name in ("softmax", "sigmoid")),
)
"""Variants and forms that are measured at 32,768 tokens of 2 heads, with a matrix of 8 GiB."""

_MEASURE: Final = """
from qkv.attention import catalogue
from qkv.engine import weight_blocks
from qkv.jobs.weight_forms import WeightForm
for name, N, H, D, threads, forms in CASES:
    torch.set_num_threads(threads)  # each thread has a block of its own
    variant = catalogue.find(name)
    sizes = dict(B=1, H=H, G=H, L=N, S=N, D=D, E=D, R=256)
    tensors = {
        i.argument: torch.randn([sizes[x] for x in i.letters])
        for i in variant.inputs.values() if not i.is_optional
    }
    parameters = variant.parse({})
    arguments = tensors | {n: getattr(parameters, n) for n in type(parameters).model_fields}
    every = {
        "rows": WeightForm("rows", rows=(0, N // 2, N - 1)), "pool-64": WeightForm("pool", 64),
        "pool-200": WeightForm("pool", 200), "stats": WeightForm("stats"),
        "top_k": WeightForm("top_k", 8),
    }
    start()
    for form in forms:
        with torch.inference_mode():
            result = weight_blocks.compute_weight_form(
                variant, every[form], arguments, parameters, sizes
            )
        assert all(t.isfinite().all() for t in result.values())
    say()
"""


@pytest.fixture(scope="module")
def measured() -> dict[tuple[str, int], int]:
    """Returns the peaks by variant and tokens, of one process."""
    # `top_k` reads the blocks of a variant as `stats` does, and keeps as much for each variant; the
    # pooled map of sigmoid reads them as that of softmax does
    every = ("rows", "pool-200", "stats")
    forms_of: dict[str, tuple[str, ...]] = dict.fromkeys(WHOLE, every)
    forms_of |= {"softmax": (*every, "top_k"), "sigmoid": ("rows", "stats")}
    cases: list[tuple[str, int, int, int, int, tuple[str, ...]]] = [
        *((name, 5120, 1, 16, 1, forms) for name, forms in forms_of.items()),
        *((name, 32768, 2, 64, 2, forms) for name, forms in LONG),
    ]
    found = peaks(f"CASES = {cases!r}{_MEASURE}")
    return {(name, N): peak.above for (name, N, *_), peak in zip(cases, found, strict=True)}


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_no_form_holds_the_matrix(name: str, measured: dict[tuple[str, int], int]) -> None:
    """The peak is below half of it."""
    assert measured[name, 5120] < 50 << 20


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _ in LONG])
def test_32768_tokens_take_less_than_2_gib(name: str, measured: dict[tuple[str, int], int]) -> None:
    """Two heads have a quarter of the memory of eight.

    The test covers rows, and the pooled map where that takes less than a minute.
    bench/weight_form_cost.py measures all forms.
    """
    assert measured[name, 32768] < (2 << 30) // 4
