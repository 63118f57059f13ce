"""The steps that several variants share: inputs, keys that a query sees, scores, and sums.

They are in float64 and share no code with `attend`, which tests compare them with.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from qkv.attention.step import Step


def input_steps(query: str | None, key: str | None, value: str | None) -> tuple[Step, ...]:
    """Returns the steps of queries, keys and values, with these symbols."""
    return (
        Step("query", "B H L D", query, "The queries.", rows="L"),
        Step("key", "B G S D", key, "The keys; padding is zeros."),
        Step("value", "B G S E", value, "The values; padding is zeros."),
    )


SCORE_STEPS: Final = (
    *input_steps("Q", "K", "V"),
    Step("scores", "B H L S", "Q K^T", "The product of each query with each key.", rows="L"),
    Step("scaled", "B H L S", "scale Q K^T", "The scores times scale.", rows="L"),
    Step(
        "capped", "B H L S", None, "The scaled scores s as softcap tanh(s / softcap).", rows="L",
        needs=("softcap",),
    ),
)  # fmt: skip
"""The steps of variants with scores, before those that are added to them."""


def mask_steps(symbol: str) -> tuple[Step, Step]:
    """Returns the steps from scores to masked scores; `symbol` is that of the masked ones."""
    return (
        Step(
            "biased", "B H L S", None, "The scores so far, plus the slope of the head times the "
            "position of the key minus that of the query.", rows="L", needs=("alibi_slopes",),
        ),
        Step(
            "masked", "B H L S", symbol, "The scores so far, plus the mask; -inf where the query "
            "does not see the key.", rows="L", needs=("mask", "key_lengths", "causal", "window"),
            output="scores",
        ),
    )  # fmt: skip


def zero_padding(x_BGSX: Tensor, key_lengths_B: Tensor | None) -> Tensor:
    """Returns keys or values with zeros for padding."""
    if key_lengths_B is None:
        return x_BGSX
    place_S = torch.arange(x_BGSX.shape[2], device=x_BGSX.device)
    return x_BGSX.masked_fill((place_S >= key_lengths_B[:, None])[:, None, :, None], 0.0)


def seen_keys(
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    key_lengths_B: Tensor | None,
    causal: bool,
    query_offset: int | Literal["end"],
    window: tuple[int | None, int | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns True where a query sees a key without a mask, and how far the key is behind it.

    Both are (B, L, S). The distance is negative for keys before the query.
    """
    B, L, S = len(key_BGSD), query_BHLD.shape[2], key_BGSD.shape[2]
    valid_B = key_lengths_B
    if valid_B is None:
        valid_B = torch.full((B,), S, device=key_BGSD.device)
    offset_B = valid_B - L if query_offset == "end" else torch.full_like(valid_B, query_offset)
    query_L, key_S = (torch.arange(n, device=key_BGSD.device) for n in (L, S))
    distance_BLS = key_S - (query_L + offset_B[:, None])[:, :, None]
    seen_BLS = (key_S < valid_B[:, None])[:, None].expand(B, L, S)
    left, right = window or (None, None)
    if causal:
        seen_BLS = seen_BLS & (distance_BLS <= 0)
    if left is not None:
        seen_BLS = seen_BLS & (distance_BLS >= -left)
    if right is not None:
        seen_BLS = seen_BLS & (distance_BLS <= right)
    return seen_BLS, distance_BLS


def per_query_head(x_BGSX: Tensor, query_BHLD: Tensor) -> Tensor:
    """Returns keys or values (B, H, S, X): those of each query head."""
    count = query_BHLD.shape[1] // x_BGSX.shape[1]
    return x_BGSX if count == 1 else x_BGSX.repeat_interleave(count, 1)


def score_steps(
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    key_lengths_B: Tensor | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the steps of `SCORE_STEPS` by name, and the last one."""
    key, value = (zero_padding(x, key_lengths_B) for x in (key_BGSD, value_BGSE))
    scores = query_BHLD @ per_query_head(key, query_BHLD).mT
    last = scores * (query_BHLD.shape[-1] ** -0.5 if scale is None else scale)
    steps = {"query": query_BHLD, "key": key, "value": value, "scores": scores, "scaled": last}
    if softcap is not None:
        steps["capped"] = last = softcap * (last / softcap).tanh()
    return steps, last


def mask_step_values(
    scores_BHLS: Tensor,
    seen_BLS: Tensor,
    distance_BLS: Tensor,
    mask_BHLS: Tensor | None,
    alibi_slopes_H: Tensor | None,
) -> dict[str, Tensor]:
    """Returns the steps of `mask_steps` by name."""
    steps, seen = {}, seen_BLS[:, None]
    if alibi_slopes_H is not None:
        scores_BHLS = scores_BHLS + alibi_slopes_H[:, None, None] * distance_BLS[:, None]
        steps["biased"] = scores_BHLS
    if mask_BHLS is not None and mask_BHLS.dtype == torch.bool:
        seen = seen & mask_BHLS
    elif mask_BHLS is not None:
        scores_BHLS = scores_BHLS + mask_BHLS
    return {**steps, "masked": scores_BHLS.masked_fill(~seen, -torch.inf)}


def sums_before(past: Any | None, key_BGSX: Tensor, shape: tuple[int, int]) -> Tensor:
    """Returns the sums of a state, (B, G, *shape); zeros without one."""
    if past is None or past.sums is None:
        return key_BGSX.new_zeros(*key_BGSX.shape[:2], *shape)
    sums_BGFW: Tensor = past.sums
    return sums_BGFW


class Averages(NamedTuple):
    """Averages of values, one for each query and each channel of the keys.

    Attributes:
        top_BGLD: the largest logarithm of a key that the query sees, or of the sums before; 0
            without any.
        share_BGLDS: the weight of each key, over the total.
        total_BGLD: the sum of the weights, each divided by e^top; 0 without any.
        average_BGLDE: of the values.
    """

    top_BGLD: Tensor
    share_BGLDS: Tensor
    total_BGLD: Tensor
    average_BGLDE: Tensor


def channel_averages(
    log_BGSD: Tensor,
    factor_BGSD: Tensor,
    value_BGSE: Tensor,
    seen_BLS: Tensor,
    sums_BGDW: Tensor,
    largest_BGD: Tensor,
) -> Averages:
    """Returns the averages of the values that a query sees, by the weights factor * e^log.

    Args:
        log_BGSD: logarithms of any size: their largest one is subtracted.
        factor_BGSD: at least 1.
        value_BGSE: the values.
        seen_BLS: True where a query sees a key; one row is that of all queries, and L is 1.
        sums_BGDW: of the weights, each divided by e^largest, times (v, 1), over the tokens before.
        largest_BGD: of these sums.
    """
    # keys are the last axis, so that sums over them read numbers in their order
    log_BGLDS = log_BGSD.mT[:, :, None].masked_fill(~seen_BLS[:, None, :, None], -torch.inf)
    before_BG1D = largest_BGD.masked_fill(sums_BGDW[..., -1] == 0, -torch.inf)[:, :, None]
    # detached: a gradient through a number that cancels is nothing but rounding errors
    top_BGLD = log_BGLDS.detach().amax(-1).maximum(before_BG1D)
    top_BGLD = top_BGLD.masked_fill(top_BGLD == -torch.inf, 0.0)
    grown_BGLDS = (log_BGLDS - top_BGLD[..., None]).exp() * factor_BGSD.mT[:, :, None]
    shared_BGLDW = (before_BG1D - top_BGLD).exp()[..., None] * sums_BGDW[:, :, None]
    total_BGLD = grown_BGLDS.sum(-1) + shared_BGLDW[..., -1]
    divisor_BGLD = total_BGLD.masked_fill(total_BGLD == 0, 1.0)
    share_BGLDS = grown_BGLDS / divisor_BGLD[..., None]
    average = share_BGLDS @ value_BGSE[:, :, None]
    average = average + shared_BGLDW[..., :-1] / divisor_BGLD[..., None]
    return Averages(top_BGLD, share_BGLDS, total_BGLD, average)


def kept_weights(dropout: float, seed: int, plane_BH: Tensor, weights_BHLS: Tensor) -> Tensor:
    """Returns True for each weight that dropout keeps, by the definition of `common/dropout.py`.

    The unsigned numbers of 32 bits are int64 here.
    """
    row_L1, key_S = (torch.arange(n, device=plane_BH.device) for n in weights_BHLS.shape[-2:])
    row_L1 = row_L1[:, None]

    def mix(x: Tensor) -> Tensor:
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF  # a product that wraps has the same bits
        return x ^ (x >> 16)

    seeded = torch.zeros_like(plane_BH)
    for word in (seed & 0xFFFFFFFF, seed >> 32):
        seeded = mix(seeded ^ word)
    plane_BH11 = mix(seeded ^ plane_BH)[..., None, None]
    hash_BHLS = mix(mix(plane_BH11 ^ row_L1) ^ mix(~key_S & 0xFFFFFFFF))
    return hash_BHLS >= int(dropout * 2.0**32)
