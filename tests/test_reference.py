"""`qkv.reference`: the float64 reference in this process, without a service."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import qkv
from qkv.attention import catalogue


def inputs(dtype: Any = np.float32, *lead: int) -> dict[str, Any]:
    """Returns random queries, keys and values of 3 queries and 4 keys."""
    random = np.random.default_rng(0)
    shapes = {"query": (*lead, 3, 5), "key": (*lead, 4, 5), "value": (*lead, 4, 6)}
    return {n: random.normal(size=shape).astype(dtype) for n, shape in shapes.items()}


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_reference_of_softmax_is_the_formula(lead: tuple[int, ...]) -> None:
    arrays = inputs(np.float32, *lead)
    run = qkv.reference("softmax", **arrays, scale=0.5, causal=True)
    query, key, value = (x.astype(np.float64) for x in arrays.values())
    scores = 0.5 * query @ key.swapaxes(-1, -2) + np.triu(np.full((3, 4), -np.inf), 1)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    assert run.variant == "softmax"
    assert run.weights_are == "stochastic"
    assert run.output.dtype == run.weights.dtype == run.scores.dtype == np.float64
    np.testing.assert_allclose(run.weights, weights, rtol=1e-13)
    np.testing.assert_allclose(run.output, weights @ value, rtol=1e-12)
    np.testing.assert_allclose(run.scores, scores, rtol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_reference_of_torch_tensors_is_a_torch_tensor(dtype: torch.dtype) -> None:
    arrays = {n: torch.from_numpy(x).to(dtype) for n, x in inputs(np.float64, 1, 2).items()}
    run = qkv.reference("linear", **arrays, key_lengths=torch.tensor([3]))
    linear = catalogue.find("linear")
    wide = {linear.inputs[n].argument: x.double() for n, x in arrays.items()}
    truth = linear.reference(**wide, key_lengths_B=torch.tensor([3]))
    assert torch.equal(run.output, truth.output)
    assert torch.equal(run.weights, truth.weights)


@pytest.mark.parametrize("name", catalogue.variants())
def test_every_variant_has_a_reference(name: str) -> None:
    tensors = inputs(np.float64, 1, 2)
    if name == "linear_layer":
        tensors = {"x": np.ones((2, 3)), "weight": np.ones((4, 3))}
    if name == "gated":  # each query is at the position of its key
        tensors["query"] = tensors["key"]
    known = catalogue.find(name).inputs
    run = qkv.reference(name, **{n: x for n, x in tensors.items() if n in known})
    assert run.output.dtype == np.float64
    assert np.isfinite(run.output).all()
    assert set(run.outputs) == set(catalogue.find(name).outputs)
    assert f"Run('{name}'" in repr(run)


def test_projections_of_linformer_are_those_of_the_dtype_of_the_inputs() -> None:
    """The service draws them by dtype: the reference for float32 inputs has the same."""
    run = qkv.reference("linformer", **inputs(np.float32, 1, 1), seed=3, rank=2)
    wide = {n: x.astype(np.float64) for n, x in inputs(np.float32, 1, 1).items()}
    served = catalogue.find("linformer")
    arguments = {served.inputs[n].argument: torch.from_numpy(x) for n, x in wide.items()}
    narrow = {n: x.float() for n, x in arguments.items()}
    drawn = served.random_inputs({**narrow, "seed": 3, "rank": 2})
    projections = {n: x.double() for n, x in drawn.items() if n.endswith("_RN")}
    truth = served.reference(**arguments, **projections, seed=3, rank=2)
    np.testing.assert_array_equal(run.output, truth.output.numpy())


@pytest.mark.parametrize(
    ("more", "error", "detail"),
    [
        ({"causual": True}, qkv.QkvError, "has no parameter 'causual'"),
        ({"key": np.ones((4, 2), np.float32)}, qkv.QkvError, "D=2"),
        ({"scale": float("nan")}, qkv.QkvError, "scale"),
    ],
)
def test_errors_are_those_of_the_client(
    more: dict[str, Any], error: type[Exception], detail: str
) -> None:
    with pytest.raises(error, match=detail):
        qkv.reference("softmax", **(inputs() | more))
    with pytest.raises(qkv.QkvError, match="no variant 'sofmax'"):
        qkv.reference("sofmax", **inputs())
    with pytest.raises(qkv.QkvError, match="array"):
        qkv.reference("softmax", query=[[1.0]])


@pytest.mark.process
def test_without_torch_the_error_names_the_extra() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np, qkv\n"
        "try: qkv.reference('softmax', query=np.eye(2), key=np.eye(2), value=np.eye(2))\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "needs qkv[server]: torch is not installed" in done.stdout
