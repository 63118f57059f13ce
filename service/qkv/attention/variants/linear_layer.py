"""A linear layer as attention: its input gives the weights, its weight matrix the values.

Formula: A_j = |x_j| / s, s = sum_l |x_l|, V_j = s sign(x_j) W[:, j], output = A V = x W^T.
Paper: none; it is algebra.
Cost: O(B I O) time; memory O(B O), and O(B I O) where the values are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64
from torch import Tensor

from qkv.attention.common.score_blocks import score_dtype
from qkv.attention.common.visibility import row_blocks

FORMULA: Final = "A_j = |x_j| / s, s = sum_l |x_l|, V_j = s sign(x_j) W[:, j]; output = A V = x W^T"
PAPER: Final = "none; it is algebra"
COST: Final = "O(B I O) time; O(B O) memory, and O(B I O) where the values are asked for"
WEIGHTS: Final = "stochastic; a row of zeros where x is all zeros"
_SCORES: Final = "the scores are recovered from the weights: nothing is computed from them"
_POSITIONS: Final = "the keys are the features of one input, which has no positions"
REFUSES: Final[Mapping[str, str]] = {
    "causal": _POSITIONS,
    "query_offset": _POSITIONS,
    "window": _POSITIONS,
    "scale": _SCORES,
    "softcap": _SCORES,
    "dropout": "the output is the linear layer's, which drops nothing",
    "seed": "the output is the linear layer's, which drops nothing",
    "normalize": "what the weights are divided by, the values are multiplied with",
}

_ELEMENTS = 1 << 22  # of a block of values, or of products one by one


class LinearLayer(NamedTuple):
    """What a linear layer answers as attention; None where it was not asked for."""

    output: Float[Tensor, "B O"] | None = None
    weights: Float32[Tensor, "B I"] | Float64[Tensor, "B I"] | None = None
    value: Float32[Tensor, "B I O"] | Float64[Tensor, "B I O"] | None = None
    scores: Float32[Tensor, "B I"] | Float64[Tensor, "B I"] | None = None
    query: Float32[Tensor, "B 1"] | Float64[Tensor, "B 1"] | None = None
    key: Float32[Tensor, "B I 1"] | Float64[Tensor, "B I 1"] | None = None
    backend: str = "matmul"


class _Shares(NamedTuple):
    """|x| in float64, taken apart so that neither it nor its sum overflows.

    Attributes:
        size_BI: |x|.
        most_B1: the largest of a row; 1 for a row of zeros.
        share_BI: size / most.
        total_B1: the sum of shares, between 1 and I; 1 for a row of zeros.
    """

    size_BI: Tensor
    most_B1: Tensor
    share_BI: Tensor
    total_B1: Tensor

    @classmethod
    def of(cls, x_BI: Tensor) -> _Shares:
        size = x_BI.double().abs()
        most = size.amax(-1, keepdim=True)
        most = most.masked_fill(most == 0, 1.0)
        share = size / most
        total = share.sum(-1, keepdim=True)
        return cls(size, most, share, total.masked_fill(total == 0, 1.0))

    def weights(self) -> Tensor:
        """|x| / sum |x|."""
        return self.share_BI / self.total_B1

    def scores(self) -> Tensor:
        """Logarithms of the weights, also of those that no float holds."""
        tiny = torch.finfo(torch.float64).smallest_normal  # a share below it has lost digits
        logs = torch.where(
            self.share_BI < tiny, self.size_BI.log() - self.most_B1.log(), self.share_BI.log()
        )
        return logs - self.total_B1.log()


def flops(sizes: Mapping[str, int]) -> int:
    """The layer's own product."""
    return 2 * sizes["B"] * sizes["I"] * sizes["O"]


def attend(
    x_BI: Float[Tensor, "B I"],
    weight_OI: Float[Tensor, "O I"],
    *,
    outputs: frozenset[str],
) -> LinearLayer:
    """Applies the layer, and says what attention it is.

    Args:
        x_BI: inputs; I input features are the keys.
        weight_OI: the layer's weight as nn.Linear has it, O output features by I; one for all.
        outputs: which of "output", "weights", "value", "scores", "query" and "key" to return.
            query is 1 and key is log |x|, both of width 1, so that softmax(query key^T) is the
            weights; scores is log weights. Where x is 0, key and scores are -inf.
    """
    exact = score_dtype(x_BI.dtype)
    output = weights = value = scores = query = key = None
    if "output" in outputs:
        output = _product(x_BI, weight_OI, exact).to(x_BI.dtype)
    if outputs & {"weights", "value", "scores", "key"}:
        shares = _Shares.of(x_BI)
        if "weights" in outputs:
            weights = shares.weights().to(exact)
        if "value" in outputs:
            value = _value(x_BI, weight_OI, shares, exact)
        if "scores" in outputs:
            scores = shares.scores().to(exact)
        if "key" in outputs:
            key = shares.size_BI.log().to(exact)[..., None]
    if "query" in outputs:
        query = x_BI.new_ones(len(x_BI), 1, dtype=exact)
    return LinearLayer(output, weights, value, scores, query, key)


def weights(
    x_BI: Float[Tensor, "B I"],
) -> Callable[[slice], Tensor]:
    """What makes blocks of rows of A, from a slice of B to (R, I): an item of the batch is one row,
    and shares nothing with others."""
    exact = score_dtype(x_BI.dtype)

    def row_block(rows: slice) -> Float32[Tensor, "R I"] | Float64[Tensor, "R I"]:
        return _Shares.of(x_BI[rows]).weights().to(exact)

    return row_block


def _product(x_BI: Tensor, weight_OI: Tensor, exact: torch.dtype) -> Tensor:
    """x W^T; what overflows on its way is made anew, wider."""
    x, weight = x_BI.to(exact), weight_OI.to(exact)
    made = x @ weight.mT
    # a finite sum has finite terms; asking each row would take a sixth of the product's time
    if isfinite(made.sum().item()):
        return made
    (rows,) = torch.where(~made.isfinite().all(-1))
    if len(rows):
        again = made[rows]
        if exact == torch.float32:  # no product or sum of these overflows float64
            wider = (x[rows].double() @ weight.double().mT).to(exact)
        else:
            wider = _by_exponents(x[rows], weight)
        made[rows] = torch.where(again.isfinite(), again, wider)
    return made


def _by_exponents(x_BI: Tensor, weight_OI: Tensor) -> Tensor:
    """x W^T in float64, the exponents of products apart, so that only the answer can overflow."""
    x, x_exponents = torch.frexp(x_BI)
    weight, weight_exponents = torch.frexp(weight_OI)
    (B, I), O = x.shape, len(weight)  # noqa: E741
    made = x_BI.new_empty(B, O)
    for b in range(B):
        for rows in row_blocks(O, I, _ELEMENTS):
            products = x[b] * weight[rows]
            exponents = x_exponents[b] + weight_exponents[rows]
            most = exponents.masked_fill(products == 0, -5000).amax(-1, keepdim=True)
            below = (exponents - most).clamp(max=0)  # past 0 are only zeros
            total = torch.ldexp(products, below).sum(-1)
            # past 2000 all but 0 overflows; in two steps because 2.0**1024 is no float
            most_R = most[:, 0].clamp(-2000, 2000)
            half_R = most_R // 2
            made[b, rows] = torch.ldexp(torch.ldexp(total, half_R), most_R - half_R)
    return made


def _value(x_BI: Tensor, weight_OI: Tensor, shares: _Shares, exact: torch.dtype) -> Tensor:
    """sum |x| * sign(x_j) * W[:, j], (B, I, O), rounded once or twice."""
    (B, I), O = x_BI.shape, len(weight_OI)  # noqa: E741
    weight_IO, sign_BI = weight_OI.double().mT, x_BI.double().sign()
    total_B1 = shares.size_BI.sum(-1, keepdim=True)
    # where the sum overflows, the largest comes first: times W it is no denormal, and if that
    # overflows then so does the value
    fits_B1 = total_B1.isfinite()
    first_BI = sign_BI * torch.where(fits_B1, total_B1, shares.most_B1)
    then_B1 = shares.total_B1.masked_fill(fits_B1, 1.0)
    value = x_BI.new_empty(B, I, O, dtype=exact)
    for items in row_blocks(B, I * O, _ELEMENTS):
        value[items] = first_BI[items, :, None] * weight_IO * then_B1[items, :, None]
    return value


def reference(x_BI: Tensor, weight_OI: Tensor) -> LinearLayer:
    """The same in plain float64 numpy, one item at a time, as the seed writes it."""
    x, weight = x_BI.double().numpy(), weight_OI.double().numpy()
    (B, width), out = x.shape, len(weight)
    weights, value, output = np.zeros((B, width)), np.zeros((B, width, out)), np.zeros((B, out))
    for b in range(B):
        total = np.abs(x[b]).sum()
        if total > 0:
            weights[b] = np.abs(x[b]) / total
        value[b] = total * np.sign(x[b])[:, None] * weight.T
        output[b] = weights[b] @ value[b]
    with np.errstate(divide="ignore"):  # log 0 is -inf
        scores, key = np.log(weights), np.log(np.abs(x))[..., None]
    return LinearLayer(
        torch.from_numpy(output),
        torch.from_numpy(weights),
        torch.from_numpy(value),
        torch.from_numpy(scores),
        torch.ones(B, 1, dtype=torch.float64),
        torch.from_numpy(key),
        backend="reference",
    )


def backward(
    grad_output_BO: Float[Tensor, "B O"],
    x_BI: Float[Tensor, "B I"],
    weight_OI: Float[Tensor, "O I"],
) -> dict[str, Tensor]:
    """Gradients of sum(grad_output * output): dx = dY W and dW = dY^T x, in the scores' dtype."""
    exact = score_dtype(x_BI.dtype)
    return {
        "x": _product(grad_output_BO, weight_OI.mT, exact),
        "weight": _product(grad_output_BO.mT, x_BI.mT, exact),
    }
