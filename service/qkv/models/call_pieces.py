"""Pieces of captured calls that one request holds: some heads of some sequences, without padding.

A piece has its sequences as further heads of one sequence. So a response with figures of each head
has the figures of each sequence too, and they do not depend on how a call is cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qkv.models.masks import Part
from qkv.models.model_call import ModelCall

_BYTES: Final = 1 << 25  # of tensors: an eighth of the service's default limit of a body
_WEIGHTS: Final = 1 << 24  # compared in a request, of all variants: a few seconds of one thread
_SCORES: Final = 1 << 27  # computed in a request, of all variants: seconds of one thread too
_HEADS: Final = 2048  # of all variants, the baseline included; the service takes 4096


class Piece(NamedTuple):
    """Adjacent planes of a part of a call. Plane n * H + h is query head h of its nth sequence.

    Attributes:
        call: the call.
        part: sequences of it without padding.
        first, last: the first plane, and the one after the last.
    """

    call: ModelCall
    part: Part
    first: int
    last: int

    @property
    def heads(self) -> list[int]:
        """The index of each plane's head in the call."""
        H = self.call.query.shape[1]
        return [plane % H for plane in range(self.first, self.last)]

    @property
    def query_count(self) -> int:
        """Number of queries of each sequence."""
        queries = self.part.queries
        return self.call.query.shape[2] if queries is None else len(queries)

    @property
    def mask_bytes(self) -> int:
        """Bytes of the mask of one head; 0 without a mask."""
        return 0 if self.part.mask is None else self.part.mask[0, 0].nbytes

    def tensors(self, inputs: frozenset[str]) -> dict[str, Any]:
        """Returns the tensors of a request, with the planes as the heads of one sequence.

        Args:
            inputs: names of the tensors that its variants take.
        """
        call, part, group = self.call, self.part, _group_size(self.call)
        # query head h reads key head h // group, and that also holds for planes
        keys = self.first // group, (self.last - 1) // group + 1
        tensors = {
            "query": _planes(call.query, part.items, self.first, self.last, part.queries),
            "key": _planes(call.key, part.items, *keys, part.keys),
            "value": _planes(call.value, part.items, *keys, part.keys),
        }
        if part.mask is not None:
            tensors["mask"] = self._mask(part.mask)
        if call.sinks is not None and "sinks" in inputs:
            tensors["sinks"] = call.sinks[self.heads]
        return tensors

    def _mask(self, mask: Tensor) -> Tensor:
        """Returns the mask of the planes, which are of one sequence unless all have one mask."""
        N, H = mask.shape[:2]
        if N * H == 1:
            return mask
        sequence, first = divmod(self.first, self.call.query.shape[1])
        of_sequence = mask[min(sequence, N - 1)][None]
        if H == 1:
            return of_sequence
        return of_sequence[:, first : first + self.last - self.first]

    def halves(self) -> list[Piece]:
        """Returns two smaller pieces; none if the piece is a single head."""
        size, group = self.last - self.first, _group_size(self.call)
        if size == 1:
            return []
        half = size // group // 2 * group if size > group else size // 2
        middle = self.first + half
        return [self._replace(last=middle), self._replace(first=middle)]


def cut(call: ModelCall, part: Part, rows: int | None, variants: int) -> Iterator[Piece]:
    """Cuts a part of a call into pieces that are small enough for one request.

    A piece has whole groups of query heads that share a key head, or is a part of such a group.
    Each piece has the whole of a mask that its heads share. Beside such a mask there is room for
    half of `_BYTES` at least, because smaller pieces would only repeat the mask.

    Args:
        call, part: as in `Piece`.
        rows: rows of each head whose weights are compared; None: all.
        variants: number of variants in a request, the baseline included.
    """
    group, H = _group_size(call), call.query.shape[1]
    L = call.query.shape[2] if part.queries is None else len(part.queries)
    S = call.key.shape[2] if part.keys is None else len(part.keys)
    compared = L if rows is None else min(rows, L)
    size = L * call.query.shape[3] + S * (call.key.shape[3] + call.value.shape[3]) / group
    size *= call.query.element_size()
    planes = H * len(part.items)
    spans, room = [(0, planes)], _BYTES
    if part.mask is not None:
        N, mask_heads = part.mask.shape[:2]
        mask_bytes = part.mask[0, 0].nbytes
        if mask_heads > 1:
            size += mask_bytes
        else:
            room = max(_BYTES - mask_bytes, _BYTES // 2)
        if N * mask_heads > 1:
            spans = [(start, start + H) for start in range(0, planes, H)]
    limit = min(
        room // max(1, int(size)),
        _WEIGHTS // max(1, compared * S * variants),
        _SCORES // max(1, L * S * variants),
        _HEADS // variants,
    )
    for start, end in spans:
        for first, last in _ranges(start, end, group, max(1, limit)):
            yield Piece(call, part, first, last)


def _ranges(start: int, end: int, group: int, limit: int) -> Iterator[tuple[int, int]]:
    """Yields ranges of at most `limit` planes: whole groups, or parts of one group."""
    if limit >= group:
        step = limit // group * group
        yield from ((first, min(first + step, end)) for first in range(start, end, step))
        return
    for first_of_group in range(start, end, group):
        yield from _ranges(first_of_group, first_of_group + group, 1, limit)


def _group_size(call: ModelCall) -> int:
    """Returns the number of query heads that read one key head."""
    return call.query.shape[1] // call.key.shape[1]


def _planes(
    x: Tensor, items: tuple[int, ...], first: int, last: int, positions: Tensor | None
) -> Tensor:
    """Returns planes of a tensor (B, H, L, D) at these positions, as (1, planes, L, D)."""
    H = x.shape[1]
    blocks = []
    for n in range(first // H, (last - 1) // H + 1):
        block = x[items[n], max(0, first - n * H) : min(H, last - n * H)]
        blocks.append(block if positions is None else block[:, positions])
    return torch.cat(blocks)[None] if len(blocks) > 1 else blocks[0][None]
