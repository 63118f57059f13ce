"""Tests of bench/gated_times.py: the contenders compute the same, and the page has their tables."""

from __future__ import annotations

from pathlib import Path

import gated_times
import torch
from tables import Results, write_page

from qkv import Client
from support.service import Server


def test_contenders_compute_the_same(server: Server) -> None:
    with Client(server.url) as client:
        calls = gated_times.prompt_calls(client, 150)
        over_http = torch.from_numpy(calls["`gated` over HTTP"]().output)
        in_process = calls["`gated` in this process"]()
        assert torch.equal(over_http, in_process)
        transformers = calls["transformers"]().transpose(1, 2)
        torch.testing.assert_close(over_http, transformers, rtol=0, atol=1e-5)
        looped = calls[gated_times.LOOP]().float()
        first = over_http[:, :, : looped.shape[2]]
        torch.testing.assert_close(first, looped, rtol=0, atol=1e-5)
        a_token, _, plain = gated_times.token_calls(client).values()
        sent = sum(x.nbytes for x in a_token().outputs.values())
        # both directions have the state; a token's inputs are larger than its output
        assert abs(sent - plain().output.nbytes) < 8 << 10


def test_page_has_the_tables(tmp_path: Path) -> None:
    times = {"one": [1.0, 2.0], "other": [2.0, 2.0]}
    tables = [gated_times.table(f"gated, a {what}", times) for what in ("prompt", "token")]
    assert tables[0].rows[1] == ["other", [2.0, 2.0, 2.0], [0.75, 0.5, 1.0]]
    page = tmp_path / "speed.md"
    page.write_text(gated_times.PAGE.read_text())
    write_page(page, Results("python bench/gated_times.py", {}, tables))
    assert page.read_text().count("| other | 2.0 (2.0–2.0) |") == 2
