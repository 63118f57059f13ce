"""Small configurations of the model types of transformers, built by the names of their fields.

A field that no rule knows keeps its default.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Mapping
from typing import Any, Final

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

WIDTH: Final = 64
HEADS: Final = 4
LENGTH: Final = 12
VOCABULARY: Final = 128
_WINDOW: Final = 4
_SIDE: Final = 32  # pixels of an image

_SIZES: Final = {
    "hidden_size|d_model|n_embd|dim|embed_dim|hidden_dim|model_dim|d_embed|embedding_size"
    "|projection_dim|decoder_hidden_size|encoder_hidden_size|out_hidden_size|text_hidden_size"
    "|output_hidden_size|vision_embed_dim|output_dim|text_width|hidden_channels|cross_hidden_size"
    "|vision_hidden_size|audio_hidden_size|word_embed_proj_dim|embedding_dim|d_latents"
    "|projector_hidden_size|width|vision_output_dim|prompt_embed_dim|rnn_width|lru_width"
    "|decoder_embed_dim|fpn_hidden_size|mask_feature_size|feature_size|encoder_hidden_dim"
    "|decoder_hidden_dim|hidden_size_per_layer_input|audio_token_embed_dim": WIDTH,
    "num_attention_heads|n_head|num_heads|n_heads|encoder_attention_heads|heads"
    "|decoder_attention_heads|num_self_attention_heads|num_cross_attention_heads"
    "|attention_heads|decoder_num_attention_heads|encoder_num_attention_heads|n_heads_encoder"
    "|mamba_num_heads|num_encoder_attention_heads|num_decoder_attention_heads": HEADS,
    "intermediate_size|n_inner|ffn_dim|encoder_ffn_dim|decoder_ffn_dim|d_ff|d_inner|mlp_dim"
    "|moe_intermediate_size|shared_expert_intermediate_size|decoder_intermediate_size"
    "|intermediate_dim|ffn_hidden_size|dim_feedforward|expert_ffn_hidden_size|linear_dim"
    "|shared_intermediate_size|mlp_hidden_size|intermediate_size_mlp|hidden_dim_ffn"
    "|encoder_feed_forward_dim|decoder_feed_forward_dim|feed_forward_size": 48,
    "num_hidden_layers|n_layer|n_layers|num_layers|encoder_layers|decoder_layers|depth|layers"
    "|num_encoder_layers|num_decoder_layers|decoder_num_hidden_layers|num_blocks|num_transformers"
    "|encoder_num_hidden_layers|num_self_attends_per_block|num_layers_encoder|e_layers|d_layers"
    "|decoder_depth|encoder_depth|num_stages_layers|num_global_layers|vision_depth": 2,
    "vocab_size|text_vocab_size|tgt_vocab_size|src_vocab_size|entity_vocab_size|n_vocab"
    "|codebook_size|audio_vocab_size|image_vocab_size|num_audio_tokens": VOCABULARY,
    "max_position_embeddings|n_positions|n_ctx|max_seq_len|max_source_positions|context_length_"
    "|max_target_positions|max_sequence_length|seq_length|max_seq_length|block_size": 64,
    "image_size|img_size": _SIDE,
    "patch_size": 8,
    "num_experts|n_routed_experts|num_local_experts|moe_num_experts|n_experts": 4,
    "num_experts_per_tok|moe_topk|top_k_experts|moe_k|num_experts_per_token": 2,
    "n_shared_experts|n_group|topk_group|num_shared_experts|first_k_dense_replace"
    "|num_expert_group|num_nextn_predict_layers|zero_expert_num": 1,
    "q_lora_rank|kv_lora_rank|index_head_dim|o_lora_rank": 16,
    "index_topk": LENGTH,
    "qk_rope_head_dim|qk_nope_head_dim|v_head_dim|index_n_heads": 8,
    "state_size|mamba_d_state|ssm_state_size|d_state|mamba_state_dim": 8,
    "sliding_window|attention_window_size|window_size_left|local_window|max_window_size": _WINDOW,
    "sliding_window_size|attention_chunk_size": _WINDOW,
    "num_queries|num_query_tokens|num_latents|decoder_query_num": 5,
    "linear_num_key_heads|linear_num_value_heads|linear_num_heads": HEADS,
    "linear_key_head_dim|linear_value_head_dim|mamba_d_head|mamba_head_dim": 16,
    "num_mel_bins|n_mels": 16,
    "d_kv": 16,
    "rotary_dim": 4,
    "conv_depthwise_kernel_size": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "chunk_size|mamba_chunk_size": 4,
    "attention_window": _WINDOW,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_buckets": 16,
}  # fmt: skip
_BY_NAME: Final = {name: size for names, size in _SIZES.items() for name in names.split("|")}
_KEY_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "attention_groups_num")
_WIDTHS_OF_HEADS: Final = ("head_dim", "attention_head_dim", "kv_channels", "global_head_dim")

_NEEDED: Final[Mapping[str, Mapping[str, Any]]] = {
    "hunyuan_v1_dense hunyuan_v1_moe ministral nemotron": {"head_dim": 16},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1},
    "autoformer informer time_series_transformer": {"prediction_length": 6},
}
_OF_TYPE: Final = {name: fields for names, fields in _NEEDED.items() for name in names.split()}
"""Fields without which a type cannot be built."""


def model_types() -> list[str]:
    """Returns the types that have a model."""
    return sorted(MODEL_MAPPING_NAMES)


def fields_of(config: type[PretrainedConfig]) -> dict[str, Any]:
    """Returns the fields of a configuration and their defaults."""
    return dict(config().to_dict())


def small_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """Returns a small configuration of a type, with some fields of other values.

    Raises:
        Exception: the configuration cannot be small; any, of its own checks.
    """
    default = CONFIG_MAPPING[model_type]()
    return CONFIG_MAPPING[model_type](**(small_fields(default) | changes))


def small_fields(default: PretrainedConfig) -> dict[str, Any]:
    """Returns the fields of a default configuration that become smaller, parts included."""
    every: dict[str, Any] = default.to_dict()
    small: dict[str, Any] = {}
    for name, value in every.items():
        part = getattr(default, name, None)
        if isinstance(part, PretrainedConfig):
            small[name] = part.to_dict() | small_fields(part)
            continue
        changed = _small(name, value, every)
        if name == "rope_parameters" and isinstance(value, dict) and _has_sections(default):
            is_half = value.get("partial_rotary_factor") == 0.5
            changed = changed | {"mrope_section": [2, 1, 1] if is_half else [4, 2, 2]}
        if changed != value:
            small[name] = changed
    return {**small, **_layer_lists(every), **_OF_TYPE.get(default.model_type, {})}


def _has_sections(config: PretrainedConfig) -> bool:
    """Returns True if the code of a type splits rotary channels into sections of its own size."""
    module = type(config).__module__.replace("configuration_", "modeling_")
    with contextlib.suppress(ImportError):
        source = inspect.getsource(importlib.import_module(module))
        return "mrope_section" in source and getattr(config, "rope_parameters", None) is not None
    return False


def _small(name: str, value: Any, every: Mapping[str, Any]) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if name in _KEY_HEADS:
        return _small_key_heads(value, every)
    if name in _WIDTHS_OF_HEADS and isinstance(value, int):
        is_rotary = value == every.get("qk_rope_head_dim")  # in latent attention
        return _BY_NAME["qk_rope_head_dim"] if is_rotary else WIDTH // HEADS
    if name.endswith(("_token_id", "_token_index", "_token_ids")) and isinstance(value, int):
        return _small_token(name, value)
    if isinstance(value, int) and name in _BY_NAME:
        return min(value, _BY_NAME[name])
    if isinstance(value, list | tuple) and name in _BY_NAME:
        return [_BY_NAME[name] for _ in value]
    if isinstance(value, dict):
        return _small_rope(value)
    return value


def _small_key_heads(value: Any, every: Mapping[str, Any]) -> Any:
    heads = next((every[n] for n in ("num_attention_heads", "n_head", "n_heads") if n in every), 0)
    if not isinstance(value, int):
        return value
    return 1 if value == 1 else HEADS if value == heads else 2


def _small_token(name: str, value: int) -> int:
    if value < 4:
        return value
    return 100 + sum(map(ord, name)) % (VOCABULARY - 100)


def _small_rope(value: dict[str, Any]) -> dict[str, Any]:
    """Returns parameters of a rotary embedding whose sections fit the width of a small head."""
    small = {n: _small_rope(v) if isinstance(v, dict) else v for n, v in value.items()}
    if isinstance(value.get("mrope_section"), list):
        is_half = value.get("partial_rotary_factor") == 0.5
        small["mrope_section"] = [2, 1, 1] if is_half else [4, 2, 2]
    if "original_max_position_embeddings" in value:
        small["original_max_position_embeddings"] = 8
    for name in ("short_factor", "long_factor"):
        if isinstance(value.get(name), list):
            small[name] = [1.0 + i / 8 for i in range(WIDTH // HEADS // 2)]
    return small


def _layer_lists(every: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the lists of a value for each layer, with each value once, and how many they are."""
    names = ("num_hidden_layers", "n_layer", "num_layers")
    depth_name = next((name for name in names if isinstance(every.get(name), int)), None)
    if depth_name is None:
        return {}
    depth = every[depth_name]
    lists = {n: v for n, v in every.items() if isinstance(v, list) and len(v) == depth > 2}
    rows = list(zip(*lists.values(), strict=True)) if lists else []
    chosen = [i for i, row in enumerate(rows) if row not in rows[:i]][:4]
    if not chosen:
        return {}
    chosen = chosen if len(chosen) > 1 else [0, 1]
    small = {name: [values[i] for i in chosen] for name, values in lists.items()}
    return {**small, depth_name: len(chosen)}
