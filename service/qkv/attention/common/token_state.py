"""Requests with a state: the same bits however the sequence is cut.

Chunks count from the first token of a sequence. Each one is padded to its full size, and computed
by itself in float64: the bits of a product depend on its shape, and those of one row on no later
row. The exact form of a state keeps the sums at the end of the last whole chunk, and the tokens of
the tail behind it. The compact form has the sums behind the last token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qkv.attention.common.guards import are_deferred
from qkv.attention.common.token_inputs import Sums, TokenInputs

_LOST_DIGITS: Final = (
    "the sum of the weights of a row has lost digits, so few digits of the row may be right"
)
_QUERY: Final = "query"  # the tensor that a tail does not have


class Continued(NamedTuple):
    """The response to a request with a state.

    Attributes:
        output_BHSE: in the dtype of the tokens.
        fields: the tensors of the state behind the tokens, by field.
        is_lost_B: as `Read` has it.
        weights_BHSS: rows of A for the new tokens; None: they were not requested.
    """

    output_BHSE: Tensor
    fields: dict[str, Tensor]
    is_lost_B: Tensor | None
    weights_BHSS: Tensor | None = None

    @property
    def notes(self) -> dict[str, Tensor]:
        """The items for which a note on their numbers is true."""
        return {} if self.is_lost_B is None else {_LOST_DIGITS: self.is_lost_B}


class _Sequence(NamedTuple):
    """The tail of a state, and the new tokens behind it.

    Attributes:
        new: the new tokens.
        tail_B: the number of tokens in the tail.
        length_B: the number of new tokens.
        tails: the tensors of the tail by wire name.
    """

    new: TokenInputs
    tail_B: Tensor
    length_B: Tensor
    tails: Mapping[str, Tensor]

    @classmethod
    def of(cls, new: TokenInputs, past: Any | None) -> _Sequence:
        B, _, S, *_ = new.first.shape
        length_B = torch.full((B,), S, device=new.first.device)
        if new.padding_BS is not None:
            length_B = S - new.padding_BS.sum(1)
        if past is None or past.tail_length is None:
            return cls(new, torch.zeros_like(length_B), length_B, {})
        tails = {n: getattr(past, f"tail_{n}") for n in new.tensors if n != _QUERY}
        return cls(new, past.tail_length, length_B, tails)

    @property
    def counts(self) -> tuple[int, int] | None:
        """The tokens in the tail and behind it, if they are read and the same for all sequences."""
        if are_deferred():
            return None
        both = {*zip(self.tail_B.tolist(), self.length_B.tolist(), strict=True)}
        return both.pop() if len(both) == 1 else None

    def tokens_at(self, start_B: Tensor, count: int) -> TokenInputs:
        """Returns some tokens from a position on, which counts from the first one of the tail.

        Positions without a token are padding.
        """
        place_BC = start_B[:, None] + torch.arange(count, device=start_B.device)
        is_tail_BC = place_BC < self.tail_B[:, None]
        is_padding_BC = place_BC >= (self.tail_B + self.length_B)[:, None]
        S = self.new.first.shape[2]
        new_BC = (place_BC - self.tail_B[:, None]).clamp(0, max(S - 1, 0))
        found: dict[str, Tensor] = {}
        for name, x in self.new.tensors.items():
            taken = _take(x if S else x.new_zeros(*x.shape[:2], 1, *x.shape[3:]), new_BC)
            if (tail := self.tails.get(name)) is not None:
                old = _take(tail, place_BC.clamp(max=tail.shape[2] - 1))
                taken = torch.where(_as(is_tail_BC, x), old, taken)
            hidden = is_padding_BC | is_tail_BC if name == _QUERY else is_padding_BC
            found[name] = taken.masked_fill(_as(hidden, x), 0.0)
        return self.new.holding(found, is_padding_BC)

    def same_tokens_at(self, start: int, count: int, tail: int, length: int) -> TokenInputs:
        """Returns the same where all sequences have as many tokens, without masks and indices."""
        old = slice(min(start, tail), min(start + count, tail))
        new = slice(max(start - tail, 0), max(min(start + count - tail, length), 0))
        kept = old.stop - old.start
        end = kept + new.stop - new.start
        found: dict[str, Tensor] = {}
        for name, x in self.new.tensors.items():
            rows = x.new_zeros(*x.shape[:2], count, *x.shape[3:])
            if name in self.tails:
                rows[:, :, :kept] = self.tails[name][:, :, old]
            rows[:, :, kept:end] = x[:, :, new]
            found[name] = rows
        if end == count:
            return self.new.holding(found, None)
        is_padding_C = torch.arange(count, device=self.tail_B.device) >= end
        return self.new.holding(found, is_padding_C.expand(len(self.tail_B), -1))


def run_from(new: TokenInputs, past: Any | None, chunk: int, form: str) -> Continued:
    """Returns the output of the new tokens, and the state behind them.

    Args:
        new: the new tokens.
        past: the state before them, a NamedTuple of tensors; None: there are no tokens before.
        chunk: the number of tokens in a chunk.
        form: of the state that is returned, exact or compact.
    """
    sequence, sums = _Sequence.of(new, past), new.sums_of(past)
    S = new.first.shape[2]
    counts, end_B = sequence.counts, sequence.tail_B + sequence.length_B
    longest = sum(counts) if counts else S + (chunk - 1 if sequence.tails else 0)
    starts = range(0, max(longest, 1), chunk)
    output_BHNE, is_lost_B = new.new_output(len(starts) * chunk), None
    for start in starts:
        rows = slice(None)
        if counts:
            part = sequence.same_tokens_at(start, chunk, *counts)
            rows = slice(max(counts[0] - start, 0), max(longest - start, 0))
        else:
            part = sequence.tokens_at(torch.full_like(end_B, start), chunk)
        needed = start + chunk if form == "exact" else start + 1
        read = part.read(sums, longest >= needed, rows)
        output_BHNE[:, :, start : start + chunk] = read.output_BHCE
        if read.is_lost_B is not None:
            is_lost_B = read.is_lost_B if is_lost_B is None else is_lost_B | read.is_lost_B
        sums = read.sums if counts else _kept(end_B < needed, sums, read.sums)
    if counts:
        output_BHSE = _padded(output_BHNE[:, :, counts[0] : sum(counts)], S)
    else:
        row_BS = sequence.tail_B[:, None] + torch.arange(S, device=end_B.device)
        output_BHSE = new.visible(_take(output_BHNE, row_BS))
    fields = new.fields_of(sums)
    if form == "compact":
        return Continued(output_BHSE, fields, is_lost_B)
    boundary_B = end_B // chunk * chunk
    if counts:
        tail = sequence.same_tokens_at(longest // chunk * chunk, chunk - 1, *counts)
    else:
        tail = sequence.tokens_at(boundary_B, chunk - 1)
    fields["tail_length"] = end_B - boundary_B
    fields |= {f"tail_{n}": x for n, x in tail.tensors.items() if n != _QUERY}
    return Continued(output_BHSE, fields, is_lost_B)


def sums_behind(new: TokenInputs, past: Any | None) -> Sums:
    """Returns the sums behind the last token of a state, with those of its tail folded in."""
    sums = new.sums_of(past)
    if past is None or past.tail_length is None:
        return sums
    nothing_B = torch.zeros_like(past.tail_length)
    sequence = _Sequence.of(new, past)._replace(length_B=nothing_B)
    part = sequence.tokens_at(nothing_B, past.tail_value.shape[2])
    return _kept(past.tail_length == 0, sums, part.read(sums, is_full=True).sums)


def _kept(is_kept_B: Tensor, before: Sums, behind: Sums) -> Sums:
    """Returns the sums before for some items, and those behind for the others."""
    chosen = []
    for old, new in zip(before, behind, strict=True):
        is_kept_X = is_kept_B.repeat_interleave(len(old) // len(is_kept_B))
        chosen.append(torch.where(is_kept_X.view(-1, *(1 for _ in old.shape[1:])), old, new))
    return tuple(chosen)


def _padded(x_BHSE: Tensor, S: int) -> Tensor:
    """Returns x with rows of zeros behind it, S in total."""
    missing = S - x_BHSE.shape[2]
    return torch.nn.functional.pad(x_BHSE, (0, 0, 0, missing)) if missing else x_BHSE


def _take(x_BHSX: Tensor, place_BC: Tensor) -> Tensor:
    """Returns the rows of x at some positions of each item, (B, H, C, ...)."""
    place = _as(place_BC, x_BHSX).expand(-1, x_BHSX.shape[1], -1, *x_BHSX.shape[3:])
    return x_BHSX.gather(2, place)


def _as(x_BC: Tensor, like_BHSX: Tensor) -> Tensor:
    """Returns x with axes of size 1, so that it broadcasts to the rows of another tensor."""
    return x_BC.view(x_BC.shape[0], 1, x_BC.shape[1], *(1 for _ in like_BHSX.shape[3:]))
