"""The picture of a variant: what its weights are on the one input that all are shown on."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from qkv import heatmap
from qkv.attention.catalogue import Input, Variant, fixed_size
from qkv.engine import local
from qkv.tensors import RawTensor
from qkv.wire.message import Message

__all__ = ["INPUT", "SHADES", "TOKENS", "Way", "draw", "inputs", "ways"]

_log = logging.getLogger(__name__)

TOKENS: Final = "abcdefbcdgHibcdj"
"""One per position: b c d comes three times, and H is three times as large as the others."""

INPUT: Final = (
    f"One head over the {len(TOKENS)} tokens {' '.join(TOKENS)}, which are query, key and value "
    "alike, or the rows of x: half of a token's numbers say where it stands, half which letter it "
    "is; H is three times as large as the others."
)

SHADES: Final = (
    "A cell's shade goes from 0 to the panel's largest weight, by the root, so that small weights "
    "can be told from none: what is exactly 0 is left empty. Below 0 is orange."
)

_ROWS: Final = {"L": "query i", "S": "query i", "B": "input i"}
_COLUMNS: Final = {"S": "key j", "I": "feature j"}


class Way(NamedTuple):
    """What is asked of a variant, and how that is called."""

    title: str
    parameters: Mapping[str, Any]


@cache
def draw(variant: Variant) -> str | None:
    """The SVG; None where a variant has no weights that are one matrix per head, or fails at the
    input.

    Each runs as a request does, which takes milliseconds, and outside the engine.
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
    except Exception:  # a variant that fails is no reason to serve none
        _log.exception("%s cannot be drawn", variant.name)
        return None


def ways(variant: Variant) -> list[Way]:
    """The panels: with and without `causal` where a variant has it, all else as by default."""
    if "causal" in variant.parameters.model_fields:
        return [Way("every key", {"causal": False}), Way("causal", {"causal": True})]
    return [Way("", {})]


def inputs(variant: Variant) -> dict[str, np.ndarray]:
    """The one input, as a variant's signature wants it: all that is not optional, in float64,
    whose last digits no picture shows.

    What is named query, key, value or x is the tokens. Axes are 16 long, but for batch and heads,
    which are 1 where they are not rows of the weights.
    """
    few = set("BHG") - set(_axes(variant))
    found = {}
    for spec in variant.inputs.values():
        if not spec.is_optional:
            shape = [fixed_size(x) or (1 if x in few else len(TOKENS)) for x in spec.letters]
            found[spec.name] = _tensor(spec, shape)
    return found


def _axes(variant: Variant) -> tuple[str, ...]:
    """What rows and columns of the weights are; nothing where there is no one matrix per head."""
    weights = variant.outputs.get("weights")
    if weights is None or len(weights.letters) < 2 or set(weights.letters[:-2]) - set("BHG"):
        return ()
    return weights.letters[-2:]


def _weights(variant: Variant, way: Way) -> np.ndarray:
    """What a request is answered."""
    tensors = {name: RawTensor.from_numpy(array) for name, array in inputs(variant).items()}
    asked = Message({"outputs": ["weights"], "parameters": dict(way.parameters)}, tensors)
    weights = local.attend(variant.name, asked).tensors["weights"].numpy()
    if not np.isfinite(weights).all():
        raise ArithmeticError("its weights are not finite")
    return weights.reshape(weights.shape[-2:])


def _tensor(spec: Input, shape: list[int]) -> np.ndarray:
    if "float64" not in spec.dtypes:  # lengths, or who may attend: all of it
        return np.full(shape, len(TOKENS) if "int64" in spec.dtypes else True)
    if spec.name in ("query", "key", "value", "x") and len(shape) > 1:
        return np.broadcast_to(_embedded(*shape[-2:]), shape)
    return np.cos(np.arange(math.prod(shape))).reshape(shape)


def _embedded(rows: int, width: int) -> np.ndarray:
    """The tokens as (rows, width): what says where they stand, then what says which they are."""
    names = _names(rows)
    row_R1, column_1C = np.ogrid[:rows, : (width + 1) // 2]
    letter_R1 = np.array([[ord(name.lower()) - ord("a")] for name in names])
    size_R1 = np.array([[3.0 if name.isupper() else 1.0] for name in names])
    place_RC = np.sin(row_R1 / 2.0 ** (column_1C // 2) + np.pi / 2 * (column_1C % 2))
    # 4.7: of ten letters no two are much alike, and all are about as large
    which_RC = np.cos(np.pi / 8 * (column_1C + 0.5) * (4.7 * letter_R1 + 1))
    made: np.ndarray = size_R1 * np.concatenate([0.7 * place_RC, 1.5 * which_RC], 1)
    return made[:, :width]


def _names(count: int) -> str:
    return (TOKENS * count)[:count]
