"""Numbers per query head that change a softmax: the slopes of ALiBi, and attention sinks.

ALiBi adds slope * (j - p) to the score of key j, where p is the position of the query on the key
axis (Press et al., Train Short, Test Long, arXiv:2108.12409, section 3). A sink is one more logit
of each row, without a key and without a value. It only enlarges the sum that divides the weights
(OpenAI, gpt-oss-120b & gpt-oss-20b Model Card, arXiv:2508.10925, section 2.2).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from qkv.attention.common.guards import are_wide, holds, largest_size
from qkv.attention.common.powers_of_2 import ROOM, times_power_of_2
from qkv.attention.common.visibility import Visibility

_SAFE: Final = {torch.float32: 1e30, torch.float64: 1e300}  # leaves room for scores and masks
_LOST: Final = 2.0**-16  # the largest error of a score from a position that is far from all keys
_DISTANCE_BITS: Final = 34  # positions are below 2**31 + L


class HeadTerms(NamedTuple):
    """The slopes and sinks of a request; at least one of them.

    Attributes:
        slopes_H: slopes of ALiBi, in any floating dtype.
        sinks_H: logits of the sinks, in any floating dtype. -inf is no sink; beside inf, the
            weights of all keys are 0.
    """

    slopes_H: Tensor | None
    sinks_H: Tensor | None

    @classmethod
    def of(cls, slopes_H: Tensor | None, sinks_H: Tensor | None) -> HeadTerms | None:
        """Returns the terms of a request; None if it has none."""
        return None if slopes_H is None and sinks_H is None else cls(slopes_H, sinks_H)

    def of_heads(self, heads: slice) -> HeadTerms:
        """Returns the terms of some query heads."""
        slopes, sinks = self
        return HeadTerms(
            None if slopes is None else slopes[heads], None if sinks is None else sinks[heads]
        )

    @property
    def have_float64(self) -> bool:
        """True if a product with such a number may overflow float64."""
        return any(x is not None and x.dtype == torch.float64 for x in self)

    def are_safe(self, visible: Visibility) -> bool:
        """Returns True if nothing overflows in the scores' dtype, and differences keep digits.

        A query whose position is far from all keys has distances that are large and close to one
        another. The products of float32 would lose the differences, which alone decide the weights.
        """
        dtype = torch.float64 if are_wide() else visible.dtype
        if self.sinks_H is not None and not holds(largest_size(self.sinks_H, True) < _SAFE[dtype]):
            return False
        if self.slopes_H is None:
            return True
        size = largest_size(self.slopes_H, True)
        lost = size * _gap(visible) * torch.finfo(dtype).eps
        return holds((size * visible.farthest < _SAFE[dtype]) & (lost < _LOST))

    def add_slopes(
        self,
        scores_BHRS: Tensor,
        grown: Tensor | None,
        visible: Visibility,
        rows: slice,
        keys: slice,
        may_overflow: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Adds ALiBi to a block of scores; returns the scores and the new exponents of its rows.

        Args:
            scores_BHRS: of these rows and keys; changed in place.
            grown: the exponents of two by which the rows are still to be multiplied; None: 0.
            visible, rows, keys: the positions.
            may_overflow: a product may overflow float64, so exponents keep it in range.
        """
        if self.slopes_H is None or keys.start >= keys.stop:
            return scores_BHRS, grown
        distance = visible.distances(rows, keys, scores_BHRS.device).to(scores_BHRS.dtype)
        slopes_H11 = self.slopes_H.to(scores_BHRS.dtype).view(-1, 1, 1)
        if not may_overflow:
            return scores_BHRS.add_(slopes_H11 * distance), grown
        least = (torch.frexp(slopes_H11).exponent + _DISTANCE_BITS - ROOM).clamp(min=0)
        more = least if grown is None else torch.maximum(least, grown)
        scores = times_power_of_2(scores_BHRS, -more if grown is None else grown - more)
        return scores.add(times_power_of_2(slopes_H11, -more) * distance), more

    def share_with_sinks(self, scores_BHRS: Tensor, grown: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the weights of a block of scores, and the weight of each row's sink (B, H, R, 1).

        Rows whose scores are all -inf are zeros. The arguments are those of `add_slopes`.
        """
        assert self.sinks_H is not None
        sink = self.sinks_H.to(scores_BHRS.dtype).view(-1, 1, 1)
        if grown is not None:
            sink = times_power_of_2(sink, -grown)
        top = sink.expand(*scores_BHRS.shape[:-1], 1)
        if scores_BHRS.shape[-1]:
            top = torch.maximum(scores_BHRS.amax(-1, keepdim=True), top)
        # without a visible key and without a sink all logits are -inf
        top = top.clamp(min=torch.finfo(top.dtype).min)
        # the shift comes first: the largest logit is 0, and scaling cannot give inf - inf
        weights = times_power_of_2(scores_BHRS - top, grown).exp_()
        below = (sink - top).masked_fill(sink == torch.inf, 0.0)  # inf - inf is NaN
        share = times_power_of_2(below, grown).exp()
        total = weights.sum(-1, keepdim=True).add_(share)  # at least 1, the exponential of the top
        total.clamp_(min=1.0)
        return weights.div_(total), share / total

    def bias(
        self, bias_BHRS: Tensor | None, visible: Visibility, rows: slice, keys: slice
    ) -> Tensor:
        """Returns a floating bias for torch's kernel, (#B, #H, #R, keys).

        With sinks it has one more column, for a key and a value of zeros.

        Args:
            bias_BHRS: that of `Visibility.block`.
            visible, rows, keys: the arguments of that block.
        """
        slopes, sinks = self
        device = next(x.device for x in self if x is not None)
        bias = torch.zeros((1, 1, 1, 1), dtype=visible.dtype, device=device)
        if slopes is not None:
            distance = visible.distances(rows, keys, device).to(visible.dtype)
            bias = (slopes.to(visible.dtype).view(-1, 1, 1) * distance).view(
                -1, len(slopes), *distance.shape[-2:]
            )
        if bias_BHRS is not None and bias_BHRS.dtype == torch.bool:
            bias = torch.where(bias_BHRS, bias, -torch.inf)
        elif bias_BHRS is not None:
            bias = bias + bias_BHRS
        if sinks is None:
            return bias
        B, _, R, _ = bias.shape
        wider = bias.new_empty(B, len(sinks), R, keys.stop - keys.start + 1)
        wider[..., :-1] = bias
        wider[..., -1] = sinks[:, None]
        return wider


def _gap(visible: Visibility) -> int:
    """Returns the largest distance of a query to the nearest key, as far as it may be large."""
    if isinstance(visible.offset, Tensor):  # "end": a query that sees a key is beside a key
        return 0
    return max(visible.offset + visible.L - visible.S, -visible.offset, 0)
