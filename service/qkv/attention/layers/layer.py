"""A layer around a variant: embeddings in, the variant's query, key and value out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from qkv.attention.layers.layouts import Layout
from qkv.attention.layers.projections import ROLES, Array, Projections
from qkv.errors import InvalidContent

__all__ = ["Layer", "project"]


@dataclass(frozen=True, eq=False)
class Layer:
    """Projections and how they split into heads.

    Attributes:
        projections: (M, heads * width) each; the three M may differ.
        heads: query heads, side by side in the width; None: one head and no head axis.
        layout: which they came in.
    """

    projections: Projections
    heads: int | None
    layout: Layout

    @cached_property
    def tensors(self) -> dict[str, Array]:
        """Its tensors as they came, by name."""
        return self.layout.write(self.projections)

    def projected_shapes(
        self, shapes: Mapping[str, tuple[int, ...]], sources: Mapping[str, str]
    ) -> dict[str, tuple[int, ...]]:
        """Shapes (B, heads, length, width) that embeddings of shape (B, length, M) become.

        The query's width fixes how many key heads the key projection holds.

        Args:
            shapes: of the embeddings, by role.
            sources: what each role's embedding is called in the request.

        Raises:
            InvalidContent: an embedding does not fit its projection, or a width does not split.
        """
        heads = {role: self.head_count(role) for role in ROLES}
        found: dict[str, tuple[int, ...]] = {}
        for role, projection in zip(ROLES, self.projections, strict=True):
            if role not in shapes:
                continue
            B, length, M = shapes[role]
            if M != len(projection.weight):
                raise InvalidContent(
                    f"{sources[role]} has M={M} where {projection.name} takes "
                    f"M={len(projection.weight)}",
                    pointer=f"/inputs/{sources[role]}",
                )
            out = projection.weight.shape[1]
            if out % heads[role]:
                raise InvalidContent(
                    f"{projection.name} has {out} outputs, not a multiple of its "
                    f"{heads[role]} heads",
                    pointer="/layer/tensors",
                )
            found[role] = (B, heads[role], length, out // heads[role])
        return found

    def head_count(self, role: str) -> int:
        """How many heads a role's projection holds; key and value have the same.

        Raises:
            InvalidContent: the widths do not split so.
        """
        query, key = self.projections.query, self.projections.key
        heads, out = self.heads or 1, query.weight.shape[1]
        if out % heads:
            raise InvalidContent(
                f"{query.name} has {out} outputs, not a multiple of heads={heads}",
                pointer="/layer/heads",
            )
        if role == "query":
            return heads
        width, key_out = out // heads, key.weight.shape[1]
        if key_out % width or (self.heads is None and key_out != width):
            raise InvalidContent(
                f"{key.name} has {key_out} outputs where the query's heads are {width} wide",
                pointer="/layer/tensors",
            )
        return int(key_out // width)


def project(x_BNM: Tensor, weight_MX: Tensor, bias_X: Tensor | None, heads: int) -> Tensor:
    """x @ weight + bias, split into heads: (B, heads, N, X / heads).

    A batched product over an expanded weight, because `F.linear` folds B into the rows, and then
    a request's bits depend on how many stand beside it.
    """
    projected_BNX = torch.bmm(x_BNM, weight_MX.expand(len(x_BNM), -1, -1))
    if bias_X is not None:
        projected_BNX += bias_X
    split_BHNX: Tensor = projected_BNX.unflatten(-1, (heads, -1)).transpose(1, 2)
    return split_BHNX.contiguous()


def project_back(
    grad_BNX: Tensor, x_BNM: Tensor, weight_MX: Tensor, bias_X: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of x (B, N, M), weight (M, X) and bias (X), from that of x @ weight + bias.

    In the dtype of `grad_BNX`, heads side by side; in float64 where that overflows.
    """
    for dtype in (grad_BNX.dtype, torch.float64):
        grad, x, weight = grad_BNX.to(dtype), x_BNM.to(dtype), weight_MX.to(dtype)
        made = (
            torch.bmm(grad, weight.mT.expand(len(grad), -1, -1)),
            x.flatten(0, 1).mT @ grad.flatten(0, 1),
            None if bias_X is None else grad.sum((0, 1)),
        )
        if all(bool(t.isfinite().all()) for t in made if t is not None):
            break
    return made
