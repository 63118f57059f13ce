"""Gradients of layers: every variant against autograd, and hidden positions with NaN."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn.functional import elu, linear, normalize

from support.linformer_reference import random_projection
from support.real_module_calls import decoded, encoded
from support.service import Server

ROLES: Final = ("query", "key", "value")
B: Final = 2
L: Final = 9
M: Final = 6
HEADS: Final = 2
HIDDEN: Final = 6
"""The first position of the second item that is padding."""
PARAMETERS: Final[dict[str, dict[str, Any]]] = {
    "softmax": {"causal": True}, "linear": {"causal": True}, "taylor": {}, "efficient": {},
    "linformer": {"rank": 3, "seed": 1}, "mean": {},
}  # fmt: skip


def layer_tensors(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Returns a layer in the layout v2 with biases and an output projection."""
    shapes = {
        **{f"W_{role}.weight": (8, M) for role in ROLES},
        **{f"W_{role}.bias": (8,) for role in ROLES},
        "W_output.weight": (5, 8),
        "W_output.bias": (5,),
    }
    return {name: 0.5 * torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}


def post(
    server: Server, kind: str, name: str, inputs: dict[str, Tensor], tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the outputs or gradients of a request with a layer."""
    document = {
        "inputs": encoded(inputs),
        "layer": {"layout": "v2", "heads": HEADS, "tensors": encoded(tensors)},
        "parameters": PARAMETERS[name],
        "encoding": "base64",
    }
    if kind == "attention":
        document["outputs"] = ["output"]
    response = server.http.post(f"/v1/{kind}/{name}", json=document)
    assert response.is_success, response.text
    return decoded(response.json()["gradients" if kind == "gradients" else "outputs"])


def attend(name: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns a variant's output by its textbook formula."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    hidden_LS = torch.ones(L, L).triu(1).bool()
    if name == "softmax":
        weights: Tensor = scores.masked_fill(hidden_LS, -torch.inf).softmax(-1)
        return weights @ value
    if name == "linear":  # causal
        products = ((elu(query) + 1) @ (elu(key) + 1).mT).masked_fill(hidden_LS, 0)
        return _normalized(products) @ value
    if name == "taylor":
        products = 1 + normalize(query, dim=-1) @ normalize(key, dim=-1).mT
        return _normalized(products) @ value
    if name == "efficient":
        return query.softmax(-1) @ (key.softmax(-2).mT @ value)
    if name == "linformer":
        keys, values = (random_projection(i, 3, L, 1) for i in (0, 1))
        map_BHLR: Tensor = (query @ (keys @ key).mT / query.shape[-1] ** 0.5).softmax(-1)
        return map_BHLR @ (values @ value)
    counts = torch.arange(1, L + 1, dtype=value.dtype)[:, None]  # mean
    return value.cumsum(-2) / counts


def _normalized(products: Tensor) -> Tensor:
    weights: Tensor = products / products.sum(-1, keepdim=True)
    return weights


def block(name: str, x_BLM: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    """Returns the output of a block, with projections as torch has them."""
    query, key, value = (
        linear(x_BLM, tensors[f"W_{role}.weight"], tensors[f"W_{role}.bias"])
        .unflatten(-1, (HEADS, -1))
        .transpose(1, 2)
        for role in ROLES
    )
    merged_BLX = attend(name, query, key, value).transpose(1, 2).flatten(2)
    return linear(merged_BLX, tensors["W_output.weight"], tensors["W_output.bias"])


@pytest.mark.parametrize("name", PARAMETERS)
def test_block_of_every_variant_has_the_gradients_of_autograd(server: Server, name: str) -> None:
    x, tensors = torch.randn(B, L, M, dtype=torch.float64), layer_tensors()
    leaves = {n: t.clone().requires_grad_() for n, t in ({"x": x} | tensors).items()}
    expected = block(name, leaves["x"], leaves)
    grad = torch.randn(expected.shape, dtype=torch.float64)
    found = post(server, "attention", name, {"x": x}, tensors)["output"]
    eps = torch.finfo(torch.float64).eps
    # some hundred roundings, and what sums of feature maps lose
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e4 * eps)
    names = list(leaves)
    truth = torch.autograd.grad(
        (expected * grad).sum(), [leaves[n] for n in names], allow_unused=True
    )
    gradients = post(server, "gradients", name, {"x": x, "grad_output": grad}, tensors)
    assert gradients.keys() == set(names)
    for n, gradient in zip(names, truth, strict=True):
        wanted = torch.zeros_like(leaves[n]) if gradient is None else gradient
        size = max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(gradients[n], wanted.detach(), rtol=0, atol=1e4 * eps * size)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["softmax", "linear"])
@pytest.mark.parametrize("is_shared", [True, False], ids=["x", "embeddings"])
def test_nan_in_hidden_positions_reaches_no_gradient_of_a_weight(
    server: Server, name: str, is_shared: bool, bad: float
) -> None:
    """Padding may hold anything: `key_lengths` hides keys, zeros in grad_output hide queries."""
    tensors = layer_tensors(torch.float32)
    grad = torch.randn(B, L, 5)
    sources = ["x"] if is_shared else list(ROLES)
    clean = {source: torch.randn(B, L, M) for source in sources}
    if is_shared:
        grad[1, HIDDEN:] = 0
    padded = {source: x.clone() for source, x in clean.items()}
    for source in ["x"] if is_shared else ["key", "value"]:
        clean[source][1, HIDDEN:] = 0
        padded[source][1, HIDDEN:] = bad
    others = {"key_lengths": torch.tensor([L, HIDDEN]), "grad_output": grad}
    expected = post(server, "gradients", name, clean | others, tensors)
    found = post(server, "gradients", name, padded | others, tensors)
    assert found.keys() == {*sources, *tensors}
    for n, gradient in found.items():
        assert gradient.isfinite().all(), n
        # another path may compute them in float64
        torch.testing.assert_close(gradient, expected[n], rtol=1e-4, atol=1e-4)
        if n in sources and n != "query":
            assert not gradient[1, HIDDEN:].any()
