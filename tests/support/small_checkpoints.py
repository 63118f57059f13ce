"""Small checkpoints of one kind of layer, with random numbers, and what can be wrong with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import save_file

from qkv.errors import InvalidContent
from qkv.jobs.loaded.checkpoint_loader import load_checkpoints
from qkv.jobs.loaded.loaded_layers import LoadedLayers

BYTES: Final = 1 << 30
WIDTH: Final = 16
HEADS: Final = 4
BERT: Final = {"model_type": "bert", "hidden_size": WIDTH, "num_attention_heads": HEADS}
LLAMA: Final = {
    "model_type": "llama", "hidden_size": WIDTH, "num_attention_heads": HEADS,
    "num_key_value_heads": 2, "rope_theta": 100.0, "rms_norm_eps": 1e-5,
}  # fmt: skip
GEMMA: Final = LLAMA | {
    "model_type": "gemma2", "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 9,
    "sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"],
}  # fmt: skip


def bert_tensors(layers: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Returns the attention of BERT."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(layers):
        for module in ("self.query", "self.key", "self.value", "output.dense"):
            name = f"encoder.layer.{layer}.attention.{module}"
            for kind, shape in (("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,))):
                numbers = torch.randn(shape, generator=generator)
                tensors[f"{name}.{kind}"] = (0.5 * numbers).to(dtype)
    return tensors


def llama_tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Returns two layers with grouped heads, and the norms in front of them."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(2):
        place = f"model.layers.{layer}"
        for module, rows in (("q", WIDTH), ("k", 8), ("v", 8), ("o", WIDTH)):
            numbers = 0.5 * torch.randn(rows, WIDTH, generator=generator)
            tensors[f"{place}.self_attn.{module}_proj.weight"] = numbers.to(dtype)
        norm = 1 + 0.3 * torch.randn(WIDTH, generator=generator)
        tensors[f"{place}.input_layernorm.weight"] = norm.to(dtype)
    return tensors


def write(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | None = None,
    toml: str | None = None,
) -> Path:
    """Writes a checkpoint; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if toml is not None:
        (folder / "qkv.toml").write_text(toml)
    return folder


def bert(folder: Path, layers: int = 2, dtype: torch.dtype = torch.float32) -> Path:
    """Writes a BERT; returns its folder."""
    return write(folder, bert_tensors(layers, dtype), BERT)


def llama(folder: Path, config: Mapping[str, Any] = LLAMA) -> Path:
    """Writes a Llama, or another model with its tensors; returns its folder."""
    return write(folder, llama_tensors(), config)


def load(path: Path, max_bytes: int = BYTES) -> LoadedLayers:
    """Loads one checkpoint, which must have no problem."""
    return load_checkpoints({"small": path}, max_bytes, is_strict=True)


def problem_of(path: Path, max_bytes: int = BYTES) -> str:
    """Returns the problem of a checkpoint beside another one, which is loaded all the same."""
    good = bert(path.parent / "good")
    loaded = load_checkpoints({"bad": path, "good": good}, max_bytes)
    bad, other = loaded.checkpoints
    assert not bad.layers
    assert len(other.layers) == 2
    assert bad.problem is not None
    assert "\n" not in bad.problem
    with pytest.raises(InvalidContent, match="checkpoint bad: "):
        load_checkpoints({"bad": path, "good": good}, max_bytes, is_strict=True)
    return bad.problem
