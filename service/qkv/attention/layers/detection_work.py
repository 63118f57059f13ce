"""The time that a detection takes, estimated before it runs.

All times are in nanoseconds, on one core. The factors are measured, and rounded up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from qkv.attention.layers.detection_candidates import Variation
from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_weights import ROLES
from qkv.errors import InvalidContent

__all__ = ["LIMIT", "attention_time", "check_time", "projection_time"]

LIMIT: Final = 10e9
"""The longest estimated time of an accepted detection."""
_PRODUCT: Final = {torch.float32: 0.03, torch.float64: 0.15}  # in a product of matrices
_WEIGHT: Final = 2.5  # reading a number of a weight matrix, and writing it in another order
_ROTATED: Final = 20.0
_SCORE: Final = {torch.float32: 12.0, torch.float64: 20.0}  # factor, mask and softmax
_MOVED: Final = 2.0


def projection_time(layers: Iterable[Layer], tokens: int, dtype: torch.dtype) -> float:
    """Returns the time to read layers and to project hidden states by each.

    Args:
        layers: in the order in which they run. They may be blank.
        tokens: number of hidden states.
        dtype: of the projections.
    """
    time = 0.0
    last: dict[str, object] = {}
    for layer in layers:
        time += _WEIGHT * sum(array.size for array in layer.tensors.values())
        shapes = [layer.weights[f"{role}.weight"].shape for role in ROLES]
        for role, (rows, columns) in zip(ROLES, shapes, strict=True):
            # the same part of the same tensors is projected once
            key = (sorted(layer.names.items()), shapes) if _is_sent(layer, role) else None
            if key is None or last.get(role) != key:
                time += rows * columns * (tokens * _PRODUCT[dtype] + _WEIGHT)
            last[role] = key
    return time


def _is_sent(layer: Layer, role: str) -> bool:
    """True if a weight is a part of a tensor as it was sent, and no copy in another order."""
    weight = layer.weights[f"{role}.weight"]
    addresses = {a.__array_interface__["data"][0] for a in layer.tensors.values()}
    return weight.__array_interface__["data"][0] in addresses


def attention_time(
    layer: Layer,
    variations: Iterable[Variation],
    positioned: int,
    tokens: int,
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> float:
    """Returns the time of attention and of the output projection for one sequence.

    Args:
        layer: with its numbers of heads. It may be blank.
        variations: to run.
        positioned: how often queries and keys get a norm or a rotary embedding.
        tokens: of the sequence.
        rows: of the output.
        columns: of the output.
        dtype: of the scores.
    """
    query, key, value = (layer.weights[f"{role}.weight"].shape[1] for role in ROLES)
    heads, product = layer.head_count("query"), _PRODUCT[dtype]
    merged = heads * (value // layer.head_count("key"))
    projected = columns if "output.weight" in layer.weights else 0
    once: float = tokens * (query + key) * _ROTATED + rows * tokens * query * product
    each: float = (
        rows * tokens * (heads * _SCORE[dtype] + merged * product)
        + rows * merged * projected * product
        + tokens * (value + key) * _MOVED
        + merged * projected * _WEIGHT
    )
    return positioned * once + sum(1 for _ in variations) * each


def check_time(time: float, splits: int) -> None:
    """Checks the estimated time of a detection.

    Args:
        time: of all splits.
        splits: their number.

    Raises:
        InvalidContent: it is too long.
    """
    if time <= LIMIT:
        return
    seconds = f"got about {time / 1e9:.3g} s of work, expected at most {LIMIT / 1e9:g} s"
    if splits > 1 and time / splits <= LIMIT:
        raise InvalidContent(
            f"heads is missing: {seconds} for {splits} possible splits into heads. Give heads, "
            "kv_heads or the layout, or fewer hidden states",
            pointer="/heads",
        )
    raise InvalidContent(
        f"check.x is too large: {seconds}. Give fewer hidden states", pointer="/check/x"
    )
