"""The fields that a configuration of a known type may have: none is passed over in silence.

A field is read, or cannot change the output of an attention, or has the default of its type, or is
refused. `config_fields.json` has the other fields of each type and their defaults, from
transformers; `make census` writes it and tries each field with other values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from qkv.errors import InvalidContent, format_value

__all__ = ["HARMLESS", "NOT_OF_MODELS", "ReadFields", "check_fields"]

_ROPES: Final = ("rope_parameters", "rope_scaling")
_OF_ROPES: Final = (
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "truncate",
    "mscale", "mscale_all_dim",
)  # fmt: skip
"""Fields inside those objects."""
_OLD: Final[Mapping[str, tuple[str, ...]]] = {  # names before transformers 5
    "gpt_neox": ("rotary_pct", "rotary_emb_base"),
    "gemma3": ("rope_local_base_freq", "sliding_window_pattern"),
    "gemma3_text": ("rope_local_base_freq", "sliding_window_pattern"),
    "cohere2": ("sliding_window_pattern",),
    "bert": ("is_causal",),
}
_OF_ALL: Final[Mapping[str, Any]] = {"is_causal": True, "position_embedding_type": "absolute"}
"""Fields that a file of any type may have, with their defaults."""

_NOT_OF_MODELS: Final = (
    # what the model was, and what its callers want
    "model_type|architectures|transformers_version|dtype|torch_dtype|_name_or_path|return_dict"
    "|output_.*|use_cache|id2label|label2id|problem_type|is_encoder_decoder|task_specific_params"
    "|tie_word_embeddings|tie_weights_|_num_labels|num_labels|finetuning_task|language|prefix"
    "|return_dict_in_generate|torchscript|cache_implementation|_attn_implementation_autoset",
    # training and drawing of weights
    ".*dropout(_prob)?|.*_pdrop|.*layerdrop|initializer_(range|factor)|init_std|.*aux_loss_coef"
    "|router_jitter_noise|apply_spec_augment|mask_(time|feature)_.*|gradient_checkpointing",
    # texts
    ".*_token_ids?|.*_token_index|.*suppress_tokens|max_length|min_length|do_sample|num_beams"
    "|temperature|top_k|top_p|repetition_penalty|length_penalty|no_repeat_ngram_size"
    "|early_stopping|forced_decoder_ids|num_return_sequences",
)
_OF_MODELS: Final = (
    # other modules: embeddings, blocks, experts, heads of tasks
    "vocab_size|type_vocab_size|embedding_size|word_embed_proj_dim|embedding_multiplier"
    "|scale_embedding|max_position_embeddings|n_positions|n_ctx|max_(source|target)_positions"
    "|seq_length|sinusoidal_pos_embds|num_channels|num_mel_bins|image_size|patch_size"
    "|encoder_stride|mm_tokens_per_image|num_image_tokens|(text|vision|audio)_config"
    "|num_hidden_layers|num_layers|n_layers?|(en|de)coder_layers|num_hidden_groups|inner_group_num"
    "|intermediate_size|n_inner|hidden_dim|(encoder_|decoder_)?ffn_dim|ffn_hidden_size"
    "|hidden_act(ivation)?|activation(_function)?|mlp_bias|swiglu_.*|chunk_size_feed_forward"
    "|moe_.*|num_experts(_per_tok)?|num_local_experts|norm_topk_prob|decoder_sparse_step"
    "|mlp_only_layers|shared_expert_intermediate_size|use_parallel_residual|parallel_attn"
    "|num_ln_in_parallel_attn|apply_residual_connection_post_layernorm|do_layer_norm_before"
    "|_remove_final_layer_norm|residual_multiplier|logits_scaling|logit_scale"
    "|final_logit_softcapping|projection_dim|pooler_.*|summary_.*|classifier_proj_size"
    "|use_weighted_layer_sum|median_filter_width|add_cross_attention",
    # tensors show it
    "hidden_size|n_embd|n_embed|d_model|dim|head_dim|attention_bias|qkv_bias|use_qkv_bias|enable_bias|use_bias|bias"
    "|layer_norm_elementwise_affine|qk_layernorm|use_qk_norm",
    # rounding
    "reorder_and_upcast_attn|attention_softmax_in_fp32|scale_attention_softmax_in_fp32"
    "|slow_but_exact|pretraining_tp|masked_softmax_fusion|bias_dropout_fusion|skip_bias_add(_qkv)?"
    "|offset_alibi",
    # another field stands for it, and the reader takes it where that one is missing
    "attention_types|max_window_layers|no_rope_layer_interval|_sliding_window_pattern",
)
NOT_OF_MODELS: Final = re.compile("|".join(_NOT_OF_MODELS))
"""Names of fields that change no output of a model that runs."""
HARMLESS: Final = re.compile("|".join((*_NOT_OF_MODELS, *_OF_MODELS)))
"""Names of fields that cannot change the output of an attention's module."""


_OF_OTHER_LAYERS: Final[Mapping[str, tuple[str, ...]]] = {
    "cohere2": (*_ROPES, "rope_theta"),  # some layers have no positions
    "smollm3": (*_ROPES, "rope_theta", "layer_types"),
    "whisper": ("encoder_attention_heads", "decoder_attention_heads"),
    "falcon": (*_ROPES, "rope_theta", "num_kv_heads"),  # with alibi; in the old architecture
    "gpt_bigcode": ("num_key_value_heads",),  # multi_query says it
}
"""Fields that are read for other layers of a type, or for none."""


class ReadFields(dict[str, Any]):
    """A configuration, or an object in it, that records which of its fields are looked up.

    Args:
        fields: of the configuration.
        read: names of the fields that were looked up; shared with the objects in it.

    Attributes:
        read: as the argument.
        opened: objects in it that were looked up.
    """

    def __init__(self, fields: Mapping[str, Any], read: set[str] | None = None) -> None:
        super().__init__(fields)
        self.read: set[str] = set() if read is None else read
        self.opened: list[ReadFields] = []

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value of a field."""
        self.read.add(name)
        value = super().get(name, default)
        if isinstance(value, dict) and not isinstance(value, ReadFields):
            value = ReadFields(value, self.read)
            self.opened.append(value)
        return value

    def __getitem__(self, name: str) -> Any:
        """Returns the value of a field that exists."""
        self.read.add(name)
        return super().__getitem__(name)

    def __or__(self, other: Mapping[str, Any]) -> ReadFields:  # type: ignore[override]
        """Returns the fields of both, with the same record."""
        return ReadFields({**self, **other}, self.read)


def check_fields(config: ReadFields, model_type: str, *, is_rotary: bool) -> None:
    """Checks that a configuration of a known type says nothing that was passed over.

    Args:
        config: after all that is read of it was read.
        model_type: of the configuration.
        is_rotary: the type has rotary positions.

    Raises:
        InvalidContent: it does; all such fields are named.
    """
    defaults = dict(_table().get(model_type, {}))
    of_rope = defaults.get("rope_parameters") or {}
    known = {**_OF_ALL, **dict.fromkeys(_OLD.get(model_type, ())), **defaults}
    if is_rotary:
        known |= dict.fromkeys((*_ROPES, "rope_theta", *of_rope))
    wrong = _wrong(config, known)
    for name in _OF_OTHER_LAYERS.get(model_type, ()):
        wrong.pop(name, None)
    for rope in config.opened:
        wrong |= _wrong(rope, {**dict.fromkeys(_OF_ROPES), **of_rope})
        for part in rope.opened:
            inner = next((v for v in of_rope.values() if isinstance(v, dict)), {})
            wrong |= _wrong(part, {**dict.fromkeys(_OF_ROPES), **inner})
    if wrong:
        listed = ", ".join(f"{name} = {format_value(value)}" for name, value in wrong.items())
        names = ", ".join(f'"{name}"' for name in wrong)
        raise InvalidContent(
            f"config.json has fields that are not known to leave the attention of {model_type!r} "
            f"as it is: got {listed}; write ignore = [{names}] into the file beside it if they do"
        )


def _wrong(fields: ReadFields, known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that are neither read nor harmless, nor have the default of their type."""
    return {
        name: value
        for name, value in fields.items()
        if not HARMLESS.fullmatch(name)
        and not (name in known and (name in fields.read or value == known[name]))
        and not (name not in known and value is None)
    }


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    """Returns the defaults of the fields of each known type that are not harmless."""
    found: dict[str, dict[str, Any]] = json.loads(
        Path(__file__).with_name("config_fields.json").read_text()
    )
    return found
