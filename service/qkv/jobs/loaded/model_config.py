"""Reads `config.json`: what it says about the attention of a layer.

The names are those of configurations of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from qkv.attention.layers.input_norm import InputNorm
from qkv.attention.layers.qk_norm import QKNorm
from qkv.errors import InvalidContent
from qkv.jobs.loaded.config_fields import ReadFields, check_fields
from qkv.jobs.loaded.config_numbers import integer, number
from qkv.jobs.loaded.known_models import (
    KNOWN,
    OWN_SCALES,
    UNSUPPORTED,
    Config,
    KnownModel,
    Positions,
    has_rope,
    has_window,
    window_of_neo,
)
from qkv.jobs.loaded.model_parts import part_of
from qkv.jobs.loaded.rope_config import read_rope

_MAY_MATTER: Final = {  # parts of the names of fields of unknown types, by what they may give
    "positions": "rope|rotary|alibi|relative|position_embedding_type",
    "window": "window|attention_chunk|chunk_size|local_att|layer_types|attention_types",
    "softcap": "soft_?cap|logits?_cap",
    "scale": "temperature|mscale|query_pre_attn|attention_multiplier|scale_(attn|qk)|"
    "(attn|attention|softmax|qk|query).*scal",
}
_CROSS: Final = "crossattention|encoder_attn"  # modules whose keys come from the encoder
_RMS_EPS: Final = ("rms_norm_eps",)
_LAYER_NORM_EPS: Final = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
_LEAST_SCALE: Final = 1e-9


class LayerConfig(NamedTuple):
    """The part of a model's configuration that describes one layer.

    Attributes:
        fields: members of `layer`: heads, kv_heads, rope, qk_norm.
        parameters: of a variant: causal, scale, softcap, window.
        positions: of the attention; None: not known.
        layout: of the tensors, where names and shapes fit several; None: not known.
        norm: of the model; None: not known.
        ignored: names of its fields that were passed over.
        asks: what a configuration leaves open, with the reason, by the name of a field of the
            operator's file.
    """

    fields: Mapping[str, Any] = {}
    parameters: Mapping[str, Any] = {}
    positions: Positions | None = None
    layout: str | None = None
    norm: InputNorm | None = None
    ignored: tuple[str, ...] = ()
    asks: Mapping[str, str] = {}


def read_config(
    document: Config, path: str, width: int | None, ignored: Collection[str] = ()
) -> LayerConfig:
    """Returns what a configuration says about the layer at a path of its model.

    Args:
        document: of `config.json`.
        path: of the attention, such as "model.layers.3.self_attn".
        width: of its embeddings; None: not known.
        ignored: names of fields that are passed over.

    Raises:
        InvalidContent: the model changes its scores in a way that no layer holds, a number is out
            of range, a field of a known type is not known, or the configuration is that of another
            model.
    """
    part, model_type = part_of(document, path)
    passed = tuple(name for name in ignored if name in part)
    config = ReadFields({name: value for name, value in part.items() if name not in passed})
    _check_supported(config, model_type, document)
    _check_width(config, width)
    known, index = KNOWN.get(model_type), _index(path)
    fields: dict[str, Any] = {}
    if (heads := _heads(config, path)) is not None:
        fields["heads"] = heads
    if (kv_heads := _key_heads(config, model_type)) is not None:
        fields["kv_heads"] = kv_heads
    if known is None:
        return LayerConfig(fields, ignored=passed, asks=_asks(config, model_type))
    norm = _norm(config, known)
    if norm is not None:
        fields["qk_norm"] = norm.numbers
    positions = _positions(config, model_type, known, index)
    if positions == "rotary":
        fields["rope"] = read_rope(config, known, index, heads)
    parameters = _parameters(config, model_type, known, index, path)
    if (scale := _scale(config, model_type, index, heads)) is not None:
        parameters["scale"] = scale
    check_fields(config, model_type)
    return LayerConfig(fields, parameters, positions, known.layout, norm, passed)


def _check_supported(config: Config, model_type: str, document: Config) -> None:
    """Raises an error if no layer holds the attention of a model."""
    for name in (model_type, str(document.get("model_type"))):
        if name in UNSUPPORTED:
            raise InvalidContent(f"the model type {name!r} is not supported: {UNSUPPORTED[name]}")
    if isinstance(config.get("clip_qkv"), int | float):
        raise InvalidContent("clip_qkv is not supported: queries, keys and values are clipped")


def _asks(config: Config, model_type: str) -> dict[str, str]:
    """Returns what the configuration of an unknown model leaves open, with the reason."""
    whose = f"the model type {model_type!r:.60} is not known"
    if not model_type:
        whose = "config.json has no part that is known to be of these layers"
        whose = whose if not config else "config.json has no model type"
    asks = dict.fromkeys(("causal", "positions"), whose)
    if model_type in OWN_SCALES:
        asks["scale"] = whose
    # a layer that belongs to no part may have what one of them says
    parts = [part for part in config.values() if isinstance(part, dict) and "model_type" in part]
    said = [n for every in (config, *parts) for n, value in every.items() if _says(value)]
    for field, pattern in _MAY_MATTER.items():
        if names := list(dict.fromkeys(n for n in said if re.search(pattern, n))):
            asks[field] = f"config.json has {', '.join(names)}"
    return asks


def _says(value: object) -> bool:
    """Returns True if a field says more than that a model lacks something."""
    if isinstance(value, list):
        return set(map(str, value)) - {"full_attention", "attention", "global"} != set()
    return bool(value)


def _check_width(config: Config, width: int | None) -> None:
    expected = number(config, "hidden_size", "n_embd", "d_model")
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
    return integer(config, *names)


def _key_heads(config: Config, model_type: str) -> int | None:
    is_old_falcon = model_type == "falcon" and not config.get("new_decoder_architecture")
    if is_old_falcon or model_type == "gpt_bigcode":
        return None if config.get("multi_query") is False else 1
    return integer(config, "num_key_value_heads", "num_kv_heads", "n_kv_heads")


def _positions(config: Config, model_type: str, known: KnownModel, index: int | None) -> Positions:
    if model_type == "falcon" and config.get("alibi") is True:
        return "alibi"
    if known.positions == "rotary" and not has_rope(config, known, index):
        return "none"
    return known.positions


def _norm(config: Config, known: KnownModel) -> InputNorm | None:
    for names, is_centered in ((_RMS_EPS, False), (_LAYER_NORM_EPS, True)):
        if (eps := number(config, *names, least=0, most=1)) is not None:
            return InputNorm(QKNorm(eps=eps, offset=known.norm_offset), is_centered)
    return None


def _parameters(
    config: Config, model_type: str, known: KnownModel, index: int | None, path: str
) -> dict[str, Any]:
    """Returns the parameters of a variant that the model's attention has."""
    parameters: dict[str, Any] = {}
    sees_later = known.has_both_sides and config.get("use_bidirectional_attention") is True
    is_decoder = known.causal or config.get("is_decoder") is True
    if model_type == "whisper":
        is_decoder = "decoder." in path
    is_whole = config.get("is_causal") is False and model_type != "gpt_neo"  # its mask is its own
    if is_decoder and not is_whole and not sees_later and not re.search(_CROSS, path):
        parameters["causal"] = True
    if (length := _window(config, model_type, known, index)) is not None:
        # masks of both sides have one more key, except those of Gemma 3 itself, which halve it
        length = length // 2 + 1 if sees_later else length
        left = length if is_whole else length - 1
        parameters["window"] = [left, 0 if "causal" in parameters else left]
    if known.has_softcap and (softcap := number(config, "attn_logit_softcapping")):
        parameters["softcap"] = float(softcap)
    return parameters


def _window(config: Config, model_type: str, known: KnownModel, index: int | None) -> int | None:
    """Returns the number of keys in the window of a layer; None: it has none.

    Raises:
        InvalidContent: it has no key.
    """
    if model_type == "gpt_neo":
        return window_of_neo(config, index)
    length = integer(config, "sliding_window")
    if not has_window(config, known, index) or length is None:
        return None
    if length == 0:
        raise InvalidContent("config.json: sliding_window is invalid: got 0, expected 1 or more")
    return length


def _scale(config: Config, model_type: str, index: int | None, heads: int | None) -> float | None:
    """Returns the scale of the scores; None if it is 1 / sqrt(D)."""
    if model_type == "gpt_neo":
        return 1.0
    scalar = number(config, "query_pre_attn_scalar", least=_LEAST_SCALE)
    if scalar is not None:
        return float(scalar**-0.5)
    if model_type not in ("gpt2", "gpt_bigcode"):
        scale = number(config, "attention_multiplier", least=_LEAST_SCALE)
        return None if scale is None else float(scale)
    has_scale = config.get("scale_attn_weights") is not False
    is_by_layer = model_type == "gpt2" and config.get("scale_attn_by_inverse_layer_idx") is True
    if has_scale and not is_by_layer:
        return None
    width = number(config, "n_embd", "hidden_size")
    if not width or not heads or (is_by_layer and index is None):
        raise InvalidContent("config.json gives no scale of the scores: write scale beside it")
    scale = (width / heads) ** -0.5 if has_scale else 1.0
    return scale / (index + 1) if is_by_layer and index is not None else scale
