"""Layers inline in a request: every layout, any heads, one or three embeddings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import httpx
import numpy as np
import pytest
import torch

from qkv.attention.variants import softmax
from support.known_requests import DTYPES, EPS, FLOATING, Array, as_array, as_json
from support.references import reference_of
from support.service import Server

ROLES: Final = ("query", "key", "value")
KINDS: Final = 80


@dataclass(frozen=True)
class Layered:
    """A request with a layer, and its parts."""

    layout: str
    dtype: str
    heads: int | None
    groups: int
    embeddings: dict[str, Array]
    weights: dict[str, Array]
    biases: dict[str, Array]
    causal: bool

    @property
    def document(self) -> dict[str, Any]:
        tensors = {}
        for role, weight in self.weights.items():
            if self.layout == "v1":
                tensors[f"W_{role}"] = as_json(weight, "base64")
            else:
                tensors[f"W_{role}.weight"] = as_json(weight.T, "base64")
            if role in self.biases:
                tensors[f"W_{role}.bias"] = as_json(self.biases[role], "base64")
        heads = {} if self.heads is None else {"heads": self.heads}
        return {
            "inputs": {n: as_json(a, "base64") for n, a in self.embeddings.items()},
            "layer": {"layout": self.layout, "tensors": tensors} | heads,
            "outputs": ["output", "weights", "scores"],
            "parameters": {"causal": self.causal},
        }

    def check(self, outputs: dict[str, Any]) -> None:
        """Compares the outputs with projections and attention in float64.

        A projection sums M products in its dtype or better; the other bounds are those of `Case`.
        """
        projected, sums = {}, {}
        for role in ROLES:
            x = self.embeddings.get("x", self.embeddings.get(role))
            assert x is not None
            w, b = self.weights[role].astype(float), self.biases.get(role, np.zeros(1))
            x, b = x.astype(float), b.astype(float)
            count = (self.heads or 1) if role == "query" else self.groups
            projected[role] = split(x @ w + b, count)
            sums[role] = split(np.abs(x) @ np.abs(w) + np.abs(b), count)
        query, key, value = (torch.from_numpy(projected[role]) for role in ROLES)
        exact = reference_of(softmax.Call(query, key, value, causal=self.causal))
        widest = max(len(w) for w in self.weights.values())
        D, S = query.shape[-1], key.shape[-2]
        grouped = sums["key"].repeat(query.shape[1] // key.shape[1], axis=1)
        summed = float((sums["query"] @ grouped.swapaxes(-1, -2)).max()) / math.sqrt(D)
        eps = EPS["float64" if self.dtype == "float64" else "float32"]
        projecting = EPS[self.dtype] * (widest + 2)
        score = summed * (2 * projecting + eps * (D + 8))
        weight = math.expm1(2 * score) + eps * (S + 8)
        output = float(sums["value"].max()) * (2 * weight + projecting + 2 * EPS[self.dtype])
        assert exact.output is not None
        merged = np.moveaxis(exact.output.numpy(), 1, 2)
        tables = {
            "output": (merged.reshape(*merged.shape[:2], -1), output),
            "weights": (exact.weights, weight),
            "scores": (exact.scores, score),
        }
        x = next(iter(self.embeddings.values()))
        for name, (table, bound) in tables.items():
            found = as_array(outputs[name]).astype(float)
            expected = np.asarray(table)
            if name != "output" and self.heads is None:
                expected = expected[:, 0]
            assert found.shape == expected.shape[x.ndim == 2 :], name
            expected = expected.reshape(found.shape)
            seen = ~np.isneginf(expected)
            assert np.array_equal(~np.isneginf(found), seen), name
            off = float(np.abs(found[seen] - expected[seen]).max(initial=0))
            assert off <= bound, f"{name} is off by {off}, more than {bound}"


def split(projected: Array, count: int) -> Array:
    """Reshapes ([B,] length, count * width) to (B, count, length, width)."""
    whole = projected.reshape(-1, *projected.shape[-2:])
    return np.moveaxis(whole.reshape(*whole.shape[:2], count, -1), 2, 1).copy()


def random_layer(kind: int) -> Layered:
    draw = np.random.default_rng([2, kind])
    dtype = FLOATING[kind % 4]
    G, K, D, E, B, L, S = (int(n) for n in draw.integers(1, 7, 7))
    heads = None if kind % 3 == 0 else G * K
    H, G = (1, 1) if heads is None else (G * K, G)
    one = bool(draw.random() < 0.5)
    widths = [int(draw.integers(1, 40))] * 3 if one else [int(n) for n in draw.integers(1, 40, 3)]
    lead = () if draw.random() < 0.3 else (B,)
    lengths = {"x": L} if one else {"query": L, "key": S, "value": S}
    layout = str(draw.choice(["v1", "v2"]))

    def numbers(*shape: int) -> Array:
        return draw.normal(size=shape).astype(DTYPES[dtype])

    outs = {"query": H * D, "key": G * D, "value": G * E}
    return Layered(
        layout,
        dtype,
        heads,
        G,
        {
            n: numbers(*lead, length, m)
            for (n, length), m in zip(lengths.items(), widths, strict=False)
        },
        {
            r: numbers(m, outs[r]) / DTYPES[dtype].type(math.sqrt(m))
            for r, m in zip(ROLES, widths, strict=True)
        },
        {r: numbers(outs[r]) for r in ROLES if layout == "v2" and draw.random() < 0.5},
        bool(draw.random() < 0.5),
    )


def run_layer(http: httpx.Client, document: dict[str, Any]) -> dict[str, Any]:
    response = http.post("/v1/attention/softmax", json=document)
    assert response.status_code == 200, response.text
    outputs: dict[str, Any] = response.json()["outputs"]
    return outputs


@pytest.mark.parametrize("kind", range(KINDS))
def test_layers_agree_with_the_reference(server: Server, kind: int) -> None:
    layered = random_layer(kind)
    layered.check(run_layer(server.http, layered.document))


def test_masks_and_lengths_with_a_layer(server: Server) -> None:
    """The mask has the rank of the scores, to which `heads` adds an axis."""
    x = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)
    weight = np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32)
    tensors = {f"W_{role}": as_json(weight, "base64") for role in ROLES}
    for heads, shapes in (
        (None, [(5, 5), (2, 5, 5), (1, 1)]),
        (3, [(2, 3, 5, 5), (3, 1, 5), (5,)]),
    ):
        for shape in shapes:
            mask = np.random.default_rng(2).random(shape) < 0.6
            document = {
                "inputs": {
                    "x": as_json(x, "base64"),
                    "mask": as_json(mask, "base64"),
                    "key_lengths": [3, 5],
                },
                "layer": {"layout": "v1", "heads": heads, "tensors": tensors},
            }
            weights = as_array(run_layer(server.http, document)["weights"])
            hidden = ~np.broadcast_to(mask, weights.shape)
            assert not weights[hidden].any()
            assert not weights[0, ..., 3:].any()
            sums = weights.sum(-1)
            blind = (
                hidden | (np.arange(5) >= np.array([3, 5]).reshape(-1, *[1] * (weights.ndim - 1)))
            ).all(-1)
            assert np.array_equal(sums == 0, blind)
            assert np.abs(sums[~blind] - 1).max() <= 5 * EPS["float32"]
