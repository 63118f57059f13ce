"""Cases of the harness of errors: every variant, with families of inputs that lose digits."""

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
INPUT_FAMILIES: Final = ("random", "tiny", "huge", "opposed", "duplicated", "zero", "constant")

SIZES: Final = {"B": 2, "H": 2, "G": 1, "J": 2, "V": 1, "D": 8, "E": 4, "O": 4}
LONG_LENGTH: Final = 1024  # from this length on, one item and one head


class Case(NamedTuple):
    """One call with N tokens; `causal` is None if the variant has no such parameter."""

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


def generate_cases(
    dtypes: Iterable[torch.dtype] = DTYPES, lengths: Iterable[int] = LENGTHS
) -> Iterator[Case]:
    """Yields every variant with all families that apply to its inputs."""
    for variant in variants().values():
        names = [s.name for s in variant.inputs.values() if _is_required_float(s)]
        families = [f for f in INPUT_FAMILIES if f != "opposed" or {"query", "key"} <= set(names)]
        families += [f"huge {name}" for name in names] if len(names) > 1 else []
        for dtype in dtypes:
            for N in lengths:
                for family in families:
                    for causal in (False, True) if _has_causal(variant) else (None,):
                        yield Case(variant, dtype, family, N, causal)


def _is_required_float(spec: Any) -> bool:
    return not spec.is_optional and "float32" in spec.dtypes


def _has_causal(variant: Variant) -> bool:
    return "causal" in variant.parameters.model_fields


def make_inputs(case: Case, seed: int) -> dict[str, Tensor]:
    """Returns the tensors of a case by argument, rounded to its dtype.

    At odd lengths, variants with `key_lengths` get them, and NaN in the padding.
    """
    generator = torch.Generator().manual_seed(seed * 100_003 + case.N)
    sizes = SIZES | dict.fromkeys("LSI", case.N)
    if case.N >= LONG_LENGTH:
        sizes |= dict.fromkeys("BHGJV", 1)
    direction = torch.randn(sizes["D"], generator=generator, dtype=torch.float64)
    tensors = {}
    for spec in _required_floats(case):
        shape = [fixed_size(a) or sizes[a] for a in spec.letters]
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
        if case.family == "opposed" and spec.name in ("query", "key"):
            numbers = _align(direction, numbers, generator, is_opposite=spec.name == "key")
        else:
            numbers = _apply_family(numbers, spec, case)
        tensors[spec.argument] = numbers.clamp(*_finite_range(case.dtype)).to(case.dtype)
    if "key_lengths" in case.variant.inputs and case.N % 2 and case.N < LONG_LENGTH:
        lengths = torch.tensor([case.N, case.N // 2])
        tensors[case.variant.inputs["key_lengths"].argument] = lengths
        for spec in _required_floats(case):
            if spec.letters[0] == "B" and "S" in spec.letters:
                tensors[spec.argument][1, :, int(lengths[1]) :] = torch.nan
    return tensors


def _required_floats(case: Case) -> list[Any]:
    """Returns the floating tensors that a request must have."""
    return [spec for spec in case.variant.inputs.values() if _is_required_float(spec)]


def _finite_range(dtype: torch.dtype) -> tuple[float, float]:
    return torch.finfo(dtype).min, torch.finfo(dtype).max


def _align(
    direction_D: Tensor, noise: Tensor, generator: torch.Generator, is_opposite: bool
) -> Tensor:
    """Returns a direction times powers of two.

    With `is_opposite`, the direction is the opposite one, except for angles of 1e-6 to 0.1.
    """
    rows = (*noise.shape[:-1], 1)
    powers = 2.0 ** torch.randint(-3, 4, rows, generator=generator).double()
    if not is_opposite:
        return direction_D * powers
    angles = 10 ** (torch.rand(rows, generator=generator).double() * 5 - 6)
    return -(direction_D + angles * noise) * powers


def _apply_family(noise: Tensor, spec: Any, case: Case) -> Tensor:
    family, info = case.family, torch.finfo(case.dtype)
    if family == "tiny":
        return noise * 4 * info.smallest_normal
    if family in ("huge", f"huge {spec.name}"):
        # float64 has no wider type for the reference: products of two fit, and sums of values
        largest = 2.0 ** (1010 if spec.name == "value" else 490)
        return noise.tanh() * (largest if case.dtype == torch.float64 else info.max)
    if family == "duplicated":
        for axis, letter in enumerate(spec.letters):
            if letter in "LSI":
                noise = noise.index_select(axis, torch.arange(case.N) // 2 * 2)
        return noise
    if family in ("zero", "constant"):
        return torch.full_like(noise, 0.0 if family == "zero" else 0.7)
    return noise
