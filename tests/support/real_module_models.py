"""Builds models with real attention blocks, and calls blocks whose call is not the usual one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from support.real_module import BATCH, LENGTH, call_module
from support.small_modules import MetaAttention
from support.timm_import import import_timm

WIDTH: Final = 32
HEADS: Final = 4
THETA: Final = 500.0
"""A base of rotary embeddings at which all pairs of channels turn within `LENGTH` positions."""


def hf(model: str, implementation: str = "eager", **config: Any) -> Callable[[], nn.Module]:
    """Returns a function that builds a model of transformers, with its plain attention."""

    def build() -> nn.Module:
        import transformers  # imported here because it takes seconds

        kind = getattr(transformers, model)
        found = kind.config_class(**config, attn_implementation=implementation)
        built: nn.Module = kind(found)
        return built

    return build


def feed_tokens(model: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    model(input_ids=torch.randint(3, 29, (BATCH, LENGTH), generator=generator))


def feed_pixels(model: Any) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.randn(BATCH, 3, 12, 12, generator=torch.Generator().manual_seed(4)).to(dtype))


def run_mha(block: Any, inputs: Mapping[str, Tensor], _: Mapping[str, Any]) -> Tensor:
    query, key, value = (inputs.get(role, inputs.get("x")) for role in ("query", "key", "value"))
    output: Tensor = block(query, key, value, need_weights=False)[0]
    return output


def run_causal_mha(block: Any, inputs: Mapping[str, Tensor], _: Mapping[str, Any]) -> Tensor:
    x = inputs["x"]
    hidden_LS = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    output: Tensor = block(x, x, x, need_weights=False, attn_mask=hidden_LS)[0]
    return output


def run_bert(block: Any, inputs: Mapping[str, Tensor], captured: Mapping[str, Any]) -> Tensor:
    """Returns the projected output without LayerNorm and residual."""
    mask = captured.get("attention_mask")
    output: Tensor = block.output.dense(block.self(inputs["x"], attention_mask=mask)[0])
    return output


def run_albert(block: Any, inputs: Mapping[str, Tensor], captured: Mapping[str, Any]) -> Tensor:
    """Returns the projected output, to which the module adds x before its norm."""
    projected: list[Tensor] = []
    hook = block.dense.register_forward_hook(lambda _module, _args, found: projected.append(found))
    call_module(block, inputs, captured)
    hook.remove()
    return projected[0]


def run_bloom(block: Any, inputs: Mapping[str, Tensor], captured: Mapping[str, Any]) -> Tensor:
    """Returns the output without the residual, which the module adds."""
    x = inputs["x"]
    output: Tensor = block(**{**captured, "hidden_states": x, "residual": torch.zeros_like(x)})[0]
    return output


def run_whisper(block: Any, inputs: Mapping[str, Tensor], _: Mapping[str, Any]) -> Tensor:
    output: Tensor = block(inputs["query"], key_value_states=inputs["key"])[0]
    return output


def run_meta(block: Any, inputs: Mapping[str, Tensor], _: Mapping[str, Any]) -> Tensor:
    output: Tensor = block(inputs["x"], THETA)
    return output


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def mha(**arguments: Any) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **arguments)


def other_widths() -> dict[str, Tensor]:
    """Returns separate embeddings of different widths and lengths."""
    generator = torch.Generator().manual_seed(2)
    widths = {"query": (LENGTH, WIDTH), "key": (7, 20), "value": (7, 12)}
    return {n: torch.randn(BATCH, *size, generator=generator) for n, size in widths.items()}


def encoded() -> dict[str, Tensor]:
    """Returns the embeddings of cross-attention: keys and values share theirs."""
    generator = torch.Generator().manual_seed(2)
    query, key = (torch.randn(BATCH, n, WIDTH, generator=generator) for n in (LENGTH, 7))
    return {"query": query, "key": key, "value": key}


def timm() -> nn.Module:
    transformer = import_timm("timm.models.vision_transformer").VisionTransformer
    built: nn.Module = transformer(
        img_size=12, patch_size=4, embed_dim=WIDTH, depth=2, num_heads=HEADS, num_classes=3,
        qkv_bias=True,
    )  # fmt: skip
    return built


def meta() -> nn.Module:
    layers = [nn.ModuleDict({"attention": MetaAttention(WIDTH, HEADS, 2, 8)}) for _ in range(2)]
    return nn.ModuleDict({"layers": nn.ModuleList(layers)})
