"""Measures an accelerator in five minutes: tests, bits, rates, copies, waits and out of memory.

    PYTHONPATH=tests python bench/on_gpu.py [--quick] [--no-tests] [--json FILE] [--write]

It exits with status 2 if torch finds no accelerator.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

import torch
from bodies import SHAPES
from gpu_batches import measure_bits, measure_overlap, measure_waits
from gpu_engine import IN_FLIGHT, WARM_UP_S, measure_out_of_memory, measure_rates
from gpu_tables import GpuResults, SuiteResult, build_tables
from tables import RESULTS, Results, add_options, describe_machine, finish

from qkv.engine.device.accelerator import Accelerator
from qkv.engine.device.selection import find_device, new_device
from qkv.engine.engine import GPU_MAX_BATCH
from qkv.tensors import FLOATING

PAGE: Final = RESULTS / "gpu.md"
NO_ACCELERATOR: Final = "bench/on_gpu.py needs an accelerator, and torch finds none."

T = TypeVar("T")


class Plan(NamedTuple):
    """Cells to measure.

    Attributes:
        seconds: of one try of a rate.
        tries: of rates and overlaps.
        shapes: keys of `SHAPES`.
        rate_dtypes: dtypes of the rates.
        bits_batches: sizes of batches whose bits are compared, by key of `SHAPES`.
        bits_dtypes: dtypes of these batches.
        overlap_batches: sizes of batches that overlap, by key of `SHAPES`.
    """

    seconds: float = 0.5
    tries: int = 5
    shapes: Sequence[str] = tuple(SHAPES)
    rate_dtypes: Sequence[str] = ("float32", "float16")
    bits_batches: Mapping[str, Sequence[int]] = MappingProxyType(
        {"S": (2, 3, 8, 33), "M": (2, 3, 8, 33), "L": (2, 3)}
    )
    bits_dtypes: Sequence[str] = FLOATING
    overlap_batches: Mapping[str, int] = MappingProxyType({"S": 64, "M": 64, "L": 16})


QUICK: Final = Plan(
    0.05, 2, ("S",), ("float32",), {"S": (2, 3)}, ("float32",), {"S": 8}
)  # a few seconds


def measure(device: Accelerator, plan: Plan) -> GpuResults:
    """Measures everything but the tests, and prints the seconds of each part."""
    bits = _timed("bits", lambda: list(measure_bits(device, plan.bits_batches, plan.bits_dtypes)))
    rates = _timed(
        "requests per second",
        lambda: [
            measure_rates(device, shape, dtype, plan.seconds, plan.tries)
            for shape in plan.shapes
            for dtype in plan.rate_dtypes
        ],
    )
    overlaps = _timed(
        "copies",
        lambda: [
            measure_overlap(device, shape, size, tries=plan.tries)
            for shape, size in plan.overlap_batches.items()
        ],
    )
    waits = _timed("waits", lambda: list(measure_waits(device)))
    memory = _timed("out of memory", lambda: measure_out_of_memory(device))
    return GpuResults(None, bits, rates, overlaps, waits, memory)


def _timed(name: str, work: Callable[[], T]) -> T:
    """Returns the result of `work`, and prints its seconds."""
    started_at = time.monotonic()
    result = work()
    print(f"{name}: {time.monotonic() - started_at:.0f} s", file=sys.stderr, flush=True)
    return result


def run_tests(*arguments: str) -> SuiteResult:
    """Runs the tests marked `gpu` in a process of its own.

    Args:
        arguments: further arguments of pytest.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}"]
        done = subprocess.run(
            [*command, *arguments],
            cwd=RESULTS.parents[1],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode not in (0, 1):  # 1: tests failed
            return SuiteResult(0, 1, 0, [f"pytest ended with status {done.returncode}"])
        result = read_report(report.read_text())
    if result.failed:
        print(done.stdout, file=sys.stderr)
    return result


def read_report(report: str) -> SuiteResult:
    """Returns the counts of a report in JUnit's XML."""
    cases = list(ET.fromstring(report).iter("testcase"))
    failures = [
        f"{case.get('classname')}.{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum([case.find("skipped") is not None for case in cases])
    return SuiteResult(len(cases) - len(failures) - skipped, len(failures), skipped, failures)


def describe(device: Accelerator, plan: Plan) -> dict[str, str]:
    """Returns the device, the versions, the shapes and the warm-up."""
    where = device.torch_device
    named = getattr(torch.get_device_module(where), "get_device_name", None)
    name = f" ({named(where)})" if named else ""
    return describe_machine(
        device=f"{where}{name}, {device.free_memory()[1] / 2**30:,.1f} GiB",
        shapes=", ".join(f"{letter} {SHAPES[letter]}" for letter in plan.shapes),
        rates=f"of softmax, {plan.tries} tries of {plan.seconds:g} s",
        warm_up=f"{WARM_UP_S:g} s",
        requests=f"{IN_FLIGHT} in flight, at most {GPU_MAX_BATCH} in a batch",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the tables, and writes them on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="measure few cells for a moment")
    parser.add_argument("--no-tests", action="store_true", help="leave out the tests")
    add_options(parser)
    options = parser.parse_args(arguments)
    device = new_device(find_device("auto"))
    if not isinstance(device, Accelerator):
        print(NO_ACCELERATOR, file=sys.stderr)
        sys.exit(2)
    plan = QUICK if options.quick else Plan()
    # first, because the memory of this process is then empty
    tests = None if options.no_tests else _timed("tests", run_tests)
    tables = build_tables(measure(device, plan)._replace(tests=tests))
    finish(Results("make gpu", describe(device, plan), tables), PAGE, options)
    sys.exit(1 if tests is not None and tests.failed else 0)


if __name__ == "__main__":
    main()
