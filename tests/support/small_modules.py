"""Small modules with the names, shapes and order of sources that are no packages.

Sources: github.com/karpathy/nanoGPT, model.py; github.com/meta-llama/llama, llama/model.py;
S. Raschka, Build a Large Language Model (From Scratch), listings 3.1 and 3.5. They are written anew
from the descriptions of their tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class _CausalSelfAttention(nn.Module):
    """nanoGPT's attention without its fused kernel, which keeps its mask as the buffer `bias`."""

    bias: Tensor

    def __init__(self, width: int, heads: int, length: int, has_bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width, bias=has_bias)
        self.c_proj = nn.Linear(width, width, bias=has_bias)
        self.register_buffer("bias", torch.ones(length, length).tril()[None, None])

    def forward(self, x_BLM: Tensor) -> Tensor:
        L = x_BLM.shape[1]
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.c_attn(x_BLM).chunk(3, dim=-1)
        )
        scores_BHLS = query @ key.mT / query.shape[-1] ** 0.5
        scores_BHLS = scores_BHLS.masked_fill(self.bias[:, :, :L, :L] == 0, -torch.inf)
        attended_BHLE = scores_BHLS.softmax(-1) @ value
        output: Tensor = self.c_proj(attended_BHLE.transpose(1, 2).flatten(2))
        return output


class NanoGPT(nn.Module):
    """nanoGPT's names: `transformer.h.0.attn.c_attn.weight`. It runs its attention only."""

    def __init__(self, width: int, heads: int, length: int, has_bias: bool) -> None:
        super().__init__()
        blocks = (
            nn.ModuleDict(
                {
                    "ln_1": nn.LayerNorm(width, bias=has_bias),
                    "attn": _CausalSelfAttention(width, heads, length, has_bias),
                }
            )
            for _ in range(2)
        )
        embedding = nn.Embedding(length, width)
        self.transformer = nn.ModuleDict({"wpe": embedding, "h": nn.ModuleList(blocks)})


class MetaAttention(nn.Module):
    """Meta's Llama attention: a rotary embedding of neighbouring channels as complex numbers."""

    def __init__(self, width: int, heads: int, kv_heads: int, head_width: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.wq = nn.Linear(width, heads * head_width, bias=False)
        self.wk = nn.Linear(width, kv_heads * head_width, bias=False)
        self.wv = nn.Linear(width, kv_heads * head_width, bias=False)
        self.wo = nn.Linear(heads * head_width, width, bias=False)

    def forward(self, x_BLM: Tensor, base: float) -> Tensor:
        query, key, value = (
            linear(x_BLM).unflatten(-1, (heads, -1))
            for linear, heads in (
                (self.wq, self.heads), (self.wk, self.kv_heads), (self.wv, self.kv_heads),
            )
        )  # fmt: skip
        query, key = (_turned(x_BNHD, base).transpose(1, 2) for x_BNHD in (query, key))
        repeats = self.heads // self.kv_heads
        key, value = (
            x_BGSD.repeat_interleave(repeats, dim=1) for x_BGSD in (key, value.transpose(1, 2))
        )
        scores_BHLS = query @ key.mT / query.shape[-1] ** 0.5
        hidden_LS = scores_BHLS.new_ones(scores_BHLS.shape[-2:]).triu(1).bool()
        weights_BHLS = scores_BHLS.masked_fill(hidden_LS, -torch.inf).softmax(-1)
        output: Tensor = self.wo((weights_BHLS @ value).transpose(1, 2).flatten(2))
        return output


class PlainHead(nn.Module):
    """One head with plain parameters (in, out): listing 3.1."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        for role in ("query", "key", "value"):
            self.register_parameter(f"W_{role}", nn.Parameter(torch.empty(width, head_width)))

    def forward(self, x_BLM: Tensor) -> Tensor:
        query, key, value = (x_BLM @ weight for weight in self.parameters())
        output: Tensor = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value
        return output


class SplitHeads(nn.Module):
    """Heads in three nn.Linear, causal, with an output projection: listing 3.5."""

    mask: Tensor

    def __init__(self, width: int, out: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.W_query, self.W_key, self.W_value = (nn.Linear(width, out) for _ in range(3))
        self.out_proj = nn.Linear(out, out)
        self.register_buffer("mask", torch.ones(length, length).triu(1))

    def forward(self, x_BLM: Tensor) -> Tensor:
        L = x_BLM.shape[1]
        query, key, value = (
            module(x_BLM).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for module in (self.W_query, self.W_key, self.W_value)
        )
        scores_BHLS = (query @ key.mT).masked_fill(self.mask.bool()[:L, :L], -torch.inf)
        attended_BHLE = (scores_BHLS / query.shape[-1] ** 0.5).softmax(-1) @ value
        output: Tensor = self.out_proj(attended_BHLE.transpose(1, 2).flatten(2))
        return output


def _turned(x_BNHD: Tensor, base: float) -> Tensor:
    """Returns x with each pair of neighbouring channels turned by position times frequency."""
    N, D = x_BNHD.shape[1], x_BNHD.shape[-1]
    frequencies_C = base ** -(torch.arange(0, D, 2).double() / D)
    angles_NC = torch.arange(N).double()[:, None] * frequencies_C
    turns_NC = torch.polar(torch.ones_like(angles_NC), angles_NC)
    numbers_BNHC = torch.view_as_complex(x_BNHD.unflatten(-1, (-1, 2)).contiguous())
    turned = numbers_BNHC * turns_NC[:, None].to(numbers_BNHC.dtype)
    return torch.view_as_real(turned).flatten(-2)
