"""Events of a sweep of two variants at two lengths."""

from __future__ import annotations

from typing import Any, Final

from support.scripted_server import encode_event, event_reply


def cell(index: int, variant: str, length: int, median_ms: float = 1.0) -> dict[str, Any]:
    return {
        "index": index, "variant": variant, "parameters": {}, "length": length,
        "median_ms": median_ms, "least_ms": median_ms / 2, "most_ms": median_ms * 2, "repeats": 5,
        "flops": 10, "bytes": 20, "peak_bytes": 30,
    }  # fmt: skip


def progress(done: int, variant: str, length: int) -> bytes:
    return encode_event(
        "progress", {"done": done, "total": 3, "variant": variant, "length": length}
    )


PROBLEM: Final = {"type": "urn:qkv:problem:payload-too-large", "status": 413, "detail": "too many"}
CELLS: Final = [
    cell(0, "softmax", 256), cell(1, "linear", 256, 2.0),
    {"index": 0, "variant": "softmax", "parameters": {}, "length": 512, "problem": PROBLEM},
]  # fmt: skip
CELL_EVENTS: Final = [
    progress(i, c["variant"], c["length"]) + encode_event("cell", c) for i, c in enumerate(CELLS)
]
DONE_EVENT: Final = encode_event(
    "done",
    {
        "cells": 3,
        "crossovers": [{"from": 0, "to": 1, "length": 300.5, "between": [256, 512]}],
    },
)
WHOLE_STREAM: Final = event_reply(*CELL_EVENTS, DONE_EVENT)
