"""Hypothesis strategy for requests to softmax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from support.dtypes import DTYPES


@dataclass(frozen=True)
class Request:
    """A request to softmax that Hypothesis can shrink and print; `tensors` draws its numbers."""

    dtype: torch.dtype
    B: int
    G: int
    K: int
    L: int
    S: int
    D: int
    E: int
    spread: float
    mask: tuple[torch.dtype, tuple[bool, bool, bool, bool], float] | None
    key_lengths: tuple[int, ...] | None
    garbage: float
    seed: int
    parameters: Mapping[str, Any]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Returns query, key, value, mask, key_lengths; padding keys and values hold garbage."""
        B, G, L, S = self.B, self.G, self.L, self.S
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        query = (normal(B, G * self.K, L, self.D) * self.spread).to(self.dtype)
        key = (normal(B, G, S, self.D) * self.spread).to(self.dtype)
        value = normal(B, G, S, self.E).to(self.dtype)
        mask = None if self.mask is None else self._mask(*self.mask, generator)
        lengths = None if self.key_lengths is None else torch.tensor(self.key_lengths)
        if lengths is not None:
            padding = (torch.arange(S) >= lengths[:, None])[:, None, :, None]
            key = key.masked_fill(padding, self.garbage)
            value = value.masked_fill(padding, self.garbage)
        return query, key, value, mask, lengths

    def _mask(
        self,
        dtype: torch.dtype,
        full: tuple[bool, ...],
        hidden: float,
        generator: torch.Generator,
    ) -> Tensor:
        sizes = (self.B, self.G * self.K, self.L, self.S)
        shape = [size if whole else 1 for size, whole in zip(sizes, full, strict=True)]
        seen = torch.rand(shape, generator=generator) >= hidden
        seen &= torch.rand((*shape[:3], 1), generator=generator) >= hidden / 2  # whole rows
        if dtype == torch.bool:
            return seen
        added = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
        return added.to(dtype).masked_fill(~seen, -math.inf)


@st.composite
def requests(draw: st.DrawFn, dropout: bool = True) -> Request:
    """Draws requests, mostly of tiny and odd sizes, with random parameters."""
    small = st.integers(1, 5)
    length = st.one_of(st.integers(1, 7), st.sampled_from((16, 17, 33)))
    width = st.one_of(st.integers(1, 9), st.sampled_from((16, 17, 33, 64)))
    B, S = draw(st.integers(1, 3)), draw(length)
    count = st.none() | st.integers(0, 9) | st.just(2**31 - 1)
    offset = st.just("end") | st.integers(-9, 9) | st.sampled_from((-(2**31), 2**31 - 1))
    optional: dict[str, st.SearchStrategy[Any]] = {
        "causal": st.booleans(),
        "query_offset": offset,
        "scale": st.none() | st.just(0.0) | st.floats(-3, 3, allow_subnormal=False),
        "softcap": st.none() | st.floats(0.05, 100),
        "window": st.none() | st.tuples(count, count),
    }
    if dropout:
        optional["dropout"] = st.just(0.0) | st.floats(0.01, 0.99)
        optional["seed"] = st.integers(0, 2**64 - 1)
    names = draw(st.sets(st.sampled_from(sorted(optional))))  # few or many at a time
    full = st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans())
    plain = draw(st.booleans())
    kinds = st.sampled_from((torch.bool, *DTYPES))
    return Request(
        dtype=draw(st.sampled_from(DTYPES)),
        B=B,
        G=draw(st.integers(1, 3)),
        K=draw(st.integers(1, 3)),
        L=draw(length),
        S=S,
        D=draw(width),
        E=draw(width | small),
        spread=draw(st.sampled_from((0.0, 1e-3, 1.0, 4.0))),
        mask=None
        if plain
        else draw(st.none() | st.tuples(kinds, full, st.sampled_from((0.0, 0.3, 0.9)))),
        key_lengths=None
        if plain
        else draw(st.none() | st.lists(st.integers(0, S), min_size=B, max_size=B).map(tuple)),
        garbage=draw(st.sampled_from((0.0, 100.0, math.nan, math.inf, -math.inf))),
        seed=draw(st.integers(0, 2**32 - 1)),
        parameters={name: draw(optional[name]) for name in sorted(names)},
    )
