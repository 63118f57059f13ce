"""Runs a model on random inputs, and keeps what its attention modules receive."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qkv.models.describe.drawn_model import quiet

BATCH: Final = 2
_SEED: Final = 3
_FEW: Final = 16  # tokens, for models that take fewer than others
_WIDTH: Final = 64
_FRAMES: Final = 64
_PATCHES: Final = 4  # at a side of an image
_OF_TOWERS: Final = ("pixel_values", "input_features", "input_values")


class Arguments(NamedTuple):
    """What a module receives.

    Attributes:
        args, kwargs: of its first call.
        positions: of the tokens; None: 0, 1, 2, ...
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    positions: Sequence[int] | None


def run_model(
    model: PreTrainedModel,
    paths: Collection[str],
    length: int,
    positions: Sequence[int] | None = None,
) -> dict[str, Arguments]:
    """Runs a model, and its towers if a module is in none that ran.

    Args:
        model: in float64.
        paths: of modules.
        length: of sequences of tokens.
        positions: of the tokens, where the model takes them; None: 0, 1, 2, ...

    Returns:
        What each module receives, by path, without those that did not run.
    """
    begun: dict[str, Arguments] = {}
    ended: dict[str, Arguments] = {}

    def hooks(path: str) -> Iterator[Any]:
        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            begun[path] = Arguments(args, dict(kwargs), positions)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            ended.setdefault(path, begun[path])

        module = model.get_submodule(path)
        yield module.register_forward_pre_hook(begin, with_kwargs=True)
        yield module.register_forward_hook(end)

    with contextlib.ExitStack() as stack, torch.no_grad(), quiet():
        for hook in itertools.chain.from_iterable(map(hooks, paths)):
            stack.callback(hook.remove)
        for runner, tokens, every in _attempts(model, length):
            if ended.keys() >= {*paths}:
                break
            torch.manual_seed(_SEED)
            with contextlib.suppress(Exception):  # whatever a model does with such inputs
                inputs = draw_inputs(runner, tokens, every=every)
                if positions is not None:
                    inputs["position_ids"] = torch.tensor(positions).expand(BATCH, -1)
                runner(**{n: x.double() if x.is_floating_point() else x for n, x in inputs.items()})
    return ended


def _attempts(model: PreTrainedModel, length: int) -> Iterator[tuple[nn.Module, int, bool]]:
    """Yields a model with numbers of tokens, and with all inputs or those it needs; then towers.

    What a text tower sees may depend on the model around it, and what a stack of layers sees on the
    masks that it gets: neither runs alone as it does there.
    """
    yield from ((model, *each) for each in itertools.product((length, _FEW), (False, True)))
    for part in model.modules():
        if part is not model and isinstance(part, PreTrainedModel):
            parameters = inspect.signature(part.forward).parameters
            if part.main_input_name in _OF_TOWERS and part.main_input_name in parameters:
                yield part, length, False


def draw_inputs(model: nn.Module, length: int, *, every: bool = False) -> dict[str, Tensor]:
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
    made = {name: make(config, length) for name, make in _MAKERS.items() if name in needed}
    if "grid_thw" in made:  # in place of an image, the numbers of its patches
        made[next(iter(parameters))] = _patches(config)
    return made


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
    return torch.randn(BATCH, getattr(vision, "num_channels", 3), *sides)


def _videos(config: Any, length: int) -> Tensor:
    images = _first(getattr(config, "vision_config", config), ("num_frames",), 4)
    return torch.stack([_pixels(config, length) for _ in range(images)], 1)


def _patches(config: Any) -> Tensor:
    """Returns the numbers of the patches of an image, one row each."""
    channels = _first(config, ("in_channels", "in_chans", "num_channels"), 3)
    side, frames = (_first(config, (n,), 1) for n in ("patch_size", "temporal_patch_size"))
    return torch.randn(_PATCHES**2, channels * frames * side**2)


def _features(config: Any, length: int) -> Tensor:
    audio = getattr(config, "audio_config", config)
    names = ("num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", "input_dim")
    bins = _first(audio, names, 16)
    if audio.model_type in ("whisper", "qwen2_audio_encoder", "voxtral_encoder", "moonshine"):
        return torch.randn(BATCH, bins, 2 * getattr(audio, "max_source_positions", _FRAMES))
    return torch.randn(BATCH, _FRAMES, bins)


_MAKERS: Final[Mapping[str, Callable[[Any, int], Tensor]]] = {
    "input_ids": _tokens,
    "decoder_input_ids": _tokens,
    "attention_mask": lambda config, length: torch.ones(BATCH, length, dtype=torch.long),
    "inputs_embeds": _embeddings,
    "hidden_states": _embeddings,
    "hidden_state": _embeddings,
    "pixel_values": _pixels,
    "pixel_values_videos": _videos,
    "grid_thw": lambda config, length: torch.tensor([[1, _PATCHES, _PATCHES]]),
    "input_features": _features,
    "input_values": lambda config, length: torch.randn(BATCH, 4000),
    "bbox": lambda config, length: torch.randint(0, 20, (BATCH, length, 4)).cumsum(-1),
    "position_ids": lambda config, length: torch.arange(length).expand(BATCH, length),
}
