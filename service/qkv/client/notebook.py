"""The HTML that a notebook shows for a run: its weights as a heat map, one panel for each head.

`Run._repr_html_` uses `run_html`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any, Final, TypeAlias

from qkv.client.arrays import to_raw
from qkv.client.figures.figure import draw
from qkv.client.figures.run_grid import Options, build_grid

__all__ = ["run_html"]

Form: TypeAlias = str | Mapping[str, Any]

_OPTIONS: Final = Options(cells=((1, 120), (4, 64), (math.inf, 32)))
"""16,384 cells in all are about 200 KB: a notebook keeps every picture."""


def run_html(
    variant: str,
    outputs: Mapping[str, Any],
    timing: Mapping[str, Any],
    weights_are: str | None,
    form: Form,
) -> str:
    """Returns variant, timing and outputs as HTML, with a picture of any weights.

    The picture is an <img>: styles neither enter nor leave it, and it runs no script. It follows
    the reader's choice of light or dark.
    """
    arrays = {name: to_raw(array).numpy() for name, array in outputs.items()}
    grid = build_grid(variant, weights_are, arrays, form, _OPTIONS)
    if grid is not None:
        lines = [draw(grid)._repr_html_()]
    else:
        heading = f"{variant}, {weights_are} weights" if weights_are else variant
        lines = [f"<div><b>{escape(heading)}</b></div>"]
    timing_text = f"{timing['compute_ms']:.3g} ms on {timing['device']} ({timing['backend']})"
    shapes = [f"{n} {a.dtype.name} {'×'.join(map(str, a.shape))}" for n, a in arrays.items()]
    lines.append(f"<div><small>{escape(', '.join([timing_text, *shapes]))}</small></div>")
    return "\n".join(lines)
