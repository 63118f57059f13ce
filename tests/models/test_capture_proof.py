"""Tests of the proof of a captured call: its weights times its values are the model's output."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qkv
from qkv.errors import InvalidContent
from qkv.models.calls import Calls
from qkv.models.capture import CaptureWarning
from support.captured_models import FAMILIES, PlainAttention, Transformers, build, run_model

UNPROVED = "its weights times its values are not what its attention function returned"
B, H, L, D = 2, 2, 6, 8


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Returns attention as eager functions of transformers compute it, in the tensors' dtype."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query @ key.mT * scaling
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores if mask is None else scores + mask
    return scores.softmax(-1, dtype=wide).to(query.dtype) @ value


def right(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    return attend(q, k, v, mask, options["scaling"], options["softcap"])


WRONG: dict[str, Callable[..., Tensor]] = {
    "another scale": lambda q, k, v, mask, **o: attend(q, k, v, mask, 1.0, o["softcap"]),
    "no cap": lambda q, k, v, mask, **o: attend(q, k, v, mask, o["scaling"]),
    "no mask": lambda q, k, v, mask, **o: attend(q, k, v, None, o["scaling"], o["softcap"]),
    "normed values": lambda q, k, v, mask, **o: right(q, k, v / v.norm(), mask, **o),
    "gated": lambda q, k, v, mask, **o: right(q, k, v, mask, **o) * q.sigmoid(),
    "one row": lambda q, k, v, mask, **o: (
        right(q, k, v, mask, **o) + nn.functional.one_hot(torch.tensor(3), L).to(q)[:, None]
    ),
    "not a number": lambda q, k, v, mask, **o: right(q, k, v, mask, **o) * torch.nan,
}


def eager(function: Callable[..., Tensor]) -> nn.Module:
    return Transformers(
        "eager", lambda _, *args, **options: (function(*args, **options).transpose(1, 2), None)
    )


def capture(function: Callable[..., Tensor], *args: Any, **options: Any) -> Calls:
    model = nn.Sequential(eager(function))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        with qkv.capture(model, layers=options.pop("layers", None)) as calls:
            model[0](*args, **options)
    return calls


def inputs(dtype: torch.dtype = torch.float32, size: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    qkv_BHLD = [torch.randn(B, H, L, D, generator=generator) for _ in range(3)]
    bias = torch.randn(B, 1, L, L, generator=generator).to(dtype)
    bias = bias.masked_fill(torch.ones(L, L).triu(1).bool(), torch.finfo(dtype).min)
    return [(x * size).to(dtype) for x in qkv_BHLD] + [bias]


OPTIONS = {"scaling": 0.3, "softcap": 1.5}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRONG)
def test_call_that_is_not_what_the_function_computes_is_named(
    name: str, dtype: torch.dtype
) -> None:
    calls = capture(WRONG[name], *inputs(dtype), **OPTIONS)
    assert len(calls) == 0
    assert calls.missed == [("0", UNPROVED)]
    with pytest.raises(InvalidContent, match="0 was not captured: its weights"):
        calls.rollout()


@pytest.mark.parametrize("size", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_no_difference(dtype: torch.dtype, size: float) -> None:
    calls = capture(right, *inputs(dtype, size), **OPTIONS)
    assert (len(calls), calls.missed) == (1, [])


def test_boolean_mask_that_is_added_is_named() -> None:
    """transformers' mm-grounding-dino adds a mask of truth values to the scores."""
    query, key, value, _ = inputs()
    mask = torch.ones(B, 1, L, L).tril().bool()
    calls = capture(right, query, key, value, mask, **OPTIONS)
    assert calls.missed == [("0", UNPROVED)]
    everything = torch.ones_like(mask)  # one more for each score changes no weight
    assert capture(right, query, key, value, everything, **OPTIONS).missed == []


def test_boolean_mask_of_a_real_model_that_is_added_is_named() -> None:
    """mm-grounding-dino calls its text model like this."""
    model, batch = build("bert", "eager"), FAMILIES["bert"].batch()
    batch["attention_mask"] = torch.ones(2, 1, 6, 6).tril().bool()
    with pytest.warns(CaptureWarning), qkv.capture(model) as calls:
        run_model(model, batch)
    assert len(calls) == 0
    assert calls.missed == [(layer, UNPROVED) for layer in FAMILIES["bert"].layers]


def test_queries_that_see_no_key_prove_nothing() -> None:
    x = torch.randn(1, 1, 3, 4)
    mask = torch.ones(3, 3).tril(-1).bool()
    model = nn.Sequential(
        PlainAttention(lambda q, k, v: nn.functional.scaled_dot_product_attention(q, q, q, mask))
    )
    with qkv.capture(model) as calls:
        model(torch.randn(1, 3, 16))
    assert (len(calls), calls.missed) == (1, [])
    calls = capture(right, x, x, x, torch.full((1, 1, 3, 3), -torch.inf), **OPTIONS)
    assert (len(calls), calls.missed) == (1, [])


def test_call_with_a_substitute_is_proved_by_the_own_output() -> None:
    model = nn.Sequential(PlainAttention())
    x = torch.randn(2, 5, 16)
    for variant in ("linear", {"variant": "linear", "heads": [1]}):
        with qkv.substitute(model, variant), qkv.capture(model) as calls:
            model(x)
        assert (len(calls), calls.missed) == (1, [])
    wrong = nn.Sequential(eager(WRONG["no cap"]))
    with pytest.warns(CaptureWarning), qkv.substitute(wrong, "linear"), qkv.capture(wrong) as calls:
        wrong[0](*inputs()[:3], None, **OPTIONS)
    assert calls.missed == [("0", UNPROVED)]


def test_layers_that_are_not_chosen_are_not_proved() -> None:
    calls = capture(WRONG["no mask"], *inputs(), layers=[], **OPTIONS)
    assert (len(calls), calls.missed) == (0, [])


def test_long_calls_are_proved_to_the_last_row() -> None:
    length = 3000  # more scores than are held at a time

    def change_last(x: Tensor, is_wrong: bool) -> Tensor:
        output = nn.functional.scaled_dot_product_attention(x, x, x)
        return torch.cat([output[:, :, :-1], output[:, :, -1:] + 0.1 * is_wrong], 2)

    x = torch.randn(1, 1, length, 4, generator=torch.Generator().manual_seed(0))
    for is_wrong in (False, True):
        calls = capture(
            lambda q, k, v, mask, w=is_wrong, **_: change_last(q, w), x, x, x, None, scaling=0.5
        )
        assert (len(calls), len(calls.missed)) == (1 - is_wrong, int(is_wrong))
