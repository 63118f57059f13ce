"""Tests of bench/accuracy.py, and of every variant against the error bounds of docs/accuracy.md."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import accuracy
import families
import pytest
import torch
from torch import Tensor

from qkv.attention.catalogue import variants
from qkv.attention.variant import Variant

LENGTHS: Final = (1, 2, 7, 17, 65)  # 1, and both sides of a vector's width and of a chunk
PAGE: Final = accuracy.PAGE.read_text()

every_variant = pytest.mark.parametrize("variant", variants().values(), ids=lambda v: v.name)
every_dtype = pytest.mark.parametrize("dtype", families.DTYPES, ids=str)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # so small tensors are slower on more threads
    yield
    torch.set_num_threads(before)


def excess(found: accuracy.Found, seed: int, name: str) -> Tensor:
    """Returns the error of each entry minus its bound; docs/accuracy.md defines the bound."""
    case, unit = found.case, found.units[name]
    scale = unit / torch.finfo(case.dtype if name == "output" else accuracy.exact(case.dtype)).eps
    tensors = families.inputs(case, seed).values()
    numbers = [x.double().nan_to_num(0.0).abs().max() for x in tensors if x.is_floating_point()]
    logarithm = math.log(max(1.0, *map(float, numbers)))
    roundings = 8 + 2 * families.SIZES["D"] + case.N + logarithm
    held = torch.finfo(accuracy.exact(case.dtype)).eps * scale
    cancelled = getattr(case.variant.module, "_CANCELLED", 1.0)
    sums = torch.finfo(torch.float64).eps / cancelled * scale
    past = found.errors[name] - unit - roundings * (held + sums)
    if (past > 0).any():  # ill-conditioned inputs; computed only here, because it is slow
        past -= roundings * accuracy.moved(case, seed)[name]
    return past


@pytest.mark.slow
@every_dtype
@every_variant
def test_errors_are_within_their_bounds(variant: Variant, dtype: torch.dtype) -> None:
    every = [c for c in families.cases([dtype], LENGTHS) if c.variant is variant]
    assert {c.N for c in every} == set(LENGTHS)
    judged = False
    for case in every:
        found = accuracy.measure(case, seed=1)
        assert all(e.isfinite().all() for e in found.errors.values()), case
        judged |= bool(found.errors["output"].any())
        for name in found.errors:
            assert (excess(found, 1, name) <= 0).all(), f"{case}: {name}, {found.figure}"
    assert judged  # at least one error is not 0, so something was compared


@every_dtype
def test_harness_measures_wrong_results(dtype: torch.dtype) -> None:
    """An error of 1000 eps measures as 1000 eps, and NaN as infinite."""
    right = next(iter(variants().values()))

    def wrong(factor: float) -> families.Case:
        def attend(**given: Any) -> Any:
            answer = right.attend(**given)
            return answer._replace(
                output=answer.output.double() * factor, weights=answer.weights.double() * factor
            )

        module = SimpleNamespace(**{**vars(right.module), "attend": attend})
        variant = dataclasses.replace(right, module=typing.cast("ModuleType", module))
        return families.Case(variant, dtype, "constant", 7, None)

    off = accuracy.measure(wrong(1 + 1000 * torch.finfo(torch.float64).eps), 1)
    if dtype == torch.float64:
        assert off.figure.output == pytest.approx(1000, abs=30)
        assert off.figure.weights == pytest.approx(1000, abs=30)
        assert (excess(off, 1, "output") > 0).any()
    assert accuracy.measure(wrong(math.nan), 1).figure[:2] == (math.inf, math.inf)


def test_page_has_every_variant_and_dtype() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ((?:b?float)\d+) \| (.*) \|$", PAGE, re.MULTILINE)
    there = {(name, dtype) for name, dtype, _ in rows}
    assert there == {(name, str(dtype)[6:]) for name in variants() for dtype in families.DTYPES}
    assert not [row for row in rows if re.search(r"\b(nan|inf)\b", row[2])]
    for N in families.LENGTHS:
        assert f"{N:,}" in PAGE.partition(accuracy.MARK)[0], N
