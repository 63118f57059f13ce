"""Layers of real models, loaded from checkpoints: the same bits as inline, the module's output."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support import minilm
from support import real_module_calls as calls
from support.loaded_checkpoints import layer_name, minilm_folder, write_checkpoint
from support.real_module import RealModule, largest_error
from support.real_module_calls import bound, decoded, encoded
from support.real_modules import CASES, find
from support.service import Server, running_server

# building the models imports transformers and timm, which takes seconds
pytestmark = pytest.mark.slow

MINILM = [name for name in CASES if name.startswith("minilm")]
OTHERS = [name for name in CASES if name not in MINILM]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service with a checkpoint of every module."""
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = {name: write_checkpoint(folder / name, find(name)) for name in OTHERS}
    # the cases without a prefix are named as the variants
    entries = {f"real-{name}": path for name, path in paths.items()}
    entries["minilm"] = minilm_folder()
    with running_server(
        checkpoints=",".join(f"{name}={path}" for name, path in entries.items()),
        strict_checkpoints=True,
    ) as server:
        yield server


def run_loaded(
    server: Server, case: RealModule, kind: str = "attention", **layer: Any
) -> dict[str, Any]:
    """Returns the response to a request that names the layer of a module, and has no parameter."""
    names = [entry["name"] for entry in server.http.get("/v1/layers").json()["layers"]]
    checkpoint = "minilm" if case.name in MINILM else f"real-{case.name}"
    inputs = dict(case.embeddings)
    if kind == "gradients":
        inputs["grad_output"] = case.grad_output
    document: dict[str, Any] = {
        "inputs": encoded(inputs),
        "layer": {"name": layer_name(checkpoint, case, names), **layer},
        "encoding": "base64",
    }
    if kind == "attention":
        document["outputs"] = ["output"]
    response = server.http.post(f"/v1/{kind}/softmax", json=document)
    assert response.is_success, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.parametrize("name", CASES)
def test_loaded_layer_is_the_module(loaded: Server, name: str) -> None:
    """Without a field of the request: the configuration gives heads, positions and parameters."""
    case = find(name)
    output = decoded(run_loaded(loaded, case)["outputs"])["output"]
    assert torch.equal(output, calls.output(loaded.http, case))
    assert largest_error(output, case.truth.output) < bound(case)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_the_inputs_have_the_bits_of_the_inline_layer(
    loaded: Server, name: str
) -> None:
    case = find(name)
    found = decoded(run_loaded(loaded, case, "gradients")["gradients"])
    response = calls.run(loaded.http, case, "gradients")
    inline = decoded(response.json()["gradients"])
    assert found.keys() == {*case.embeddings, "grad_output"} - {"grad_output"}
    assert all(torch.equal(found[n], inline[n]) for n in found)


@pytest.mark.representative
@pytest.mark.parametrize("name", MINILM)
def test_minilm_is_that_of_transformers(loaded: Server, name: str) -> None:
    case = find(name)
    output = decoded(run_loaded(loaded, case)["outputs"])["output"]
    layer = int(name.removeprefix("minilm-"))
    attention = minilm.bert().encoder.layer[layer].attention
    with torch.no_grad():
        expected = attention.output.dense(attention.self(case.embeddings["x"])[0])
    assert largest_error(output, case.truth.output) < bound(case)
    assert torch.allclose(output, expected, atol=1e-5)


@pytest.fixture(autouse=True, scope="module")
def _quiet_transformers() -> Iterator[None]:
    """Keeps the warnings of transformers about sizes that no real model has."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(level)


def test_folder_may_be_named_by_its_file(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "gpt2", find("gpt2"))
    path = folder / "model.safetensors"
    with running_server(checkpoints=f"small={path}", strict_checkpoints=True) as server:
        (first, second) = server.http.get("/v1/layers").json()["layers"]
    assert (first["name"], second["name"]) == ("small.h.0", "small.h.1")
    assert first["parameters"] == {"causal": True}
