"""Variants of the known types: each field of a configuration with another value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from census.census import Case
from census.small_configs import small_config
from qkv.jobs.loaded.config_fields import NOT_OF_MODELS
from qkv.jobs.loaded.known_models import KNOWN

YARN: Final = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_ROPES: Final[tuple[Mapping[str, Any], ...]] = (
    {"rope_type": "default", "rope_theta": 50.0},
    {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0},
    {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
    },
    YARN,
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    YARN | {"attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.1] * 8,
        "long_factor": [2.0] * 8, "original_max_position_embeddings": 16, "factor": 4.0,
    },
    {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
)  # fmt: skip
_FOREIGN: Final = {
    "sliding_window": 4, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4,
    "attention_multiplier": 0.7, "partial_rotary_factor": 0.5, "use_bidirectional_attention": True,
    "clip_qkv": 0.5, "is_causal": False, "alibi": True, "layer_norm_eps": 0.5, "rms_norm_eps": 0.5,
    "is_decoder": True, "position_embedding_type": "relative_key", "unsloth_version": "2025.1",
    "rope_theta": 50.0, "rope_scaling": {"type": "linear", "factor": 3.0}, "no_rope_layers": [0, 1],
    "rotary_dim": 8, "rotary_pct": 0.5, "use_qk_norm": True, "num_kv_heads": 1, "n_head": 2,
    "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"],
    "scale_attn_weights": False, "multi_query": False, "rope_parameters": dict(YARN),
}  # fmt: skip
"""Fields that a type may have or not; a file may have them all the same."""
_OTHERS: Final[Mapping[str, tuple[Any, ...]]] = {
    "sliding_window": (0, 3, 64),
    "hidden_act": ("relu",),
    "head_dim": (8, 32),
    "num_key_value_heads": (1, 2, 4),
    "layer_types": (
        ["full_attention"] * 2,
        ["sliding_attention", "full_attention"],
        ["chunked_attention", "full_attention"],
    ),
    "rope_parameters": _ROPES,
    "attention_types": ([[["global", "local"], 1]], [[["local"], 2]]),
    "attention_layers": (["local", "global"],),
}
_CLASSES: Final = {
    "bert": "BertLMHeadModel", "roberta": "RobertaForCausalLM", "electra": "ElectraForCausalLM",
    "xlm-roberta": "XLMRobertaForCausalLM", "camembert": "CamembertForCausalLM",
    "llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel",
    "gemma3": "Gemma3ForConditionalGeneration",
    "opt": "OPTForCausalLM", "whisper": "WhisperForConditionalGeneration",
    "distilbert": "DistilBertForMaskedLM", "albert": "AlbertForMaskedLM",
    "gpt_bigcode": "GPTBigCodeForCausalLM", "codegen": "CodeGenForCausalLM",
}  # fmt: skip


def variants_of(model_type: str) -> Iterator[Case]:
    """Yields a known type, with each field set to other values, and with fields of other types.

    Raises:
        KeyError: the type is not known.
    """
    assert model_type in KNOWN
    yield Case(model_type)
    if model_type in _CLASSES:
        yield Case(model_type, {}, _CLASSES[model_type])
        yield Case(model_type, {"is_decoder": True}, _CLASSES[model_type])
    fields = small_config(model_type).to_dict()
    for name, value in fields.items():
        if NOT_OF_MODELS.fullmatch(name):
            continue
        for other in _OTHERS.get(name, _changed(value)):
            if other != value:
                yield Case(model_type, {name: other})
    for name, value in _FOREIGN.items():
        if name not in fields:
            yield Case(model_type, {name: value})
    yield from _together(model_type, fields)


def _together(model_type: str, fields: Mapping[str, Any]) -> Iterator[Case]:
    """Yields variants of several fields that matter only together."""
    if "use_sliding_window" in fields:
        sliding = {"use_sliding_window": True, "sliding_window": 4, "layer_types": None}
        yield Case(model_type, sliding)
        yield Case(model_type, {**sliding, "max_window_layers": 1})
    if "use_bidirectional_attention" in fields and "sliding_window" in fields:
        yield Case(model_type, {"use_bidirectional_attention": True, "sliding_window": 5})
    if "new_decoder_architecture" in fields:
        yield Case(model_type, {"new_decoder_architecture": True, "num_kv_heads": 2})
        yield Case(model_type, {"multi_query": False, "alibi": True})
    if "sliding_window" in fields:
        yield Case(model_type, {"is_causal": False, "sliding_window": 4})


def _changed(value: Any) -> tuple[Any, ...]:
    """Returns other values of a field."""
    if isinstance(value, bool):
        return (not value,)
    if value is None:
        return (True, 4, 0.5)
    if isinstance(value, int):
        return (2 * value or 1,)
    if isinstance(value, float):
        return (2 * value or 0.5,)
    return ()
