"""Random inputs for the arguments that a model of transformers, or a part of one, needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

BATCH: Final = 2
_WIDTH: Final = 64
_FRAMES: Final = 64
_PATCHES: Final = 4  # at a side of an image
_OF_TOWERS: Final = ("pixel_values", "input_features", "input_values")


def runners(model: PreTrainedModel) -> Iterator[nn.Module]:
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


def towers(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Yields the parts of a model that are models of images or sounds.

    What a text tower sees may depend on the model around it, and what a stack of layers sees on the
    masks that it gets: neither runs alone as it does there.
    """
    for part in model.modules():
        if part is model or not isinstance(part, PreTrainedModel):
            continue
        parameters = inspect.signature(part.forward).parameters
        if part.main_input_name in _OF_TOWERS and part.main_input_name in parameters:
            yield part


def draw_inputs(model: nn.Module, length: int, *, every: bool = False) -> dict[str, Any]:
    """Returns random inputs for the arguments that a model needs.

    Args:
        model: or a part of one.
        length: of sequences of tokens. That of images and sounds follows from the model.
        every: texts, images and sounds, whatever of these it takes.
    """
    parameters = inspect.signature(model.forward).parameters
    config = getattr(model, "config", None)
    needed = {n for n, p in parameters.items() if p.default is p.empty and p.kind != p.VAR_KEYWORD}
    needed |= {getattr(model, "main_input_name", "input_ids"), "bbox"} & parameters.keys()
    if getattr(config, "is_encoder_decoder", False):
        needed |= {"decoder_input_ids"} & parameters.keys()
    if every:
        needed |= {"input_ids", *_OF_TOWERS} & parameters.keys()
    if not needed & {*_MAKERS}:
        needed |= set(list(parameters)[:1])
    made = {
        n: make(config, length) for n, make in _MAKERS.items() if n in needed and n in parameters
    }
    if "grid_thw" in made:  # patches of an image, side by side
        first = next(iter(parameters))
        made[first] = torch.randn(_PATCHES * _PATCHES, _numbers_of_patch(config))
    return made


def _numbers_of_patch(config: Any) -> int:
    """Returns how many numbers a patch of an image or a video has."""
    channels = _first(config, ("in_channels", "in_chans", "num_channels"), 3)
    side = _first(config, ("patch_size",), 8)
    return channels * _first(config, ("temporal_patch_size",), 1) * side * side


def _tokens(config: Any, length: int) -> Tensor:
    return torch.randint(10, 90, (BATCH, length))


def _embeddings(config: Any, length: int) -> Tensor:
    return torch.randn(BATCH, length, _first(config, ("hidden_size", "d_model", "dim"), _WIDTH))


def _first(config: Any, names: Sequence[str], default: int) -> int:
    """Returns the first of these fields that is an integer."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), default)


def _pixels(config: Any, length: int) -> Tensor:
    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", 32)
    sides = tuple(side) if isinstance(side, tuple | list) else (side or 32,) * 2
    channels = getattr(vision, "num_channels", 3)
    return torch.randn(BATCH, channels, *sides)


def _features(config: Any, length: int) -> Tensor:
    audio = getattr(config, "audio_config", config)
    names = ("num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", "input_dim")
    bins = _first(audio, names, 16)
    if audio.model_type in ("whisper", "qwen2_audio_encoder", "voxtral_encoder", "moonshine"):
        return torch.randn(BATCH, bins, 2 * getattr(audio, "max_source_positions", _FRAMES))
    return torch.randn(BATCH, _FRAMES, bins)


def _ones(config: Any, length: int) -> Tensor:
    return torch.ones(BATCH, length, dtype=torch.long)


_MAKERS: Final[Mapping[str, Callable[[Any, int], Any]]] = {
    "input_ids": _tokens,
    "decoder_input_ids": _tokens,
    "attention_mask": _ones,
    "inputs_embeds": _embeddings,
    "hidden_states": _embeddings,
    "hidden_state": _embeddings,
    "pixel_values": _pixels,
    "pixel_values_videos": lambda config, n: _pixels(config, n)[:, None].repeat(1, 4, 1, 1, 1),
    "input_features": _features,
    "input_values": lambda config, n: torch.randn(BATCH, 4000),
    "bbox": lambda config, n: torch.randint(0, 20, (BATCH, n, 4)).cumsum(-1),
    "grid_thw": lambda config, n: torch.tensor([[1, _PATCHES, _PATCHES]]),
    "position_ids": lambda config, n: torch.arange(n).expand(BATCH, n),
}
