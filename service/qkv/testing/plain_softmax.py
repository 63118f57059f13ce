"""Softmax attention as a plain formula in float64, with the intermediate results of each step.

`budget` derives bounds from the intermediate results. `known_bugs` changes the formula by flags.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from qkv.testing.call import Call
from qkv.testing.visibility import visible_keys

OVERFLOW = 88.72
"""exp of a greater number is infinite in float32."""

SENTINEL: Final = -1e5
"""Stands for what kernels begin a maximum with: rows whose scores are lower are lost."""

EPSILONS: Final = {f"epsilon-1e-{n}": 10.0**-n for n in range(2, 13)}
"""Flags: the number that is added to the sum of a row."""

FORGOTTEN: Final = {
    f"not-rescaled-{'-'.join(parts)}-{block}": (parts, block)
    for parts in (("output",), ("sum",), ("output", "sum"))
    for block in (1, 16, 32, 64, 128)
}
"""Flags: what an online softmax does not rescale if its maximum grows, and its keys in a block."""


class Evaluation(NamedTuple):
    """The steps of one call; all tensors are float64.

    Attributes:
        query: (B, H, L, D).
        key, value: (B, H, S, D) and (B, H, S, E), repeated for each query head. With a sink, S is
            one more than the number of keys.
        scale: factor of the scores.
        softcap: the cap of the scores, or None.
        products: scale * sum_d q_d k_d, (B, H, L, S).
        scores: after the cap, -inf where hidden, (B, H, L, S).
        visible: bool, (B, H, L, S).
        weights: (B, H, L, S).
        is_normalized: True if the weights of a row sum to 1.
        output: (B, H, L, E).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    softcap: float | None
    products: Tensor
    scores: Tensor
    visible: Tensor
    weights: Tensor
    is_normalized: bool
    output: Tensor


def evaluate(call: Call) -> Evaluation:
    """Computes softmax attention, changed by the flags of the call.

    The flags are `cap-after-mask`, `no-sum`, `no-sum-no-max`, `no-max`, `blind-nan`, `nan-spreads`,
    `sentinel`, `cap-sink`, `sink-gate`, and those of `EPSILONS` and `FORGOTTEN`. A sink is one more
    key, whose value is 0. The result is differentiable by autograd.
    """
    inputs, parameters, flags = call.exact_inputs, call.parsed, call.flags
    query, H = inputs["query"], inputs["query"].shape[1]
    key, value = (inputs[n].repeat_interleave(H // inputs[n].shape[1], 1) for n in ("key", "value"))
    scale, softcap = parameters.get("scale"), parameters.get("softcap")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    products = (query * scale) @ key.mT
    scores = products if softcap is None else softcap * (products / softcap).tanh()
    visible = visible_keys(call)
    if "cap-after-mask" in flags and softcap is not None:
        scores = scores.masked_fill(~visible, -softcap)
        visible = torch.ones_like(visible)
    scores = scores.masked_fill(~visible, -torch.inf)
    is_blind = ~visible.any(-1, keepdim=True)
    gate = None
    if (sinks := inputs.get("sinks")) is not None:
        sinks = sinks[:, None, None]
        if "sink-gate" in flags:
            gate = sinks.sigmoid()
        else:
            if "cap-sink" in flags and softcap is not None:
                sinks = softcap * (sinks / softcap).tanh()
            sinks = sinks.expand(*scores.shape[:3], 1)
            scores, products = (torch.cat([x, sinks], -1) for x in (scores, products))
            visible = pad(visible, (0, 1), value=True)
            key, value = (pad(x, (0, 0, 0, 1)) for x in (key, value))
    top = scores.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    without_max = bool(flags & {"no-max", "no-sum-no-max"})
    weights = (scores - (0.0 if without_max else top)).exp()
    if without_max:
        weights = weights.masked_fill(scores.detach() > OVERFLOW, torch.inf)
        weights = weights.masked_fill(scores.detach() < -OVERFLOW, 0.0)
    weights, summed = _forget(weights, scores.detach(), flags)
    is_normalized = not flags & {"no-sum", "no-sum-no-max"}
    if is_normalized:
        total = summed.sum(-1, keepdim=True)
        total = total if without_max else total.masked_fill(is_blind, 1.0)
        weights = weights / (total + sum(EPSILONS.get(flag, 0.0) for flag in flags))
    if "sentinel" in flags:
        weights = weights.masked_fill(top < SENTINEL, 0.0)
    if gate is not None:
        weights, is_normalized = weights * gate, False
    if "blind-nan" in flags:
        weights = weights.masked_fill(is_blind, torch.nan)
    output = weights @ value
    if "nan-spreads" in flags:  # a hidden value that is NaN has the weight 0
        is_nan = call.inputs["value"].isnan().any(2, keepdim=True)
        output = output.masked_fill(is_nan.repeat_interleave(H // is_nan.shape[1], 1), torch.nan)
    is_normalized = is_normalized and not flags & FORGOTTEN.keys()
    return Evaluation(
        query, key, value, scale, softcap, products, scores, visible, weights, is_normalized, output
    )


def _forget(weights: Tensor, scores: Tensor, flags: frozenset[str]) -> tuple[Tensor, Tensor]:
    """Returns the weights of the values and those of the sum, as an online softmax has them.

    Without rescaling, they are relative to the largest score up to the end of their own block.
    """
    summed = weights
    for parts, block in (FORGOTTEN[flag] for flag in flags & FORGOTTEN.keys()):
        tops = torch.stack([part.amax(-1) for part in scores.split(block, -1)], -1)
        top = tops.cummax(-1).values.repeat_interleave(block, -1)[..., : scores.shape[-1]]
        early = (scores - top.masked_fill(top == -torch.inf, 0.0)).exp()
        summed = early if "sum" in parts else weights
        weights = early if "output" in parts else weights
    return weights, summed
