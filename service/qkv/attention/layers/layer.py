"""A layer around a variant: projects embeddings to the variant's query, key and value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from qkv.attention.common.guards import holds, is_finite
from qkv.attention.layers.layouts import Layout
from qkv.attention.layers.projections import ROLES, Array, Projections
from qkv.errors import InvalidContent

__all__ = ["Layer", "project"]


@dataclass(frozen=True, eq=False)
class Layer:
    """Projections and the number of heads that they split into.

    Attributes:
        projections: (M, heads * width) each; the three M may differ.
        heads: query heads, side by side in the width; None: one head and no head axis.
        layout: the layout of the tensors in the request.
    """

    projections: Projections
    heads: int | None
    layout: Layout

    @cached_property
    def tensors(self) -> dict[str, Array]:
        """The tensors of the request by name."""
        return self.layout.write(self.projections)

    def projected_shapes(
        self, shapes: Mapping[str, tuple[int, ...]], sources: Mapping[str, str]
    ) -> dict[str, tuple[int, ...]]:
        """Returns the shapes (B, heads, length, width) of projected embeddings (B, length, M).

        The width of a query head determines the number of key heads.

        Args:
            shapes: the shapes of the embeddings by role.
            sources: the name of each role's embedding in the request.

        Raises:
            InvalidContent: an embedding does not fit its projection, or a width does not split.
        """
        heads = {role: self.head_count(role) for role in ROLES}
        projected: dict[str, tuple[int, ...]] = {}
        for role, projection in zip(ROLES, self.projections, strict=True):
            if role not in shapes:
                continue
            B, length, M = shapes[role]
            if M != len(projection.weight):
                raise InvalidContent(
                    f"{sources[role]} has the wrong width: got M={M}, expected "
                    f"M={len(projection.weight)} as {projection.name} has",
                    pointer=f"/inputs/{sources[role]}",
                )
            out = projection.weight.shape[1]
            if out % heads[role]:
                raise InvalidContent(
                    f"{projection.name} does not split into heads: got {out} outputs, expected a "
                    f"multiple of {heads[role]}",
                    pointer="/layer/tensors",
                )
            projected[role] = (B, heads[role], length, out // heads[role])
        return projected

    def head_count(self, role: str) -> int:
        """Returns the number of heads of a role's projection; key and value have the same.

        Raises:
            InvalidContent: the widths do not split into heads.
        """
        query, key = self.projections.query, self.projections.key
        heads, out = self.heads or 1, query.weight.shape[1]
        if out % heads:
            raise InvalidContent(
                f"{query.name} does not split into heads: got {out} outputs, expected a "
                f"multiple of heads={heads}",
                pointer="/layer/heads",
            )
        if role == "query":
            return heads
        width, key_out = out // heads, key.weight.shape[1]
        if key_out % width or (self.heads is None and key_out != width):
            raise InvalidContent(
                f"{key.name} does not fit the query: got {key_out} outputs, expected "
                f"{'a multiple of ' if self.heads is not None else ''}{width}, the width of a "
                "query head",
                pointer="/layer/tensors",
            )
        return int(key_out // width)


def project(x_BNM: Tensor, weight_MX: Tensor, bias_X: Tensor | None, heads: int) -> Tensor:
    """Returns x @ weight + bias, split into heads: (B, heads, N, X / heads).

    It is a batched product over an expanded weight. `F.linear` would fold B into the rows, and a
    request's bits would depend on the size of its batch.
    """
    projected_BNX = torch.bmm(x_BNM, weight_MX.expand(len(x_BNM), -1, -1))
    if bias_X is not None:
        projected_BNX += bias_X
    split_BHNX: Tensor = projected_BNX.unflatten(-1, (heads, -1)).transpose(1, 2)
    return split_BHNX.contiguous()


def project_back(
    grad_BNX: Tensor, x_BNM: Tensor, weight_MX: Tensor, bias_X: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of x (B, N, M), weight (M, X) and bias (X).

    Args:
        grad_BNX: the gradient of x @ weight + bias, heads side by side. The result has its dtype,
            or float64 where that overflows.
        x_BNM, weight_MX, bias_X: as in `project`.
    """
    for dtype in (grad_BNX.dtype, torch.float64):
        grad, x, weight = grad_BNX.to(dtype), x_BNM.to(dtype), weight_MX.to(dtype)
        gradients = (
            torch.bmm(grad, weight.mT.expand(len(grad), -1, -1)),
            x.flatten(0, 1).mT @ grad.flatten(0, 1),
            None if bias_X is None else grad.sum((0, 1)),
        )
        x_grad, *shared = (t for t in gradients if t is not None)
        finite = [is_finite(x_grad), *(is_finite(t, shared=True) for t in shared)]
        if all(holds(condition) for condition in finite):
            break
    return gradients
