"""Tests of bench/speed.py: all contenders compute the same, and the page is complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import plain_torch
import pytest
import speed
import speed_page
import torch

from qkv.attention.catalogue import variants

CPU: Final = torch.device("cpu")
NAMES: Final = [name for name in variants() if name in plain_torch.PLAIN_TORCH]
CAUSAL: Final = [n for n in NAMES if "causal" in variants()[n].parameters.model_fields]


@pytest.mark.slow
def test_contenders_equal_the_reference() -> None:
    """For more than two chunks. The command repeats this check before it measures."""
    assert NAMES
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


def test_page_has_every_contender_and_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One contender is too slow for one length."""
    page = tmp_path / "speed.md"
    page.write_text("# By hand\n" + speed_page.MARK + "old figures")
    monkeypatch.setattr(speed_page, "PAGE", page)
    rows: list[dict[str, Any]] = [
        {
            "variant": name,
            "contender": contender,
            "N": N,
            "causal": causal,
            "ms": [2.0 * factor, 2.2 * factor],
        }
        for name in NAMES
        for contender, factor in (("qkv", 3.0), ("plain torch", 2.0))
        for N in (256, 512)
        for causal in (False, True)
        if not (N == 512 and name == "softmax")
    ]
    speed_page.write_page("about the machine", rows)
    text = page.read_text()
    assert text.startswith("# By hand\n")
    assert "about the machine" in text
    assert "old figures" not in text
    for name in NAMES:
        second, ratio = ("", "") if name == "softmax" else ("6.30 (5.85–6.75)", "1.50 (1.50–1.50)")
        assert text.count(f"| `{name}` | 6.30 (5.85–6.75) | {second} |") == 2
        assert text.count(f"| `{name}` | 1.50 (1.50–1.50) | {ratio} |") == 2
    assert text.count("| torch SDPA | 4.20 (3.90–4.50) |  |") == 2
    picture = page.with_suffix(".svg").read_text()
    assert all(f"<!-- {label} -->" in picture for label in (*NAMES, "torch SDPA", "512"))
