"""Times every variant beside the same mathematics in plain torch and torch's own attention.

`attend` computes the output alone, in float32. The contenders of one length run alternately, so
that a slow moment of the machine affects all of them.

    python bench/speed.py [--quick] [--threads 1] [--device cpu] [--out FILE] [--json FILE]
        [--write]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from library_formulas import LIBRARY_FORMULAS
from malloc_settings import keep_freed_memory
from plain_torch import PLAIN_TORCH
from speed_figure import write_figure
from speed_tables import build_tables
from tables import RESULTS, Results, add_options, describe_machine, finish
from torch import Tensor

from qkv.attention.catalogue import variants
from qkv.attention.variant import Variant

PAGE: Final = RESULTS / "speed.md"
LENGTHS: Final = tuple(2**n for n in range(8, 17))
QUICK: Final = LENGTHS[:3]
SIZES: Final = {
    "B": 1,
    "H": 8,
    "G": 8,
    "J": 8,
    "V": 8,
    "D": 64,
    "E": 64,
    "I": 512,
    "O": 512,
    "R": 256,
}
OUTPUT_ONLY: Final = frozenset({"output"})
ALWAYS_CAUSAL: Final = frozenset({"gated"})  # other variants have a parameter for it, or are not
MAX_ROUNDS: Final = 200
SHORT_CALL_MS: Final = 20.0
MIN_ROUNDS: Final = 5

Call = Callable[[], Any]


def make_variant_tensors(variant: Variant, N: int, device: torch.device) -> dict[str, Tensor]:
    """Returns the tensors of a request by argument; N is the length, else the batch size."""
    letters = {letter for spec in variant.inputs.values() for letter in spec.letters}
    sizes = SIZES | dict.fromkeys("LSN" if "S" in letters else "B", N)
    generator, tensors = torch.Generator().manual_seed(0), {}
    for spec in variant.inputs.values():
        is_shared = "B" not in spec.letters  # weights and projections: included even if optional
        # numbers for each head are left out: they change the code path
        is_needed = spec.letters != ("H",) if is_shared else not spec.is_optional
        if "float32" in spec.dtypes and is_needed and not spec.broadcasts:
            tensor = torch.randn([sizes[a] for a in spec.letters], generator=generator)
            tensor = tensor / tensor.shape[-1] ** 0.5 if is_shared else tensor
            tensors[spec.argument] = tensor.to(device)
    return tensors


def build_contenders(N: int, causal: bool, device: torch.device) -> dict[tuple[str, str], Call]:
    """Returns calls by variant and contender: "qkv", "plain torch" or "library".

    For softmax, plain torch is torch's own attention. No library formula is causal.
    """
    calls: dict[tuple[str, str], Call] = {}
    for name, variant in variants().items():
        has_causal = "causal" in variant.parameters.model_fields
        if not has_causal and causal != (name in ALWAYS_CAUSAL):
            continue
        tensors = make_variant_tensors(variant, N, device)
        options = {"causal": causal} if has_causal else {}
        calls[name, "qkv"] = _bind(variant.attend, tensors, options | {"outputs": OUTPUT_ONLY})
        if name in PLAIN_TORCH:
            by_name = _by_wire_name(variant, tensors)
            calls[name, "plain torch"] = _bind(PLAIN_TORCH[name], by_name, options)
        if name in LIBRARY_FORMULAS and not causal:
            by_name = _by_wire_name(variant, tensors)
            calls[name, "library"] = _bind(LIBRARY_FORMULAS[name], by_name)
    return calls


def _by_wire_name(variant: Variant, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors by wire name instead of argument."""
    names = {spec.argument: name for name, spec in variant.inputs.items()}
    return {names[argument]: tensor for argument, tensor in tensors.items()}


def _bind(function: Callable[..., Any], *parts: dict[str, Any]) -> Call:
    arguments = {name: value for part in parts for name, value in part.items()}
    return lambda: function(**arguments)


def check(device: torch.device, N: int = QUICK[0]) -> None:
    """Asserts that all contenders equal the reference, up to the roundings of float32."""
    roundings = (8 + 2 * SIZES["D"] + max(N, SIZES["I"])) * torch.finfo(torch.float32).eps
    for causal in (False, True):
        references: dict[str, Tensor] = {}  # slow: one for all contenders
        for (name, contender), call in build_contenders(N, causal, device).items():
            variant, result = variants()[name], call()
            output = result if isinstance(result, Tensor) else result.output
            options = {"causal": causal} if "causal" in variant.parameters.model_fields else {}
            if name not in references:
                tensors = make_variant_tensors(variant, N, torch.device("cpu"))
                references[name] = variant.reference(**tensors, **options).output
            expected = references[name]
            bound = roundings * float(expected.abs().max())
            error = float((output.cpu() - expected).abs().max())
            assert error <= bound, (
                f"{name}, {contender}, causal {causal}: output is wrong: got error "
                f"{error:.3g}, expected <= {bound:.3g}"
            )


def time_in_rounds(
    calls: dict[tuple[str, str], Call], seconds_per_call: float, device: torch.device
) -> dict[tuple[str, str], list[float]]:
    """Returns the milliseconds of each call, in rounds over all calls.

    The time of all rounds is about `seconds_per_call` times the number of calls. Every second
    round runs backwards. Short calls run twice and the second one is timed. A call may still find
    data of the previous call in the caches.
    """

    def time_call(call: Call) -> float:
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        return (time.perf_counter() - start) * 1e3

    warm_up_ms = {key: min(time_call(call) for _ in range(2)) for key, call in calls.items()}
    rounds = int(seconds_per_call * 1e3 * len(calls) / sum(warm_up_ms.values()))
    rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, rounds))
    times_ms: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for i in range(rounds):
        for key, call in list(calls.items())[:: -1 if i % 2 else 1]:
            if warm_up_ms[key] < SHORT_CALL_MS:
                call()
            times_ms[key].append(time_call(call))
    return times_ms


def _wait(device: torch.device) -> None:
    """Waits until the device has no work left."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    lengths: tuple[int, ...], seconds_per_call: float, max_call_s: float, device: torch.device
) -> list[dict[str, Any]]:
    """Returns a row for each variant, contender, length and `causal`; times in milliseconds.

    A contender is skipped from the length on at which a call would take more than `max_call_s`.
    The estimate is the growth between the last two lengths.
    """
    rows = []
    for causal in (False, True):
        medians_ms: dict[tuple[str, str], list[float]] = {}
        for N in lengths:
            calls = {
                key: call
                for key, call in build_contenders(N, causal, device).items()
                if _estimate_next_ms(medians_ms.get(key, [])) <= max_call_s * 1e3
            }
            times_ms = time_in_rounds(calls, seconds_per_call, device)
            for (variant, contender), ms in times_ms.items():
                medians_ms.setdefault((variant, contender), []).append(statistics.median(ms))
                row = {"variant": variant, "contender": contender, "N": N, "causal": causal}
                rows.append(row | {"ms": ms})
            print(f"N={N}{', causal' if causal else ''}: {_summarize(times_ms)}", flush=True)
    return rows


def _estimate_next_ms(medians_ms: list[float]) -> float:
    """Estimates the milliseconds at twice the last length; 0 with fewer than two figures."""
    if len(medians_ms) < 2:
        return 0.0
    return medians_ms[-1] * max(1.0, medians_ms[-1] / medians_ms[-2])


def _summarize(times_ms: dict[tuple[str, str], list[float]]) -> str:
    parts = []
    for (name, contender), ms in times_ms.items():
        if contender == "qkv":
            parts.append(f"{name} {statistics.median(ms):.3g}")
            if (name, "plain torch") in times_ms:
                parts[-1] += f" ({statistics.median(times_ms[name, 'plain torch']):.3g})"
    return ", ".join(parts) + " ms, plain torch in brackets"


def main(arguments: Sequence[str] | None = None) -> None:
    """Checks the results of all contenders, measures, prints, and writes on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"lengths up to {QUICK[-1]} only")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of torch; default 1, as the service"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=1.0, help="per contender and length")
    parser.add_argument("--most", type=float, default=20.0, help="most seconds a call may take")
    parser.add_argument("--out", type=Path, help="write every single time to this file, as JSON")
    add_options(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # otherwise the call that needs new pages differs from run to run
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    header = describe_machine(
        device=f"{device.type} ({name}), {options.threads} threads",
        dtype="float32",
        sizes="B=1, H=8, D=E=64; B=N and I=O=512 for linear_layer, R=256 for linformer",
        rounds=f"{MAX_ROUNDS} in turn, fewer for calls above {options.seconds:g} s in total, "
        f"at least {MIN_ROUNDS}; no call of more than {options.most:g} s",
        warm_up="2 calls",
    )
    with torch.inference_mode():
        check(device)
        lengths = QUICK if options.quick else LENGTHS
        rows = measure(lengths, options.seconds, options.most, device)
    if options.out:
        options.out.write_text(json.dumps({"header": header, "rows": rows}))
    finish(Results("make speed", header, build_tables(rows)), PAGE, options)
    if options.write:
        write_figure(rows, PAGE.with_suffix(".svg"))


if __name__ == "__main__":
    main()
