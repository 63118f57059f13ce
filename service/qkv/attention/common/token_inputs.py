"""The tensors of some tokens of a variant with a state, and the parameters that its requests share.

A variant with a state has sums over the tokens up to each position. `TokenInputs` is what it gives:
its tensors, the sums before the first token, and how a chunk of tokens reads and changes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field
from torch import Tensor

from qkv.attention.common.recurrence import Chunks
from qkv.errors import InvalidContent

_ELEMENTS = 1 << 20  # of the pairs and rows of chunks that are processed together: 4 MiB of float32

Chunk = Annotated[
    int,
    Field(
        ge=2, le=256,
        description="The number of tokens that a request with a state processes at once.",
    ),
]  # fmt: skip
Form = Annotated[
    Literal["exact", "compact"],
    Field(
        description="The form of the state that is returned. exact: the output has the same bits "
        "however the sequence is cut. compact: sums alone."
    ),
]

Sums = tuple[Tensor, ...]
"""The sums before a token by plane of the state: the matrices (X, F, W), which have gradients, and
other tensors (X, ...), which have none. All are float64."""


class Read(NamedTuple):
    """The output of a chunk of C tokens, and the sums behind it.

    Attributes:
        output_BHCE: the output in float64; zero for positions without a token.
        sums: as they were before, if they were not asked for.
        is_lost_B: True for items with a token whose row has lost digits; None: no row can.
    """

    output_BHCE: Tensor
    sums: Sums
    is_lost_B: Tensor | None = None


@dataclass(frozen=True)
class TokenInputs(ABC):
    """The tensors of N tokens.

    Attributes:
        padding_BS: True for padding; None: there is none.
        tensors: the floating tensors by wire name, tokens along the third axis.
    """

    padding_BS: Tensor | None
    tensors: Mapping[str, Tensor]

    def rows(self, part: slice) -> Self:
        """Returns the tensors of some positions."""
        padding = None if self.padding_BS is None else self.padding_BS[:, part]
        tensors = {name: x[:, :, part] for name, x in self.tensors.items()}
        return replace(self, padding_BS=padding, tensors=tensors)

    def holding(self, tensors: Mapping[str, Tensor], padding_BS: Tensor | None) -> Self:
        """Returns the same variant with other tokens; the tensors are zero for padding."""
        return replace(self, padding_BS=padding_BS, tensors=tensors)

    def visible(self, x_BHSX: Tensor) -> Tensor:
        """Returns x with zeros for padding, whose NaN or inf would spread."""
        if self.padding_BS is None:
            return x_BHSX
        return x_BHSX.masked_fill(self.padding_BS[:, None, :, None], 0.0)

    @property
    def first(self) -> Tensor:
        """A tensor of the tokens, (B, heads, N, ...)."""
        return next(iter(self.tensors.values()))

    def new_output(self, N: int) -> Tensor:
        """Returns an output of N positions, without numbers, in the dtype of the tokens."""
        heads = max(x.shape[1] for x in self.tensors.values())
        return self.first.new_empty(len(self.first), heads, N, self.tensors["value"].shape[3])

    def read_all(self, sums: Sums, chunk: int) -> tuple[Tensor, Sums]:
        """Returns the output of any number of tokens in chunks, and the sums behind them."""
        outputs = []
        for start in range(0, self.first.shape[2], chunk):
            read = self.rows(slice(start, start + chunk)).read(sums, is_full=True)
            outputs.append(read.output_BHCE)
            sums = read.sums
        return torch.cat(outputs, 2), sums

    @abstractmethod
    def row_elements(self, chunk: int) -> int:
        """Returns how many numbers are computed for one position of all planes."""

    @abstractmethod
    def sums_of(self, past: Any | None) -> Sums:
        """Returns the sums of a state, a NamedTuple of tensors; without one, those before a
        sequence."""

    @abstractmethod
    def fields_of(self, sums: Sums) -> dict[str, Tensor]:
        """Returns the fields of a state for some sums, with an axis B."""

    @abstractmethod
    def read(self, sums: Sums, is_full: bool, rows: slice = slice(None)) -> Read:
        """Reads and writes the tokens as one chunk.

        Args:
            sums: those before the chunk.
            is_full: the sums behind it are asked for.
            rows: the positions whose output is used.
        """

    @abstractmethod
    def weight_chunk(self, sums: Sums) -> tuple[Chunks, Tensor | None, Sums]:
        """Returns the tokens as a chunk of rows of A, factors of its columns (X, N) or None, and
        the sums behind them."""


def parts(inputs: TokenInputs, chunk: int) -> list[slice]:
    """Returns the positions of all tokens, some chunks at a time; less than one comes last."""
    S = inputs.first.shape[2]
    step = max(1, _ELEMENTS // (inputs.row_elements(chunk) * chunk)) * chunk
    whole = S - S % chunk
    starts = [*range(0, whole, step), *([whole] if whole < S else [])]
    return [slice(a, b) for a, b in pairwise([*starts, S])]


def tail_sizes(sizes: Mapping[str, int], parameters: Any) -> dict[str, int]:
    """Returns C, the number of rows of a tail's tensors.

    Raises:
        InvalidContent: the tail of the request has another number of rows.
    """
    C = parameters.chunk - 1
    if (found := sizes.get("C", C)) != C:
        raise InvalidContent(
            f"state.tail_value has the wrong number of tokens: got {found}, expected chunk - 1 = "
            f"{C}",
            pointer="/inputs/state.tail_value",
        )
    return {"C": C}
