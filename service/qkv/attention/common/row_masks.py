"""Padding and causal masks for variants that sum over keys, and the rows to recompute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from qkv.attention.common.guards import occurs

Causal = Annotated[bool, Field(description="A query sees only the keys up to its own position.")]
QueryOffset = Annotated[
    Annotated[int, Field(ge=-(2**31), lt=2**31)] | Literal["end"],
    Field(
        description='Position of the first query on the key axis. "end" aligns the last query '
        "with the last valid key."
    ),
]


def padding_mask(S: int, key_lengths_B: Tensor | None) -> Tensor | None:
    """Returns True for each key that is padding, (B, S); None if there is no padding."""
    if key_lengths_B is None:
        return None
    return torch.arange(S, device=key_lengths_B.device) >= key_lengths_B[:, None]


def mask_padding(padding_BS: Tensor | None, tensor_BGSX: Tensor, instead: float = 0.0) -> Tensor:
    """Returns keys or values with zeros for padding, whose NaN or inf would spread through sums.

    `instead` replaces zero; -inf is for keys of which e^x is summed.
    """
    if padding_BS is None:
        return tensor_BGSX
    return tensor_BGSX.masked_fill(padding_BS[:, None, :, None], instead)


def visible_keys(rows_R: Tensor, S: int, offset: int | None) -> Tensor | None:
    """Returns True for each key that the queries at these rows see, (R, S); None: all keys."""
    if offset is None:
        return None
    return torch.arange(S, device=rows_R.device) <= rows_R[:, None] + offset


def zero_hidden(block_BGKRS: Tensor, rows: slice, offsets: list[int] | None) -> None:
    """Sets the weights of keys that these rows of A do not see to zero, in place."""
    if offsets is None:
        return
    row_R = torch.arange(rows.start, rows.stop, device=block_BGKRS.device)
    for b, offset in enumerate(offsets):
        visible = visible_keys(row_R, block_BGKRS.shape[-1], offset)
        assert visible is not None
        block_BGKRS[b].masked_fill_(~visible, 0.0)


def rows_to_redo(bad_BGKL: Tensor, at_once: int) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yields the bad rows with their head (b, g, k), at most `at_once` rows at a time."""
    if not occurs(bad_BGKL):
        return
    for head in np.ndindex(*bad_BGKL.shape[:3]):
        (rows,) = torch.where(bad_BGKL[head])
        yield from ((head, part) for part in rows.split(max(1, at_once)) if len(part))
