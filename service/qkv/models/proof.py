"""The proof of a recorded call: its weights times its values are what the model computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from qkv.models.masks import pairs_in_sight
from qkv.models.model_call import ModelCall

_BLOCK: Final = 1 << 22  # scores that are held at a time
_NEAR: Final = 100.0  # so much less in a mask leaves a score no weight
_MATMUL_BITS: Final = {"high": 10, "medium": 7}  # of float32, as torch may shorten it


@torch.no_grad()
def is_proved(call: ModelCall, output: Tensor) -> bool:
    """Tells if the weights of a call times its values are an output, within its rounding.

    Queries that see no key prove nothing, because models define their output differently. Neither
    do calls that drop weights.

    Args:
        call: each query head has a key head of its own.
        output: (B, H, L, E), as the model's attention returned it.
    """
    if call.dropout:
        return True
    B, H, L, _ = call.query.shape
    S = call.key.shape[2]
    rows = max(1, _BLOCK // max(1, B * H * S))
    with torch.autocast(call.query.device.type, enabled=False):
        return all(
            _has_proved_rows(call, output, slice(start, start + rows))
            for start in range(0, L, rows)
        )


def _has_proved_rows(call: ModelCall, output: Tensor, rows: slice) -> bool:
    """Tells if some rows of a call are those of an output."""
    numbers = (call.query, call.key, call.value, output)
    dtype = torch.promote_types(torch.float32, call.query.dtype)
    query, key, value, output = (x.to(dtype) for x in numbers)
    query, output = query[:, :, rows], output[:, :, rows]
    scores, size = _scores(call, query, key, rows)
    if call.sinks is not None:
        sinks = call.sinks.to(dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    D, S = key.shape[-1], key.shape[2]
    expected = scores.softmax(-1)[..., :S] @ value
    bound = _shift(numbers, dtype, size, D, S) * value.abs().amax(2, keepdim=True)
    differs = ~((output - expected).abs() <= bound)
    return not bool((differs & expected.isfinite() & bound.isfinite()).any())


def _scores(call: ModelCall, query: Tensor, key: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Returns the scores of some rows, and for each row the size of the numbers in their sums."""
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    query = query * scale
    scores = query @ key.mT
    longest = key.norm(dim=-1).amax(-1)[..., None, None]
    size = scores.abs().amax(-1, keepdim=True)
    size = size + query.norm(dim=-1, keepdim=True) * longest * query.shape[-1] ** -0.5
    if call.softcap is not None:
        scores = (scores / call.softcap).tanh() * call.softcap
    mask = call.mask
    if mask is not None and mask.shape[2] > 1:
        mask = mask[:, :, rows]
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
        size = size + _size_of_mask(mask)
    if call.causal or call.window is not None:
        sight = pairs_in_sight(call, call.query.shape[2], key.shape[2])[rows]
        scores = scores.masked_fill(~sight, -torch.inf)
    return scores, size


def _shift(numbers: Sequence[Tensor], dtype: torch.dtype, size: Tensor, D: int, S: int) -> Tensor:
    """Returns the rounding of rows of weights times values, as a share of the largest value."""
    # a score is rounded some four times, its weight and the output once each; sums are wider
    return _eps(numbers) * (4 * size + 8) + torch.finfo(dtype).eps * (D * size + S)


def _size_of_mask(mask: Tensor) -> Tensor:
    """Returns the size of the numbers that a mask adds to scores, for each row."""
    is_far = mask < mask.amax(-1, keepdim=True) - _NEAR
    return mask.abs().masked_fill(is_far, 0).amax(-1, keepdim=True)


@torch.no_grad()
def are_near(one: object, other: object) -> bool:
    """Tells if two runs of a module returned the same, up to rounding in other orders.

    The limit leaves room for scores of hundreds. In dtypes narrower than float32 rounding may be as
    large as the output, and the comparison proves nothing.
    """
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape != other.shape:
        return False
    if torch.finfo(one.dtype).bits < 32:
        return True
    known = (one.isfinite() & other.isfinite()).all(-1, keepdim=True)
    error, size = (x.where(known, 0.0).norm(dim=-1).max() for x in (one - other, other))
    return bool(error <= _eps([one]) ** 0.25 * size)


def _eps(numbers: Sequence[Tensor]) -> float:
    """Returns the rounding of the steps between the numbers of tensors."""
    # models of transformers compute the softmax of float64 in float32
    eps = max(torch.finfo(x.dtype).eps for x in (*numbers, torch.empty(0, dtype=torch.float32)))
    bits = _MATMUL_BITS.get(torch.get_float32_matmul_precision())
    return eps if bits is None else max(eps, 2.0**-bits)
