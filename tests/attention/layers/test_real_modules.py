"""Layers of real models: the service's output and gradients are those of the model's module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest
import torch

from support import real_module_calls as calls
from support.real_module import RealModule
from support.real_module_calls import bound, measure, own_errors
from support.real_modules import CASES, find
from support.service import Server

# building the models imports transformers and timm, which takes seconds
pytestmark = pytest.mark.slow

ROUNDING: Final = torch.finfo(torch.float32).eps / 2

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True, scope="module")
def _quiet_transformers() -> Iterator[None]:
    """Keeps the warnings of transformers about sizes that no real model has."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(level)


@each_case
def test_output_and_gradients_are_those_of_the_module(server: Server, case: RealModule) -> None:
    """They are as exact as the module itself in float32, against its run in float64."""
    found = measure(case, calls.output(server.http, case), calls.gradients(server.http, case))
    own = own_errors(case)
    assert max(own) < bound(case)  # the module's own run shows that the bound is sensible
    assert max(found) < bound(case)
    # the module's own error may be below one rounding by chance, as on some processors
    assert found.output < 4 * max(own.output, ROUNDING)
    assert found.gradients < 4 * max(own.gradients, ROUNDING)


@pytest.mark.representative
def test_gpt2_runs_on_the_service_as_in_transformers(server: Server) -> None:
    case = find("gpt2")
    found = measure(case, calls.output(server.http, case), calls.gradients(server.http, case))
    assert max(found) < bound(case)


@each_case
def test_auto_finds_the_layout_and_lists_what_it_ignores(server: Server, case: RealModule) -> None:
    """The whole state dict is sent; the prefix selects the layer."""
    response = calls.run(server.http, case, layout="auto")
    if case.auto:
        assert response.status_code == 422
        assert all(name in response.json()["detail"] for name in case.auto)
        return
    assert response.is_success, response.text
    layer = response.json()["layer"]
    assert layer["layout"] == case.layout
    assert layer["heads"] == case.fields["heads"]
    assert layer["kv_heads"] == case.fields.get("kv_heads", case.fields["heads"])
    prefix = case.layer["prefix"]
    assert layer["prefix"] == prefix
    block = {n for n in case.tensors if n.startswith(f"{prefix}." if prefix else "")}
    used = {n for n in case.truth.gradients if n not in case.embeddings}
    assert set(layer["ignored"]) == block - used


def test_one_layer_needs_no_prefix_and_several_are_named(server: Server) -> None:
    case = find("llama")
    own = {n: t for n, t in case.tensors.items() if n.startswith("layers.1.")}
    alone = calls.output(server.http, case, prefix=None, layout="auto", tensors=own)
    assert torch.equal(alone, calls.output(server.http, case))
    response = calls.run(server.http, case, prefix=None)
    assert response.status_code == 422
    detail = response.json()["detail"]
    assert "'layers.0.self_attn', 'layers.1.self_attn'" in detail
    assert response.json()["pointer"] == "/layer/prefix"


@pytest.mark.parametrize("prefix", ["layers.1", "layers.1.", "layers.1.self_attn"])
def test_prefix_of_a_block_selects_its_only_layer(server: Server, prefix: str) -> None:
    case = find("llama")
    found = calls.output(server.http, case, prefix=prefix, layout="auto")
    assert torch.equal(found, calls.output(server.http, case))


def test_prefix_of_several_layers_is_too_short(server: Server) -> None:
    response = calls.run(server.http, find("llama"), prefix="layers")
    assert response.status_code == 422
    assert "prefix is too short: there are 2 layers" in response.json()["detail"]
