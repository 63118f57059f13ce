"""A small flash-style attention kernel in plain torch, with switches that plant bugs.

It shares no code with the oracle: keys come in blocks, with a running maximum and a running sum
(Dao et al., FlashAttention, arXiv:2205.14135, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

Attention = Callable[..., Tensor]


def flash_kernel(*bugs: str, block: int = 16, sums: torch.dtype | None = None) -> Attention:
    """Returns an attention function.

    Args:
        *bugs: planted bugs, by the names in this file.
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
        output = _average_blocks(bugs, scores, hidden, v.to(exact), block, sums or exact)
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
        q, k = _to_tf32(q), _to_tf32(k)
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


def _average_blocks(
    bugs: tuple[str, ...], scores: Tensor, hidden: Tensor, v: Tensor, block: int, sums: torch.dtype
) -> Tensor:
    """Returns the averages with a running maximum and a running sum, (B, H, L, E).

    Args:
        bugs: planted bugs, by the names in this file.
        scores: (B, H, L, S).
        hidden: the pairs that do not attend, bool (B, H, L, S).
        v: values, (B, H, S, E).
        block: keys in a block.
        sums: dtype of the sums.
    """
    S = scores.shape[-1]
    seen = scores.masked_fill(hidden, -torch.inf)
    if "nan-from-padding" not in bugs:
        v = v.masked_fill((seen == -torch.inf).all(2, keepdim=True).mT.all(1, keepdim=True), 0.0)
    top = scores.new_full((*scores.shape[:-1], 1), 0.0 if "max-starts-at-0" in bugs else -torch.inf)
    total = torch.zeros_like(top).to(sums)
    output = v.new_zeros(*scores.shape[:-1], v.shape[-1]).to(sums)
    for start in range(0, S // block * block if "last-block-dropped" in bugs else S, block):
        part, values = seen[..., start : start + block], v[:, :, start : start + block]
        if "zero-keys-counted" in bugs:
            more = block - part.shape[-1]
            part, values = pad(part, (0, more)), pad(values, (0, 0, 0, more))
        compared = scores[..., start : start + block] if "mask-after-max" in bugs else part
        new = torch.maximum(top, compared.detach().amax(-1, keepdim=True))
        safe = _subtracted(bugs, new)
        old = torch.ones_like(top) if "max-not-subtracted" in bugs else (top - safe).exp()
        weights = _weights(bugs, part - safe)
        total = total * _factor("sum-not-rescaled" in bugs, old, sums)
        total = total + weights.sum(-1, keepdim=True).to(sums)
        output = output * _factor("output-not-rescaled" in bugs, old, sums)
        weights, values = _rounded(bugs, weights, values)
        output = output + (weights @ values).to(sums)
        top = new
    if "normalizer-missing" in bugs:
        return output
    if not {"nan-from-masked-row", "max-not-subtracted"} & set(bugs):
        total = total.masked_fill(hidden.all(-1, keepdim=True), 1.0)
    return output / total


def _subtracted(bugs: tuple[str, ...], top: Tensor) -> Tensor:
    """Returns the maximum that is subtracted from scores: 0 if all keys are hidden."""
    if "max-not-subtracted" in bugs:
        return torch.zeros_like(top)
    if "nan-from-hidden-block" in bugs:
        return top
    return top.masked_fill(top == -torch.inf, 0.0)


def _weights(bugs: tuple[str, ...], differences: Tensor) -> Tensor:
    return differences.exp2() if "exp2-of-natural-scores" in bugs else differences.exp()


def _factor(is_forgotten: bool, old: Tensor, sums: torch.dtype) -> Tensor:
    """Returns the factor of what earlier blocks gave."""
    return torch.ones_like(old, dtype=sums) if is_forgotten else old.to(sums)


def _rounded(bugs: tuple[str, ...], weights: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the factors of the product of weights and values."""
    narrow = {"weights-8-bit": torch.float8_e4m3fn, "weights-bfloat16": torch.bfloat16}
    for name, dtype in narrow.items():
        if name in bugs:
            weights = weights.to(dtype).to(weights.dtype)
    return (_to_tf32(weights), _to_tf32(values)) if "products-tf32" in bugs else (weights, values)


def _to_tf32(x: Tensor) -> Tensor:
    """Rounds float32 numbers to the 11 significant bits of TF32."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
