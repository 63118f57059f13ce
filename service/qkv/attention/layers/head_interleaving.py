"""Fused matrices whose rows keep query, key and value of each head together: (G, H / G + 2, D).

For each key head there are the rows of its query heads, then its key's, then its value's. With as
many key heads as query heads these are the (H, 3, D) rows of GPT-NeoX and BLOOM; with one key
head, Falcon's rows of all queries, one key, one value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from qkv.attention.layers.layer_weights import (
    ROLES,
    Array,
    Pair,
    Weights,
    bias_of,
    concatenated,
    linear_tensors,
    named,
)
from qkv.attention.layers.sent_tensors import Heads, SentTensors
from qkv.errors import InvalidContent

_NAME: Final = "query_key_value"


def is_full(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Returns True if there are as many key heads as query heads: the matrix is (3 in, in)."""
    rows, columns = shapes[f"{_NAME}.weight"]
    return rows == 3 * columns


def read(sent: SentTensors) -> Weights:
    """Reads the fused matrix, and the output projection `dense`.

    Raises:
        InvalidContent: the rows do not split into heads, or `heads` is missing.
    """
    return named(**_interleaved(sent, _NAME), output=sent.optional_pair("dense"))


def write(weights: Weights, heads: Heads) -> Weights:
    """Returns the fused matrix, and the output projection `dense`.

    Raises:
        InvalidContent: the heads are unknown, or of different widths.
    """
    return _interleaved_tensors(weights, heads, _NAME) | linear_tensors(weights, output="dense")


def _interleaved(sent: SentTensors, name: str) -> dict[str, Pair]:
    """Returns weight (in, out) and bias of each role.

    Raises:
        InvalidContent: the rows do not split into heads, or `heads` is missing.
    """
    weight_OI = sent.matrix(f"{name}.weight")
    H, G = sent.required_heads("query, key and value of each head are together in one matrix")
    rows = len(weight_OI)
    if H % G or rows % (H + 2 * G):
        raise sent.error(
            f"{name}.weight",
            f"does not split into heads: got {rows} rows, expected a multiple of {H + 2 * G} for "
            f"{H} query heads and {G} key heads",
        )
    bias_O = sent.vector(f"{name}.bias", rows)
    parts_OI = _split(weight_OI, H, G)
    biases_O = [None] * len(ROLES) if bias_O is None else _split(bias_O, H, G)
    return {r: (w.T, b) for r, w, b in zip(ROLES, parts_OI, biases_O, strict=True)}


def _interleaved_tensors(weights: Weights, heads: Heads, name: str) -> dict[str, Array]:
    """Returns one nn.Linear with the rows of each head together.

    Raises:
        InvalidContent: the heads are unknown, or of different widths.
    """
    if heads.query is None:
        raise InvalidContent(
            "heads is missing: the target keeps query, key and value of each head together",
            pointer="/heads",
        )
    concatenated(weights)  # raises if the inputs have different widths
    H, G = heads.query, heads.key or heads.query
    widths = [weights[f"{r}.weight"].shape[1] // n for r, n in zip(ROLES, (H, G, G), strict=True)]
    if len(set(widths)) > 1:
        raise InvalidContent(
            "query, key and value heads have no place in one matrix: got widths of "
            f"{', '.join(map(str, widths))}, expected equal ones"
        )
    tensors = {f"{name}.weight": _join([weights[f"{r}.weight"].T for r in ROLES], H, G)}
    if any(f"{role}.bias" in weights for role in ROLES):
        tensors[f"{name}.bias"] = _join([bias_of(weights, role) for role in ROLES], H, G)
    return tensors


def _split(rows: Array, H: int, G: int) -> list[Array]:
    """Returns the rows of all query heads, all key heads and all value heads."""
    grouped = rows.reshape(G, H // G + 2, -1, *rows.shape[1:])
    parts = np.split(grouped, [H // G, H // G + 1], axis=1)
    return [part.reshape(-1, *rows.shape[1:]) for part in parts]


def _join(parts: list[Array], H: int, G: int) -> Array:
    """Inverts `_split`."""
    grouped = [
        part.reshape(G, n, -1, *part.shape[1:])
        for part, n in zip(parts, (H // G, 1, 1), strict=True)
    ]
    return np.concatenate(grouped, axis=1).reshape(-1, *parts[0].shape[1:])
