"""Runs the layers of both sides of a conversion on the same random input, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from qkv.attention.layers.layer_options import LayerOptions
from qkv.attention.layers.layer_weights import Array, Weights
from qkv.attention.layers.layout_catalogue import Layout
from qkv.attention.layers.rope import Rope
from qkv.attention.layers.sent_tensors import Heads

_TOKENS: Final = 8  # length of the random input on which both layers run


class Side(NamedTuple):
    """A layer of a conversion.

    Attributes:
        layout: of its tensors.
        tensors: by the names of the layout.
        heads: the numbers of query heads and key heads.
        order: the rotary order of its channels; None: it is not rotary.
        widths: of the embeddings of query, key and value.
    """

    layout: Layout
    tensors: Weights
    heads: Heads
    order: str | None
    widths: Sequence[int]


def check(
    source: Side, target: Side, options: LayerOptions, raise_if_stopped: Callable[[], object]
) -> dict[str, Any]:
    """Returns the largest difference of the outputs, and the size of the largest output.

    Each side runs by the `forward` of its layout, from its own tensors. With a rotary order, both
    rotate queries and keys.

    Args:
        source, target: the layers.
        options: of the source, with the numbers of rotary embedding and QK-norm.
        raise_if_stopped: called before each layer runs; may raise.
    """
    widths = [source.widths, target.widths]
    generator = torch.Generator().manual_seed(0)
    # an augmented weight is one wider and takes a column of ones there
    embeddings = {
        m: torch.randn(_TOKENS, m, generator=generator, dtype=torch.float64)
        for m in {min(pair) for pair in zip(*widths, strict=True)}
    }
    outputs = []
    for side, side_widths in zip((source, target), widths, strict=True):
        raise_if_stopped()
        query, key, value = (
            _with_ones(embeddings[min(m, other)], m)
            for m, other in zip(side_widths, widths[side is source], strict=True)
        )
        tensors = {name: _double(array) for name, array in side.tensors.items()}
        attend = _Attention(side, options)
        outputs.append(side.layout.forward(tensors, (query, key, value), side.heads, attend))
    before, after = outputs
    return {
        "largest_absolute_difference": _as_json((before - after).abs().max().item()),
        "largest_absolute_output": _as_json(before.abs().max().item()),
        "elements": before.numel(),
        "dtype": "float64",
    }


class _Attention:
    """Exact attention between the projections."""

    def __init__(self, side: Side, options: LayerOptions) -> None:
        self._heads, self._order, self._options = side.heads, side.order, options

    def __call__(
        self,
        query_LX: Tensor,
        key_LX: Tensor,
        value_LX: Tensor,
        *,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        H, G = self._heads.query or 1, self._heads.key or 1
        query, key = (
            self._normalized(query_LX, H, query_norm),
            self._normalized(key_LX, G, key_norm),
        )
        value = value_LX.unflatten(-1, (G, -1))
        query, key = self._rotated(query), self._rotated(key)
        key, value = (x.repeat_interleave(H // G, dim=1) for x in (key, value))
        scores_HLS = torch.einsum("lhd,shd->hls", query, key) / query.shape[-1] ** 0.5
        if sinks is not None:
            sinks_HL1 = sinks[:, None, None].expand(-1, len(query), 1)
            scores_HLS = torch.cat([scores_HLS, sinks_HL1], dim=-1)
        weights_HLS = torch.softmax(scores_HLS, dim=-1)[..., : len(key)]
        return torch.einsum("hls,she->lhe", weights_HLS, value).flatten(1)

    def _normalized(self, x_LX: Tensor, heads: int, weight: Tensor | None) -> Tensor:
        split: Tensor = x_LX.unflatten(-1, (heads, -1))
        if weight is None:
            return split
        norm = self._options.qk_norm
        whole = split if len(weight) == split.shape[-1] else x_LX
        normalized = rms_norm(whole, weight.shape, weight + norm.offset, norm.eps)
        return normalized.view_as(split)

    def _rotated(self, x_LHD: Tensor) -> Tensor:
        """Rotates pairs of channels as complex numbers."""
        if self._order is None:
            return x_LHD
        rope = self._options.rope or Rope()
        D = x_LHD.shape[-1]
        if rope.turning_channels(D) % 2:
            return x_LHD
        angles = torch.arange(len(x_LHD)).double()[:, None] * torch.from_numpy(rope.radians(D))
        turns = torch.polar(torch.full_like(angles, rope.factor), angles)[:, None]
        dims = 2 * angles.shape[-1]
        turned, rest = x_LHD[..., :dims], x_LHD[..., dims:]
        if self._order == "half":
            numbers = torch.complex(*(part.contiguous() for part in turned.chunk(2, -1))) * turns
            return torch.cat([numbers.real, numbers.imag, rest], -1)
        numbers = torch.view_as_complex(turned.unflatten(-1, (-1, 2)).contiguous()) * turns
        return torch.cat([torch.view_as_real(numbers).flatten(-2), rest], -1)


def _with_ones(x_LM: Tensor, width: int) -> Tensor:
    """Returns x, with a column of ones if the layer is wider than x."""
    if width == x_LM.shape[1]:
        return x_LM
    return torch.cat([x_LM, x_LM.new_ones(len(x_LM), 1)], dim=1)


def _double(array: Array) -> Tensor:
    with np.errstate(invalid="ignore"):  # a signalling NaN warns
        return torch.from_numpy(np.ascontiguousarray(array, np.float64))


def _as_json(number: float) -> float | str:
    """Returns a number as JSON; weights that are NaN or infinite give a check that is so too."""
    return number if math.isfinite(number) else {"nan": "NaN"}.get(str(number), "Infinity")
