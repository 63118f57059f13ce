"""The proof of a description: qkv's own pass of the layer returns what the real module returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_weights import Array
from qkv.errors import QkvError
from qkv.local import attend
from qkv.models.describe.layer_record import LayerRecord, first_tensor
from qkv.models.describe.rotary_angles import Unfit
from qkv.tensors import RawTensor
from qkv.wire.message import Message

TOLERANCE: Final = 1e-5
"""The largest error, relative to the largest number of the output."""
SIZES: Final = (1.0, 0.01, 4.0)
"""Factors of the inputs: a small input shows the eps of a norm, and a large one what is clipped."""
_PARAMETERS: Final = ("causal", "window", "scale", "softcap")
_OF_TOML: Final = ("positions", "input_norm")


def error_of(
    layer: Layer,
    fields: Mapping[str, Any],
    module: nn.Module,
    record: LayerRecord,
    x_BLM: Tensor,
    tensors: Mapping[str, Array],
    size: float = 1.0,
) -> float:
    """Returns the largest error of a description, relative to the largest number of the output.

    Args:
        layer: that it describes.
        fields: of qkv.toml.
        module: with the numbers of `tensors`; it runs again.
        record: of a run, whose arguments it gets.
        x_BLM: its input there.
        tensors: of the layer, float64, by whole name.
        size: factor of the input.

    Raises:
        Unfit: the module returns no such output, or qkv refuses the layer.
    """
    recorded = record.x
    assert recorded is not None

    def replaced(value: Any) -> Any:
        if value is recorded:
            return value * size
        if isinstance(value, tuple | list):
            return type(value)(replaced(each) for each in value)
        return value

    args = [replaced(value) for value in record.args]
    kwargs = {name: replaced(value) for name, value in record.kwargs.items()}
    with torch.no_grad():
        expected = first_tensor(module(*args, **kwargs))
        found = _output(layer, fields, tensors, x_BLM * size)
        if expected is not None and (behind := _norm_behind(layer, module)) is not None:
            found = behind(found + x_BLM * size)
    if expected is None or expected.numel() != found.numel():
        shape = None if expected is None else list(expected.shape)
        raise Unfit(f"an output of another shape: got {shape}, expected {list(found.shape)}")
    expected = expected.reshape(found.shape)
    return float((found - expected).abs().max() / expected.abs().max())


def _output(
    layer: Layer, fields: Mapping[str, Any], tensors: Mapping[str, Array], x_BLM: Tensor
) -> Tensor:
    """Returns the output of qkv's own pass, as a request with these tensors gets it."""
    sent = {n: v for n, v in fields.items() if n not in (*_PARAMETERS, *_OF_TOML)}
    message = Message(
        {
            "layer": {**sent, "prefix": layer.options.prefix},
            "parameters": {n: fields[n] for n in _PARAMETERS if n in fields},
            "outputs": ["output"],
        },
        {"x": RawTensor.from_numpy(x_BLM.numpy())},
        {name: RawTensor.from_numpy(array) for name, array in tensors.items()},
    )
    try:
        response = attend("softmax", message)
    except QkvError as error:
        raise Unfit(f"weights that qkv refuses: {error.detail}") from None
    output = torch.from_numpy(np.array(response.tensors["output"].numpy()))
    return output.transpose(1, 2).flatten(2) if output.dim() == 4 else output


def _norm_behind(layer: Layer, module: nn.Module) -> nn.Module | None:
    """Returns the norm of the sum of input and output that ends the module; None: there is none."""
    if "output.weight" not in layer.weights:
        return None
    output = layer.name_of("output.weight").removeprefix(layer.options.prefix or "")
    name = layer.layout.behind.get(output.removesuffix(".weight"))
    if name is None or name not in dict(module.named_modules()):
        return None
    return module.get_submodule(name)
