"""Dropout of softmax: its definition, rate, seed, and planes."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from definitions.softmax import kept
from qkv.attention.common.dropout import keep_mask
from qkv.attention.variants import softmax
from support.checked_softmax import ALL, OUTPUT, attend, weights
from support.dtypes import DTYPES
from support.each import each
from support.examples import examples
from support.references import reference_of
from support.tolerances import assert_within, bounds


@examples(200)
@given(
    dropout=st.floats(0, 1, exclude_max=True),
    seed=st.integers(0, 2**64 - 1) | st.sampled_from((0, 2**31, 2**32 - 1, 2**32, 2**63)),
    plane_indices=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3),
    L=st.integers(1, 20),
    S=st.integers(1, 20),
    data=st.data(),
)
def test_dropout_equals_its_definition(
    dropout: float, seed: int, plane_indices: list[int], L: int, S: int, data: st.DataObject
) -> None:
    """Every plane equals the definition bit for bit, and a block is a part of the whole."""
    found = keep_mask(dropout, seed, torch.tensor([plane_indices]), slice(0, L), slice(0, S))
    for h, plane_index in enumerate(plane_indices):
        assert torch.equal(found[0, h], torch.from_numpy(kept(dropout, seed, plane_index, L, S)))
    rows, keys = (sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in (L, S))
    block = keep_mask(dropout, seed, torch.tensor([plane_indices]), slice(*rows), slice(*keys))
    assert torch.equal(block, found[:, :, slice(*rows), slice(*keys)])


@each("dropout", [0.01, 0.1, 0.5, 0.9])
def test_dropout_rate(dropout: float) -> None:
    """The rate is within five standard deviations overall and per row, column and plane."""
    B, H, L, S = 2, 4, 200, 300
    plane_indices = torch.arange(B * H).view(B, H)
    kept = keep_mask(dropout, 123, plane_indices, slice(0, L), slice(0, S)).double()
    for axes in ((0, 1, 2, 3), (2, 3), (0, 1, 2), (0, 1, 3)):
        rate, n = kept.mean(axes), math.prod(kept.shape[a] for a in axes)
        sigma = math.sqrt(dropout * (1 - dropout) / n)
        assert ((rate - (1 - dropout)).abs() < 5 * sigma).all(), axes


def test_dropout_depends_on_seed_item_head_and_row() -> None:
    """The same seed gives the same bits; another seed, row, head or item gives another mask."""
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
    assert len({plane.numpy().tobytes() for plane in planes}) == 4  # each (b, h) has its own mask
    assert len({row.numpy().tobytes() for row in planes[0]}) == 16
    none = attend(query, key, value, outputs=ALL)
    assert none.weights is not None
    dropped = first.weights == 0
    assert torch.equal(first.weights[~dropped], none.weights[~dropped] * 2)
    assert torch.equal(run(1, OUTPUT).output, first.output)  # type: ignore[arg-type]


@each("dropout", [0.5, 0.9, 0.999])
def test_dropout_of_extreme_values(dropout: float) -> None:
    """The factor of dropout may overflow a term of a sum that itself does not overflow."""
    most, L = torch.finfo(torch.float64).max, 4000
    query, key = torch.zeros(1, 1, L, 3).double(), torch.zeros(1, 1, 2, 3).double()
    value = torch.tensor([[1.0, 1e-4], [-1.0, 1e-4]]).double()[None, None]
    mask = torch.from_numpy(kept(dropout, 4, 0, L, 2)).double()
    expected = mask @ value[0, 0] / 2 / (1 - dropout)  # in units of the largest number
    for outputs in (OUTPUT, ALL):
        found = attend(query, key, value * most, dropout=dropout, seed=4, outputs=outputs).output
        assert found is not None
        fits = expected.abs() < 1
        off = (found[0, 0] / most - expected).abs()[fits]
        assert (off <= 4 * 2**-52 / (1 - dropout)).all()
        assert found[0, 0][expected.abs() > 1].isinf().all()


@each("dtype", DTYPES)
def test_stacked_requests_have_the_same_dropout_as_alone(dtype: torch.dtype) -> None:
    """`plane_BH` gives each plane its index within its own request, and so the same mask."""
    H, L, S, D = 2, 9, 12, 8
    batches = (1, 3, 2)
    requests = [
        (torch.randn(b, H, L, D).to(dtype), *torch.randn(2, b, H, S, D).to(dtype)) for b in batches
    ]
    plane_indices = torch.cat([torch.arange(b * H).view(b, H) for b in batches])
    stacked = [torch.cat(parts) for parts in zip(*requests, strict=True)]
    parameters = {"dropout": 0.3, "seed": 7, "causal": True}
    together = attend(*stacked, **parameters, outputs=ALL, plane_BH=plane_indices)
    by_rows = weights(*stacked[:2], **parameters, plane_BH=plane_indices)(slice(2, 5))
    assert together.weights is not None
    first = 0
    for request, b in zip(requests, batches, strict=True):
        alone = attend(*request, **parameters, outputs=ALL)
        truth = reference_of(softmax.Call(*request, **parameters))  # type: ignore[arg-type]
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
