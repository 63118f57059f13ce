"""Tests of `qkv.capture` on attention of modules' own code beside a captured layer: it is named.

Cross-attention has positions of two sequences, and towers of images have two axes of positions.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qkv
from qkv.errors import InvalidContent
from support.captured_models import (
    FAMILIES,
    WIDTH,
    Function,
    PlainAttention,
    build,
    capture,
    missed_layers,
    run_model,
)

F = nn.functional
LENGTH = 7


class Beside(nn.Module):
    """Captured self-attention, and a module that receives two sequences."""

    def __init__(self, part: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.attention, self.part, self.call = PlainAttention(), part, call

    def forward(self, x: Tensor, memory: Tensor) -> Any:
        return self.call(self.part, x + self.attention(x), memory)


def sequences(length: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, LENGTH, WIDTH, generator=generator)
    return x, torch.randn(batch, length, WIDTH, generator=generator)


def part_of(library: str, name: str, *args: Any, **options: Any) -> nn.Module:
    """Returns a module of transformers with large random weights."""
    package = library.removesuffix("_text")
    torch.manual_seed(0)
    module = import_module(f"transformers.models.{package}.modeling_{library}")
    part: nn.Module = getattr(module, name)(*args, **options).eval()
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.normal_()
            parameter.mul_(parameter.shape[-1] ** -0.5)
    return part


def config_of(name: str, **options: Any) -> Any:
    import transformers

    shared = {"hidden_size": WIDTH, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    return getattr(transformers, name)(**shared | options)


CROSS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], str]] = {
    "blip": (
        lambda: part_of(
            "blip_text", "BlipTextSelfAttention",
            config_of("BlipTextConfig", encoder_hidden_size=WIDTH), True, 0,
        ),
        lambda part, x, c: part(x, encoder_hidden_states=c),
        "part",
    ),
    "fsmt": (
        lambda: part_of("fsmt", "Attention", WIDTH, 2, encoder_decoder_attention=True),
        lambda part, x, c: part(x.transpose(0, 1), c.transpose(0, 1)),
        "part",
    ),
    "led": (
        lambda: part_of("led", "LEDDecoderAttention", WIDTH, 2, is_decoder=True),
        lambda part, x, c: part(x, key_value_states=c),
        "part",
    ),
    "mvp": (
        lambda: part_of("mvp", "MvpAttention", WIDTH, 2, is_decoder=True),
        lambda part, x, c: part(x, key_value_states=c),
        "part",
    ),
    "prophetnet": (
        lambda: part_of("prophetnet", "ProphetNetAttention", config_of("ProphetNetConfig"), 2),
        lambda part, x, c: part(x, key_value_states=c),
        "part",
    ),
    "perceiver": (
        lambda: part_of(
            "perceiver", "PerceiverSelfAttention", config_of("PerceiverConfig"),
            is_cross_attention=True, num_heads=2, q_dim=WIDTH, kv_dim=WIDTH,
        ),
        lambda part, x, c: part(x, inputs=c),
        "part",
    ),
    "groupvit": (
        lambda: part_of(
            "groupvit", "GroupViTCrossAttentionLayer", config_of("GroupViTVisionConfig")
        ),
        lambda part, x, c: part(x, c),
        "part.attn",
    ),
    "groupvit, assigned": (
        lambda: part_of("groupvit", "GroupViTAssignAttention", config_of("GroupViTVisionConfig")),
        lambda part, x, c: part(x, c),
        "part",
    ),
}  # fmt: skip
"""A module of each type, how it is called, and the name of its attention."""


@pytest.mark.parametrize("length", [LENGTH, 5])
@pytest.mark.parametrize("name", CROSS)
def test_cross_attention_of_own_code_is_named_and_rollout_refuses(name: str, length: int) -> None:
    build_part, call, layer = CROSS[name]
    calls = capture(Beside(build_part(), call), *sequences(length))
    assert missed_layers(calls) == [layer]
    assert calls.layers == ["attention"]
    with pytest.raises(InvalidContent, match=f"{layer} was not captured"):
        calls.rollout()


GRIDS: dict[str, Callable[[], nn.Module]] = {
    "vitdet": lambda: part_of("vitdet", "VitDetAttention", config_of("VitDetConfig"), (4, 4)),
    "sam": lambda: part_of("sam", "SamVisionAttention", config_of("SamVisionConfig"), 0),
    "sam_hq": lambda: part_of("sam_hq", "SamHQVisionAttention", config_of("SamHQVisionConfig"), 0),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", GRIDS)
def test_attention_of_images_with_two_axes_is_named(name: str, batch: int) -> None:
    model = Beside(GRIDS[name](), lambda part, x, _: part(x.unflatten(1, (4, 4))))
    calls = capture(model, torch.randn(batch, 16, WIDTH), torch.zeros(1))
    assert missed_layers(calls) == ["part"]
    with pytest.raises(InvalidContent, match="part was not captured"):
        calls.rollout()


OWN = {
    "pooled": lambda x, c, linear: x + linear(c).mean(1, keepdim=True),
    "attention": lambda x, c, linear: (x @ linear(c).mT).softmax(-1) @ c,
    "attention and a residual": lambda x, c, linear: x + (x @ linear(c).mT).softmax(-1) @ c,
    "channels in two halves": lambda x, c, linear: (
        (x @ linear(c).mT).softmax(-1) @ torch.cat([c[..., :8], c[..., :8]], -1)
    ),
    "both": lambda x, c, linear: (x + (x @ linear(c).mT).softmax(-1) @ c, c),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("length", [LENGTH, 5])
@pytest.mark.parametrize("name", OWN)
def test_positions_of_another_sequence_are_named(name: str, length: int, batch: int) -> None:
    part = Function(OWN[name], nn.Linear(WIDTH, WIDTH))
    model = Beside(part, lambda part, x, c: part(x, c))
    calls = capture(model, *sequences(length, batch))
    assert missed_layers(calls) == ["part"]


@pytest.mark.parametrize("is_wrong", [True, False])
def test_module_that_receives_a_table_of_all_pairs_is_followed(is_wrong: bool) -> None:
    """bros computes a table of the distances of all tokens, which its attention receives."""

    def attend(x: Tensor, table: Tensor, linear: nn.Module) -> Tensor:
        scores = x @ linear(x).mT + table.mean(-1)
        return scores.softmax(-1) @ x if is_wrong else captured_cross(x, x, linear)

    part = Function(attend, nn.Linear(WIDTH, WIDTH))
    model = Beside(part, lambda part, x, _: part(x, x[:, None] - x[:, :, None]))
    calls = capture(model, *sequences(5))
    assert missed_layers(calls) == ["part"] * is_wrong


def captured_cross(x: Tensor, c: Tensor, linear: nn.Module) -> Tensor:
    key = linear(c)
    return x + F.scaled_dot_product_attention(x[:, None], key[:, None], key[:, None])[:, 0]


HARMLESS: dict[str, Callable[..., Any]] = {
    "captured": captured_cross,
    "one vector for all": lambda x, c, linear: x * linear(c[:, :1]).sigmoid(),
    "vector of the item": lambda x, c, linear: x * linear(c[:, 0])[:, None].sigmoid(),
    "side by side": lambda x, c, linear: torch.cat([x, linear(c)], 1),
    "scores": lambda x, c, linear: x @ linear(c).mT,
    "added": lambda x, c, linear: linear(x + c[:, :LENGTH]),
    "rows of a table": lambda x, c, linear: x + linear(c)[:, torch.arange(LENGTH) % 4 + 1],
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", HARMLESS)
def test_other_sequences_that_are_not_mixed_are_not_named(name: str, batch: int) -> None:
    function = HARMLESS[name]
    if name == "vector of the item":
        function = lambda x, c, linear: HARMLESS[name](x, c[:, :1], linear)  # noqa: E731
    part = Function(function, nn.Linear(WIDTH, WIDTH))
    calls = capture(
        Beside(part, lambda part, x, c: part(x, c[:, :1] if name == "one vector for all" else c)),
        *sequences(12, batch),
    )
    assert calls.missed == []


def test_captured_attention_over_the_layers_of_a_position_is_not_named() -> None:
    """inkling2 attends to the states of earlier layers at the same position."""

    def attend(states: Tensor, x: Tensor, linear: nn.Module) -> Tensor:
        key = linear(torch.cat([states, x.unsqueeze(-2)], -2))
        query = torch.ones(WIDTH).expand(*x.shape[:-1], 1, -1)
        return F.scaled_dot_product_attention(query, key, key).squeeze(-2)

    part = Function(attend, nn.Linear(WIDTH, WIDTH))
    model = Beside(part, lambda part, x, _: part(torch.stack([x, x + 1], -2), x))
    calls = capture(model, *sequences(5))
    assert calls.missed == []
    assert calls.layers == ["attention", "part"]


def test_learned_queries_of_all_items_are_not_named() -> None:
    """The queries of granite_speech are one item, to which the output of each item is added."""

    def attend(x: Tensor, query: Tensor, linear: nn.Module, add: nn.Module) -> Tensor:
        key = linear(x)[:, None]
        found: Tensor = add(F.scaled_dot_product_attention(query[:, None], key, key)[:, 0], query)
        return found

    add = Function(lambda y, query, linear: linear(y) + query, nn.Linear(WIDTH, WIDTH))
    part = Function(attend, nn.Linear(WIDTH, WIDTH), add)
    queries = torch.ones(1, 3, WIDTH)
    model = Beside(part, lambda part, x, _: part(x, queries))
    assert capture(model, *sequences(3)).missed == []


def test_layers_that_mix_tokens_by_a_matrix_are_named_once() -> None:
    """GroupViT has a perceptron over the tokens, beside layers that receive two sequences."""
    mix = Function(
        lambda x, linear: linear(x.transpose(1, 2)).transpose(1, 2), nn.Linear(LENGTH, LENGTH)
    )
    part = Function(
        lambda x, c, mix, linear: captured_cross(mix(x), c, linear), mix, nn.Linear(WIDTH, WIDTH)
    )
    calls = capture(Beside(part, lambda part, x, c: part(x, c)), *sequences(5))
    assert len(calls.missed) == 1
    assert calls.missed[0].layer.startswith("part.parts.0")


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_captured_cross_attention_of_real_models_is_not_named(name: str) -> None:
    model = build(name, "eager")
    with qkv.capture(model) as calls:
        run_model(model, FAMILIES[name].batch())
    assert calls.missed == []


def test_convolutions_of_images_are_named_behind_attention() -> None:
    """Convolutions in front of a tower are no layers of it."""
    stem = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.GELU())
    layers = [
        nn.Sequential(nn.Conv2d(WIDTH, 24, n, padding=n // 2), nn.BatchNorm2d(24)) for n in (1, 3)
    ]
    model = Function(
        lambda x, stem, attend, *layers: [
            layer(attend(stem(x).flatten(2).transpose(1, 2)).mT.unflatten(2, (9, 7)))
            for layer in layers
        ],
        stem, PlainAttention(), *layers,
    ).eval()  # fmt: skip
    twice = Function(lambda x, model: (model(x), model(x)), model)
    calls = capture(twice, torch.randn(2, 3, 9, 7))
    assert missed_layers(calls) == ["parts.0.parts.3.0"]
