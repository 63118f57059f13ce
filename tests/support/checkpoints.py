"""Checkpoints that transformers writes, of small models with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

LLAMA: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 12,
    "intermediate_size": 16, "vocab_size": 20,
}  # fmt: skip


def llama(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Returns a Llama with grouped heads and 12 layers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA | changes)
    return transformers.LlamaForCausalLM(config).to(dtype)


def gpt2() -> Any:
    """Returns a GPT-2 of two layers."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=20, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def v1_of_llama(state: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of layout v1 for a layer of a Llama."""
    roles = {"query": "q", "key": "k", "value": "v", "output": "o"}
    return {f"W_{r}": state[f"{prefix}.{short}_proj.weight"].T for r, short in roles.items()}


def write_raw(path: Path, header: Mapping[str, Any], data: bytes = b"", size: int = 0) -> Path:
    """Writes a safetensors file byte by byte.

    Args:
        path: of the file.
        header: of the file, as JSON.
        data: the first bytes of the tensors.
        size: the bytes of the tensors if they are more; the others are a hole in the file.
    """
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data)
        file.truncate(8 + len(text) + max(size, len(data)))
    return path
