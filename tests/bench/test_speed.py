"""Tests of bench/speed.py: all contenders compute the same, and the page is complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import plain_torch
import pytest
import speed
import torch
from speed_figure import write_figure
from speed_tables import build_tables
from tables import Results, write_page

from qkv.attention.catalogue import variants

CPU: Final = torch.device("cpu")
NAMES: Final = [name for name in variants() if name in plain_torch.PLAIN_TORCH]
CAUSAL: Final = [n for n in NAMES if "causal" in variants()[n].parameters.model_fields]


@pytest.mark.rare("bench", "service/qkv/attention/variants")
@pytest.mark.slow
def test_contenders_equal_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """For more than two chunks, of few heads. The command checks all before it measures."""
    assert NAMES
    few = dict.fromkeys("HGJV", 2) | {"I": 64, "O": 64}
    monkeypatch.setattr(speed, "SIZES", speed.SIZES | few)
    speed.check(CPU, N=3 * plain_torch.CHUNK)


@pytest.mark.parametrize("name", CAUSAL)
def test_plain_torch_equals_attend_beyond_a_segment(name: str) -> None:
    """Other tests compare `attend` with the reference."""
    N = 2 * plain_torch.SEGMENT + plain_torch.CHUNK
    tensors = speed.make_variant_tensors(variants()[name], N, CPU)
    plain_output = plain_torch.PLAIN_TORCH[name](*tensors.values(), causal=True)
    output = variants()[name].attend(**tensors, causal=True, outputs=speed.OUTPUT_ONLY).output
    roundings = 8 + 2 * speed.SIZES["D"] + N  # averages are at most the largest value
    tolerance = 2 * roundings * torch.finfo(torch.float32).eps * float(output.abs().max())
    torch.testing.assert_close(plain_output, output, rtol=0, atol=tolerance)


def test_page_has_every_contender_and_second_length(tmp_path: Path) -> None:
    """One contender is too slow for one length, and library formulas are not causal."""
    rows: list[dict[str, Any]] = [
        {
            "variant": name,
            "contender": contender,
            "N": N,
            "causal": causal,
            "ms": [2.0 * factor, 2.2 * factor],
        }
        for name in NAMES
        for contender, factor in (("qkv", 3.0), ("plain torch", 2.0), ("library", 4.0))
        for N in (256, 512, 1024)
        for causal in (False, True)
        if not (N == 1024 and name == "softmax") and not (contender == "library" and causal)
    ]
    results = Results("make speed", {}, build_tables(rows))
    page = tmp_path / "speed.md"
    page.write_text(speed.PAGE.read_text())
    write_page(page, results)
    text = page.read_text()
    assert len(results.texts) == text.count("made by `make speed`")
    for name in NAMES:
        second = "" if name == "softmax" else "6.30 (5.85–6.75)"
        assert text.count(f"| `{name}` | 6.30 (5.85–6.75) | {second} |") == 2
    assert text.count("| torch SDPA | 4.20 (3.90–4.50) |  |") == 2
    write_figure(rows, page.with_suffix(".svg"))
    picture = page.with_suffix(".svg").read_text()
    assert all(f"<!-- {label} -->" in picture for label in (*NAMES, "torch SDPA", "512"))
