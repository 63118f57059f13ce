"""Errors of every variant are within the bounds of docs/accuracy.md, and bench/accuracy.py runs."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import accuracy as bench_accuracy
import pytest
import torch
from tables import read_results
from torch import Tensor

from qkv.attention.catalogue import variants
from qkv.attention.variant import Variant
from support import accuracy, accuracy_cases
from support.paths import ROOT

LENGTHS: Final = (1, 2, 7, 17, 65)  # 1, and both sides of a vector's width and of a chunk
PAGE: Final = (ROOT / "docs/accuracy.md").read_text()

each_variant = pytest.mark.parametrize("variant", variants().values(), ids=lambda v: v.name)
each_dtype = pytest.mark.parametrize("dtype", accuracy_cases.DTYPES, ids=str)


def compute_excess(result: accuracy.CaseErrors, seed: int, name: str) -> Tensor:
    """Returns the error of each entry minus its bound; docs/accuracy.md defines the bound."""
    case, unit = result.case, result.units[name]
    weights_dtype = accuracy.weights_dtype_of(case.dtype)
    scale = unit / torch.finfo(case.dtype if name == "output" else weights_dtype).eps
    tensors = accuracy_cases.make_inputs(case, seed).values()
    numbers = [x.double().nan_to_num(0.0).abs().max() for x in tensors if x.is_floating_point()]
    logarithm = math.log(max(1.0, *map(float, numbers)))
    roundings = 8 + 2 * accuracy_cases.SIZES["D"] + case.N + logarithm
    weights_rounding = torch.finfo(weights_dtype).eps * scale
    cancelled = getattr(case.variant.module, "_CANCELLED", 1.0)
    sums = torch.finfo(torch.float64).eps / cancelled * scale
    excess = result.errors[name] - unit - roundings * (weights_rounding + sums)
    if (excess > 0).any():  # ill-conditioned inputs; computed only here, because it is slow
        excess -= roundings * accuracy.measure_sensitivity(case, seed)[name]
    return excess


@pytest.mark.slow
@each_dtype
@each_variant
def test_errors_are_within_their_bounds(variant: Variant, dtype: torch.dtype) -> None:
    cases = [c for c in accuracy_cases.generate_cases([dtype], LENGTHS) if c.variant is variant]
    assert {c.N for c in cases} == set(LENGTHS)
    has_errors = False
    for case in cases:
        result = accuracy.measure(case, seed=1)
        assert all(e.isfinite().all() for e in result.errors.values()), case
        has_errors |= bool(result.errors["output"].any())
        for name in result.errors:
            assert (compute_excess(result, 1, name) <= 0).all(), f"{case}: {name}, {result.largest}"
    assert has_errors  # at least one error is not 0, so something was compared


@each_dtype
def test_harness_measures_errors_of_wrong_results(dtype: torch.dtype) -> None:
    """An error of 1000 eps measures as 1000 eps, and NaN as infinite."""
    correct = next(iter(variants().values()))

    def build_wrong_case(factor: float) -> accuracy_cases.Case:
        def attend(call: Any, outputs: frozenset[str]) -> Any:
            result = correct.module.attend(call, outputs)
            return result._replace(
                output=result.output.double() * factor, weights=result.weights.double() * factor
            )

        module = SimpleNamespace(**{**vars(correct.module), "attend": attend})
        variant = dataclasses.replace(correct, module=typing.cast("ModuleType", module))
        return accuracy_cases.Case(variant, dtype, "constant", 7, None)

    result = accuracy.measure(build_wrong_case(1 + 1000 * torch.finfo(torch.float64).eps), 1)
    if dtype == torch.float64:
        assert result.largest.output == pytest.approx(1000, abs=30)
        assert result.largest.weights == pytest.approx(1000, abs=30)
        assert (compute_excess(result, 1, "output") > 0).any()
    assert accuracy.measure(build_wrong_case(math.nan), 1).largest == (math.inf, math.inf)


def test_page_has_each_variant_and_dtype() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ((?:b?float)\d+) \| (.*) \|$", PAGE, re.MULTILINE)
    listed = {(name, dtype) for name, dtype, _ in rows}
    assert listed == {
        (name, str(dtype)[6:]) for name in variants() for dtype in accuracy_cases.DTYPES
    }
    assert not [row for row in rows if re.search(r"\b(nan|inf)\b", row[2])]
    for N in accuracy_cases.LENGTHS:
        assert f"{N:,}" in PAGE.partition("<!-- made by")[0], N


@pytest.mark.slow
def test_command_measures_every_variant_and_has_its_places_in_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, file = tmp_path / "accuracy.md", tmp_path / "results.json"
    page.write_text(PAGE)
    monkeypatch.setattr(bench_accuracy, "PAGE", page)
    threads = torch.get_num_threads()
    bench_accuracy.main(["--longest", "1", "--threads", "1", "--json", str(file), "--write"])
    torch.set_num_threads(threads)
    tables = read_results(file).tables
    by_dtype = len(variants()) * len(accuracy_cases.DTYPES)
    assert len(tables[0].rows) == by_dtype
    assert [len(table.columns) for table in tables[1:]] == [1 + len(variants())] * 2
    assert all(f"{table.markdown}\n" in page.read_text() for table in tables)
