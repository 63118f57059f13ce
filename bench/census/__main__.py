"""Command: serves small models of every type of transformers, and compares their layers.

    PYTHONPATH=bench python -m census [--described] [--variants] [--write] [--debug]
        [--minutes N] [type ...]

With --described, the models are described by `qkv describe` instead. Each model has two minutes
and 6 GiB. The outcomes of all types are kept in `.census`: a run that was interrupted goes on with
the rest, as long as the sources are the same. The order is drawn from a seed, so that those of a
run that has ended early are a fair sample.

It ends with status 1 if a layer is served with wrong numbers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from tables import RESULTS, Results, Table, describe_machine, write_page

from census import known_fields
from census.bounded_runs import BoundedRuns
from census.census import Case, DescribedOutcome, Outcome, examine, examine_described
from census.known_variants import variants_of
from census.report import (
    lines_of,
    lines_of_described,
    summary,
    table_of_described,
    table_of_kinds,
    table_of_served,
)
from census.small_configs import model_types
from qkv.jobs.loaded.known_models import KNOWN

PAGE: Final = RESULTS / "census.md"
_KEPT: Final = RESULTS.parents[1] / ".census"
_SEED: Final = 64
_FIRST: Final = Case("llama")
"""Examined before the processes of all others, which share its imports: 0.3 s, not 0.6 s each."""


def run(cases: Sequence[Case], file: Path | None, minutes: float) -> list[Outcome]:
    """Examines models and prints what becomes of each."""
    examine(_FIRST)
    outcomes = []
    for outcome in BoundedRuns(examine, Outcome, file).run(cases, minutes):
        outcomes.append(outcome)
        print("\n".join(lines_of(outcome)), flush=True)
    print("\n".join(summary(outcomes)))
    return outcomes


def run_described(
    cases: Sequence[Case], file: Path | None, minutes: float
) -> list[DescribedOutcome]:
    """Describes models and prints what becomes of each."""
    examine_described(_FIRST)
    outcomes = []
    for outcome in BoundedRuns(examine_described, DescribedOutcome, file).run(cases, minutes):
        outcomes.append(outcome)
        print("\n".join(lines_of_described(outcome)), flush=True)
    return outcomes


def write(tables: Sequence[Table]) -> None:
    """Writes tables of all types into the page."""
    versions = {"transformers": importlib.metadata.version("transformers")}
    header = describe_machine(dtype="float32, cpu", **versions, date=time.strftime("%Y-%m-%d"))
    write_page(PAGE, Results("make census", header, tables))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the census and prints it."""
    parser = argparse.ArgumentParser(description="Compares layers of every model type.")
    parser.add_argument("names", nargs="*", help="types of models; default: all")
    parser.add_argument("--variants", action="store_true", help="also variants of known types")
    parser.add_argument("--write", action="store_true", help="write the page and the known fields")
    parser.add_argument("--described", action="store_true", help="describe the models")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="after which no other model begins"
    )
    parser.add_argument("--debug", action="store_true", help="print why a part does not run")
    options = parser.parse_args(arguments)
    if options.write and options.names:
        parser.error("--write needs all types")
    if options.debug:
        logging.basicConfig(level=logging.WARNING)
        logging.getLogger("census").setLevel(logging.DEBUG)
    torch.set_num_threads(1)
    names = options.names or model_types()
    if not options.names:
        random.Random(_SEED).shuffle(names)
    cases = [Case(name) for name in names]
    if options.described:
        kept = None if options.names else _KEPT / "described.jsonl"
        described = run_described(cases, kept, options.minutes)
        table = table_of_described(described, len(names))
        print(table.note)
        if options.write:
            write([table])
        sys.exit(any(outcome.is_wrong for outcome in described))
    if options.write:
        known_fields.FILE.write_text(known_fields.as_text())
    kept = None if options.names else _KEPT / "served.jsonl"
    outcomes = run(cases, kept, options.minutes)
    if options.write:
        write([table_of_kinds(outcomes), table_of_served(outcomes)])
    if options.variants:
        known = [name for name in options.names or KNOWN if name in KNOWN]
        outcomes += run([c for name in known for c in variants_of(name)], kept, options.minutes)
    sys.exit(any(outcome.is_wrong for outcome in outcomes))


if __name__ == "__main__":
    main()
