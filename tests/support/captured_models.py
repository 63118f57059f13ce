"""Tiny random models whose attention is captured: ten families of transformers, with inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

import qkv
from qkv.models.attention_call import AttentionCall
from qkv.models.calls import Calls
from qkv.models.capture import CaptureWarning

WIDTH: Final = 16
HEADS: Final = 4
LENGTH: Final = 6
_DECODER: Final = {
    "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 29,
    "num_attention_heads": HEADS, "max_position_embeddings": 64, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GROUPED: Final = {**_DECODER, "num_key_value_heads": 2, "head_dim": 8}


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        model: name of the class in transformers.
        config: its fields.
        layers: names of the layers, in the order of their calls.
        heads: (H, G) of each layer.
        lengths: (L, S) of each call.
        implementations: of attention, that run on a CPU.
        is_encoder_decoder: takes decoder_input_ids too.
        inputs: "tokens", "pixels" or "features".
    """

    model: str
    config: Mapping[str, Any]
    layers: tuple[str, ...]
    heads: tuple[int, int] = (HEADS, HEADS)
    lengths: tuple[tuple[int, int], ...] = ((LENGTH, LENGTH),) * 2
    implementations: tuple[str, ...] = ("sdpa", "eager", "flex_attention")
    is_encoder_decoder: bool = False
    inputs: str = "tokens"

    def batch(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Returns the same inputs each time: two sequences, the second with padding."""
        generator = torch.Generator().manual_seed(4)
        if self.inputs == "pixels":
            return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator).to(dtype)}
        tokens = torch.randint(3, 29, (2, LENGTH), generator=generator)
        decoder = {"decoder_input_ids": tokens[:, :3]} if self.is_encoder_decoder else {}
        if self.inputs == "features":
            features = torch.randn(2, 4, 12, generator=generator).to(dtype)
            return {"input_features": features, **decoder}
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[1, LENGTH - 2 :] = 0
        return {"input_ids": tokens, "attention_mask": mask, **decoder}


def _layers(name: str) -> tuple[str, ...]:
    return tuple(name.format(n) for n in range(2))


FAMILIES: Final = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "vocab_size": 29, "n_positions": 64,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        _layers("transformer.h.{}.attn"),
        implementations=("sdpa", "eager"),
    ),
    "llama": Family("LlamaForCausalLM", _GROUPED, _layers("model.layers.{}.self_attn"), (4, 2)),
    "qwen3": Family("Qwen3ForCausalLM", _GROUPED, _layers("model.layers.{}.self_attn"), (4, 2)),
    "neox": Family(
        "GPTNeoXForCausalLM",
        {**_DECODER, "hidden_size": 32},
        _layers("gpt_neox.layers.{}.attention"),
    ),
    "bert": Family("BertModel", _DECODER, _layers("encoder.layer.{}.attention.self")),
    "vit": Family(
        "ViTModel",
        {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": HEADS, "image_size": 8, "patch_size": 4},
        _layers("layers.{}.attention"),
        lengths=((5, 5),) * 2,
        inputs="pixels",
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {**_GROUPED, "sliding_window": 3},
        _layers("model.layers.{}.self_attn"),
        (4, 2),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {**_GROUPED, "attn_logit_softcapping": 0.5, "sliding_window": 3,
         "query_pre_attn_scalar": 5},
        _layers("model.layers.{}.self_attn"),
        (4, 2),
        implementations=("eager", "flex_attention"),
    ),
    "t5": Family(
        "T5Model",
        {"d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_decoder_layers": 1,
         "num_heads": HEADS, "vocab_size": 29, "relative_attention_num_buckets": 8,
         "relative_attention_max_distance": 6, "decoder_start_token_id": 0, "pad_token_id": 0,
         "eos_token_id": 2},
        ("encoder.block.0.layer.0.SelfAttention", "decoder.block.0.layer.0.SelfAttention",
         "decoder.block.0.layer.1.EncDecAttention"),
        lengths=((LENGTH, LENGTH), (3, 3), (3, LENGTH)),
        # not flex attention: transformers fails there with a position bias and two sequences
        implementations=("sdpa", "eager"),
        is_encoder_decoder=True,
    ),
    "whisper": Family(
        "WhisperModel",
        {"d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 29,
         "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "num_mel_bins": 4,
         "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_source_positions": LENGTH,
         "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "decoder_start_token_id": 1},
        ("encoder.layers.0.self_attn", "decoder.layers.0.self_attn",
         "decoder.layers.0.encoder_attn"),
        lengths=((LENGTH, LENGTH), (3, 3), (3, LENGTH)),
        is_encoder_decoder=True,
        inputs="features",
    ),
}  # fmt: skip
"""Families by name."""

CASES: Final = [(name, kind) for name, f in FAMILIES.items() for kind in f.implementations]
"""Each family with each implementation of attention."""


@cache
def build(name: str, implementation: str, dtype: torch.dtype = torch.float32) -> Any:
    """Returns a model in evaluation mode, with large random weights. Tests share it."""
    import transformers  # imported here because it takes seconds

    family = FAMILIES[name]
    kind = getattr(transformers, family.model)
    config = kind.config_class(**family.config, attn_implementation=implementation)
    model = kind(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            # scores of about 1, so that mask, scale and bias show in the output
            numbers = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(numbers * (1.0 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5))
    return model.to(dtype)


def tensors_of(output: Any) -> list[Tensor]:
    """Returns all tensors of a model's output, those of its cache too."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (list, tuple)):
        return [x for each in output for x in tensors_of(each)]
    layers = getattr(output, "layers", [])
    return [x for layer in layers for x in (layer.keys, layer.values)]


def state_of(model: nn.Module) -> list[Any]:
    """Returns the keys and the identities of the values of each module, and its hooks."""
    found: list[Any] = [(n, id(m), m.training) for n, m in model.named_modules()]
    for module in model.modules():
        found.append([(key, id(value)) for key, value in module.__dict__.items()])
        tables = (value for value in module.__dict__.values() if isinstance(value, dict))
        found += [[(key, id(value)) for key, value in table.items()] for table in tables]
    # transformers has no public way to read the implementation
    if (config := getattr(model, "config", None)) is not None:
        found += [str(config), config._attn_implementation]
    return found


class PlainAttention(nn.Module):
    """Grouped attention by `scaled_dot_product_attention`, causal, or by a function.

    Args:
        attend: called with query, key and value (B, H or G, L, D).
    """

    def __init__(self, attend: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 2 * WIDTH)
        self.attend = attend or self.causal

    @staticmethod
    def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns causal attention."""
        return nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )

    def forward(self, x_BLM: Tensor) -> Tensor:
        """Returns the heads' outputs, merged."""
        split = self.project(x_BLM).unflatten(-1, (2 * HEADS, -1)).transpose(1, 2)
        query, key, value = split.split([HEADS, 2, 2], 1)
        return self.attend(query, key, value).transpose(1, 2).flatten(2)


class Function(nn.Module):
    """A module of one function, with modules that it uses."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, *args: Any, **named: Any) -> Any:
        """Returns what the function returns."""
        return self.function(*args, *self.parts, **named)


class Transformers(nn.Module):
    """A module that calls an attention function of transformers, as their models do."""

    is_causal = True

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        super().__init__()
        self.name, self.function = name, function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of the function."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.name, self.function)
        return attend(self, *args, **kwargs)[0]


def capture(model: nn.Module, *inputs: Any, **named: Any) -> Calls:
    """Captures a model without a warning; it must keep its bits and its random numbers."""

    def run() -> list[Tensor]:
        torch.manual_seed(3)
        return [*tensors_of(model(*inputs, **named)), torch.rand(1)]

    expected = run()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        with qkv.capture(model) as calls:
            found = run()
    assert_same_bits([x.nan_to_num() for x in found], [x.nan_to_num() for x in expected])
    return calls


def missed_layers(calls: Calls) -> list[str]:
    """Returns the names of the layers that were not captured."""
    return [missed.layer for missed in calls.missed]


def run_model(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """Returns the tensors of a model's output."""
    with torch.no_grad():
        return tensors_of(model(**batch))


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    """Checks that all tensors are equal."""
    assert len(found) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def assert_repeats(call: AttentionCall) -> None:
    """Checks that softmax attention on the call's tensors gives the call's output.

    Both sides round the scores, the weights and the output to the dtype: three roundings, of
    which that of a score shifts the logarithm of its weight. Sums have as many as S terms.
    """
    found = call.run("softmax", outputs=["output"]).output.double()
    seen = call.output.double().nan_to_num(0.0)
    H, G = call.query.shape[1], call.key.shape[1]
    query, key = call.query.double(), call.key.double().repeat_interleave(H // G, 1)
    largest = float((query @ key.mT).abs().max()) * call.scale + 1
    D, S = query.shape[-1], key.shape[2]
    bound = torch.finfo(call.query.dtype).eps * (4 * largest + D + S + 4)
    rows = seen_rows(call)
    error = (found - seen).abs()[rows].max() / call.value.double().abs().max()
    assert error <= bound, f"{call}: {error:.2e} > {bound:.2e}"


def seen_rows(call: AttentionCall) -> Tensor:
    """Returns true for queries (B, H, L) that see a key: models define the others differently."""
    B, H, L, _ = call.query.shape
    visible = torch.ones(B, H, L, call.key.shape[2], dtype=torch.bool)
    if call.mask is not None:
        is_bool = call.mask.dtype == torch.bool
        visible &= call.mask if is_bool else call.mask > torch.finfo(call.mask.dtype).min / 2
    return visible.any(-1)
