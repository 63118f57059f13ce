"""Attention blocks of torch and transformers with random weights, run on random hidden states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

_LENGTH: Final = 12
_WIDTH: Final = 64
_DEVIATION: Final = 0.3  # of weights: scores differ enough that attention is not uniform


class RealLayer(NamedTuple):
    """A block that has run.

    Attributes:
        state: its state_dict.
        x: hidden states (B, L, M).
        y: the output of the block for them, without residual and layer norm.
        expected: members of the candidate that must be the best.
    """

    state: Mapping[str, Tensor]
    x: Tensor
    y: Tensor
    expected: Mapping[str, Any]


def llama(dtype: torch.dtype = torch.float32, theta: float = 500000.0) -> RealLayer:
    """Returns a block with 8 query heads and 2 key heads."""
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama as source

    rope = {"rope_type": "default", "rope_theta": theta}
    config = _config(LlamaConfig, num_key_value_heads=2, rope_parameters=rope)
    block, x = _random(source.LlamaAttention(config, 0), dtype), _hidden(2, dtype)
    turns = source.LlamaRotaryEmbedding(config)(x, _positions())
    y = block(x, position_embeddings=turns, attention_mask=_causal_mask(dtype))[0]
    found = {"layout": "llama", "heads": 8, "kv_heads": 2, "rotary": "half", "causal": True}
    return _real(block, x, y, **found, scale=8**-0.5, rope={"base": theta, "order": "half"})


def _qwen3() -> RealLayer:
    from transformers import Qwen3Config
    from transformers.models.qwen3 import modeling_qwen3 as source

    config = _config(Qwen3Config, num_key_value_heads=4, head_dim=16, rms_norm_eps=1e-5)
    block, x = _random(source.Qwen3Attention(config, 0)), _hidden(1)
    with torch.no_grad():  # queries so small that eps matters
        block.q_proj.weight *= 0.003
    turns = source.Qwen3RotaryEmbedding(config)(x, _positions())
    y = block(x, position_embeddings=turns, attention_mask=_causal_mask())[0]
    found = {"layout": "llama", "heads": 8, "kv_heads": 4, "rotary": "half", "causal": True}
    return _real(block, x, y, **found, qk_norm={"eps": 1e-5, "offset": 0})


def _gpt2() -> RealLayer:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    config = GPT2Config(n_embd=_WIDTH, n_head=4, attn_implementation="eager")
    block, x = _random(GPT2Attention(config, layer_idx=0)), _hidden(1)
    y = block(x, attention_mask=_causal_mask())[0]
    return _real(block, x, y, layout="gpt2", heads=4, kv_heads=4, rotary=None, causal=True)


def _neox() -> RealLayer:
    from transformers import GPTNeoXConfig
    from transformers.models.gpt_neox import modeling_gpt_neox as source

    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    config = _config(GPTNeoXConfig, 4, rope_parameters=rope)
    block, x = _random(source.GPTNeoXAttention(config, 0)), _hidden(1)
    turns = source.GPTNeoXRotaryEmbedding(config)(x, _positions())
    y = block(x, attention_mask=_causal_mask(), position_embeddings=turns)[0]
    partial = {"base": 10000.0, "order": "half", "dims": 4}
    return _real(block, x, y, layout="neox", heads=4, rotary="half", rope=partial, causal=True)


def _bloom() -> RealLayer:
    from transformers import BloomConfig
    from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor

    config = BloomConfig(hidden_size=_WIDTH, n_head=4, hidden_dropout=0.0, attention_dropout=0.0)
    block, x = _random(BloomAttention(config, 0)), _hidden(1)
    alibi = build_alibi_tensor(torch.ones(1, _LENGTH), 4, torch.float32)
    y = block(x, torch.zeros_like(x), alibi, _causal_mask())[0]
    return _real(block, x, y, layout="bloom", heads=4, rotary=None, alibi=True, causal=True)


def _bert() -> RealLayer:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertAttention

    config = _config(BertConfig, 4)
    block, x = _random(BertAttention(config)), _hidden(2)
    y = block.output.dense(block.self(x)[0])
    return _real(block, x, y, layout="bert", heads=4, kv_heads=4, rotary=None, causal=False)


def _phi3() -> RealLayer:
    from transformers import Phi3Config
    from transformers.models.phi3 import modeling_phi3 as source

    config = _config(Phi3Config, 4, num_key_value_heads=2, pad_token_id=0)
    block, x = _random(source.Phi3Attention(config, 0)), _hidden(1)
    turns = source.Phi3RotaryEmbedding(config)(x, _positions())
    y = block(x, position_embeddings=turns, attention_mask=_causal_mask())[0]
    return _real(block, x, y, layout="phi3", heads=4, kv_heads=2, rotary="half", causal=True)


def _falcon(**form: Any) -> RealLayer:
    from transformers import FalconConfig
    from transformers.models.falcon import modeling_falcon as source

    config = _config(FalconConfig, 4, alibi=False, **form)
    block, x = _random(source.FalconAttention(config, 0)), _hidden(1)
    turns = source.FalconRotaryEmbedding(config)(x, _positions())
    y = block(x, None, _causal_mask(), position_embeddings=turns)[0]
    key_heads = form.get("num_kv_heads", 1)
    found = {"layout": "falcon", "heads": 4, "kv_heads": key_heads, "rotary": "half"}
    return _real(block, x, y, **found, causal=True)


def _mha() -> RealLayer:
    block, x = _random(torch.nn.MultiheadAttention(_WIDTH, 4, batch_first=True)), _hidden(2)
    y = block(x, x, x, need_weights=False)[0]
    return _real(block, x, y, layout="mha", heads=4, kv_heads=4, rotary=None, causal=False)


REAL_LAYERS: Final[Mapping[str, Callable[[], RealLayer]]] = {
    "llama": llama,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "neox": _neox,
    "bloom": _bloom,
    "bert": _bert,
    "phi3": _phi3,
    "falcon, one key head": lambda: _falcon(multi_query=True),
    "falcon, grouped": lambda: _falcon(new_decoder_architecture=True, num_kv_heads=2),
    "mha": _mha,
}
"""Blocks by name."""


def _config(kind: Any, heads: int = 8, **fields: Any) -> Any:
    return kind(
        hidden_size=_WIDTH, num_attention_heads=heads, attn_implementation="eager", **fields
    )


def _random(block: torch.nn.Module, dtype: torch.dtype = torch.float32) -> Any:
    """Returns the block with random weights and biases, without dropout."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(_DEVIATION * torch.randn(parameter.shape, generator=generator))
    return block.eval().to(dtype)


def _hidden(batch: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, _LENGTH, _WIDTH, generator=torch.Generator().manual_seed(2)).to(dtype)


def _positions() -> Tensor:
    return torch.arange(_LENGTH)[None]


def _causal_mask(dtype: torch.dtype = torch.float32) -> Tensor:
    lowest = torch.finfo(dtype).min
    return torch.full((1, 1, _LENGTH, _LENGTH), lowest, dtype=dtype).triu(1)


def _real(block: torch.nn.Module, x: Tensor, y: Tensor, **expected: Any) -> RealLayer:
    return RealLayer(block.state_dict(), x, y.detach(), expected)
