"""Converts weights from one layout to another and checks the result by running both layers."""

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

_TOKENS: Final = 8  # length of the random input on which both layers run


class Converted(NamedTuple):
    """Tensors in the target layout, and the result of the check."""

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
    """Converts a layer's weights from one layout to another. No number changes.

    Args:
        source, target: names of layouts.
        tensors: the tensors in the source layout.
        heads: the number of query heads, for the check; None: one.
        bias: "augment" appends each bias to its v1 weight as a last row, for x with a column of
            ones. In the other direction it turns the last row into a bias.

    Raises:
        InvalidContent: a layout or tensor is unknown or does not fit, or the target layout cannot
            hold a tensor.
    """
    reader, writer = layouts.find(source, "/from"), layouts.find(target, "/to")
    source_projections = reader.read(tensors)
    projections = source_projections
    if bias == "augment":
        if {source, target} != {"v1", "v2"}:
            raise InvalidContent(
                f'bias is "augment": got {source} to {target}, expected v1 to v2 or v2 to v1',
                pointer="/bias",
            )
        change = layout_v1.fold_biases if target == "v1" else layout_v1.separate_biases
        projections = change(source_projections)
    converted = writer.write(projections)
    _refuse_unsplittable(Layer(source_projections, heads, reader))
    return Converted(
        converted,
        _check(reader, source_projections, writer, writer.read(converted), heads or 1),
    )


def _check(
    reader: layouts.Layout,
    source: Projections,
    writer: layouts.Layout,
    target: Projections,
    heads: int,
) -> dict[str, Any]:
    """Runs both layers in float64 on the same random input, each by its layout's `forward`."""
    generator = torch.Generator().manual_seed(0)
    # an augmented weight is one wider and takes a column of ones there
    widths = [min(len(s.weight), len(t.weight)) for s, t in zip(source, target, strict=True)]
    embeddings = {
        m: torch.randn(_TOKENS, m, generator=generator, dtype=torch.float64) for m in set(widths)
    }
    outputs = []
    for layout, projections in ((reader, source), (writer, target)):
        query, key, value = (
            _with_ones(embeddings[m], len(p.weight))
            for m, p in zip(widths, projections, strict=True)
        )
        outputs.append(layout.forward(_double(projections), (query, key, value), heads))
    before, after = outputs
    return {
        "largest_absolute_difference": _as_json((before - after).abs().max().item()),
        "largest_absolute_output": _as_json(before.abs().max().item()),
        "elements": before.numel(),
        "dtype": "float64",
    }


def _as_json(number: float) -> float | str:
    """Returns a number as JSON; weights that are NaN or infinite give a check that is so too."""
    return number if math.isfinite(number) else {"nan": "NaN"}.get(str(number), "Infinity")


def _with_ones(x_LM: torch.Tensor, width: int) -> torch.Tensor:
    """Returns x, with a column of ones if the layer is wider than x."""
    if width == x_LM.shape[1]:
        return x_LM
    return torch.cat([x_LM, x_LM.new_ones(len(x_LM), 1)], dim=1)


def _refuse_unsplittable(layer: Layer) -> None:
    """Rejects widths that do not split into heads, with pointers into the body of /v1/convert."""
    embeddings = {r: (1, 1, len(p.weight)) for r, p in zip(ROLES, layer.projections, strict=True)}
    try:
        layer.projected_shapes(embeddings, {role: role for role in ROLES})
        heads, groups = layer.head_count("query"), layer.head_count("key")
        if heads % groups:
            raise InvalidContent(
                f"heads is invalid: got {heads} query heads, expected a multiple of the {groups} "
                f"key heads of {layer.projections.key.name}",
                pointer="/layer/heads",
            )
    except InvalidContent as error:
        error.pointer = "/heads" if error.pointer == "/layer/heads" else "/tensors"
        raise


def _double(projections: Projections) -> Projections:
    def double(array: Array) -> Array:
        with np.errstate(invalid="ignore"):  # a signalling NaN warns
            return np.ascontiguousarray(array, np.float64)

    return Projections(
        *(
            Projection(p.name, double(p.weight), None if p.bias is None else double(p.bias))
            for p in projections
        )
    )
