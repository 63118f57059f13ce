"""Finds the part of a configuration that a layer belongs to, by the path of the layer."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from qkv.jobs.loaded.known_models import Config

_TOWERS: Final = {  # names of modules that contain a whole model, by its part of a configuration
    "text_config": "language_model|text_model|text_encoder",
    "vision_config": "vision_model|vision_tower|vision_encoder|visual|image_tower|image_encoder",
    "audio_config": "audio_model|audio_tower|audio_encoder",
}
_PLAIN: Final = re.compile("model|transformer|encoder|decoder|layers?|blocks?|h")
"""Names of modules that say nothing about the part of a model that they belong to."""


class ModelPart(NamedTuple):
    """The part of a configuration that a layer belongs to.

    Attributes:
        config: its fields; none if no part is known to describe the layer.
        model_type: of the part; "" if there is none.
    """

    config: Config
    model_type: str


def part_of(document: Config, path: str) -> ModelPart:
    """Returns the part of a configuration that describes the layer at a path.

    A configuration without parts describes all layers. Encoder and decoder may have one each.
    Otherwise each module around the blocks must be the name of a tower or a plain one: a resampler
    between two towers belongs to neither, and that its widths are those of a part proves nothing.

    Args:
        document: of `config.json`.
        path: of the attention, such as "language_model.model.layers.3.self_attn".
    """
    first, _, rest = path.removeprefix("model.").partition(".")
    for side in (first, f"{first}_config") if first in ("encoder", "decoder") else ():
        if _is_part(document, side):
            return part_of(document[side], rest)
    if not any(_is_part(document, name) for name in document):
        return ModelPart(document, _type_of(document))
    words = [word for word in stack_of(path).split(".") if not _PLAIN.fullmatch(word)]
    towers = {_tower_of(word) for word in words}
    if not towers:
        return ModelPart(document, _type_of(document))
    tower = next(iter(towers))
    if len(towers) > 1 or tower is None or not _is_part(document, tower):
        return ModelPart({}, "")
    part, of_whole = document[tower], _type_of(document) if tower == "text_config" else ""
    return ModelPart(part, _type_of(part) or of_whole)


def stack_of(path: str) -> str:
    """Returns the path of the modules around all blocks of a kind: up to the first number."""
    modules = path.split(".")
    numbers = [i for i, module in enumerate(modules) if module.isdecimal()]
    return ".".join(modules[: numbers[0]] if numbers else modules[:-1])


def _is_part(document: Config, name: str) -> bool:
    """Returns True if a field of a configuration is the configuration of a part."""
    part = document.get(name)
    is_name = name.endswith("_config") or name in ("encoder", "decoder")
    return is_name and isinstance(part, dict) and not {"model_type", "hidden_size"}.isdisjoint(part)


def _tower_of(word: str) -> str | None:
    """Returns the name of a tower's part; None: it is not known."""
    names = (name for name, words in _TOWERS.items() if re.fullmatch(words, word))
    return next(names, None)


def _type_of(config: Config) -> str:
    return str(config.get("model_type") or "")
