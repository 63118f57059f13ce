"""Masks, windows and padding as key ranges and biases, a block of query rows at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.attention.common.guards import are_deferred


class Block(NamedTuple):
    """The keys that a block of query rows can see.

    Attributes:
        keys: the range that contains all keys that a row of the block sees; may be empty.
        bias_BHRS: for the keys in that range, broadcastable: bool (true: may attend) or floating
            (added to the scores, -inf where a row may not attend); None if all is allowed.
    """

    keys: slice
    bias_BHRS: Tensor | None


class Visibility(NamedTuple):
    """The restrictions and biases of the scores (B, H, L, S), without an (L, S) matrix.

    Attributes:
        L, S: query and key length.
        mask_BHLS: bool or floating, four axes, each of full size or 1.
        key_lengths_B: int64; keys at and after this position are padding.
        causal: a query sees only the keys up to its own position.
        offset: the position of the first query on the key axis, or (B, 1, 1, 1) positions.
        offsets: the lowest and highest offset; None: unknown.
        left, right: the number of keys before and after its position that a query sees; None: all.
        dtype: the dtype of the scores, in which floating masks are added.
    """

    L: int
    S: int
    mask_BHLS: Tensor | None
    key_lengths_B: Tensor | None
    causal: bool
    offset: int | Tensor
    offsets: tuple[int, int] | None
    left: int | None
    right: int | None
    dtype: torch.dtype

    @classmethod
    def of(cls, call: Any, dtype: torch.dtype) -> Visibility:
        """Returns the visibility for a `Call` with scores, of this dtype."""
        L, S, lengths_B = call.query_BHLD.shape[2], call.key_BGSD.shape[2], call.key_lengths_B
        left, right = call.window or (None, None)
        offset: Any = call.query_offset
        if offset != "end":
            offsets: tuple[int, int] | None = (offset, offset)
        elif lengths_B is None:
            offset, offsets = S - L, (S - L, S - L)
        else:
            offset = (lengths_B - L).view(-1, 1, 1, 1)
            # of a batch, the key ranges of a row would depend on the other requests
            offsets = None if are_deferred() else (int(offset.min()), int(offset.max()))
        return cls(
            L, S, call.mask_BHLS, lengths_B, call.causal, offset, offsets, left, right, dtype
        )  # fmt: skip

    @property
    def is_causal_only(self) -> bool:
        """True if torch's `is_causal`, aligned at the first query and key, restricts alone."""
        return self.causal and self.offsets == (0, 0) and self._is_bare

    @property
    def is_all(self) -> bool:
        """True if nothing is restricted or biased."""
        return not self.causal and self._is_bare

    @property
    def _is_bare(self) -> bool:
        """True without mask, padding and window."""
        return (
            self.mask_BHLS is None
            and self.key_lengths_B is None
            and self.left is None
            and self.right is None
        )

    def without_padding(self, tensor_BGSX: Tensor) -> Tensor:
        """Returns keys or values with zeros for padding, whose NaN or inf would spread in sums."""
        if self.key_lengths_B is None:
            return tensor_BGSX
        padding_BS = torch.arange(self.S, device=tensor_BGSX.device) >= self.key_lengths_B[:, None]
        return tensor_BGSX.masked_fill(padding_BS[:, None, :, None], 0.0)

    def bias_planes(self, heads: int = 1) -> int:
        """Returns the largest number of (b, h) planes of (rows, S) in a block's bias.

        `heads` is the number of heads whose biases differ for another reason than the mask.
        """
        B, H = (1, 1) if self.mask_BHLS is None else self.mask_BHLS.shape[:2]
        return max(heads, H) * (B if self.key_lengths_B is None else len(self.key_lengths_B))

    @property
    def varies_by_row(self) -> bool:
        """True if a bias over all rows would be an (L, S) matrix."""
        rows = self.mask_BHLS is not None and self.mask_BHLS.shape[2] > 1
        return rows or self.causal or self.left is not None or self.right is not None

    @property
    def farthest(self) -> int:
        """A bound of the distance of any query to any key."""
        lowest, highest = self.offsets or (-self.L, self.S - self.L)
        return max(self.S - lowest, highest + self.L)

    def distances(self, rows: slice, keys: slice, device: torch.device) -> Tensor:
        """Returns the position of each key less that of each query, int64, (R, keys).

        If positions differ between the items, it has four axes, (B, 1, R, keys).
        """
        row_R1 = torch.arange(rows.start, rows.stop, device=device).view(-1, 1)
        return torch.arange(keys.start, keys.stop, device=device) - (row_R1 + self.offset)

    def _keys(self, rows: slice) -> slice:
        """Returns the keys that any of the rows can see, as far as the offsets are known."""
        first, last = 0, self.S
        if self.offsets is not None:
            lowest, highest = self.offsets
            if self.causal:
                last = min(last, rows.stop + highest)
            if self.right is not None:
                last = min(last, rows.stop + highest + self.right)
            if self.left is not None:
                first = max(first, rows.start + lowest - self.left)
        return slice(first, last) if first < last else slice(0, 0)

    def block(self, rows: slice, device: torch.device) -> Block:
        """Returns the keys and biases of the query rows `rows.start` to `rows.stop`."""
        keys = self._keys(rows)
        if self.is_all:
            return Block(keys, None)
        key_S = torch.arange(keys.start, keys.stop, device=device)
        allowed: Tensor | None = None
        if self.causal or self.left is not None or self.right is not None:
            row_R1 = torch.arange(rows.start, rows.stop, device=device).view(-1, 1)
            position = row_R1 + self.offset
            if self.causal:
                allowed = key_S <= position
            if self.right is not None:
                allowed = _both(allowed, key_S <= position + self.right)
            if self.left is not None:
                allowed = _both(allowed, key_S >= position - self.left)
        if self.key_lengths_B is not None:
            allowed = _both(allowed, key_S < self.key_lengths_B.view(-1, 1, 1, 1))
        if allowed is not None:
            allowed = allowed.view((1,) * (4 - allowed.ndim) + tuple(allowed.shape))
        if self.mask_BHLS is None:
            return Block(keys, allowed)
        mask = self.mask_BHLS
        mask = mask[:, :, rows] if mask.shape[2] > 1 else mask
        mask = mask[..., keys] if mask.shape[3] > 1 else mask
        if mask.dtype == torch.bool:
            return Block(keys, _both(allowed, mask))
        mask = _narrowed(mask, self.dtype)
        return Block(keys, mask if allowed is None else mask.masked_fill(~allowed, -torch.inf))


def row_blocks(L: int, row_elements: int, budget: int) -> list[slice]:
    """Cuts L rows of `row_elements` elements into blocks of at most `budget` elements."""
    rows = max(1, budget // max(1, row_elements))
    if 32 < rows < L:
        rows -= rows % 32  # kernels work in tiles of 32 rows
    return [slice(start, min(L, start + rows)) for start in range(0, L, rows)]


def _both(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one & other


def _narrowed(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the mask in the scores' dtype. Finite numbers stay finite: -1e300 is not -inf."""
    if mask.dtype != torch.float64 or dtype == torch.float64:
        return mask.to(dtype)
    largest = torch.finfo(dtype).max
    return torch.where(mask.isinf(), mask, mask.clamp(-largest, largest)).to(dtype)
