"""Measures a rotary embedding: what turned the channels of a projection into those of a call.

The angle of each pair of channels is measured at many positions. An angle is known modulo 2 pi, so
that its frequency is found at position 1 and refined at positions that double: each is predicted
from the one before. Tables of transformers are float32, whose rounding grows with the angle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

TOLERANCE: Final = 3e-6  # of the largest number: float32 rounds tables and norms inside the model
_STEP: Final = 1e-5  # radians by which a small angle may be off
_DRIFT: Final = 6e-7  # the same for each radian of a large one
_Order = Literal["half", "interleaved"]


class Unfit(Exception):
    """A layer has a part that no description holds.

    Args:
        part: the missing part, as a noun phrase.
    """


class Turning(NamedTuple):
    """What lies between the channels of a projection, after its norm, and those of a call.

    Attributes:
        order: of the channels that turn together; None: no channel turns.
        frequencies: radians per position of each pair.
        dims: number of leading channels that turn.
        turned: factor of the channels that turn.
        rest: factor of the others; that of all if no channel or each one turns.
        error: the largest deviation, relative to the largest number.
    """

    order: _Order | None
    frequencies: tuple[float, ...]
    dims: int
    turned: float
    rest: float
    error: float


def measure(projected_BHND: Tensor, called_BHND: Tensor, positions: Sequence[int]) -> Turning:
    """Returns the rotary embedding between two tensors.

    Args:
        projected_BHND: after the projection, and the norm if there is one.
        called_BHND: of the attention call.
        positions: of the N rows; the first is 0, where nothing turns.

    Raises:
        Unfit: it is none.
    """
    largest = float(called_BHND.abs().max())
    first, now = projected_BHND[:, :, 0], called_BHND[:, :, 0]
    factor_D = (first * now).sum((0, 1)) / first.square().sum((0, 1))
    error = float((now - factor_D * first).abs().max()) / largest
    if not error <= TOLERANCE:
        raise Unfit("a norm or another function of queries and keys after their projection")
    scaled_BHND = projected_BHND * factor_D
    moved_D = (called_BHND - scaled_BHND).abs().amax((0, 1, 2)) > TOLERANCE * largest
    if not bool(moved_D.any()):
        return Turning(None, (), 0, 1.0, _common(factor_D), error)
    for order, dims in _candidates(moved_D):
        pairs = _pairs(order, dims)
        if not bool(_is_pairwise(scaled_BHND, called_BHND, pairs, largest)):
            continue
        angles_NC = _angles(scaled_BHND, called_BHND, pairs)
        frequencies = _frequencies(angles_NC, positions)
        turned = _common(factor_D[:dims][moved_D[:dims]])
        rest_D = factor_D[~moved_D]
        rest = _common(rest_D) if len(rest_D) else turned
        return Turning(order, frequencies, dims, turned, rest, error)
    raise Unfit("positions that do not turn pairs of channels by an angle for each position")


def _common(factors: Tensor) -> float:
    """Returns the factor that all channels have.

    Raises:
        Unfit: they have several.
    """
    mean = float(factors.mean())
    if not float((factors - mean).abs().max()) <= 2 * TOLERANCE * max(1.0, abs(mean)):
        raise Unfit("a weight of each channel of queries and keys after their projection")
    return mean


def _candidates(moved_D: Tensor) -> Iterator[tuple[_Order, int]]:
    """Yields orders, and numbers of leading channels that contain all that moved."""
    D, last = len(moved_D), int(moved_D.nonzero().max()) + 1
    least = last + last % 2
    for dims in dict.fromkeys((least, D - D % 2)):
        yield "half", dims
    yield "interleaved", least


def _pairs(order: _Order, dims: int) -> tuple[Tensor, Tensor]:
    index = torch.arange(dims)
    if order == "half":
        return index[: dims // 2], index[dims // 2 :]
    return index[::2], index[1::2]


def _turns(
    before_BHND: Tensor, after_BHND: Tensor, pairs: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns pairs as complex numbers, before and after, and the turn (N, C) between them."""
    z_before, z_after = (
        torch.complex(x[..., pairs[0]], x[..., pairs[1]]) for x in (before_BHND, after_BHND)
    )
    turn_NC = (z_after * z_before.conj()).sum((0, 1)) / z_before.abs().square().sum((0, 1))
    return z_before, z_after, turn_NC


def _is_pairwise(
    before_BHND: Tensor, after_BHND: Tensor, pairs: tuple[Tensor, Tensor], largest: float
) -> Tensor:
    """Returns True if each pair is turned by one angle at each position, and keeps its size.

    Raises:
        Unfit: its size depends on the position.
    """
    z_before, z_after, turn_NC = _turns(before_BHND, after_BHND, pairs)
    is_turned = (z_after - turn_NC * z_before).abs().amax() <= TOLERANCE * largest
    size_N = turn_NC.abs().mean(-1)
    if bool(is_turned) and bool(((turn_NC.abs() - 1).abs() > 10 * TOLERANCE).any()):
        at = int((size_N - 1).abs().argmax())
        raise Unfit(f"a temperature that depends on the position: a factor of {size_N[at]:.4g}")
    return is_turned


def _angles(before_BHND: Tensor, after_BHND: Tensor, pairs: tuple[Tensor, Tensor]) -> Tensor:
    return _turns(before_BHND, after_BHND, pairs)[2].angle()


def _frequencies(angles_NC: Tensor, positions: Sequence[int]) -> tuple[float, ...]:
    """Returns the frequency of each pair, from its angles.

    Raises:
        Unfit: the angles do not grow with the position.
    """
    rows = {position: angles_NC[row] for row, position in enumerate(positions)}
    last = max(positions)
    doubling = [p for p in sorted(rows) if p and (p == last or math.log2(p).is_integer())]
    frequency_C = torch.zeros_like(angles_NC[0])
    for position in doubling:
        expected_C = frequency_C * position
        frequency_C = (expected_C + _wrapped(rows[position] - expected_C)) / position
    positions_N1 = torch.tensor(positions, dtype=torch.float64)[:, None]
    off_NC = _wrapped(angles_NC - positions_N1 * frequency_C).abs()
    if bool((off_NC > _STEP + _DRIFT * positions_N1 * frequency_C.abs()).any()):
        raise Unfit("angles that do not grow with the position, such as those of several axes")
    return tuple(frequency_C.tolist())


def _wrapped(angles: Tensor) -> Tensor:
    """Returns angles between -pi and pi."""
    return torch.remainder(angles + math.pi, 2 * math.pi) - math.pi
