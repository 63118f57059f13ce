"""Reads what a configuration says about the rotary embedding of a layer."""

from __future__ import annotations

import math
from typing import Any, Final

from qkv.errors import InvalidContent
from qkv.jobs.loaded.config_fields import ReadFields
from qkv.jobs.loaded.config_numbers import integer, number
from qkv.jobs.loaded.known_models import Config, KnownModel, has_window

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


def read_rope(
    config: ReadFields, known: KnownModel, index: int | None, heads: int | None
) -> dict[str, Any]:
    """Returns the field `rope` of a layer."""
    if known.dims is not None:
        dims = integer(config, "rotary_dim")
        return {"order": known.order, "dims": known.dims if dims is None else dims}
    is_local = known.local_base is not None and has_window(config, known, index)
    scaling = _scaling(config, index, is_local)
    every = config
    if is_local:
        every = every | {"rope_theta": config.get("rope_local_base_freq", known.local_base)}
    every = every | scaling
    rope: dict[str, Any] = {} if known.order is None else {"order": known.order}
    base = number(every, "rope_theta", "rotary_emb_base")
    if (base := known.base if base is None else base) is not None:
        rope["base"] = float(base)
    if (dims := _turning_channels(every, known, heads)) is not None:
        rope["dims"] = dims
    if (numbers := _numbers_of_scaling(config, scaling)) is not None:
        rope["scaling"] = numbers
    return rope


def _numbers_of_scaling(config: Config, scaling: Config) -> dict[str, Any] | None:
    """Returns the field `rope.scaling` of a layer; None: its frequencies are not scaled.

    Raises:
        InvalidContent: the kind of scaling is not supported.
    """
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return None
    if kind not in _SCALINGS:
        raise InvalidContent(
            f"the scaling of the rotary embedding is not supported: got {kind!r:.60}, expected "
            f"{', '.join(_SCALINGS)}"
        )
    given = {n: scaling[n] for n in _SCALINGS[kind] if scaling.get(n) is not None}
    numbers = {n: v if n in _INTEGERS else number(given, n) for n, v in given.items()}
    if kind == "linear":
        return {"rope_type": kind} | numbers
    of_model = integer(config, "original_max_position_embeddings")
    length = of_model or integer(scaling, "original_max_position_embeddings")
    longest = integer(config, "max_position_embeddings") or 8192
    numbers["original_max_position_embeddings"] = length = length or longest
    if kind == "yarn":
        factor = numbers.setdefault("factor", longest / length)
        scales = [number(scaling, name) for name in ("mscale", "mscale_all_dim")]
        if factor and all(scales) and "attention_factor" not in numbers:
            first, second = (_amplitude(factor, scale or 1.0) for scale in scales)
            numbers["attention_factor"] = first / second
    return {"rope_type": kind} | numbers


def _amplitude(factor: float, scale: float) -> float:
    """Returns YaRN's factor of the rotated channels."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def _scaling(config: Config, index: int | None, is_local: bool) -> Config:
    """Returns the numbers of the rotary embedding that a configuration keeps in an object."""
    old = config.get("rope_scaling")  # before transformers 5, which still prefers it
    kinds = None if isinstance(old, dict) and old else config.get("rope_parameters")
    types = config.get("layer_types")
    kind = "full_attention"
    if isinstance(types, list) and index is not None and index < len(types):
        kind = types[index]
    if isinstance(kinds, dict):
        found = kinds.get("sliding_attention" if is_local else kind, kinds)
    else:  # the old scaling was that of the layers without a window
        found = None if is_local else old
    return found if isinstance(found, dict) else {}


def _turning_channels(config: Config, known: KnownModel, heads: int | None) -> int | None:
    """Returns the number of a head's channels that turn; None: all."""
    share = number(config, "partial_rotary_factor", "rotary_pct", "rotary_percentage")
    share = known.share if share is None else share
    if share is not None and share < 1 and heads:
        width = number(config, "head_dim") or (number(config, "hidden_size") or 0) / heads
        return 2 * int(share * width / 2) or None
    return None
