"""A small flash-style attention kernel in plain torch, with switches that plant bugs.

It shares no code with the oracle: keys come in blocks, with a running maximum and a running sum
(Dao et al., FlashAttention, arXiv:2205.14135, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from support.flash_blocks import average_blocks, to_tf32

Attention = Callable[..., Tensor]


def flash_kernel(*bugs: str, block: int = 16, sums: torch.dtype | None = None) -> Attention:
    """Returns an attention function.

    Args:
        *bugs: planted bugs, by the names in this file and in `flash_blocks`.
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
        if "strides-ignored" in bugs:
            query, key, value = (_as_contiguous(x) for x in (query, key, value))
        H, G = query.shape[1], key.shape[1]
        heads = torch.arange(H) % G if "gqa-tiled" in bugs else torch.arange(H) // (H // G)
        k, v = key[:, heads], value[:, heads]
        if "value-transposed" in bugs:
            v = v.mT.reshape(v.shape)
        exact = torch.float64 if query.dtype == torch.float64 else torch.float32
        scores = capped_scores(bugs, query.to(exact), k.to(exact), v.shape[-1], scale, softcap)
        hidden = hidden_pairs(bugs, scores.shape, mask, key_lengths, causal, query_offset, window)
        if softcap is not None and "softcap-after-mask" in bugs:
            scores = softcap * (scores.masked_fill(hidden, -torch.inf) / softcap).tanh()
            hidden = torch.zeros_like(hidden)
        output = average_blocks(bugs, scores, hidden, v.to(exact), block, sums or exact)
        return _write(bugs, output.to(query.dtype), block)

    return attend


def capped_scores(
    bugs: tuple[str, ...], q: Tensor, k: Tensor, E: int, scale: float | None, softcap: float | None
) -> Tensor:
    D = q.shape[-1]
    factor = D**-0.5 if scale is None else scale
    wrong = {"scale-missing": 1.0, "scale-1/D": 1 / D, "scale-1/sqrt(E)": E**-0.5,
             "scale-sqrt(D)": D**0.5, "scale-ignored": D**-0.5}  # fmt: skip
    for name, value in wrong.items():
        factor = value if name in bugs else factor
    if "products-tf32" in bugs:
        q, k = to_tf32(q), to_tf32(k)
    scores = q @ k.mT * factor
    if softcap is not None and not {"softcap-missing", "softcap-after-mask"} & set(bugs):
        scores = softcap * (scores / softcap).tanh()
    return scores


def hidden_pairs(
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
    if mask is not None and "first-mask-for-all" in bugs:
        mask = mask[:1]
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


def _as_contiguous(x: Tensor) -> Tensor:
    """Returns the numbers that a kernel reads if it ignores the strides."""
    return torch.as_strided(x, x.shape, torch.empty(x.shape, device="meta").stride())


def _write(bugs: tuple[str, ...], output: Tensor, block: int) -> Tensor:
    """Returns the output as a kernel with blocks of queries writes it."""
    L = output.shape[2]
    if "heads-swapped" in bugs:
        output = output.transpose(1, 2).reshape(output.shape)
    if "last-rows-not-written" in bugs:
        output = output.masked_fill((torch.arange(L) >= L // block * block).view(L, 1), 0.0)
    if "row-stale" in bugs:
        output = output.clone()
        output[0, 0, L // 2] = output[0, 0, L // 2 - 1]
    return output
