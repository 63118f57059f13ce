"""Measures the time of each weight form beside one call of attention.

    python bench/weight_form_cost.py [--length 8192] [--threads 2] [--device cpu] [--causal]
        [variant ...]

Prints a table with a row per variant. After a warm-up at length 512, each call runs once. Calls of
less than a second run three times; the table has their median.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from speed import OUTPUT_ONLY, SIZES, make_variant_tensors
from tables import RESULTS, Cell, Results, Table, add_options, describe_machine, finish
from torch.nn.functional import scaled_dot_product_attention

from qkv.attention.catalogue import variants
from qkv.attention.variant import Variant
from qkv.engine import weight_blocks
from qkv.jobs.weight_forms import WeightForm

COMMAND: Final = "python bench/weight_form_cost.py"
SHORT_CALL_S: Final = 1.0


def build_weight_forms(N: int) -> dict[str, WeightForm]:
    """Returns the weight forms; the 16 rows are spread over the length."""
    rows = tuple(range(0, N, max(1, N // 16)))
    return {
        "16 rows": WeightForm("rows", rows=rows),
        "pool of 64": WeightForm("pool", 64),
        "stats": WeightForm("stats"),
        "top 8": WeightForm("top_k", 8),
    }


def measure_call(call: Callable[[], Any], device: torch.device) -> float:
    """Returns the seconds of a call."""
    times: list[float] = []
    while len(times) < 3 and sum(times) < SHORT_CALL_S:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_row(variant: Variant, N: int, causal: bool, device: torch.device) -> list[Cell]:
    """Returns the cells of a row: both calls, then two ratios of each form."""
    tensors = make_variant_tensors(variant, N, device)
    parameters = variant.parse({"causal": causal} if "causal" not in variant.refuses else {})
    names = type(parameters).model_fields
    arguments = tensors | {name: getattr(parameters, name) for name in names}
    sizes = SIZES | {"L": N, "S": N, "N": N}
    query, key, value = torch.randn(3, 1, SIZES["H"], N, SIZES["D"], device=device)
    sdpa_s = measure_call(
        lambda: scaled_dot_product_attention(query, key, value, is_causal=causal), device
    )
    del query, key, value
    variant_s = measure_call(lambda: variant.attend(**arguments, outputs=OUTPUT_ONLY), device)
    cells: list[Cell] = [sdpa_s, variant_s]
    for form in build_weight_forms(N).values():
        compute = partial(
            weight_blocks.compute_weight_form, variant, form, arguments, parameters, sizes
        )
        form_s = measure_call(compute, device)
        cells.append(f"{form_s / sdpa_s:.2g} / {form_s / variant_s:.2g}")
    return cells


def main() -> None:
    """Measures and prints the table."""
    with_map = [name for name, v in variants().items() if "S" in v.outputs["weights"].letters]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("variant", nargs="*", default=with_map)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--causal", action="store_true")
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    N, causal, device = options.length, options.causal, torch.device(options.device)
    header = describe_machine(
        device=f"{device}, {options.threads} threads",
        dtype="float32",
        shape=f"(1, {SIZES['H']}, {N}, {SIZES['D']}), causal={causal}",
        warm_up="at length 512",
    )
    columns = ["variant", "SDPA, s", "own call, s", *build_weight_forms(16)]
    rows: list[list[Cell]] = []
    with torch.inference_mode():
        for name in options.variant:
            measure_row(variants()[name], 512, causal, device)
            rows.append([f"`{name}`", *measure_row(variants()[name], N, causal, device)])
    results = Results(COMMAND, header, [Table("forms of the weights", columns, rows)])
    finish(results, RESULTS / "requests.md", options)


if __name__ == "__main__":
    main()
