"""Projections on the device, and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.attention.common.guards import holds, is_finite


def apply(x_BNM: Tensor, weight_MX: Tensor, bias_X: Tensor | None) -> Tensor:
    """Returns x @ weight + bias: (B, N, X).

    It is a batched product over an expanded weight. `F.linear` would fold B into the rows, and a
    request's bits would depend on the size of its batch.
    """
    projected_BNX = torch.bmm(x_BNM, weight_MX.expand(len(x_BNM), -1, -1))
    if bias_X is not None:
        projected_BNX += bias_X
    return projected_BNX


def split_heads(x_BNX: Tensor, heads: int) -> Tensor:
    """Splits the last axis into heads: (B, heads, N, X / heads)."""
    split_BHNX: Tensor = x_BNX.unflatten(-1, (heads, -1)).transpose(1, 2)
    return split_BHNX.contiguous()


def merge_heads(x_BHNE: Tensor) -> Tensor:
    """Puts the heads side by side: (B, N, H * E)."""
    return x_BHNE.transpose(1, 2).flatten(2)


def project_back_to_input(grad_BNX: Tensor, weight_MX: Tensor) -> Tensor:
    """Returns the gradient of x (B, N, M) alone, as `project_back` does."""
    for dtype in (grad_BNX.dtype, torch.float64):
        weight = weight_MX.to(dtype)
        x_grad = torch.bmm(grad_BNX.to(dtype), weight.mT.expand(len(grad_BNX), -1, -1))
        if holds(is_finite(x_grad)):
            break
    return x_grad


def project_back(
    grad_BNX: Tensor, x_BNM: Tensor, weight_MX: Tensor, bias_X: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of x (B, N, M), weight (M, X) and bias (X).

    Args:
        grad_BNX: the gradient of x @ weight + bias, heads side by side. The result has its dtype,
            or float64 where that overflows.
        x_BNM, weight_MX, bias_X: as in `apply`.
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
