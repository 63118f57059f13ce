"""Linformer by its definition: random projections and error bounds."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from qkv.attention.variants import linformer
from support.dtypes import DTYPES, exact_dtype

ALL: Final = frozenset({"output", "weights", "map"})
OUTPUT: Final = frozenset({"output"})


def attend_checked(*tensors: Any, **parameters: Any) -> linformer.Linformer:
    """Returns all outputs, with checked dtypes."""
    found = linformer.attend(*tensors, **parameters, outputs=ALL)
    dtype = tensors[0].dtype
    for tensor, expected in zip(found, (dtype, *2 * [exact_dtype(dtype)]), strict=False):
        assert isinstance(tensor, Tensor)
        assert tensor.dtype == expected
    return found


def random_projection(stream: int, rank: int, length: int, seed: int) -> Tensor:
    """Returns a random projection by its definition: normal with variance 1/rank, key by key."""
    bits = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64))
    numbers = np.random.Generator(bits).standard_normal((length, rank))
    return torch.from_numpy(numbers.T / math.sqrt(rank)).contiguous()


def assert_right(tensors: tuple[Tensor | None, ...], **parameters: Any) -> None:
    """Compares all outputs, one output alone, and row blocks with the reference.

    A score sums S D products, each rounded (S + D + 8 times in a row at most): delta. Its weight in
    the map has an error factor of e^(2 delta), and so has the sum of the row. R + 64 roundings of
    the sum and of exp come on top. Averages of mixtures of S add R + S roundings of the mass of the
    sum, and the output is rounded to its dtype. Underflow loses at most the smallest normal number.
    eps is twice a rounding: half of each bound is for the reference.
    """
    query, key, value, E, F, lengths = tensors
    assert query is not None
    assert key is not None
    assert value is not None
    truth = linformer.reference(*tensors, **parameters)  # type: ignore[arg-type]
    assert truth.output is not None
    assert truth.weights is not None
    assert truth.map is not None
    dtype, (S, D), R = query.dtype, key.shape[2:], truth.map.shape[-1]
    seed = parameters.get("seed", 0)
    E, F = (
        (random_projection(i, R, S, seed).to(dtype) if p is None else p).double()[:, :S].abs()
        for i, p in enumerate((E, F))
    )
    if lengths is not None:
        padding = (torch.arange(S) >= lengths[:, None])[:, None, :, None]
        key, value = key.masked_fill(padding, 0.0), value.masked_fill(padding, 0.0)
    K = query.shape[1] // key.shape[1]
    k, v = (x.double().abs().repeat_interleave(K, 1) for x in (key, value))
    scale = parameters.get("scale")
    scale = D**-0.5 if scale is None else scale
    eps, tiny = (getattr(torch.finfo(exact_dtype(dtype)), n) for n in ("eps", "tiny"))
    size = abs(scale) * (query.double().abs() @ (E @ k).mT)
    delta = (eps * (S + D + 10) * size + tiny * (S + D) * max(1, abs(scale))).amax(-1, keepdim=True)
    relative = torch.expm1(2 * delta) + (R + 64) * eps
    bounds = {
        "map": truth.map * relative + tiny,
        "weights": (relative + (R + 2) * eps) * (truth.map @ F) + R * tiny,
        "output": (relative + (R + S + 8) * eps) * (truth.map @ (F @ v))
        + torch.finfo(dtype).eps * truth.output.abs()
        + (R + S) * torch.finfo(dtype).tiny,
    }
    found = attend_checked(*tensors, **parameters)
    alone = linformer.attend(*tensors, **parameters, outputs=OUTPUT)  # type: ignore[arg-type]
    assert alone.weights is None
    assert alone.map is None
    start = L // 2 if (L := query.shape[2]) > 1 else 0
    score_tensors = (*tensors[:2], *tensors[3:])
    rows = linformer.weights(*score_tensors, **parameters)(slice(start, L))  # type: ignore[arg-type]
    for name, tensor, at in (
        *((name, getattr(found, name), 0) for name in ALL),
        ("output", alone.output, 0),
        ("weights", rows, start),
    ):
        off = (tensor.double() - getattr(truth, name)[:, :, at:]).abs()
        assert (off <= bounds[name][:, :, at:]).all(), name


@st.composite
def requests(draw: st.DrawFn) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    B, G, K, D, E, R = (draw(st.integers(1, most)) for most in (3, 3, 3, 9, 9, 9))
    L, S = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    N = S + draw(st.sampled_from([0, 0, 1, 30]))
    dtype, size = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([0.0, 1e-3, 1.0, 4.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, key = normal(B, G * K, L, D) * size, normal(B, G, S, D) * size
    value, lengths = normal(B, G, S, E), None
    if draw(st.booleans()):
        lengths = torch.randint(0, S + 1, (B,), generator=generator)
        padding = (torch.arange(S) >= lengths[:, None])[:, None, :, None]
        garbage = draw(st.sampled_from([0.0, 100.0, math.nan, math.inf]))
        key, value = key.masked_fill(padding, garbage), value.masked_fill(padding, garbage)
    projections = [normal(R, N).to(dtype) / R**0.5 if draw(st.booleans()) else None for _ in "EF"]
    parameters: dict[str, Any] = {"seed": draw(st.integers(0, 2**64 - 1))}
    if draw(st.booleans()):
        parameters["rank"] = R
    if draw(st.booleans()):
        parameters["scale"] = draw(st.sampled_from([0.0, -1.5, 0.3]))
    tensors = [x.to(dtype) for x in (query, key, value)]
    return (*tensors, *projections, lengths), parameters
