"""Tests of `qkv.capture` with several models at once, and in several threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

import qkv
from support.captured_models import FAMILIES, WIDTH, PlainAttention, build, state_of


def test_two_models_captured_in_one_thread_are_apart() -> None:
    one, two = nn.Sequential(PlainAttention()), nn.ModuleDict({"b": PlainAttention()})
    x = torch.randn(2, 5, WIDTH)
    with qkv.capture(one) as first, qkv.capture(two) as second:
        one(x)
        two["b"](x)
        one(x)
    assert (first.layers, len(first)) == (["0"], 2)
    assert (second.layers, len(second)) == (["b"], 1)


def test_model_and_its_part_are_captured_under_their_own_names() -> None:
    model, x = nn.Sequential(nn.Sequential(PlainAttention())), torch.randn(2, 5, WIDTH)
    with qkv.capture(model[0]) as part, qkv.capture(model) as whole:
        model(x)
    assert (part.layers, whole.layers) == (["0"], ["0.0"])


def test_model_that_is_not_captured_is_not_seen() -> None:
    with qkv.capture(nn.Sequential(PlainAttention())) as calls:
        PlainAttention()(torch.randn(2, 5, WIDTH))
        build("bert", "sdpa")(**FAMILIES["bert"].batch())
    assert len(calls) == 0


def test_models_captured_in_two_threads_are_apart() -> None:
    barrier = threading.Barrier(2)
    batch = FAMILIES["llama"].batch()

    def run(name: str) -> tuple[list[str], list[str], bool]:
        model = build(name, "sdpa")
        expected = model(**batch).logits
        barrier.wait()
        with qkv.capture(model) as calls:
            barrier.wait()
            same = [torch.equal(model(**batch).logits, expected) for _ in range(5)]
            barrier.wait()
        return [call.layer for call in calls], list(FAMILIES[name].layers) * 5, all(same)

    names = ["llama", "qwen3"]
    for name in names:
        build(name, "sdpa")
    states = [state_of(build(name, "sdpa")) for name in names]
    with ThreadPoolExecutor(2) as pool:
        for found, expected, is_same in pool.map(run, names):
            assert found == expected
            assert is_same
    assert [state_of(build(name, "sdpa")) for name in names] == states


def test_one_model_runs_in_several_threads() -> None:
    """Threads that did not enter the capture are recorded too."""
    model = nn.Sequential(
        PlainAttention(), nn.TransformerEncoderLayer(WIDTH, 4, 24, batch_first=True)
    ).eval()
    inputs = [torch.randn(2, 3 + n, WIDTH) for n in range(6)]
    # the number of threads of a sum belongs to each thread, and bits depend on it
    with ThreadPoolExecutor(3, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        expected = list(pool.map(model, inputs))
        with qkv.capture(model) as calls:
            found = list(pool.map(model, inputs))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [call.index for call in calls] == list(range(12))
    assert sorted(call.query.shape[2] for call in calls.of_layer("0")) == [3, 4, 5, 6, 7, 8]
    assert calls.layers[0] == "0"


def test_module_that_runs_in_a_thread_of_the_model_has_its_name() -> None:
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([PlainAttention(), PlainAttention()])

        def forward(self, x: Tensor) -> Tensor:
            with ThreadPoolExecutor(2) as pool:
                first, second = pool.map(lambda part: part(x), self.parts)
            output: Tensor = first + second
            return output

    model = Parallel()
    with qkv.capture(model) as calls:
        model(torch.randn(2, 5, WIDTH))
    assert sorted(calls.layers) == ["parts.0", "parts.1"]


def test_captures_of_one_model_in_two_threads_leave_nothing() -> None:
    model, x = nn.Sequential(PlainAttention()), torch.randn(2, 5, WIDTH)
    state = state_of(model)

    def run(_: int) -> int:
        with qkv.capture(model) as calls:
            model(x)
        return len(calls)

    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(run, range(20)))
    assert min(counts) >= 1
    assert state_of(model) == state
