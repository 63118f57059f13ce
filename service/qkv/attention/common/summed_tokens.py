"""Tokens of the variants whose queries read sums of products of features over the keys before.

With f of queries and g of keys, the sums are those of g_j (v_j, 1)^T. A query reads f^T S: the sum
of the values, and in the last column W that of their weights, by which it is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from qkv.attention.common.recurrence import Chunks, Tokens
from qkv.attention.common.row_masks import padding_mask
from qkv.attention.common.token_inputs import Read, Sums, TokenInputs, tail_sizes
from qkv.attention.signature import STATE
from qkv.errors import InvalidContent

_LOST: Final = 2.0**-30  # a divisor that is smaller than the least certain one by it is not used


class Features(NamedTuple):
    """The features of C tokens, in float64. They have no meaning for padding.

    Attributes:
        query_BGKCF, key_BGCF: f and g; the K heads that read one key head side by side.
        decay_XCF: the logarithm of what remains of the sums at each token; None: all of it.
        largest_XF: what the sums behind the tokens have been divided by; None: nothing.
        certain_BC1: rows whose divisor is smaller have lost digits; None: no row can. It may be
            one number for all rows.
    """

    query_BGKCF: Tensor
    key_BGCF: Tensor
    decay_XCF: Tensor | None = None
    largest_XF: Tensor | None = None
    certain_BC1: Tensor | float | None = None

    def sums(self, matrix_XFW: Tensor) -> Sums:
        """Returns the sums behind the tokens from the matrices behind them."""
        return (matrix_XFW,) if self.largest_XF is None else (matrix_XFW, self.largest_XF)


FeatureMap = Callable[["SummedTokens", Sums], Features]
"""The features of the tokens behind some sums."""


@dataclass(frozen=True)
class SummedTokens(TokenInputs):
    """The tokens of such a variant.

    Attributes:
        features: computes the features of tokens.
        F: the number of features of a key.
        shifts: the features of keys are divided by the largest one up to each token.
        normalize: rows are divided by the sum of their weights.
    """

    features: FeatureMap
    F: int
    shifts: bool = False
    normalize: bool = True

    @classmethod
    def of(
        cls,
        query_BHSD: Tensor,
        key_BGSD: Tensor,
        value_BGSE: Tensor,
        key_lengths_B: Tensor | None,
        *,
        features: FeatureMap,
        more: int = 0,
        shifts: bool = False,
        normalize: bool = True,
    ) -> SummedTokens:
        """Returns the tokens of three tensors.

        A key has as many features as numbers, and `more`. The other arguments are attributes.
        """
        tensors = {"query": query_BHSD, "key": key_BGSD, "value": value_BGSE}
        padding = padding_mask(key_BGSD.shape[2], key_lengths_B)
        return cls(padding, tensors, features, key_BGSD.shape[3] + more, shifts, normalize)

    @property
    def query_BGKCD(self) -> Tensor:
        """The queries in float64, zero for padding; by key head."""
        query = self.visible(self.tensors["query"].double())
        by_head: Tensor = query.unflatten(1, (self.G, -1))
        return by_head

    @property
    def key_BGCD(self) -> Tensor:
        """The keys in float64, zero for padding."""
        return self.visible(self.tensors["key"].double())

    @property
    def G(self) -> int:
        """The number of key heads."""
        return self.tensors["value"].shape[1]

    def row_elements(self, chunk: int) -> int:
        """Returns how many numbers are computed for one position of all planes."""
        heads = sum(x.shape[1] for x in self.tensors.values())
        return len(self.first) * heads * (chunk + self.F + self.tensors["value"].shape[3] + 1)

    def sums_of(self, past: Any | None) -> Sums:
        """Returns the matrices (B G, F, W) of a state, and the largest features (B G, F)."""
        value = self.tensors["value"]
        if past is None or past.sums is None:
            X, W = len(value) * self.G, value.shape[3] + 1
            matrix = value.new_zeros(X, self.F, W, dtype=torch.float64)
        else:
            matrix = past.sums.flatten(0, 1).double()
        if not self.shifts:
            return (matrix,)
        if (largest := getattr(past, "largest", None)) is None:  # sums that come alone
            return matrix, matrix.new_zeros(matrix.shape[:2])
        return matrix, largest.flatten(0, 1)

    def fields_of(self, sums: Sums) -> dict[str, Tensor]:
        """Returns the fields `sums` and, for features that are divided, `largest`."""
        fields = (x.unflatten(0, (-1, self.G)) for x in sums)
        return dict(zip(("sums", "largest"), fields, strict=False))

    def read(self, sums: Sums, is_full: bool, rows: slice = slice(None)) -> Read:
        """Reads and writes the tokens as one chunk."""
        tokens, features = self._tokens(sums)
        chunks = Chunks.of(tokens, self.first.shape[2], rows)
        read_XKCW, matrix = chunks.run_one(sums[0], is_full)
        read_BHCW = self._by_head(read_XKCW)
        output, is_lost_B = read_BHCW[..., :-1], None
        if self.normalize:
            divisor_BHC1, is_lost_BHC1 = _divisor(read_BHCW[..., -1:], features)
            output = output / divisor_BHC1
            if is_lost_BHC1 is not None:
                is_lost_B = self.visible(is_lost_BHC1).flatten(1).any(1)
        behind = features.sums(matrix) if is_full else sums
        return Read(self.visible(output), behind, is_lost_B)

    def weight_chunk(self, sums: Sums) -> tuple[Chunks, Tensor | None, Sums]:
        """Returns the tokens as a chunk of rows of A, which are divided by their sum."""
        tokens, features = self._tokens(sums)
        chunks = Chunks.of(tokens, self.first.shape[2])
        read_XKCW, matrix = chunks.run_one(sums[0], is_full=True)
        behind = features.sums(matrix)
        if not self.normalize:
            return chunks, None, behind
        divisor_BHC1, _ = _divisor(self._by_head(read_XKCW[..., -1:]), features)
        divisor_XKC1 = divisor_BHC1.unflatten(1, (self.G, -1)).flatten(0, 1)
        query = tokens.query_XKND / divisor_XKC1
        return Chunks.of(tokens._replace(query_XKND=query), self.first.shape[2]), None, behind

    def _tokens(self, sums: Sums) -> tuple[Tokens, Features]:
        """Returns the tokens as vectors of the recurrence, and their features."""
        features = self.features(self, sums)
        query = features.query_BGKCF
        if self.padding_BS is not None:
            query = query.masked_fill(self.padding_BS[:, None, None, :, None], 0.0)
        value = self.visible(self.tensors["value"].double())
        tokens = Tokens(
            query.flatten(0, 1),
            self.visible(features.key_BGCF).flatten(0, 1),
            pad(value, (0, 1), value=1.0).flatten(0, 1),
            None,
            features.decay_XCF,
        )
        return tokens, features

    def _by_head(self, read_XKCW: Tensor) -> Tensor:
        """Returns what the queries read by head of the output, (B, H, C, W)."""
        by_head: Tensor = read_XKCW.unflatten(0, (-1, self.G)).flatten(1, 2)
        return by_head


def _divisor(total_BHC1: Tensor, features: Features) -> tuple[Tensor, Tensor | None]:
    """Returns what rows are divided by, and True for those that have lost digits.

    Rows that have lost all of them become zero.
    """
    if (certain := features.certain_BC1) is None:
        return total_BHC1.masked_fill(total_BHC1 == 0, torch.inf), None
    certain_B1C1 = certain[:, None] if isinstance(certain, Tensor) else certain
    has_none = (total_BHC1 <= certain_B1C1 * _LOST) | ~total_BHC1.isfinite()
    return total_BHC1.masked_fill(has_none, torch.inf), (total_BHC1 < certain_B1C1) | has_none


def has_state(inputs: Collection[str]) -> bool:
    """Returns True if one of these tensors of a request belongs to a state."""
    return any(name.startswith(STATE) for name in inputs)


def state_sizes(
    sizes: Mapping[str, int], parameters: Any, F: int | None = None
) -> Mapping[str, int]:
    """Returns the sizes of the tensors of a state: C, W, and F if it is given.

    Raises:
        InvalidContent: a tensor of the state has another size.
    """
    expected = {"W": sizes["E"] + 1} | ({} if F is None else {"F": F})
    for letter, size in expected.items():
        if (found := sizes.get(letter, size)) != size:
            raise InvalidContent(
                f"state.sums has {letter}={found}: expected {size}",
                pointer="/inputs/state.sums",
            )
    return expected | tail_sizes(sizes, parameters)
