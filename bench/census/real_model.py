"""A small model of transformers with random weights, and what its modules receive and return."""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from census.small_configs import LENGTH, WIDTH, small_config

__all__ = ["BATCH", "Call", "NotBuilt", "build", "quiet", "record", "save", "tensors_in"]

BATCH: Final = 2
_log = logging.getLogger(__name__)
_MAX_PARAMETERS: Final = 30_000_000
_SCALE: Final = 1.2  # of a matrix, so that scores and norms matter
_FRAMES: Final = 64
_PATCHES: Final = 4  # at a side of an image


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


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps the warnings of transformers about sizes that no real model has."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)


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
                runner(**_inputs(runner))
            except Exception:  # its other parts still run
                _log.debug("%s does not run", type(runner).__name__, exc_info=True)
    return calls


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


def _runners(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
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


def _inputs(model: nn.Module) -> dict[str, Any]:
    """Returns random inputs for the arguments that a model needs."""
    parameters = inspect.signature(model.forward).parameters
    config = getattr(model, "config", None)
    needed = {n for n, p in parameters.items() if p.default is p.empty and p.kind != p.VAR_KEYWORD}
    needed |= {getattr(model, "main_input_name", "input_ids"), "bbox"} & parameters.keys()
    if getattr(config, "is_encoder_decoder", False):
        needed |= {"decoder_input_ids"} & parameters.keys()
    if not needed & {*_MAKERS}:
        needed |= set(list(parameters)[:1])
    made = {n: make(config) for n, make in _MAKERS.items() if n in needed and n in parameters}
    if "grid_thw" in made:  # patches of an image, side by side
        first = next(iter(parameters))
        made[first] = torch.randn(_PATCHES * _PATCHES, _numbers_of_patch(config))
    return made


def _numbers_of_patch(config: Any) -> int:
    """Returns how many numbers a patch of an image or a video has."""
    channels = _first(config, ("in_channels", "in_chans", "num_channels"), 3)
    side = _first(config, ("patch_size",), 8)
    return channels * _first(config, ("temporal_patch_size",), 1) * side * side


def _tokens(config: Any) -> Tensor:
    return torch.randint(10, 90, (BATCH, LENGTH))


def _embeddings(config: Any) -> Tensor:
    return torch.randn(BATCH, LENGTH, _first(config, ("hidden_size", "d_model", "dim"), WIDTH))


def _first(config: Any, names: Sequence[str], default: int) -> int:
    """Returns the first of these fields that is an integer."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), default)


def _pixels(config: Any) -> Tensor:
    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", 32)
    sides = tuple(side) if isinstance(side, tuple | list) else (side or 32,) * 2
    channels = getattr(vision, "num_channels", 3)
    return torch.randn(BATCH, channels, *sides)


def _features(config: Any) -> Tensor:
    audio = getattr(config, "audio_config", config)
    names = ("num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", "input_dim")
    bins = _first(audio, names, 16)
    if audio.model_type in ("whisper", "qwen2_audio_encoder", "voxtral_encoder", "moonshine"):
        return torch.randn(BATCH, bins, 2 * getattr(audio, "max_source_positions", _FRAMES))
    return torch.randn(BATCH, _FRAMES, bins)


_MAKERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "input_ids": _tokens,
    "decoder_input_ids": _tokens,
    "attention_mask": lambda config: torch.ones(BATCH, LENGTH, dtype=torch.long),
    "inputs_embeds": _embeddings,
    "hidden_states": _embeddings,
    "hidden_state": _embeddings,
    "pixel_values": _pixels,
    "pixel_values_videos": lambda config: _pixels(config)[:, None].repeat(1, 4, 1, 1, 1),
    "input_features": _features,
    "input_values": lambda config: torch.randn(BATCH, 4000),
    "bbox": lambda config: torch.randint(0, 20, (BATCH, LENGTH, 4)).cumsum(-1),
    "grid_thw": lambda config: torch.tensor([[1, _PATCHES, _PATCHES]]),
    "position_ids": lambda config: torch.arange(LENGTH).expand(BATCH, LENGTH),
}
