"""The variant `gated` for requests with a state: the same bits however the sequence is cut.

Chunks count from the first token of a sequence. Each one is padded to its full size, and computed
by itself in float64: the bits of a product depend on its shape, and those of one row on no later
row. The exact form of a state keeps the sums at the end of the last whole chunk, and the tokens of
the tail behind it. The compact form has the sums behind the last token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from qkv.attention.common.gated_inputs import GatedInputs
from qkv.attention.common.guards import are_deferred
from qkv.attention.common.recurrence import Chunks

__all__ = ["State", "run_from", "sums_of"]


class State(NamedTuple):
    """The tensors that the next tokens need; C is one less than the tokens of a chunk.

    Attributes:
        sums: the matrix S of each head, key axis first.
        tail_length: the number of tokens in the tail; None: there is no tail.
        tail_key, tail_value, tail_log_decay, tail_beta: of these tokens, then zeros.
    """

    sums: Float64[Tensor, "B T D E"] | Float32[Tensor, "B T D E"] | None = None
    tail_length: Int64[Tensor, "B"] | None = None
    tail_key: Float[Tensor, "B G C D"] | None = None
    tail_value: Float[Tensor, "B V C E"] | None = None
    tail_log_decay: Float[Tensor, "B T C Z"] | None = None
    tail_beta: Float[Tensor, "B T C"] | None = None


class _Sequence(NamedTuple):
    """The tail of a state, and the new tokens behind it.

    Attributes:
        new: the new tokens.
        tail_B: the number of tokens in the tail.
        length_B: the number of new tokens.
        tails: the tensors of the tail, by field of `GatedInputs`.
    """

    new: GatedInputs
    tail_B: Tensor
    length_B: Tensor
    tails: dict[str, Tensor]

    @classmethod
    def of(cls, new: GatedInputs, past: State | None) -> _Sequence:
        (B, _, S, _), device = new.query_BJSD.shape, new.query_BJSD.device
        length_B = torch.full((B,), S, device=device)
        if new.padding_BS is not None:
            length_B = S - new.padding_BS.sum(1)
        if past is None or past.tail_length is None:
            return cls(new, torch.zeros_like(length_B), length_B, {})
        named = {
            "key_BGSD": past.tail_key,
            "value_BVSE": past.tail_value,
            "log_decay_BTSZ": past.tail_log_decay,
            "beta_BTS": past.tail_beta,
        }
        tails = {name: x for name, x in named.items() if x is not None}
        return cls(new, past.tail_length, length_B, tails)

    @property
    def counts(self) -> tuple[int, int] | None:
        """The tokens in the tail and behind it, if they are read and the same for all sequences."""
        if are_deferred():
            return None
        both = {*zip(self.tail_B.tolist(), self.length_B.tolist(), strict=True)}
        return both.pop() if len(both) == 1 else None

    def tokens_at(self, start_B: Tensor, count: int) -> GatedInputs:
        """Returns some tokens from a position on, which counts from the first one of the tail.

        Positions without a token are zeros.
        """
        place_BC = start_B[:, None] + torch.arange(count, device=start_B.device)
        is_tail_BC = place_BC < self.tail_B[:, None]
        is_padding_BC = place_BC >= (self.tail_B + self.length_B)[:, None]
        S = self.new.query_BJSD.shape[2]
        new_BC = (place_BC - self.tail_B[:, None]).clamp(0, max(S - 1, 0))
        found: dict[str, Any] = {}
        for name, x in self.new.floating.items():
            taken = _take(x if S else x.new_zeros(*x.shape[:2], 1, *x.shape[3:]), new_BC)
            if (tail := self.tails.get(name)) is not None:
                old = _take(tail, place_BC.clamp(max=tail.shape[2] - 1))
                taken = torch.where(_as(is_tail_BC, x), old, taken)
            hidden = is_padding_BC | is_tail_BC if name == "query_BJSD" else is_padding_BC
            found[name] = taken.masked_fill(_as(hidden, x), 0.0)
        return self.new._replace(padding_BS=None, **found)

    def same_tokens_at(self, start: int, count: int, tail: int, length: int) -> GatedInputs:
        """Returns the same where all sequences have as many tokens, without masks and indices."""
        old = slice(min(start, tail), min(start + count, tail))
        new = slice(max(start - tail, 0), max(min(start + count - tail, length), 0))
        found: dict[str, Any] = {}
        for name, x in self.new.floating.items():
            rows = x.new_zeros(*x.shape[:2], count, *x.shape[3:])
            kept = old.stop - old.start
            if name in self.tails:
                rows[:, :, :kept] = self.tails[name][:, :, old]
            rows[:, :, kept : kept + new.stop - new.start] = x[:, :, new]
            found[name] = rows
        return self.new._replace(padding_BS=None, **found)


def run_from(new: GatedInputs, past: State | None, chunk: int, form: str) -> tuple[Tensor, State]:
    """Returns the output of the new tokens, and the state behind them.

    Args:
        new: the new tokens.
        past: the state before them; None: there are no tokens before.
        chunk: the number of tokens in a chunk.
        form: of the state that is returned, exact or compact.
    """
    sequence, sums_XDE = _Sequence.of(new, past), sums_of(new, past)
    B, _, S, _ = new.query_BJSD.shape
    counts, end_B = sequence.counts, sequence.tail_B + sequence.length_B
    longest = sum(counts) if counts else S + (chunk - 1 if sequence.tails else 0)
    starts, E = range(0, max(longest, 1), chunk), new.value_BVSE.shape[3]
    output_BHNE = new.query_BJSD.new_empty(B, new.T * new.K, len(starts) * chunk, E)
    for start in starts:
        if counts:
            part = sequence.same_tokens_at(start, chunk, *counts)
        else:
            part = sequence.tokens_at(torch.full_like(end_B, start), chunk)
        needed = start + chunk if form == "exact" else start + 1
        chunks = Chunks.of(part.tokens(torch.float64), chunk)
        read_XKCE, next_XDE = chunks.run_one(sums_XDE, is_full=longest >= needed)
        output_BHNE[:, :, start : start + chunk] = part.by_head(read_XKCE)
        if not counts:
            is_kept_X = (end_B < needed).repeat_interleave(new.T)
            next_XDE = torch.where(is_kept_X[:, None, None], sums_XDE, next_XDE)
        sums_XDE = next_XDE
    sums_BTDE = sums_XDE.unflatten(0, (B, -1))
    if counts:
        output_BHSE = _padded(output_BHNE[:, :, counts[0] : sum(counts)], S)
    else:
        row_BS = sequence.tail_B[:, None] + torch.arange(S, device=end_B.device)
        output_BHSE = new.visible(_take(output_BHNE, row_BS))
    if form == "compact":
        return output_BHSE, State(sums_BTDE)
    boundary_B = end_B // chunk * chunk
    if counts:
        tail = sequence.same_tokens_at(longest // chunk * chunk, chunk - 1, *counts)
    else:
        tail = sequence.tokens_at(boundary_B, chunk - 1)
    return output_BHSE, State(
        sums_BTDE, end_B - boundary_B, tail.key_BGSD, tail.value_BVSE, tail.log_decay_BTSZ,
        tail.beta_BTS,
    )  # fmt: skip


def _padded(x_BHSE: Tensor, S: int) -> Tensor:
    """Returns x with rows of zeros behind it, S in total."""
    missing = S - x_BHSE.shape[2]
    return torch.nn.functional.pad(x_BHSE, (0, 0, 0, missing)) if missing else x_BHSE


def sums_of(inputs: GatedInputs, past: State | None) -> Tensor:
    """Returns the sums of a state in float64, (B T, D, E); zeros without one."""
    if past is None or past.sums is None:
        return inputs.empty_state(torch.float64)
    return past.sums.flatten(0, 1).double()


def _take(x_BHSX: Tensor, place_BC: Tensor) -> Tensor:
    """Returns the rows of x at some positions of each item, (B, H, C, ...)."""
    place = _as(place_BC, x_BHSX).expand(-1, x_BHSX.shape[1], -1, *x_BHSX.shape[3:])
    return x_BHSX.gather(2, place)


def _as(x_BC: Tensor, like_BHSX: Tensor) -> Tensor:
    """Returns x with axes of size 1, so that it broadcasts to the rows of another tensor."""
    return x_BC.view(x_BC.shape[0], 1, x_BC.shape[1], *(1 for _ in like_BHSX.shape[3:]))
