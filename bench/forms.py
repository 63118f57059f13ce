"""Measures time and memory of each weight form beside one call of attention.

    python bench/forms.py [--length 8192] [--threads 2] [--device cpu] [--causal] [variant ...]

Prints a table with a row per variant. After a warm-up at length 512, each call runs once. Calls of
less than a second run three times, and the median counts.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from speed import OUTPUT, SIZES, tensors_of
from torch.nn.functional import scaled_dot_product_attention

import qkv
from qkv.attention.catalogue import variants
from qkv.attention.variant import Variant
from qkv.engine import weight_blocks
from qkv.jobs.weight_forms import WeightForm

QUICK_S: Final = 1.0
STATUS: Final = Path("/proc/self/status")


def forms_of(N: int) -> dict[str, WeightForm]:
    """Returns the weight forms; the 16 rows are spread over the length."""
    rows = tuple(range(0, N, max(1, N // 16)))
    return {
        "rows (16)": WeightForm("rows", rows=rows),
        "pool (64)": WeightForm("pool", 64),
        "stats": WeightForm("stats"),
        "top_k (8)": WeightForm("top_k", 8),
    }


def status(field: str) -> int:
    """Returns bytes from /proc/self/status: the resident size (VmRSS) or its peak (VmHWM)."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def timed(call: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Returns the seconds of a call, and the MiB by which the process grows at most."""
    if device.type == "cpu":
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS:")
    times: list[float] = []
    while len(times) < 3 and sum(times) < QUICK_S:
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times), (status("VmHWM:") - before) / 2**20


def measured(variant: Variant, N: int, causal: bool, device: torch.device) -> list[str]:
    """Returns the cells of a row: the variant's call, then time, ratios and memory of each form."""
    tensors = tensors_of(variant, N, device)
    parameters = variant.parse({"causal": causal} if "causal" not in variant.refuses else {})
    names = type(parameters).model_fields
    arguments = tensors | {name: getattr(parameters, name) for name in names}
    sizes = SIZES | {"L": N, "S": N, "N": N}
    query, key, value = torch.randn(3, 1, SIZES["H"], N, SIZES["D"], device=device)
    sdpa, _ = timed(
        lambda: scaled_dot_product_attention(query, key, value, is_causal=causal), device
    )
    del query, key, value
    own, _ = timed(lambda: variant.attend(**arguments, outputs=OUTPUT), device)
    cells = [f"{sdpa:.3g}", f"{own:.3g}"]
    for form in forms_of(N).values():
        compute = partial(
            weight_blocks.compute_weight_form, variant, form, arguments, parameters, sizes
        )
        took, mib = timed(compute, device)
        cells.append(f"{took:.3g}: {took / sdpa:.2g} / {took / own:.2g}; {mib:.0f} MiB")
    return cells


def main() -> None:
    """Measures and prints the table."""
    squares = [name for name, v in variants().items() if "S" in v.outputs["weights"].letters]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("variant", nargs="*", default=squares)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--causal", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    print(
        f"qkv {qkv.__version__}, torch {torch.__version__}, Python {platform.python_version()}; "
        f"{device} ({platform.machine()}), {given.threads} threads; float32, B=1, H={SIZES['H']}, "
        f"D={SIZES['D']}, N={given.length}, causal={given.causal}; warm-up at 512"
    )
    heads = ["variant", "SDPA, s", "own call, s", *forms_of(16)]
    print(f"| {' | '.join(heads)} |\n| --- |{' ---: |' * (len(heads) - 1)}")
    with torch.inference_mode():
        for name in given.variant:
            measured(variants()[name], 512, given.causal, device)
            cells = measured(variants()[name], given.length, given.causal, device)
            print(f"| `{name}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
