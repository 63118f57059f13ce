"""Requests of bench/accuracy.py: every variant, with families of inputs that lose digits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qkv.attention.catalogue import variants
from qkv.attention.signature import fixed_size
from qkv.attention.variant import Variant

DTYPES: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LENGTHS: Final = (1, 2, 3, 7, 16, 17, 64, 65, 257, 1024, 4096)
FAMILIES: Final = ("random", "tiny", "huge", "opposed", "duplicated", "zero", "constant")

SIZES: Final = {"B": 2, "H": 2, "G": 1, "D": 8, "E": 4, "O": 4}
LONG: Final = 1024  # from this length on, one item and one head


class Case(NamedTuple):
    """One request of N tokens; `causal` is None if the variant has no such parameter."""

    variant: Variant
    dtype: torch.dtype
    family: str
    N: int
    causal: bool | None

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters that differ from their defaults."""
        return {} if self.causal is None else {"causal": self.causal}

    def __str__(self) -> str:
        return f"{self.family}, N={self.N}" + (", causal" if self.causal else "")


def cases(
    dtypes: Iterable[torch.dtype] = DTYPES, lengths: Iterable[int] = LENGTHS
) -> Iterator[Case]:
    """Yields every variant with all families that apply to its inputs."""
    for variant in variants().values():
        floating = [s.name for s in variant.inputs.values() if _is_sent(s)]
        families = [f for f in FAMILIES if f != "opposed" or {"query", "key"} <= set(floating)]
        families += [f"huge {name}" for name in floating] if len(floating) > 1 else []
        for dtype in dtypes:
            for N in lengths:
                for family in families:
                    for causal in (False, True) if _takes_causal(variant) else (None,):
                        yield Case(variant, dtype, family, N, causal)


def _is_sent(spec: Any) -> bool:
    return not spec.is_optional and "float32" in spec.dtypes


def _takes_causal(variant: Variant) -> bool:
    return "causal" in variant.parameters.model_fields


def inputs(case: Case, seed: int) -> dict[str, Tensor]:
    """Returns the tensors of a case by argument, rounded to its dtype.

    At odd lengths, variants with `key_lengths` get them, and NaN in the padding.
    """
    generator = torch.Generator().manual_seed(seed * 100_003 + case.N)
    sizes = SIZES | dict.fromkeys("LSI", case.N)
    if case.N >= LONG:
        sizes |= dict.fromkeys("BHG", 1)
    direction = torch.randn(sizes["D"], generator=generator, dtype=torch.float64)
    tensors = {}
    for spec in _sent(case):
        shape = [fixed_size(a) or sizes[a] for a in spec.letters]
        made = torch.randn(shape, generator=generator, dtype=torch.float64)
        if case.family == "opposed" and spec.name in ("query", "key"):
            made = _along(direction, made, generator, nearly=spec.name == "key")
        else:
            made = _of_family(made, spec, case)
        tensors[spec.argument] = made.clamp(*_range(case.dtype)).to(case.dtype)
    if "key_lengths" in case.variant.inputs and case.N % 2 and case.N < LONG:
        lengths = torch.tensor([case.N, case.N // 2])
        tensors[case.variant.inputs["key_lengths"].argument] = lengths
        for spec in _sent(case):
            if spec.letters[0] == "B" and "S" in spec.letters:
                tensors[spec.argument][1, :, int(lengths[1]) :] = torch.nan
    return tensors


def _sent(case: Case) -> list[Any]:
    """Returns the floating tensors that a request must have."""
    return [spec for spec in case.variant.inputs.values() if _is_sent(spec)]


def _range(dtype: torch.dtype) -> tuple[float, float]:
    return torch.finfo(dtype).min, torch.finfo(dtype).max


def _along(direction_D: Tensor, noise: Tensor, generator: torch.Generator, nearly: bool) -> Tensor:
    """Returns a direction times powers of two; `nearly`: its opposite off by 1e-6 to 0.1."""
    rows = (*noise.shape[:-1], 1)
    powers = 2.0 ** torch.randint(-3, 4, rows, generator=generator).double()
    if not nearly:
        return direction_D * powers
    angles = 10 ** (torch.rand(rows, generator=generator).double() * 5 - 6)
    return -(direction_D + angles * noise) * powers


def _of_family(noise: Tensor, spec: Any, case: Case) -> Tensor:
    family, info = case.family, torch.finfo(case.dtype)
    if family == "tiny":
        return noise * 4 * info.smallest_normal
    if family in ("huge", f"huge {spec.name}"):
        # float64 has no wider type for the reference: products of two fit, and sums of values
        most = 2.0 ** (1010 if spec.name == "value" else 490)
        return noise.tanh() * (most if case.dtype == torch.float64 else info.max)
    if family == "duplicated":
        for axis, letter in enumerate(spec.letters):
            if letter in "LSI":
                noise = noise.index_select(axis, torch.arange(case.N) // 2 * 2)
        return noise
    if family in ("zero", "constant"):
        return torch.full_like(noise, 0.0 if family == "zero" else 0.7)
    return noise
