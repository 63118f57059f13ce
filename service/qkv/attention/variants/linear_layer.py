"""A linear layer as attention: its input gives the weights, its weight matrix the values.

Formula: A_j = |x_j| / s, s = sum_l |x_l|, V_j = s sign(x_j) W[:, j]; output = A V = x W^T.
Paper: none; it is algebra.
Cost: O(B I O) time; O(B O) memory, and O(B I O) if the values are requested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from jaxtyping import Float, Float32, Float64
from torch import Tensor

from qkv.attention.common.guards import holds, is_finite
from qkv.attention.common.score_blocks import score_dtype
from qkv.attention.common.visibility import row_blocks
from qkv.attention.step import Step

WEIGHTS: Final = "stochastic; a row of zeros if x is all zeros"
_SCORES: Final = "the scores are computed from the weights, and nothing is computed from the scores"
_POSITIONS: Final = "the keys are the features of one input, which has no positions"
REFUSES: Final[Mapping[str, str]] = {
    "causal": _POSITIONS,
    "query_offset": _POSITIONS,
    "window": _POSITIONS,
    "scale": _SCORES,
    "softcap": _SCORES,
    "dropout": "the output is that of the linear layer, which has no dropout",
    "seed": "the output is that of the linear layer, which has no dropout",
    "normalize": "the values are multiplied by the divisor of the weights",
}

STACKABLE_BELOW: Final = 1e9

STEPS: Final = (
    Step("x", "B I", "x_j", "The inputs.", rows="B"),
    Step("sizes", "B I", "|x_j|", "The size of each number of x.", rows="B"),
    Step("row_sums", "B", "sum_l |x_l|", "The sum of each row of sizes.", rows="B"),
    Step("weights", "B I", "|x_j| / s", "The sizes divided by the sum of their row.", rows="B"),
    Step(
        "value", "B I O", "s sign(x_j) W[:, j]", "Each column of the weight matrix, times the sign "
        "of its input and the sum of the row.", rows="B",
    ),
    Step("terms", "B I O", "A V", "Each weight times its value.", rows="B"),
    Step("output", "B O", "output", "The sum of the terms over all inputs.", rows="B"),
)  # fmt: skip

_ELEMENTS = 1 << 22  # of a block of values or of single products


class LinearLayer(NamedTuple):
    """The outputs of a linear layer as attention; None for an output that was not requested."""

    output: Float[Tensor, "B O"] | None = None
    weights: Float32[Tensor, "B I"] | Float64[Tensor, "B I"] | None = None
    value: Float32[Tensor, "B I O"] | Float64[Tensor, "B I O"] | None = None
    scores: Float32[Tensor, "B I"] | Float64[Tensor, "B I"] | None = None
    query: Float32[Tensor, "B 1"] | Float64[Tensor, "B 1"] | None = None
    key: Float32[Tensor, "B I 1"] | Float64[Tensor, "B I 1"] | None = None
    backend: str = "matmul"


class _Shares(NamedTuple):
    """|x| in float64 as factors, so that neither |x| nor its sum overflows.

    Attributes:
        size_BI: |x|.
        largest_B1: the largest of a row; 1 for a row of zeros.
        share_BI: size / largest.
        total_B1: the sum of shares, between 1 and I; 1 for a row of zeros.
    """

    size_BI: Tensor
    largest_B1: Tensor
    share_BI: Tensor
    total_B1: Tensor

    @classmethod
    def of(cls, x_BI: Tensor) -> _Shares:
        size = x_BI.double().abs()
        largest = size.amax(-1, keepdim=True)
        largest = largest.masked_fill(largest == 0, 1.0)
        share = size / largest
        total = share.sum(-1, keepdim=True)
        return cls(size, largest, share, total.masked_fill(total == 0, 1.0))

    def weights(self) -> Tensor:
        """Returns |x| / sum |x|."""
        return self.share_BI / self.total_B1

    def scores(self) -> Tensor:
        """Returns the logarithms of the weights, also of weights too small for a float."""
        tiny = torch.finfo(torch.float64).smallest_normal  # shares below it have lost digits
        logs = torch.where(
            self.share_BI < tiny, self.size_BI.log() - self.largest_B1.log(), self.share_BI.log()
        )
        return logs - self.total_B1.log()


def flops(sizes: Mapping[str, int]) -> int:
    """Returns the operations of the layer's product."""
    return 2 * sizes["B"] * sizes["I"] * sizes["O"]


@dataclass(frozen=True, eq=False)
class Call:
    """A request for the terms of a linear layer.

    Attributes:
        x_BI: inputs; the I input features are the keys.
        weight_OI: the layer's weight as in nn.Linear, O output features by I, for all items.
    """

    x_BI: Float[Tensor, "B I"]
    weight_OI: Float[Tensor, "O I"]


def attend(call: Call, outputs: frozenset[str]) -> LinearLayer:
    """Applies the layer and returns the terms of its attention.

    `outputs` are the names of the outputs to return: "output", "weights", "value", "scores",
    "query", "key". query is 1 and key is log |x|, both of width 1, so that softmax(query key^T)
    is the weights. scores is log weights. Where x is 0, key and scores are -inf.
    """
    x, exact = call.x_BI, score_dtype(call.x_BI.dtype)
    output = weights = value = scores = query = key = None
    if "output" in outputs:
        output = _product(x, call.weight_OI, exact).to(x.dtype)
    if outputs & {"weights", "value", "scores", "key"}:
        shares = _Shares.of(x)
        if "weights" in outputs:
            weights = shares.weights().to(exact)
        if "value" in outputs:
            value = _value(x, call.weight_OI, shares, exact)
        if "scores" in outputs:
            scores = shares.scores().to(exact)
        if "key" in outputs:
            key = shares.size_BI.log().to(exact)[..., None]
    if "query" in outputs:
        query = x.new_ones(len(x), 1, dtype=exact)
    return LinearLayer(output, weights, value, scores, query, key)


def weights(call: Call) -> Callable[[slice], Tensor]:
    """Returns a function that computes rows of A from a slice of B: (R, I).

    Each item of the batch is one row.
    """
    exact = score_dtype(call.x_BI.dtype)

    def row_block(rows: slice) -> Float32[Tensor, "R I"] | Float64[Tensor, "R I"]:
        return _Shares.of(call.x_BI[rows]).weights().to(exact)

    return row_block


def _product(x_BI: Tensor, weight_OI: Tensor, exact: torch.dtype, shared: bool = False) -> Tensor:
    """Returns x W^T; rows that overflow are recomputed in a wider form.

    `shared`: the rows of x are not the items of the batch.
    """
    x, weight = x_BI.to(exact), weight_OI.to(exact)
    product = x @ weight.mT
    # a finite sum has finite terms; a check of each row would take a sixth of the product's time
    if holds(is_finite(product, shared=shared)):
        return product
    (rows,) = torch.where(~product.isfinite().all(-1))
    if len(rows):
        narrow = product[rows]
        if exact == torch.float32:  # products and sums of float32 numbers do not overflow float64
            wider = (x[rows].double() @ weight.double().mT).to(exact)
        else:
            wider = _by_exponents(x[rows], weight)
        product[rows] = torch.where(narrow.isfinite(), narrow, wider)
    return product


def _by_exponents(x_BI: Tensor, weight_OI: Tensor) -> Tensor:
    """Returns x W^T in float64; with separate exponents, only the result can overflow."""
    x, x_exponents = torch.frexp(x_BI)
    weight, weight_exponents = torch.frexp(weight_OI)
    (B, I), O = x.shape, len(weight)  # noqa: E741
    output = x_BI.new_empty(B, O)
    for b in range(B):
        for rows in row_blocks(O, I, _ELEMENTS):
            products = x[b] * weight[rows]
            exponents = x_exponents[b] + weight_exponents[rows]
            largest = exponents.masked_fill(products == 0, -5000).amax(-1, keepdim=True)
            below = (exponents - largest).clamp(max=0)  # only zeros have more than 0
            total = torch.ldexp(products, below).sum(-1)
            # beyond 2000 all but 0 overflows; two steps, because 2.0**1024 is not a float
            largest_R = largest[:, 0].clamp(-2000, 2000)
            half_R = largest_R // 2
            output[b, rows] = torch.ldexp(torch.ldexp(total, half_R), largest_R - half_R)
    return output


def _value(x_BI: Tensor, weight_OI: Tensor, shares: _Shares, exact: torch.dtype) -> Tensor:
    """Returns sum |x| * sign(x_j) * W[:, j], (B, I, O), rounded once or twice."""
    (B, I), O = x_BI.shape, len(weight_OI)  # noqa: E741
    weight_IO, sign_BI = weight_OI.double().mT, x_BI.double().sign()
    total_B1 = shares.size_BI.sum(-1, keepdim=True)
    # where the sum overflows, W is multiplied by the largest element first: the product is not a
    # denormal, and if it overflows, the value overflows too
    fits_B1 = total_B1.isfinite()
    first_BI = sign_BI * torch.where(fits_B1, total_B1, shares.largest_B1)
    then_B1 = shares.total_B1.masked_fill(fits_B1, 1.0)
    value = x_BI.new_empty(B, I, O, dtype=exact)
    for items in row_blocks(B, I * O, _ELEMENTS):
        value[items] = first_BI[items, :, None] * weight_IO * then_B1[items, :, None]
    return value


def steps(call: Call) -> dict[str, Tensor]:
    """Returns the steps by name, from float64 tensors; and `scores`, `query` and `key`."""
    x = call.x_BI
    sizes, largest = x.abs(), x.detach().abs().amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == 0, 1.0)
    shares = sizes / largest  # the sum of the sizes may be too large for a float
    total = shares.sum(-1, keepdim=True)
    total = total.masked_fill(total == 0, 1.0)
    terms = x[..., None] * call.weight_OI.mT
    logs = sizes.log()
    return {
        "x": x, "sizes": sizes, "row_sums": sizes.sum(-1), "weights": shares / total,
        "value": x.sign()[..., None] * call.weight_OI.mT * largest[..., None] * total[..., None],
        "terms": terms, "scores": logs - largest.log() - total.log(),
        "query": torch.ones_like(x[:, :1]), "key": logs[..., None], "output": terms.sum(-2),
    }  # fmt: skip


def backward(call: Call, grad_output_BO: Float[Tensor, "B O"]) -> dict[str, Tensor]:
    """Returns the gradients of sum(grad_output * output), in the scores' dtype.

    dx = dY W and dW = dY^T x.
    """
    exact = score_dtype(call.x_BI.dtype)
    return {
        "x": _product(grad_output_BO, call.weight_OI.mT, exact),
        "weight": _product(grad_output_BO.mT, call.x_BI.mT, exact, shared=True),
    }
