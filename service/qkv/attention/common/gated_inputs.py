"""The tensors of the variant `gated` as tokens of the recurrence; its output and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from qkv.attention.common.recurrence import Chunks, Tokens
from qkv.attention.common.row_masks import padding_mask
from qkv.attention.common.score_blocks import score_dtype
from qkv.attention.common.token_inputs import Read, Sums, TokenInputs, parts

_EPSILON: Final = 1e-6  # of normalize_qk
_STABLE: Final = 2.0 + 1e-5  # the norm of a normalised key is rounded


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


@dataclass(frozen=True)
class GatedInputs(TokenInputs):
    """The tensors of a call, and how they become tokens.

    Attributes:
        erases: the rule is a delta rule.
        scale, normalize_qk: as in `attend`.
    """

    erases: bool
    scale: float | None
    normalize_qk: bool

    @classmethod
    def of(
        cls,
        query_BJSD: Tensor,
        key_BGSD: Tensor,
        value_BVSE: Tensor,
        log_decay_BTSZ: Tensor | None,
        beta_BTS: Tensor | None,
        key_lengths_B: Tensor | None,
        rule: str,
        scale: float | None,
        normalize_qk: bool,
    ) -> GatedInputs:
        """Drops the tensors that the rule does not use."""
        erases = rule in ("delta", "gated_delta")
        tensors = {"query": query_BJSD, "key": key_BGSD, "value": value_BVSE}
        if log_decay_BTSZ is not None and rule in ("gated", "gated_delta"):
            tensors["log_decay"] = log_decay_BTSZ
        if beta_BTS is not None and erases:
            tensors["beta"] = beta_BTS
        padding = padding_mask(query_BJSD.shape[2], key_lengths_B)
        return cls(padding, tensors, erases, scale, normalize_qk)

    @property
    def query_BJSD(self) -> Tensor:
        """The queries."""
        return self.tensors["query"]

    @property
    def key_BGSD(self) -> Tensor:
        """The keys."""
        return self.tensors["key"]

    @property
    def value_BVSE(self) -> Tensor:
        """The values."""
        return self.tensors["value"]

    @property
    def beta_BTS(self) -> Tensor | None:
        """The factor of what a token erases and writes; None: the rule does not use it."""
        return self.tensors.get("beta")

    def holding(self, tensors: Mapping[str, Tensor], padding_BS: Tensor | None) -> GatedInputs:
        """Returns the same rule with the tensors of other tokens.

        Zeros are enough for positions without a token: they write nothing.
        """
        return replace(self, tensors=tensors, padding_BS=None)

    @property
    def T(self) -> int:
        """The number of heads of the state."""
        return max(self.key_BGSD.shape[1], self.value_BVSE.shape[1])

    @property
    def K(self) -> int:
        """The number of heads of the output that read one state."""
        return max(1, self.query_BJSD.shape[1] // self.T)

    @property
    def is_unstable_B(self) -> Tensor:
        """True for items with a token for which beta |k|^2 is above 2, so that the state may grow.

        Padding does not count.
        """
        dtype = score_dtype(self.key_BGSD.dtype)
        size_BGS = torch.linalg.vector_norm(self.key_BGSD, dim=-1, dtype=dtype).square()
        if self.normalize_qk:
            size_BGS = size_BGS.clamp(max=1.0)
        size_BTS = _with_heads(size_BGS, self.T)
        if self.beta_BTS is not None:
            size_BTS = self.beta_BTS.to(dtype) * size_BTS
        grows_BTS = size_BTS > _STABLE
        if self.padding_BS is not None:
            grows_BTS = grows_BTS & ~self.padding_BS[:, None]
        is_unstable_B: Tensor = grows_BTS.flatten(1).any(1)
        return is_unstable_B

    def empty_state(self, dtype: torch.dtype) -> Tensor:
        """Returns the state before the first token, (B T, D, E)."""
        (B, _, _, D), E = self.key_BGSD.shape, self.value_BVSE.shape[3]
        return self.key_BGSD.new_zeros(B * self.T, D, E, dtype=dtype)

    def row_elements(self, chunk: int) -> int:
        """Returns how many numbers are computed for one position of all planes."""
        (B, _, _, D), E = self.query_BJSD.shape, self.value_BVSE.shape[3]
        return B * self.T * (self.K + 1) * (chunk + D + E)

    def sums_of(self, past: Any | None) -> Sums:
        """Returns the matrices of a state in float64, (B T, D, E); zeros without one."""
        if past is None or past.sums is None:
            return (self.empty_state(torch.float64),)
        return (past.sums.flatten(0, 1).double(),)

    def fields_of(self, sums: Sums) -> dict[str, Tensor]:
        """Returns the field `sums`."""
        return {"sums": sums[0].unflatten(0, (-1, self.T))}

    def read(self, sums: Sums, is_full: bool, rows: slice = slice(None)) -> Read:
        """Reads and writes the tokens as one chunk."""
        chunks = Chunks.of(self.tokens(torch.float64), self.first.shape[2], rows)
        read_XKCE, state_XDE = chunks.run_one(sums[0], is_full)
        return Read(self.by_head(read_XKCE), (state_XDE,))

    def read_all(self, sums: Sums, chunk: int) -> tuple[Tensor, Sums]:
        """Reads and writes whole chunks, or less than one, in the dtype of the sums."""
        tokens = self.tokens(sums[0].dtype)
        chunks = Chunks.of(tokens, min(chunk, tokens.key_XND.shape[1]))
        read_XKNE, state_XDE = chunks.run(sums[0])
        # a state that has overflowed makes NaN of a query of zeros
        return self.visible(self.by_head(read_XKNE)), (state_XDE,)

    def weight_chunk(self, sums: Sums) -> tuple[Chunks, Tensor | None, Sums]:
        """Returns the tokens as a chunk, and beta: a delta rule writes beta v."""
        tokens, beta_XN = self.tokens(torch.float64), None
        if (beta_BTS := self.beta_BTS) is not None:
            beta_XN = self.visible(beta_BTS[..., None]).flatten(0, 1)[..., 0].double()
        return Chunks.of(tokens, tokens.key_XND.shape[1]), beta_XN, sums

    def tokens(self, dtype: torch.dtype) -> Tokens:
        """Returns the tokens in a dtype, by plane of the state."""
        query, key, value = (
            self.visible(x.to(dtype)) for x in (self.query_BJSD, self.key_BGSD, self.value_BVSE)
        )
        if self.normalize_qk:
            query, key = _normalized(query), _normalized(key)
        T, scale = self.T, key.shape[-1] ** -0.5 if self.scale is None else self.scale
        query = _with_heads(query, T * self.K) * scale
        key, write = (_with_heads(x, T).flatten(0, 1) for x in (key, value))
        erase = key if self.erases else None
        if self.beta_BTS is not None:
            beta = self.visible(self.beta_BTS[..., None].to(dtype)).flatten(0, 1)
            erase, write = beta * key, beta * write
        decay = self.tensors.get("log_decay")
        if decay is not None:
            decay = self.visible(decay.double()).flatten(0, 1)
        return Tokens(query.unflatten(1, (T, -1)).flatten(0, 1), key, write, erase, decay)

    def by_head(self, read_XKSE: Tensor) -> Tensor:
        """Returns what the queries read by head of the output, (B, H, S, E)."""
        by_head: Tensor = read_XKSE.unflatten(0, (-1, self.T)).flatten(1, 2)
        return by_head


def _with_heads(x_BHSD: Tensor, heads: int) -> Tensor:
    """Returns x with each head repeated, so that there are so many; x itself if it has them."""
    repeats = heads // x_BHSD.shape[1]
    return x_BHSD if repeats == 1 else x_BHSD.repeat_interleave(repeats, 1)


def _normalized(x_BHSD: Tensor) -> Tensor:
    """Returns x / sqrt(sum x^2 + 1e-6), from x over its largest number: no square overflows."""
    size = x_BHSD.detach().abs().amax(-1, keepdim=True).clamp(min=1.0)
    x_BHSD = x_BHSD / size
    return x_BHSD / (x_BHSD.square().sum(-1, keepdim=True) + _EPSILON / size**2).sqrt()


def run(inputs: GatedInputs, state_XDE: Tensor, chunk: int) -> Tensor:
    """Returns the output (B, H, S, E), in memory for some chunks beside it.

    It is computed in the dtype of the state before the first token.
    """
    B, _, S, E = inputs.value_BVSE.shape
    output_BHSE = state_XDE.new_empty(B, inputs.T * inputs.K, S, E)
    sums: Sums = (state_XDE,)
    for part in parts(inputs, chunk):
        output_BHSE[:, :, part], sums = inputs.rows(part).read_all(sums, chunk)
    return output_BHSE
