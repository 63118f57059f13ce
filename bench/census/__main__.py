"""Command: serves small models of every type of transformers, and compares their layers.

    PYTHONPATH=bench python -m census [--debug] [type ...]

It ends with status 1 if a layer is served with wrong numbers.
"""

from __future__ import annotations

import argparse
import logging
import sys

import torch

from census.census import Case, examine
from census.known_variants import variants_of
from census.report import lines_of, summary
from census.small_configs import model_types
from qkv.jobs.loaded.known_models import KNOWN


def main() -> None:
    """Runs the census and prints it."""
    parser = argparse.ArgumentParser(description="Compares layers of every model type.")
    parser.add_argument("names", nargs="*", help="types of models; default: all")
    parser.add_argument("--debug", action="store_true", help="print why a part does not run")
    parser.add_argument("--variants", action="store_true", help="variants of the known types")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.debug:
        logging.basicConfig(level=logging.WARNING)
        logging.getLogger("census").setLevel(logging.DEBUG)
    outcomes = []
    if options.variants:
        cases = [case for name in options.names or KNOWN for case in variants_of(name)]
    else:
        cases = [Case(name) for name in options.names or model_types()]
    for case in cases:
        outcomes.append(examine(case))
        print("\n".join(lines_of(outcomes[-1])), flush=True)
    print("\n".join(summary(outcomes)))
    sys.exit(any(outcome.is_wrong for outcome in outcomes))


if __name__ == "__main__":
    main()
