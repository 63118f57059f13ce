"""Scores and their softmax, a block of rows at a time, without overflow for any finite input."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qkv.attention._dropout import keep
from qkv.attention._visibility import Visibility

__all__ = ["ScoreBlock", "Scores", "is_safe", "score_dtype"]

_SAFE = {torch.float32: 1e30, torch.float64: 1e300}  # leaves room for any finite mask
_HUGE = 2.0**400  # float64 magnitudes above it are scaled down before they are multiplied


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """What scores and sums are held in: float32 at least."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_safe(query: Tensor, key: Tensor, value: Tensor | None, scale: float) -> bool:
    """Whether nothing can overflow in the scores' dtype, and all is finite.

    Three passes over the inputs; beside the attention itself they are lost in the noise.
    """
    most = _SAFE[score_dtype(query.dtype)]
    products = _largest(query) * _largest(key) * query.shape[-1]
    if not (products < most and products * abs(scale) < most):
        return False
    return value is None or _largest(value) < most


class ScoreBlock(NamedTuple):
    """Scores and weights of a block of rows over the keys it can see; (B, H, R, keys) both."""

    keys: slice
    scores: Tensor
    weights: Tensor


class Scores(NamedTuple):
    """All that makes a block of scores.

    Attributes:
        query_BGKLD: queries, the K heads that read one key head side by side; scores' dtype.
        key_BGSD: keys, in the scores' dtype.
        exponent: query and key have been divided by 2**exponent together.
        visible, scale, softcap, dropout, seed, place_BH: as in `softmax.attend`.
    """

    query_BGKLD: Tensor
    key_BGSD: Tensor
    exponent: int
    visible: Visibility
    scale: float
    softcap: float | None
    dropout: float
    seed: int
    place_BH: Tensor

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
        place_BH: Tensor | None,
        safe: bool,
    ) -> Scores:
        """Brings query and key to the visibility's dtype and, where unsafe, to a safe size."""
        B, H = query_BHLD.shape[:2]
        query, key, exponent = query_BHLD.to(visible.dtype), key_BGSD.to(visible.dtype), 0
        if not safe:
            key = visible.without_padding(key)
            query, query_exponent = _shrunk(query)
            key, key_exponent = _shrunk(key)
            exponent = query_exponent + key_exponent
        if place_BH is None:
            place_BH = torch.arange(B * H, device=query.device).view(B, H)
        return cls(
            query.unflatten(1, (key.shape[1], -1)), key, exponent,
            visible, scale, softcap, dropout, seed, place_BH,
        )  # fmt: skip

    def block(self, rows: slice) -> ScoreBlock:
        """Scores and weights of the query rows from `rows.start` to `rows.stop`."""
        keys, bias = self.visible.block(rows, self.key_BGSD.device)
        scores = torch.einsum(
            "bgkld,bgsd->bgkls", self.query_BGKLD[:, :, :, rows], self.key_BGSD[:, :, keys]
        ).flatten(1, 2)
        scores.mul_(self.scale)
        exponent = self.exponent
        if self.softcap is not None:
            # capped scores are of ordinary size, so the exponent is spent here
            scores = _grown(scores, exponent).div_(self.softcap).tanh_().mul_(self.softcap)
            exponent = 0
        if bias is not None:
            if bias.dtype == torch.bool:
                scores.masked_fill_(~bias, -torch.inf)
            else:
                scores += _grown(bias, -exponent)
        weights = torch.softmax(self._logits(scores, exponent), dim=-1)
        if bias is not None and keys.start < keys.stop:
            blind = scores.amax(dim=-1, keepdim=True) == -torch.inf
            weights.masked_fill_(blind, 0.0)
        if self.dropout:
            weights *= keep(self.dropout, self.seed, self.place_BH, rows, keys)
            weights /= 1.0 - self.dropout
        return ScoreBlock(keys, _grown(scores, exponent), weights)

    def _logits(self, scores: Tensor, exponent: int) -> Tensor:
        """What the softmax takes: with an exponent, shifted first, so that growing cannot give
        inf - inf: the largest is 0, all others at worst -inf."""
        if not exponent or not scores.shape[-1]:
            return scores
        return _grown(scores - scores.amax(dim=-1, keepdim=True), exponent)


def _largest(x: Tensor) -> float:
    """Largest absolute value; NaN where there is one."""
    low, high = torch.aminmax(x)
    return max(-low.item(), high.item())


def _shrunk(x: Tensor) -> tuple[Tensor, int]:
    """x / 2**e and e, exactly, where x holds something huge; else x and 0."""
    largest = _largest(x)
    if not _HUGE < largest < math.inf:
        return x, 0
    exponent = math.frexp(largest)[1] - 1  # at most 1023, so that two of them halve to a float
    return _grown(x, -exponent), exponent


def _grown(x: Tensor, exponent: int) -> Tensor:
    """x * 2**exponent, in two steps because 2.0**1024 is no float; x itself for 0."""
    if not exponent:
        return x
    half = exponent // 2
    return x * 2.0**half * 2.0 ** (exponent - half)
