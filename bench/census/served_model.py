"""A saved model as the service loads it: its layers, and the output that a request gets."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from qkv.client.arrays import to_raw
from qkv.engine.device.cpu import CpuDevice
from qkv.engine.executor import execute
from qkv.jobs.job import Job
from qkv.jobs.loaded.checkpoint_loader import load_checkpoints
from qkv.jobs.loaded.loaded_layers import LoadedCheckpoint, LoadedLayers
from qkv.jobs.plan import Limits, Plan
from qkv.wire.message import Message

_BYTES: Final = 1 << 30
_NAME: Final = "census"


class ServedModel:
    """The layers of a folder.

    Args:
        folder: with config.json and the tensors.

    Attributes:
        layers: those that are served.
    """

    def __init__(self, folder: Path) -> None:
        log = logging.getLogger("qkv.jobs.loaded.checkpoint_loader")
        level, log.level = log.level, logging.CRITICAL
        try:
            self.layers: LoadedLayers = load_checkpoints({_NAME: folder}, _BYTES)
        finally:
            log.setLevel(level)

    @property
    def checkpoint(self) -> LoadedCheckpoint:
        """The only checkpoint."""
        (checkpoint,) = self.layers.checkpoints
        return checkpoint

    @property
    def problem(self) -> str:
        """The reasons why layers are not served; "" if all are."""
        return self.checkpoint.problem or " | ".join(self.checkpoint.unserved.values())

    def output(self, name: str, inputs: Mapping[str, Tensor], **fields: Any) -> Tensor:
        """Returns the output of a layer, the heads side by side, as a request gets it.

        Args:
            name: of the layer.
            inputs: x, or query, key and value.
            **fields: of the layer in the request.

        Raises:
            QkvError: the service refuses the request.
        """
        message = Message(
            {"layer": {"name": name, **fields}, "outputs": ["output"]},
            {n: to_raw(tensor.float().contiguous()) for n, tensor in inputs.items()},
        )
        job = Job.new(Plan, "softmax", message, Limits(_BYTES, _BYTES, layers=self.layers))
        (result,) = execute([job], CpuDevice(), stack=False)
        output = torch.from_numpy(result.outputs["output"].numpy().copy())
        return output.transpose(1, 2).flatten(2) if output.dim() == 4 else output
