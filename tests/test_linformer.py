"""Linformer: the reference, given and drawn projections, the extremes, refusals, gradients."""

from __future__ import annotations

import concurrent.futures
import math
from typing import Any, Final

import numpy as np
import pytest
import torch
from cases import refused
from conftest import Server
from hypothesis import given, settings
from hypothesis import strategies as st
from peaks import needs_proc, peaks
from torch import Tensor

from qkv.attention import linformer
from qkv.engine import GPU_BATCH
from qkv.errors import InvalidContent, TooLarge
from qkv.job import Job, Limits
from qkv.message import Message
from qkv.run import run
from qkv.tensors import RawTensor

ALL: Final = frozenset({"output", "weights", "map"})
OUTPUT: Final = frozenset({"output"})
DTYPES: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
PATH: Final = "/v1/attention/linformer"
LIMITS: Final = Limits(answer=1 << 30, request=1 << 30)
INPUTS: Final = {"query": [[1, 0]], "key": [[1, 0], [0, 1]], "value": [[1, 2], [3, 4]]}

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def attended(*tensors: Any, **parameters: Any) -> linformer.Linformer:
    """All outputs, their dtypes checked."""
    found = linformer.attend(*tensors, **parameters, outputs=ALL)
    dtype = tensors[0].dtype
    for tensor, expected in zip(found, (dtype, *2 * [exact_dtype(dtype)]), strict=False):
        assert isinstance(tensor, Tensor)
        assert tensor.dtype == expected
    return found


def drawn(stream: int, rank: int, length: int, seed: int) -> Tensor:
    """The definition: normal with variance 1/rank, key by key."""
    bits = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64))
    numbers = np.random.Generator(bits).standard_normal((length, rank))
    return torch.from_numpy(numbers.T / math.sqrt(rank)).contiguous()


def assert_right(tensors: tuple[Tensor | None, ...], **parameters: Any) -> None:
    """The reference's numbers, within what roundings allow; alone, together, and by rows.

    A score sums S D products, each rounded (S + D + 8 times in a row at most): delta. Its weight
    in the map is off by the factor e^(2 delta), which also is what the sum below it may be off, and
    by R + 64 roundings of the sum and of exp. What averages mixtures of S adds R + S roundings of
    the sum's mass, and the answer is rounded to its dtype. What underflows loses the smallest
    normal number at most. eps is twice a rounding: half of each bound is for the reference.
    """
    query, key, value, E, F, lengths = tensors
    assert query is not None
    assert key is not None
    assert value is not None
    truth = linformer.reference(*tensors, **parameters)  # type: ignore[arg-type]
    assert truth.output is not None
    assert truth.weights is not None
    assert truth.map is not None
    dtype, (S, D), R = query.dtype, key.shape[2:], truth.map.shape[-1]
    seed = parameters.get("seed", 0)
    E, F = (
        (drawn(i, R, S, seed).to(dtype) if p is None else p).double()[:, :S].abs()
        for i, p in enumerate((E, F))
    )
    if lengths is not None:
        padding = (torch.arange(S) >= lengths[:, None])[:, None, :, None]
        key, value = key.masked_fill(padding, 0.0), value.masked_fill(padding, 0.0)
    K = query.shape[1] // key.shape[1]
    k, v = (x.double().abs().repeat_interleave(K, 1) for x in (key, value))
    scale = parameters.get("scale")
    scale = D**-0.5 if scale is None else scale
    eps, tiny = (getattr(torch.finfo(exact_dtype(dtype)), n) for n in ("eps", "tiny"))
    size = abs(scale) * (query.double().abs() @ (E @ k).mT)
    delta = (eps * (S + D + 10) * size + tiny * (S + D) * max(1, abs(scale))).amax(-1, keepdim=True)
    relative = torch.expm1(2 * delta) + (R + 64) * eps
    bounds = {
        "map": truth.map * relative + tiny,
        "weights": (relative + (R + 2) * eps) * (truth.map @ F) + R * tiny,
        "output": (relative + (R + S + 8) * eps) * (truth.map @ (F @ v))
        + torch.finfo(dtype).eps * truth.output.abs()
        + (R + S) * torch.finfo(dtype).tiny,
    }
    found = attended(*tensors, **parameters)
    alone = linformer.attend(*tensors, **parameters, outputs=OUTPUT)  # type: ignore[arg-type]
    assert alone.weights is None
    assert alone.map is None
    start = L // 2 if (L := query.shape[2]) > 1 else 0
    taken = (*tensors[:2], *tensors[3:])
    rows = linformer.weights(*taken, **parameters)(slice(start, L))  # type: ignore[arg-type]
    for name, tensor, at in (
        *((name, getattr(found, name), 0) for name in ALL),
        ("output", alone.output, 0),
        ("weights", rows, start),
    ):
        off = (tensor.double() - getattr(truth, name)[:, :, at:]).abs()
        assert (off <= bounds[name][:, :, at:]).all(), name


@st.composite
def requests(draw: st.DrawFn) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    B, G, K, D, E, R = (draw(st.integers(1, most)) for most in (3, 3, 3, 9, 9, 9))
    L, S = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    N = S + draw(st.sampled_from([0, 0, 1, 30]))
    dtype, size = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([0.0, 1e-3, 1.0, 4.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, key = normal(B, G * K, L, D) * size, normal(B, G, S, D) * size
    value, lengths = normal(B, G, S, E), None
    if draw(st.booleans()):
        lengths = torch.randint(0, S + 1, (B,), generator=generator)
        padding = (torch.arange(S) >= lengths[:, None])[:, None, :, None]
        garbage = draw(st.sampled_from([0.0, 100.0, math.nan, math.inf]))
        key, value = key.masked_fill(padding, garbage), value.masked_fill(padding, garbage)
    given = [normal(R, N).to(dtype) / R**0.5 if draw(st.booleans()) else None for _ in "EF"]
    parameters: dict[str, Any] = {"seed": draw(st.integers(0, 2**64 - 1))}
    if draw(st.booleans()):
        parameters["rank"] = R
    if draw(st.booleans()):
        parameters["scale"] = draw(st.sampled_from([0.0, -1.5, 0.3]))
    tensors = [x.to(dtype) for x in (query, key, value)]
    return (*tensors, *given, lengths), parameters


@settings(max_examples=300)
@given(request=requests(), block=st.none() | st.integers(1, 300))
def test_against_reference(request: Any, block: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if block is not None:
            patch.setattr(linformer, "_ELEMENTS", block)
        assert_right(request[0], **request[1])


@every_dtype
def test_the_seeds_shape(dtype: torch.dtype) -> None:
    """Seed 003: N = 1000, d = 256, rank 100."""
    query, key, value = (torch.randn(1, 1, 1000, 256).to(dtype) for _ in range(3))
    assert_right((query, key, value, None, None, None), rank=100)


@every_dtype
def test_a_shorter_sequence_takes_the_first_columns(dtype: torch.dtype) -> None:
    """Given or drawn, with the same bits as if they were made for it."""
    query, key, value = (torch.randn(2, 2, 20, 8).to(dtype) for _ in range(3))
    E, F = torch.randn(5, 64).to(dtype), torch.randn(5, 64).to(dtype)
    longer = attended(query, key, value, E, F)
    by_hand = attended(query, key, value, E[:, :20].contiguous(), F[:, :20].contiguous())
    for name in ALL:
        assert torch.equal(getattr(longer, name), getattr(by_hand, name))
    assert torch.equal(
        linformer._drawn(1, 5, 3, torch.zeros(1, 1, 64, 1))[:, :20],
        linformer._drawn(1, 5, 3, torch.zeros(1, 1, 20, 1)),
    )


@every_dtype
def test_drawn_is_as_if_it_had_been_given(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(2, 2, 20, 8).to(dtype) for _ in range(3))
    for seed in (0, 7, 2**64 - 1):
        E, F = (drawn(stream, 6, 20, seed).to(dtype) for stream in (0, 1))
        expected = attended(query, key, value, E, F)
        for came in ((None, None), (E, None), (None, F)):
            found = attended(query, key, value, *came, rank=6, seed=seed)
            for name in ALL:
                assert torch.equal(getattr(found, name), getattr(expected, name))
        assert not torch.equal(E, F)
    one, two = (attended(query, key, value, rank=6, seed=seed).map for seed in (1, 2))
    assert one is not None
    assert two is not None
    assert not torch.equal(one, two)


@pytest.mark.parametrize("rank", [1, 64, 256])
def test_drawn_numbers_have_variance_1_over_rank(rank: int) -> None:
    """Mean and variance within five standard deviations; E, F and other seeds uncorrelated."""
    n = rank * 2000
    parts = [
        linformer._drawn(stream, rank, seed, torch.zeros(1, 1, 2000, 1).double())
        for stream, seed in ((0, 0), (1, 0), (0, 1), (0, 2**63))
    ]
    for part in parts:
        unit = part.flatten() * math.sqrt(rank)
        assert abs(float(unit.mean())) < 5 / math.sqrt(n)
        assert abs(float((unit**2).mean()) - 1) < 5 * math.sqrt(2 / n)
    correlated = torch.corrcoef(torch.stack([p.flatten() for p in parts])) - torch.eye(4)
    assert (correlated.abs() < 5 / math.sqrt(n)).all()


@every_dtype
def test_map_weights_and_output_are_of_one_piece(dtype: torch.dtype) -> None:
    """map @ F is the weights, weights @ value is the output, to the rounding of those products."""
    query, key = torch.randn(2, 4, 9, 8).to(dtype), torch.randn(2, 2, 30, 8).to(dtype)
    value, (E, F) = torch.randn(2, 2, 30, 3).to(dtype), torch.randn(2, 7, 30).to(dtype)
    lengths = torch.tensor([30, 11])
    padding = torch.arange(30) >= lengths[:, None]
    found = attended(query, key, value, E, F, lengths)
    P, A, Y = (getattr(found, n).double() for n in ("map", "weights", "output"))
    eps, f = torch.finfo(exact_dtype(dtype)).eps, F.double()
    torch.testing.assert_close(P.sum(-1), torch.ones(2, 4, 9).double(), rtol=0, atol=9 * eps)
    expected = (P @ f).masked_fill(padding[:, None, None], 0.0)
    assert ((A - expected).abs() <= 9 * eps * (P @ f.abs())).all()
    v = value.double().repeat_interleave(2, 1)
    bound = 48 * eps * (P @ f.abs() @ v.abs()) + torch.finfo(dtype).eps * Y.abs()
    assert ((Y - A @ v).abs() <= bound).all()
    assert (A < 0).any()


@every_dtype
@pytest.mark.parametrize("garbage", [math.nan, math.inf, "largest"])
def test_padding_may_hold_anything(dtype: torch.dtype, garbage: float | str) -> None:
    query, key, value = (torch.randn(3, 1, 7, 4).to(dtype) for _ in range(3))
    lengths = torch.tensor([7, 3, 0])
    fill = torch.finfo(dtype).max if isinstance(garbage, str) else garbage
    padding = (torch.arange(7) >= lengths[:, None])[:, None, :, None]
    dirty_key, dirty_value = (x.masked_fill(padding, fill) for x in (key, value))
    for outputs in (ALL, OUTPUT):
        kept = linformer.attend(query, key, value, None, None, lengths, outputs=outputs)
        found = linformer.attend(
            query, dirty_key, dirty_value, None, None, lengths, outputs=outputs
        )
        for name in outputs:
            assert torch.equal(getattr(found, name), getattr(kept, name))
        assert found.output is not None
        assert not found.output[2].any()
        assert found.weights is None or not found.weights[2].any()


# ---------------------------------------------------------------- the extremes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_numbers_whose_products_overflow(dtype: torch.dtype) -> None:
    """Powers of two that cancel: E K, F V and Q (E K)^T overflow, the answer is the plain one."""
    query, key, value = (torch.randn(2, 2, 9, 4).to(dtype) for _ in range(3))
    E, F = torch.randn(5, 9).to(dtype), torch.randn(5, 9).to(dtype)
    e = 900 if dtype == torch.float64 else 110
    eps = torch.finfo(dtype).eps
    plain = attended(query, key, value, E, F, scale=0.5)
    for factors in ((-e, e, e, -e), (e, -e, e, -e), (e, e, -e, -e), (e, e, e, -2 * e - e)):
        a, b, c, d = (2.0**f if abs(f) < 1000 else 0.0 for f in factors)
        if not d:
            continue
        found = attended(query * a, key * b, value * 2.0 ** (e // 2), E * c, F, scale=0.5 * d)
        for name, scaled in (("map", 1.0), ("weights", 1.0), ("output", 2.0 ** (e // 2))):
            close = 500 * eps  # about 50 roundings of scores and sums of a size of 10
            expected = getattr(plain, name) * scaled
            assert getattr(found, name).isfinite().all()
            off = (getattr(found, name) - expected).abs().amax() / scaled
            assert off <= close * max(1.0, float(expected.abs().amax() / scaled)), name


def test_mixtures_that_overflow_and_cancel() -> None:
    """F V of 1e310 and its opposite average to 0; a weight of e^-100 brings 1e310 back."""
    key = torch.tensor([[[[1.0], [0.0]]]], dtype=torch.float64)
    value = torch.tensor([[[[1e110], [1.0]]]], dtype=torch.float64)
    query = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    F = torch.tensor([[1e200, 0.0], [-1e200, 0.0]], dtype=torch.float64)
    E = torch.zeros(2, 2, dtype=torch.float64)
    for outputs in (ALL, OUTPUT):
        found = linformer.attend(query, key, value, E, F, outputs=outputs)
        assert found.output is not None
        assert float(found.output) == 0.0
        far = torch.tensor([[0.0, 0.0], [-100.0, 0.0]], dtype=torch.float64)
        one = torch.tensor([[0.0, 1.0], [1e200, 0.0]], dtype=torch.float64)
        found = linformer.attend(query, key, value, far, one, outputs=outputs)
        assert found.output is not None
        expected = math.exp(-100.0) * 1e300 * 1e10
        assert float(found.output) == pytest.approx(expected, rel=1e-13)
        gone = torch.tensor([[0.0, 0.0], [-1e5, 0.0]], dtype=torch.float64)
        found = linformer.attend(query, key, value, gone, one, outputs=outputs)
        assert found.output is not None
        assert float(found.output) == 1.0


@every_dtype
def test_the_largest_numbers_everywhere(dtype: torch.dtype) -> None:
    """The map is one-hot or even: of powers of two, so that equal scores stay equal."""
    most = 2.0 ** (math.frexp(torch.finfo(dtype).max)[1] - 1)

    def signs(*shape: int) -> Tensor:
        return (torch.randint(0, 2, shape) * 2.0 - 1.0).to(dtype) * most

    E, F = signs(3, 7), signs(3, 7)
    for factor in (1.0, 2.0**-9):
        query, key, value = signs(1, 2, 5, 4), signs(1, 2, 7, 4), signs(1, 2, 7, 2)
        found = attended(query, key, value * 0, E * factor, F)
        assert found.output is not None
        assert found.weights is not None
        assert found.map is not None
        assert not found.output.any()
        assert found.map.isfinite().all()
        assert (found.weights.abs() <= most).all()
        rows = found.map.sum(-1).double()
        eps = torch.finfo(exact_dtype(dtype)).eps
        torch.testing.assert_close(rows, torch.ones_like(rows), rtol=0, atol=4 * eps)
        truth = np.einsum(
            "bhld,rs,bhsd->bhlr", *(x.double().sign().numpy() for x in (query, E, key))
        )
        best = torch.from_numpy(truth == truth.max(-1, keepdims=True)).double()
        expected = best / best.sum(-1, keepdim=True)
        torch.testing.assert_close(found.map.double(), expected, rtol=0, atol=4 * eps)


@every_dtype
def test_scores_past_any_softmax(dtype: torch.dtype) -> None:
    """Huge but ordinary products: rows are finite, and the largest score takes all."""
    query, key, value = (torch.randn(1, 2, 6, 4).to(dtype) * 200 for _ in range(3))
    for scale in (1e9, -1e9, 1e-30, 0.0):
        found = attended(query, key, value, rank=3, scale=scale)
        truth = linformer.reference(query, key, value, rank=3, scale=scale)
        assert truth.map is not None
        torch.testing.assert_close(found.map.double(), truth.map, rtol=0, atol=1e-5)  # type: ignore[union-attr]


# ---------------------------------------------------------------- the request


def raw(x: Tensor) -> RawTensor:
    return RawTensor.from_numpy(x.numpy())


def job(*tensors: RawTensor, **parameters: Any) -> Job:
    names = ("query", "key", "value", "key_projection", "value_projection")
    fields = {"parameters": parameters, "outputs": sorted(ALL)}
    return Job.of("linformer", Message(fields, dict(zip(names, tensors, strict=False))), LIMITS)


def test_letters_that_no_tensor_binds() -> None:
    tensors = [raw(torch.randn(1, 2, 300, 4)) for _ in range(3)]
    E = raw(torch.randn(9, 301))
    for made, rank in (
        (job(*tensors), 256),
        (job(*tensors, rank=7), 7),
        (job(*tensors, rank=1000), 1000),
        (job(*tensors, E), 9),
        (job(*tensors, E, rank=9), 9),
        (job(*(raw(torch.randn(1, 2, 30, 4)) for _ in range(3))), 30),
    ):
        L = made.inputs.bound.sizes["L"]
        assert made.inputs.bound.sizes["R"] == rank
        assert made.answer_shape("map") == (1, 2, L, rank)
        drawn = 1 if "key_projection" in made.inputs.tensors else 2  # L is S here
        assert made.pairs == 2 * L * rank + 32 * drawn * rank * L
        assert made.flops == 2 * 2 * rank * 8 * (L + L)


def test_what_does_not_fit_is_found_before_it_is_queued() -> None:
    tensors = [raw(torch.randn(1, 1, 8, 4)) for _ in range(3)]
    with pytest.raises(InvalidContent, match=r"at most N=7 keys; S=8 came"):
        job(*tensors, raw(torch.randn(3, 7)))
    with pytest.raises(InvalidContent, match=r"'rank' is 4 where a projection has R=3") as caught:
        job(*tensors, raw(torch.randn(3, 8)), rank=4)
    assert caught.value.pointer == "/parameters/rank"
    with pytest.raises(InvalidContent, match="value_projection has R=4 where key_projection has"):
        job(*tensors, raw(torch.randn(3, 8)), raw(torch.randn(4, 8)))
    with pytest.raises(InvalidContent, match="value_projection has N=9 where key_projection has"):
        job(*tensors, raw(torch.randn(3, 8)), raw(torch.randn(3, 9)))
    message = Message({"parameters": {"rank": 3}}, dict(zip(INPUTS, tensors, strict=True)))
    # 8 x 3 pairs, and two projections of 3 x 8 to draw
    with pytest.raises(TooLarge, match=f"would compute {24 + 32 * 2 * 24} scores"):
        Job.of("linformer", message, LIMITS._replace(scores=23))
    Job.of("linformer", message, LIMITS._replace(scores=24 + 32 * 2 * 24))


@pytest.mark.parametrize(
    ("S", "width", "rank"),
    [(5000, 4, 65536), (1, 8192, 65536), (1, 1, 1 << 27)],
    ids=["drawn", "mixed", "given"],
)
def test_what_would_be_held_is_bounded(S: int, width: int, rank: int) -> None:
    """A rank may make much of little: projections by length, keys and values by width."""
    sizes = dict.fromkeys("BHGL", 1) | {"S": S, "D": width, "E": width}

    class Parameters:
        def __init__(self, rank: int | None) -> None:
            self.rank = rank

    if rank > 65536:
        sizes |= {"R": rank, "N": S}
    with pytest.raises(TooLarge, match="numbers beside the inputs") as caught:
        linformer.complete(sizes, Parameters(None if rank > 65536 else rank))
    assert caught.value.members == {"limit": 1 << 26}
    sizes |= {"S": 65536, "H": 8, "G": 8, "D": 64, "E": 64, "R": 256, "N": 65536}
    assert linformer.complete(sizes, Parameters(None)) == {"R": 256}


def test_what_has_no_meaning_is_refused_by_name(server: Server) -> None:
    for name in ("causal", "query_offset", "window", "softcap", "dropout", "normalize"):
        body: dict[str, Any] = {"inputs": INPUTS, "parameters": {name: 1}}
        problem = refused(server.http.post(PATH, json=body), 422)
        assert f"linformer refuses '{name}'" in problem["detail"]
        assert problem["pointer"] == f"/parameters/{name}"
    body = {"inputs": INPUTS | {"mask": [[True, True]]}}
    assert "no input 'mask'" in refused(server.http.post(PATH, json=body), 422)["detail"]
    for name, value in (("rank", 0), ("rank", 65537), ("rank", 1.5), ("seed", -1), ("seed", 0.5)):
        body = {"inputs": INPUTS, "parameters": {name: value}}
        assert name in refused(server.http.post(PATH, json=body), 422)["detail"]
    body = {"inputs": INPUTS | {"key_projection": [[1]]}}
    problem = refused(server.http.post(PATH, json=body), 422)
    assert problem["detail"] == "the projections are made for at most N=1 keys; S=2 came"
    assert problem["pointer"] == "/inputs"


def test_over_http(server: Server) -> None:
    """Output and weights unless more is named; over a layer too, where heads have no letters."""
    answer = server.http.post(PATH, json={"inputs": INPUTS}).json()
    assert list(answer["outputs"]) == ["output", "weights"]
    identity = {"key_projection": [[1, 0], [0, 1]], "value_projection": [[1, 0], [0, 1]]}
    body: dict[str, Any] = {"inputs": INPUTS | identity, "outputs": ["output", "map"]}
    answer = server.http.post(PATH, json=body).json()
    exact = server.http.post("/v1/attention/softmax", json={"inputs": INPUTS}).json()["outputs"]
    np.testing.assert_allclose(answer["outputs"]["map"], exact["weights"], rtol=1e-6)
    np.testing.assert_allclose(answer["outputs"]["output"], exact["output"], rtol=1e-6)
    eye = {f"W_{role}.weight": [[1, 0], [0, 1]] for role in ("query", "key", "value")}
    layer = {"layout": "v2", "tensors": eye, "heads": 2}
    x = {"x": [[1, 0], [0, 1], [2, 1]]}
    body = {"inputs": x, "layer": layer, "parameters": {"rank": 2}, "outputs": ["output", "map"]}
    found = server.http.post(PATH, json=body).json()["outputs"]
    assert np.shape(found["output"]) == (3, 2)
    assert np.shape(found["map"]) == (2, 3, 2)
    body["inputs"] = x | {"value_projection": [[1, 2], [3, 4]]}
    problem = refused(server.http.post(PATH, json=body), 422)
    assert "at most N=2 keys; S=3 came" in problem["detail"]


@pytest.mark.parametrize("stack", [False, True])
def test_only_requests_with_the_very_same_projections_batch(stack: bool) -> None:
    tensors = [[raw(torch.randn(b, 2, 6, 4)) for _ in range(3)] for b in (1, 2)]
    E, F, other = (raw(torch.randn(3, 6)) for _ in range(3))
    one, two = (job(*came, E, F) for came in tensors)
    apart, drawn_one, drawn_two = job(*tensors[0], E, other), *(job(*t, seed=4) for t in tensors)
    assert one.key == two.key != apart.key
    assert drawn_one.key == drawn_two.key != job(*tensors[0], seed=5).key
    for jobs in ([one, two], [drawn_one, drawn_two]):
        for asked, ran in zip(jobs, run(jobs, torch.device("cpu"), stack), strict=True):
            (alone,) = run([asked], torch.device("cpu"), stack)
            for name in ALL:
                found, expected = (r.outputs[name].numpy() for r in (ran, alone))
                assert found.shape == expected.shape
                if stack:  # which on a CPU keeps the numbers, not the bits
                    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
                else:
                    np.testing.assert_array_equal(found, expected)
    with_other, without = (run([j], torch.device("cpu"), stack)[0] for j in (apart, one))
    found, expected = (r.outputs["output"].numpy() for r in (with_other, without))
    assert not np.array_equal(found, expected)


def test_concurrent_requests_with_other_projections_do_not_mix(server: Server) -> None:
    server.engine._max_batch, before = GPU_BATCH, server.engine._max_batch
    cases = [[torch.randn(6, 4) for _ in range(3)] + list(torch.randn(2, 3, 6)) for _ in range(6)]
    names = ("query", "key", "value", "key_projection", "value_projection")

    def send(case: list[Tensor]) -> Any:
        inputs = {name: tensor.tolist() for name, tensor in zip(names, case, strict=True)}
        return server.http.post(PATH, json={"inputs": inputs, "outputs": sorted(ALL)}).json()

    try:
        with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
            with server.engine.hold():
                futures = [pool.submit(send, case) for case in cases]
                server.await_waiting(len(cases))
            answers = [future.result() for future in futures]
    finally:
        server.engine._max_batch = before
    for case, answer in zip(cases, answers, strict=True):
        assert answer["timing"]["batch_size"] == 1
        (alone,) = run([job(*map(raw, case))], torch.device("cpu"), stack=False)
        for name in ALL:
            np.testing.assert_array_equal(
                np.array(answer["outputs"][name], np.float32), alone.outputs[name].numpy()
            )


MEASURED: Final = """
from qkv.attention import linformer
x = torch.randn(1, 8, 65536, 64)
found = linformer.attend(x, x, x, outputs=frozenset(sys.argv[1:]))
assert all(getattr(found, name).isfinite().all() for name in sys.argv[1:])
say()
"""


@needs_proc
@pytest.mark.parametrize("outputs", [["output"], ["output", "map"]], ids=str)
def test_65536_tokens_fit_in_4_gib(outputs: list[str]) -> None:
    """H = 8, D = 64, rank 256: the map alone has half a GiB."""
    assert peaks(MEASURED, *outputs)[-1].whole < 4 << 30


# ---------------------------------------------------------------- gradients


class Attend(torch.autograd.Function):
    """attend, whose gradients are backward's."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        ctx.save_for_backward(*arguments[:6])
        ctx.parameters = arguments[6]
        output = linformer.attend(*arguments[:6], **arguments[6], outputs=OUTPUT).output
        assert output is not None
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        found = linformer.backward(grads[0], *ctx.saved_tensors, **ctx.parameters)
        names = ("query", "key", "value", "key_projection", "value_projection")
        return *(found.get(name) for name in names), None, None


def differentiable(lengths: Tensor | None, *given: bool) -> list[Any]:
    query, key = torch.randn(2, 4, 3, 5).double(), torch.randn(2, 2, 6, 5).double()
    value = torch.randn(2, 2, 6, 2).double()
    projections = [torch.randn(3, 8).double() if g else None for g in given]
    tensors = [t if t is None else t.requires_grad_() for t in (query, key, value, *projections)]
    return [*tensors, lengths]


@pytest.mark.parametrize("block", [None, 1])
@pytest.mark.parametrize("lengths", [None, torch.tensor([6, 2]), torch.tensor([0, 5])], ids=str)
@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True), (False, False)])
def test_gradients_are_those_of_finite_differences(
    given: tuple[bool, bool], lengths: Tensor | None, block: int | None
) -> None:
    parameters = {"scale": 0.7} if any(given) else {"rank": 3, "seed": 5}
    with pytest.MonkeyPatch.context() as patch:
        if block is not None:
            patch.setattr(linformer, "_ELEMENTS", block)
        tensors = differentiable(lengths, *given)
        inputs: tuple[Any, ...] = (*tensors, parameters)
        assert torch.autograd.gradcheck(Attend.apply, inputs)


@every_dtype
def test_gradients_of_any_dtype(dtype: torch.dtype) -> None:
    """By autograd through the textbook's lines in float64; padding's are zeros, garbage or not."""
    lengths = torch.tensor([6, 2])
    came: list[Any] = [t.detach().to(dtype) for t in differentiable(None, True, True)[:5]]
    grad = torch.randn(2, 4, 3, 2).to(dtype)
    query, key, value, E, F = (t.double().requires_grad_() for t in came)
    padding = (torch.arange(6) >= lengths[:, None])[:, None, :, None]
    k, v = (x.masked_fill(padding, 0.0).repeat_interleave(2, 1) for x in (key, value))
    P = torch.softmax(query @ (E[:, :6] @ k).mT * 5**-0.5, -1)
    output = P @ (F[:, :6] @ v)
    expected = torch.autograd.grad(output, (query, key, value, E, F), grad.double())
    for i in (1, 2):
        came[i] = came[i].masked_fill(padding, math.nan)
    query, key, value, E, F = came
    found = linformer.backward(grad, query, key, value, E, F, lengths)
    assert list(found) == ["query", "key", "value", "key_projection", "value_projection"]
    for tensor, truth in zip(found.values(), expected, strict=True):
        assert tensor.dtype == torch.float64
        close = 200 * torch.finfo(torch.float64).eps * float(truth.abs().amax())
        torch.testing.assert_close(tensor, truth, rtol=0, atol=close)
    for name in ("key", "value"):
        assert not found[name].masked_select(padding).any()
    for name in ("key_projection", "value_projection"):
        assert not found[name][:, 6:].any()
    drawn_only = linformer.backward(grad, query, key, value, None, None, lengths)
    assert list(drawn_only) == ["query", "key", "value"]
