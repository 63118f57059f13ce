"""`Family`: how the oracle draws a kind of inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

Tensors = dict[str, Tensor]
Change = Callable[[Tensors, Generator, torch.dtype], None]
Gates = Callable[[Tensors, Generator, Any], None]
"""Takes the parameters of the variant."""


class NotDrawn(Exception):
    """A family does not apply: the variant lacks an input, or the sizes do not fit."""


class Family(NamedTuple):
    """A family of inputs.

    Attributes:
        text: a description in words.
        change: changes normally distributed tensors in place of the family; None: keeps them.
        sizes: sizes that differ from the usual ones.
        group: query heads for each key head.
        needs: inputs or axis letters that the variant must have.
        keyword: the optional input or parameter that the family sends.
        variant: the only one that the family is for; "": any.
        is_strict: True if many right kernels fail; the family then runs only on request.
        gates: changes the tensors of `gated` after its decays and betas are drawn; None: keeps
            them.
        tokens: S as a function of the tokens of a chunk and of the seed; None: one of the sizes.
    """

    text: str
    change: Change | None = None
    sizes: Mapping[str, int] = {}
    group: int = 1
    needs: tuple[str, ...] = ()
    keyword: str = ""
    variant: str = ""
    is_strict: bool = False
    gates: Gates | None = None
    tokens: Callable[[int, int], int] | None = None
