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
}
_AS_IT_IS: Final[Mapping[str, Any]] = {
    "is_decoder": False, "norm_type": "layer_norm", "position_embedding_type": "absolute",
    "pruned_heads": {}, "rotary": True, "scale_attn_weights": True, "partial_rotary_factor": 1,
}  # fmt: skip
"""Fields that a file of any type may have with this value, which changes nothing."""
_NOT_OF_MODELS: Final = (
    # what the model was, and what its callers want
    "model_type|architectures|transformers_version|(torch_)?dtype|_name_or_path|auto_map"
    "|return_dict(_in_generate)?|output_(hidden_states|attentions|scores|router_logits|past)"
    "|use_cache|id2label|label2id|problem_type|is_encoder_decoder"
    "|task_specific_params|tie_word_embeddings|tie_weights_|tie_encoder_decoder|_?num_labels"
    "|finetuning_task|language|prefix|torchscript|tf_legacy_loss|use_bfloat16|tokenizer_class"
    "|cache_implementation|_attn_implementation_autoset|inference_runner|max_batch_size"
    "|pad_key_length|pre_allocate_kv_cache|validate_runner_input|max_sequence_length"
    "|initial_context_length",
    # training and drawing of weights
    ".*dropout(_prob)?|.*_pdrop|.*layerdrop|initializer_(range|factor)|init_std|.*aux_loss_coef"
    "|router_jitter_noise|apply_spec_augment|mask_(time|feature)_.*|gradient_checkpointing",
    # texts
    ".*_token_ids?|.*_token_index|.*suppress_tokens|bad_words_ids|forced_decoder_ids|(max|min)_length"
    "|do_sample|num_beams|num_beam_groups|num_return_sequences|temperature|top_[kp]|typical_p"
    "|.*_penalty|(encoder_)?no_repeat_ngram_size|early_stopping|remove_invalid_values",
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
    "|use_weighted_layer_sum|median_filter_width|add_cross_attention|cross_attention_hidden_size"
    "|experts_per_token|mlp_type|directionality",
    # tensors show it
    "hidden_size|n_embd|n_embed|d_model|dim|head_dim|attention_bias|qkv_bias|use_qkv_bias"
    "|enable_bias|use_bias|bias"
    "|layer_norm_elementwise_affine|qk_layernorm|use_qk_norm|quantization_config",
    # rounding
    "reorder_and_upcast_attn|attention_softmax_in_fp32|scale_attention_softmax_in_fp32"
    "|slow_but_exact|pretraining_tp|masked_softmax_fusion|bias_dropout_fusion|skip_bias_add(_qkv)?"
    "|offset_alibi",
    # what transformers never reads
    "down_scale_factor|gap_size|net_structure_type|num_memory_blocks|layers_to_keep",
    # another field stands for it, and the reader takes it where that one is missing
    "attention_types|max_window_layers|no_rope_layer_interval|_sliding_window_pattern",
)
NOT_OF_MODELS: Final = re.compile("|".join(_NOT_OF_MODELS))
"""Names of fields that change no output of a model that runs."""
HARMLESS: Final = re.compile("|".join((*_NOT_OF_MODELS, *_OF_MODELS)))
"""Names of fields that cannot change the output of an attention's module."""

_WITHOUT_EFFECT: Final[Mapping[str, tuple[str, ...]]] = {
    "cohere2": (*_ROPES, "rope_theta"),  # in layers without positions
    "falcon": (*_ROPES, "rope_theta", "num_kv_heads"),  # with alibi; in the old architecture
    "gemma": ("use_bidirectional_attention",),  # the eager mode of transformers is causal
    "gemma2": ("use_bidirectional_attention",),
    "gpt_bigcode": ("num_key_value_heads",),  # multi_query says it
    "gpt_neo": ("window_size",),  # in global layers
    "smollm3": (*_ROPES, "rope_theta"),
    "whisper": ("encoder_attention_heads", "decoder_attention_heads"),  # of the other side
}
"""Fields that do nothing in the layers for which they are not read."""


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


def check_fields(config: ReadFields, model_type: str) -> None:
    """Checks that a configuration of a known type says nothing that was passed over.

    Args:
        config: after all that is read of it was read.
        model_type: of the configuration.

    Raises:
        InvalidContent: it does; all such fields are named.
    """
    defaults = dict(_table().get(model_type, {}))
    of_rope = defaults.get("rope_parameters") or {}
    known = {"is_causal": None, **dict.fromkeys(_OLD.get(model_type, ())), **defaults}
    if of_rope:
        known |= dict.fromkeys((*_ROPES, "rope_theta", *of_rope))
    wrong = _wrong(config, known)
    for name in _WITHOUT_EFFECT.get(model_type, ()):
        wrong.pop(name, None)
    for rope in config.opened:
        kinds = {name for name, value in of_rope.items() if isinstance(value, dict)}
        numbers = {name: value for name, value in rope.items() if name not in kinds}
        wrong |= _wrong(ReadFields(numbers, rope.read), {**dict.fromkeys(_OF_ROPES), **of_rope})
        for part in rope.opened:
            wrong |= _wrong(part, dict.fromkeys(_OF_ROPES))
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
        and not (name not in known and (value is None or value == _AS_IT_IS.get(name)))
    }


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    """Returns the defaults of the fields of each known type that are not harmless."""
    found: dict[str, dict[str, Any]] = json.loads(
        Path(__file__).with_name("config_fields.json").read_text()
    )
    return found
