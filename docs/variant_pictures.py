"""Draws the picture of a variant: its weights on an example input that all variants share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from io import StringIO
from typing import Any, Final, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from qkv import local
from qkv.attention import catalogue
from qkv.attention.signature import Input, fixed_size
from qkv.attention.variant import Variant
from qkv.client.figures.heat_maps import Labels, Panel, draw_panels
from qkv.client.figures.scale import Scale
from qkv.tensors import RawTensor
from qkv.wire.message import Message

TOKENS: Final = "abcdefbcdgHibcdj"
"""A token for each position: b c d occurs three times; H is three times as large as the others."""

INPUT: Final = (
    f"The input is one head over the {len(TOKENS)} tokens {' '.join(TOKENS)}, which are query, key "
    "and value, or the rows of x. Half of a token's numbers encode its position, half its letter; "
    "H is three times as large as the others."
)

COLOURS: Final = (
    "Colours follow the square root of a weight. Cells that are exactly 0 are empty; negative ones "
    "are red."
)

_ROWS: Final = {"L": "query i", "S": "query i", "B": "input i"}
_COLUMNS: Final = {"S": "key j", "I": "feature j"}


_GATES: Final = {"log_decay": math.log(0.95), "beta": 0.9}


class Way(NamedTuple):
    """A panel of a picture: its title, and the parameters of its run."""

    title: str
    parameters: Mapping[str, Any]


def has_matrix(variant: Variant) -> bool:
    """True if a variant has a matrix of weights for each head."""
    return bool(_axes(variant))


def draw(variant: Variant) -> Figure:
    """Returns the figure of a variant that has a matrix of weights."""
    rows, columns = _axes(variant)
    matrices = [_weights(variant, way) for way in ways(variant)]
    panels = [
        Panel(
            way.title,
            np.ma.masked_equal(matrix, 0.0),
            Labels(_ROWS.get(rows, "row i"), _names(len(matrix)) if rows in _ROWS else None),
            Labels(
                _COLUMNS.get(columns, "column j"),
                _names(matrix.shape[1]) if columns == "S" else None,
            ),
        )
        for way, matrix in zip(ways(variant), matrices, strict=True)
    ]
    scales = [Scale.by_root([matrix]) for matrix in matrices]
    return draw_panels(panels, scales, title=variant.name, value_name="weight")


def draw_delta_beside_softmax() -> Figure:
    """Returns the figure of docs/state.md: softmax and a gated delta rule."""
    tokens = inputs(catalogue.find("gated"))
    gates = {name: np.full((1, 1, len(TOKENS)), x) for name, x in _GATES.items()}
    rule = {"rule": "gated_delta", "normalize_qk": True}
    matrices = [
        _matrix("softmax", tokens, {"causal": True}),
        _matrix("gated", tokens | gates, rule),
    ]
    panels = [
        Panel(
            title,
            np.ma.masked_equal(matrix, 0.0),
            Labels("query i", _names(len(matrix))),
            Labels("key j", _names(len(matrix))),
        )
        for title, matrix in zip(("softmax", "gated delta rule"), matrices, strict=True)
    ]
    scales = [Scale.by_root([matrix]) for matrix in matrices]
    return draw_panels(panels, scales, title="", value_name="weight")


def to_svg(figure: Figure) -> str:
    """Returns the figure as SVG, with one pixel for each cell. Equal figures have equal text."""
    text = StringIO()
    for ax in figure.axes:
        for image in ax.images:
            image.set_interpolation("none")
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "qkv"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": "qkv"})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


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
    few = set("BHGJVT") - set(_axes(variant))
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
    return _matrix(variant.name, inputs(variant), way.parameters)


def _matrix(name: str, arrays: Mapping[str, Any], parameters: Mapping[str, Any]) -> np.ndarray:
    tensors = {n: RawTensor.from_numpy(array) for n, array in arrays.items()}
    request = Message({"outputs": ["weights"], "parameters": dict(parameters)}, tensors)
    weights = local.attend(name, request).tensors["weights"].numpy()
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
