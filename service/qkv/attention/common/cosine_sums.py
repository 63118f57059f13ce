"""Averages by 1 + cosine in float32, without an (L, S) matrix, causal or not."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.attention.common.feature_sums import feature_sums
from qkv.attention.common.guards import are_deferred, bounds, holds
from qkv.attention.common.running_sums import running_sums

_LEAST = 1e-30  # of divisors: 0 / 1e-30 is 0; other rows with such a total are recomputed
_NORMS = (1e-3, 1e6)  # norms between which a product with a norm loses no digit


def average_by_cosines(
    query_BGKLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    counts_BL: Tensor,
    offsets: list[int] | None,
) -> tuple[Tensor, Tensor]:
    """Averages values by 1 + cosine over the keys j that each query i sees.

    Sums of values and of cosines are apart, so that the former have the error of their own size.

    Args:
        query_BGKLD: queries; the K heads that read one key head side by side.
        key_BGSD: keys, zero for padding.
        value_BGSE: values, zero for padding.
        counts_BL: n_i, the number of keys that each query sees.
        offsets: as in `feature_sums.feature_sums`.

    Returns:
        The averages sum_j (1 + q'_i . k'_j) v_j / (n_i + sum_j q'_i . k'_j), (B, G, K, L, E), and
        their divisors, (B, G, K, L, 1). Both are 0 for a query that sees no key.
    """
    (query, norm), (key, key_norm) = _with_norm(query_BGKLD), _with_norm(key_BGSD)
    counts = counts_BL[:, None, None, :, None]
    if offsets is None:
        key = key / key_norm
        products, keys, values = (
            x[:, :, None]
            for x in ((value_BGSE.mT @ key).mT, key.sum(2, True), value_BGSE.sum(2, True))
        )
        total = (query @ keys.mT).div_(norm).add_(counts)
        share = total.clamp(min=_LEAST).reciprocal_()
        # the products are divided by the norms at the end: once, in place
        return (query @ products).mul_(share / norm).addcmul_(values, share), total
    output, total = feature_sums(query, key, value_BGSE, offsets, _direction)
    values = running_sums(value_BGSE, torch.float32)[:, :, None]
    if any(offsets) or len(counts_BL[0]) != values.shape[3]:
        place = (counts.long() - 1).clamp(min=0).expand(-1, *values.shape[1:3], -1, values.shape[4])
        values = values.gather(3, place).masked_fill_(counts == 0, 0.0)
    total.add_(counts)
    return output.add_(values).div_(total.clamp(min=_LEAST)), total


def _with_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows in float32 and their norms, 1 for rows of zeros.

    Each row is divided by a power of two that gives it ordinary size. The bits of a row do not
    depend on other rows.
    """
    x = x.float()
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    if not are_deferred():
        least, largest = bounds(norm)
        if least >= _NORMS[0] and largest <= _NORMS[1]:
            return x, norm
    zero, fits = norm == 0, (norm >= _NORMS[0]) & (norm <= _NORMS[1])
    if not holds(fits | (zero & (x == 0).all(-1, keepdim=True))):
        exponents = torch.frexp(x.abs().amax(-1, keepdim=True)).exponent
        x = torch.where(fits, x, torch.ldexp(x.double(), -exponents).float())
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x, norm.masked_fill(norm == 0, 1.0)


def _direction(x: Tensor) -> Tensor:
    """Returns rows of ordinary size divided by their norms; 0 for rows of zeros."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norm.clamp_(min=_LEAST)
