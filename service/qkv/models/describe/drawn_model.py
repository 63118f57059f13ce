"""A model of transformers with its real sizes and random numbers, in the memory of one matrix.

The rows of every matrix overlap in one array of random numbers, so that a model of any depth takes
a few megabytes, and each product the memory of its own matrix for a moment. No parameter has a
value that hides something: norms are not ones, and sinks, biases and gates not zeros.
"""

from __future__ import annotations

import contextlib
import math
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from qkv.errors import InvalidContent

_SCALE: Final = 1.2  # of the product of a matrix, so that scores and norms matter
_STEPS: Final = (17, 13, 11, 7)  # numbers between the beginnings of rows that overlap, by axis
_MAX_STEPS: Final = 1 << 17  # numbers between the first and the last row of an axis, if it can be
_OFFSETS: Final = 1 << 16
_CODE: Final = "auto_map"  # a field that names code of the folder


def read_config(fields: Mapping[str, Any]) -> PretrainedConfig:
    """Returns a configuration of transformers. No code of a folder runs.

    Args:
        fields: of `config.json`.

    Raises:
        InvalidContent: transformers does not know the type, or refuses a field.
    """
    name = fields.get("model_type")
    if name not in CONFIG_MAPPING:
        raise InvalidContent(
            f"config.json has an unknown model type: got {name!r:.80}, expected one of transformers"
        )
    known = {field: value for field, value in fields.items() if field != _CODE}
    try:
        config: PretrainedConfig = CONFIG_MAPPING[name].from_dict(known)
    except Exception as error:  # transformers raises any
        raise InvalidContent(f"config.json: {type(error).__name__}: {error}"[:300]) from None
    return config


def draw(config: PretrainedConfig) -> PreTrainedModel:
    """Returns the model of a configuration in float64, with random numbers from a fixed seed.

    Raises:
        InvalidContent: transformers cannot build it.
    """
    try:
        with quiet(), _without_parameters():
            model: PreTrainedModel = AutoModel.from_config(
                config, attn_implementation="eager", experts_implementation="eager"
            )
    except Exception as error:  # transformers raises any
        raise InvalidContent(
            f"transformers cannot build the model: {type(error).__name__}: {error}"[:300]
        ) from None
    model = model.double().eval()
    for part in model.modules():
        if isinstance(getattr(part, "config", None), PretrainedConfig):
            part.config.use_cache = False
    numbers = _Numbers(model.parameters())
    drawn: dict[int, nn.Parameter] = {}  # tied parameters stay one
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in drawn:
                tensor = numbers.of(f"{path}.{name}", parameter)
                drawn[id(parameter)] = nn.Parameter(tensor, requires_grad=False)
            module._parameters[name] = drawn[id(parameter)]
    return model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps the messages of transformers about sizes and kernels."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


@contextlib.contextmanager
def _without_parameters() -> Iterator[None]:
    """Builds modules whose parameters have no memory. Their buffers have their numbers.

    The memory that a module allocates for a parameter is freed at once, and nothing has touched it.
    """
    register = nn.Module.register_parameter

    def register_hollow(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            hollow = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
            module._parameters[name] = hollow

    setattr(nn.Module, "register_parameter", register_hollow)  # noqa: B010
    try:
        yield
    finally:
        setattr(nn.Module, "register_parameter", register)  # noqa: B010


class _Numbers:
    """Random numbers that the parameters of a model share.

    Args:
        parameters: of the model.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        size = max(map(_reach, parameters), default=0) + _OFFSETS
        generator = torch.Generator().manual_seed(64)
        self._normal = torch.randn(size, generator=generator, dtype=torch.float64)
        self._scaled: dict[float, Tensor] = {}

    def of(self, name: str, parameter: Tensor) -> Tensor:
        """Returns the numbers of a parameter.

        Matrices of equal shapes have different numbers, because they begin at different places.
        """
        deviation = _deviation(parameter)
        if deviation not in self._scaled:
            self._scaled[deviation] = self._normal * deviation
        drawn = self._scaled[deviation].as_strided(
            parameter.shape, _strides(parameter.shape), zlib.crc32(name.encode()) % _OFFSETS
        )
        if parameter.dim() < 2:
            return 1 + drawn if name.endswith("weight") else drawn.clone()
        return drawn


def _deviation(parameter: Tensor) -> float:
    """Returns a deviation with which a product keeps the size of its input."""
    if parameter.dim() < 2:
        return 0.3
    inputs = parameter.shape[-1] if parameter.dim() < 4 else math.prod(parameter.shape[1:])
    return _SCALE / math.sqrt(max(1, inputs))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns strides with which the rows of a parameter overlap."""
    if not shape:
        return ()
    steps = _STEPS[len(_STEPS) - len(shape) + 1 :]
    rows = zip(steps, shape, strict=False)
    return (*(min(step, max(1, _MAX_STEPS // max(1, size))) for step, size in rows), 1)


def _reach(parameter: Tensor) -> int:
    """Returns how many numbers lie between the first and the last of a parameter, plus one."""
    steps = zip(parameter.shape, _strides(parameter.shape), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps if size)
