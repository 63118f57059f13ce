"""Families of inputs of `gated`: lengths around chunks, decays, betas, sizes of keys, and states.

Queries, keys and values are drawn as for any variant. `draw_gates` adds what the rule needs, and
divides keys so that a delta rule is stable: beta |k|^2 is at most 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random
from typing import Any, Final

import torch
from torch import Generator, Tensor

from qkv.attention.variant import Variant
from qkv.testing.call import STATE, state_dtype
from qkv.testing.family import Family, NotDrawn, Tensors


def draw_gates(
    variant: Variant,
    family: Family,
    tensors: Tensors,
    sizes: Mapping[str, int],
    parameters: Mapping[str, Any],
    generator: Generator,
) -> None:
    """Adds decays and betas to the tensors of a recurrence, and changes them for the family.

    Decays forget a token after about 10 others; half of the betas are above 1/2.

    Raises:
        NotDrawn: the sizes do not fit the family.
    """
    if variant.name != "gated":
        return
    parsed: Any = variant.parse(parameters)
    B, T, S, Z = (sizes[x] for x in "BTSZ")
    needed = variant.required_names(parsed)
    if "log_decay" in needed:
        shape = (B, T, S) if Z == 1 else (B, T, S, Z)
        tensors["log_decay"] = -(_normal(shape, generator) / 2 - 2).exp()
    if "beta" in needed:
        tensors["beta"] = _normal((B, T, S), generator).sigmoid()
        if not parsed.normalize_qk:
            tensors["key"] /= _norm(tensors["key"]).clamp(min=1)
    if family.gates is not None:
        family.gates(tensors, generator, parsed)


def draw_state(
    variant: Variant, sizes: Mapping[str, int], dtype: torch.dtype, generator: Generator
) -> Tensor:
    """Returns the state before the first token: float32 beside narrow inputs."""
    assert variant.state is not None
    shape = tuple(sizes[x] for x in variant.state.inputs[STATE].letters)
    return _normal(shape, generator).to(state_dtype(dtype))


def draw_scale(sizes: Mapping[str, int], generator: Generator) -> float:
    """Returns a scale that is neither 1 nor a usual one."""
    return round(float((_normal((), generator) / 2).exp() * sizes["D"] ** -0.5 / 2), 4)


def _normal(shape: tuple[int, ...], generator: Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _uniform(shape: tuple[int, ...], generator: Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm


def _with_tail(chunk: int, seed: int) -> int:
    """Returns a chunk and a tail of 0 to chunk - 1 tokens."""
    return chunk + Random(f"tail {seed}").randrange(chunk)


def _long_history(tensors: Tensors, generator: Generator, parameters: Any) -> None:
    """Makes the first tokens write what the last ones read; the others write beside it.

    Raises:
        NotDrawn: D is 1, so that nothing is beside.
    """
    key, query = tensors["key"], tensors["query"]
    D, early = key.shape[-1], parameters.chunk // 2
    if D == 1:
        raise NotDrawn("D is 1")
    key[:, :, :early, D // 2 :] = 0
    key[:, :, early:, : D // 2] = 0
    query[:, :, early:, : D // 2] *= 4
    if "log_decay" in tensors:
        tensors["log_decay"] *= 0.01


def _decay_sizes(tensors: Tensors, generator: Generator, parameters: Any) -> None:
    """Gives heads in turn no decay, decays of 1e-12, one of -90 within a chunk, and long ones."""
    decay = tensors["log_decay"]
    S = decay.shape[2]
    decay[:, 0::4] = 0
    decay[:, 1::4] = -1e-12
    decay[:, 1::4, S // 2] = math.log(1e-12)
    decay[:, 2::4, min(parameters.chunk // 3, S - 1)] = -90
    decay[:, 3::4] *= 8


def _infinite_decay(tensors: Tensors, generator: Generator, parameters: Any) -> None:
    """Forgets all that was before: heads in turn within a chunk, and at the first of the next."""
    decay = tensors["log_decay"]
    S = decay.shape[2]
    decay[:, 0::2, min(parameters.chunk // 3, S - 1)] = -torch.inf
    decay[:, 1::2, min(parameters.chunk, S - 1)] = -torch.inf


def _betas(tensors: Tensors, generator: Generator, parameters: Any) -> None:
    """Makes betas of 0, 1 and 2, and near them."""
    beta = tensors["beta"]
    whole = torch.randint(0, 3, beta.shape, generator=generator).double()
    apart = _uniform(tuple(beta.shape), generator) * 2.0**-6
    near = (whole + torch.where(whole == 2, -apart, apart)).clamp(0, 2)
    beta.copy_(torch.where(_uniform(tuple(beta.shape), generator) < 0.5, whole, near))


def _key_sizes(tensors: Tensors, generator: Generator, parameters: Any) -> None:
    """Makes keys of many sizes. Without beta they are from 0.1 to 4, else up to the root of 2.

    Keys that the function normalises are from 0.001 to 4, so that an epsilon counts, and so are
    queries.
    """
    for name in ("key", "query"):
        norm = _norm(tensors[name])
        share = _uniform(tuple(norm.shape), generator)
        if parameters.normalize_qk:
            size = 10 ** (3.6 * share - 3)
        else:
            size = 0.2 + 1.2 * share if "beta" in tensors else 10 ** (1.6 * share - 1)
        tensors[name] *= size / norm


RECURRENT: Final[Mapping[str, Family]] = {
    "chunk tail": Family("a chunk and a tail of any length", tokens=_with_tail, variant="gated"),
    "long history": Family(
        "the last tokens read what the first ones wrote", gates=_long_history,
        tokens=lambda chunk, _: 3 * chunk + 5, sizes={"B": 1, "H": 2}, variant="gated",
    ),
    "decay sizes": Family(
        "decays of 0, 1e-12, 90 and long ones", gates=_decay_sizes,
        tokens=lambda chunk, _: chunk + chunk // 2, needs=("log_decay",), variant="gated",
    ),
    "infinite decay": Family(
        "decays of -infinity, within a chunk and at its end", gates=_infinite_decay,
        tokens=lambda chunk, _: chunk + chunk // 2, needs=("log_decay",), variant="gated",
        is_strict=True,
    ),
    "betas": Family("betas of 0, 1 and 2", gates=_betas, needs=("beta",), variant="gated"),
    "key sizes": Family("keys of many sizes", gates=_key_sizes, variant="gated"),
    "state": Family(
        "a state before the tokens", tokens=_with_tail, keyword=STATE, variant="gated"
    ),
    "one token": Family(
        "one token and a state", sizes={"S": 1}, keyword=STATE, variant="gated"
    ),
    "scale": Family("another scale", keyword="scale", variant="gated"),
}  # fmt: skip
"""The families by name, in the order in which they run."""
