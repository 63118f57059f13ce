"""bench/speed.py but for the speed: what it compares gives one answer, and its page has it all."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import plain
import pytest
import speed
import speed_page
import torch

from qkv.attention.catalogue import variants

CPU: Final = torch.device("cpu")
NAMES: Final = [name for name in variants() if name in plain.PLAIN]
CAUSAL: Final = [n for n in NAMES if "causal" in variants()[n].parameters.model_fields]


def test_ours_and_plain_torch_give_the_references_answer() -> None:
    """Past two chunks; the command checks it once more, where it runs, before it measures."""
    assert NAMES
    speed.check(CPU, N=3 * plain.CHUNK)


@pytest.mark.parametrize("name", CAUSAL)
def test_plain_torch_past_a_segment(name: str) -> None:
    """Where the answer is that of `attend`, which other tests hold against the reference."""
    N = 2 * plain.SEGMENT + plain.CHUNK
    tensors = speed.tensors_of(variants()[name], N, CPU)
    found = plain.PLAIN[name](*tensors.values(), causal=True)
    ours = variants()[name].attend(**tensors, causal=True, outputs=speed.OUTPUT).output
    roundings = 8 + 2 * speed.SIZES["D"] + N  # of averages no larger than the largest value
    close = 2 * roundings * torch.finfo(torch.float32).eps * float(ours.abs().max())
    torch.testing.assert_close(found, ours, rtol=0, atol=close)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every contender, and a length that one was too slow for."""
    page = tmp_path / "speed.md"
    page.write_text("# By hand\n" + speed_page.MARK + "old figures")
    monkeypatch.setattr(speed_page, "PAGE", page)
    rows: list[dict[str, Any]] = [
        {"variant": name, "who": who, "N": N, "causal": causal, "ms": [2.0 * slower, 2.2 * slower]}
        for name in NAMES
        for who, slower in (("ours", 3.0), ("plain", 2.0))
        for N in (256, 512)
        for causal in (False, True)
        if not (N == 512 and name == "softmax")
    ]
    speed_page.write("about the machine", rows)
    text = page.read_text()
    assert text.startswith("# By hand\n")
    assert "about the machine" in text
    assert "old figures" not in text
    for name in NAMES:
        second, ratio = ("", "") if name == "softmax" else ("6.30 (5.85–6.75)", "1.50 (1.50–1.50)")
        assert text.count(f"| `{name}` | 6.30 (5.85–6.75) | {second} |") == 2
        assert text.count(f"| `{name}` | 1.50 (1.50–1.50) | {ratio} |") == 2
    assert text.count("| torch SDPA | 4.20 (3.90–4.50) |  |") == 2
    drawn = page.with_suffix(".svg").read_text()
    assert all(f"<!-- {label} -->" in drawn for label in (*NAMES, "torch SDPA", "512"))
