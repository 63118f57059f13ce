"""The known weight layouts by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from torch import Tensor

from qkv.attention.layers import layout_v1, layout_v2
from qkv.attention.layers.projections import Array, Projections
from qkv.errors import InvalidContent, format_value

__all__ = ["LAYOUTS", "Layout", "find"]


class Layout(Protocol):
    """The functions of a layout's module."""

    SUFFIXES: tuple[str, ...]  # of a projection's tensor names, the weight's first

    def read(self, tensors: Mapping[str, Array], pointer: str = ...) -> Projections:
        """Reads the layout's tensors."""

    def write(self, projections: Projections) -> dict[str, Array]:
        """Writes the layout's tensors."""

    def forward(
        self, projections: Projections, x_LM: tuple[Tensor, Tensor, Tensor], heads: int
    ) -> Tensor:
        """Runs the layer as the source of this layout does, for checks."""


LAYOUTS: Final[Mapping[str, Layout]] = {"v1": layout_v1, "v2": layout_v2}


def find(name: object, pointer: str) -> Layout:
    """Returns the layout of that name.

    Raises:
        InvalidContent: the layout does not exist.
    """
    if isinstance(name, str) and name in LAYOUTS:
        return LAYOUTS[name]
    raise InvalidContent(
        f"layout is unknown: got {format_value(name)}, expected {' or '.join(LAYOUTS)}",
        pointer=pointer,
    )
