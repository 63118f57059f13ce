"""Command: the census of all model types, or of some."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter

import torch
from census.census import Case, examine
from census.small_configs import model_types


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--debug", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.debug:
        logging.basicConfig(level=logging.WARNING)
        logging.getLogger("census").setLevel(logging.DEBUG)
    kinds: Counter[str] = Counter()
    for name in options.names or model_types():
        started = time.perf_counter()
        outcome = examine(Case(name))
        kinds[outcome.kind] += 1
        print(f"{outcome.kind:10} {name:30} {outcome.problem[:300]}  {time.perf_counter()-started:.1f} s")
        for v in outcome.verdicts:
            kinds[v.kind] += 1
            print(f"    {v.kind:8} {v.layer} {v.error} {v.detail}")
        if outcome.answered is not None:
            print("    answered:", " ".join(outcome.answered.text.split("\n"))[:200], outcome.answered.problem[:200])
            for v in outcome.answered.verdicts:
                kinds["answered " + v.kind] += 1
                print(f"    answered {v.kind:8} {v.layer} {v.error} {v.detail}")
        sys.stdout.flush()
    print(kinds)


if __name__ == "__main__":
    main()
