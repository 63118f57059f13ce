"""A small model of transformers with random weights, and what its modules receive and return."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from census.small_configs import LENGTH, small_config
from qkv.models.describe.drawn_model import quiet
from qkv.models.describe.model_run import BATCH, draw_inputs

__all__ = ["BATCH", "Call", "NotBuilt", "build", "quiet", "record", "save", "tensors_in"]

_log = logging.getLogger(__name__)
_MAX_PARAMETERS: Final = 30_000_000
_SCALE: Final = 1.2  # of a matrix, so that scores and norms matter


class NotBuilt(Exception):
    """A model that cannot be built small, or does not run."""


@dataclass
class Call:
    """The first call of a module.

    Attributes:
        arguments: by name.
        output: its first tensor; None: it returned none.
    """

    arguments: dict[str, Any]
    output: Tensor | None = field(default=None)

    @property
    def x(self) -> Tensor | None:
        """The first argument that is a tensor of numbers."""
        return next((t for t in self.arguments.values() if _is_floating(t)), None)


def build(model_type: str, model_class: Any = None, **changes: Any) -> PreTrainedModel:
    """Returns a small model with random weights, of which none is trivial.

    Args:
        model_type: of transformers.
        model_class: with a head; None: the model without one.
        **changes: fields of the configuration.

    Raises:
        NotBuilt: it is impossible, with the reason.
    """
    torch.manual_seed(0)
    try:
        config = small_config(model_type, **changes)
        make = AutoModel.from_config if model_class is None else model_class._from_config
        with torch.device("meta"):
            size = sum(p.numel() for p in make(config).parameters())
        if size > _MAX_PARAMETERS:
            raise NotBuilt(f"it has {size} parameters")
        # the eager mode of Falcon adds ALiBi twice
        mode = "sdpa" if model_type == "falcon" and config.alibi else "eager"
        model = make(config, attn_implementation=mode).float().eval()
    except NotBuilt:
        raise
    except Exception as error:  # whatever a model of this size does
        raise NotBuilt(f"{type(error).__name__}: {error}"[:200]) from None
    _draw(model)
    for part in model.modules():
        if isinstance(getattr(part, "config", None), PretrainedConfig):
            part.config.use_cache = False
    return model


def _draw(model: nn.Module) -> None:
    """Draws all weights: norms are not ones, biases, sinks and gates not zeros."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            numbers = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(numbers * _SCALE / parameter.shape[-1] ** 0.5)
            else:
                parameter.nan_to_num_().clamp_(-2, 2).add_(0.3 * numbers)


def save(model: PreTrainedModel, folder: Path) -> None:
    """Saves a model as its users do.

    Raises:
        NotBuilt: it cannot be saved.
    """
    try:
        with quiet():
            model.save_pretrained(folder)
    except Exception as error:
        raise NotBuilt(f"save_pretrained: {type(error).__name__}: {error}"[:200]) from None


def record(model: PreTrainedModel, paths: Iterable[str], needed: Iterable[str]) -> dict[str, Call]:
    """Runs a model on random inputs; returns the first call of each module of these paths.

    Args:
        model: the model.
        paths: of modules.
        needed: those of them that must be called: if the model calls one of them nowhere, its
            parts run alone.
    """
    modules = {path: model.get_submodule(path) for path in paths}
    calls: dict[str, Call] = {}
    with contextlib.ExitStack() as stack, torch.no_grad(), quiet():
        for path, module in modules.items():
            for hook in _hooks(path, module, calls):
                stack.callback(hook.remove)
        for runner in _runners(model):
            if calls.keys() >= {*needed}:
                break
            torch.manual_seed(3)
            try:
                runner(**draw_inputs(runner, LENGTH))
            except Exception:  # its other parts still run
                _log.debug("%s does not run", type(runner).__name__, exc_info=True)
    return calls


def _runners(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yields the model, then its parts that are models, the larger ones first."""
    yield model
    for part in model.modules():
        if part is not model and isinstance(part, PreTrainedModel):
            yield part
    for part in model.modules():  # encoders and stacks of layers that are no models
        names = list(inspect.signature(part.forward).parameters)
        is_stack = names[:1] and names[0] in ("inputs_embeds", "hidden_states", "hidden_state")
        if is_stack and not isinstance(part, PreTrainedModel) and not _is_time_first(part):
            yield part


def _is_time_first(part: nn.Module) -> bool:
    """Returns True if a module has attention whose inputs have the axes (L, B, M)."""
    every = (m for m in part.modules() if isinstance(m, nn.MultiheadAttention))
    return any(not module.batch_first for module in every)


def _hooks(path: str, module: nn.Module, calls: dict[str, Call]) -> list[Any]:
    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        if path in calls and calls[path].output is not None:
            return
        try:
            bound = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
        except TypeError:
            bound = {str(i): value for i, value in enumerate(args)} | kwargs
        for name in ("kwargs", "args"):
            more = bound.pop(name, {})
            bound |= (
                more if isinstance(more, dict) else {str(i): value for i, value in enumerate(more)}
            )
        calls[path] = Call({name: _copied(value) for name, value in bound.items()})

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if path in calls and calls[path].output is None:
            found = next(iter(tensors_in(output)), None)
            calls[path].output = None if found is None else found.detach().clone()

    return [
        module.register_forward_pre_hook(begin, with_kwargs=True),
        module.register_forward_hook(end),
    ]


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple | list):
        return tuple(_copied(each) for each in value)
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of an output in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
