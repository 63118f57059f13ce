"""The tensors of the variant `gated` as tokens of the recurrence; its output and gradients."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qkv.attention.common.recurrence import Chunks, Tokens
from qkv.attention.common.row_masks import padding_mask
from qkv.attention.common.score_blocks import score_dtype

__all__ = ["GatedInputs", "gradients", "run"]

_ELEMENTS = 1 << 20  # of the pairs and rows of chunks that are processed together: 4 MiB of float32
_EPSILON: Final = 1e-6  # of normalize_qk
_STABLE: Final = 2.0 + 1e-5  # the norm of a normalised key is rounded
_NAMES: Final = {
    "query_BJSD": "query",
    "key_BGSD": "key",
    "value_BVSE": "value",
    "log_decay_BTSZ": "log_decay",
    "beta_BTS": "beta",
}


class GatedInputs(NamedTuple):
    """The tensors of a call, and how they become tokens.

    Attributes:
        padding_BS: True for padding.
        query_BJSD, key_BGSD, value_BVSE, log_decay_BTSZ, beta_BTS: as in `attend`; None for those
            that the rule does not use.
        erases: the rule is a delta rule.
        scale, normalize_qk: as in `attend`.
    """

    padding_BS: Tensor | None
    query_BJSD: Tensor
    key_BGSD: Tensor
    value_BVSE: Tensor
    log_decay_BTSZ: Tensor | None
    beta_BTS: Tensor | None
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
        return cls(
            padding_mask(query_BJSD.shape[2], key_lengths_B), query_BJSD, key_BGSD, value_BVSE,
            log_decay_BTSZ if rule in ("gated", "gated_delta") else None,
            beta_BTS if erases else None, erases, scale, normalize_qk,
        )  # fmt: skip

    @property
    def T(self) -> int:
        """The number of heads of the state."""
        return max(self.key_BGSD.shape[1], self.value_BVSE.shape[1])

    @property
    def K(self) -> int:
        """The number of heads of the output that read one state."""
        return max(1, self.query_BJSD.shape[1] // self.T)

    @property
    def beta_XN(self) -> Tensor | None:
        """Beta by plane of the state, in float64."""
        if self.beta_BTS is None:
            return None
        return self.visible(self.beta_BTS[..., None]).flatten(0, 1)[..., 0].double()

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
        return grows_BTS.flatten(1).any(1)

    def empty_state(self, dtype: torch.dtype) -> Tensor:
        """Returns the state before the first token, (B T, D, E)."""
        (B, _, _, D), E = self.key_BGSD.shape, self.value_BVSE.shape[3]
        return self.key_BGSD.new_zeros(B * self.T, D, E, dtype=dtype)

    def parts(self, chunk: int) -> list[slice]:
        """Returns the positions of all tokens, some chunks at a time; less than one comes last."""
        (B, _, S, D), E = self.query_BJSD.shape, self.value_BVSE.shape[3]
        row = B * self.T * (self.K + 1) * (chunk + D + E)
        step = max(1, _ELEMENTS // (row * chunk)) * chunk
        whole = S - S % chunk
        starts = [*range(0, whole, step), *([whole] if whole < S else [])]
        return [slice(a, b) for a, b in pairwise([*starts, S])]

    def rows(self, part: slice) -> GatedInputs:
        """Returns the tensors of some positions."""
        cut: dict[str, Any] = {n: x[:, :, part] for n, x in self.floating.items()}
        padding = None if self.padding_BS is None else self.padding_BS[:, part]
        return self._replace(padding_BS=padding, **cut)

    @property
    def floating(self) -> dict[str, Tensor]:
        """The tensors that have gradients, by field."""
        every = self._asdict()
        return {n: every[n] for n in _NAMES if every[n] is not None}

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
        decay = self.log_decay_BTSZ
        if decay is not None:
            decay = self.visible(decay.double()).flatten(0, 1)
        return Tokens(query.unflatten(1, (T, -1)).flatten(0, 1), key, write, erase, decay)

    def by_head(self, read_XKSE: Tensor) -> Tensor:
        """Returns what the queries read by head of the output, (B, H, S, E)."""
        by_head: Tensor = read_XKSE.unflatten(0, (-1, self.T)).flatten(1, 2)
        return by_head

    def visible(self, x_BHSX: Tensor) -> Tensor:
        """Returns x with zeros for padding, whose NaN or inf would spread."""
        if self.padding_BS is None:
            return x_BHSX
        return x_BHSX.masked_fill(self.padding_BS[:, None, :, None], 0.0)


def _with_heads(x_BHSD: Tensor, heads: int) -> Tensor:
    """Returns x with each head repeated, so that there are so many; x itself if it has them."""
    repeats = heads // x_BHSD.shape[1]
    return x_BHSD if repeats == 1 else x_BHSD.repeat_interleave(repeats, 1)


def _normalized(x_BHSD: Tensor) -> Tensor:
    """Returns x / sqrt(sum x^2 + 1e-6), from x over its largest number: no square overflows."""
    size = x_BHSD.detach().abs().amax(-1, keepdim=True).clamp(min=1.0)
    x_BHSD = x_BHSD / size
    return x_BHSD / (x_BHSD.square().sum(-1, keepdim=True) + _EPSILON / size**2).sqrt()


def run(inputs: GatedInputs, state_XDE: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Returns the output (B, H, S, E) and the state behind the last token.

    Both are computed in the dtype of the state, in memory for some chunks beside the output.
    """
    B, _, S, E = inputs.value_BVSE.shape
    output_BHSE = state_XDE.new_empty(B, inputs.T * inputs.K, S, E)
    for part in inputs.parts(chunk):
        output_BHSE[:, :, part], state_XDE = _run_part(inputs.rows(part), state_XDE, chunk)
    return output_BHSE, state_XDE


def _run_part(inputs: GatedInputs, state_XDE: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    tokens = inputs.tokens(state_XDE.dtype)
    chunks = Chunks.of(tokens, min(chunk, tokens.key_XND.shape[1]))
    read_XKNE, state_XDE = chunks.run(state_XDE)
    # a state that has overflowed makes NaN of a query of zeros
    return inputs.visible(inputs.by_head(read_XKNE)), state_XDE


def gradients(
    inputs: GatedInputs, state_XDE: Tensor, grad_BHSE: Tensor, grad_XDE: Tensor | None, chunk: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the gradients by wire name, and that of the state before the first token.

    They are those of sum(grad * output) + sum(grad * state behind the last token), in float64.
    Autograd computes them some chunks at a time, from the last to the first.
    """
    parts, before = inputs.parts(chunk), [state_XDE]
    for part in parts[:-1]:
        before.append(_run_part(inputs.rows(part), before[-1], chunk)[1])
    grad_XDE = torch.zeros_like(state_XDE) if grad_XDE is None else grad_XDE
    if inputs.padding_BS is not None:
        grad_BHSE = grad_BHSE.masked_fill(inputs.padding_BS[:, None, :, None], 0.0)
    found: dict[str, list[Tensor]] = {}
    with torch.inference_mode(False), torch.enable_grad():
        for part, state in zip(reversed(parts), reversed(before), strict=True):
            some = inputs.rows(part)
            leaves: dict[str, Any] = {
                n: x.to(torch.float64, copy=True).requires_grad_() for n, x in some.floating.items()
            }
            state = state.clone().requires_grad_()
            if some.padding_BS is not None:
                some = some._replace(padding_BS=some.padding_BS.clone())
            ends = _run_part(some._replace(**leaves), state, chunk)
            grads = grad_BHSE[:, :, part].clone(), grad_XDE.clone()
            *of_leaves, grad_XDE = torch.autograd.grad(ends, [*leaves.values(), state], grads)
            for name, gradient in zip(leaves, of_leaves, strict=True):
                found.setdefault(_NAMES[name], []).insert(0, gradient)
    return {name: torch.cat(of_parts, 2) for name, of_parts in found.items()}, grad_XDE
