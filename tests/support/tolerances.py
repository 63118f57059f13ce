"""Bounds of the error of softmax outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.attention.variants import softmax
from support.dtypes import exact_dtype


class Bounds(NamedTuple):
    """The largest distance of each output element from the truth, float64."""

    output: Tensor
    weights: Tensor
    scores: Tensor


def spread(scores: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the smallest and largest softmax weights of scores that are known within an error.

    A weight is smallest where its own score is `error` too low and all others are too high, and
    largest the other way round. This is interval arithmetic, exact for any size of error.
    """

    def extreme(own: Tensor, others: Tensor) -> Tensor:
        none = torch.full_like(others[..., :1], -math.inf)
        before = torch.cat([none, others[..., :-1]], -1).logcumsumexp(-1)
        after = torch.cat([none, others.flip(-1)[..., :-1]], -1).logcumsumexp(-1).flip(-1)
        beside = torch.logaddexp(before, after)
        return torch.sigmoid(own - beside).nan_to_num(0.0)  # -inf - -inf: sees nothing

    low, high = scores - error, scores + error
    return extreme(low, high), extreme(high, low)


def bounds(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    parameters: Mapping[str, Any],
    truth: softmax.Softmax,
    alibi_BHLS: Tensor | None = None,
    sinks_H: Tensor | None = None,
) -> Bounds:
    """Returns bounds from eps of the dtypes, D, S and the sizes of scores and values.

    eps is that of the scores' dtype, twice its unit roundoff, so that half of each bound remains
    for the reference, which rounds in float64.
    - A score is D products and D - 1 sums, the scale rounded and applied, perhaps as two square
      roots: (D + 8) eps |scale| sum_d |q_d k_d|. Softcap divides, takes tanh (slope at most 1)
      and multiplies: 4 eps |score|. The mask is rounded and added: eps (|mask| + |score|). ALiBi,
      slope times distance, rounds both and the product: 3 eps |alibi| + eps |score|.
    - A sink is one more score, rounded once.
    - The softmax rounds score - top: eps (|score| + |top|) more, in the exponent. `spread` turns
      these errors into weights. exp is exact to 20 ulp (that of the fused kernel, in numerator and
      sum), sum and quotient round S + 1 times, dropout's factor twice: (S + 64) eps of the weight.
    - An output sums S products of weight and value: S eps of sum_j A_j |v_j|; for narrow dtypes
      the fused kernel rounds each weight to the dtype, and the output is rounded to it too.
    - Underflow loses at most the smallest normal number, times its factor.
    """
    dtype, exact = query.dtype, exact_dtype(query.dtype)
    eps, narrow = torch.finfo(exact).eps, torch.finfo(dtype).eps
    assert truth.output is not None
    assert truth.weights is not None
    assert truth.scores is not None
    score, H, S, D = truth.scores, query.shape[1], key.shape[2], query.shape[3]
    q, k, v = (
        x.double().nan_to_num(0.0, 0.0, 0.0).repeat_interleave(H // x.shape[1], 1)
        for x in (query, key, value)
    )
    scale = parameters.get("scale")
    scale = D**-0.5 if scale is None else scale
    error = (D + 8) * eps * abs(scale) * (q.abs() @ k.abs().mT)
    error = error + (D + 8) * torch.finfo(exact).tiny * max(1.0, parameters.get("softcap") or 1.0)
    if mask is not None and mask.is_floating_point():
        added = mask.double().nan_to_num(neginf=0.0).abs()
        error = error + 2 * eps * added
    size = score.nan_to_num(neginf=0.0).abs()
    error = error + 4 * eps * size
    if alibi_BHLS is not None:
        error = error + 3 * eps * alibi_BHLS.abs() + eps * size
    sink = torch.full((H, 1, 1), -math.inf) if sinks_H is None else sinks_H.view(-1, 1, 1)
    logit = torch.cat([score, sink.double().expand(*score.shape[:-1], 1)], -1)
    logit_size = logit.nan_to_num(neginf=0.0).abs()
    exponent = eps * (logit_size + logit_size.amax(-1, keepdim=True))
    own = torch.cat([error.expand_as(score), eps * logit_size[..., -1:]], -1)
    least, most = (x[..., :-1] for x in spread(logit, own + exponent))
    factor = 1 / (1 - parameters.get("dropout", 0.0))
    weight = (most - least + (S + 64) * eps * most + torch.finfo(exact).tiny) * factor
    mass = truth.weights @ v.abs()
    lost = S * narrow * torch.finfo(dtype).tiny * v.abs().amax((-2, -1), keepdim=True).clamp(min=1)
    output = weight @ v.abs() + (S * eps + 3 * narrow) * mass + lost * factor
    return Bounds(output, weight, error + 2 * eps * size)


def assert_within(found: Tensor | None, truth: Tensor | None, bound: Tensor | float) -> None:
    """Checks that `found` is finite where the truth is, equal elsewhere, and within `bound`."""
    assert found is not None
    assert truth is not None
    assert found.shape == truth.shape
    finite = truth.to(found.dtype).isfinite()
    torch.testing.assert_close(found.isfinite(), finite)
    if not finite.all():
        assert torch.equal(found[~finite].double(), truth[~finite].to(found.dtype).double())
    excess = (found.double() - truth).abs() - bound
    assert (excess[finite] <= 0).all(), f"off by {excess[finite].max():.3g} more than allowed"
