"""The gradients of variants with a state, through the sums of the tokens before and behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qkv.attention.common.gradients import normalize_size, scale_back
from qkv.attention.common.token_inputs import Sums, TokenInputs, parts


def gradients_from(
    inputs: TokenInputs, past: Any | None, grad_BHSE: Tensor, behind: Any | None, chunk: int
) -> dict[str, Tensor]:
    """Returns the gradients of sum(grad * output) by wire name, in float64.

    Args:
        inputs: the tokens.
        past: the state before them, whose sums then have a gradient; None: there are none.
        grad_BHSE: the gradient of the output.
        behind: a state whose sums are the gradient of those of the compact state behind the tokens:
            sum(grad * sums) is added. None: nothing is added.
        chunk: the number of tokens in a chunk.
    """
    sums, (grad, exponent) = inputs.sums_of(past), normalize_size(grad_BHSE.double())
    grad_XFW = torch.zeros_like(sums[0])
    if behind is not None:
        grad_XFW = scale_back(behind.sums.reshape(grad_XFW.shape).double(), -exponent)
    found, before_XFW = _gradients(inputs, sums, grad, grad_XFW, chunk)
    if past is not None:
        found["state.sums"] = before_XFW.reshape(past.sums.shape)
    return {name: scale_back(x, exponent) for name, x in found.items()}


def _gradients(
    inputs: TokenInputs, sums: Sums, grad_BHSE: Tensor, grad_XFW: Tensor, chunk: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the gradients by wire name, and that of the matrices before the first token.

    Some chunks at a time, from the last to the first, autograd computes those of their tokens and
    of the matrices before them.
    """
    every, before = parts(inputs, chunk), [sums]
    for part in every[:-1]:
        before.append(inputs.rows(part).read_all(before[-1], chunk)[1])
    if inputs.padding_BS is not None:
        grad_BHSE = grad_BHSE.masked_fill(inputs.padding_BS[:, None, :, None], 0.0)
    found: dict[str, list[Tensor]] = {}
    with torch.inference_mode(False), torch.enable_grad():
        for part, (matrix, *others) in zip(reversed(every), reversed(before), strict=True):
            some = inputs.rows(part)
            leaves = {
                n: x.to(torch.float64, copy=True).requires_grad_() for n, x in some.tensors.items()
            }
            start = matrix.clone().requires_grad_()
            padding = None if some.padding_BS is None else some.padding_BS.clone()
            some = replace(some, padding_BS=padding, tensors=leaves)
            output, behind = some.read_all((start, *(x.clone() for x in others)), chunk)
            *of_leaves, grad_XFW = torch.autograd.grad(
                (output, behind[0]), [*leaves.values(), start],
                (grad_BHSE[:, :, part].clone(), grad_XFW.clone()),
                allow_unused=True, materialize_grads=True,
            )  # fmt: skip
            for name, gradient in zip(leaves, of_leaves, strict=True):
                found.setdefault(name, []).insert(0, gradient)
    return {name: torch.cat(of_parts, 2) for name, of_parts in found.items()}, grad_XFW
