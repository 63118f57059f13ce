"""Closed-form gradients of every variant agree with `attend` and the reference."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn.functional import elu, normalize

from qkv.attention.common import gradients as common_gradients
from qkv.attention.variants import softmax
from support.gradient_calls import BACKWARDS, EPS, SIZES, forward_output, gradients, random_inputs
from support.peak_memory import needs_proc, peaks

CAUSAL: Final = {"causal": True}
PARAMETERS: Final[tuple[dict[str, Any], ...]] = (
    {},
    CAUSAL,
    {"causal": False},
    *(CAUSAL | {"query_offset": offset} for offset in ("end", -2, 1, 100, -100)),
    {"normalize": False},
    CAUSAL | {"normalize": False},
    CAUSAL | {"normalize": False, "query_offset": -1},
    {"method": "loop"},
    {"method": "softmax", "causal": False},
    {"scale": -0.7},
    {"scale": 0.0},
    {"softcap": 0.8},
    {"window": (1, 0)},
    {"window": (None, 1), "query_offset": "end"},
    {"dropout": 0.4, "seed": 3},
    CAUSAL
    | {
        "query_offset": "end", "scale": -1.3, "softcap": 0.8, "window": (2, None), "dropout": 0.3,
        "seed": 2**40,
    },
)  # fmt: skip

every_variant = pytest.mark.parametrize("name", BACKWARDS)


def cases() -> Iterator[Any]:
    """Yields every variant with all its parameters, with and without padding, and with masks."""
    B, H, L, S = (SIZES[letter] for letter in "BHLS")
    for name, variant in BACKWARDS.items():
        known = [p for p in PARAMETERS if p.keys() <= variant.parameters.model_fields.keys()]
        for parameters in known:
            yield pytest.param(name, parameters, {}, id=f"{name}-{parameters}")
            if "key_lengths" in variant.inputs:
                extra = {"key_lengths_B": torch.tensor([S, 2, 0])}
                yield pytest.param(name, parameters, extra, id=f"{name}-{parameters}-lengths")
        if "mask" not in variant.inputs:
            continue
        generator = torch.Generator().manual_seed(5)
        for shape in ((B, H, L, S), (1, 1, L, S), (B, 1, 1, S), (1, H, L, 1), (1, 1, 1, 1)):
            added = torch.randn(shape, generator=generator, dtype=torch.float64)
            allowed = torch.rand(shape, generator=generator) < 0.7
            for mask in (allowed, added, added.where(allowed, -torch.inf)):
                for parameters in (known[0], known[-1]):
                    for extra in ({}, {"key_lengths_B": torch.tensor([S, 2, 0])}):
                        yield pytest.param(
                            name, parameters, {"mask_BHLS": mask} | extra,
                            id=f"{name}-{parameters}-{mask.dtype}{list(shape)}-{[*extra]}",
                        )  # fmt: skip


every_case = pytest.mark.parametrize(("name", "parameters", "extra"), list(cases()))


class Attended(torch.autograd.Function):
    """An autograd function of `attend` and `backward`."""

    @staticmethod
    def forward(ctx: Any, forth: Callable[..., Tensor], back: Callable[..., Any], *x: Any) -> Any:
        ctx.back = back
        ctx.save_for_backward(*x)
        return forth(*x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *ctx.back(grads[0], *ctx.saved_tensors)


@every_variant
def test_backward_has_the_signature_of_attend(name: str) -> None:
    module = BACKWARDS[name].module
    backward = list(inspect.signature(module.backward).parameters.values())
    attend = inspect.signature(module.attend).parameters.values()
    assert backward[0].name.startswith("grad_output_")
    assert [(p.name, p.kind, p.default) for p in backward[1:]] == [
        (p.name, p.kind, p.default) for p in attend if p.name != "outputs"
    ]
    assert list(vars(module)).index("backward") > list(vars(module)).index("reference")


@pytest.mark.slow
@every_case
def test_backward_is_the_derivative_of_attend(
    name: str, parameters: dict[str, Any], extra: dict[str, Tensor]
) -> None:
    tensors = random_inputs(name) | extra
    floating = [a for a, tensor in tensors.items() if tensor.is_floating_point()]
    names = {i.argument: i.name for i in BACKWARDS[name].inputs.values()}

    def forth(*x: Tensor) -> Tensor:
        return forward_output(name, tensors | dict(zip(floating, x, strict=True)), parameters)

    def back(grad: Tensor, *x: Tensor) -> list[Tensor]:
        detached = {a: t.detach() for a, t in zip(floating, x, strict=True)}
        found = gradients(name, grad, tensors | detached, parameters)
        return [found[names[a]].clone() for a in floating]

    inputs = [tensors[a].clone().requires_grad_() for a in floating]
    apply: Any = Attended.apply
    masked = "mask_BHLS" in extra  # all entries one by one would take minutes
    assert torch.autograd.gradcheck(lambda *x: apply(forth, back, *x), inputs, fast_mode=masked)


@every_case
def test_backward_is_the_derivative_of_the_reference(
    name: str, parameters: dict[str, Any], extra: dict[str, Tensor]
) -> None:
    """Compares with central differences along a random direction; two steps bound their error."""
    tensors = random_inputs(name) | extra
    names = {i.argument: i.name for i in BACKWARDS[name].inputs.values()}
    along = {a: torch.randn_like(t) for a, t in tensors.items() if t.is_floating_point()}
    grad = torch.randn_like(forward_output(name, tensors, parameters))

    def outcome(step: float) -> Tensor:
        moved = {a: t + step * along[a] if a in along else t for a, t in tensors.items()}
        output: Tensor = BACKWARDS[name].module.reference(**moved, **parameters).output
        return output * grad

    step = EPS ** (1 / 3)
    slopes = [float((outcome(h) - outcome(-h)).sum() / (2 * h)) for h in (step, 2 * step)]
    result = gradients(name, grad, tensors, parameters)
    found = sum(float((result[names[a]] * way).sum()) for a, way in along.items())
    # the doubled step has four times the error; each outcome has as many roundings as sums
    bound = abs(slopes[0] - slopes[1]) + 100 * EPS * float(outcome(0.0).abs().sum()) / step
    assert abs(found - slopes[0]) <= bound


def roundings(
    name: str, grad: Tensor, tensors: Mapping[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """Returns the bounds of a gradient's error in eps of float32.

    Each is the mass of the gradient's sums times their number of terms. Variants that are not named
    compute in float64.
    """
    size = {a: t.double().abs() for a, t in tensors.items()}
    if name == "linear_layer":
        x, weight = size["x_BI"], size["weight_OI"]
        grad = grad.double().abs()
        bounds = {"x": grad @ weight * len(weight), "weight": grad.mT @ x * len(x)}
    elif name == "softmax":
        query, key, value = (tensors[a].double() for a in ("query_BHLD", "key_BGSD", "value_BGSE"))
        K, S, (D, E) = query.shape[1] // key.shape[1], key.shape[2], (key.shape[3], value.shape[3])
        key, value = key.repeat_interleave(K, 1), value.repeat_interleave(K, 1)
        share = torch.softmax(scale * query @ key.mT, -1)
        products = (query.abs() @ key.abs().mT).amax(-1, keepdim=True) * scale
        slope = grad.double().abs() @ value.abs().mT
        slope = share * (slope + (share * slope).sum(-1, keepdim=True))
        # a share has the errors of its scores and of its row's sum
        terms = 2 * (D + 2) * products + 3 * S + E + 8
        slope, share = slope * terms, share * terms
        bounds = {
            "query": scale * slope @ key.abs() * 2,
            "key": (scale * slope.mT @ query.abs() * 2).unflatten(1, (-1, K)).sum(2),
            "value": (share.mT @ grad.double().abs()).unflatten(1, (-1, K)).sum(2) * 2,
        }
    elif name == "sigmoid":
        query, key, value = (tensors[a].double() for a in ("query_BHLD", "key_BGSD", "value_BGSE"))
        K, (L, D), (S, E) = query.shape[1] // key.shape[1], query.shape[2:], value.shape[2:]
        key, value = key.repeat_interleave(K, 1), value.repeat_interleave(K, 1)
        scores = scale * query @ key.mT - math.log(S)
        share = torch.sigmoid(scores)
        # a weight and its slope have the errors of the score; sums have S or L terms
        terms = 2 * (D + 2) * scale * query.abs() @ key.abs().mT + 2 * scores.abs() + S + L + E + 16
        slope = grad.double().abs() @ value.abs().mT * share * (1 - share) * terms
        bounds = {
            "query": scale * slope @ key.abs(),
            "key": (scale * slope.mT @ query.abs()).unflatten(1, (-1, K)).sum(2),
            "value": ((share * terms).mT @ grad.double().abs()).unflatten(1, (-1, K)).sum(2),
        }
    else:
        bounds = {}
    return bounds


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@every_variant
def test_narrow_dtypes_have_bounded_error(name: str, dtype: torch.dtype) -> None:
    sizes = SIZES | {"L": 90, "S": 100, "D": 16, "E": 8, "N": 110}
    tensors = random_inputs(name, sizes, dtype)
    grad = torch.randn_like(forward_output(name, tensors, {}))
    found = gradients(name, grad, tensors, {})
    wide = {a: t.double() for a, t in tensors.items()}
    truth = gradients(name, grad.double(), wide, {})
    bounds, eps = roundings(name, grad, tensors, 16**-0.5), torch.finfo(torch.float32).eps
    for n, gradient in found.items():
        bound = eps * (truth[n].abs() + bounds.get(n, torch.zeros(())))
        assert ((gradient.double() - truth[n]).abs() <= bound).all()


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -1e30])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [n for n, v in BACKWARDS.items() if "key_lengths" in v.inputs])
def test_padding_may_hold_anything_and_has_zero_gradient(
    name: str, causal: bool, garbage: float
) -> None:
    variant = BACKWARDS[name]
    parameters = {"causal": causal} if "causal" in variant.parameters.model_fields else {}
    lengths = {"key_lengths_B": torch.tensor([4, 2, 0])}
    for dtype in (torch.float32, torch.float64):
        tensors = random_inputs(name, dtype=dtype)
        grad = torch.randn_like(forward_output(name, tensors, parameters))
        clean = gradients(name, grad, tensors | lengths, parameters)
        padded = [a for a in tensors if a.startswith(("key_BGS", "value_B"))]
        with_garbage = {a: t.clone() for a, t in tensors.items()}
        for argument in padded:
            for b, length in enumerate(lengths["key_lengths_B"]):
                with_garbage[argument][b, :, length:] = garbage
        found = gradients(name, grad, with_garbage | lengths, parameters)
        for n, gradient in found.items():
            assert torch.equal(gradient, clean[n])
        for argument in padded:
            gradient = found[argument.rpartition("_")[0]]
            for b, length in enumerate(lengths["key_lengths_B"]):
                assert not gradient[b, :, length:].any()


@pytest.mark.parametrize("name", ["sigmoid", "softmax", "linear", "taylor"])
def test_rows_without_keys_have_zero_gradient(name: str) -> None:
    tensors = random_inputs(name)
    grad = torch.randn_like(forward_output(name, tensors, {}))
    found = gradients(name, grad, tensors, {"causal": True, "query_offset": -2})
    assert not found["query"][:, :, :2].any()
    assert found["value"][:, :, 0].all()
    assert not found["value"][:, :, 1:].any()
    again = grad.clone()
    again[:, :, :2] = 1e300
    with_garbage = gradients(name, again, tensors, {"causal": True, "query_offset": -2})
    torch.testing.assert_close(with_garbage["value"], found["value"], rtol=8 * EPS, atol=0)


def plain(
    name: str, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> Tensor:
    """Returns the textbook output in differentiable torch, for equally many heads."""
    visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    visible = visible.tril() if causal else visible
    if name == "softmax":
        scores = (scale * query @ key.mT).masked_fill(~visible, -torch.inf)
        return torch.softmax(scores, -1) @ value
    if name == "sigmoid":
        return torch.sigmoid(scale * query @ key.mT - math.log(len(visible))) * visible @ value
    if name == "linear":
        a = (elu(query) + 1) @ (elu(key) + 1).mT
    else:
        a = 1 + normalize(query, dim=-1) @ normalize(key, dim=-1).mT
    a = a * visible
    return a / a.sum(-1, keepdim=True) @ value


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [65, 1000, pytest.param(4096, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["sigmoid", "softmax", "linear", "taylor"])
def test_lengths_above_one_block(name: str, length: int, causal: bool) -> None:
    query, key, value, grad = (torch.randn(1, 1, length, 8, dtype=torch.float64) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    output = plain(name, leaves[0], leaves[1], leaves[2], causal, 8**-0.5)
    slopes = torch.autograd.grad(output, leaves, grad)
    tensors = {"query_BHLD": query, "key_BGSD": key, "value_BGSE": value}
    found = gradients(name, grad, tensors, {"causal": causal})
    for n, slope in zip(("query", "key", "value"), slopes, strict=True):
        # every entry is a sum of at most that many terms of about 1, computed in two ways;
        # taylor's errors grow by the cancellation of the row's sum, at most by 1e3
        close = 4 * length * EPS * (1e3 if name == "taylor" else 1)
        torch.testing.assert_close(found[n], slope, rtol=close, atol=close)


MEASURED: Final = """
from qkv.attention import catalogue
module, L = catalogue.find(sys.argv[1]).module, int(sys.argv[2])
query, key, value, grad = (torch.randn(1, 8, n, 64) for n in (L, 65536, 65536, L))
with torch.inference_mode():
    result = module.backward(grad, query, key, value, causal=True, query_offset="end")
assert all(gradient.isfinite().all() for gradient in result.values())
say()
"""


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize(("name", "L"), [("linear", 65536), ("taylor", 65536), ("softmax", 512)])
def test_65536_tokens_take_less_than_4_gib(name: str, L: int) -> None:
    assert peaks(MEASURED, name, L)[-1].whole < 4 << 30


@pytest.mark.parametrize("length", [16, 64, 128, 256])
def test_blocks_of_rows_do_not_depend_on_the_batch(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """The order of summation does not depend on the batch either."""
    blocks: list[slice] = []
    add = common_gradients._add_block

    def recording(gradients: Any, scores: Any, rows: slice, *tensors: Tensor) -> None:
        blocks.append(rows)
        add(gradients, scores, rows, *tensors)

    monkeypatch.setattr(common_gradients, "_add_block", recording)
    found = []
    for B in (1, 4):
        grad, query, key, value = torch.randn(4, B, 2, length, 8)
        softmax.backward(grad, query, key, value, causal=True)
        found.append(list(blocks))
        blocks.clear()
    assert found[0] == found[1]
    assert len(found[0]) <= 8
