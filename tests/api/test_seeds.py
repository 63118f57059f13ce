"""The service returns the tables of seeds 001 and 002, to the printed digits."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.known_requests import EPS, Array, as_array, as_json
from support.seed_tables import AVERAGES, AVERAGING
from support.service import Server

ROLES: Final = ("query", "key", "value")

# seed 001: "Your journey starts with one step"
TOKENS: Final = [
    [0.43, 0.15, 0.89],
    [0.55, 0.87, 0.66],
    [0.57, 0.85, 0.64],
    [0.22, 0.58, 0.33],
    [0.77, 0.25, 0.10],
    [0.05, 0.80, 0.55],
]
V1_OUTPUT: Final = """
    0.6641 1.1324
    0.6694 1.1453
    0.6691 1.1446
    0.6592 1.1247
    0.6570 1.1190
    0.6632 1.1333
"""
V2_OUTPUT: Final = """
    0.1478 0.0307
    0.1502 0.0307
    0.1502 0.0308
    0.1492 0.0305
    0.1498 0.0320
    0.1491 0.0299
"""
V2_KEYS: Final = """
     0.5387 0.2771 -0.0558
    -0.0280 0.3282 -0.4013
"""


# seed 002, v4: q @ k^T of the first sequence, as it is, masked, and as weights
RAW_SCORES: Final = """
     5.1839e-02 -1.2717e-01  1.8555e-01  2.8362e-01  1.3338e-01 -4.1065e-01  6.4280e-02 -2.3709e-01
    -2.7879e-02 -2.6872e-01 -1.4179e-02 -1.3808e-02  3.4634e-01 -1.0934e-01 -8.2021e-02  5.0689e-01
     1.6034e-01 -3.0773e-01  5.5218e-01  8.4200e-01  3.0638e-01 -1.1863e+00  2.1087e-01 -8.2965e-01
     2.4276e-01 -4.5681e-01  8.3370e-01  1.2711e+00  4.5259e-01 -1.7872e+00  3.2054e-01 -1.2664e+00
     1.0243e-02  3.9295e-01 -6.9511e-02 -1.1600e-01 -4.9214e-01  3.2836e-01  7.1550e-02 -5.1735e-01
    -3.1340e-01  4.3864e-01 -1.0379e+00 -1.5788e+00 -3.9689e-01  2.1592e+00 -4.3509e-01  1.8049e+00
     7.8257e-02 -2.3943e-01  2.9217e-01  4.4768e-01  2.6021e-01 -6.6641e-01  9.0359e-02 -3.0451e-01
    -3.4883e-01  1.2351e+00 -1.3450e+00 -2.0646e+00 -1.3681e+00  3.1349e+00 -3.7915e-01  1.1684e+00
"""
MASKED_SCORES: Final = """
     0.0518    -inf    -inf    -inf    -inf    -inf    -inf    -inf
    -0.0279 -0.2687    -inf    -inf    -inf    -inf    -inf    -inf
     0.1603 -0.3077  0.5522    -inf    -inf    -inf    -inf    -inf
     0.2428 -0.4568  0.8337  1.2711    -inf    -inf    -inf    -inf
     0.0102  0.3929 -0.0695 -0.1160 -0.4921    -inf    -inf    -inf
    -0.3134  0.4386 -1.0379 -1.5788 -0.3969  2.1592    -inf    -inf
     0.0783 -0.2394  0.2922  0.4477  0.2602 -0.6664  0.0904    -inf
    -0.3488  1.2351 -1.3450 -2.0646 -1.3681  3.1349 -0.3791  1.1684
"""
WEIGHTS: Final = """
    1.0000 0.0000 0.0000 0.0000 0.0000 0.0000 0.0000 0.0000
    0.5599 0.4401 0.0000 0.0000 0.0000 0.0000 0.0000 0.0000
    0.3220 0.2016 0.4764 0.0000 0.0000 0.0000 0.0000 0.0000
    0.1640 0.0815 0.2961 0.4585 0.0000 0.0000 0.0000 0.0000
    0.2051 0.3007 0.1894 0.1808 0.1241 0.0000 0.0000 0.0000
    0.0600 0.1273 0.0291 0.0169 0.0552 0.7114 0.0000 0.0000
    0.1408 0.1025 0.1744 0.2038 0.1690 0.0669 0.1426 0.0000
    0.0223 0.1086 0.0082 0.0040 0.0080 0.7257 0.0216 0.1016
"""


class SelfAttentionV1(nn.Module):
    """The class of seed 001."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.W_query = nn.Parameter(torch.rand(d_in, d_out))
        self.W_keys = nn.Parameter(torch.rand(d_in, d_out))
        self.W_values = nn.Parameter(torch.rand(d_in, d_out))


class SelfAttentionV2(nn.Module):
    """The class of seed 001."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.W_query = nn.Linear(d_in, d_out, False)
        self.W_keys = nn.Linear(d_in, d_out, False)
        self.W_values = nn.Linear(d_in, d_out, False)


class Head(nn.Module):
    """The class of seed 002: one head, with separate embeddings for query, key and value."""

    def __init__(self, embed_dim: int, head_size: int) -> None:
        super().__init__()
        self.key = nn.Linear(embed_dim, head_size, bias=False)
        self.query = nn.Linear(embed_dim, head_size, bias=False)
        self.value = nn.Linear(embed_dim, head_size, bias=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        T = key.shape[1]
        key = self.key(key)
        query = self.query(query)
        wei = query @ key.transpose(-2, -1)
        scores = wei * key.shape[-1] ** -0.5
        wei = scores.masked_fill(torch.tril(torch.ones(T, T)) == 0, float("-inf"))
        wei = F.softmax(wei, dim=-1)
        return wei @ self.value(value), wei, scores


def printed(array: Array, table: str) -> bool:
    """Returns True if the numbers are those of a table, to its printed digits."""
    words, numbers = table.split(), array.astype(np.float32).reshape(-1).tolist()
    forms = [".4e" if "e" in word else ".4f" for word in words]
    return [format(x, form) for x, form in zip(numbers, forms, strict=True)] == words


def seed_001() -> tuple[SelfAttentionV1, SelfAttentionV2]:
    torch.manual_seed(1234)
    return SelfAttentionV1(3, 2), SelfAttentionV2(3, 2)


def seed_002() -> tuple[Tensor, dict[str, Tensor]]:
    """x, and the state of one head with the names of layout v2."""
    torch.manual_seed(1337)
    x = torch.randn(4, 8, 2)
    state = {}
    for role in ("key", "query", "value"):  # the order of the random draws
        state[f"W_{role}.weight"] = nn.Linear(2, 16, bias=False).weight
    return x, state


def layer(layout: str, state: dict[str, Tensor], encoding: str = "base64") -> dict[str, Any]:
    tensors = {name: as_json(t.detach().numpy(), encoding) for name, t in state.items()}
    return {"layout": layout, "tensors": tensors}


def ask(server: Server, document: dict[str, Any], path: str = "attention/softmax") -> Any:
    response = server.http.post(f"/v1/{path}", json=document)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("encoding", ["lists", "base64"])
def test_seed_001_tables(server: Server, encoding: str) -> None:
    sav1, sav2 = seed_001()
    for layout, module, table in (("v1", sav1, V1_OUTPUT), ("v2", sav2, V2_OUTPUT)):
        document = {"inputs": {"x": TOKENS}, "layer": layer(layout, module.state_dict(), encoding)}
        output = as_array(ask(server, document)["outputs"]["output"])
        assert output.shape == (6, 2)
        assert printed(output, table)
        if module is sav1:
            assert f"{output.sum():.4f}" == "10.7813"


def test_seed_001_has_the_same_bits_in_both_layouts(server: Server) -> None:
    sav1, _ = seed_001()
    transposed = {f"{n}.weight": w.T for n, w in sav1.state_dict().items()}
    for x in (TOKENS, [TOKENS]):
        for outputs in (["output"], ["output", "weights", "scores"]):
            one, other = (
                ask(
                    server,
                    {
                        "inputs": {"x": as_json(np.array(x, np.float32), "base64")},
                        "layer": layer(layout, state),
                        "outputs": outputs,
                    },
                )["outputs"]
                for layout, state in (("v1", sav1.state_dict()), ("v2", transposed))
            )
            assert one == other
            assert list(one) == outputs


def test_seed_001_conversion_matches_the_notebook(server: Server) -> None:
    sav1, sav2 = seed_001()
    assert printed(sav2.W_keys.weight.detach().numpy(), V2_KEYS)
    for source, target, module in (("v1", "v2", sav1), ("v2", "v1", sav2)):
        state = layer(source, module.state_dict())["tensors"]
        response = ask(server, {"from": source, "to": target, "tensors": state}, "convert")
        assert list(response["tensors"]) == [
            f"W_{n}.weight" if target == "v2" else f"W_{n}" for n in ("query", "keys", "values")
        ]
        for (name, tensor), weight in zip(
            response["tensors"].items(), module.state_dict().values(), strict=True
        ):
            assert as_array(tensor).tobytes() == weight.T.numpy().tobytes(), name
        output = {
            layout: ask(
                server, {"inputs": {"x": TOKENS}, "layer": {"layout": layout, "tensors": tensors}}
            )["outputs"]["output"]
            for layout, tensors in ((source, state), (target, response["tensors"]))
        }
        assert output[source] == output[target]


def test_seed_002_running_mean(server: Server) -> None:
    x, _ = seed_002()
    nothing = as_json(np.zeros((4, 8, 1), np.float32), "base64")
    document = {
        "inputs": {"query": nothing, "key": nothing, "value": as_json(x.numpy(), "base64")},
        "parameters": {"causal": True},
    }
    outputs = ask(server, document)["outputs"]
    assert printed(as_array(outputs["output"]), AVERAGES)
    for weights in as_array(outputs["weights"]):
        assert printed(weights, AVERAGING)


@pytest.mark.parametrize("encoding", ["lists", "base64"])
def test_seed_002_v4_tables(server: Server, encoding: str) -> None:
    x, state = seed_002()
    document = {
        "inputs": {"x": as_json(x.numpy(), encoding)},
        "layer": layer("v2", state, encoding),
        "outputs": ["output", "weights", "scores"],
        "parameters": {"scale": 1.0},
    }
    scores = as_array(ask(server, document)["outputs"]["scores"])
    assert scores.shape == (4, 8, 8)
    assert printed(scores[0], RAW_SCORES)
    document["parameters"] = {"scale": 1.0, "causal": True}
    outputs = {n: as_array(t) for n, t in ask(server, document)["outputs"].items()}
    assert printed(outputs["scores"][0], MASKED_SCORES)
    assert printed(outputs["weights"][0], WEIGHTS)
    assert outputs["output"].shape == (4, 8, 16)
    q, k, v = (x.double() @ state[f"W_{r}.weight"].detach().double().T for r in ROLES)
    raw = q @ k.transpose(-2, -1)
    wei = raw.masked_fill(torch.tril(torch.ones(8, 8)) == 0, float("-inf"))
    # an output has rounding errors of products over C = 2 and 16 and of a sum over 8
    bound = EPS["float32"] * (2 + 16 + 8) * float(raw.abs().max()) * float(v.abs().max())
    exact = (wei.softmax(-1) @ v).numpy()
    assert np.abs(outputs["output"] - exact).max() < bound


def test_seed_002_head_takes_separate_embeddings(server: Server) -> None:
    torch.manual_seed(1337)
    head = Head(32, 16)
    embeddings = {role: torch.randn(4, 8, 32) for role in ROLES}
    state = {f"W_{name}": tensor for name, tensor in head.state_dict().items()}
    document = {
        "inputs": {name: as_json(t.numpy(), "base64") for name, t in embeddings.items()},
        "layer": layer("v2", state),
        "parameters": {"causal": True},
    }
    outputs = ask(server, document)["outputs"]
    with torch.no_grad():
        output, weights, scores = head.double()(*(e.double() for e in embeddings.values()))
    # rounding errors of products over C = 32 and 16 and of a sum over 8
    bound = EPS["float32"] * (32 + 16 + 8) * float(scores.abs().max())
    assert np.abs(as_array(outputs["weights"]) - weights.numpy()).max() < bound
    assert np.abs(as_array(outputs["output"]) - output.numpy()).max() < bound * float(
        output.abs().max()
    )
