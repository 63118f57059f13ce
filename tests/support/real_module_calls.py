"""Requests that run real modules on a service, and the errors of the responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import httpx
import torch
from torch import Tensor

from support.known_requests import as_array, as_json
from support.real_module import RealModule, Run, largest_error

_ZERO: Final = 1e-9
"""A gradient this much smaller than the largest one is 0 but for rounding: a key bias without
positions adds the same number to all scores of a row."""


class Errors(NamedTuple):
    """Largest errors against the float64 run of the module, relative to the largest true value."""

    output: float
    gradients: float


def encoded(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns tensors as a JSON request has them."""
    return {name: as_json(tensor.detach().numpy(), "base64") for name, tensor in tensors.items()}


def decoded(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of a JSON response."""
    return {name: torch.from_numpy(as_array(tensor).copy()) for name, tensor in tensors.items()}


def run(
    http: httpx.Client, case: RealModule, kind: str = "attention", **layer: Any
) -> httpx.Response:
    """Returns the response to a request for the module's output or gradients.

    Args:
        http: client of a service.
        case: the module.
        kind: "attention" or "gradients".
        **layer: fields of the layer instead of the module's own.
    """
    inputs = dict(case.embeddings)
    if kind == "gradients":
        inputs["grad_output"] = case.grad_output
    fields = {**case.layer, **layer}
    document = {
        "inputs": encoded(inputs),
        "layer": fields | {"tensors": encoded(fields["tensors"])},
        "parameters": dict(case.parameters),
        "encoding": "base64",
    }
    if kind == "attention":
        document["outputs"] = ["output"]
    return http.post(f"/v1/{kind}/softmax", json=document)


def output(http: httpx.Client, case: RealModule, **layer: Any) -> Tensor:
    """Returns the output (B, L, M) of the block."""
    response = run(http, case, **layer)
    assert response.is_success, response.text
    return decoded(response.json()["outputs"])["output"]


def gradients(http: httpx.Client, case: RealModule) -> dict[str, Tensor]:
    """Returns the gradients by the names of the module's own run."""
    response = run(http, case, "gradients")
    assert response.is_success, response.text
    found = decoded(response.json()["gradients"])
    if "value" in found and "value" not in case.truth.gradients:
        found["key"] = found["key"] + found.pop("value")  # the module takes both from one tensor
    return found


def convert(
    http: httpx.Client, tensors: Mapping[str, Tensor], source: str, target: str, **fields: Any
) -> httpx.Response:
    """Returns the response to a conversion."""
    document = {"from": source, "to": target, "tensors": encoded(tensors), "encoding": "base64"}
    return http.post("/v1/convert", json=document | fields)


def measure(case: RealModule, output: Tensor, gradients: Mapping[str, Tensor]) -> Errors:
    """Returns the errors of an output and of gradients."""
    truth = case.truth
    assert output.shape == truth.output.shape
    assert gradients.keys() == truth.gradients.keys()
    whole = max(float(g.abs().max()) for g in truth.gradients.values())
    errors = []
    for name, gradient in truth.gradients.items():
        assert gradients[name].shape == gradient.shape, name
        size = float(gradient.abs().max())
        scale = size if size > _ZERO * whole else whole
        errors.append(largest_error(gradients[name], gradient, scale))
    return Errors(largest_error(output, truth.output), max(errors))


def own_errors(case: RealModule) -> Errors:
    """Returns the errors of the module itself in float32."""
    narrow: Run = case.narrow
    return measure(case, narrow.output, narrow.gradients)


def bound(case: RealModule) -> float:
    """Returns a bound of the relative errors, from eps of float32 and the number of roundings.

    Rounding errors of n operations add up to at most lambda sqrt(n) u, with a probability that
    lambda = 8 makes practically 1 (Higham and Mary, A New Approach to Probabilistic Rounding
    Error Analysis, 2019). A backward pass has three times the operations; u is eps / 2.
    """
    eps = torch.finfo(torch.float32).eps
    return 8 * float((3 * case.roundings) ** 0.5) * eps / 2
