"""Draws the errors of a case of the oracle, by head and by place."""

from __future__ import annotations

from typing import Final

import numpy as np
from matplotlib.figure import Figure

from qkv.client.figures.heat_maps import Labels, Panel, draw_panels
from qkv.client.figures.scale import Scale

_LARGEST: Final = 1e6  # infinite errors have this size
_CELL: Final = (0.3, 0.2)  # inches; both panels are stretched to one size


def draw_errors(name: str, errors: np.ndarray) -> Figure:
    """Returns the largest error of each head, and the errors of the worst head.

    Args:
        name: of the case.
        errors: (..., rows, columns), in units of the budget.
    """
    errors = np.nan_to_num(errors, nan=_LARGEST, posinf=_LARGEST).clip(max=_LARGEST)
    planes = errors.reshape(-1, *errors.shape[-2:])
    largest = planes.max((1, 2))
    worst = int(largest.argmax())
    heads = largest.reshape(errors.shape[0] if errors.ndim > 3 else 1, -1)
    panels = [
        Panel("largest error by head", heads, Labels("batch"), Labels("head"), cell=_CELL),
        Panel(f"plane {worst}", planes[worst], Labels("row"), Labels("column"), cell=_CELL),
    ]
    scale = Scale.by_root([planes[worst]])
    title = f"{name}: errors above 1 are wrong"
    return draw_panels(panels, [scale], title=title, value_name="errors in budgets")
