"""How far the outputs and weights of a variant are from those of a baseline.

`sum_errors` compares two outputs, `compare_rows` rows of two attention matrices. All sums are in
float64, for each head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qkv.tensors import RawTensor
from qkv.wire.responses import Divergence, Entropy, OutputError

_BLOCK: Final = 1 << 20  # elements of an output that are compared at once
_PART: Final = 1 << 20  # elements of rows whose metrics are computed at once
_UNDEFINED: Final = OutputError(relative_error=None, largest_error=None, cosine=None)

Axes = tuple[int, int, int]


class ErrorSums(NamedTuple):
    """Sums over the elements of each head of an output b and of a reference a.

    A power of two scales each head. It keeps squares from overflow and underflow, and rounds no
    number.

    Attributes:
        is_finite_H: True for a head whose elements are finite in a and b.
        exponent_H: of the power of two.
        error_H, a_H, b_H: sums of the squares of b - a, a and b, divided by its square.
        dot_H: sum of the products of a and b, divided by its square.
        largest_H: the largest absolute difference, divided by the power.
    """

    is_finite_H: np.ndarray
    exponent_H: np.ndarray
    error_H: np.ndarray
    a_H: np.ndarray
    b_H: np.ndarray
    dot_H: np.ndarray
    largest_H: np.ndarray

    def heads(self) -> tuple[OutputError, ...]:
        """Returns the error of each head.

        A value is None if it is undefined: an output is not finite, or both are zero.
        """
        return tuple(_output_error(*head) for head in zip(*(x.tolist() for x in self), strict=True))

    def whole(self) -> OutputError:
        """Returns the error of the whole output; a value is None as in `heads`."""
        exponent = self.exponent_H.max()
        shift_H = self.exponent_H - exponent
        with np.errstate(invalid="ignore"):  # in heads that are not finite
            error, a, b, dot = (float(np.ldexp(x, 2 * shift_H).sum()) for x in self[2:6])
            largest = float(np.ldexp(self.largest_H, shift_H).max())
        is_finite = bool(self.is_finite_H.all())
        return _output_error(is_finite, int(exponent), error, a, b, dot, largest)


def sum_errors(output: RawTensor, reference: RawTensor, axes: Axes | None) -> ErrorSums:
    """Compares each head of two outputs.

    Args:
        output, reference: of the same number of elements.
        axes: the number of elements before the axis of the heads, in it, and after it; None: one
            head.
    """
    axes = axes or (1, 1, output.numpy().size)
    b, a = (x.numpy().reshape(axes) for x in (output, reference))
    size_H = np.maximum(_largest(b, axes), _largest(a, axes))
    is_finite_H = np.isfinite(size_H)
    exponent_H = np.frexp(np.where(is_finite_H, size_H, 0.0))[1].clip(-1000, 1000)
    scale_H = np.ldexp(1.0, -exponent_H)
    error_H, a_H, b_H, dot_H, largest_H = np.zeros((5, axes[1]))
    with np.errstate(invalid="ignore", over="ignore"):  # in heads that are not finite
        for block in _blocks(axes):
            x, y = (z[block].astype(np.float64) * scale_H[:, None] for z in (b, a))
            error = x - y
            error_H += _dots(error, error)
            a_H += _dots(y, y)
            b_H += _dots(x, x)
            dot_H += _dots(x, y)
            np.maximum(largest_H, np.abs(error).max((0, 2)), out=largest_H)
    return ErrorSums(is_finite_H, exponent_H, error_H, a_H, b_H, dot_H, largest_H)


def _dots(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    # BLAS starts threads for more than 10,000 elements, which takes 8 ms on two cores
    dots_H: np.ndarray = np.einsum("bhi,bhi->h", x, y)
    return dots_H


def _largest(array: np.ndarray, axes: Axes) -> np.ndarray:
    """Returns the largest absolute value of each head; NaN or infinite if an element is."""
    largest_H = np.zeros(axes[1])
    with np.errstate(invalid="ignore"):  # bfloat16 warns of NaN
        for block in _blocks(axes):
            block_H = np.abs(array[block].astype(np.float64)).max((0, 2))
            np.maximum(largest_H, block_H, out=largest_H)
    return largest_H


def _blocks(axes: Axes) -> Iterator[tuple[slice, slice, slice]]:
    """Yields the parts of an array, each with all heads."""
    before, heads, after = axes
    columns = min(after, max(1, _BLOCK // heads))
    rows = max(1, _BLOCK // (heads * columns))
    for row in range(0, before, rows):
        for column in range(0, after, columns):
            yield slice(row, row + rows), slice(None), slice(column, column + columns)


def _output_error(
    is_finite: bool,
    exponent: int,
    error_sum: float,
    a_sum: float,
    b_sum: float,
    dot_sum: float,
    largest: float,
) -> OutputError:
    """Returns the error of one head, or of a whole output, from the fields of `ErrorSums`."""
    if not is_finite:
        return _UNDEFINED
    norm_a, norm_b = math.sqrt(a_sum), math.sqrt(b_sum)
    return OutputError(
        relative_error=_ratio(math.sqrt(error_sum), norm_a),
        largest_error=_finite(largest / 2.0**-exponent),
        cosine=_ratio(dot_sum, norm_a * norm_b, limit=1.0),
    )


def _ratio(above: float, below: float, limit: float = math.inf) -> float | None:
    return _finite(max(-limit, min(above / below, limit))) if below else None


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


class RowStats(NamedTuple):
    """Statistics of a metric over rows, for each head.

    Attributes:
        rows_H: the number of rows that have the metric.
        total_H: the sum over these rows.
        least_H, most_H: the smallest and largest value; infinite if there are no rows.
    """

    rows_H: Tensor
    total_H: Tensor
    least_H: Tensor
    most_H: Tensor

    def merged(self, other: RowStats) -> RowStats:
        """Returns the statistics over the rows of both."""
        return _merge(*(torch.stack(pair) for pair in zip(self, other, strict=True)))

    def pooled(self) -> RowStats:
        """Returns the statistics over the rows of all heads, as of one head."""
        return _merge(*(x_H[:, None] for x_H in self))

    def heads(self) -> list[HeadStats]:
        """Returns the statistics of each head."""
        return [
            HeadStats(rows, total / rows if rows else math.nan, least, most)
            for rows, total, least, most in zip(*(x.tolist() for x in self), strict=True)
        ]


class HeadStats(NamedTuple):
    """Statistics of a metric over rows of one head; the mean is NaN if no row has the metric."""

    rows: float
    mean: float
    least: float
    most: float

    def as_divergence(self, worst: str) -> Divergence | None:
        """Returns the mean and the worst row, the `least` or the `most`; None as `as_entropy`."""
        value = self.least if worst == "least" else self.most
        is_finite = math.isfinite(self.mean) and math.isfinite(value)
        return Divergence(mean=self.mean, worst=value) if is_finite else None

    def as_entropy(self) -> Entropy | None:
        """Returns mean, least and most; None if one is not finite or there are no rows."""
        is_finite = all(map(math.isfinite, self))
        return Entropy(mean=self.mean, least=self.least, most=self.most) if is_finite else None


NO_ROWS: Final = HeadStats(0.0, math.nan, math.inf, -math.inf)


def _merge(rows: Tensor, total: Tensor, least: Tensor, most: Tensor) -> RowStats:
    """Merges statistics along their first axis."""
    return RowStats(rows.sum(0), total.sum(0), least.amin(0), most.amax(0))


Metrics = dict[str, tuple[Tensor, Tensor]]
"""The values of metrics of N rows, float64, and True for each row that has the metric."""


def compare_rows(
    variant_BHRS: Tensor, is_stochastic: bool, baseline_BHRS: Tensor, is_baseline_stochastic: bool
) -> Mapping[str, RowStats]:
    """Returns statistics of each metric of rows of a variant's weights, against the same rows of
    the baseline. Stochastic weights are distributions: see `row_metrics`."""
    kinds = is_stochastic, is_baseline_stochastic
    metrics = partial(row_metrics, are_distributions=kinds)
    return _stats(metrics, variant_BHRS, baseline_BHRS)


def describe_rows(weights_BHRS: Tensor, is_stochastic: bool) -> Mapping[str, RowStats]:
    """Returns statistics of the entropy and the unevenness of rows of weights."""
    return _stats(partial(_own_metrics, are_distributions=is_stochastic), weights_BHRS)


def _stats(metrics: Callable[..., Metrics], *weights_BHRS: Tensor) -> Mapping[str, RowStats]:
    """Returns statistics of metrics, which are computed part by part: those of short rows take
    more memory than the rows."""
    B, H, R, S = weights_BHRS[0].shape
    size = max(1, _PART // S)
    rows_NS = [weights.reshape(-1, S).split(size) for weights in weights_BHRS]
    parts = [metrics(*part) for part in zip(*rows_NS, strict=True)]
    stats = {}
    for name in parts[0]:
        values_N, has_N = (torch.cat(each) for each in zip(*(p[name] for p in parts), strict=True))
        stats[name] = _reduce(values_N.view(B, H, R), has_N.view(B, H, R))
    return stats


def _reduce(values_BHR: Tensor, has_BHR: Tensor) -> RowStats:
    """Returns the statistics of a metric, which the rows have where `has_BHR` is True."""
    return RowStats(
        has_BHR.sum((0, 2), dtype=torch.float64),
        values_BHR.masked_fill(~has_BHR, 0.0).sum((0, 2)),
        values_BHR.masked_fill(~has_BHR, math.inf).amin((0, 2)),
        values_BHR.masked_fill(~has_BHR, -math.inf).amax((0, 2)),
    )


def row_metrics(
    variant_NS: Tensor, baseline_NS: Tensor, are_distributions: tuple[bool, bool]
) -> Metrics:
    """Computes every metric of N rows.

    A row that is zero in both matrices has no metric. A key is visible if either matrix gives it
    weight. Logarithms are natural.

    Args:
        variant_NS, baseline_NS: the rows, float64.
        are_distributions: True per matrix if no weight is negative and each row's sum is 1.

    Returns:
        The metrics. Total variation is half the sum of |a - b|. The KL divergence of the variant
        from the baseline is the sum of a log(a / b), infinite where b is 0 and a is not. The
        Jensen-Shannon divergence is the mean of the KL divergences of a and b from (a + b) / 2.
        Spearman's rank correlation is for rows in which neither matrix gives all visible keys the
        same weight. Entropy and unevenness are those of the variant's rows.
    """
    b, a = variant_NS, baseline_NS
    seen_NS = (b != 0) | (a != 0)
    seen_N = seen_NS.any(-1)
    metrics = _own_metrics(b, are_distributions[0])
    metrics["total_variation"] = (a - b).abs_().sum(-1) / 2, seen_N
    metrics["rank_correlation"] = _rank_correlation(b, a, seen_NS)
    kl_N = js_N = b.new_zeros(len(b))
    if all(are_distributions):
        entropy_b, entropy_a = metrics["entropy"][0], _entropy(a)
        kl_N = (-torch.xlogy(a, b).sum(-1) - entropy_a).clamp_(min=0.0)
        js_N = (_entropy((a + b) / 2) - (entropy_b + entropy_a) / 2).clamp_(min=0.0)
    has_N = seen_N & all(are_distributions)
    return metrics | {"kl_divergence": (kl_N, has_N), "js_divergence": (js_N, has_N)}


def _own_metrics(rows_NS: Tensor, are_distributions: bool) -> Metrics:
    """Returns the metrics of rows of one matrix, which only distributions have.

    Unevenness is the logarithm of the number of keys with weight, less the entropy, for rows with
    at least two such keys.
    """
    entropy_N, count_N = _entropy(rows_NS), (rows_NS != 0).sum(-1) * are_distributions
    return {
        "entropy": (entropy_N, count_N > 0),
        "unevenness": (count_N.to(entropy_N).log() - entropy_N, count_N > 1),
    }


def _entropy(rows_NS: Tensor) -> Tensor:
    return (0.0 - torch.xlogy(rows_NS, rows_NS).sum(-1)).clamp_(min=0.0)


def _rank_correlation(b_NS: Tensor, a_NS: Tensor, seen_NS: Tensor) -> tuple[Tensor, Tensor]:
    """Returns Pearson's correlation of the ranks of each row, and True for a row that has one.

    A row in which all ranks are equal has no correlation.
    """
    middle_N1 = (seen_NS.sum(-1, keepdim=True, dtype=a_NS.dtype) - 1) / 2
    if bool(seen_NS.all()):
        rank_b, rank_a = (_ranks(x) - middle_N1 for x in (b_NS, a_NS))
    else:
        hidden_NS = ~seen_NS
        rank_b, rank_a = (
            (_ranks(x.masked_fill(hidden_NS, torch.inf)) - middle_N1).masked_fill_(hidden_NS, 0.0)
            for x in (b_NS, a_NS)
        )
    varies_N = rank_b.square().sum(-1) * rank_a.square().sum(-1)
    covaries_N = (rank_b * rank_a).sum(-1)
    return (covaries_N / varies_N.sqrt()).clamp(-1.0, 1.0), varies_N > 0


def _ranks(x_NS: Tensor) -> Tensor:
    """Returns ranks from 0 on. Equal values share the mean of their ranks."""
    value, order = x_NS.sort(-1)
    S = x_NS.shape[-1]
    rank = torch.arange(S, dtype=x_NS.dtype, device=x_NS.device).expand_as(x_NS)
    ties = value[:, 1:] == value[:, :-1]
    if bool((ties & value[:, 1:].isfinite()).any()):
        edge = ties.new_zeros(len(ties), 1)
        first = rank.masked_fill(torch.cat([edge, ties], -1), 0.0).cummax(-1).values
        last = rank.masked_fill(torch.cat([ties, edge], -1), S)
        rank = (first + last.flip(-1).cummin(-1).values.flip(-1)) / 2
    return torch.empty_like(x_NS).scatter_(-1, order, rank)
