"""Draws the picture of a variant: its weights on an example input that all variants share."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from qkv import heatmap
from qkv.attention.signature import Input, fixed_size
from qkv.attention.variant import Variant
from qkv.engine import local
from qkv.tensors import RawTensor
from qkv.wire.message import Message

__all__ = ["INPUT", "SHADES", "TOKENS", "Way", "draw", "inputs", "ways"]

_log = logging.getLogger(__name__)

TOKENS: Final = "abcdefbcdgHibcdj"
"""A token for each position: b c d occurs three times; H is three times as large as the others."""

INPUT: Final = (
    f"The input is one head over the {len(TOKENS)} tokens {' '.join(TOKENS)}. They are query, key "
    "and value, or the rows of x. Half of a token's numbers encode its position, half its letter. "
    "H is three times as large as the others."
)

SHADES: Final = (
    "A cell's shade grows with the square root of its weight, up to the panel's largest weight. "
    "Small weights are thus visible. Cells that are exactly 0 are empty; negative ones are orange."
)

_ROWS: Final = {"L": "query i", "S": "query i", "B": "input i"}
_COLUMNS: Final = {"S": "key j", "I": "feature j"}


class Way(NamedTuple):
    """A panel of a picture: its title, and the parameters of its run."""

    title: str
    parameters: Mapping[str, Any]


@cache
def draw(variant: Variant) -> str | None:
    """Returns the SVG; None if a variant has no matrix of weights for each head, or fails.

    Runs the variant like a request but outside the engine, which takes milliseconds.
    """
    if not (axes := _axes(variant)):
        return None
    rows, columns = axes
    try:
        panels = [
            heatmap.Panel(
                way.title,
                matrix := _weights(variant, way),
                _ROWS.get(rows, "row i"),
                _COLUMNS.get(columns, "column j"),
                _names(len(matrix)) if rows in _ROWS else "",
                _names(matrix.shape[1]) if columns == "S" else "",
            )
            for way in ways(variant)
        ]
        title = f"Attention weights of {variant.name}"
        return heatmap.draw(variant.name, title, f"{variant.summary} {INPUT}", panels)
    except Exception:  # the service runs on without the picture
        _log.exception("%s cannot be drawn", variant.name)
        return None


def ways(variant: Variant) -> list[Way]:
    """Returns the panels: with and without `causal` if the variant has it, else one panel."""
    if "causal" in variant.parameters.model_fields:
        return [Way("every key", {"causal": False}), Way("causal", {"causal": True})]
    return [Way("", {})]


def inputs(variant: Variant) -> dict[str, np.ndarray]:
    """Returns the example input for a variant: all required tensors, in float64.

    query, key, value and x are the tokens. Axes have 16 elements; batch and heads have 1, unless
    they are rows of the weights.
    """
    few = set("BHG") - set(_axes(variant))
    found = {}
    for spec in variant.inputs.values():
        if not spec.is_optional:
            shape = [fixed_size(x) or (1 if x in few else len(TOKENS)) for x in spec.letters]
            found[spec.name] = _tensor(spec, shape)
    return found


def _axes(variant: Variant) -> tuple[str, ...]:
    """Returns the axes of rows and columns of the weights; () without a matrix for each head."""
    weights = variant.outputs.get("weights")
    if weights is None or len(weights.letters) < 2 or set(weights.letters[:-2]) - set("BHG"):
        return ()
    return weights.letters[-2:]


def _weights(variant: Variant, way: Way) -> np.ndarray:
    """Returns the weights of one head, (rows, columns)."""
    tensors = {name: RawTensor.from_numpy(array) for name, array in inputs(variant).items()}
    request = Message({"outputs": ["weights"], "parameters": dict(way.parameters)}, tensors)
    weights = local.attend(variant.name, request).tensors["weights"].numpy()
    if not np.isfinite(weights).all():
        raise ArithmeticError("its weights are not finite")
    return weights.reshape(weights.shape[-2:])


def _tensor(spec: Input, shape: list[int]) -> np.ndarray:
    if "float64" not in spec.dtypes:  # lengths or masks: every key is visible
        return np.full(shape, len(TOKENS) if "int64" in spec.dtypes else True)
    if spec.name in ("query", "key", "value", "x") and len(shape) > 1:
        return np.broadcast_to(_embedded(*shape[-2:]), shape)
    return np.cos(np.arange(math.prod(shape))).reshape(shape)


def _embedded(rows: int, width: int) -> np.ndarray:
    """Returns the tokens as (rows, width): first the position, then the letter."""
    names = _names(rows)
    row_R1, column_1C = np.ogrid[:rows, : (width + 1) // 2]
    letter_R1 = np.array([[ord(name.lower()) - ord("a")] for name in names])
    size_R1 = np.array([[3.0 if name.isupper() else 1.0] for name in names])
    place_RC = np.sin(row_R1 / 2.0 ** (column_1C // 2) + np.pi / 2 * (column_1C % 2))
    # 4.7: the ten letters differ clearly, and have similar norms
    which_RC = np.cos(np.pi / 8 * (column_1C + 0.5) * (4.7 * letter_R1 + 1))
    embedded: np.ndarray = size_R1 * np.concatenate([0.7 * place_RC, 1.5 * which_RC], 1)
    return embedded[:, :width]


def _names(count: int) -> str:
    return (TOKENS * count)[:count]
