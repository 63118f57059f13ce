"""Tensors of an attention's module that its layout does not read, and that may change its output.

What is not known is not harmless: a gate, a norm, a table of relative positions and an output
projection of another name all have names that no layout reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from qkv.attention.layers.layout_catalogue import Layout, Shapes

_BUFFERS: Final = re.compile(r"(original_)?inv_freq|(cos|sin)_cached|masked_bias")
"""Names of numbers that follow from the configuration, which older files keep."""
_MASKS: Final = ("bias", "mask", "causal_mask")
_BESIDE: Final = re.compile(
    r"relative|rel_(pos|emb)|position_bias|pos_bias|bias_table|(attn|attention)[^.]*gate"
)
"""Parts of the names of what an attention reads although it lies beside its module: tables of
relative positions, which the first block of T5 has for all, and gates."""


def find_unread(layout: Layout, shapes: Shapes) -> list[str]:
    """Returns the names of tensors that the layout does not read, except harmless ones.

    Args:
        layout: of the attention.
        shapes: of all tensors of its module, by name without the prefix.
    """
    read = layout.select(shapes)
    behind = tuple(f"{n}." for o, n in layout.behind.items() if f"{o}.weight" in shapes)
    return [
        name
        for name, shape in shapes.items()
        if name not in read and not name.startswith(behind) and not _is_buffer(name, shape)
    ]


def find_beside(names: Iterable[str]) -> list[str]:
    """Returns those of the names that belong to what an attention reads beside its module."""
    return [name for name in names if _BESIDE.search(name)]


def _is_buffer(name: str, shape: tuple[int, ...]) -> bool:
    """Returns True if a tensor has no number that is learned: frequencies, or a mask."""
    last = name.rpartition(".")[2]
    is_mask = last in _MASKS and len(shape) >= 2 and shape[-2] == shape[-1]
    is_for_all_heads = set(shape[:-2]) <= {1} and (len(shape) == 4 or last != "bias")
    return 0 in shape or bool(_BUFFERS.fullmatch(last)) or (is_mask and is_for_all_heads)
