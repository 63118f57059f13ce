"""The six commands of docs/layers.md, one after the other, as a user types them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pytest

from support import minilm
from support.forked_scripts import run_program, run_script
from support.paths import ROOT
from support.processes import Process

PAGE: Final = (
    (ROOT / "docs/layers.md")
    .read_text()
    .partition("## Serve a model's layers")[2]
    .partition("## Described layers")[0]
)
BLOCKS: Final[Sequence[tuple[str, str]]] = re.findall(
    r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
)
ADDRESS: Final = "http://127.0.0.1:8000"

pytestmark = pytest.mark.slow


def run(kind: str, text: str, folder: Path, url: str) -> str:
    """Returns what a script or a program prints."""
    start = run_program if kind == "python" else run_script
    printed = start(text.replace(ADDRESS, url), folder, QKV_URL=url, HF_HUB_OFFLINE="1")
    return printed.replace(url, ADDRESS)


def test_six_commands_lead_to_a_heat_map(tmp_path: Path, command: Callable[..., Process]) -> None:
    model = tmp_path / "all-MiniLM-L6-v2"
    model.mkdir()
    for file in minilm.folder().iterdir():
        (model / file.name).symlink_to(file)
    commands = [(kind, text) for kind, text in BLOCKS if kind]
    results = [text for kind, text in BLOCKS if not kind]
    assert [kind for kind, _ in commands] == ["sh", "sh", "sh", "python", "sh", "python"]
    found = run(*commands[0], tmp_path, ADDRESS)
    assert re.sub(r"error [0-9.e-]+", "error", found) == re.sub(
        r"error [0-9.e-]+", "error", results[0]
    )
    serve = commands[1][1].split()
    assert serve[:3] == ["qkv", "serve", "--checkpoint"]
    name, _, folder = serve[3].partition("=")
    service = command("serve", "--port", "0", "--workers", "1", "--checkpoint",
        f"{name}={tmp_path / folder}")  # fmt: skip
    for (kind, text), documented in zip(commands[2:], results[1:], strict=True):
        printed = run(kind, text, tmp_path, service.url)
        varying = r"[0-9.]+ ms|error of [0-9.e-]+|with qkv .*"
        assert re.sub(varying, "...", printed) == re.sub(varying, "...", documented)
    assert (tmp_path / "heads.png").stat().st_size > 10_000
