"""Measures the error of every variant against its float64 reference, by length and inputs.

PYTHONPATH=tests python bench/accuracy.py [--seed 0] [--threads 2] [--json FILE] [--write]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from tables import DOCS, Cell, Results, Table, add_options, describe_machine, finish

from qkv.attention.catalogue import variants
from support.accuracy import LargestErrors, measure
from support.accuracy_cases import DTYPES, LENGTHS, Case, generate_cases

PAGE: Final = DOCS / "accuracy.md"
_DIGITS: Final = 2


def build_tables(results: Mapping[Case, LargestErrors]) -> list[Table]:
    """Returns the tables at the end of docs/accuracy.md."""
    rows: list[list[Cell]] = []
    for name in variants():
        for dtype in DTYPES:
            own = {c: e for c, e in results.items() if (c.variant.name, c.dtype) == (name, dtype)}
            worst = (*_find_worst(own, "output"), *_find_worst(own, "weights"))
            rows.append([f"`{name}`", str(dtype)[6:], *worst])
    columns = ["variant", "dtype", "output", "where", "weights", "where"]
    return [
        Table("by dtype", columns, rows, labels=2, digits=_DIGITS),
        _build_families(results, "output"),
        _build_families(results, "weights"),
    ]


def _find_worst(own: Mapping[Case, LargestErrors], tensor: str) -> list[Cell]:
    """Returns the largest error and its case."""
    worst = max(own, key=lambda case: float(getattr(own[case], tensor)))
    return [float(getattr(own[worst], tensor)), str(worst)]


def _build_families(results: Mapping[Case, LargestErrors], tensor: str) -> Table:
    """Returns the largest errors in float32 by family."""
    families = list(dict.fromkeys(case.family for case in results))
    largest: dict[tuple[str, str], float] = {}
    for case, errors in results.items():
        if case.dtype == torch.float32:
            key = case.variant.name, case.family
            largest[key] = max(largest.get(key, 0.0), float(getattr(errors, tensor)))
    rows = [[each, *(largest.get((name, each)) for name in variants())] for each in families]
    names = [name.replace("_", " ") for name in variants()]  # a header of two lines is narrower
    return Table(f"{tensor} by family", ["family", *names], rows, digits=_DIGITS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all cases; prints the tables and writes them on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="skip greater lengths")
    add_options(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    cases = generate_cases(lengths=[N for N in LENGTHS if N <= options.longest])
    results = {case: measure(case, options.seed).largest for case in cases}
    header = describe_machine(
        numpy=np.__version__,
        device=f"cpu, {options.threads} threads",
        seed=str(options.seed),
        requests=f"{len(results):,}",
    )
    finish(Results("make accuracy", header, build_tables(results)), PAGE, options)


if __name__ == "__main__":
    main()
