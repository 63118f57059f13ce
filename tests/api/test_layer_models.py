"""Loaded layers as models of the Open Inference Protocol, by Triton's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest

from qkv import Client
from qkv.attention import catalogue
from support import small_checkpoints
from support.service import Server, running_server
from support.small_checkpoints import GEMMA, WIDTH
from support.triton_client import (
    infer_inputs,
    raises_inference_error,
    requested_outputs,
    triton_client,
)

NAME: Final = "small.encoder.layer.1"
GEMMA_NAME: Final = "gemma.model.layers.1"
X: Final = np.random.default_rng(0).normal(size=(2, 5, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("checkpoints")
    bert = small_checkpoints.bert(folder / "bert")
    gemma = small_checkpoints.llama(folder / "gemma", GEMMA)
    with running_server(checkpoints=f"small={bert},gemma={gemma}") as server:
        yield server


@pytest.fixture
def triton(loaded: Server) -> Iterator[Any]:
    with triton_client(loaded.url) as opened:
        yield opened


def test_layers_are_in_the_index_and_ready(triton: Any) -> None:
    index = {entry["name"]: entry for entry in triton.get_model_repository_index()}
    assert index[NAME]["state"] == "READY"
    assert list(index)[: len(catalogue.variants())] == list(catalogue.variants())
    assert triton.is_model_ready(NAME)
    assert not triton.is_model_ready("small.encoder.layer.7")


def test_metadata_and_configuration_have_x_and_the_variant(triton: Any) -> None:
    about = triton.get_model_metadata(GEMMA_NAME)
    first = about["inputs"][0]
    assert (first["name"], first["datatype"], first["shape"]) == ("x", "FP32", [-1, -1, WIDTH])
    names = {spec["name"] for spec in about["inputs"]}
    assert names == {"x", *catalogue.find("softmax").inputs} - {"query", "key", "value"}
    output = next(spec for spec in about["outputs"] if spec["name"] == "output")
    assert output["shape"] == [-1, -1, WIDTH]
    config = triton.get_model_config(GEMMA_NAME)
    assert config["input"][0]["name"] == "x"
    assert '"default":"softmax"' in config["parameters"]["variant"]["string_value"]


@pytest.mark.parametrize("variant", ["softmax", "linear", "sigmoid"])
@pytest.mark.parametrize("name", [NAME, GEMMA_NAME])
def test_inference_has_the_bits_of_the_native_api(
    loaded: Server, triton: Any, name: str, variant: str
) -> None:
    with Client(loaded.url) as client:
        expected = client.attend(variant, x=X, layer=name)
    for _ in range(2):  # the second request finds the plan of the first one
        result = triton.infer(
            name,
            infer_inputs({"x": X}),
            outputs=requested_outputs(output=True, weights=True),
            parameters={"variant": variant},
        )
        assert result.as_numpy("output").tobytes() == expected.output.tobytes()
        assert result.as_numpy("weights").tobytes() == expected.weights.tobytes()
    notes = result.get_response()["parameters"].get("notes", "")
    assert notes == "; ".join(expected.notes)


def test_softmax_is_the_default_and_parameters_are_the_variant_s(
    loaded: Server, triton: Any
) -> None:
    with Client(loaded.url) as client:
        expected = client.attend("softmax", x=X, layer=NAME, outputs=["output"], causal=True)
    result = triton.infer(NAME, infer_inputs({"x": X}), parameters={"causal": True})
    assert result.as_numpy("output").tobytes() == expected.output.tobytes()


def test_layers_are_not_loaded_or_unloaded_while_serving(triton: Any) -> None:
    for act, word in ((triton.load_model, "loaded"), (triton.unload_model, "unloaded")):
        with raises_inference_error(f"{NAME} cannot be {word} while the service runs"):
            act(NAME)
    assert triton.is_model_ready(NAME)


def test_wrong_requests_are_named(triton: Any) -> None:
    with raises_inference_error('variant is unknown: got "other", expected efficient'):
        triton.infer(NAME, infer_inputs({"x": X}), parameters={"variant": "other"})
    with raises_inference_error("x has the wrong width: got M=3, expected M=16"):
        triton.infer(NAME, infer_inputs({"x": X[..., :3].copy()}))
    with raises_inference_error("linear_layer takes no layer"):
        triton.infer(NAME, infer_inputs({"x": X}), parameters={"variant": "linear_layer"})
    with raises_inference_error("softmax has no parameter 'variant'"):
        arrays = dict.fromkeys(("query", "key", "value"), X)
        triton.infer("softmax", infer_inputs(arrays), parameters={"variant": "softmax"})


def test_runs_count_for_the_layer_and_for_the_variant(loaded: Server, triton: Any) -> None:
    def counts(name: str) -> int:
        (stats,) = triton.get_inference_statistics(name)["model_stats"]
        count: int = stats["inference_count"]
        return count

    def sample(line: str) -> float:
        text = loaded.http.get("/metrics").text
        return float(next(t.rpartition(" ")[2] for t in text.splitlines() if t.startswith(line)))

    names = (NAME, "small.encoder.layer.0", "softmax", "linear")
    lines = [
        f'qkv_layer_runs_total{{layer="{NAME}"}}',
        'qkv_layer_runs_total{layer="small.encoder.layer.0"}',
        'qkv_requests_total{outcome="ok",variant="softmax"}',
        'qkv_requests_total{outcome="ok",variant="linear"}',
        'qkv_requests_total{outcome="ok",variant="unknown"}',
    ]
    before, sampled = [counts(name) for name in names], [sample(line) for line in lines]
    triton.infer(NAME, infer_inputs({"x": X}))
    triton.infer(NAME, infer_inputs({"x": X}), parameters={"variant": "linear"})
    with Client(loaded.url) as client:
        client.attend("softmax", x=X, layer=NAME)
    added = [count - first for count, first in zip(map(counts, names), before, strict=True)]
    assert added == [3, 0, 2, 1]
    assert [sample(line) - first for line, first in zip(lines, sampled, strict=True)] == [
        3,
        0,
        2,
        1,
        0,
    ]
    assert sample(f'qkv_layer_compute_seconds_total{{layer="{NAME}"}}') > 0
