"""Requests by Triton's Python client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest
from tritonclient import http as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

Array = np.ndarray[Any, Any]


def random_inputs(dtype: Any = np.float32, seed: int = 0, keys: int = 7) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    shapes = {"query": (2, 4, 5, 8), "key": (2, 2, keys, 8), "value": (2, 2, keys, 6)}
    return {name: draw.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def infer_inputs(arrays: Mapping[str, Array], binary: Sequence[str] | None = None) -> list[Any]:
    """Returns inputs for the client; `binary` names those sent as bytes, None means all."""
    inputs = []
    for name, array in arrays.items():
        tensor = triton.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array, binary_data=binary is None or name in binary)
        inputs.append(tensor)
    return inputs


def requested_outputs(**binary: bool) -> list[Any]:
    """Returns requested outputs; a value is True for an output as bytes."""
    return [triton.InferRequestedOutput(name, binary_data=b) for name, b in binary.items()]


@contextmanager
def raises_inference_error(message: str, status: int = 400) -> Iterator[None]:
    """Expects an error of the client with the service's message and status."""
    with pytest.raises(InferenceServerException) as caught:
        yield
    assert message in caught.value.message()
    assert caught.value.status() == str(status)
    assert "decoding" not in caught.value.message()


def triton_client(url: str) -> closing[Any]:
    """Returns a client for one thread."""
    return closing(triton.InferenceServerClient(url.removeprefix("http://")))
