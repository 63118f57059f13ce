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
        nearest: the nearest description with its error; "": it is not known.
    """

    def __init__(self, part: str, nearest: str = "") -> None:
        super().__init__(part)
        self.nearest = nearest


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
        turn_NC = _turns(scaled_BHND, called_BHND, order, dims, TOLERANCE * largest)
        if turn_NC is not None:
            turned = _common(factor_D[:dims][moved_D[:dims]])
            rest = turned if bool(moved_D.all()) else _common(factor_D[~moved_D])
            return Turning(order, _frequencies(turn_NC, positions), dims, turned, rest, error)
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


def _turns(
    before_BHND: Tensor, after_BHND: Tensor, order: _Order, dims: int, largest_error: float
) -> Tensor | None:
    """Returns the turn (N, C) of each pair, a complex number; None: the channels are no pairs."""
    index = torch.arange(dims).view(2, -1) if order == "half" else torch.arange(dims).view(-1, 2).T
    before, after = (torch.complex(*x[..., index].unbind(-2)) for x in (before_BHND, after_BHND))
    turn_NC = (after * before.conj()).sum((0, 1)) / before.abs().square().sum((0, 1))
    error = float((after - turn_NC * before).abs().max())
    return turn_NC if error <= largest_error else None


def _frequencies(turn_NC: Tensor, positions: Sequence[int]) -> tuple[float, ...]:
    """Returns the frequency of each pair, from its turns.

    Raises:
        Unfit: they have other sizes than 1, or angles that do not grow with the position.
    """
    size_N = turn_NC.abs().mean(-1)
    if bool(((turn_NC.abs() - 1).abs() > 10 * TOLERANCE).any()):
        at = int((size_N - 1).abs().argmax())
        raise Unfit(f"a temperature that depends on the position: a factor of {size_N[at]:.4g}")
    angles_NC = turn_NC.angle()
    frequency_C = torch.zeros_like(angles_NC[0])
    for row, position in enumerate(positions):
        if position:
            expected_C = frequency_C * position
            frequency_C = (expected_C + _wrapped(angles_NC[row] - expected_C)) / position
    positions_N1 = torch.tensor(positions, dtype=torch.float64)[:, None]
    off_NC = _wrapped(angles_NC - positions_N1 * frequency_C).abs()
    if bool((off_NC > _STEP + _DRIFT * positions_N1 * frequency_C.abs()).any()):
        raise Unfit("angles that do not grow with the position, such as those of several axes")
    return tuple(frequency_C.tolist())


def _wrapped(angles: Tensor) -> Tensor:
    """Returns angles between -pi and pi."""
    return torch.remainder(angles + math.pi, 2 * math.pi) - math.pi


def error_of(found: Tensor, expected: Tensor) -> float:
    """Returns the largest error, relative to the largest number."""
    return float((found - expected).abs().max() / expected.abs().max())


def are_near(one: Tensor, other: Tensor) -> bool:
    """Returns True if two tensors are equal but for the rounding inside a model."""
    return error_of(one, other) <= TOLERANCE
