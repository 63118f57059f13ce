"""Closed-form gradients: against finite differences of attend and of the reference, at the ends of
the dtypes' ranges, and in memory that is linear in the length."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal, localcontext
from typing import Any, Final

import pytest
import torch
from peaks import needs_proc, peaks
from torch import Tensor
from torch.nn.functional import elu, normalize

from qkv import catalogue
from qkv.attention import _steep, efficient

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
    masked = "mask_BHLS" in extra  # its entries one by one would take minutes
    assert torch.autograd.gradcheck(lambda *x: apply(forth, back, *x), inputs, fast_mode=masked)


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


def efficient_plainly(query: Tensor, key: Tensor, value: Tensor, sees_BHLS: Tensor) -> Tensor:
    """Each row's softmaxes of its own, (L, S, D) of them; zeros for what sees nothing."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    none = ~sees_BHLS.any(-1)[..., None]
    terms = key[:, :, None].masked_fill(~(sees_BHLS | none)[..., None], -torch.inf)
    output = torch.einsum(
        "bhld,bhlsd,bhse->bhle", query.softmax(-1), terms.log_softmax(-2).exp(), value
    )
    return output.masked_fill(none, 0.0)


def efficient_running(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal and by running sums, for keys that one shift does for."""
    grown = (key - key.amax(2, keepdim=True)).exp()
    summed = (grown[..., None] * value[..., None, :]).cumsum(2) / grown.cumsum(2)[..., None]
    return torch.einsum("bhld,bhlde->bhle", query.softmax(-1), summed)


def assert_efficient(
    plain: Callable[[Tensor, Tensor, Tensor], Tensor],
    tensors: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    **parameters: Any,
) -> dict[str, Tensor]:
    """The gradients that autograd finds of the plain one, to as many roundings as sums have terms
    and e^x, where it is not 0, has for |x|; they are of what nothing would cancel in."""
    query, key, value = (x.clone().requires_grad_() for x in tensors)
    truth = torch.autograd.grad(plain(query, key, value), (query, key, value), grad)
    ones = torch.ones_like(value[..., :1]).requires_grad_()
    (mass_BGS1,) = torch.autograd.grad(
        plain(query.detach(), key.detach(), ones).sum(), ones
    )  # that the rows of A have in a key's column
    scores = 2 * float((grad.norm(dim=-1).amax() * tensors[2].norm(dim=-1).amax()).double())
    arguments = ("query_BHLD", "key_BGSD", "value_BGSE")
    given = dict(zip(arguments, tensors, strict=True))
    found = gradients("efficient", grad, given, parameters)
    masses = (
        scores * query.detach().softmax(-1), scores * mass_BGS1, grad.abs().amax() * mass_BGS1
    )  # fmt: skip
    rounded = EPS * (8 + 2 * sum(query.shape[2:] + value.shape[2:]) + 3 * 745)
    least = math.exp(300.0) * torch.finfo(torch.float64).smallest_normal * scores
    for name, true, mass in zip(("query", "key", "value"), truth, masses, strict=True):
        assert ((found[name] - true).abs() <= rounded * mass + least).all(), name
    return found


def keys_of(kind: str, key: Tensor) -> Tensor:
    """Keys that one shift does for (up to 300) or not."""
    position_S1 = torch.arange(key.shape[2])[:, None]
    if kind.startswith("late"):
        return key + float(kind.removeprefix("late by ")) * (position_S1 == 19)
    slopes = {"ordinary": 0.0, "rising": 1000.0, "by 3": 3.0, "falling": -1000.0, "huge": 0.0}
    return key * (1e307 if kind == "huge" else 1.0) + slopes[kind] * position_S1


@pytest.mark.parametrize("offset", [0, "end", -7, 25, None])
@pytest.mark.parametrize(
    "kind",
    ["ordinary", "late by 120", "late by 290", "late by 1000", "rising", "by 3", "falling", "huge"],
)
def test_efficient_whatever_the_keys(kind: str, offset: int | str | None) -> None:
    """Over several chunks, with fewer keys than queries, heads that share, and padding."""
    B, H, G, L, S, D, E = 3, 4, 2, 50, 40, 3, 2
    query, grad = torch.randn(B, H, L, D).double(), torch.randn(B, H, L, E).double()
    key, value = keys_of(kind, torch.randn(B, G, S, D).double()), torch.randn(B, G, S, E)
    query, value = query * (1e307 if kind == "huge" else 1.0), value.double()
    lengths_B, row_L1, at_S = torch.tensor([S, 23, 0]), torch.arange(L)[:, None], torch.arange(S)
    padding_BGS1 = (at_S >= lengths_B[:, None])[:, None, :, None]
    sees = ~padding_BGS1.mT
    parameters: dict[str, Any] = {"key_lengths_B": lengths_B, "causal": offset is not None}
    if offset is not None:
        parameters["query_offset"] = offset
        starts_B = lengths_B - L if offset == "end" else torch.full((B,), int(offset))
        sees = sees & (at_S <= row_L1 + starts_B.view(B, 1, 1, 1))
    sees = sees.expand(B, H, L, S)

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (x.masked_fill(padding_BGS1, 0.0) for x in (key, value))
        return efficient_plainly(query, key, value, sees)

    found = assert_efficient(plain, (query, key, value), grad, **parameters)
    key.masked_fill_(padding_BGS1, torch.nan)
    value.masked_fill_(padding_BGS1, torch.inf)
    given = {"query_BHLD": query, "key_BGSD": key, "value_BGSE": value}
    with_garbage = gradients("efficient", grad, given, parameters)
    for name, gradient in found.items():
        assert torch.equal(with_garbage[name], gradient)
    assert not found["query"][~sees.any(-1)].any()
    for name in ("key", "value"):
        assert not found[name].masked_fill(~padding_BGS1, 0.0).any()


@pytest.mark.parametrize("rise", [300.0, -1.0])
def test_efficient_over_4096_keys(rise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one shift, and as where one would not do."""
    monkeypatch.setattr(efficient, "_RISE", rise)
    tensors = (torch.randn(1, 2, 4096, 3), torch.randn(1, 1, 4096, 3), torch.randn(1, 1, 4096, 2))
    query, key, value = (x.double() for x in tensors)

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return efficient_running(query, key.expand(-1, 2, -1, -1), value.expand(-1, 2, -1, -1))

    grad = torch.randn(1, 2, 4096, 2).double()
    assert_efficient(plain, (query, key, value), grad, causal=True)


@pytest.mark.parametrize("kind", ["ordinary", "rising"])
def test_efficient_in_small_blocks_of_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query, grad = torch.randn(1, 4, 60, 3).double(), torch.randn(1, 4, 60, 2).double()
    key, value = torch.randn(1, 2, 35, 3).double(), torch.randn(1, 2, 35, 2).double()
    key = keys_of(kind, key)
    sees = (torch.arange(35) <= torch.arange(60)[:, None] + 3).expand(1, 4, 60, 35)
    monkeypatch.setattr(_steep, "_ELEMENTS", 400)
    assert_efficient(
        lambda q, k, v: efficient_plainly(q, k, v, sees), (query, key, value), grad,
        causal=True, query_offset=3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "causal"),
    [("ordinary", False), ("by 3", False), ("ordinary", True), ("late by 1000", True)],
)
def test_efficient_does_not_see_what_is_added_to_a_channel_of_keys(kind: str, causal: bool) -> None:
    """So a channel's gradients sum to 0 over the keys."""
    tensors = drawn("efficient", {"B": 2, "H": 4, "G": 2, "L": 33, "S": 33, "D": 3, "E": 2})
    query, value, grad = tensors["query_BHLD"], tensors["value_BGSE"], torch.randn(2, 4, 33, 2)
    key = keys_of(kind, tensors["key_BGSD"].mul(2**20).round().div(2**20))  # sums are exact
    moved = key + torch.tensor([1.0, -4096.0, 0.0])
    assert torch.equal(moved - torch.tensor([1.0, -4096.0, 0.0]), key)
    given = tensors | {"key_BGSD": key}
    found = gradients("efficient", grad.double(), given, {"causal": causal})
    again = gradients("efficient", grad.double(), given | {"key_BGSD": moved}, {"causal": causal})
    for name, gradient in found.items():
        assert torch.equal(again[name], gradient)
    K, rows, S = 2, query.shape[2], key.shape[2]
    scores = 2 * float(grad.norm(dim=-1).amax() * value.norm(dim=-1).amax())
    bound = EPS * K * rows * scores * (8 + 2 * (rows + S) + 3 * 745)
    assert found["key"].sum(2).abs().max() <= bound
    assert found["key"].abs().max() > 1e6 * bound


@pytest.mark.parametrize("kind", ["ordinary", "late by 290", "late by 1000"])
@pytest.mark.parametrize(
    ("v", "g"), [(900, -900), (-1000, 900), (900, -1000), (1000, -20), (-1000, 0)]
)
def test_efficient_at_the_ends_of_the_range(kind: str, v: int, g: int) -> None:
    """Powers of two in values and in the output's gradient are powers of two in what is found."""
    tensors = drawn("efficient", {"B": 1, "H": 2, "G": 2, "L": 40, "S": 40, "D": 3, "E": 2})
    given = tensors | {"key_BGSD": keys_of(kind, tensors["key_BGSD"])}
    grad = torch.randn(1, 2, 40, 2).double()
    found = gradients("efficient", grad, given, {"causal": True})
    scaled = given | {"value_BGSE": torch.ldexp(given["value_BGSE"], torch.tensor(v))}
    sized = gradients("efficient", torch.ldexp(grad, torch.tensor(g)), scaled, {"causal": True})
    for name, exponent in (("query", v + g), ("key", v + g), ("value", g)):
        expected = torch.ldexp(found[name], torch.tensor(exponent))
        normal = expected.abs() >= torch.finfo(torch.float64).smallest_normal
        assert torch.equal(sized[name][normal], expected[normal])
        assert normal.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["ordinary", "late by 1000"])
def test_efficient_in_narrow_dtypes_is_rounded_once(kind: str, dtype: torch.dtype) -> None:
    narrow = drawn("efficient", {"B": 2, "L": 40, "S": 40} | {"H": 4, "G": 2}, dtype)
    narrow["key_BGSD"] = keys_of(kind, narrow["key_BGSD"].float() * 0.5).to(dtype)
    grad = torch.randn(2, 4, 40, 2).to(dtype)
    found = gradients("efficient", grad, narrow, {"causal": True})
    wide = {name: tensor.double() for name, tensor in narrow.items()}
    for name, true in gradients("efficient", grad.double(), wide, {"causal": True}).items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], true.float())


PEAK: Final = """
from qkv.attention.efficient import backward
heads, length, slope = map(int, sys.argv[1:])
x = torch.randn(1, heads, length, 64)
key = x + slope * torch.arange(length)[:, None]
with torch.inference_mode():
    made = backward(x, x, key, x, causal=True)
assert all(gradient.isfinite().all() for gradient in made.values())
say()
"""


@needs_proc
@pytest.mark.parametrize(
    ("heads", "length", "slope", "gib"),
    [pytest.param(8, 65536, 0, 4, marks=pytest.mark.slow), (1, 16384, 1000, 1)],
)
def test_efficient_takes_memory_that_is_linear(
    heads: int, length: int, slope: int, gib: int
) -> None:
    """An (L, S) matrix of one head would be 32 GiB, or 2."""
    assert peaks(PEAK, heads, length, slope)[-1].whole < gib << 30


def roundings(
    name: str, grad: Tensor, tensors: Mapping[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """How many eps of float32 a gradient may be off, in its own units: what its sums hold, as many
    times as they have terms. A variant that is not named computes in float64."""
    size = {a: t.double().abs() for a, t in tensors.items()}
    if name == "linear_layer":
        x, weight = size["x_BI"], size["weight_OI"]
        grad = grad.double().abs()
        made = {"x": grad @ weight * len(weight), "weight": grad.mT @ x * len(x)}
    elif name == "softmax":
        query, key, value = (tensors[a].double() for a in ("query_BHLD", "key_BGSD", "value_BGSE"))
        K, S, (D, E) = query.shape[1] // key.shape[1], key.shape[2], (key.shape[3], value.shape[3])
        key, value = key.repeat_interleave(K, 1), value.repeat_interleave(K, 1)
        share = torch.softmax(scale * query @ key.mT, -1)
        products = (query.abs() @ key.abs().mT).amax(-1, keepdim=True) * scale
        slope = grad.double().abs() @ value.abs().mT
        slope = share * (slope + (share * slope).sum(-1, keepdim=True))
        # a share is off by its scores' errors, and by its row's sum
        terms = 2 * (D + 2) * products + 3 * S + E + 8
        slope, share = slope * terms, share * terms
        made = {
            "query": scale * slope @ key.abs() * 2,
            "key": (scale * slope.mT @ query.abs() * 2).unflatten(1, (-1, K)).sum(2),
            "value": (share.mT @ grad.double().abs()).unflatten(1, (-1, K)).sum(2) * 2,
        }
    else:
        made = {}
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@every_variant
def test_narrower_numbers_lose_what_they_round(name: str, dtype: torch.dtype) -> None:
    sizes = SIZES | {"L": 90, "S": 100, "D": 16, "E": 8, "N": 110}
    tensors = drawn(name, sizes, dtype)
    grad = torch.randn_like(attended(name, tensors, {}))
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
def test_padding_may_hold_anything_and_gets_zeros(name: str, causal: bool, garbage: float) -> None:
    variant = BACKWARDS[name]
    parameters = {"causal": causal} if "causal" in variant.parameters.model_fields else {}
    lengths = {"key_lengths_B": torch.tensor([4, 2, 0])}
    for dtype in (torch.float32, torch.float64):
        tensors = drawn(name, dtype=dtype)
        grad = torch.randn_like(attended(name, tensors, parameters))
        kept = gradients(name, grad, tensors | lengths, parameters)
        padded = [a for a in tensors if a.startswith(("key_BGS", "value_B"))]
        spoilt = {a: t.clone() for a, t in tensors.items()}
        for argument in padded:
            for b, length in enumerate(lengths["key_lengths_B"]):
                spoilt[argument][b, :, length:] = garbage
        found = gradients(name, grad, spoilt | lengths, parameters)
        for n, gradient in found.items():
            assert torch.equal(gradient, kept[n])
        for argument in padded:
            gradient = found[argument.rpartition("_")[0]]
            for b, length in enumerate(lengths["key_lengths_B"]):
                assert not gradient[b, :, length:].any()


@pytest.mark.parametrize("name", ["softmax", "linear", "taylor"])
def test_rows_that_see_nothing_give_nothing(name: str) -> None:
    tensors = drawn(name)
    grad = torch.randn_like(attended(name, tensors, {}))
    found = gradients(name, grad, tensors, {"causal": True, "query_offset": -2})
    assert not found["query"][:, :, :2].any()
    assert found["value"][:, :, 0].all()
    assert not found["value"][:, :, 1:].any()
    again = grad.clone()
    again[:, :, :2] = 1e300
    spoilt = gradients(name, again, tensors, {"causal": True, "query_offset": -2})
    torch.testing.assert_close(spoilt["value"], found["value"], rtol=8 * EPS, atol=0)


def plain(
    name: str, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> Tensor:
    """Output as a textbook writes it, in torch that differentiates itself; equally many heads."""
    visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    visible = visible.tril() if causal else visible
    if name == "softmax":
        scores = (scale * query @ key.mT).masked_fill(~visible, -torch.inf)
        return torch.softmax(scores, -1) @ value
    if name == "linear":
        a = (elu(query) + 1) @ (elu(key) + 1).mT
    else:
        a = 1 + normalize(query, dim=-1) @ normalize(key, dim=-1).mT
    a = a * visible
    return a / a.sum(-1, keepdim=True) @ value


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [65, 1000, 4096])
@pytest.mark.parametrize("name", ["softmax", "linear", "taylor"])
def test_lengths_past_a_block(name: str, length: int, causal: bool) -> None:
    query, key, value, grad = (torch.randn(1, 1, length, 8, dtype=torch.float64) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    output = plain(name, leaves[0], leaves[1], leaves[2], causal, 8**-0.5)
    slopes = torch.autograd.grad(output, leaves, grad)
    tensors = {"query_BHLD": query, "key_BGSD": key, "value_BGSE": value}
    found = gradients(name, grad, tensors, {"causal": causal})
    for n, slope in zip(("query", "key", "value"), slopes, strict=True):
        # every entry is a sum of at most that many terms of about 1, taken two ways;
        # taylor's rows are grown by what their sum has lost, 1e3 at most
        close = 4 * length * EPS * (1e3 if name == "taylor" else 1)
        torch.testing.assert_close(found[n], slope, rtol=close, atol=close)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, 1e20), (torch.float32, 1e37), (torch.float64, 1e20), (torch.float64, 1e300)],
)
def test_huge_queries_and_values_give_what_is_finite(dtype: torch.dtype, size: float) -> None:
    """Powers of two in and out change no bit of the gradient, and nothing is NaN."""
    for name in ("softmax", "linear", "taylor"):
        tensors = drawn(name, dtype=dtype)
        tensors["query_BHLD"] *= size
        tensors["query_BHLD"][:, :, 0] = 0.0
        for factor in (1.0, size):
            grad = torch.randn_like(attended(name, tensors, {})) * factor
            found = gradients(name, grad, tensors, {"causal": True})
            if name != "softmax" or factor == 1.0:  # its slopes times such queries are infinite
                assert all(gradient.isfinite().all() for gradient in found.values()), name
            assert not any(gradient.isnan().any() for gradient in found.values()), name
    tensors = drawn("softmax")
    tensors["value_BGSE"] *= 2.0**1000
    grad = torch.randn(3, 4, 3, 2, dtype=torch.float64)
    small = tensors | {"value_BGSE": tensors["value_BGSE"] * 2.0**-1000}
    found = gradients("softmax", grad * 2.0**-1000, tensors, {"scale": -0.3})
    truth = gradients("softmax", grad, small, {"scale": -0.3})
    for n, power in (("query", 0), ("key", 0), ("value", -1000)):
        torch.testing.assert_close(found[n], truth[n] * 2.0**power, rtol=64 * EPS, atol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [-40.0, -60.0, -300.0, -1e4])
def test_linear_where_features_vanish(size: float, causal: bool) -> None:
    """Where all x <= 0, phi is exp, and a constant in queries or keys changes no gradient."""
    near = drawn("linear", dtype=torch.float32)
    for argument in ("query_BHLD", "key_BGSD"):  # in steps that float32 keeps at any size
        near[argument] = near[argument].mul(4).round().div(4) - 4
    far = near | {a: near[a] + size for a in ("query_BHLD", "key_BGSD")}
    grad = torch.randn(3, 4, 3, 2)
    found = gradients("linear", grad, far, {"causal": causal})
    truth = gradients("linear", grad, near, {"causal": causal})
    for n, gradient in found.items():
        close = torch.finfo(torch.float32).eps
        torch.testing.assert_close(gradient, truth[n], rtol=4 * close, atol=1e3 * EPS)


def test_linear_rows_whose_sum_underflows() -> None:
    """A late key of another size leaves early rows nothing: as if they were alone."""
    tensors = drawn("linear", SIZES | {"B": 1, "L": 6, "S": 6})
    tensors["key_BGSD"] = -900 - tensors["key_BGSD"].abs()
    tensors["query_BHLD"] = -tensors["query_BHLD"].abs()
    early = {a: t[:, :, :4].clone() for a, t in tensors.items()}
    tensors["key_BGSD"][:, :, 4:] = 50.0
    grad = torch.randn(1, 4, 6, 2, dtype=torch.float64)
    grad[:, :, 4:] = 0.0
    found = gradients("linear", grad, tensors, {"causal": True})
    truth = gradients("linear", grad[:, :, :4], early, {"causal": True})
    for n, gradient in found.items():
        torch.testing.assert_close(gradient[:, :, :4], truth[n], rtol=1e3 * EPS, atol=1e2 * EPS)
        assert not gradient[:, :, 4:].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("angle", [1e-1, 1e-3, 1e-5])
def test_taylor_where_keys_oppose_the_query(dtype: torch.dtype, angle: float) -> None:
    """Against central differences of 80 digits, for the inputs as rounded."""
    turns = torch.tensor([1.0, -1.5, 0.5], dtype=torch.float64) * angle
    key = -torch.stack([turns.cos(), turns.sin()], -1) * torch.tensor([[1.0], [3.0], [0.25]])
    query, value = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0], [-2.0], [4.0]])
    rows = [x.to(dtype) for x in (query, key, value)]
    tensors = dict(
        zip(("query_BHLD", "key_BGSD", "value_BGSE"), (x[None, None] for x in rows), strict=True)
    )
    found = gradients("taylor", torch.ones(1, 1, 1, 1, dtype=dtype), tensors, {})
    numbers = [Decimal(x) for row in rows for x in row.flatten().tolist()]

    def output(x: list[Decimal]) -> Decimal:
        similar = []
        for k in range(3):
            a, b = x[2 + 2 * k], x[3 + 2 * k]
            norms = ((x[0] ** 2 + x[1] ** 2) * (a**2 + b**2)).sqrt()
            similar.append(1 + (x[0] * a + x[1] * b) / norms)
        return sum((s * v for s, v in zip(similar, x[8:], strict=True)), Decimal()) / sum(similar)

    with localcontext(prec=80):
        step, slopes = Decimal("1e-25"), []
        for n in range(len(numbers)):
            up, down = ([*numbers[:n], numbers[n] + d, *numbers[n + 1 :]] for d in (step, -step))
            slopes.append(float((output(up) - output(down)) / (2 * step)))
    made = torch.cat([found[n].double().flatten() for n in ("query", "key", "value")])
    truth = torch.tensor(slopes, dtype=torch.float64)
    # roundings of a direction over the least angle, of sums of terms that are the largest's size
    close = 2 * (8 + 4) * EPS / (angle / 2) + 4 * torch.finfo(dtype).eps
    for part in (slice(0, 2), slice(2, 8), slice(8, 11)):
        assert ((made - truth).abs()[part] <= 4 * close * truth[part].abs().max()).all()


MEASURED: Final = """
from qkv import catalogue
module, L = catalogue.find(sys.argv[1]).module, int(sys.argv[2])
query, key, value, grad = (torch.randn(1, 8, n, 64) for n in (L, 65536, 65536, L))
with torch.inference_mode():
    made = module.backward(grad, query, key, value, causal=True, query_offset="end")
assert all(gradient.isfinite().all() for gradient in made.values())
say()
"""


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize(("name", "L"), [("linear", 65536), ("taylor", 65536), ("softmax", 512)])
def test_65536_tokens_fit_in_4_gib(name: str, L: int) -> None:
    assert peaks(MEASURED, name, L)[-1].whole < 4 << 30
