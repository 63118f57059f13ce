"""The flash kernel with a backward pass written by hand, with switches that plant bugs in it.

The steps are those of Dao et al., FlashAttention, arXiv:2205.14135, appendix B.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from support.flash_kernel import Attention, capped_scores, flash_kernel, hidden_pairs


def flash_with_backward(*bugs: str) -> Attention:
    """Returns an attention function whose forward pass is right.

    Args:
        *bugs: planted bugs, by the names in `_backward`.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
        output: Tensor = _Flash.apply(query, key, value, bugs, keywords)  # type: ignore[no-untyped-call]
        return output

    return attend


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bugs: tuple[str, ...], keywords: dict[str, Any]
    ) -> Tensor:
        output = flash_kernel()(q, k, v, **keywords)
        ctx.save_for_backward(q, k, v, output)
        ctx.bugs, ctx.keywords = bugs, keywords
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, output = ctx.saved_tensors
        exact = torch.float64 if q.dtype == torch.float64 else torch.float32
        wide = [x.to(exact) for x in (q, k, v, output, grads[0])]
        found = _backward(ctx.bugs, *wide, **ctx.keywords)
        return *(x.to(q.dtype) for x in found), None, None


def _backward(
    bugs: tuple[str, ...], q: Tensor, k: Tensor, v: Tensor, output: Tensor, grad: Tensor,
    *,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    causal: bool = False,
    query_offset: Any = 0,
    scale: float | None = None,
    softcap: float | None = None,
    window: tuple[int | None, int | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of query, key and value."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = capped_scores((), q, keys, v.shape[-1], scale, softcap)
    hidden = hidden_pairs((), scores.shape, mask, key_lengths, causal, query_offset, window)
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0)
    delta = (grad * output).sum(-1, keepdim=True)
    if "delta-missing" in bugs:
        delta = torch.zeros_like(delta)
    ds = p * (grad @ values.mT - delta)
    if softcap is not None and "softcap-slope-missing" not in bugs:
        ds = ds * (1 - (scores / softcap) ** 2)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    dq = ds @ keys * (1.0 if "dq-scale-missing" in bugs else factor)
    per_head = (ds.mT @ q * factor, p.mT @ grad)
    dk, dv = (x.unflatten(1, (-1, group)) for x in per_head)
    if "last-head-of-group-only" in bugs:
        return dq, dk[:, :, -1], dv[:, :, -1]
    return dq, dk.sum(2), dv.sum(2)
