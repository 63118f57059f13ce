"""The weight layouts there are, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from torch import Tensor

from qkv.attention.layers import layout_v1 as v1
from qkv.attention.layers import layout_v2 as v2
from qkv.attention.layers.projections import Array, Projections
from qkv.errors import InvalidContent, shown

__all__ = ["LAYOUTS", "Layout", "find"]


class Layout(Protocol):
    """What a layout's file offers."""

    SUFFIXES: tuple[str, ...]  # of a projection's name, the weight's first

    def read(self, tensors: Mapping[str, Array], pointer: str = ...) -> Projections:
        """Takes the layout's tensors."""

    def write(self, projections: Projections) -> dict[str, Array]:
        """Gives the layout's tensors."""

    def forward(
        self, projections: Projections, x_LM: tuple[Tensor, Tensor, Tensor], heads: int
    ) -> Tensor:
        """Runs the layer in this layout's own way, for checks."""


LAYOUTS: Final[Mapping[str, Layout]] = {"v1": v1, "v2": v2}


def find(name: object, pointer: str) -> Layout:
    """The layout of that name.

    Raises:
        InvalidContent: there is none.
    """
    if isinstance(name, str) and name in LAYOUTS:
        return LAYOUTS[name]
    raise InvalidContent(
        f"no layout {shown(name)}; there are {', '.join(LAYOUTS)}", pointer=pointer
    )
