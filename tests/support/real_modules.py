"""Real attention modules of every layout, with small random weights, and MiniLM's own weights.

`CASES` has them; `find` returns one. Nothing is built before it is used.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn

from support import minilm
from support.real_module import RealModule
from support.real_module_models import (
    HEADS,
    THETA,
    WIDTH,
    encoded,
    encoder,
    feed_pixels,
    feed_tokens,
    hf,
    meta,
    mha,
    other_widths,
    run_albert,
    run_bert,
    run_bloom,
    run_causal_mha,
    run_meta,
    run_mha,
    run_whisper,
    timm,
)
from support.small_modules import NanoGPT, PlainHead, SplitHeads

_CAUSAL: Final = {"causal": True}
_HEADS_FIELD: Final = {"heads": HEADS}
_DECODER: Final = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "vocab_size": 29, "max_position_embeddings": 64,
    "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED: Final = {**_DECODER, "num_key_value_heads": 2}
_GROUPED_FIELDS: Final = {"heads": HEADS, "kv_heads": 2}
_ROPE: Final = {"rope_type": "default", "rope_theta": THETA}


def _decoder(
    name: str,
    model: str,
    shows: str,
    config: Mapping[str, Any],
    fields: Mapping[str, Any],
    *,
    layout: str = "llama",
    path: str = "layers.1.self_attn",
    parameters: Mapping[str, Any] = _CAUSAL,
    run: Any = None,
    auto: Sequence[str] = (),
    implementation: str = "eager",
) -> RealModule:
    """Returns the case of a decoder of transformers."""
    attention = model.removesuffix("Model").removesuffix("Text") + "Attention"
    return RealModule(
        name, f"transformers {attention}", shows, layout, hf(model, implementation, **config),
        path, fields, parameters, feed_tokens, auto=auto, **({} if run is None else {"run": run}),
    )  # fmt: skip


def _minilm(layer: int) -> RealModule:
    def build() -> nn.Module:
        model: nn.Module = copy.deepcopy(minilm.bert())
        return model

    def embeddings() -> dict[str, Tensor]:
        (found,) = (
            each for each in minilm.activations()
            if each.layer == layer and each.sentence == minilm.SENTENCES[4]
        )  # fmt: skip
        return {"x": found.x_BLM}

    path = f"encoder.layer.{layer}.attention"
    return RealModule(
        f"minilm-{layer}", "transformers BertAttention", f"trained weights: MiniLM, layer {layer}",
        "bert", build, path, {"heads": 12}, inputs=embeddings, run=run_bert, keep=path,
        has_own_weights=True,
    )  # fmt: skip


def _rope(**fields: Any) -> dict[str, Any]:
    return {"rope": {"base": THETA, **fields}}


_LLAMA3: Final = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_YARN: Final = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 8.0, "beta_slow": 1.0,
}  # fmt: skip
_LINEAR: Final = {"rope_type": "linear", "factor": 2.0}
_FALCON: Final = {**_DECODER, "bias": True, "num_attention_heads": HEADS}


def _all_cases() -> list[RealModule]:
    """Returns the cases, layout by layout."""
    neox: dict[str, Any] = {"path": "layers.1.attention"}
    fused: dict[str, Any] = {"path": "h.1.self_attention"}
    return [
        RealModule(
            "v1", "plain parameters, Raschka 3.1", "one head, no output projection", "v1",
            lambda: PlainHead(WIDTH, 8), "", {"heads": 1},
        ),
        RealModule(
            "v2", "three nn.Linear, Raschka 3.5", "biases; the mask is a buffer", "v2",
            lambda: SplitHeads(WIDTH, 24, HEADS, 16), "", _HEADS_FIELD, _CAUSAL,
        ),
        RealModule(
            "mha", "torch nn.MultiheadAttention", "in nn.TransformerEncoder; biases", "mha",
            encoder, "layers.1.self_attn", _HEADS_FIELD, run=run_mha,
        ),
        RealModule(
            "mha-causal", "torch nn.MultiheadAttention", "no biases; causal", "mha",
            mha(bias=False), "", _HEADS_FIELD, _CAUSAL, run=run_causal_mha,
        ),
        RealModule(
            "mha-widths", "torch nn.MultiheadAttention", "kdim and vdim; three embeddings", "mha",
            mha(kdim=20, vdim=12), "", _HEADS_FIELD, inputs=other_widths, run=run_mha,
        ),
        RealModule(
            "mha-widths-plain", "torch nn.MultiheadAttention", "kdim and vdim, no biases", "mha",
            mha(kdim=20, vdim=12, bias=False), "", _HEADS_FIELD, inputs=other_widths,
            run=run_mha,
        ),
        RealModule(
            "gpt2", "transformers GPT2Attention", "Conv1D; biases", "gpt2",
            hf("GPT2Model", n_embd=WIDTH, n_layer=2, n_head=HEADS, vocab_size=29,
                n_positions=64, use_cache=False, bos_token_id=1, eos_token_id=2),
            "h.1.attn", _HEADS_FIELD, _CAUSAL, feed_tokens,
        ),
        RealModule(
            "nanogpt", "nanoGPT CausalSelfAttention", "biases; the mask is a buffer", "nanogpt",
            lambda: NanoGPT(WIDTH, HEADS, 16, True), "transformer.h.1.attn", _HEADS_FIELD,
            _CAUSAL,
        ),
        RealModule(
            "nanogpt-plain", "nanoGPT CausalSelfAttention", "no biases", "nanogpt",
            lambda: NanoGPT(WIDTH, HEADS, 16, False), "transformer.h.1.attn", _HEADS_FIELD,
            _CAUSAL,
        ),
        RealModule(
            "bert", "transformers BertAttention", "biases", "bert",
            hf("BertModel", **_without(_DECODER, "use_cache")), "encoder.layer.1.attention",
            _HEADS_FIELD, {}, feed_tokens, run=run_bert,
        ),
        *map(_minilm, range(6)),
        RealModule(
            "albert", "transformers AlbertAttention", "dense and LayerNorm in the module", "bert",
            hf("AlbertModel", **_without(_DECODER, "use_cache"), embedding_size=8),
            "encoder.albert_layer_groups.0.albert_layers.0.attention", _HEADS_FIELD, {},
            feed_tokens, run=run_albert,
        ),
        _decoder(
            "llama", "LlamaModel", "grouped heads; rotary", _GROUPED | {"rope_parameters": _ROPE},
            _GROUPED_FIELDS | _rope(),
        ),
        _decoder(
            "llama-wide", "LlamaModel", "heads wider than M / H; one key head",
            _DECODER | {"head_dim": 12, "num_key_value_heads": 1, "rope_parameters": _ROPE},
            {"heads": HEADS, "kv_heads": 1} | _rope(),
        ),
        _decoder(
            "llama-llama3", "LlamaModel", "rotary scaled as in Llama 3",
            _GROUPED | {"rope_parameters": {**_LLAMA3, "rope_theta": THETA}},
            _GROUPED_FIELDS | _rope(scaling=_LLAMA3),
        ),
        _decoder(
            "llama-linear", "LlamaModel", "rotary, linear scaling",
            _GROUPED | {"rope_parameters": {**_LINEAR, "rope_theta": THETA}},
            _GROUPED_FIELDS | _rope(scaling=_LINEAR),
        ),
        _decoder(
            "llama-yarn", "LlamaModel", "rotary, YaRN",
            _GROUPED | {"rope_parameters": {**_YARN, "rope_theta": THETA}},
            _GROUPED_FIELDS | _rope(scaling=_YARN),
        ),
        _decoder(
            "mistral", "MistralModel", "sliding window of 4; rotary",
            _GROUPED | {"sliding_window": 4, "rope_parameters": _ROPE},
            _GROUPED_FIELDS | _rope() | {"window": [3, 0]},
        ),
        _decoder(
            "qwen2", "Qwen2Model", "biases of query, key, value; rotary",
            _GROUPED | {"rope_parameters": _ROPE}, _GROUPED_FIELDS | _rope(),
        ),
        _decoder(
            "qwen3", "Qwen3Model", "QK-norm of each head; rotary",
            _GROUPED | {"head_dim": 12, "rope_parameters": _ROPE, "rms_norm_eps": 1e-4},
            _GROUPED_FIELDS | _rope() | {"qk_norm": {"eps": 1e-4}},
        ),
        _decoder(
            "olmo2", "Olmo2Model", "QK-norm of all heads together; rotary",
            _GROUPED | {"rope_parameters": _ROPE, "rms_norm_eps": 1e-5},
            _GROUPED_FIELDS | _rope() | {"qk_norm": {"eps": 1e-5}},
        ),
        _decoder(
            "gemma2", "Gemma2Model", "softcap; own scale; sliding window; rotary",
            _GROUPED | {
                "head_dim": 12, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0,
                "sliding_window": 5, "rope_parameters": _ROPE,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            _GROUPED_FIELDS | _rope() | {"softcap": 2.0, "window": [4, 0]},
            parameters=_CAUSAL | {"scale": 20**-0.5},
        ),
        _decoder(
            "gemma3", "Gemma3TextModel", "QK-norm with 1 + weight; own scale; sliding window",
            _GROUPED | {
                "head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 5,
                "layer_types": ["full_attention", "sliding_attention"],
                "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
            },
            _GROUPED_FIELDS | _rope() | {"window": [4, 0], "qk_norm": {"eps": 1e-6, "offset": 1}},
            parameters=_CAUSAL | {"scale": 20**-0.5},
        ),
        _decoder(
            "gpt-oss", "GptOssModel", "sinks; biases; sliding window; YaRN",
            _GROUPED | {
                "head_dim": 12, "sliding_window": 5, "num_local_experts": 2,
                "num_experts_per_tok": 1, "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {**_YARN, "rope_theta": THETA, "truncate": False},
            },
            _GROUPED_FIELDS | _rope(scaling={**_YARN, "truncate": False}) | {"window": [4, 0]},
            path="layers.0.self_attn",
        ),
        _decoder(
            "phi", "PhiModel", "dense for o_proj; half of the channels rotary",
            _DECODER | {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
            _HEADS_FIELD | _rope(dims=4),
        ),
        RealModule(
            "vit-hf", "transformers ViTAttention", "biases", "llama",
            hf("ViTModel", hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2,
                num_attention_heads=HEADS, image_size=12, patch_size=4),
            "layers.1.attention", _HEADS_FIELD, {}, feed_pixels,
        ),
        RealModule(
            "vit-hub", "transformers ViTAttention", "names of checkpoints before transformers 5",
            "bert",
            hf("ViTModel", hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2,
                num_attention_heads=HEADS, image_size=12, patch_size=4),
            "layers.1.attention", _HEADS_FIELD | {"prefix": "encoder.layer.1.attention"}, {},
            feed_pixels,
            renames={
                "layers.": "encoder.layer.", "q_proj": "attention.query",
                "k_proj": "attention.key", "v_proj": "attention.value", "o_proj": "output.dense",
            },
        ),
        RealModule(
            "distilbert", "transformers DistilBertSelfAttention", "q_lin for q_proj", "llama",
            hf("DistilBertModel", dim=WIDTH, hidden_dim=48, n_layers=2, n_heads=HEADS,
                vocab_size=29, max_position_embeddings=64),
            "transformer.layer.1.attention", _HEADS_FIELD, {}, feed_tokens,
        ),
        RealModule(
            "clip", "transformers CLIPAttention", "out_proj for o_proj", "llama",
            hf("CLIPVisionModel", hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2,
                num_attention_heads=HEADS, image_size=12, patch_size=4),
            "encoder.layers.1.self_attn", _HEADS_FIELD, {}, feed_pixels,
        ),
        RealModule(
            "whisper", "transformers WhisperAttention", "cross-attention; the key has no bias",
            "llama",
            hf("WhisperModel", d_model=WIDTH, encoder_layers=1, decoder_layers=2,
                encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
                encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=29, num_mel_bins=8,
                max_source_positions=16, max_target_positions=32, pad_token_id=0, bos_token_id=1,
                eos_token_id=2, decoder_start_token_id=1),
            "decoder.layers.1.encoder_attn", _HEADS_FIELD, inputs=encoded, run=run_whisper,
        ),
        RealModule(
            "meta", "Meta's Llama Attention", "grouped heads; rotary in Meta's order", "meta",
            meta, "layers.1.attention", _GROUPED_FIELDS | _rope(), _CAUSAL, run=run_meta,
        ),
        _decoder(
            "phi3", "Phi3Model", "fused, grouped heads; rotary",
            _GROUPED | {"rope_parameters": _ROPE}, _GROUPED_FIELDS | _rope(), layout="phi3",
        ),
        RealModule(
            "codegen", "transformers CodeGenAttention", "quarters; interleaved rotary", "codegen",
            hf("CodeGenModel", n_embd=WIDTH, n_layer=2, n_head=HEADS, vocab_size=29, rotary_dim=4,
                n_positions=64, use_cache=False, bos_token_id=1, eos_token_id=2),
            "h.1.attn", _HEADS_FIELD | {"rope": {"dims": 4}}, _CAUSAL, feed_tokens,
            auto=("codegen", "phi3"),
        ),
        _decoder(
            "neox", "GPTNeoXModel", "interleaved heads; a quarter of the channels rotary",
            _DECODER | {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25}},
            _HEADS_FIELD | _rope(dims=2), layout="neox", **neox,
        ),
        _decoder(
            "bloom", "BloomModel", "interleaved heads; ALiBi",
            {"hidden_size": 48, "n_layer": 2, "n_head": 6, "vocab_size": 29, "use_cache": False},
            {"heads": 6, "alibi": True}, layout="bloom", run=run_bloom,
            auto=("bloom", "falcon"), **fused,
        ),
        _decoder(
            "falcon-multi-query", "FalconModel", "one key head; rotary",
            _FALCON | {"rope_parameters": _ROPE, "new_decoder_architecture": False},
            {"heads": HEADS, "kv_heads": 1} | _rope(), layout="falcon", **fused,
        ),
        RealModule(
            "bigcode", "transformers GPTBigCodeAttention", "c_attn with one key head", "falcon",
            hf("GPTBigCodeModel", n_embd=WIDTH, n_layer=2, n_head=HEADS, vocab_size=29,
                n_positions=64, use_cache=False, bos_token_id=1, eos_token_id=2),
            "h.1.attn", _HEADS_FIELD | {"kv_heads": 1}, _CAUSAL, feed_tokens,
        ),
        _decoder(
            "falcon-new", "FalconModel", "grouped heads; rotary",
            _FALCON | {"rope_parameters": _ROPE, "new_decoder_architecture": True,
                       "num_kv_heads": 2},
            _GROUPED_FIELDS | _rope(), layout="falcon", **fused,
        ),
        _decoder(
            "falcon-rw", "FalconModel", "as many key heads; ALiBi before the scale",
            _FALCON | {"alibi": True, "multi_query": False, "new_decoder_architecture": False},
            {"heads": HEADS, "alibi": "scaled"}, layout="falcon", auto=("bloom", "falcon"),
            implementation="sdpa",  # eager adds the biases twice in transformers 5.23
            **fused,
        ),
        RealModule(
            "timm", "timm Attention", "biases", "vit", timm, "blocks.1.attn", _HEADS_FIELD,
            {}, feed_pixels,
        ),
    ]  # fmt: skip


def _without(mapping: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {n: value for n, value in mapping.items() if n != name}


CASES: Final = {case.name: case for case in _all_cases()}


def find(name: str) -> RealModule:
    """Returns a case by its name."""
    return CASES[name]
