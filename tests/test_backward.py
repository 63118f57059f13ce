"""Closed-form gradients: against finite differences of attend and of the reference, at the ends of
the dtypes' ranges, and in memory that is linear in the length."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from qkv import catalogue

BACKWARDS: Final = {
    name: variant
    for name, variant in catalogue.variants().items()
    if hasattr(variant.module, "backward")
}
SIZES: Final = {
    "B": 3, "G": 2, "H": 4, "L": 3, "S": 4, "D": 2, "E": 2, "I": 4, "O": 3, "R": 3, "N": 6
}  # fmt: skip
EPS: Final = torch.finfo(torch.float64).eps
OUTPUT: Final = frozenset({"output"})

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


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def drawn(
    name: str, sizes: Mapping[str, int] = SIZES, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Normal tensors by argument, all that the variant takes but masks and lengths."""
    return {
        i.argument: torch.randn([sizes.get(a, 2) for a in i.letters]).to(dtype)
        for i in BACKWARDS[name].inputs.values()
        if i.name not in ("mask", "key_lengths")
    }


def attended(name: str, tensors: Mapping[str, Tensor], parameters: Mapping[str, Any]) -> Tensor:
    output: Tensor = BACKWARDS[name].attend(**tensors, **parameters, outputs=OUTPUT).output
    return output


def gradients(
    name: str, grad: Tensor, tensors: Mapping[str, Tensor], parameters: Mapping[str, Any]
) -> dict[str, Tensor]:
    """By wire name; held against what every `backward` promises of shapes and dtypes."""
    before = {argument: tensor.clone() for argument, tensor in tensors.items()}
    with torch.inference_mode():
        made: dict[str, Tensor] = BACKWARDS[name].module.backward(grad, **tensors, **parameters)
    by_name = {i.name: i.argument for i in BACKWARDS[name].inputs.values()}
    floating = {n: tensors[a] for n, a in by_name.items() if a in tensors}
    floating = {n: tensor for n, tensor in floating.items() if tensor.is_floating_point()}
    assert made.keys() == floating.keys()
    for n, gradient in made.items():
        assert gradient.shape == floating[n].shape
        assert gradient.dtype in (torch.float32, torch.float64)
        if floating[n].dtype == torch.float64:
            assert gradient.dtype == torch.float64
    for argument, tensor in tensors.items():
        assert torch.equal(tensor.nan_to_num(7), before[argument].nan_to_num(7))
    return made


def cases() -> Iterator[Any]:
    """Every variant with all parameters that it knows, with padding and without, and masks."""
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
    """attend forwards, backward backwards."""

    @staticmethod
    def forward(ctx: Any, forth: Callable[..., Tensor], back: Callable[..., Any], *x: Any) -> Any:
        ctx.back = back
        ctx.save_for_backward(*x)
        return forth(*x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *ctx.back(grads[0], *ctx.saved_tensors)


@every_variant
def test_the_signature_is_that_of_attend(name: str) -> None:
    module = BACKWARDS[name].module
    backward = list(inspect.signature(module.backward).parameters.values())
    attend = inspect.signature(module.attend).parameters.values()
    assert backward[0].name.startswith("grad_output_")
    assert [(p.name, p.kind, p.default) for p in backward[1:]] == [
        (p.name, p.kind, p.default) for p in attend if p.name != "outputs"
    ]
    assert list(vars(module)).index("backward") > list(vars(module)).index("reference")


@every_case
def test_it_is_the_derivative_of_attend(
    name: str, parameters: dict[str, Any], extra: dict[str, Tensor]
) -> None:
    tensors = drawn(name) | extra
    floating = [a for a, tensor in tensors.items() if tensor.is_floating_point()]
    names = {i.argument: i.name for i in BACKWARDS[name].inputs.values()}

    def forth(*x: Tensor) -> Tensor:
        return attended(name, tensors | dict(zip(floating, x, strict=True)), parameters)

    def back(grad: Tensor, *x: Tensor) -> list[Tensor]:
        given = {a: t.detach() for a, t in zip(floating, x, strict=True)}
        made = gradients(name, grad, tensors | given, parameters)
        return [made[names[a]].clone() for a in floating]

    inputs = [tensors[a].clone().requires_grad_() for a in floating]
    apply: Any = Attended.apply
    assert torch.autograd.gradcheck(lambda *x: apply(forth, back, *x), inputs)


@every_case
def test_it_is_the_derivative_of_the_reference(
    name: str, parameters: dict[str, Any], extra: dict[str, Tensor]
) -> None:
    """Along a random direction, by central differences whose two steps bound what they cut off."""
    tensors = drawn(name) | extra
    names = {i.argument: i.name for i in BACKWARDS[name].inputs.values()}
    along = {a: torch.randn_like(t) for a, t in tensors.items() if t.is_floating_point()}
    grad = torch.randn_like(attended(name, tensors, parameters))

    def outcome(step: float) -> Tensor:
        moved = {a: t + step * along[a] if a in along else t for a, t in tensors.items()}
        output: Tensor = BACKWARDS[name].module.reference(**moved, **parameters).output
        return output * grad

    step = EPS ** (1 / 3)
    slopes = [float((outcome(h) - outcome(-h)).sum() / (2 * h)) for h in (step, 2 * step)]
    made = gradients(name, grad, tensors, parameters)
    found = sum(float((made[names[a]] * way).sum()) for a, way in along.items())
    # the doubled step cuts off four times as much; and each outcome has as many roundings as sums
    bound = abs(slopes[0] - slopes[1]) + 100 * EPS * float(outcome(0.0).abs().sum()) / step
    assert abs(found - slopes[0]) <= bound
