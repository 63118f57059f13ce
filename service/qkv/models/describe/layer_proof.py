"""The proof of a description: qkv's own pass of the layer returns what the real module returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_options import LayerOptions
from qkv.attention.layers.layer_reader import read_layer
from qkv.attention.layers.layer_weights import Array
from qkv.attention.layers.layout_catalogue import Layout
from qkv.errors import QkvError
from qkv.local import attend
from qkv.models.describe.attention_run import AttentionRun
from qkv.models.describe.located_layers import LocatedLayer
from qkv.models.describe.rotary_angles import Unfit, error_of
from qkv.tensors import RawTensor
from qkv.wire.message import Message

TOLERANCE: Final = 1e-5
"""The largest error, relative to the largest number of the output."""
SIZES: Final = (0.01, 4.0)
"""Factors of the inputs: a small input shows the eps of a norm, and a large one what is clipped."""
_PARAMETERS: Final = ("causal", "window", "scale", "softcap")


class LayerProof:
    """A layer with the numbers that its module has now, and both compared.

    Args:
        located: the layer.
        layout: of its tensors.
        run: of its module, which runs again.

    Attributes:
        layer: as qkv reads it.

    Raises:
        Unfit: the tensors do not split into the heads of the run.
    """

    def __init__(self, located: LocatedLayer, layout: Layout, run: AttentionRun) -> None:
        self._run, self._tensors = run, located.tensors(run.module)
        self.layer = self._read(layout, located.found.prefix)

    def _read(self, layout: Layout, prefix: str) -> Layer:
        call, problem = self._run.call, ""
        for kv_heads in (call.key.shape[1], None):
            options = LayerOptions(
                layout=layout.name, heads=call.query.shape[1], kv_heads=kv_heads, prefix=prefix
            )
            try:
                return read_layer(options, layout.select(self._tensors, prefix))
            except QkvError as error:
                problem = problem or error.detail
        raise Unfit(f"weights that qkv refuses: {problem}")

    def error(self, fields: Mapping[str, Any], sizes: Sequence[float] = (1.0,)) -> float:
        """Returns the largest error of a description, relative to the output's largest number.

        Args:
            fields: of qkv.toml.
            sizes: factors of the embeddings.

        Raises:
            Unfit: the module returns no such output, or qkv refuses the layer.
        """
        return float(np.max([self._error(fields, size) for size in sizes]))  # NaN stays NaN

    def _error(self, fields: Mapping[str, Any], size: float) -> float:
        x_BLM, expected = self._run.x_BLM * size, self._run.output(size)
        sent = {n: v for n, v in fields.items() if n not in (*_PARAMETERS, "positions")}
        layer = {**sent, "prefix": self.layer.options.prefix}
        found = attended(fields, {"x": x_BLM}, layer, self._tensors)
        found = found.transpose(1, 2).flatten(2) if found.dim() == 4 else found
        if (behind := self._norm_behind()) is not None:
            with torch.no_grad():
                found = behind(found + x_BLM)
        if expected is None or expected.numel() != found.numel():
            shape = None if expected is None else list(expected.shape)
            raise Unfit(f"an output of another shape: got {shape}, expected {list(found.shape)}")
        return error_of(found, expected.reshape(found.shape))

    def _norm_behind(self) -> nn.Module | None:
        """Returns the norm of the sum of input and output that ends the module, if there is one."""
        if "output.weight" not in self.layer.weights:
            return None
        output = self.layer.name_of("output.weight").removeprefix(self.layer.options.prefix or "")
        name = self.layer.layout.behind.get(output.removesuffix(".weight"))
        return None if name is None else dict(self._run.module.named_modules()).get(name)


def attended(
    fields: Mapping[str, Any],
    inputs: Mapping[str, Tensor],
    layer: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Array] = MappingProxyType({}),
) -> Tensor:
    """Returns the output of qkv's own pass, as a request with these tensors gets it.

    Args:
        fields: of qkv.toml, of which those of the variant are taken.
        inputs: of the request.
        layer: its fields; None: the request has no layer.
        tensors: of the layer.

    Raises:
        Unfit: qkv refuses the request.
    """
    parameters = {name: fields[name] for name in _PARAMETERS if name in fields}
    document = {"parameters": parameters, "outputs": ["output"]}
    message = Message(
        document if layer is None else {**document, "layer": layer},
        {name: RawTensor.from_numpy(x.numpy()) for name, x in inputs.items()},
        {name: RawTensor.from_numpy(array) for name, array in tensors.items()},
    )
    try:
        response = attend("softmax", message)
    except QkvError as error:
        raise Unfit(f"weights that qkv refuses: {error.detail}") from None
    return torch.from_numpy(np.array(response.tensors["output"].numpy()))
