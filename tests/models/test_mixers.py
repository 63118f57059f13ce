"""Tests of `qkv.capture` on layers that mix positions without attention: they are named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qkv
from qkv.errors import InvalidContent
from qkv.models.capture import CaptureWarning
from support.captured_models import WIDTH, Function, PlainAttention, capture, missed_layers

F = nn.functional
LENGTH = 7
_SHARED = {
    "hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 29,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
HYBRIDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "FalconH1": (
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
         "mamba_n_groups": 1, "mamba_chunk_size": 4},
        ["layers.0.mamba", "layers.1.mamba", "layers.2.mamba"],
    ),
    "FNet": ({}, [f"encoder.layer.{n}.fourier.self" for n in range(3)]),
    "Jamba": (
        {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4,
         "use_mamba_kernels": False, "num_experts": 2},
        ["layers.0.mamba", "layers.2.mamba"],
    ),
    "Lfm2": (
        {"layer_types": ["conv", "full_attention", "conv"]}, ["layers.0.conv", "layers.2.conv"]
    ),
    "Mamba2": (
        {"head_dim": 8, "num_heads": 4, "n_groups": 1, "chunk_size": 4, "state_size": 4},
        [f"layers.{n}.mixer" for n in range(3)],
    ),
    "RecurrentGemma": (
        {"lru_width": 16, "attention_window_size": 8},
        ["layers.0.temporal_block.rg_lru", "layers.1.temporal_block.rg_lru"],
    ),
    "Rwkv": (
        {"attention_hidden_size": 16},
        [f"blocks.{n}.{m}.time_shift" for n in range(3) for m in ("attention", "feed_forward")],
    ),
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Llama4Text": {"num_local_experts": 2, "intermediate_size_mlp": 24},
}


def build(name: str, use_cache: bool = False, **options: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**_SHARED | options, use_cache=use_cache)
    model: nn.Module = getattr(transformers, f"{name}Model")(config).eval()
    return model


def tokens() -> Tensor:
    return torch.arange(3, 3 + LENGTH).expand(2, -1)


@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_beside_attention_are_named_and_rollout_refuses(name: str) -> None:
    options, expected = HYBRIDS[name]
    calls = capture(build(name, **options), input_ids=tokens())
    assert missed_layers(calls) == expected
    assert (len(calls) > 0) == (name not in ("FNet", "Mamba2", "Rwkv"))
    assert all("mixes positions" in missed.reason for missed in calls.missed)
    with pytest.raises(InvalidContent, match=f"{expected[0]} was not captured"):
        calls.rollout()


def test_attention_of_own_code_with_a_cache_of_keys_is_named() -> None:
    model = build("GPTJ", use_cache=True, rotary_dim=4)
    names = [f"h.{n}.attn" for n in range(3)]
    assert missed_layers(capture(model, input_ids=tokens())) == names


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_and_routers_mix_no_positions(name: str) -> None:
    assert capture(build(name, **MIXTURES[name]), input_ids=tokens()).missed == []


def shift(x: Tensor) -> Tensor:
    return (x + torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)) / 2


def pad(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, -1))


def recur(x: Tensor) -> Tensor:
    state, output = torch.zeros_like(x[:, 0]), torch.empty_like(x)
    for n in range(x.shape[1]):
        state = state / 2 + x[:, n]
        output[:, n] = state
    return output


def add_in_place(x: Tensor) -> Tensor:
    output = x.clone()
    output[:, 1:] += x[:, :-1]
    return output


def clear_first(x: Tensor) -> Tensor:
    output = x.clone()
    output[:, 0] = 1.0
    output[x > 2] = -1.0
    return output


def convolve(kernel: int) -> nn.Module:
    conv = nn.Conv1d(WIDTH, WIDTH, kernel, padding=kernel // 2)
    return Function(lambda x, c: x + c(x.transpose(1, 2)).transpose(1, 2), conv)


MIXERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "convolution": (lambda: convolve(3), "1.parts.0"),
    "GRU": (
        lambda: Function(lambda x, g: g(x)[0], nn.GRU(WIDTH, WIDTH, 1, True, True)),
        "1.parts.0",
    ),
    "shift": (lambda: Function(shift), "1"),
    "pad": (lambda: Function(pad), "1"),
    "recurrence": (lambda: Function(recur), "1"),
    "in place": (lambda: Function(add_in_place), "1"),
    "mean": (lambda: Function(lambda x: x * x.mean(1, keepdim=True).sigmoid()), "1"),
    "gate": (
        lambda: Function(lambda x, f: x * f(x.mean((0, 1))).sigmoid(), nn.Linear(WIDTH, WIDTH)),
        "1",
    ),
    "sum": (lambda: Function(lambda x: x.cumsum(1)), "1"),
    "Fourier": (lambda: Function(lambda x: torch.fft.fft(x, dim=1).real), "1"),
    "attention": (lambda: Function(lambda x: (x @ x.mT).softmax(-1) @ x), "1"),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", MIXERS)
def test_module_that_mixes_positions_is_named(name: str, batch: int) -> None:
    build_mixer, layer = MIXERS[name]
    model = nn.Sequential(PlainAttention(), build_mixer(), PlainAttention()).eval()
    with torch.no_grad():
        calls = capture(model, torch.randn(batch, LENGTH, WIDTH))
    assert missed_layers(calls) == [layer]


@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        torch.inference_mode,
        torch.enable_grad,
    ],
    ids=["autocast", "inference", "gradients"],
)
def test_module_is_named_in_every_mode_of_torch(
    context: Callable[[], AbstractContextManager[Any]],
) -> None:
    model = nn.Sequential(PlainAttention(), nn.Sequential(nn.Dropout(0.1), convolve(3))).train()
    with context():
        assert missed_layers(capture(model, torch.randn(2, LENGTH, WIDTH))) == ["1.1.parts.0"]


def test_captures_of_a_model_and_of_its_part_name_the_module() -> None:
    model = nn.Sequential(PlainAttention(), nn.Sequential(nn.Sequential(Function(recur))))
    with pytest.warns(CaptureWarning), qkv.capture(model) as whole:  # noqa: SIM117
        with qkv.capture(model[1]) as part:
            model(torch.randn(2, LENGTH, WIDTH))
    assert (missed_layers(whole), missed_layers(part)) == (["1.0.0"], ["0.0"])


def route(x: Tensor, router: nn.Module, *experts: nn.Module) -> Tensor:
    """Returns a mixture of the two best experts of each token."""
    rows = x.flatten(0, 1)
    weights, chosen = router(rows).softmax(-1).topk(2, -1)
    output = torch.zeros_like(rows)
    for n, expert in enumerate(experts):
        row, rank = torch.where(chosen == n)
        output.index_add_(0, row, expert(rows[row]) * weights[row, rank, None])
    return output.reshape(x.shape)


def rotate(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    angles = torch.arange(x.shape[1])[:, None].expand(-1, WIDTH) / 10
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def write_in_place(x: Tensor) -> Tensor:
    """Doubles a sequence, by every way to write to a tensor, and through a view of another one."""
    output = torch.empty_like(x)
    torch.mul(x, 2, out=output)
    output += x
    output.sub_(x)
    ones = torch.zeros(x.numel()).view_as(x)
    ones += 1
    return output * ones


class Classifier(nn.Module):
    """Embeddings, blocks without mixing beside attention, and heads that pool."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(29, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), PlainAttention(), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH),
                nn.GELU(), nn.Dropout(0.1), Function(rotate), convolve(1), nn.BatchNorm1d(LENGTH),
                Function(clear_first), Function(write_in_place), nn.ReLU(inplace=True),
                nn.Dropout(0.1, inplace=True),
                Function(route, *(nn.Linear(WIDTH, n) for n in (3, WIDTH, WIDTH, WIDTH))),
            )
            for _ in range(2)
        )  # fmt: skip
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns similarities of two pools."""
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = x + block(x)
        similarities: Tensor = F.normalize(self.head(x.mean(1)), dim=-1) @ self.head(x[:, 0]).T
        return similarities


@pytest.mark.parametrize("training", [True, False])
def test_parts_that_mix_no_positions_are_not_named(training: bool) -> None:
    with torch.no_grad():
        calls = capture(Classifier().train(training), tokens())
    assert calls.missed == []
    assert len(calls) == 2


def test_code_that_cannot_be_seen_runs_again_or_is_named() -> None:
    """numpy stands for the kernels of a GPU."""

    def scale(x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() * 2)

    def accumulate(x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy().cumsum(1))

    model = nn.Sequential(PlainAttention(), Function(scale), Function(accumulate))
    with torch.no_grad():
        assert missed_layers(capture(model, torch.randn(2, LENGTH, WIDTH))) == ["2"]


class Cache:
    """A state that a model hands on."""

    total = torch.zeros(())


class Stateful(nn.Module):
    """Adds what it has received before: in a buffer, a plain tensor, a list and a cache."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(WIDTH))
        self.last, self.seen = torch.zeros(WIDTH), [0]

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        """Returns the sum of a sequence and all states."""
        output = x + self.total + self.last + sum(self.seen) + cache.total
        self.total += x.mean((0, 1))
        self.last.copy_(x[0, 0])
        self.seen.append(len(x))
        cache.total = cache.total + x.mean()
        return output


def test_second_run_changes_no_state_and_calls_no_hook() -> None:
    def run() -> list[Tensor]:
        x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
        part, cache, hooked = Stateful(), Cache(), [0]
        part.register_forward_hook(lambda *_: hooked.append(0))
        model = Function(lambda x, part, attend: part(attend(x), cache), part, attention)
        with warnings.catch_warnings(), qkv.capture(model) if is_captured else nullcontext():
            warnings.simplefilter("error")
            output = model(x) + model(x)
        counts = torch.tensor([*part.seen, *hooked])
        return [output, part.total, part.last, counts, cache.total]

    attention, is_captured = PlainAttention(), False
    with torch.no_grad():
        expected = run()
        is_captured = True
        assert all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True))


def test_hook_of_accelerate_is_not_copied() -> None:
    class Hook:
        def __deepcopy__(self, _: Any) -> Any:
            raise MemoryError

    mixer = nn.Sequential(nn.Identity(), Function(recur))
    vars(mixer[0])["_hf_hook"] = Hook()
    model = nn.Sequential(PlainAttention(), mixer)
    assert missed_layers(capture(model, torch.randn(2, LENGTH, WIDTH))) == ["1.1"]


def test_random_and_stateful_functions_run_once() -> None:
    model = nn.Sequential(nn.BatchNorm1d(LENGTH), PlainAttention(), nn.Dropout(0.5)).train()
    x = torch.randn(3, LENGTH, WIDTH)
    with qkv.capture(model) as calls:
        model(x)
    assert calls.missed == []
    assert int(model[0].num_batches_tracked) == 1  # type: ignore[arg-type]
    torch.testing.assert_close(model[0].running_mean, x.mean((0, 2)) / 10)
