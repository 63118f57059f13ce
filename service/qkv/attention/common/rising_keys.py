"""Causal attention to keys that rise so far that no shift of their features fits all rows.

A later key may exceed an earlier one by any amount. Features that are divided by the largest one of
all keys would then underflow for early keys, and with them whole rows. Here an item's queries and
keys are tokens behind an empty state, whose sums are divided by the largest feature up to each
token: no exponent is above 0, and numbers that underflow are negligible in the sum of their row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from qkv.attention.common.summed_tokens import FeatureMap, SummedTokens
from qkv.attention.common.token_gradients import gradients_from
from qkv.attention.common.token_inputs import Sums
from qkv.attention.common.token_weights import row_function

RISE: Final = 300.0
"""Rise of a channel's keys over its first up to which one shift fits all rows in float64."""

_CHUNK: Final = 64


class RunningKeys(NamedTuple):
    """Logarithms of features of keys, as sums need them that are divided by the largest one.

    Attributes:
        grown_XCD: e^(k - m), m the largest k of the channel up to each token.
        fall_XCD: the rise of m at each token, negative: the logarithm of what remains of the sums.
        largest_XCD: m; 0 before the first key.
    """

    grown_XCD: Tensor
    fall_XCD: Tensor
    largest_XCD: Tensor

    @classmethod
    def of(cls, key_XCD: Tensor, before: Sums) -> RunningKeys:
        """Returns them for logarithms, -inf for padding, behind the sums and their divisors."""
        matrix, largest_XD = before
        largest_X1D = largest_XD.masked_fill(matrix[..., -1] == 0, -torch.inf)[:, None]
        running = torch.cat([largest_X1D, key_XCD.detach()], 1).cummax(1).values
        has_none = running == -torch.inf
        running = running.masked_fill(has_none, 0.0)
        fall_XCD = (running[:, :-1] - running[:, 1:]).masked_fill(has_none[:, :-1], 0.0)
        return cls((key_XCD - running[:, 1:]).exp(), fall_XCD, running[:, 1:])


class _Item(NamedTuple):
    """An item's queries and keys as tokens: those of one position beside each other.

    Attributes:
        tokens: a query is 0, and a key -inf, where there is none.
        S: the number of keys, which are at the first positions.
        blind: the number of queries before the first key. They are no tokens.
        seeing: the positions of all other queries. Behind the last key, they see all keys.
    """

    tokens: SummedTokens
    S: int
    blind: int
    seeing: slice

    def at_positions(self, x_1HLX: Tensor) -> Tensor:
        """Returns a tensor of the queries by position; 0 where there is none."""
        return _at(x_1HLX[:, :, self.blind :], self.seeing.start, self.tokens.first.shape[2])

    def of_queries(self, x_1HTX: Tensor) -> Tensor:
        """Returns a tensor by position for the queries; 0 for those that see no key."""
        return pad(x_1HTX[:, :, self.seeing], (0, 0, self.blind, 0))


@dataclass(frozen=True)
class RisingKeys:
    """The matrix A of a batch.

    Attributes:
        query_BHLD: queries.
        key_BGSD: keys; -inf for padding.
        offsets: each item's position of the first query on the key axis.
        features: computes the features of tokens, whose sums are divided by `RunningKeys`.
        normalize: rows are divided by the sum of their weights.
    """

    query_BHLD: Tensor
    key_BGSD: Tensor
    offsets: list[int]
    features: FeatureMap
    normalize: bool

    def wide(self) -> RisingKeys:
        """Returns the same in float64, which it is."""
        return self

    def with_phi_applied(self) -> RisingKeys:
        """Returns the same: tokens have features of their own."""
        return self

    def output(self, value_BGSE: Tensor) -> Tensor:
        """Returns A @ value, (B, G, K, L, E), in float64. The padding of `value_BGSE` is zero."""
        items = self._items(value_BGSE)
        read = ((i, i.tokens.read_all(i.tokens.sums_of(None), _CHUNK)[0]) for i in items)
        return self._by_key_head([item.of_queries(output_1HTE) for item, output_1HTE in read])

    def block(self, rows: slice) -> Tensor:
        """Returns rows of A, (B, G, K, R, S), in float64."""
        return self._by_key_head([row_block(rows) for row_block in self._row_blocks])

    def gradients(self, value_BGSE: Tensor, grad_BHLE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of queries, keys and values, in float64."""
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for b, item in enumerate(self._items(value_BGSE)):
            grad_1HTE = item.at_positions(grad_BHLE[b : b + 1])
            each = gradients_from(item.tokens, None, grad_1HTE, None, _CHUNK)
            key, value = (each[name][:, :, : item.S] for name in ("key", "value"))
            found.append((item.of_queries(each["query"]), key, value))
        query, key, value = (torch.cat(some) for some in zip(*found, strict=True))
        return query, key, value

    def _by_key_head(self, items_1HLX: list[Tensor]) -> Tensor:
        """Returns the tensors of all items as one, (B, G, K, L, X)."""
        by_head: Tensor = torch.cat(items_1HLX).unflatten(1, (self.key_BGSD.shape[1], -1))
        return by_head

    @cached_property
    def _row_blocks(self) -> list[Callable[[slice], Tensor]]:
        """Functions that compute rows of A of each item, (1, H, R, S)."""
        return [_row_block(item) for item in self._items(self.key_BGSD[..., :0])]

    def _items(self, value_BGSE: Tensor) -> Iterator[_Item]:
        """Yields each item with its values."""
        L, S = self.query_BHLD.shape[2], self.key_BGSD.shape[2]
        for b, offset in enumerate(self.offsets):
            blind, start = min(L, max(0, -offset)), min(max(0, offset), S)
            seeing = slice(start, start + L - blind)
            query, key, value = (x[b : b + 1] for x in (self.query_BHLD, self.key_BGSD, value_BGSE))
            T = max(S, seeing.stop)
            tokens = SummedTokens.of(
                _at(query[:, :, blind:], start, T), pad(key, (0, 0, 0, T - S), value=-torch.inf),
                _at(value, 0, T), None, features=self.features, shifts=True,
                normalize=self.normalize,
            )  # fmt: skip
            yield _Item(tokens, S, blind, seeing)


def _row_block(item: _Item) -> Callable[[slice], Tensor]:
    """Returns a function that computes rows of A of an item."""
    rows_of = row_function(item.tokens, item.tokens.sums_of(None), _CHUNK)

    def row_block(rows: slice) -> Tensor:
        moved = item.seeing.start - item.blind
        first, stop = (max(row, item.blind) for row in (rows.start, rows.stop))
        if first == stop:
            query = item.tokens.tensors["query"]
            return query.new_zeros(*query.shape[:2], rows.stop - rows.start, item.S)
        seeing_1HRS = rows_of(slice(first + moved, stop + moved))[..., : item.S]
        return pad(seeing_1HRS, (0, 0, first - rows.start, 0))

    return row_block


def _at(x_1HNX: Tensor, start: int, T: int) -> Tensor:
    """Returns x at positions from `start` on, of T; 0 at all others."""
    return pad(x_1HNX, (0, 0, start, T - start - x_1HNX.shape[2]))
