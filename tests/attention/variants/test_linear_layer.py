"""A linear layer as attention against exact arithmetic, torch's own attention and seed 000."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from qkv.attention.catalogue import find
from qkv.attention.common.score_blocks import score_dtype
from qkv.attention.variants import linear_layer
from support.each import each
from support.known_requests import as_array, assert_problem
from support.service import Server

DTYPES: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ALL: Final = frozenset(find("linear_layer").outputs)
PATH: Final = "/v1/attention/linear_layer"
INFER: Final = "/v2/models/linear_layer/infer"

every_dtype = each("dtype", DTYPES)


def layer(B: int, I: int, O: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:  # noqa: E741
    """Returns ordinary inputs, one in five of them 0, and a weight."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, I, generator=generator, dtype=torch.float64)
    x[torch.rand(B, I, generator=generator) < 0.2] = 0.0
    weight = torch.randn(O, I, generator=generator, dtype=torch.float64)
    return x.to(dtype), weight.to(dtype)


def tensor(found: Tensor | None) -> Tensor:
    assert found is not None
    return found


def smallest(dtype: torch.dtype) -> float:
    """Returns the smallest positive number, a denormal."""
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps


def numbers(dtype: torch.dtype) -> st.SearchStrategy[float]:
    """Draws finite numbers of the dtype, often the largest and denormal ones."""
    info = torch.finfo(dtype)
    edges = [0.0, info.max, info.min, smallest(dtype), -info.smallest_normal, 1.0, -1.0]
    powers = st.integers(round(math.log2(smallest(dtype))), round(math.log2(info.max)) - 1)
    anywhere = st.tuples(st.floats(-1.99, 1.99), powers).map(lambda m: math.ldexp(*m))
    rounded = anywhere.map(lambda v: torch.tensor(v, dtype=torch.float64).to(dtype).item())
    return st.sampled_from(edges) | rounded


@st.composite
def extremes(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    dtype = draw(st.sampled_from(DTYPES))
    B, I, O = (draw(st.integers(1, n)) for n in (2, 5, 3))  # noqa: E741
    x, weight = (draw(st.lists(numbers(dtype), min_size=n * I, max_size=n * I)) for n in (B, O))
    return (
        torch.tensor(x, dtype=torch.float64).view(B, I).to(dtype),
        torch.tensor(weight, dtype=torch.float64).view(O, I).to(dtype),
    )


def assert_near(found: Tensor, truth: Fraction, bound: Fraction) -> None:
    """Checks the bound; infinity is allowed only where the truth reaches the largest number."""
    value, info = found.item(), torch.finfo(found.dtype)
    assert not math.isnan(value)
    if math.isinf(value):
        assert (value > 0) == (truth > 0)
        assert abs(truth) + bound >= Fraction(info.max)
    else:
        assert abs(Fraction(value) - truth) <= bound


@given(extremes())
def test_finite_numbers_agree_with_exact_arithmetic(case: tuple[Tensor, Tensor]) -> None:
    x, weight = case
    dtype, exact = x.dtype, score_dtype(x.dtype)
    (B, I), O = x.shape, len(weight)  # noqa: E741
    found = linear_layer.attend(linear_layer.Call(x, weight), ALL)
    eps, tiny = Fraction(torch.finfo(exact).eps), Fraction(smallest(exact))
    narrow, least = Fraction(torch.finfo(dtype).eps), Fraction(smallest(dtype))
    for b in range(B):
        xs = [Fraction(v) for v in x[b].tolist()]
        total = sum(map(abs, xs))
        for o in range(O):
            products = [a * Fraction(w) for a, w in zip(xs, weight[o].tolist(), strict=True)]
            truth = sum(products, Fraction(0))
            bound = (I + 2) * (eps * sum(map(abs, products)) + tiny) + narrow * abs(truth) + least
            assert_near(tensor(found.output)[b, o], truth, bound)
        for i, a in enumerate(xs):
            share = abs(a) / total if total else Fraction(0)
            assert_near(tensor(found.weights)[b, i], share, (I + 4) * eps * share + tiny)
            for o in range(O):
                sign = (a > 0) - (a < 0)
                truth = sign * total * Fraction(weight[o, i].item())
                bound = (I + 4) * eps * abs(truth) + tiny
                assert_near(tensor(found.value)[b, i, o], truth, bound)
            score, key = (tensor(t)[b, i].item() for t in (found.scores, found.key))
            if not a:
                assert score == key == -math.inf
                continue
            for log, size in ((score, share), (key, abs(a))):
                right = math.log(size.numerator) - math.log(size.denominator)
                # logarithms of numerator and denominator are below 2300, and so is their error
                assert abs(log - right) <= 4 * 2300 * 2.0**-52 + float(eps) * (abs(right) + I)


@every_dtype
def test_torch_attention_of_query_key_and_value_is_the_layer(dtype: torch.dtype) -> None:
    x, weight = layer(5, 24, 7, dtype)
    found = linear_layer.attend(linear_layer.Call(x, weight), ALL)
    query, key, value = (tensor(t) for t in (found.query, found.key, found.value))
    output = F.scaled_dot_product_attention(query[:, None], key, value, scale=1.0)[:, 0]
    plain = x.double() @ weight.double().mT
    mass = x.double().abs() @ weight.double().abs().mT
    logs = key.double().masked_fill(key.isinf(), 0.0).abs().amax()
    eps = torch.finfo(key.dtype).eps
    # keys are rounded once; exp, its sum and the product once per key
    assert ((output.double() - plain).abs() <= (2 * float(logs) + 2 * 24 + 8) * eps * mass).all()
    weights = torch.softmax(torch.einsum("bd,bid->bi", query, key), -1)
    bound = (2 * float(logs) + 2 * 24 + 8) * eps * tensor(found.weights)
    assert ((weights - tensor(found.weights)).abs() <= bound).all()
    again = torch.softmax(tensor(found.scores), -1)
    assert ((again - tensor(found.weights)).abs() <= bound * 2).all()


@every_dtype
def test_zero_inputs_have_zero_weights(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 3, -1], [0, 0, 0]], dtype=dtype)
    weight = torch.tensor([[5, 7, 2], [1, -2, 4]], dtype=dtype)
    found = linear_layer.attend(linear_layer.Call(x, weight), ALL)
    assert tensor(found.output).tolist() == [[19, -10], [0, 0]]
    assert tensor(found.weights).tolist() == [[0, 0.75, 0.25], [0, 0, 0]]
    assert tensor(found.value).tolist() == [[[0, 0], [28, -8], [-8, -16]], [[0, 0]] * 3]
    assert tensor(found.query).tolist() == [[1], [1]]
    for logs in (tensor(found.scores), tensor(found.key)[..., 0]):
        assert torch.equal(logs == -math.inf, x == 0)


@every_dtype
def test_intermediate_overflow_does_not_reach_the_output(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    x = torch.tensor([[most, most, most, most], [1, 0, 0, 0]], dtype=dtype)
    weight = torch.tensor([[most, most, -most, -most], [0.5, 0.5, -0.5, 0]], dtype=dtype)
    found = linear_layer.attend(linear_layer.Call(x, weight), ALL)
    assert tensor(found.output).tolist() == [[0, most / 2], [most, 0.5]]
    assert tensor(found.weights).tolist() == [[0.25] * 4, [1, 0, 0, 0]]
    assert tensor(found.scores)[0].tolist() == pytest.approx([math.log(0.25)] * 4, rel=1e-6)
    small = torch.full((1, 4), smallest(dtype), dtype=dtype)
    assert tensor(linear_layer.attend(linear_layer.Call(small, weight), ALL).weights).tolist() == [
        [0.25] * 4
    ]


def test_overflow_of_one_item_does_not_change_others() -> None:
    x, weight = layer(3, 33, 5, torch.float32)
    alone = tensor(linear_layer.attend(linear_layer.Call(x, weight), frozenset({"output"})).output)
    x[1] *= 1e38
    beside = tensor(linear_layer.attend(linear_layer.Call(x, weight), frozenset({"output"})).output)
    assert torch.equal(alone[[0, 2]], beside[[0, 2]])


def test_example_of_seed_000(server: Server) -> None:
    torch.manual_seed(42)
    x, fc_weight = torch.randn(4, 8), torch.randn(32, 8)
    y1 = x @ fc_weight.T
    body = {
        "inputs": {"x": x.tolist(), "weight": fc_weight.tolist()},
        "outputs": list(find("linear_layer").outputs),
    }
    response = server.http.post(PATH, json=body).json()["outputs"]
    found = {name: torch.tensor(value) for name, value in response.items()}
    x_abs = x.abs()
    x_sum = x_abs.sum(dim=-1, keepdim=True)
    attn_weights = (x_abs / x_sum)[:, None]
    v = fc_weight.T[None] * (x_sum[..., None] * x.sign()[..., None])
    assert torch.allclose(found["weights"][:, None], attn_weights)
    assert torch.allclose(found["value"], v)
    assert torch.allclose(found["output"], y1, atol=1e-6)  # at the default it depends on the seed
    assert torch.allclose(torch.softmax(found["scores"], -1)[:, None], attn_weights)
    y2 = F.scaled_dot_product_attention(
        found["query"][:, None], found["key"], found["value"], scale=1.0
    )
    assert torch.allclose(y2[:, 0], y1, atol=1e-5)  # the seed's own recovery needed 1e-3


@each(("rank", "dtype"), [(1, "float64"), (2, "bfloat16")])
def test_over_http(server: Server, rank: int, dtype: str) -> None:
    x, weight = [[1.0, -2.0, 0.0], [0.5, 0.5, 1.0]], [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    body: dict[str, Any] = {
        "inputs": {"x": x[0] if rank == 1 else x, "weight": weight},
        "dtype": dtype,
        "encoding": "base64",
    }
    outputs = server.http.post(PATH, json=body).json()["outputs"]
    exact = "float64" if dtype == "float64" else "float32"
    assert {n: t["dtype"] for n, t in outputs.items()} == {"output": dtype, "weights": exact}
    output = np.array([[-3, -6], [4.5, 10.5]])
    expected = output[0] if rank == 1 else output
    np.testing.assert_array_equal(as_array(outputs["output"]).astype(float), expected)
    body["outputs"] = list(find("linear_layer").outputs)
    outputs = server.http.post(PATH, json=body).json()["outputs"]
    shapes = {"output": [2], "weights": [3], "value": [3, 2], "scores": [3], "query": [1],
              "key": [3, 1]}  # fmt: skip
    batch = [] if rank == 1 else [2]
    assert {n: t["shape"] for n, t in outputs.items()} == {n: batch + s for n, s in shapes.items()}


@each("rank", [1, 2])
def test_over_open_inference_protocol(server: Server, rank: int) -> None:
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [1, 2][2 - rank :], "data": [1, -2]},
        {"name": "weight", "datatype": "FP32", "shape": [3, 2], "data": [1, 2, 3, 4, 5, 6]},
    ]
    (output,) = server.http.post(INFER, json={"inputs": inputs}).json()["outputs"]
    assert (output["name"], output["shape"]) == ("output", [1, 3][2 - rank :])
    assert output["data"] == [-3, -5, -7]
    outputs = {o["name"]: o for o in server.http.get("/v2/models/linear_layer").json()["outputs"]}
    assert (outputs["query"]["shape"], outputs["key"]["shape"]) == ([-1, 1], [-1, -1, 1])
    config = server.http.get("/v2/models/linear_layer/config").json()
    assert {o["name"]: o["dims"] for o in config["output"]}["key"] == [-1, -1, 1]


def test_layers_and_wrong_shapes_are_rejected(server: Server) -> None:
    inputs: dict[str, Any] = {"x": [1, 2], "weight": [[3, 4]]}
    eye = {f"W_{role}.weight": [[1, 0], [0, 1]] for role in ("query", "key", "value")}
    inline = {"layout": "v2", "tensors": eye}
    problem = assert_problem(server.http.post(PATH, json={"inputs": inputs, "layer": inline}))
    assert problem["detail"].startswith("linear_layer takes no layer")
    for wrong, message in (
        ({"weight": [[3, 4, 5]]}, "weight has I=3 where x has I=2"),
        ({"x": [[[1, 2]]]}, "expected (B, I) or (I)"),
        ({"weight": [3, 4]}, "expected (O, I)"),
    ):
        problem = assert_problem(server.http.post(PATH, json={"inputs": inputs | wrong}))
        assert message in problem["detail"]
