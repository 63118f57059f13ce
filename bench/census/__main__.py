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
from census.report import lines_of, summary
from census.small_configs import model_types


def main() -> None:
    """Runs the census and prints it."""
    parser = argparse.ArgumentParser(description="Compares layers of every model type.")
    parser.add_argument("names", nargs="*", help="types of models; default: all")
    parser.add_argument("--debug", action="store_true", help="print why a part does not run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.debug:
        logging.basicConfig(level=logging.WARNING)
        logging.getLogger("census").setLevel(logging.DEBUG)
    outcomes = []
    for name in options.names or model_types():
        outcomes.append(examine(Case(name)))
        print("\n".join(lines_of(outcomes[-1])), flush=True)
    print("\n".join(summary(outcomes)))
    sys.exit(any(outcome.is_wrong for outcome in outcomes))


if __name__ == "__main__":
    main()
