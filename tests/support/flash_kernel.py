"""A small flash-style attention kernel in plain torch, with switches that plant bugs.

It shares no code with the oracle: keys come in blocks, with a running maximum and a running sum
(Dao et al., FlashAttention, arXiv:2205.14135, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Attention = Callable[..., Tensor]


def flash_kernel(*bugs: str, block: int = 16, sums: torch.dtype | None = None) -> Attention:
    """Returns an attention function.

    Args:
        *bugs: planted bugs, by the names in `_scores`, `_hide` and `_attend`.
        block: keys in a block.
        sums: dtype of the sums; None: float32, or float64 for float64 inputs.
    """

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
        causal: bool = False,
        query_offset: Any = 0,
        scale: float | None = None,
        softcap: float | None = None,
        window: tuple[int | None, int | None] | None = None,
    ) -> Tensor:
        H, G = query.shape[1], key.shape[1]
        heads = torch.arange(H) % G if "gqa-tiled" in bugs else torch.arange(H) // (H // G)
        k, v = key[:, heads], value[:, heads]
        if "value-transposed" in bugs:
            v = v.mT.reshape(v.shape)
        exact = torch.float64 if query.dtype == torch.float64 else torch.float32
        scores = _scores(bugs, query.to(exact), k.to(exact), v.shape[-1], scale, softcap)
        hidden = _hide(bugs, scores.shape, mask, key_lengths, causal, query_offset, window)
        scores = scores.masked_fill(hidden, -torch.inf)
        if softcap is not None and "softcap-after-mask" in bugs:
            scores = softcap * (scores / softcap).tanh()
        output = _attend(bugs, scores, v.to(exact), block, sums or exact).to(query.dtype)
        if "heads-swapped" in bugs:
            output = output.transpose(1, 2).reshape(output.shape)
        return output

    return attend


def _scores(
    bugs: tuple[str, ...], q: Tensor, k: Tensor, E: int, scale: float | None, softcap: float | None
) -> Tensor:
    D = q.shape[-1]
    factor = D**-0.5 if scale is None else scale
    wrong = {"scale-missing": 1.0, "scale-1/D": 1 / D, "scale-1/sqrt(E)": E**-0.5,
             "scale-sqrt(D)": D**0.5, "scale-ignored": D**-0.5}  # fmt: skip
    for name, value in wrong.items():
        factor = value if name in bugs else factor
    scores = q @ k.mT * factor
    if softcap is not None and not {"softcap-missing", "softcap-after-mask"} & set(bugs):
        scores = softcap * (scores / softcap).tanh()
    return scores


def _hide(
    bugs: tuple[str, ...],
    shape: torch.Size,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    causal: bool,
    offset: Any,
    window: tuple[int | None, int | None] | None,
) -> Tensor:
    """Returns the hidden pairs, bool (B, H, L, S)."""
    B, _, L, S = shape
    lengths = torch.full((B, 1, 1, 1), S) if key_lengths is None else key_lengths.view(-1, 1, 1, 1)
    start = lengths - L if offset == "end" else torch.full((B, 1, 1, 1), offset)
    if "causal-top-left" in bugs:
        start = torch.zeros_like(start)
    if "causal-bottom-right" in bugs:
        start = torch.full_like(start, S - L)
    i, j = torch.arange(L).view(L, 1) + start, torch.arange(S)
    hidden = torch.zeros(shape, dtype=torch.bool)
    more = ("causal-one-more" in bugs) - ("causal-one-fewer" in bugs)
    if causal and "causal-missing" not in bugs:
        hidden = hidden | (j > i + more)
    left, right = window or (None, None)
    wider = ("window-<" in bugs) - ("window-left-wider" in bugs)
    if left is not None:
        hidden = hidden | (j < i - left + wider)
    if right is not None:
        hidden = hidden | (j > i + right + int("window-right-wider" in bugs))
    if mask is not None and "mask-ignored" not in bugs:
        hidden = hidden | (mask if "mask-inverted" in bugs else ~mask)
    if "padding-attended" not in bugs:
        hidden = hidden | (j >= lengths)
    return hidden


def _attend(
    bugs: tuple[str, ...], scores: Tensor, v: Tensor, block: int, sums: torch.dtype
) -> Tensor:
    """Returns the average of the values, from blocks of keys."""
    padding = (scores == -torch.inf).all(2, keepdim=True).mT
    if "nan-from-padding" not in bugs:
        v = v.masked_fill(padding.all(1, keepdim=True), 0.0)
    top = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    total = torch.zeros_like(top).to(sums)
    output = v.new_zeros(*scores.shape[:-1], v.shape[-1]).to(sums)
    for start in range(0, scores.shape[-1], block):
        part, values = scores[..., start : start + block], v[:, :, start : start + block]
        new = torch.maximum(top, part.detach().amax(-1, keepdim=True))
        safe = new.masked_fill(new == -torch.inf, 0.0)
        if "max-not-subtracted" in bugs:
            safe = torch.zeros_like(safe)
        weights = (part - safe).exp()
        old = (top - safe).exp() if "max-not-subtracted" not in bugs else torch.ones_like(top)
        total = total * old.to(sums) + weights.sum(-1, keepdim=True).to(sums)
        output = output * old.to(sums) + (weights @ values).to(sums)
        top = new
    if "normalizer-missing" in bugs:
        return output
    if not {"nan-from-masked-row", "max-not-subtracted"} & set(bugs):
        total = total.masked_fill(top == -torch.inf, 1.0)
    return output / total
