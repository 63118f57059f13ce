"""Runs the playground's code to copy: curl in bash, and Python as a program."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from support.javascript import Modules
from support.service import Server

_LISTS: Final = {
    "query": [[1, 0], [0, 1]],
    "key": [[1, 0], [0, 1]],
    "value": [[1, 2], ["NaN", 4.5e-7]],
}
_HALVES: Final = {
    name: {"dtype": "bfloat16", "shape": [2, 2], "data": base64.b64encode(bytes(8)).decode()}
    for name in ("query", "key", "value")
}
_LAYER: Final = {
    "layout": "v2",
    "heads": 2,
    "tensors": {f"W_{role}.weight": [[1, 2, 3], [4, 5, 6]] for role in ("query", "key", "value")},
}

WRITERS: Final = {"curl": "curlCommand", "python": "pythonProgram"}

REQUESTS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "lists": ("softmax", {"inputs": _LISTS, "parameters": {"causal": True, "scale": None}}),
    "base64": ("linear", {"inputs": _HALVES, "encoding": "base64"}),
    "mask": ("softmax", {"inputs": {**_LISTS, "mask": [[True, False], [True, True]]}}),
    "bias": ("softmax", {"inputs": {**_LISTS, "mask": [[0, "-Infinity"], [0.5, 0]]}}),
    "lengths": (
        "softmax",
        {"inputs": {n: [rows] for n, rows in _LISTS.items()} | {"key_lengths": [1]}},
    ),
    "float64": ("mean", {"inputs": {"value": _LISTS["value"]}, "dtype": "float64"}),
    "layer": ("softmax", {"inputs": {"x": [[1, 2, 3]]}, "layer": _LAYER, "outputs": ["output"]}),
    "window": ("softmax", {"inputs": _LISTS, "parameters": {"window": [1, None]}}),
}


@pytest.fixture
def written(modules: Modules, url: str) -> Callable[..., str]:
    """Returns the code of a request: `written("curl", path, body)`."""

    def write(kind: str, path: str, body: Any, at: str = url, keyed: bool = False) -> str:
        text: str = modules.evaluate(
            f"([request, url, keyed]) => code_snippets.{WRITERS[kind]}(request, url, keyed)",
            [{"path": path, "body": body}, at, keyed],
        )
        return text

    return write


def bash(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euo", "pipefail"],  # from standard input, as pasted
        input=command,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


_RUN_ALL: Final = """
import runpy, sys
for path in sys.argv[1:]:
    runpy.run_path(path, run_name="__main__")
    print(end="\\f")
"""


def python(folder: Path, *programs: str, **environment: str) -> list[str]:
    """Runs programs in a folder, one after another in a process; returns what each prints."""
    files = [folder / f"copied{index}.py" for index in range(len(programs))]
    for file, program in zip(files, programs, strict=True):
        file.write_text(program)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", _RUN_ALL, *files],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not result.stderr, result.stderr
    return result.stdout.split("\f")[:-1]


def test_curl_command_gets_the_response_of_the_request(
    written: Callable[..., str], server: Server
) -> None:
    requests = [(f"/v1/attention/{variant}", body) for variant, body in REQUESTS.values()]
    result = bash("\necho\n".join(written("curl", path, body) for path, body in requests))
    assert not result.stderr
    for name, (path, body), line in zip(
        REQUESTS, requests, result.stdout.splitlines(), strict=True
    ):
        expected = server.http.post(path, json=body).json()
        assert json.loads(line)["outputs"] == expected["outputs"], name


@pytest.mark.slow
def test_large_body_is_read_from_a_file(
    written: Callable[..., str], modules: Modules, server: Server, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((400, 16), np.float32) for _ in range(3))
    data = base64.b64encode(query.tobytes()).decode()
    body = {
        "inputs": {
            "query": {"dtype": "float32", "shape": [400, 16], "data": data},
            "key": key.tolist(),
            "value": [["NaN", *row[1:]] for row in value.tolist()],
        },
        "outputs": ["output"],
    }
    path = "/v1/attention/softmax"
    (tmp_path / "request.json").write_text(
        modules.evaluate("body => code_snippets.serializeBody(body).json", body)
    )
    command, program = (written(kind, path, body) for kind in ("curl", "python"))
    assert max(len(command), len(program)) < 1000
    result = bash(f"cd {tmp_path}\n{command}")
    assert not result.stderr
    assert (
        json.loads(result.stdout)["outputs"] == server.http.post(path, json=body).json()["outputs"]
    )
    (printed,) = python(tmp_path, program)
    expected = server.http.post(path, json=body | {"encoding": "lists"}).json()["outputs"]
    assert str(np.array(expected["output"], np.float64).astype(np.float32)) in printed


def test_arrays_are_loaded_from_their_uploaded_files(
    modules: Modules, server: Server, url: str, tmp_path: Path
) -> None:
    value = np.random.default_rng(0).standard_normal((400, 16), np.float32)
    np.save(tmp_path / "my value.npy", value)
    body = {"inputs": {"value": value.tolist()}, "outputs": ["output"]}
    request = {"path": "/v1/attention/mean", "body": body, "files": {"value": "my value.npy"}}
    program = modules.evaluate(
        "([request, url]) => code_snippets.pythonProgram(request, url, false)", [request, url]
    )
    assert 'value=np.load("my value.npy")' in program
    (printed,) = python(tmp_path, program)
    expected = server.http.post("/v1/attention/mean", json=body).json()["outputs"]["output"]
    assert str(np.array(expected, np.float64).astype(np.float32)) in printed


def test_quotes_in_a_body_are_preserved(written: Callable[..., str], server: Server) -> None:
    for value in ("it's", '$(exit 9) `exit 9` \\ \n ! "', "é 😀 \u2028"):
        body = {"inputs": _LISTS, "parameters": {"scale": value}, "dtype": value}
        result = bash(written("curl", "/v1/attention/softmax", body))
        assert not result.stderr
        expected = server.http.post("/v1/attention/softmax", json=body).json()
        assert json.loads(result.stdout)["detail"] == expected["detail"]


def test_program_prints_the_response(
    written: Callable[..., str], server: Server, tmp_path: Path
) -> None:
    requests = [(f"/v1/attention/{variant}", body) for variant, body in REQUESTS.values()]
    printed = python(tmp_path, *(written("python", path, body) for path, body in requests))
    for (path, body), text in zip(requests, printed, strict=True):
        expected = server.http.post(path, json=body | {"encoding": "lists"}).json()["outputs"]
        for output, lists in expected.items():
            numbers = np.array(lists, np.float64)
            assert f"{output}\n{numbers.shape}\n" in text
            dtype = np.float64 if body.get("dtype") == "float64" else np.float32
            if "data" not in str(body):
                assert str(numbers.astype(dtype)) in text


def test_api_key_is_read_from_the_environment(
    written: Callable[..., str], serve: Callable[..., Server], tmp_path: Path
) -> None:
    served = serve(api_keys="sec-ret-0123456789")
    variant, body = REQUESTS["lists"]
    path = f"/v1/attention/{variant}"
    command = written("curl", path, body, served.url, True)
    program = written("python", path, body, served.url, True)
    assert "sec-ret-0123456789" not in command + program
    assert "outputs" in json.loads(bash(command, QKV_API_KEY="sec-ret-0123456789").stdout)
    assert "QKV_API_KEY: is not set" in bash(command, QKV_API_KEY="").stderr
    (printed,) = python(tmp_path, program, QKV_API_KEY="sec-ret-0123456789")
    assert "output\n(2, 2)" in printed


@pytest.mark.slow
def test_gradients_comparison_and_sweep_can_be_copied(
    written: Callable[..., str], server: Server, tmp_path: Path
) -> None:
    variants = ["linear", {"variant": "taylor", "parameters": {"causal": True}}]
    inputs = dict.fromkeys(_LISTS, _LISTS["query"])
    compared = {"inputs": inputs, "variants": variants, "anchor": "softmax", "repeats": 1}
    swept = {"variants": variants, "lengths": [4, 8], "heads": 1, "width": 4, "repeats": 1}
    response = json.loads(bash(written("curl", "/v1/compare", compared)).stdout)
    assert [entry["variant"] for entry in response["variants"]] == ["linear", "taylor"]
    events = bash(written("curl", "/v1/sweep", swept)).stdout
    assert events.count("event: cell") == 4
    derived = {"inputs": {**inputs, "grad_output": _LISTS["query"]}, "dtype": "float64"}
    comparison, sweep, gradients = python(
        tmp_path,
        written("python", "/v1/compare", compared),
        written("python", "/v1/sweep", swept),
        written("python", "/v1/gradients/softmax", derived),
    )
    assert all(name in comparison for name in ("softmax", "linear", "taylor"))
    assert sweep.count("median_ms=") == 4
    expected = server.http.post("/v1/gradients/softmax", json=derived).json()["gradients"]
    for name, lists in expected.items():
        assert f"{name}\n(2, 2)\n{np.array(lists)}" in gradients
