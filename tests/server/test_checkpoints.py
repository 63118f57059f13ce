"""`qkv serve` with checkpoints: workers and a device process that share them, and the start."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from qkv import Client
from support import small_checkpoints
from support.processes import TIMEOUT_S, Process, wait_until
from support.small_checkpoints import BERT, HEADS, WIDTH, bert_tensors

NAME: Final = "small.encoder.layer.1"
X: Final = np.random.default_rng(0).normal(size=(2, 9, WIDTH)).astype(np.float32)


def held_bytes(pid: int, size: int) -> list[int]:
    """Returns the bytes of the shared mappings of a process that have a size.

    A page counts in equal parts for all processes that use it.
    """
    text, found = Path(f"/proc/{pid}/smaps").read_text(), []
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        values = {n: int(kb) << 10 for n, kb in re.findall(r"(\w+): +(\d+) kB", block)}
        if values["Size"] == size and " rw-s " in block.splitlines()[0]:
            found.append(values["Pss"])
    return found


def children(pid: int) -> list[int]:
    """Returns the processes that a process has started."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@pytest.mark.parametrize("device_process", ["each", "one"])
@pytest.mark.representative
def test_processes_share_the_layers(
    tmp_path: Path, command: Callable[..., Process], device_process: str
) -> None:
    """All responses have the bits of the inline layer; the weights are in memory once."""
    tensors = bert_tensors(300)
    config = BERT | {"num_hidden_layers": 300}
    folder = small_checkpoints.write(tmp_path / "bert", tensors, config)
    words = ("serve", "--port", "0", "--workers", "2", "--checkpoint", f"small={folder}")
    service = command(*words, QKV_DEVICE_PROCESS=device_process)
    layer = {
        "layout": "bert", "heads": HEADS, "prefix": "encoder.layer.1.attention", "tensors": tensors,
    }  # fmt: skip
    with Client(service.url) as client:
        (checkpoint,) = client_json(service, "/v1/layers")["checkpoints"]
        assert checkpoint["layers"] == 300
        (folder / "model.safetensors").unlink()  # it is not touched again
        expected = client.attend("softmax", x=X, layer=layer)
    for _ in range(8):  # a new connection each time reaches both workers
        with Client(service.url) as client:
            found = client.attend("softmax", x=X, layer=NAME)
            assert found.output.tobytes() == expected.output.tobytes()
    size = -(-300 * 4 * (WIDTH * WIDTH * 4 + 64) // 4096) * 4096
    processes = [service.popen.pid, *children(service.popen.pid)]
    assert len(processes) == (3 if device_process == "each" else 4)
    held = [bytes for pid in processes for bytes in held_bytes(pid, size)]
    assert len(held) == len(processes)
    # every page is in memory once; parts of a page are rounded down
    assert size * 0.9 < sum(held) <= size
    assert service.end() == 0


def client_json(service: Process, path: str) -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = httpx.get(service.url + path).json()
    return found


def test_checkpoint_that_fails_has_a_line_in_the_log(
    tmp_path: Path, command: Callable[..., Process]
) -> None:
    good = small_checkpoints.bert(tmp_path / "good")
    bad = tmp_path / "bad.safetensors"
    save_file({"x": torch.ones(2)}, bad)
    words = ("serve", "--port", "0", "--workers", "1")
    service = command(*words, QKV_CHECKPOINTS=f"small={good},bad={bad}")
    listed = client_json(service, "/v1/layers")
    assert [c["problem"] is None for c in listed["checkpoints"]] == [True, False]
    (line,) = (line for line in service.lines if "checkpoint" in line)
    assert "checkpoint bad is not served: " in line
    assert "has 0 attention layers: got 'x'" in line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--strict-checkpoints", "--checkpoint", "bad=/nowhere"), "Error: checkpoint bad: "),
        (("--checkpoint", "softmax=/nowhere"), "Error: the checkpoint softmax has the name of a "),
        (("--checkpoint", "Big=/nowhere"), "expected NAME=PATH, with commas between several"),
        (("--checkpoint", "a=/x", "--checkpoint", "a=/y"), "two checkpoints have the same name"),
        (("--checkpoint", "a"), "expected NAME=PATH"),
    ],
)
def test_wrong_checkpoint_stops_the_start(
    command: Callable[..., Process], words: tuple[str, ...], expected: str
) -> None:
    service = command("serve", "--port", "0", *words)
    assert service.wait() == 1
    assert expected in service.lines[-1]


def test_port_is_open_only_once_the_layers_are_loaded(
    tmp_path: Path, command: Callable[..., Process]
) -> None:
    """A probe of readiness sees the layers: a replica gets no request before."""
    folder = small_checkpoints.bert(tmp_path / "bert")
    words = ("serve", "--port", "0", "--workers", "1", "--preload")
    service = command(*words, "--checkpoint", f"small={folder}")
    assert service.url
    wait_until(lambda: httpx.get(f"{service.url}/readyz", timeout=TIMEOUT_S).is_success)
    assert len(client_json(service, "/v1/layers")["layers"]) == 2
