"""Rotary embeddings given by a frequency of each pair: the numbers of any scaling."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest

from qkv.attention.layers.rope import Rope
from support.known_requests import EPS, Array, as_array, as_json
from support.service import Server

HEADS: Final = 2
WIDTH: Final = 6
LENGTH: Final = 9
PAIRS: Final = {
    "half": [(0, 2), (1, 3)],
    "interleaved": [(0, 1), (2, 3)],
}
DRAW: Final = np.random.default_rng(64)
X: Final = DRAW.normal(size=(LENGTH, 8))
TENSORS: Final = {
    f"{role}_proj.weight": DRAW.normal(size=(HEADS * WIDTH, 8)) for role in ("q", "k", "v")
}


def run(server: Server, **rope: Any) -> Array:
    """Returns the output of a layer in float64."""
    document = {
        "inputs": {"x": as_json(X, "base64")},
        "layer": {
            "layout": "llama",
            "heads": HEADS,
            "rope": rope,
            "tensors": {name: as_json(array, "base64") for name, array in TENSORS.items()},
        },
        "outputs": ["output"],
        "parameters": {"causal": True},
    }
    response = server.http.post("/v1/attention/softmax", json=document)
    assert response.status_code == 200, response.text
    return as_array(response.json()["outputs"]["output"])


def expected(frequencies: list[float], amplitude: float, pairs: list[tuple[int, int]]) -> Array:
    """Returns the same by complex numbers."""
    heads = {
        name[0]: np.moveaxis((X @ weight.T).reshape(LENGTH, HEADS, WIDTH), 1, 0)
        for name, weight in TENSORS.items()
    }
    for role in "qk":
        turned = heads[role].copy()
        for frequency, (first, second) in zip(frequencies, pairs, strict=True):
            turn = amplitude * np.exp(1j * frequency * np.arange(LENGTH))
            pair = (heads[role][..., first] + 1j * heads[role][..., second]) * turn
            turned[..., first], turned[..., second] = pair.real, pair.imag
        heads[role] = turned
    scores = heads["q"] @ np.swapaxes(heads["k"], -1, -2) / np.sqrt(WIDTH)
    scores[:, ~np.tri(LENGTH, dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    output = weights / weights.sum(-1, keepdims=True) @ heads["v"]
    merged: Array = np.moveaxis(output, 0, 1).reshape(LENGTH, HEADS * WIDTH)
    return merged


@pytest.mark.parametrize("order", PAIRS)
@pytest.mark.parametrize("frequencies", [[0.7, 0.011], [-2.5, 0.0]])
@pytest.mark.parametrize("amplitude", [None, 1.3])
def test_pairs_turn_by_their_frequencies(
    server: Server, order: str, frequencies: list[float], amplitude: float | None
) -> None:
    found = run(server, frequencies=frequencies, order=order, amplitude=amplitude)
    exact = expected(frequencies, amplitude or 1.0, PAIRS[order])
    assert np.abs(found - exact).max() <= 100 * EPS["float64"] * np.abs(exact).max()


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ],
)
def test_scaling_is_the_same_as_its_frequencies(server: Server, scaling: dict[str, Any]) -> None:
    scaled = Rope(base=100.0, dims=4, scaling=scaling)  # type: ignore[arg-type]
    frequencies = scaled.radians(WIDTH).tolist()
    by_scaling = run(server, base=100.0, dims=4, scaling=scaling)
    assert np.array_equal(by_scaling, run(server, frequencies=frequencies, amplitude=scaled.factor))


def test_amplitude_replaces_that_of_a_scaling(server: Server) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    given = run(server, dims=4, scaling=scaling, amplitude=1.5)
    assert np.array_equal(given, run(server, dims=4, scaling=scaling | {"attention_factor": 1.5}))
