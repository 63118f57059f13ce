"""Averages of values over blocks of keys, with switches that plant bugs of flash kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def average_blocks(
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
    return (to_tf32(weights), to_tf32(values)) if "products-tf32" in bugs else (weights, values)


def to_tf32(x: Tensor) -> Tensor:
    """Rounds float32 numbers to the 11 significant bits of TF32."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
