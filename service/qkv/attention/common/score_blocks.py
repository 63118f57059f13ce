"""Scores and weights of a softmax or sigmoid in blocks of rows, finite for any finite input."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qkv.attention.common.dropout import keep_mask
from qkv.attention.common.guards import Condition, are_deferred, are_wide, holds, largest_size
from qkv.attention.common.head_terms import HeadTerms
from qkv.attention.common.powers_of_2 import ROOM, split_exponents, times_power_of_2
from qkv.attention.common.visibility import Visibility

_SAFE = {torch.float32: 1e30, torch.float64: 1e300}  # leaves room for any finite mask


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of scores and sums: float32 at least."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_safe(query: Tensor, key: Tensor, value: Tensor | None, scale: float) -> bool:
    """Returns True if nothing can overflow in the scores' dtype and all numbers are finite."""
    limit = _SAFE.get(query.dtype, _SAFE[torch.float32])
    if not holds(_scores_fit(query, key, scale, limit)):
        return False
    return value is None or holds(largest_size(value) < limit)


def _scores_fit(query: Tensor, key: Tensor, scale: float, limit: float) -> Condition:
    """Returns True if no score and no partial sum of a score can exceed `limit`.

    By Cauchy's inequality no score exceeds the norm of all queries times the norm of all keys. The
    norms take two thirds of the time of the largest elements. Either way the inputs are read once.
    """
    if not are_deferred():
        norms = _norm(query) * _norm(key)
        if norms < limit and norms * abs(scale) < limit:
            return True
    products = largest_size(query) * largest_size(key) * query.shape[-1]
    return (products < limit) & (products * abs(scale) < limit)


def _norm(x: Tensor) -> float:
    """Returns the root of the sum of squares; inf where that is not cheap; NaN if x has NaN."""
    if x.dtype not in _SAFE or not x.is_contiguous():
        return math.inf
    row = x.view(-1)
    return math.sqrt(torch.dot(row, row).item())


class ScoreBlock(NamedTuple):
    """Scores and weights of a block of rows over the keys that it can see, all (B, H, R, keys).

    Attributes:
        keys: the range of these keys.
        scores: the scores.
        weights: the weights after dropout.
        shares: the weights before dropout. Those of a softmax sum to 1 with the row's sink, or to
            0.
        kept: True for each weight that dropout keeps; None without dropout.
        sink_shares: the weight of each row's sink, (B, H, R, 1); None without sinks.
    """

    keys: slice
    scores: Tensor
    weights: Tensor
    shares: Tensor
    kept: Tensor | None
    sink_shares: Tensor | None


class Scores(NamedTuple):
    """The tensors and parameters from which blocks of scores are computed.

    Attributes:
        query_BGKLD: queries in the scores' dtype, the K heads that read one key head side by side.
        key_BGSD: keys in the scores' dtype.
        exponents: where float64 could overflow, the exponents of two by which each query row
            (B,G,K,L,1) and each key row (B,G,1,1,S) is divided; otherwise None.
        visible, scale, softcap, dropout, seed, plane_BH: as in `softmax.attend`.
        terms: slopes of ALiBi and sinks, or None.
        sigmoid_bias: the weights are a sigmoid of the scores, to which this is added last: (B, 1,
            1, 1). None: the weights are a softmax.
    """

    query_BGKLD: Tensor
    key_BGSD: Tensor
    exponents: tuple[Tensor, Tensor] | None
    visible: Visibility
    scale: float
    softcap: float | None
    dropout: float
    seed: int
    plane_BH: Tensor
    terms: HeadTerms | None
    sigmoid_bias: Tensor | None = None

    @classmethod
    def of(
        cls,
        query_BHLD: Tensor,
        key_BGSD: Tensor,
        visible: Visibility,
        scale: float,
        softcap: float | None,
        dropout: float,
        seed: int,
        plane_BH: Tensor | None,
        safe: bool,
        terms: HeadTerms | None = None,
        sigmoid_bias: Tensor | None = None,
    ) -> Scores:
        """Converts query and key to the visibility's dtype and, where unsafe, to a safe size."""
        B, H = query_BHLD.shape[:2]
        query = query_BHLD.to(visible.dtype).unflatten(1, (key_BGSD.shape[1], -1))
        key, exponents = key_BGSD.to(visible.dtype), None
        if not safe:
            key = visible.without_padding(key)
            # narrower dtypes cannot overflow float64, and numbers of a wide call are below 1e9
            has_float64 = query_BHLD.dtype == torch.float64
            has_float64 |= terms is not None and terms.have_float64
            if has_float64 and not are_wide():
                query, query_exponents = split_exponents(query)
                key, key_exponents = split_exponents(key)
                exponents = (query_exponents, key_exponents[:, :, None].mT)
        if plane_BH is None:
            plane_BH = torch.arange(B * H, device=query.device).view(B, H)
        return cls(
            query, key, exponents, visible, scale, softcap, dropout, seed, plane_BH, terms,
            sigmoid_bias,
        )  # fmt: skip

    def block(self, rows: slice) -> ScoreBlock:
        """Returns the scores and weights of the query rows `rows.start` to `rows.stop`."""
        keys, bias = self.visible.block(rows, self.key_BGSD.device)
        scores, grown = self._products(rows, keys, bias)
        if self.softcap is not None:
            # capped scores are of ordinary size, so the exponents are applied here
            scores = times_power_of_2(scores, grown).div_(self.softcap).tanh_().mul_(self.softcap)
            grown = None
        if bias is not None:
            if bias.dtype == torch.bool:
                scores.masked_fill_(~bias, -torch.inf)
            else:
                if self.exponents is not None:  # hidden scores may be inf, and inf - inf is NaN
                    scores.masked_fill_(bias == -torch.inf, 0.0)
                scores += bias if grown is None else times_power_of_2(bias, -grown)
        if self.terms is not None:
            may_overflow = self.exponents is not None
            scores, grown = self.terms.add_slopes(
                scores, grown, self.visible, rows, keys, may_overflow
            )
        if self.sigmoid_bias is not None:
            scores = times_power_of_2(scores, grown).add_(self.sigmoid_bias)
            weights = torch.sigmoid(scores)
            return ScoreBlock(keys, scores, weights, weights, None, None)
        sink_shares = None
        if self.terms is not None and self.terms.sinks_H is not None:
            weights, sink_shares = self.terms.share_with_sinks(scores, grown)
        else:
            weights = _softmax(scores, grown, is_biased=bias is not None)
        shares, kept = weights, None
        if self.dropout:
            kept = keep_mask(self.dropout, self.seed, self.plane_BH, rows, keys)
            weights = (shares * kept).div_(1.0 - self.dropout)
        scores = times_power_of_2(scores, grown)
        return ScoreBlock(keys, scores, weights, shares, kept, sink_shares)

    def of_heads(self, groups: slice) -> Scores:
        """Returns the scores of some key heads and of the query heads that read them."""
        K, visible, exponents = self.query_BGKLD.shape[2], self.visible, self.exponents
        heads = slice(groups.start * K, groups.stop * K)
        if visible.mask_BHLS is not None and visible.mask_BHLS.shape[1] > 1:
            visible = visible._replace(mask_BHLS=visible.mask_BHLS[:, heads])
        if exponents is not None:
            exponents = (exponents[0][:, groups], exponents[1][:, groups])
        return self._replace(
            query_BGKLD=self.query_BGKLD[:, groups],
            key_BGSD=self.key_BGSD[:, groups],
            exponents=exponents,
            visible=visible,
            plane_BH=self.plane_BH[:, heads],
            terms=None if self.terms is None else self.terms.of_heads(heads),
        )

    def slopes(self, rows: slice) -> Tensor | None:
        """Returns the derivative of a block's capped scores by its uncapped scores.

        None if scores are not capped. The formula is 1 / cosh(x)^2, because 1 - tanh(x)^2 cancels
        to 0 where x is large.
        """
        if self.softcap is None:
            return None
        keys, bias = self.visible.block(rows, self.key_BGSD.device)
        scores = times_power_of_2(*self._products(rows, keys, bias)).div_(self.softcap)
        fallen = scores.abs_().mul_(-2.0).exp_()
        return 4.0 * fallen / (1.0 + fallen).square_()

    def _products(
        self, rows: slice, keys: slice, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns scale Q K^T of a block, and the exponents of two to multiply its rows by."""
        query_BGKRD, key_BGSD = self.query_BGKLD[:, :, :, rows], self.key_BGSD[:, :, keys]
        B, G, K, R, _ = query_BGKRD.shape
        # einsum takes twice as long for a small product
        products = torch.matmul(query_BGKRD.flatten(2, 3), key_BGSD.mT)
        scores = products.view(B, G * K, R, key_BGSD.shape[2]).mul_(self.scale)
        if self.exponents is None or keys.start >= keys.stop:
            return scores, None
        query_exponents, key_exponents = self.exponents
        exponents = query_exponents[:, :, :, rows] + key_exponents[..., keys]
        if self.sigmoid_bias is not None:
            # each weight depends on its own score: those that become inf are 0 or 1, and a common
            # exponent of the row would lose the small ones
            return times_power_of_2(scores, exponents.flatten(1, 2)), None
        return _fitted(scores, exponents.flatten(1, 2), bias)


def _softmax(scores: Tensor, grown: Tensor | None, is_biased: bool) -> Tensor:
    """Returns the weights of a block of scores; zeros for rows whose scores are all -inf."""
    logits, is_empty = scores, scores.shape[-1] == 0
    if grown is not None:
        # the shift comes first: the largest logit is 0, and scaling cannot give inf - inf
        logits = times_power_of_2(scores - scores.amax(dim=-1, keepdim=True), grown)
    weights = torch.softmax(logits, dim=-1)
    if is_biased and not is_empty:
        sees_no_key = scores.amax(dim=-1, keepdim=True) == -torch.inf
        weights.masked_fill_(sees_no_key, 0.0)
    return weights


def _fitted(scores: Tensor, exponents: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns scores * 2**(exponents - g) and g, an exponent per row.

    g keeps the visible scores of the row finite. It is 0 where nothing overflows. The row must be
    multiplied by 2**g at the end.
    """
    sizes = torch.frexp(scores).exponent + exponents
    unseen = scores == 0
    if bias is not None:
        unseen |= ~bias if bias.dtype == torch.bool else bias == -torch.inf
    top = sizes.masked_fill(unseen, 0).amax(dim=-1, keepdim=True)
    grown = (top - ROOM).clamp(min=0)
    return times_power_of_2(scores, exponents - grown), grown
