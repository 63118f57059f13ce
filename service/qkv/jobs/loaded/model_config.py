"""Reads `config.json`: what it says about the attention of a layer.

The names are those of configurations of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from qkv.attention.layers.input_norm import InputNorm
from qkv.attention.layers.qk_norm import QKNorm
from qkv.errors import InvalidContent, format_value
from qkv.jobs.loaded.known_models import (
    KNOWN,
    Config,
    KnownModel,
    Positions,
    has_rope,
    has_window,
    window_of_neo,
)

__all__ = ["LayerConfig", "read_config"]

_SCALINGS: Final = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "truncate",
    ),
}
_INTEGERS: Final = ("original_max_position_embeddings", "truncate")
_CHANGES_SCORES: Final = {  # fields of configurations, by the parameter that they may give
    "window": ("sliding_window",),
    "softcap": ("attn_logit_softcapping",),
    "scale": ("query_pre_attn_scalar", "attention_multiplier"),
}
_CROSS: Final = "crossattention|encoder_attn"  # modules whose keys come from the encoder
_RMS_EPS: Final = ("rms_norm_eps",)
_LAYER_NORM_EPS: Final = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
_LARGEST: Final = 1e30
_LARGEST_INTEGER: Final = 1e9
_LEAST_SCALE: Final = 1e-9


class LayerConfig(NamedTuple):
    """The part of a model's configuration that describes one layer.

    Attributes:
        fields: members of `layer`: heads, kv_heads, rope, qk_norm.
        parameters: of a variant: causal, scale, softcap, window.
        positions: of the attention; None: not known.
        layout: of the tensors, where names and shapes fit several; None: not known.
        norm: of the model; None: not known.
        asks: what a configuration of an unknown type leaves open, by the name of a field.
    """

    fields: Mapping[str, Any] = {}
    parameters: Mapping[str, Any] = {}
    positions: Positions | None = None
    layout: str | None = None
    norm: InputNorm | None = None
    asks: Mapping[str, str] = {}


def read_config(document: Config, path: str, width: int | None) -> LayerConfig:
    """Returns what a configuration says about the layer at a path of its model.

    Args:
        document: of `config.json`.
        path: of the attention, such as "model.layers.3.self_attn".
        width: of its embeddings; None: not known.

    Raises:
        InvalidContent: the model changes its scores in a way that no layer holds, a number is out
            of range, or the configuration is that of another model.
    """
    config, model_type = _part_of(document, path)
    _check_width(config, width)
    if isinstance(config.get("clip_qkv"), int | float):
        raise InvalidContent("clip_qkv is not supported: queries, keys and values are clipped")
    known, index = KNOWN.get(model_type), _index(path)
    fields: dict[str, Any] = {}
    if (heads := _heads(config, path)) is not None:
        fields["heads"] = heads
    if (kv_heads := _key_heads(config, model_type)) is not None:
        fields["kv_heads"] = kv_heads
    if known is None:
        return LayerConfig(fields, asks=_asks(config, model_type))
    norm = _norm(config, known)
    if norm is not None:
        fields["qk_norm"] = norm.numbers
    positions = _positions(config, model_type, known, index)
    if positions == "rotary":
        fields["rope"] = _rope(config, known, index, heads)
    parameters = _parameters(config, model_type, known, index, path)
    if (scale := _scale(config, model_type, index, heads)) is not None:
        parameters["scale"] = scale
    return LayerConfig(fields, parameters, positions, known.layout, norm)


def _asks(config: Config, model_type: str) -> dict[str, str]:
    """Returns what the configuration of an unknown model leaves open, with the reason."""
    whose = f"of the model type {model_type!r:.60}" if model_type else "of the model"
    asks = {"positions": f"the positions {whose} are not known"}
    for field, names in _CHANGES_SCORES.items():
        for name in names:
            if config.get(name) not in (None, False):
                asks[field] = f"config.json has {name}, and its use {whose} is not known"
    return asks


def _part_of(document: Config, path: str) -> tuple[Config, str]:
    """Returns the part of a configuration that a layer belongs to, and the type of the model."""
    names = ("text_config",)
    if re.search(r"vision|visual|image", path):
        names = ("vision_config",)
    parts = [document[name] for name in names if isinstance(document.get(name), dict)]
    config = parts[0] if parts else document
    model_type = config.get("model_type") or document.get("model_type") or ""
    return config, str(model_type)


def _check_width(config: Config, width: int | None) -> None:
    expected = _number(config, "hidden_size", "n_embd", "d_model")
    if None not in (width, expected) and width != expected:
        raise InvalidContent(
            f"config.json belongs to another model: got embeddings of width {width}, expected "
            f"{expected:g} as it says"
        )


def _index(path: str) -> int | None:
    """Returns the number of a layer in its path; None if there is none."""
    numbers = [part for part in path.split(".") if re.fullmatch(r"[0-9]{1,9}", part)]
    return int(numbers[-1]) if numbers else None


def _heads(config: Config, path: str) -> int | None:
    side = "decoder" if path.startswith(("decoder.", "model.decoder.")) else "encoder"
    names = ("num_attention_heads", "n_head", "num_heads", "n_heads", f"{side}_attention_heads")
    return _integer(config, *names)


def _key_heads(config: Config, model_type: str) -> int | None:
    if model_type == "falcon" and not config.get("new_decoder_architecture"):
        return None if config.get("multi_query") is False else 1
    return _integer(config, "num_key_value_heads", "num_kv_heads", "n_kv_heads")


def _positions(config: Config, model_type: str, known: KnownModel, index: int | None) -> Positions:
    if model_type == "falcon" and config.get("alibi") is True:
        return "alibi"
    if known.positions == "rotary" and not has_rope(config, known, index):
        return "none"
    return known.positions


def _norm(config: Config, known: KnownModel) -> InputNorm | None:
    for names, is_centered in ((_RMS_EPS, False), (_LAYER_NORM_EPS, True)):
        if (eps := _number(config, *names, least=0, most=1)) is not None:
            return InputNorm(QKNorm(eps=eps, offset=known.norm_offset), is_centered)
    return None


def _rope(
    config: Config, known: KnownModel, index: int | None, heads: int | None
) -> dict[str, Any]:
    """Returns the field `rope` of a layer."""
    is_local = known.local_base is not None and has_window(config, known, index)
    scaling = _scaling(config, index, is_local)
    every = {**config}
    if is_local:
        every["rope_theta"] = config.get("rope_local_base_freq", known.local_base)
    every |= scaling
    rope: dict[str, Any] = {} if known.order is None else {"order": known.order}
    base = _number(every, "rope_theta", "rotary_emb_base")
    if (base := known.base if base is None else base) is not None:
        rope["base"] = float(base)
    if (dims := _turning_channels(every, known, heads)) is not None:
        rope["dims"] = dims
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return rope
    if kind not in _SCALINGS:
        raise InvalidContent(
            f"the scaling of the rotary embedding is not supported: got {kind!r:.60}, expected "
            f"{', '.join(_SCALINGS)}"
        )
    given = {n: scaling[n] for n in _SCALINGS[kind] if scaling.get(n) is not None}
    numbers = {n: v if n in _INTEGERS else _number(given, n) for n, v in given.items()}
    if kind == "yarn" and "original_max_position_embeddings" not in numbers:
        numbers["original_max_position_embeddings"] = config.get("max_position_embeddings", 8192)
    return rope | {"scaling": {"rope_type": kind} | numbers}


def _scaling(config: Config, index: int | None, is_local: bool) -> dict[str, Any]:
    """Returns the numbers of the rotary embedding that a configuration keeps in an object."""
    kinds = config.get("rope_parameters")
    types = config.get("layer_types")
    kind = "full_attention"
    if isinstance(types, list) and index is not None and index < len(types):
        kind = types[index]
    if isinstance(kinds, dict):
        found = kinds.get("sliding_attention" if is_local else kind, kinds)
    else:  # before transformers 5, the scaling was that of the layers without a window
        found = None if is_local else config.get("rope_scaling")
    return dict(found) if isinstance(found, dict) else {}


def _turning_channels(config: Config, known: KnownModel, heads: int | None) -> int | None:
    """Returns the number of a head's channels that turn; None: all."""
    share = _number(config, "partial_rotary_factor", "rotary_pct", "rotary_percentage")
    share = known.share if share is None else share
    if share is not None and share < 1 and heads:
        width = _number(config, "head_dim") or (_number(config, "hidden_size") or 0) / heads
        return 2 * int(share * width / 2) or None
    dims = _integer(config, "rotary_dim")
    return known.dims if dims is None else dims


def _parameters(
    config: Config, model_type: str, known: KnownModel, index: int | None, path: str
) -> dict[str, Any]:
    """Returns the parameters of a variant that the model's attention has."""
    parameters: dict[str, Any] = {}
    architectures = config.get("architectures")
    names = " ".join(map(str, architectures)) if isinstance(architectures, list) else ""
    is_decoder = known.causal or config.get("is_decoder") is True
    if model_type == "whisper":
        is_decoder = "decoder." in path
    is_decoder = is_decoder or re.search(r"CausalLM|LMHead", names) is not None
    if is_decoder and not re.search(_CROSS, path):
        parameters["causal"] = True
    length = _integer(config, "sliding_window")
    if model_type == "gpt_neo":
        length = window_of_neo(config, index)
    elif length is not None and not has_window(config, known, index):
        length = None
    if length is not None:
        parameters["window"] = [length - 1, 0 if "causal" in parameters else length - 1]
    if softcap := _number(config, "attn_logit_softcapping"):
        parameters["softcap"] = float(softcap)
    return parameters


def _scale(config: Config, model_type: str, index: int | None, heads: int | None) -> float | None:
    """Returns the scale of the scores; None if it is 1 / sqrt(D)."""
    if model_type == "gpt_neo":
        return 1.0
    scalar = _number(config, "query_pre_attn_scalar", least=_LEAST_SCALE)
    if scalar is not None:
        return float(scalar**-0.5)
    if model_type not in ("gpt2", "gpt_bigcode"):
        scale = _number(config, "attention_multiplier", least=_LEAST_SCALE)
        return None if scale is None else float(scale)
    has_scale = config.get("scale_attn_weights") is not False
    is_by_layer = model_type == "gpt2" and config.get("scale_attn_by_inverse_layer_idx") is True
    if has_scale and not is_by_layer:
        return None
    width = _number(config, "n_embd", "hidden_size")
    if not width or not heads or (is_by_layer and index is None):
        raise InvalidContent("config.json gives no scale of the scores: write scale beside it")
    scale = (width / heads) ** -0.5 if has_scale else 1.0
    return scale / (index + 1) if is_by_layer and index is not None else scale


def _number(
    config: Config, *names: str, least: float = -_LARGEST, most: float = _LARGEST
) -> float | None:
    """Returns the first of these fields that is a number.

    Raises:
        InvalidContent: it is out of range.
    """
    for name in names:
        value = config.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if not least <= value <= most:
            raise InvalidContent(
                f"config.json: {name} is invalid: got {format_value(value)}, expected a number "
                f"from {least:g} to {most:g}"
            )
        return value
    return None


def _integer(config: Config, *names: str) -> int | None:
    value = _number(config, *names, least=0, most=_LARGEST_INTEGER)
    if value is not None and value != int(value):
        raise InvalidContent(
            f"config.json: {' or '.join(names)} is invalid: got {value}, expected an integer"
        )
    return None if value is None else int(value)
