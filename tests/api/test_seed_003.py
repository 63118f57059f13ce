"""Seed 003: exact attention and four linear methods, at the shapes and by the formulas of the
notebook; and every variant with a layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn.functional import elu

from qkv import Client
from qkv.attention.catalogue import variants
from qkv.attention.layers.layer_weights import ROLES
from qkv.attention.variant import Variant
from support.known_requests import EPS
from support.service import Server

N: Final = 1000
D: Final = 256
RANK: Final = 100


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def efficient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q, -1) @ (torch.softmax(k, -2).mT @ v)


def linear_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Method 2 of the notebook: without a normaliser."""
    return (elu(q) + 1) @ ((elu(k) + 1).mT @ v)


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear_alone(q, k, v) / linear_alone(q, k, torch.ones_like(v[..., :1]))


def taylor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    ones = torch.ones_like(v[..., :1])
    return (v.mT @ ones + (q @ (k.mT @ v)).mT).mT / (len(v) + q @ (k.mT @ ones))


def linformer(q: Tensor, k: Tensor, v: Tensor, E: Tensor, F: Tensor) -> Tensor:
    return softmax(q, E @ k, F @ v)


METHODS: Final[dict[str, tuple[str, Any, dict[str, Any]]]] = {
    "the original": ("softmax", softmax, {}),
    "method 1": ("efficient", efficient, {}),
    "method 2": ("linear", linear_alone, {"normalize": False}),
    "method 2, normalised": ("linear", linear, {}),
    "method 3": ("taylor", taylor, {}),
    "method 4": ("linformer", linformer, {}),
}


def seed_003() -> tuple[Tensor, dict[str, Tensor], tuple[Tensor, Tensor]]:
    """X, the weights of the layer, E and F."""
    torch.manual_seed(3)
    x = torch.randn(N, D)
    weights = {f"W_{role}": torch.randn(D, D) / math.sqrt(D) for role in ROLES}
    projections = torch.randn(2, RANK, N) / math.sqrt(RANK)
    return x, weights, (projections[0], projections[1])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_each_method_at_the_shapes_of_the_notebook(
    client: Client, method: str, dtype: torch.dtype
) -> None:
    name, formula, parameters = METHODS[method]
    x, weights, projections = seed_003()
    x, weights = x.to(dtype), {n: w.to(dtype) for n, w in weights.items()}
    given: dict[str, Any] = dict(
        zip(("key_projection", "value_projection"), projections, strict=True)
    )
    given = {n: p.to(dtype) for n, p in given.items()} if name == "linformer" else {}
    found = client.attend(
        name, x=x, layer={"layout": "v1", "tensors": weights}, **given, **parameters
    )
    q, k, v = (x.double() @ w.double() for w in weights.values())
    truth = formula(q, k, v, *(p.double() for p in given.values()))
    assert found.output.shape == (N, D)
    assert found.output.dtype == dtype
    # projections, a product over D = 256 and sums over N are rounded: these errors are nearly
    # independent, and the error of a response is within ten times the root of their number
    close = 10 * math.sqrt(N + 2 * D) * EPS[str(dtype).removeprefix("torch.")]
    assert float((found.output.double() - truth).abs().max()) < close * float(truth.abs().max())
    again = found.weights.double() @ v
    assert float((again - truth).abs().max()) < close * float(truth.abs().max())
    signs = {"linformer": "signed", "linear": "unnormalised" if parameters else "stochastic"}
    assert found.weights_are == signs.get(name, "stochastic")
    if found.weights_are == "stochastic":  # the check of the notebook
        sums = found.weights.double().sum(-1)
        assert float((sums - 1).abs().max()) < N * EPS["float32"]


def test_method_4_returns_its_weights(client: Client) -> None:
    x, weights, (E, F) = seed_003()
    found = client.attend(
        "linformer",
        x=x,
        layer={"layout": "v1", "tensors": weights},
        outputs=["output", "map", "weights"],
        key_projection=E,
        value_projection=F,
    )
    assert found.outputs["map"].shape == (N, RANK)
    assert float((found.outputs["map"].sum(-1) - 1).abs().max()) < RANK * EPS["float32"]
    again = found.outputs["map"].double() @ F.double()
    close = RANK * EPS["float32"] * float(again.abs().max())
    assert float((again - found.weights).abs().max()) < close
    drawn = client.attend(
        "linformer", x=x, layer={"layout": "v1", "tensors": weights}, outputs=["map"], rank=RANK
    )
    assert drawn.outputs["map"].shape == (N, RANK)


LAYERED: Final = [v for v in variants().values() if set(ROLES) & set(v.inputs)]


def split(x_BNX: Tensor, heads: int) -> Tensor:
    split_BHNX: Tensor = x_BNX.unflatten(-1, (heads, -1)).transpose(1, 2)
    return split_BHNX


def projected(
    variant: Variant, embeddings: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Four query heads over two key heads, in float64."""
    heads = {"query": 4, "key": 2, "value": 2}
    return {
        variant.inputs[role].argument: split(
            embeddings["x" if "x" in embeddings else role].double() @ weights[f"W_{role}"].double(),
            heads[role],
        )
        for role in ROLES
        if role in variant.inputs
    }


@pytest.mark.parametrize("variant", LAYERED, ids=lambda v: v.name)
@pytest.mark.parametrize("separate", [False, True])
def test_every_variant_with_a_layer(client: Client, variant: Variant, separate: bool) -> None:
    """x, or separate embeddings for each role; compared with the variant's reference."""
    torch.manual_seed(4)
    weights = {
        f"W_{role}": torch.randn(6, width, dtype=torch.float64) / 2
        for role, width in zip(ROLES, (12, 6, 10), strict=True)
    }
    # without an axis of their own, queries are as many as keys
    own = 5 if "L" in variant.outputs["output"].letters else 7
    lengths = {"query": own, "key": 7, "value": 7}
    roles = {r: n for r, n in lengths.items() if r in variant.inputs} if separate else {"x": 5}
    embeddings: dict[str, Any] = {
        r: torch.randn(2, n, 6, dtype=torch.float64) for r, n in roles.items()
    }
    layer = {"layout": "v1", "heads": 4, "tensors": weights}
    found = client.attend(variant.name, layer=layer, **embeddings)
    truth = variant.reference(**projected(variant, embeddings, weights))
    merged = truth.output.transpose(1, 2).flatten(2)
    torch.testing.assert_close(found.output, merged, rtol=0, atol=1000 * EPS["float64"])
    torch.testing.assert_close(found.weights, truth.weights, rtol=0, atol=1000 * EPS["float64"])
