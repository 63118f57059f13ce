"""HTML that a notebook shows: pictures of figures, beside the tables of `tables`."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH: Final = 900  # pixels, about as wide as a notebook's page


def picture(draw: Callable[[], Figure]) -> str:
    """Returns the figure as an <img>, or "" if matplotlib is not installed."""
    try:
        figure = draw()
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        return ""
    png = BytesIO()
    dpi = min(figure.dpi, _WIDTH / figure.get_figwidth())
    figure.savefig(png, format="png", dpi=dpi, bbox_inches="tight")
    text = b64encode(png.getvalue()).decode()
    return f'<img style="max-width:100%" src="data:image/png;base64,{text}">\n'
