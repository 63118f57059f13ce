"""Weights of one layout into another, checked by running both layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from qkv.attention.layers import layout_v1, layouts
from qkv.attention.layers.layer import Layer
from qkv.attention.layers.projections import ROLES, Array, Projection, Projections
from qkv.errors import InvalidContent

__all__ = ["Converted", "convert"]

_TOKENS: Final = 8  # of the random input that both layers run on


class Converted(NamedTuple):
    """Tensors in the target layout, and what running both layers showed."""

    tensors: dict[str, Array]
    check: dict[str, Any]


def convert(
    source: str,
    target: str,
    tensors: Mapping[str, Array],
    *,
    heads: int | None = None,
    bias: Literal["refuse", "augment"] = "refuse",
) -> Converted:
    """Takes a layer's weights from one layout to another. No number changes.

    Args:
        source, target: names of layouts.
        tensors: in the source layout.
        heads: query heads, for the check; None: one.
        bias: "augment" folds biases into v1's weights as a last row, for x with a column of
            ones, or takes such a row back out.

    Raises:
        InvalidContent: a layout or tensor is unknown or does not fit, or the target has no place
            for something.
    """
    reader, writer = layouts.find(source, "/from"), layouts.find(target, "/to")
    given = reader.read(tensors)
    projections = given
    if bias == "augment":
        if {source, target} != {"v1", "v2"}:
            raise InvalidContent(
                f'"bias": "augment" has a meaning between v1 and v2, not from {source} to {target}',
                pointer="/bias",
            )
        projections = (
            layout_v1.fold_biases(given) if target == "v1" else layout_v1.separate_biases(given)
        )
    written = writer.write(projections)
    _refuse_unsplittable(Layer(given, heads, reader))
    return Converted(
        written,
        _check(reader, given, writer, writer.read(written), heads or 1),
    )


def _check(
    reader: layouts.Layout,
    given: Projections,
    writer: layouts.Layout,
    written: Projections,
    heads: int,
) -> dict[str, Any]:
    """Runs both layers, each in its layout's own way, in float64 on the same random input."""
    generator = torch.Generator().manual_seed(0)
    # an augmented side is one wider, and takes a column of ones there
    widths = [min(len(g.weight), len(w.weight)) for g, w in zip(given, written, strict=True)]
    fresh = {
        m: torch.randn(_TOKENS, m, generator=generator, dtype=torch.float64) for m in set(widths)
    }
    outputs = []
    for layout, projections in ((reader, given), (writer, written)):
        query, key, value = (
            _with_ones(fresh[m], len(p.weight)) for m, p in zip(widths, projections, strict=True)
        )
        outputs.append(layout.forward(_double(projections), (query, key, value), heads))
    before, after = outputs
    return {
        "largest_absolute_difference": _written((before - after).abs().max().item()),
        "largest_absolute_output": _written(before.abs().max().item()),
        "elements": before.numel(),
        "dtype": "float64",
    }


def _written(number: float) -> float | str:
    """A number as JSON can hold it: weights may be NaN or infinite, and so is then their check."""
    return number if math.isfinite(number) else {"nan": "NaN"}.get(str(number), "Infinity")


def _with_ones(x_LM: torch.Tensor, width: int) -> torch.Tensor:
    """x, with a column of ones where the layer is wider than it."""
    if width == x_LM.shape[1]:
        return x_LM
    return torch.cat([x_LM, x_LM.new_ones(len(x_LM), 1)], dim=1)


def _refuse_unsplittable(layer: Layer) -> None:
    """Raises where the widths do not split into heads, pointing where /v1/convert has them."""
    embeddings = {r: (1, 1, len(p.weight)) for r, p in zip(ROLES, layer.projections, strict=True)}
    try:
        layer.projected_shapes(embeddings, {role: role for role in ROLES})
        heads, groups = layer.head_count("query"), layer.head_count("key")
        if heads % groups:
            raise InvalidContent(
                f"{heads} query heads are not a multiple of the {groups} key heads that "
                f"{layer.projections.key.name} holds",
                pointer="/layer/heads",
            )
    except InvalidContent as error:
        error.pointer = "/heads" if error.pointer == "/layer/heads" else "/tensors"
        raise


def _double(projections: Projections) -> Projections:
    def double(array: Array) -> Array:
        with np.errstate(invalid="ignore"):  # a signalling NaN among the weights
            return np.ascontiguousarray(array, np.float64)

    return Projections(
        *(
            Projection(p.name, double(p.weight), None if p.bias is None else double(p.bias))
            for p in projections
        )
    )
