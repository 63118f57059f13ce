"""The types of models whose positions, rotary channels, scales and windows are known.

Source: the configurations and modules of transformers 5.23. The names of fields are those of
`config.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from qkv.errors import InvalidContent, format_value

Config = Mapping[str, Any]
"""A configuration: the object of `config.json`, or the part of it that belongs to a layer."""

Positions = Literal["none", "rotary", "alibi"]
"""The kind of positions of a model's attention; "none": it has none."""

_OfLayer = Callable[[Config, int], bool]


@dataclass(frozen=True)
class KnownModel:
    """Properties of the modules of a model that its configuration does not give.

    Attributes:
        positions: of its attention.
        causal: True for a decoder.
        order: of the rotary channels; None: that of the layout.
        base: of the rotary wavelengths, if the configuration has none.
        local_base: the same in layers with a window; None: the same base.
        share: of a head's channels that turn, if the configuration has none.
        dims: the number of channels that turn, if the configuration has none. It has no other
            numbers of the embedding, whose base is 10,000.
        has_window: tells whether a layer has the window, if the configuration does not; None: all
            have it.
        is_window_optional: the window needs `use_sliding_window`.
        has_rope: tells whether a layer has the rotary embedding; None: all have it.
        norm_offset: added to the weights of its norms.
        layout: of its attention, where names and shapes fit several.
        has_both_sides: it may see later keys, by `use_bidirectional_attention`.
        has_softcap: its scores have the cap of the configuration.
    """

    positions: Positions
    causal: bool = False
    order: Literal["interleaved"] | None = None
    base: float | None = None
    local_base: float | None = None
    share: float | None = None
    dims: int | None = None
    has_window: _OfLayer | None = None
    is_window_optional: bool = False
    has_rope: _OfLayer | None = None
    norm_offset: Literal[0, 1] = 0
    layout: str | None = None
    has_both_sides: bool = False
    has_softcap: bool = False


def has_window(config: Config, known: KnownModel, index: int | None) -> bool:
    """Returns True if a layer has the window of the configuration.

    Args:
        config: of the model.
        known: of its type.
        index: the number of the layer; None: its name has none.

    Raises:
        InvalidContent: the configuration contradicts itself, or the layer is of another kind.
    """
    switch = config.get("use_sliding_window")
    is_off = switch is False or (known.is_window_optional and switch is not True)
    kind = _kind(config, index)
    if kind == "sliding_attention" and (is_off or config.get("sliding_window") is None):
        raise InvalidContent(
            f"config.json: layer_types is invalid: got {kind!r} of layer {index}, expected "
            "'full_attention' where the configuration gives or uses no sliding_window"
        )
    if is_off or kind is not None:
        return kind == "sliding_attention"
    return known.has_window is None or (index is not None and known.has_window(config, index))


def _kind(config: Config, index: int | None) -> str | None:
    """Returns the kind of a layer in `layer_types`; None if it is not there."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or index is None or index >= len(kinds):
        return None
    if kinds[index] not in ("full_attention", "sliding_attention"):
        raise InvalidContent(
            f"config.json: layer_types is invalid: got {format_value(kinds[index])} of layer "
            f"{index}, expected 'full_attention' or 'sliding_attention'"
        )
    return str(kinds[index])


def has_rope(config: Config, known: KnownModel, index: int | None) -> bool:
    """Returns True if a layer of a rotary model has the rotary embedding."""
    return known.has_rope is None or index is None or known.has_rope(config, index)


def window_of_neo(config: Config, index: int | None) -> int | None:
    """Returns the window of a layer of GPT-Neo, whose configuration has fields of its own."""
    if index is None or _kind_in_neo(config, index) != "local":
        return None
    return _integer(config, "window_size", 256, least=1)


def _kind_in_neo(config: Config, index: int) -> object:
    """Returns the kind of a layer: "global" or "local"; None if there is no such layer."""
    if (layers := _list(config, "attention_layers", None)) is not None:
        return layers[index] if index < len(layers) else None
    for entry in _list(config, "attention_types", [[["global", "local"], 12]]) or ():
        match entry:
            case [[*kinds], int(times)]:
                if index < len(kinds) * times:
                    return kinds[index % len(kinds)]
                index -= len(kinds) * times
            case _:
                raise _invalid("attention_types", entry, "lists of kinds and of their repetitions")
    return None


def _list(config: Config, name: str, default: list[Any] | None) -> list[Any] | None:
    value = config.get(name)
    if value is not None and not isinstance(value, list):
        raise _invalid(name, value, "a list")
    return default if value is None else value


def _integer(config: Config, name: str, default: int, least: int = 0) -> int:
    value = config.get(name)
    if value is not None and (type(value) is not int or value < least):
        raise _invalid(name, value, f"an integer, {least} or more")
    return default if value is None else value


def _invalid(name: str, value: object, expected: str) -> InvalidContent:
    return InvalidContent(
        f"config.json: {name} is invalid: got {format_value(value)}, expected {expected}"
    )


def _all_but_each(interval: int) -> _OfLayer:
    def has_window(config: Config, index: int) -> bool:
        return (index + 1) % _integer(config, "sliding_window_pattern", interval, least=1) != 0

    return has_window


def _is_late(config: Config, index: int) -> bool:
    return index >= _integer(config, "max_window_layers", 28)


def _is_early(config: Config, index: int) -> bool:
    return index % 2 == 0 and not _is_late(config, index)


def _has_rope_in_smollm(config: Config, index: int) -> bool:
    listed = config.get("no_rope_layers")  # 1: the layer has the embedding
    if isinstance(listed, list) and index < len(listed):
        return bool(listed[index])
    return (index + 1) % _integer(config, "no_rope_layer_interval", 4, least=1) != 0


def _has_rope_in_cohere(config: Config, index: int) -> bool:
    """Returns True in layers with a window, which alone have positions."""
    return has_window(config, _COHERE2, index)


_ENCODER: Final = KnownModel("none")
_DECODER: Final = KnownModel("none", causal=True)
_ROTARY: Final = KnownModel("rotary", causal=True)
_INTERLEAVED: Final = replace(_ROTARY, order="interleaved")
_GEMMA: Final = replace(_ROTARY, norm_offset=1)
_GEMMA3: Final = replace(
    _GEMMA, base=1e6, local_base=1e4, has_window=_all_but_each(6), has_both_sides=True
)
_QWEN: Final = replace(_ROTARY, is_window_optional=True)
_SMOLLM: Final = replace(
    _QWEN,
    base=2e6,
    has_window=lambda config, index: not _has_rope_in_smollm(config, index),
    has_rope=_has_rope_in_smollm,
)
_COHERE2: Final = replace(_INTERLEAVED, has_window=_all_but_each(4))
_ENCODERS: Final = (
    "albert bert camembert clip_vision_model deit distilbert electra roberta vit xlm-roberta"
)

KNOWN: Final[Mapping[str, KnownModel]] = {
    **dict.fromkeys(_ENCODERS.split(), _ENCODER),
    **dict.fromkeys(("clip_text_model", "gpt2", "gpt_neo", "opt"), _DECODER),
    "gpt_bigcode": replace(_DECODER, layout="falcon"),
    "bloom": KnownModel("alibi", causal=True, layout="bloom"),
    "falcon": replace(_ROTARY, layout="falcon"),
    **dict.fromkeys(("granite", "llama", "mistral", "olmo", "olmo2", "phi3"), _ROTARY),
    "starcoder2": _ROTARY,
    "mixtral": replace(_ROTARY, base=1e6),
    "phi": replace(_ROTARY, share=0.5),
    "gpt_neox": replace(_ROTARY, share=0.25, layout="neox"),
    "stablelm": replace(_ROTARY, share=0.25),
    **dict.fromkeys(("qwen2", "qwen3"), replace(_QWEN, has_window=_is_late)),
    "qwen2_moe": replace(_QWEN, has_window=_is_early),
    "qwen3_moe": _QWEN,
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, has_window=_all_but_each(2), has_softcap=True),
    **dict.fromkeys(("gemma3", "gemma3_text"), _GEMMA3),
    "gpt_oss": replace(_ROTARY, base=150000, has_window=_all_but_each(2)),
    "smollm3": _SMOLLM,
    "cohere": replace(_INTERLEAVED, base=500000),
    "cohere2": replace(_COHERE2, has_rope=_has_rope_in_cohere),
    **dict.fromkeys(("glm", "glm4"), replace(_INTERLEAVED, share=0.5)),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe"), replace(_INTERLEAVED, base=500000)),
    "codegen": replace(_INTERLEAVED, dims=64, layout="codegen"),
    "gptj": replace(_INTERLEAVED, dims=64),
    "whisper": _ENCODER,
}
"""The known types by `model_type`."""

_IMAGE_POSITIONS: Final = "its rotary positions are those of images, with two axes"
_BARE_NORMS: Final = "it normalises {} without weights"

UNSUPPORTED: Final[Mapping[str, str]] = {
    "autoformer": "it correlates series in place of tokens",
    "bros": "it adds positions of boxes to the scores",
    **dict.fromkeys(
        ("dinov3_vit", "llama4_vision_model", "mlcd_vision_model", "pixtral"), _IMAGE_POSITIONS
    ),
    **dict.fromkeys(
        ("embedding_gemma2_text", "gemma4_text", "gemma4_unified_text"),
        _BARE_NORMS.format("values"),
    ),
    "florence_vision": "it attends over channels",
    **dict.fromkeys(
        ("grounding-dino", "mm-grounding-dino"), "special tokens divide its text into parts"
    ),
    "llama4_text": "it scales queries by their position, and normalises them without weights",
    **dict.fromkeys(("mra", "yoso"), "it approximates the softmax"),
    "nanochat": _BARE_NORMS.format("queries and keys"),
    "pegasus_x": "it attends within blocks and to global tokens",
    "t5gemma2_decoder": "it attends to its own tokens and to those of the encoder at once",
}
"""Types whose attention no layer holds, with the reason, where no tensor shows it."""

OWN_SCALES: Final = ("dia_encoder", "dia_decoder")
"""Types whose scores have a scale that the configuration does not give."""
