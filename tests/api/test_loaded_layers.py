"""Requests that name a loaded layer: the same responses as with its tensors inline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from qkv import AsyncClient, Client
from qkv.errors import InvalidContent
from support import small_checkpoints
from support.commands import stdout_of
from support.known_requests import assert_problem
from support.service import Server, running_server
from support.small_checkpoints import GEMMA, HEADS, LLAMA, WIDTH, bert_tensors, llama_tensors

NAME: Final = "small.encoder.layer.1"
PREFIX: Final = "encoder.layer.1.attention"
LENGTH: Final = 7
X: Final = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3))
GRAD: Final = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(4))
GEMMA_NAME: Final = "gemma.model.layers.1"
FORMS: Final = ["full", "none", "stats", {"rows": [0, 5]}, {"top_k": 3}, {"pool": 2}]


LAYER_NORM: Final = 'input_norm = {module = "input_layernorm", kind = "layer", eps = 1e-5}'
BIAS: Final = torch.linspace(-1, 1, WIDTH)
CENTERED: Final = llama_tensors() | {"model.layers.1.input_layernorm.bias": BIAS}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service with small models, and a checkpoint that fails."""
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = {
        "small": small_checkpoints.bert(folder / "bert"),
        "llama": small_checkpoints.llama(folder / "llama"),
        "gemma": small_checkpoints.llama(folder / "gemma", GEMMA),
        "half": small_checkpoints.bert(folder / "half", dtype=torch.bfloat16),
        "centered": small_checkpoints.write(folder / "c", CENTERED, LLAMA, LAYER_NORM),
        "none": folder / "none.safetensors",
    }
    checkpoints = ",".join(f"{name}={path}" for name, path in paths.items())
    with running_server(checkpoints=checkpoints) as server:
        yield server


@pytest.fixture
def client(loaded: Server) -> Iterator[Client]:
    with Client(loaded.url) as opened:
        yield opened


def inline(**fields: Any) -> dict[str, Any]:
    """Returns the layer with its tensors."""
    return {
        "layout": "bert", "heads": HEADS, "prefix": PREFIX, "tensors": bert_tensors(), **fields
    }  # fmt: skip


def inline_gemma(**fields: Any) -> dict[str, Any]:
    """Returns the second layer of the Gemma with its tensors, and what its configuration says."""
    return {
        "layout": "llama", "heads": HEADS, "kv_heads": 2, "rope": {"base": 100.0},
        "prefix": "model.layers.1.self_attn", "softcap": 2.0, "window": [2, 0],
        "tensors": llama_tensors(), **fields,
    }  # fmt: skip


def post(server: Server, path: str = "/v1/attention/softmax", **document: Any) -> Any:
    return server.http.post(path, json={"inputs": {"x": X[0].tolist()}, **document})


def test_layers_and_checkpoints_are_listed(loaded: Server, client: Client) -> None:
    listed = loaded.http.get("/v1/layers").json()
    names = [layer["name"] for layer in listed["layers"]]
    assert names == [
        *(f"small.encoder.layer.{i}" for i in range(2)),
        *(f"{model}.model.layers.{i}" for model in ("llama", "gemma") for i in range(2)),
        *(f"half.encoder.layer.{i}" for i in range(2)),
        *(f"centered.model.layers.{i}" for i in range(2)),
    ]
    small, *_, none = listed["checkpoints"]
    assert small == {"name": "small", "layers": 2, "bytes": 8704, "problem": None, "unserved": []}
    assert none["layers"] == 0
    assert none["problem"] == "none.safetensors: No such file or directory"
    assert client.layers() == listed["layers"]
    for layer in listed["layers"]:
        assert loaded.http.get(f"/v1/layers/{layer['name']}").json() == layer


def test_document_has_both_operations_of_the_path(loaded: Server) -> None:
    paths = loaded.http.get("/openapi.json").json()["paths"]
    assert paths["/v1/layers"].keys() == {"get", "post"}


def test_unknown_layer_is_named(loaded: Server) -> None:
    response = loaded.http.get("/v1/layers/other")
    assert_problem(response, 404)
    assert "expected small.encoder.layer.0, " in response.json()["detail"]
    names: list[Any] = ["other", "small", 3, None, [], "small.encoder.layer.9"]
    for name in names:
        response = post(loaded, layer={"name": name})
        assert_problem(response, 422)
        assert response.json()["pointer"] == "/layer/name"


def test_service_without_checkpoints_says_so(server: Server) -> None:
    assert server.http.get("/v1/layers").json() == {"layers": [], "checkpoints": []}
    problem = post(server, layer={"name": NAME}).json()
    assert problem["detail"].endswith("because the service has loaded no checkpoint")


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("variant", ["softmax", "efficient", "mean"])
def test_run_has_the_bits_of_the_inline_layer(client: Client, variant: str, form: Any) -> None:
    if variant == "efficient" and isinstance(form, dict) and "pool" not in form:
        form = "none"
    found = client.attend(variant, x=X, layer=NAME, weights=form)
    expected = client.attend(variant, x=X, layer=inline(), weights=form)
    assert found.outputs.keys() == expected.outputs.keys()
    for name, output in found.outputs.items():
        assert torch.equal(output, expected.outputs[name])


def test_layer_in_bfloat16(client: Client) -> None:
    tensors = {n: t.to(torch.bfloat16) for n, t in bert_tensors().items()}
    x = X.to(torch.bfloat16)
    found = client.attend("softmax", x=x, layer="half.encoder.layer.1")
    assert torch.equal(
        found.output, client.attend("softmax", x=x, layer=inline(tensors=tensors)).output
    )


@pytest.mark.parametrize("variant", ["softmax", "linear", "taylor", "sigmoid"])
def test_gradients_are_those_of_the_inputs(client: Client, variant: str) -> None:
    for inputs in ({"x": X}, {"query": X, "key": X + 1, "value": X - 1}):
        found = client.gradients(variant, **inputs, grad_output=GRAD, layer=NAME)
        expected = client.gradients(variant, **inputs, grad_output=GRAD, layer=inline())
        assert found.gradients.keys() == inputs.keys()
        for name, gradient in found.gradients.items():
            assert torch.equal(gradient, expected.gradients[name])


def test_comparison_is_that_of_the_inline_layer(client: Client) -> None:
    found = client.compare(["linear", "sigmoid"], x=X, layer=NAME, repeats=1, per_head=True)
    expected = client.compare(["linear", "sigmoid"], x=X, layer=inline(), repeats=1, per_head=True)
    for one, other in zip(found.variants, expected.variants, strict=True):
        assert one.output == other.output
        assert one.weights == other.weights
        assert one.heads == other.heads


def test_parameters_of_the_configuration_are_applied(client: Client) -> None:
    found = client.attend("softmax", x=X, layer=GEMMA_NAME)
    expected = client.attend("softmax", x=X, layer=inline_gemma(), causal=True, scale=9**-0.5)
    assert torch.equal(found.output, expected.output)
    assert found.notes == ()
    plain = client.attend("softmax", x=X, layer=GEMMA_NAME, causal=False, window=None, scale=1.0)
    expected = client.attend("softmax", x=X, layer=inline_gemma(), causal=False, scale=1.0)
    assert torch.equal(plain.output, expected.output)


def test_comparison_names_parameters_that_a_variant_lacks(client: Client) -> None:
    compared = client.compare(["linear"], x=X, layer=GEMMA_NAME, repeats=1)
    assert compared.notes[:3] == tuple(
        f"{name} of {GEMMA_NAME} is not applied: linear has no parameter {name!r}."
        for name in ("window", "softcap", "scale")
    )


def test_parameters_that_a_variant_lacks_are_named(loaded: Server, client: Client) -> None:
    run = client.attend("linear", x=X, layer=GEMMA_NAME)
    assert run.notes == [
        f"{name} of {GEMMA_NAME} is not applied: linear has no parameter {name!r}"
        for name in ("window", "softcap", "scale")
    ]
    assert f"window of {GEMMA_NAME} is not applied" in run._repr_html_()
    gemma = inline_gemma(softcap=None, window=None)
    expected = client.attend("linear", x=X, layer=gemma, causal=True)
    assert torch.equal(run.output, expected.output)
    reply = post(loaded, "/v1/attention/linear", layer={"name": GEMMA_NAME}).json()
    assert reply["notes"] == run.notes
    assert "notes" not in post(loaded, layer={"name": GEMMA_NAME}).json()


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": 2}, {"rope": {"base": 7.0, "dims": 2}}, {"alibi": True}, {"softcap": 1.0},
        {"window": [1, 1]}, {"heads": None}, {"kv_heads": None},
    ],
    ids=str,
)  # fmt: skip
def test_fields_of_a_request_replace_those_of_the_checkpoint(
    loaded: Server, client: Client, changes: dict[str, Any]
) -> None:
    found = client.attend("softmax", x=X, layer={"name": NAME, **changes})
    given = {n: x for n, x in changes.items() if x is not None}  # null: as in the checkpoint
    expected = client.attend("softmax", x=X, layer=inline(**given))
    assert torch.equal(found.output, expected.output)
    assert torch.equal(found.weights, expected.weights)
    again = client.attend("softmax", x=X, layer=NAME)
    assert torch.equal(again.output, client.attend("softmax", x=X, layer=inline()).output)
    layer = post(loaded, layer={"name": NAME, **changes}).json()["layer"]
    assert layer["name"] == NAME
    assert layer["heads"] == given.get("heads", HEADS)


@pytest.mark.parametrize(
    ("layer", "pointer", "expected"),
    [
        ({"layout": "bert"}, "/layer/layout", "is loaded, and has its own"),
        ({"prefix": "a"}, "/layer/prefix", "is loaded, and has its own"),
        ({"tensors": {"a": [[1.0]]}}, "/layer/tensors", "the layer of this name is loaded"),
        ({"heads": 5}, "/layer/heads", f"{NAME}.query does not split into heads"),
        ({"heads": "x"}, "/layer/heads", "layer.heads is invalid"),
        ({"qk_norm": {"eps": 1.0}}, "/layer/qk_norm", "has no norm of queries and keys"),
        ({"other": 1}, "/layer/other", "known are name, heads, "),
        ({"rope": {"bases": 1.0}}, "/layer/rope/bases", "unknown field 'bases'"),
        (
            {"input": "residual"},
            "/layer/input",
            "without a norm in front of its attention",
        ),
        ({"input": "x"}, "/layer/input", "layer.input is invalid"),
        ({"window": [-1, 0]}, "/layer/window", "window"),
    ],
    ids=str,
)
def test_field_that_does_not_fit_is_refused(
    loaded: Server, layer: dict[str, Any], pointer: str, expected: str
) -> None:
    response = post(loaded, layer={"name": NAME, **layer})
    assert_problem(response, 422)
    assert expected in response.json()["detail"]
    assert response.json()["pointer"].startswith(pointer)


def test_width_and_dtype_of_x_are_those_of_the_layer(loaded: Server, client: Client) -> None:
    with pytest.raises(InvalidContent, match=f"x has the wrong width: got M=3, expected M={WIDTH}"):
        client.attend("softmax", x=X[..., :3], layer=NAME)
    with pytest.raises(
        InvalidContent, match="x has the wrong dtype: got float64, expected float32"
    ):
        client.attend("softmax", x=X.double(), layer=NAME)
    half = post(loaded, layer={"name": "half.encoder.layer.1"}, encoding="base64")
    assert half.json()["outputs"]["output"]["dtype"] == "bfloat16"
    typed = post(loaded, layer={"name": "half.encoder.layer.1"}, dtype="float32")
    assert_problem(typed, 422)


@pytest.mark.parametrize("model", ["llama", "gemma", "centered"])
def test_residual_input_is_normed_first(client: Client, model: str) -> None:
    """The output and the gradient are those of the norm and the layer, one after the other."""
    weight = llama_tensors()["model.layers.1.input_layernorm.weight"]
    weight = weight + 1 if model == "gemma" else weight
    name = f"{model}.model.layers.1"
    x = X.clone().requires_grad_()
    if model == "centered":
        normed = torch.nn.functional.layer_norm(x, (WIDTH,), weight, BIAS, 1e-5)
    else:
        normed = torch.nn.functional.rms_norm(x, (WIDTH,), weight, 1e-5)
    expected = client.attend("softmax", x=normed.detach(), layer=name)
    layer = {"name": name, "input": "residual"}
    found = client.attend("softmax", x=X, layer=layer)
    assert torch.allclose(found.output, expected.output, atol=1e-5)
    inner = client.gradients("softmax", x=normed.detach(), grad_output=GRAD, layer=name)
    normed.backward(inner.gradients["x"])
    outer = client.gradients("softmax", x=X, grad_output=GRAD, layer=layer)
    assert x.grad is not None
    assert torch.allclose(outer.gradients["x"], x.grad, atol=1e-4)
    with pytest.raises(InvalidContent, match="x is missing"):
        client.attend("softmax", query=X, key=X, value=X, layer=layer)


def test_norm_may_have_another_dtype_than_the_layer(tmp_path: Path) -> None:
    """Norms of a model in bfloat16 are often float32; they are applied in float32."""
    tensors = llama_tensors(torch.bfloat16)
    norm = {n: t for n, t in llama_tensors().items() if "layernorm" in n}
    folder = small_checkpoints.write(tmp_path / "mixed", tensors | norm, LLAMA)
    name, x = "mixed.model.layers.1", X.to(torch.bfloat16)
    weight = norm["model.layers.1.input_layernorm.weight"]
    normed = torch.nn.functional.rms_norm(x.float(), (WIDTH,), weight, 1e-5).to(torch.bfloat16)
    served = running_server(checkpoints=f"mixed={folder}", strict_checkpoints=True)
    with served as server, Client(server.url) as client:
        found = client.attend("softmax", x=x, layer={"name": name, "input": "residual"})
        expected = client.attend("softmax", x=normed, layer=name)
    error = (found.output.float() - expected.output.float()).norm() / expected.output.float().norm()
    assert error < 4 * torch.finfo(torch.bfloat16).eps


def test_heads_that_are_in_the_layout_cannot_change(tmp_path: Path) -> None:
    rows = {n: t for n, t in bert_tensors(1).items() if "output.dense" in n}
    tensors = {n.replace("attention.output.dense", "self_attn.o_proj"): t for n, t in rows.items()}
    tensors["encoder.layer.0.self_attn.qkv_proj.weight"] = torch.randn(3 * WIDTH, WIDTH)
    folder = small_checkpoints.write(tmp_path / "phi", tensors, LLAMA | {
        "model_type": "phi3", "num_key_value_heads": HEADS})  # fmt: skip
    with running_server(checkpoints=f"phi={folder}", strict_checkpoints=True) as server:
        name = "phi.encoder.layer.0"
        assert post(server, layer={"name": name, "heads": HEADS}).is_success
        response = post(server, layer={"name": name, "heads": HEADS // 2})
        assert_problem(response, 422)
        assert "phi3 keeps the tensors of a head together" in response.json()["detail"]


def test_inline_layer_has_no_norm(client: Client) -> None:
    with pytest.raises(InvalidContent, match="only a loaded layer has the norm of its model"):
        client.attend("softmax", x=X, layer=inline(input="residual"))


def test_command_lists_the_layers_of_a_service(loaded: Server) -> None:
    lines = stdout_of("layers", "--url", loaded.url).splitlines()
    assert f"10 loaded layers of {loaded.url}" in lines
    (gemma,) = (line.split() for line in lines if GEMMA_NAME in line)
    assert gemma[:6] == [GEMMA_NAME, "llama", "float32", "16", "4", "2"]
    assert gemma[6:] == ["causal=true", "window=[2,0]", "softcap=2.0", "scale=0.3333333333333333"]
    assert "none is not served: none.safetensors: No such file or directory" in lines
    text = stdout_of("layers", "--json", "--url", loaded.url)
    assert json.loads(text) == loaded.http.get("/v1/layers").json()["layers"]


def test_asynchronous_client_names_layers(loaded: Server) -> None:
    async def run() -> Any:
        async with AsyncClient(loaded.url) as client:
            names = [layer["name"] for layer in await client.layers()]
            return names, await client.attend("softmax", x=X.numpy(), layer=NAME)

    names, found = asyncio.run(run())
    assert NAME in names
    with Client(loaded.url) as client:
        expected = client.attend("softmax", x=X.numpy(), layer=NAME)
    assert np.array_equal(found.output, expected.output)


def test_part_that_is_not_served_has_its_reason(tmp_path: Path) -> None:
    """In the list of the service, and in that of the command."""
    tensors = {f"a.{n}": t for n, t in bert_tensors().items()} | bert_tensors()
    tensors["a.encoder.layer.0.attention.gate.weight"] = torch.ones(WIDTH, WIDTH)
    folder = small_checkpoints.write(tmp_path / "part", tensors, small_checkpoints.BERT)
    with running_server(checkpoints=f"part={folder}", strict_checkpoints=True) as server:
        listed = server.http.get("/v1/layers").json()
        printed = stdout_of("layers", "--url", server.url)
    (checkpoint,) = listed["checkpoints"]
    assert (checkpoint["layers"], checkpoint["problem"]) == (2, None)
    ((path, problem),) = (entry.values() for entry in checkpoint["unserved"])
    assert path == "a.encoder.layer"
    assert "a.encoder.layer.0.attention.gate.weight is not supported" in problem
    assert "Not served of part: a.encoder.layer.0.attention: " in " ".join(printed.split())
