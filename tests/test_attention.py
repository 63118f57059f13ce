"""The variants against their float64 references, the textbook's properties, and the extremes."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch
from beartype import beartype
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jaxtyping import jaxtyped
from peaks import Peak, needs_proc, peaks
from torch import Tensor

from qkv.attention import _kernel, softmax
from qkv.attention._dropout import keep
from qkv.catalogue import Variant, variants

DTYPES: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ALL: Final = frozenset({"output", "weights", "scores"})
OUTPUT: Final = frozenset({"output"})

_checked: Final = jaxtyped(typechecker=beartype)
# every call of these is checked against the shapes and dtypes that the signature promises
attend: Final = typing.cast("Callable[..., softmax.Softmax]", _checked(softmax.attend))
weights: Final = typing.cast("Callable[..., Callable[[slice], Tensor]]", _checked(softmax.weights))

every_variant = pytest.mark.parametrize("variant", variants().values(), ids=lambda v: v.name)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True, scope="module")
def _two_threads() -> typing.Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# ---------------------------------------------------------------- how far an answer may be off


class Bounds(NamedTuple):
    """How far each entry of an answer may lie from the truth, float64."""

    output: Tensor
    weights: Tensor
    scores: Tensor


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """What scores, weights and sums are held in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def spread(scores: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest softmax weights of scores that are known to within an error.

    A weight is least where its own score is `error` too low and all others are too high, and
    largest the other way round: interval arithmetic, exact for any size of error.
    """

    def extreme(own: Tensor, others: Tensor) -> Tensor:
        none = torch.full_like(others[..., :1], -math.inf)
        before = torch.cat([none, others[..., :-1]], -1).logcumsumexp(-1)
        after = torch.cat([none, others.flip(-1)[..., :-1]], -1).logcumsumexp(-1).flip(-1)
        beside = torch.logaddexp(before, after)
        return torch.sigmoid(own - beside).nan_to_num(0.0)  # -inf - -inf: sees nothing

    low, high = scores - error, scores + error
    return extreme(low, high), extreme(high, low)


def bounds(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    parameters: Mapping[str, Any],
    truth: softmax.Softmax,
) -> Bounds:
    """Bounds that follow from eps of the dtypes, D, S and the sizes of scores and values.

    eps is that of the scores' dtype, twice its unit roundoff, so that half of each bound is left
    for the reference, whose own roundings are float64's.
    - A score is D products and D - 1 sums, the scale rounded and applied, perhaps as two square
      roots: (D + 8) eps |scale| sum_d |q_d k_d|. Softcap divides, takes tanh (slope at most 1)
      and multiplies: 4 eps |score|. The mask is rounded and added: eps (|mask| + |score|).
    - The softmax rounds score - top: eps (|score| + |top|) more, in the exponent. `spread` turns
      all that into weights. exp is good to 20 ulp (the fused kernel's, both in numerator and sum),
      sum and quotient round S + 1 times, dropout's factor twice: (S + 64) eps of the weight.
    - An output sums S products of weight and value: S eps of sum_j A_j |v_j|; for narrow dtypes
      the fused kernel rounds each weight to it, and the answer is rounded to it.
    - What underflows loses at most the smallest normal number, times what it is multiplied by.
    """
    dtype, exact = query.dtype, exact_dtype(query.dtype)
    eps, narrow = torch.finfo(exact).eps, torch.finfo(dtype).eps
    assert truth.output is not None
    assert truth.weights is not None
    assert truth.scores is not None
    score, H, S, D = truth.scores, query.shape[1], key.shape[2], query.shape[3]
    q, k, v = (
        x.double().nan_to_num(0.0, 0.0, 0.0).repeat_interleave(H // x.shape[1], 1)
        for x in (query, key, value)
    )
    scale = parameters.get("scale")
    scale = D**-0.5 if scale is None else scale
    error = (D + 8) * eps * abs(scale) * (q.abs() @ k.abs().mT)
    error = error + (D + 8) * torch.finfo(exact).tiny * max(1.0, parameters.get("softcap") or 1.0)
    if mask is not None and mask.is_floating_point():
        added = mask.double().nan_to_num(neginf=0.0).abs()
        error = error + 2 * eps * added
    size = score.nan_to_num(neginf=0.0).abs()
    error = error + 4 * eps * size
    exponent = eps * (size + size.amax(-1, keepdim=True))
    least, most = spread(score, error + exponent)
    factor = 1 / (1 - parameters.get("dropout", 0.0))
    weight = (most - least + (S + 64) * eps * most + torch.finfo(exact).tiny) * factor
    mass = truth.weights @ v.abs()
    lost = S * narrow * torch.finfo(dtype).tiny * v.abs().amax((-2, -1), keepdim=True).clamp(min=1)
    output = weight @ v.abs() + (S * eps + 3 * narrow) * mass + lost * factor
    return Bounds(output, weight, error + 2 * eps * size)


def assert_within(found: Tensor | None, truth: Tensor | None, bound: Tensor | float) -> None:
    """Finite where the truth is, equal where it is not, and within the bound."""
    assert found is not None
    assert truth is not None
    assert found.shape == truth.shape
    finite = truth.to(found.dtype).isfinite()
    torch.testing.assert_close(found.isfinite(), finite)
    if not finite.all():
        assert torch.equal(found[~finite].double(), truth[~finite].to(found.dtype).double())
    excess = (found.double() - truth).abs() - bound
    assert (excess[finite] <= 0).all(), f"off by {excess[finite].max():.3g} more than may be"


# ---------------------------------------------------------------- requests


@dataclass(frozen=True)
class Request:
    """A request to softmax that Hypothesis can shrink and print; `tensors` makes its numbers."""

    dtype: torch.dtype
    B: int
    G: int
    K: int
    L: int
    S: int
    D: int
    E: int
    spread: float
    mask: tuple[torch.dtype, tuple[bool, bool, bool, bool], float] | None
    key_lengths: tuple[int, ...] | None
    garbage: float
    seed: int
    parameters: Mapping[str, Any]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Query, key, value, mask, key_lengths; padding keys and values hold garbage."""
        B, G, L, S = self.B, self.G, self.L, self.S
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        query = (normal(B, G * self.K, L, self.D) * self.spread).to(self.dtype)
        key = (normal(B, G, S, self.D) * self.spread).to(self.dtype)
        value = normal(B, G, S, self.E).to(self.dtype)
        mask = None if self.mask is None else self._mask(*self.mask, generator)
        lengths = None if self.key_lengths is None else torch.tensor(self.key_lengths)
        if lengths is not None:
            padding = (torch.arange(S) >= lengths[:, None])[:, None, :, None]
            key = key.masked_fill(padding, self.garbage)
            value = value.masked_fill(padding, self.garbage)
        return query, key, value, mask, lengths

    def _mask(
        self,
        dtype: torch.dtype,
        full: tuple[bool, ...],
        hidden: float,
        generator: torch.Generator,
    ) -> Tensor:
        sizes = (self.B, self.G * self.K, self.L, self.S)
        shape = [size if whole else 1 for size, whole in zip(sizes, full, strict=True)]
        seen = torch.rand(shape, generator=generator) >= hidden
        seen &= torch.rand((*shape[:3], 1), generator=generator) >= hidden / 2  # whole rows
        if dtype == torch.bool:
            return seen
        added = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
        return added.to(dtype).masked_fill(~seen, -math.inf)


@st.composite
def requests(draw: st.DrawFn, dropout: bool = True) -> Request:
    """Any request: tiny and odd sizes for the most part, every parameter at random."""
    small = st.integers(1, 5)
    length = st.one_of(st.integers(1, 7), st.sampled_from((16, 17, 33)))
    width = st.one_of(st.integers(1, 9), st.sampled_from((16, 17, 33, 64)))
    B, S = draw(st.integers(1, 3)), draw(length)
    count = st.none() | st.integers(0, 9) | st.just(2**31 - 1)
    offset = st.just("end") | st.integers(-9, 9) | st.sampled_from((-(2**31), 2**31 - 1))
    optional: dict[str, st.SearchStrategy[Any]] = {
        "causal": st.booleans(),
        "query_offset": offset,
        "scale": st.none() | st.just(0.0) | st.floats(-3, 3, allow_subnormal=False),
        "softcap": st.none() | st.floats(0.05, 100),
        "window": st.none() | st.tuples(count, count),
    }
    if dropout:
        optional["dropout"] = st.just(0.0) | st.floats(0.01, 0.99)
        optional["seed"] = st.integers(0, 2**64 - 1)
    names = draw(st.sets(st.sampled_from(sorted(optional))))  # few at a time, and many
    full = st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans())
    plain = draw(st.booleans())
    kinds = st.sampled_from((torch.bool, *DTYPES))
    return Request(
        dtype=draw(st.sampled_from(DTYPES)),
        B=B,
        G=draw(st.integers(1, 3)),
        K=draw(st.integers(1, 3)),
        L=draw(length),
        S=S,
        D=draw(width),
        E=draw(width | small),
        spread=draw(st.sampled_from((0.0, 1e-3, 1.0, 4.0))),
        mask=None
        if plain
        else draw(st.none() | st.tuples(kinds, full, st.sampled_from((0.0, 0.3, 0.9)))),
        key_lengths=None
        if plain
        else draw(st.none() | st.lists(st.integers(0, S), min_size=B, max_size=B).map(tuple)),
        garbage=draw(st.sampled_from((0.0, 100.0, math.nan, math.inf, -math.inf))),
        seed=draw(st.integers(0, 2**32 - 1)),
        parameters={name: draw(optional[name]) for name in sorted(names)},
    )


@settings(max_examples=600, deadline=None)
@given(requests(), st.none() | st.integers(1, 300))
def test_softmax_against_reference(request: Request, block: int | None) -> None:
    """Every parameter, with weights and without, whole or in blocks of rows (`block` elements)."""
    with pytest.MonkeyPatch.context() as patch:
        if block is not None:
            patch.setattr(_kernel, "BIAS_ELEMENTS", block)
            patch.setattr(softmax, "_SCORE_ELEMENTS", block)
        assert_agrees_with_reference(request)


def assert_agrees_with_reference(request: Request) -> None:
    """All that is promised of an answer: the reference's numbers, dtypes, zeros, sums, rows."""
    query, key, value, mask, lengths = tensors = request.tensors()
    truth = softmax.reference(*tensors, **request.parameters)
    assert truth.weights is not None
    assert truth.scores is not None
    bound = bounds(query, key, value, mask, request.parameters, truth)
    exact = exact_dtype(request.dtype)
    blind = truth.scores.amax(-1) == -math.inf

    for outputs in (OUTPUT, frozenset({"weights"}), frozenset({"scores"}), ALL):
        found = attend(*tensors, **request.parameters, outputs=outputs)
        for name, dtype in (("output", request.dtype), ("weights", exact), ("scores", exact)):
            tensor = getattr(found, name)
            assert (tensor is not None) == (name in outputs)
            if tensor is None:
                continue
            assert tensor.dtype == dtype
            assert_within(tensor, getattr(truth, name), getattr(bound, name))
            if name != "scores":
                assert not tensor[blind].any()
        if found.weights is not None and not request.parameters.get("dropout"):
            rounding = (request.S + 2) * torch.finfo(exact).eps
            assert_within(found.weights.sum(-1), (~blind).double(), rounding)
        if found.weights is not None:
            assert not found.weights[truth.scores == -math.inf].any()

    start = request.seed % request.L
    rows = slice(start, start + 1 + request.seed % (request.L - start))
    part = weights(query, key, mask, lengths, **request.parameters)(rows)
    assert part.dtype == exact
    assert_within(part, truth.weights[:, :, rows], bound.weights[:, :, rows])


@every_dtype
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"causal": True},
        {"causal": True, "query_offset": "end", "window": (600, None)},
        {"window": (20, 30), "query_offset": 500, "softcap": 3.0},
        {"dropout": 0.5, "seed": 2**63, "causal": True, "query_offset": 700},
    ],
    ids=str,
)
def test_lengths_past_the_kernels_blocks(dtype: torch.dtype, parameters: dict[str, Any]) -> None:
    """The fused kernel goes over keys 512 at a time, and over queries 32 or more."""
    lengths = (1100, 601)
    assert_agrees_with_reference(
        Request(
            dtype, B=2, G=1, K=2, L=70, S=1100, D=24, E=16, spread=2.0, mask=None,
            key_lengths=lengths, garbage=1.0, seed=5, parameters=parameters,
        )
    )  # fmt: skip
    assert_agrees_with_reference(
        Request(
            dtype, B=1, G=1, K=1, L=300, S=1030, D=24, E=24, spread=2.0,
            mask=(torch.float32, (False, False, False, True), 0.5),
            key_lengths=None, garbage=0.0, seed=5, parameters=parameters,
        )
    )  # fmt: skip


@every_dtype
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [-2.0, -1e-3, 0.0])
def test_scales_that_are_not_positive(dtype: torch.dtype, causal: bool, scale: float) -> None:
    """A kernel that hides by -inf before it scales makes inf or NaN of these."""
    assert_agrees_with_reference(
        Request(
            dtype, B=1, G=2, K=1, L=5, S=5, D=4, E=4, spread=1.0, mask=None, key_lengths=None,
            garbage=0.0, seed=1, parameters={"causal": causal, "scale": scale},
        )
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(requests())
def test_weights_are_what_the_values_were_averaged_with(request: Request) -> None:
    """weights @ value is the output, whatever the request, to the rounding of that product."""
    query, key, value, mask, lengths = request.tensors()
    if lengths is not None:
        value = value.nan_to_num(0.0, 0.0, 0.0)
    answer = attend(query, key, value, mask, lengths, **request.parameters, outputs=ALL)
    assert answer.weights is not None
    v = value.double().repeat_interleave(request.K, 1)
    A = answer.weights.double()
    exact, narrow = torch.finfo(exact_dtype(request.dtype)), torch.finfo(request.dtype)
    # S products and sums, the weights rounded once where they were computed wider, one cast
    bound = ((request.S + 2) * exact.eps + narrow.eps) * (A.abs() @ v.abs()) + narrow.eps
    assert_within(answer.output, A @ v, bound)


@settings(max_examples=60, deadline=None)
@given(requests(dropout=False), st.randoms(use_true_random=False))
def test_permuting_the_keys_changes_nothing(request: Request, random: Any) -> None:
    assume(request.key_lengths is None and not request.parameters.get("causal"))
    assume(request.parameters.get("window") is None)
    query, key, value, mask, _ = request.tensors()
    order = random.sample(range(request.S), request.S)
    permuted = mask[..., order] if mask is not None and mask.shape[3] > 1 else mask
    truth = softmax.reference(query, key, value, mask, **request.parameters)
    bound = bounds(query, key, value, mask, request.parameters, truth)
    for outputs in (OUTPUT, ALL):
        found = attend(
            query, key[:, :, order], value[:, :, order], permuted,
            **request.parameters, outputs=outputs,
        )  # fmt: skip
        assert_within(found.output, truth.output, bound.output)


# ---------------------------------------------------------------- every variant


def request_for(variant: Variant, dtype: torch.dtype) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Sizes and required tensors for any variant, made of what its signature says."""
    sizes = dict(zip("BHGLSDEM", (2, 4, 2, 5, 7, 6, 3, 6), strict=True))
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for spec in variant.inputs.values():
        shape = [sizes.setdefault(letter, 4) for letter in spec.letters]
        if not spec.optional and "float32" in spec.dtypes:
            tensors[spec.argument] = torch.randn(shape, generator=generator).to(dtype)
    return sizes, tensors


@every_variant
def test_a_variants_file_says_all_that_the_catalogue_tells(variant: Variant) -> None:
    module = variant.module
    for name in ("FORMULA", "PAPER", "COST", "WEIGHTS"):
        assert isinstance(getattr(module, name), str), name
        assert getattr(module, name).strip(), name
    assert all(isinstance(reason, str) and reason for reason in variant.refuses.values())
    assert not set(variant.refuses) & set(variant.parameters.model_fields)
    assert variant.summary.endswith(".")
    for function in ("attend", "weights", "reference"):
        assert callable(getattr(module, function))
    sizes, _ = request_for(variant, torch.float32)
    assert variant.flops(sizes) > 0
    assert variant.parse({}) == variant.parameters()  # every parameter has a default


@every_dtype
@every_variant
def test_answers_are_as_annotated(variant: Variant, dtype: torch.dtype) -> None:
    """Inputs and outputs fit the jaxtyping annotations, all letters bound together."""
    _, tensors = request_for(variant, dtype)
    outputs = frozenset(variant.outputs)
    answer = _checked(variant.attend)(**tensors, outputs=outputs)
    hints = typing.get_type_hints(variant.attend)
    promised = typing.get_type_hints(hints["return"])
    with jaxtyped("context"):
        for name, tensor in tensors.items():
            assert isinstance(tensor, hints[name]), name
        for name in outputs:
            found = getattr(answer, name)
            kinds = [k for k in typing.get_args(promised[name]) if k is not type(None)]
            assert any(isinstance(found, kind) for kind in kinds or [promised[name]]), name
    for name, output in variant.outputs.items():
        expected = exact_dtype(dtype) if output.exact else dtype
        assert getattr(answer, name).dtype == expected, name
        if name != "output":
            alone = variant.attend(**tensors, outputs=frozenset({name}))
            assert alone.output is None


@every_variant
def test_a_variant_agrees_with_its_reference(variant: Variant) -> None:
    """In float64, where two paths that share no code agree to half the digits or are wrong."""
    _, tensors = request_for(variant, torch.float64)
    outputs = frozenset(variant.outputs)
    found = variant.attend(**tensors, outputs=outputs)
    truth = variant.module.reference(**tensors)
    alone = variant.attend(**tensors, outputs=OUTPUT)
    close = math.sqrt(torch.finfo(torch.float64).eps)
    for answer, names in ((found, outputs), (alone, OUTPUT)):
        for name in names:
            torch.testing.assert_close(
                getattr(answer, name), getattr(truth, name), rtol=close, atol=close
            )


@every_dtype
@every_variant
def test_weights_by_blocks_of_rows(variant: Variant, dtype: torch.dtype) -> None:
    """`weights` gives the rows of the whole matrix, and that times the values is the output."""
    sizes, tensors = request_for(variant, dtype)
    values = frozenset({"value"} & variant.outputs.keys())  # where they are made, not sent
    answer = variant.attend(**tensors, outputs=values | {"output", "weights"})
    eps, letters = torch.finfo(exact_dtype(dtype)).eps, variant.outputs["weights"].letters
    R, S, width = sizes[letters[-2]], sizes[letters[-1]], sizes["D"]
    parts = [slice(0, 1), slice(1, R - 1), slice(R - 1, R)]
    rows_of = variant.rows_of(tensors)
    blocks = [rows_of(rows) for rows in parts]
    A = answer.weights.double()
    if values:
        value = answer.value.double()
    else:
        value = tensors[variant.inputs["value"].argument].double()
        value = value.repeat_interleave(A.shape[1] // value.shape[1], 1)
    if A.ndim < value.ndim:  # each item is one row, without an axis of rows
        A = A[:, None]
    # each of the two made within S roundings of its row's mass, the scores' own apart
    size = float(answer.weights.abs().sum(-1).max()) * S * width
    torch.testing.assert_close(torch.cat(blocks, -2), answer.weights, rtol=0, atol=64 * eps * size)
    product = (A @ value).view(answer.output.shape)
    bound = (S + 2) * eps * (A.abs() @ value.abs()).view(answer.output.shape)
    assert_within(answer.output, product, bound + torch.finfo(dtype).eps * product.abs())


@every_variant
def test_wrong_shapes_do_not_pass_the_annotations(variant: Variant) -> None:
    """The annotations that tests check by are real: they refuse what does not fit."""
    _, tensors = request_for(variant, torch.float32)
    check = _checked(variant.attend)
    for name in tensors:
        for wrong in (tensors[name][None], tensors[name].long()):
            with pytest.raises(TypeError, match=name):
                check(**{**tensors, name: wrong}, outputs=OUTPUT)


# ---------------------------------------------------------------- the textbook


@every_dtype
def test_the_kernel_runs_where_only_the_sum_of_its_output_is_large(dtype: torch.dtype) -> None:
    """65,536 threes are more than float16 holds; an inf among the values is seen for what it is."""
    query, key = (torch.randn(1, 8, 128, 64).to(dtype) for _ in "qk")
    value = torch.full((1, 8, 128, 64), 3.0, dtype=dtype)
    found = attend(query, key, value, outputs=OUTPUT)
    assert found.backend == "sdpa"
    assert_within(found.output, value.double(), 3 * 128 * torch.finfo(dtype).eps)
    value[0, 3, 5, 7] = math.inf
    found = attend(query, key, value, outputs=OUTPUT)
    assert found.backend == "explicit"
    assert found.output is not None
    assert found.output.isinf().nonzero()[:, [1, 3]].unique(dim=0).tolist() == [[3, 7]]


@every_dtype
def test_one_key_returns_the_value_exactly(dtype: torch.dtype) -> None:
    query, key = torch.randn(2, 4, 5, 8).to(dtype), torch.randn(2, 2, 1, 8).to(dtype)
    value = torch.randn(2, 2, 1, 3).to(dtype)
    for outputs in (OUTPUT, ALL):
        found = attend(query, key, value, outputs=outputs)
        assert torch.equal(found.output, value.repeat_interleave(2, 1).expand(2, 4, 5, 3))  # type: ignore[arg-type]


@every_dtype
@pytest.mark.parametrize("causal", [False, True])
def test_torchs_own_attention(dtype: torch.dtype, causal: bool) -> None:
    """An oracle of another kind: torch's function in float64, on the explicit formula's inputs."""
    query, key, value = (torch.randn(2, 3, 9, 8).to(dtype) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), is_causal=causal
    )
    truth = softmax.reference(query, key, value, causal=causal)
    bound = bounds(query, key, value, None, {}, truth)
    for outputs in (OUTPUT, ALL):
        found = attend(query, key, value, causal=causal, outputs=outputs)
        assert_within(found.output, expected, bound.output)


def test_torchs_multihead_attention() -> None:
    """nn.MultiheadAttention, its projections taken out, with a key padding mask."""
    B, H, L, S, M = 2, 4, 5, 6, 24
    module = torch.nn.MultiheadAttention(M, H, batch_first=True, dtype=torch.float64).eval()
    query, memory = torch.randn(B, L, M).double(), torch.randn(B, S, M).double()
    lengths = torch.tensor([6, 3])
    with torch.no_grad():
        expected, mean = module(
            query, memory, memory, key_padding_mask=torch.arange(S) >= lengths[:, None]
        )
        w, b = module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3)
        heads = [
            (x @ w[i].T + b[i]).unflatten(-1, (H, -1)).transpose(1, 2)
            for i, x in enumerate((query, memory, memory))
        ]
        found = attend(*heads, key_lengths_B=lengths, outputs=ALL)
        assert found.output is not None
        assert found.weights is not None
        output = module.out_proj(found.output.transpose(1, 2).flatten(2))
    close = 100 * M * torch.finfo(torch.float64).eps  # three products of width M, all of size 1
    torch.testing.assert_close(output, expected, rtol=0, atol=close)
    torch.testing.assert_close(found.weights.mean(1), mean, rtol=0, atol=close)


def test_window_and_offset_by_hand() -> None:
    """Equal scores: a weight is one over the number of keys in sight."""
    one = torch.zeros(1, 1, 3, 1)
    keys = torch.zeros(1, 1, 5, 1)
    found = attend(one, keys, keys, window=(1, 0), query_offset="end", outputs=ALL)
    expected = torch.tensor([[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]) / 2
    assert torch.equal(found.weights, expected[None, None])  # type: ignore[arg-type]
    lengths = torch.tensor([4])
    found = attend(one, keys, keys, None, lengths, causal=True, query_offset="end", outputs=ALL)
    expected = torch.tensor([[1 / 2, 1 / 2, 0, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0, 0], [1 / 4] * 5])
    expected[2, 4] = 0
    assert_within(found.weights, expected[None, None].double(), 2**-23)


def test_causal_aligns_as_torch_does() -> None:
    """Top-left for L != S, unless query_offset says otherwise; before the first key is blind."""
    query, key, value = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 2)
    for offset, seen in ((0, (1, 2, 3)), (2, (3, 4, 5)), (-2, (0, 0, 1)), (9, (5, 5, 5))):
        for outputs in (OUTPUT, ALL):
            found = attend(query, key, value, causal=True, query_offset=offset, outputs=outputs)
            assert found.output is not None
            for i, count in enumerate(seen):
                row = found.output[:, :, [i]]
                if not count:
                    assert not row.any()
                    continue
                one = (query[:, :, [i]], key[:, :, :count], value[:, :, :count])
                truth = softmax.reference(*one)
                assert_within(row, truth.output, bounds(*one, None, {}, truth).output)


# ---------------------------------------------------------------- the extremes


def exactly(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights as an interval, and outputs, of a (L, D) request in exact fractions.

    The bound on a score is that of `bounds`, computed exactly; the interval is `spread`'s.
    """
    L, D, S = *query.shape, len(key)
    eps = Fraction(torch.finfo(exact_dtype(query.dtype)).eps)
    q, k, v = ([[Fraction(float(x)) for x in row] for row in t] for t in (query, key, value))
    top = torch.full((L, S), -math.inf, dtype=torch.float64)
    error = torch.zeros_like(top)
    for i in range(L):
        seen = [j for j in range(S) if not (causal and j > i)]
        added = {j: 0.0 if mask is None else float(mask[i, j]) for j in seen}
        seen = [j for j in seen if added[j] != -math.inf]
        products = {j: [a * b for a, b in zip(q[i], k[j], strict=True)] for j in seen}
        scores = {j: Fraction(scale) * sum(products[j]) + Fraction(added[j]) for j in seen}
        largest = max((abs(s) for s in scores.values()), default=Fraction(0))
        for j, score in scores.items():
            size = abs(Fraction(scale)) * sum(map(abs, products[j]))
            off = eps * ((D + 8) * size + 2 * abs(Fraction(added[j])) + 5 * abs(score) + largest)
            top[i, j] = float(max(score - max(scores.values()), Fraction(-(2**1000))))
            error[i, j] = float(min(off, Fraction(2**1000)))
    least, most = spread(top, error)
    average = torch.zeros(L, value.shape[1], dtype=torch.float64)
    truth = top.softmax(-1).nan_to_num(0.0)
    for i, e in np.ndindex(L, value.shape[1]):
        mass = sum((Fraction(float(a)) for a in truth[i]), Fraction(0)) or Fraction(1)
        terms = (Fraction(float(truth[i, j])) * v[j][e] for j in range(S))
        average[i, e] = float(sum(terms, Fraction(0)) / mass)
    return least, most, average


HUGE: Final = {
    torch.float64: (1e200, 1.7e308, 1e-100),
    torch.float32: (1e20, 3e38, 1e-30),
    torch.bfloat16: (1e30, 3e38, 1e-30),
    torch.float16: (6e4, 1e-4),
}


@st.composite
def extremes(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float, bool]:
    """A tiny request whose numbers are zero, ordinary or at the ends of the dtype's range."""
    dtype = draw(st.sampled_from(DTYPES))
    sizes = (0.0, 1.0, 1.5, *HUGE[dtype])
    numbers = st.sampled_from(sizes + tuple(-x for x in sizes))
    L, S, D, E = (draw(st.integers(1, n)) for n in (3, 4, 2, 2))

    def matrix(rows: int, columns: int) -> Tensor:
        row = st.lists(numbers, min_size=columns, max_size=columns)
        drawn = draw(st.lists(row, min_size=rows, max_size=rows))
        return torch.tensor(drawn, dtype=torch.float64).to(dtype)

    query, key, value = matrix(L, D), matrix(S, D), matrix(S, E)
    mask = None
    if draw(st.booleans()):
        kind = exact_dtype(dtype)
        most = torch.finfo(kind).max
        entry = st.sampled_from((0.0, -math.inf, 2.0, -1e4, -most, most / 4))
        row = st.lists(entry, min_size=S, max_size=S)
        mask = torch.tensor(draw(st.lists(row, min_size=L, max_size=L)), dtype=kind)
    scale = draw(st.sampled_from((1.0, 0.5, -2.0, 1e9, 0.0)))
    return query, key, value, mask, scale, draw(st.booleans())


@settings(max_examples=400, deadline=None)
@given(extremes())
def test_finite_inputs_of_any_size_have_finite_and_right_answers(
    request: tuple[Tensor, Tensor, Tensor, Tensor | None, float, bool],
) -> None:
    query, key, value, mask, scale, causal = request
    least, most, average = exactly(*request)
    dtype, S = query.dtype, len(key)
    eps, narrow = torch.finfo(exact_dtype(dtype)).eps, torch.finfo(dtype).eps
    tiny = torch.finfo(exact_dtype(dtype)).tiny
    batch = [x[None, None] for x in (query, key, value)]
    if mask is not None:
        batch.append(mask[None, None])
    for outputs in (OUTPUT, ALL):
        found = attend(*batch, scale=scale, causal=causal, outputs=outputs)
        assert found.output is not None
        assert found.output.isfinite().all()
        slack = (most - least) + (S + 64) * eps * most + tiny
        largest = value.double().abs()
        # the sum itself may pass the range where all of it is added up at once
        bound = slack @ (largest / 4) + (S * eps + 3 * narrow) * (most @ (largest / 4))
        bound = bound + narrow * torch.finfo(dtype).tiny * S * max(1.0, float(largest.max()) / 4)
        error = (found.output[0, 0].double() / 4 - average / 4).abs()
        assert (error <= bound).all(), (found.output, average)
        if found.weights is not None:
            A = found.weights[0, 0].double()
            margin = (S + 64) * eps * most + tiny
            assert (A >= least - margin).all(), (A, least)
            assert (A <= most + margin).all(), (A, most)
            assert found.scores is not None
            assert not found.scores.isnan().any()
            hidden = torch.ones(len(query), S).triu(1).bool() & causal
            if mask is not None:
                hidden |= mask == -math.inf
            assert (found.scores[0, 0][hidden] == -math.inf).all()


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 1e20), (torch.float32, 3e38),
        (torch.float64, 1e200), (torch.float64, 1.7e308),
        (torch.bfloat16, 1e30), (torch.float16, 6e4),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("outputs", [OUTPUT, ALL], ids=["output", "all"])
def test_huge_inputs_reach_their_limit(
    dtype: torch.dtype, size: float, outputs: frozenset[str]
) -> None:
    """The largest score takes all; what ties shares; a row of zeros is the plain mean."""
    query = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]], dtype=dtype) * size
    key = torch.tensor([[1.0, 0.0], [0.5, 0.0], [1.0, 0.0], [-1.0, 1.0]], dtype=dtype) * size
    value = torch.tensor([[1.0], [2.0], [3.0], [6.0]], dtype=dtype)
    for factor in (1.0, size / 8):  # huge values as well
        found = attend(*(x[None, None] for x in (query, key, value * factor)), outputs=outputs)
        assert found.output is not None
        expected = torch.tensor([2.0, 6.0, 3.0], dtype=dtype) * factor
        assert_within(
            found.output[0, 0, :, 0], expected.double(), expected.double() * torch.finfo(dtype).eps
        )
        if found.weights is not None:
            taken = [[0.5, 0, 0.5, 0], [0, 0, 0, 1], [0.25] * 4]
            assert torch.equal(found.weights[0, 0].double(), torch.tensor(taken).double())


def test_a_huge_token_leaves_the_rows_before_it_alone() -> None:
    """Causal rows that cannot see it answer as if it were not there; so does an all-zero row."""
    plain = torch.tensor([[0.5], [-1.0], [2.0]], dtype=torch.float64)[None, None]
    huge = torch.cat([plain, torch.full((1, 1, 1, 1), 1.7e308, dtype=torch.float64)], 2)
    value = torch.eye(4, dtype=torch.float64)[None, None]
    expected = attend(plain, plain, value[:, :, :3, :3], causal=True, outputs=ALL).weights
    found = attend(huge, huge, value, causal=True, outputs=ALL).weights
    assert expected is not None
    assert found is not None
    close = 64 * torch.finfo(torch.float64).eps
    torch.testing.assert_close(found[:, :, :3, :3], expected, rtol=0, atol=close)
    mask = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    still = torch.cat([torch.zeros_like(plain[:, :, :1]), huge[:, :, 3:]], 2)
    for query in (still, still.flip(2)):
        row = int(query[0, 0, 1, 0] == 0)
        found = attend(query, huge, value, mask[None, None, None], outputs=ALL).weights
        assert found is not None
        torch.testing.assert_close(found[0, 0, row], mask.softmax(0), rtol=0, atol=close)


def test_one_row_may_hold_the_largest_and_the_smallest() -> None:
    """Bringing a row to a safe size must not lose what meets only the other end of the range."""
    query = torch.tensor([[1.7e308, 1e-100]], dtype=torch.float64)[None, None]
    key = torch.tensor([[0.0, 1e100], [0.0, 2e100]], dtype=torch.float64)[None, None]
    value = torch.eye(2, dtype=torch.float64)[None, None]
    expected = torch.tensor([1.0, 2.0], dtype=torch.float64)
    found = attend(query, key, value, scale=1.0, outputs=ALL)
    close = 64 * torch.finfo(torch.float64).eps
    assert_within(found.scores, expected[None, None, None], close)
    assert_within(found.weights, expected.softmax(0)[None, None, None], close)


def test_a_hidden_score_that_overflows_stays_hidden() -> None:
    """By a floating mask, where adding -inf to inf would be NaN."""
    query = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)[None, None]
    key = torch.tensor([[0.0], [1.7e308]], dtype=torch.float64)[None, None]
    mask = torch.tensor([0.0, -math.inf], dtype=torch.float64)[None, None, None]
    for scale in (2.0, -2.0):
        found = attend(query, key, key, mask, scale=scale, outputs=ALL)
        assert torch.equal(found.output, torch.zeros_like(query))  # type: ignore[arg-type]
        assert torch.equal(found.scores, mask.expand(1, 1, 2, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("dropout", [0.5, 0.9, 0.999])
def test_dropout_of_values_at_the_end_of_the_range(dropout: float) -> None:
    """What dropout adds to each weight may pass the range on the way to a sum that does not."""
    most, L = torch.finfo(torch.float64).max, 4000
    query, key = torch.zeros(1, 1, L, 3).double(), torch.zeros(1, 1, 2, 3).double()
    value = torch.tensor([[1.0, 1e-4], [-1.0, 1e-4]]).double()[None, None]
    kept = kept_by_reference(dropout, 4, 0, L, 2).double()
    expected = kept @ value[0, 0] / 2 / (1 - dropout)  # in units of the largest
    for outputs in (OUTPUT, ALL):
        found = attend(query, key, value * most, dropout=dropout, seed=4, outputs=outputs).output
        assert found is not None
        fits = expected.abs() < 1
        off = (found[0, 0] / most - expected).abs()[fits]
        assert (off <= 4 * 2**-52 / (1 - dropout)).all()
        assert found[0, 0][expected.abs() > 1].isinf().all()


def test_values_at_the_end_of_the_range() -> None:
    """An average is never larger than what it averages, even where its weights round up."""
    for dtype in DTYPES:
        most = torch.finfo(dtype).max
        for S in (3, 7, 10, 11, 49):
            query, key = torch.randn(1, 1, 6, 3).to(dtype), torch.randn(1, 1, S, 3).to(dtype)
            value = torch.full((1, 1, S, 2), most, dtype=dtype)
            for outputs in (OUTPUT, ALL):
                found = attend(query, key, value, outputs=outputs).output
                expected = value[:, :, :1].expand(1, 1, 6, 2).double()
                assert_within(found, expected, expected * 64 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 1, 1).bool(), torch.zeros(1, 1, 1, 1)])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 3e38), (torch.float64, 1.7e308)])
def test_a_single_key_whose_score_overflows(
    mask: Tensor | None, dtype: torch.dtype, size: float
) -> None:
    """Its score is past the range below, which is not the same as being masked."""
    query, value = torch.full((1, 1, 2, 4), size, dtype=dtype), torch.tensor([[[[5.0]]]]).to(dtype)
    found = attend(query, -query[:, :, :1], value, mask, outputs=ALL)
    assert torch.equal(found.output, value.expand(1, 1, 2, 1))  # type: ignore[arg-type]
    assert torch.equal(found.weights, torch.ones(1, 1, 2, 1, dtype=dtype))  # type: ignore[arg-type]


@every_dtype
@pytest.mark.parametrize("mask_dtype", DTYPES, ids=str)
def test_masks_of_the_least_finite_number(dtype: torch.dtype, mask_dtype: torch.dtype) -> None:
    """finfo.min hides a key beside ordinary ones; a whole row of it is not a blind row."""
    query, key, value = (torch.randn(1, 2, 3, 4).to(dtype) for _ in range(3))
    mask = torch.zeros(1, 1, 3, 3, dtype=mask_dtype)
    mask[..., 0, 1:] = mask[..., 2, :] = torch.finfo(mask_dtype).min
    for outputs in (OUTPUT, ALL):
        found = attend(query, key, value, mask, outputs=outputs)
        assert found.output is not None
        assert found.output.isfinite().all()
        assert torch.equal(found.output[:, :, 0], value[:, :, 0])
        assert found.output[:, :, 2].any()
        if found.weights is not None:
            row = found.weights[:, :, 2].sum(-1).double()
            assert_within(row, torch.ones_like(row), 5 * torch.finfo(exact_dtype(dtype)).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_wide_mask_on_narrow_queries(dtype: torch.dtype) -> None:
    """-1e300 is finite: it hides a key, and a row of nothing else is still averaged."""
    query, key, value = (torch.randn(1, 1, 2, 4).to(dtype) for _ in range(3))
    mask = torch.tensor([[0.0, -1e300], [-1e300, -1e300]], dtype=torch.float64)[None, None]
    for outputs in (OUTPUT, ALL):
        found = attend(query, key, value, mask, outputs=outputs)
        assert found.output is not None
        assert torch.equal(found.output[0, 0, 0], value[0, 0, 0])
        mean = value[0, 0].double().mean(0)
        bound = 4 * torch.finfo(dtype).eps * value.double().abs().amax()
        assert_within(found.output[0, 0, 1], mean, bound)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, "largest"])
@every_dtype
def test_padding_may_hold_anything(dtype: torch.dtype, garbage: float | str) -> None:
    """What lies past key_lengths, in keys and in values, changes nothing."""
    query, key, value = (torch.randn(3, 2, 4, 8).to(dtype) for _ in range(3))
    lengths = torch.tensor([4, 2, 0])
    fill = torch.finfo(dtype).max if isinstance(garbage, str) else garbage
    padding = (torch.arange(4) >= lengths[:, None])[:, None, :, None]
    dirty = [x.masked_fill(padding, fill) for x in (key, value)]
    for parameters in ({}, {"causal": True, "query_offset": "end"}, {"softcap": 5.0}):
        for outputs in (OUTPUT, ALL):
            truth = softmax.reference(query, key, value, None, lengths, **parameters)
            bound = bounds(query, key, value, None, parameters, truth)
            found = attend(query, *dirty, None, lengths, **parameters, outputs=outputs)
            assert_within(found.output, truth.output, bound.output)
            if found.weights is not None:
                assert_within(found.weights, truth.weights, bound.weights)


# ---------------------------------------------------------------- dropout


def kept_by_reference(dropout: float, seed: int, place: int, L: int, S: int) -> Tensor:
    """The mask by the reference's own lines, which share nothing with `_dropout`."""
    return torch.from_numpy(softmax._kept(dropout, seed, place, L, S))


@settings(max_examples=200, deadline=None)
@given(
    dropout=st.floats(0, 1, exclude_max=True),
    seed=st.integers(0, 2**64 - 1) | st.sampled_from((0, 2**31, 2**32 - 1, 2**32, 2**63)),
    places=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3),
    L=st.integers(1, 20),
    S=st.integers(1, 20),
    data=st.data(),
)
def test_dropout_is_the_function_it_is_said_to_be(
    dropout: float, seed: int, places: list[int], L: int, S: int, data: st.DataObject
) -> None:
    """Bit for bit the reference's, for every plane, and a block is a part of the whole."""
    found = keep(dropout, seed, torch.tensor([places]), slice(0, L), slice(0, S))
    for h, place in enumerate(places):
        assert torch.equal(found[0, h], kept_by_reference(dropout, seed, place, L, S))
    rows, keys = (sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in (L, S))
    block = keep(dropout, seed, torch.tensor([places]), slice(*rows), slice(*keys))
    assert torch.equal(block, found[:, :, slice(*rows), slice(*keys)])


@pytest.mark.parametrize("dropout", [0.01, 0.1, 0.5, 0.9])
def test_dropout_keeps_as_many_as_it_should(dropout: float) -> None:
    """Within five standard deviations, over the whole and over each row, column and plane."""
    B, H, L, S = 2, 4, 200, 300
    places = torch.arange(B * H).view(B, H)
    kept = keep(dropout, 123, places, slice(0, L), slice(0, S)).double()
    for axes in ((0, 1, 2, 3), (2, 3), (0, 1, 2), (0, 1, 3)):
        rate, n = kept.mean(axes), math.prod(kept.shape[a] for a in axes)
        sigma = math.sqrt(dropout * (1 - dropout) / n)
        assert ((rate - (1 - dropout)).abs() < 5 * sigma).all(), axes


def test_dropout_follows_its_seed() -> None:
    """Same seed, same bits; other seed, other rows, other heads and other items: other masks."""
    query, key, value = (torch.randn(1, 1, 16, 8).expand(2, 2, 16, 8) for _ in range(3))

    def run(seed: int, outputs: frozenset[str] = ALL) -> softmax.Softmax:
        return attend(query, key, value, dropout=0.5, seed=seed, outputs=outputs)

    first, again, other = run(1), run(1), run(2)
    for name in ALL:
        assert torch.equal(getattr(first, name), getattr(again, name))
    assert first.output is not None
    assert first.weights is not None
    assert other.weights is not None
    assert not torch.equal(first.weights, other.weights)
    assert not torch.equal(first.weights, run(2**32 + 1).weights)  # type: ignore[arg-type]
    planes = first.weights.flatten(0, 1) > 0
    assert len({plane.numpy().tobytes() for plane in planes}) == 4  # b, h: each its own
    assert len({row.numpy().tobytes() for row in planes[0]}) == 16
    none = attend(query, key, value, outputs=ALL)
    assert none.weights is not None
    dropped = first.weights == 0
    assert torch.equal(first.weights[~dropped], none.weights[~dropped] * 2)
    assert torch.equal(run(1, OUTPUT).output, first.output)  # type: ignore[arg-type]


@every_dtype
def test_stacked_requests_drop_what_they_drop_alone(dtype: torch.dtype) -> None:
    """`place_BH` tells each plane its place within its own request: the same mask."""
    H, L, S, D = 2, 9, 12, 8
    batches = (1, 3, 2)
    requests = [
        (torch.randn(b, H, L, D).to(dtype), *torch.randn(2, b, H, S, D).to(dtype)) for b in batches
    ]
    places = torch.cat([torch.arange(b * H).view(b, H) for b in batches])
    stacked = [torch.cat(parts) for parts in zip(*requests, strict=True)]
    parameters = {"dropout": 0.3, "seed": 7, "causal": True}
    together = attend(*stacked, **parameters, outputs=ALL, place_BH=places)
    by_rows = weights(*stacked[:2], **parameters, place_BH=places)(slice(2, 5))
    assert together.weights is not None
    first = 0
    for request, b in zip(requests, batches, strict=True):
        alone = attend(*request, **parameters, outputs=ALL)
        truth = softmax.reference(*request, **parameters)  # type: ignore[arg-type]
        bound = bounds(request[0], request[1], request[2], None, parameters, truth)
        part = slice(first, first + b)
        first += b
        assert alone.weights is not None
        assert truth.weights is not None
        assert torch.equal(together.weights[part] == 0, alone.weights == 0)
        assert_within(together.weights[part], truth.weights, bound.weights)
        assert_within(by_rows[part], truth.weights[:, :, 2:5], bound.weights[:, :, 2:5])
        assert together.output is not None
        assert_within(together.output[part], truth.output, bound.output)


# ---------------------------------------------------------------- memory

_MEASURE: Final = """
from qkv.attention.softmax import attend
B, H, G, L, S, D, E = SIZES
query = torch.randn(B, H, L, D, dtype=DTYPE)
key, value = torch.randn(B, G, S, D, dtype=DTYPE), torch.randn(B, G, S, E, dtype=DTYPE)
start()
for parameters in PARAMETERS:
    with torch.inference_mode():
        output = attend(query, key, value, **parameters).output
    assert output.isfinite().all()
    say()
"""


def held(sizes: str, dtype: str, *parameters: str) -> list[Peak]:
    """At most, after each call."""
    script = _MEASURE.replace("SIZES", sizes).replace("DTYPE", f"torch.{dtype}")
    return peaks(script.replace("PARAMETERS", f"[{', '.join(parameters)}]"))


@needs_proc
@pytest.mark.slow
def test_every_parameter_at_65536_tokens_fits_in_4_gib() -> None:
    """N = 65,536, H = 8, D = 64, float32: an (L, S) matrix of one head would be 16 GiB."""
    everything = (
        "dict(causal=True, query_offset='end', scale=0.2, softcap=20.0, window=(100, 0), "
        "dropout=0.1, seed=3, key_lengths_B=torch.tensor([S - 7]), "
        "mask_BHLS=torch.zeros(1, 1, 1, S))"
    )
    ((whole, _),) = held("1, 8, 8, 65536, 65536, 64, 64", "float32", everything)
    assert whole < 4 << 30


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "dtype", "parameters"),
    [
        ("1, 2, 2, 16384, 16384, 64, 64", "float32",
         ("dict()", "dict(causal=True)", "dict(key_lengths_B=torch.tensor([S - 9]))",
          "dict(causal=True, query_offset=-5)")),
        ("1, 2, 1, 16384, 16384, 16, 16", "bfloat16",
         ("dict()", "dict(causal=True, window=(2000, None), query_offset='end')")),
        ("1, 2, 1, 16384, 16384, 16, 24", "float32",
         ("dict()", "dict(mask_BHLS=torch.zeros(1, 2, 1, S))")),
        ("1, 1, 1, 16384, 16384, 8, 8", "float32",
         ("dict(softcap=9.0)", "dict(dropout=0.5, causal=True)")),
    ],
    ids=["plain", "grouped bfloat16", "wide values", "explicit"],
)  # fmt: skip
def test_no_path_holds_a_matrix_of_scores(
    sizes: str, dtype: str, parameters: tuple[str, ...]
) -> None:
    """At N = 16,384 one (L, S) float32 matrix is 1 GiB; half of it is never passed."""
    for parameter, (_, above) in zip(parameters, held(sizes, dtype, *parameters), strict=True):
        assert above < 1 << 29, parameter
