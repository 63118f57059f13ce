"""A model of transformers with its real sizes and random numbers, in the memory of a few matrices.

Every parameter is a view of an array of random numbers that it shares with others, so that a model
of any depth takes no more memory than its largest matrices. No parameter has a value that hides
something: norms are not ones, and sinks, biases and gates not zeros.
"""

from __future__ import annotations

import contextlib
import math
import warnings
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from qkv.errors import InvalidContent

_SCALE: Final = 1.2  # of the product of a matrix, so that scores and norms matter
_STEP: Final = 7  # numbers between the beginnings of rows that overlap
_OFFSETS: Final = 1 << 16
_CODE: Final = "auto_map"  # a field that names code of the folder
_LARGE: Final = 1 << 24  # numbers, above which the rows of a parameter overlap


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
    numbers = _Numbers(model)
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

    The memory that a module allocates for a parameter is freed at once, and no function of
    `nn.init` has touched it.
    """
    register = nn.Module.register_parameter
    initializers = {
        name: function
        for name, function in vars(nn.init).items()
        if name.endswith("_") and not name.startswith("_") and callable(function)
    }

    def register_hollow(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            hollow = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
            module._parameters[name] = hollow

    setattr(nn.Module, "register_parameter", register_hollow)  # noqa: B010
    for name in initializers:
        setattr(nn.init, name, lambda tensor, *_args, **_options: tensor)
    try:
        yield
    finally:
        setattr(nn.Module, "register_parameter", register)  # noqa: B010
        for name, function in initializers.items():
            setattr(nn.init, name, function)


class _Numbers:
    """Arrays of random numbers that the parameters of a model share, one for each deviation."""

    def __init__(self, model: nn.Module) -> None:
        self._generator = torch.Generator().manual_seed(64)
        sizes: dict[float, int] = {}
        for _, parameter in model.named_parameters():
            deviation = _deviation(parameter)
            sizes[deviation] = max(sizes.get(deviation, 0), _reach(parameter))
        self._arrays = {
            deviation: torch.randn(
                size + _OFFSETS, generator=self._generator, dtype=torch.float64
            ).mul_(deviation)
            for deviation, size in sizes.items()
        }

    def of(self, name: str, parameter: Tensor) -> Tensor:
        """Returns the numbers of a parameter.

        Matrices of equal shapes have different numbers, because they begin at different places.
        """
        array = self._arrays[_deviation(parameter)]
        drawn = array.as_strided(
            tuple(parameter.shape), _strides(parameter), zlib.crc32(name.encode()) % _OFFSETS
        )
        is_weight = name.endswith("weight") and parameter.dim() == 1
        return 1 + drawn if is_weight else drawn


def _deviation(parameter: Tensor) -> float:
    """Returns a deviation with which a product keeps the size of its input."""
    if parameter.dim() < 2:
        return 0.3
    inputs = parameter.shape[-1] if parameter.dim() < 4 else math.prod(parameter.shape[1:])
    return _SCALE / math.sqrt(max(1, inputs))


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Returns dense strides, or for a large parameter strides with which its rows overlap."""
    if parameter.numel() <= _LARGE:
        return parameter.stride()
    if parameter.dim() == 2:
        return _STEP, 1
    return (_STEP,) * (parameter.dim() - 2) + (parameter.shape[-1], 1)


def _reach(parameter: Tensor) -> int:
    """Returns how many numbers lie between the first and the last of a parameter, plus one."""
    steps = zip(parameter.shape, _strides(parameter), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps if size)
