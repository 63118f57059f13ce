"""The variants of the folder `QKV_VARIANTS` are checked at the start; every process serves them."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
import torch

from qkv.attention import variant_file
from support import small_checkpoints
from support.processes import TIMEOUT_S, Process, killed_at_the_end, wait_until
from support.service_processes import child_pids, device_process_pid, status_of
from support.small_checkpoints import HEADS, LLAMA, llama_tensors

COSINE: Final = variant_file.example()
QUERY: Final = [[1.0, 0.0], [0.0, 2.0]]
INPUTS: Final = {"query": QUERY, "key": QUERY, "value": [[1.0], [3.0]]}

CHANGES_SINKS: Final = '''
"""Attention to nothing but the sinks."""
from jaxtyping import Float
from torch import Tensor

def attend(
    query: Float[Tensor, "B H L D"], key: Float[Tensor, "B G S D"],
    value: Float[Tensor, "B G S E"], sinks: Float[Tensor, "H"] | None = None,
) -> Float[Tensor, "B H L E"]:
    mean = value.mean(2, keepdim=True).expand(-1, -1, query.shape[2], -1)
    mean = mean.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return mean if sinks is None else mean * sinks.mul_(2)[:, None, None]
'''

pytestmark = pytest.mark.process


def run_cosine(url: str) -> Any:
    """Runs the variant on a new connection, which any worker accepts; returns its output."""
    response = httpx.post(f"{url}/v1/attention/cosine", json={"inputs": INPUTS}, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return response.json()["outputs"]["output"]


def expected_output() -> Any:
    """Returns the output: queries and keys are the two unit vectors after normalization."""
    near = np.e / (np.e + 1)
    return [[near + 3 * (1 - near)], [1 - near + 3 * near]]


@pytest.mark.representative
def test_variants_of_a_folder_are_served(tmp_path: Path, command: Callable[..., Process]) -> None:
    """By workers that send jobs to a device process, also after each of them was replaced."""
    (tmp_path / "cosine.py").write_text(COSINE)
    (tmp_path / "_notes.py").write_text("no Python")
    words = ("serve", "--port", "0", "--workers", "2", "--variants", str(tmp_path))
    service = command(*words, QKV_DEVICE_PROCESS="one")
    url = service.url
    listed = httpx.get(f"{url}/v1/variants", timeout=TIMEOUT_S).json()["variants"]
    names = [entry["variant"] for entry in listed]
    assert {"cosine", "softmax"} < set(names)
    assert names == sorted(names)
    document = httpx.get(f"{url}/openapi.json", timeout=TIMEOUT_S).json()
    assert document["paths"]["/v1/attention/cosine"]["post"]
    assert set(document["components"]["schemas"]["CosineInputs"]["required"]) == set(INPUTS)
    for _ in range(4):
        assert np.allclose(run_cosine(url), expected_output(), rtol=1e-6)
    device_process = device_process_pid(service)
    for victim in child_pids(service.popen.pid):
        os.kill(victim, signal.SIGKILL)
    wait_until(
        lambda: (
            len(pids := child_pids(service.popen.pid)) == 3
            and device_process not in pids
            and status_of(url, "/readyz") == 200
        )
    )
    assert np.allclose(run_cosine(url), expected_output(), rtol=1e-6)
    assert service.end() == 0


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("wrong", COSINE.replace("@ value\n", "@ value.square()\n"),
         "wrong.py fails 1 of the checks of `qkv check-variant`: weights: weights @ value is off"),
        ("broken", COSINE.replace(') -> Float[Tensor, "B H L E"]:', "):"),
         "broken.py is no variant: attend has no return annotation"),
        ("softmax", COSINE, "softmax.py is no variant: another variant has the name 'softmax'"),
        ("ends", COSINE.replace("    return", "    import os; os._exit(0)\n    return"),
         "ends.py ends the process that checks it"),
        ("_none", COSINE, "QKV_VARIANTS has no variant: got "),
    ],
)  # fmt: skip
def test_file_that_fails_stops_the_start(
    tmp_path: Path, command: Callable[..., Process], name: str, text: str, problem: str
) -> None:
    (tmp_path / f"{name}.py").write_text(text)
    process = command("serve", "--port", "0", "--workers", "1", QKV_VARIANTS=str(tmp_path))
    assert process.wait() == 1
    (line,) = process.lines
    assert line.startswith("Error: ")
    assert problem in line


@pytest.mark.parametrize("folder", ["", "missing"])
def test_folder_must_exist(tmp_path: Path, command: Callable[..., Process], folder: str) -> None:
    path = folder and str(tmp_path / folder)
    process = command("serve", "--port", "0", QKV_VARIANTS=path)
    assert process.wait() == 1
    (line,) = process.lines
    assert line.startswith(f"Error: setting variants (QKV_VARIANTS) is {path!r}: ")


@dataclass(frozen=True)
class Applications:
    """What applications without workers have answered, and why others could not start.

    Attributes:
        replies: for each application, the bodies of the responses to a request sent twice.
        tracebacks: of those that could not start.
    """

    replies: list[list[Any]]
    tracebacks: list[str]


@pytest.fixture(scope="module")
def applications(tmp_path_factory: pytest.TempPathFactory) -> Applications:
    """Returns three applications, each of a folder with one variant."""
    root = tmp_path_factory.mktemp("variants")
    texts = {"cosine": COSINE.replace("@ value\n", "@ value.square()\n"), "doubled": CHANGES_SINKS}
    for name, text in texts.items():
        (root / name).mkdir()
        (root / name / f"{name}.py").write_text(text)
    wrong, doubled = ({"variants": str(root / name)} for name in texts)
    tensors = llama_tensors() | {"model.layers.1.self_attn.sinks": torch.ones(HEADS)}
    folder = small_checkpoints.write(root / "llama", tensors, LLAMA)
    body = {
        "inputs": {"x": [[1.0] * 16]}, "layer": {"name": "small.model.layers.1"},
        "outputs": ["output"],
    }  # fmt: skip
    sent = [
        (doubled | {"checkpoints": f"small={folder}"}, "POST", "/v1/attention/doubled", body),
        (wrong, "GET", "/v1/variants/cosine", None),
        (doubled | {"checkpoints": "doubled=/nowhere"}, "GET", "/v1/variants/doubled", None),
    ]
    with tempfile.TemporaryFile("w+") as output:
        words, module = (json.dumps(sent),), "support.unserved_applications"
        process = Process(words, {}, stdout=output, module=module)
        with killed_at_the_end(process):
            assert process.wait() == 0, process.lines
        output.seek(0)
        replies = [json.loads(line) for line in output]
    errors = "\n".join(process.lines)
    return Applications(replies, errors.split("Traceback (most recent call last)")[1:])


def test_application_without_workers_has_the_variants(applications: Applications) -> None:
    """Such as a replica of Ray Serve, which `qkv serve` does not start."""
    assert applications.replies[0][0]["variant"] == "doubled"
    one, other = applications.tracebacks
    assert "fails 1 of the checks" in one
    assert "the checkpoint doubled has the name of a variant" in other


def test_variant_that_changes_its_inputs_changes_no_loaded_layer(
    applications: Applications,
) -> None:
    first, second = applications.replies[0]
    assert first["outputs"] == second["outputs"]
