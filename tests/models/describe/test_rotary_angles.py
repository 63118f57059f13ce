"""Rotary embeddings are measured from queries before and after them, at positions that double."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from torch import Tensor

from qkv.attention.layers.rope import rotate
from qkv.models.describe.rotary_angles import Unfit, measure

LENGTH: Final = 1 << 17
POSITIONS: Final = [0, *(1 << n for n in range(17)), LENGTH - 1]
WIDTH: Final = 16


def queries() -> Tensor:
    """Returns queries (B, H, N, D)."""
    generator = torch.Generator().manual_seed(0)
    shape = 2, 4, len(POSITIONS), WIDTH
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def turned(
    x: Tensor, frequencies: Tensor, order: str, amplitude: float = 1.0, *, tables: bool = False
) -> Tensor:
    """Returns queries with their positions.

    Args:
        x: the queries.
        frequencies: of pairs.
        order: of channels.
        amplitude: of the channels that turn.
        tables: round the frequencies and the angles as tables of float32.
    """
    positions = torch.tensor(POSITIONS, dtype=torch.float64)
    if not tables:
        return rotate(x, frequencies, positions, order, amplitude)
    angles = positions.float()[:, None] * frequencies.float()
    rows = [
        rotate(x[:, :, i : i + 1], angles[i].double(), torch.ones(1).double(), order, amplitude)
        for i in range(len(POSITIONS))
    ]
    return torch.cat(rows, 2)


@pytest.mark.parametrize("order", ["half", "interleaved"])
@pytest.mark.parametrize("dims", [WIDTH, 6, 2])
@pytest.mark.parametrize("base", [1e4, 1e6])
@pytest.mark.parametrize("tables", [False, True])
def test_frequencies_are_found(order: str, dims: int, base: float, tables: bool) -> None:
    frequencies = base ** -(torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    x = queries()
    found = measure(x, 0.3 * turned(x, frequencies, order, 1.4, tables=tables), POSITIONS)
    assert found.dims == dims
    assert dims == 2 or found.order == order
    ratio = torch.tensor(found.frequencies, dtype=torch.float64) / frequencies
    assert float((ratio - 1).abs().max()) <= (4e-7 if tables else 1e-12)
    assert found.turned == pytest.approx(0.3 * 1.4, rel=1e-6)
    assert found.rest == pytest.approx(0.3 if dims < WIDTH else 0.3 * 1.4, rel=1e-6)


def test_pairs_that_stand_still_belong_to_the_embedding() -> None:
    """As in proportional embeddings: the last pairs of all have the frequency 0."""
    frequencies = torch.tensor([1.0, 0.1, 0.01, 0, 0, 0, 0, 0], dtype=torch.float64)
    x = queries()
    found = measure(x, turned(x, frequencies, "half"), POSITIONS)
    assert (found.order, found.dims) == ("half", WIDTH)
    assert torch.allclose(torch.tensor(found.frequencies, dtype=torch.float64), frequencies)


def test_queries_without_positions_do_not_turn() -> None:
    x = queries()
    found = measure(x, 0.5 * x, POSITIONS)
    assert found.order is None
    assert found.rest == pytest.approx(0.5)


def test_temperature_is_named() -> None:
    x = queries()
    warm = 1 + torch.tensor(POSITIONS, dtype=torch.float64)[:, None] / LENGTH
    frequencies = torch.tensor([1.0, 0.1, 0.01, 0.001] * 2, dtype=torch.float64)
    with pytest.raises(Unfit, match="a temperature"):
        measure(x, warm * turned(x, frequencies, "half"), POSITIONS)


def test_norm_is_named() -> None:
    x = queries()
    with pytest.raises(Unfit, match="a norm or another function of queries"):
        measure(x, x / x.norm(dim=-1, keepdim=True), POSITIONS)


def test_angles_of_two_axes_are_named() -> None:
    """Rows and columns of an image: the angle of a patch is that of its row."""
    x = queries()
    rows = torch.tensor([p // 4 for p in range(len(POSITIONS))], dtype=torch.float64)
    frequencies = torch.tensor([1.0, 0.1, 0.01, 0.001] * 2, dtype=torch.float64)
    with pytest.raises(Unfit, match="several axes"):
        measure(x, rotate(x, frequencies, rows, "half"), range(len(POSITIONS)))


def test_mixed_channels_are_named() -> None:
    x = queries()
    moved = x + x.roll(1, -1) * torch.tensor(POSITIONS, dtype=torch.float64)[:, None]
    with pytest.raises(Unfit, match="do not turn pairs"):
        measure(x, moved, POSITIONS)
