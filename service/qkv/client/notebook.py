"""A run as a notebook shows it: what ran, and its weights as a heat map by heads."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from html import escape
from typing import Any

from qkv import heatmap
from qkv.client.arrays import to_raw
from qkv.client.head_panels import picture

__all__ = ["html"]


def html(
    variant: str,
    outputs: Mapping[str, Any],
    timing: Mapping[str, Any],
    weights_are: str | None,
    form: str | Mapping[str, Any],
) -> str:
    """What ran and what came, and a picture of the weights where there are any.

    The picture is an image: no style of the page reaches it, none of its own gets out, and it runs
    nothing. It is light or dark as its reader has chosen.
    """
    arrays = {name: to_raw(array).numpy() for name, array in outputs.items()}
    marked = f"{variant}, {weights_are} weights" if weights_are else variant
    lines = []
    if (drawn := picture(arrays, form)) is not None:
        title = f"Attention weights of {variant}"
        svg = heatmap.draw(
            marked, title, drawn.caption, drawn.panels, columns=drawn.columns, side=drawn.side
        )
        source = f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"
        alt = escape(f"{title}. {drawn.caption}")
        lines.append(f'<img style="max-width:100%;height:auto" src="{source}" alt="{alt}">')
        lines.append(f"<div><small>{escape(drawn.caption)}</small></div>")
    else:
        lines.append(f"<div><b>{escape(marked)}</b></div>")
    took = f"{timing['compute_ms']:.3g} ms on {timing['device']} ({timing['backend']})"
    shapes = [f"{n} {a.dtype.name} {'×'.join(map(str, a.shape))}" for n, a in arrays.items()]
    lines.append(f"<div><small>{escape(', '.join([took, *shapes]))}</small></div>")
    return "\n".join(lines)
