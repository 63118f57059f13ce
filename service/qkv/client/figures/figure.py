"""A drawn figure, which a notebook shows and which is saved as SVG, PDF or PNG."""

from __future__ import annotations

import os
from base64 import b64encode
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Final

from qkv.client.figures.grid import Grid
from qkv.client.figures.layout import lay_out
from qkv.client.figures.scene import Scene
from qkv.client.figures.svg import to_svg

__all__ = ["Figure", "check_suffix", "draw"]

_SUFFIXES: Final = (".svg", ".pdf", ".png")


@dataclass(frozen=True, slots=True, repr=False)
class Figure:
    """A figure. A notebook shows it; `save` writes it to a file.

    Attributes:
        svg: the picture as SVG. It follows the reader's choice of a light or dark page.
        caption: the sentences below the panels: parts that are left out, and the colours.
    """

    svg: str
    caption: str
    _scene: Scene = field(compare=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the figure to a file.

        Args:
            path: the file; its suffix chooses the format: .svg, .pdf or .png. A PDF is a vector
                picture with text, a PNG has 288 dots per inch. Both have a white background.

        Raises:
            ModuleNotFoundError: matplotlib is not installed, which .pdf and .png need.
            ValueError: the suffix is another one.
            OSError: the file cannot be written.
        """
        check_suffix(path)
        target = Path(path)
        if target.suffix.lower() == ".svg":
            target.write_text(self.svg, encoding="utf-8", newline="\n")
            return
        try:
            from qkv.client.figures.plot import save_plot
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"a {target.suffix} file needs matplotlib: run `pip install '.[plot]'` in a clone "
                "of qkv, or save a .svg file",
                name=error.name,
            ) from None
        save_plot(self._scene, target)

    def __repr__(self) -> str:
        return f"<Figure of {self._scene.width} × {self._scene.height} pixels>"

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        """Returns an <img>: styles neither enter nor leave it, and it runs no script."""
        source = f"data:image/svg+xml;base64,{b64encode(self.svg.encode()).decode()}"
        alt = escape(f"{self._scene.title}. {self.caption}")
        return f'<img style="max-width:100%;height:auto" src="{source}" alt="{alt}">'


def draw(grid: Grid) -> Figure:
    """Returns the figure of a grid of panels."""
    scene = lay_out(grid)
    return Figure(to_svg(scene), grid.caption, scene)


def check_suffix(path: str | os.PathLike[str]) -> None:
    """Checks the suffix of a file for a figure.

    Raises:
        ValueError: a figure cannot be saved with this suffix.
    """
    if Path(path).suffix.lower() not in _SUFFIXES:
        raise ValueError(
            f"path has an unknown suffix: got {os.fspath(path)!r}, expected .svg, .pdf or .png"
        )
