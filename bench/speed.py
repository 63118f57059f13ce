"""Times every variant beside the same mathematics in plain torch and torch's own attention.

`attend` computes the output alone, in float32. The contenders of one length run alternately, so
that a slow moment of the machine affects all of them.

    python bench/speed.py [--quick] [--threads 1] [--device cpu] [--out figures.json] [--write]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from library import LIBRARY
from memory import keep_freed
from plain import PLAIN
from speed_page import write
from torch import Tensor

import qkv
from qkv.attention.catalogue import variants
from qkv.attention.variant import Variant

LENGTHS: Final = tuple(2**n for n in range(8, 17))
QUICK: Final = LENGTHS[:3]
SIZES: Final = {"B": 1, "H": 8, "G": 8, "D": 64, "E": 64, "I": 512, "O": 512, "R": 256}
OUTPUT: Final = frozenset({"output"})
MOST_ROUNDS: Final = 200
SHORT_MS: Final = 20.0
LEAST_ROUNDS: Final = 5

Call = Callable[[], Any]


def tensors_of(variant: Variant, N: int, device: torch.device) -> dict[str, Tensor]:
    """Returns the tensors of a request by argument; N is the length, else the batch size."""
    letters = {letter for spec in variant.inputs.values() for letter in spec.letters}
    sizes = SIZES | dict.fromkeys("LSN" if "S" in letters else "B", N)
    generator, tensors = torch.Generator().manual_seed(0), {}
    for spec in variant.inputs.values():
        shared = "B" not in spec.letters  # weights and projections: included even if optional
        if "float32" in spec.dtypes and (shared or not spec.is_optional) and not spec.broadcasts:
            made = torch.randn([sizes[a] for a in spec.letters], generator=generator)
            made = made / made.shape[-1] ** 0.5 if shared else made
            tensors[spec.argument] = made.to(device)
    return tensors


def contenders(N: int, causal: bool, device: torch.device) -> dict[tuple[str, str], Call]:
    """Returns calls by variant and "ours", "plain" or "library".

    The plain form of softmax is torch's own attention. No form of a library is causal.
    """
    calls: dict[tuple[str, str], Call] = {}
    for name, variant in variants().items():
        takes = "causal" in variant.parameters.model_fields
        if causal and not takes:
            continue
        tensors = tensors_of(variant, N, device)
        options = {"causal": causal} if takes else {}
        calls[name, "ours"] = _bound(variant.attend, tensors, options | {"outputs": OUTPUT})
        if name in PLAIN:
            calls[name, "plain"] = _bound(PLAIN[name], _plainly(variant, tensors), options)
        if name in LIBRARY and not causal:
            calls[name, "library"] = _bound(LIBRARY[name], _plainly(variant, tensors))
    return calls


def _plainly(variant: Variant, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors by wire name instead of argument."""
    names = {spec.argument: name for name, spec in variant.inputs.items()}
    return {names[argument]: tensor for argument, tensor in tensors.items()}


def _bound(function: Callable[..., Any], *given: dict[str, Any]) -> Call:
    arguments = {name: value for part in given for name, value in part.items()}
    return lambda: function(**arguments)


def check(device: torch.device, N: int = QUICK[0]) -> None:
    """Asserts that all contenders equal the reference, up to the roundings of float32."""
    for name, variant in variants().items():
        takes = "causal" in variant.parameters.model_fields
        for causal in (False, True) if takes else (False,):
            tensors = tensors_of(variant, N, device)
            options = {"causal": causal} if takes else {}
            on_cpu = {argument: tensor.cpu() for argument, tensor in tensors.items()}
            truth = variant.module.reference(**on_cpu, **options).output
            found = {"ours": variant.attend(**tensors, **options, outputs=OUTPUT).output}
            if name in PLAIN:
                found["plain"] = PLAIN[name](**_plainly(variant, tensors), **options)
            if name in LIBRARY and not causal:
                found["library"] = LIBRARY[name](**_plainly(variant, tensors))
            roundings = 8 + 2 * SIZES["D"] + max(N, SIZES["I"])
            bound = roundings * torch.finfo(torch.float32).eps * float(truth.abs().max())
            for who, output in found.items():
                off = float((output.cpu() - truth).abs().max())
                assert off <= bound, f"{name}, {who}, causal {causal}: off by {off:.3g}"


def in_turn(
    calls: dict[tuple[str, str], Call], seconds: float, device: torch.device
) -> dict[tuple[str, str], list[float]]:
    """Returns the milliseconds of each call, in rounds over all calls.

    The time of all rounds is about `seconds` per call. Every second round runs backwards. Short
    calls run twice and the second one is timed. A call may still find data of the previous call in
    the caches.
    """

    def timed(call: Call) -> float:
        _wait(device)
        started = time.perf_counter()
        call()
        _wait(device)
        return (time.perf_counter() - started) * 1e3

    warm = {who: min(timed(call) for _ in range(2)) for who, call in calls.items()}
    rounds = int(seconds * 1e3 * len(calls) / sum(warm.values()))
    rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, rounds))
    times: dict[tuple[str, str], list[float]] = {who: [] for who in calls}
    for i in range(rounds):
        for who, call in list(calls.items())[:: -1 if i % 2 else 1]:
            if warm[who] < SHORT_MS:
                call()
            times[who].append(timed(call))
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    lengths: tuple[int, ...], seconds: float, most: float, device: torch.device
) -> list[dict[str, Any]]:
    """Returns a row for each variant, contender, length and `causal`; times in milliseconds.

    A contender is skipped from the length on at which a call would take more than `most` seconds.
    The estimate is the growth between the last two lengths.
    """
    rows = []
    for causal in (False, True):
        last: dict[tuple[str, str], list[float]] = {}
        for N in lengths:
            calls = {
                who: call
                for who, call in contenders(N, causal, device).items()
                if _next(last.get(who, [])) <= most * 1e3
            }
            times = in_turn(calls, seconds, device)
            for (variant, who), values in times.items():
                last.setdefault((variant, who), []).append(statistics.median(values))
                rows.append(
                    {"variant": variant, "who": who, "N": N, "causal": causal, "ms": values}
                )
            print(f"N={N}{', causal' if causal else ''}: {_said(times)}", flush=True)
    return rows


def _next(medians: list[float]) -> float:
    """Estimates the milliseconds at twice the last length; 0 with fewer than two figures."""
    if len(medians) < 2:
        return 0.0
    return medians[-1] * max(1.0, medians[-1] / medians[-2])


def _said(times: dict[tuple[str, str], list[float]]) -> str:
    parts = []
    for (name, who), values in times.items():
        if who == "ours":
            parts.append(f"{name} {statistics.median(values):.3g}")
            if (name, "plain") in times:
                parts[-1] += f" ({statistics.median(times[name, 'plain']):.3g})"
    return ", ".join(parts) + " ms, plain torch in brackets"


def main() -> None:
    """Checks the results of all contenders, measures, prints, and writes on request."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"lengths up to {QUICK[-1]} only")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of torch; default 1, as the service"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=1.0, help="per contender and length")
    parser.add_argument("--most", type=float, default=20.0, help="seconds a call may take")
    parser.add_argument("--out", type=Path, help="all times, as JSON")
    parser.add_argument("--write", action="store_true", help="write docs/speed.md and .svg")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    keep_freed()  # otherwise it varies which call needs new pages
    device = torch.device(given.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    about = (
        f"qkv {qkv.__version__}, torch {torch.__version__}, Python {platform.python_version()}; "
        f"{device.type} ({name}), {given.threads} threads; float32, B=1, H=8, D=E=64 "
        f"(linear_layer: B=N, I=O=512; linformer: R=256). {MOST_ROUNDS} rounds in turn; fewer, at "
        f"least {LEAST_ROUNDS}, for a form that takes longer than {given.seconds:g} s in total. "
        f"2 warm-up calls; no call of more than {given.most:g} s."
    )
    print(about)
    with torch.inference_mode():
        check(device)
        rows = measure(QUICK if given.quick else LENGTHS, given.seconds, given.most, device)
    if given.out:
        given.out.write_text(json.dumps({"about": about, "rows": rows}))
    if given.write:
        write(about, rows)


if __name__ == "__main__":
    main()
