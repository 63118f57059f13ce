"""Gradients of every variant are the derivatives of its reference, with blocks of any size."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from support.small_blocks import small_blocks
from support.variant_calls import (
    CAUSAL,
    EPS,
    SIZES,
    VARIANTS,
    forward_output,
    gradients,
    head_terms,
    known_parameters,
    optional_arguments,
    random_inputs,
)

every_variant = pytest.mark.parametrize(
    "name", [n for n, v in VARIANTS.items() if v.backward is not None]
)


class Case(NamedTuple):
    """A call whose gradients are checked."""

    tensors: dict[str, Tensor]
    parameters: dict[str, Any]


def lengths_of(name: str) -> list[dict[str, Tensor]]:
    some = {"key_lengths_B": torch.tensor([SIZES["S"], 2, 0])}
    return [{}, some] if "key_lengths" in VARIANTS[name].inputs else [{}]


def inputs_of(name: str) -> Iterator[dict[str, Tensor]]:
    """Yields tensors with all optional ones, without each of them, and with terms of heads."""
    optional = optional_arguments(name)
    for absent in itertools.product((False, True), repeat=len(optional)):
        left_out = set(itertools.compress(optional, absent))
        yield {a: t for a, t in random_inputs(name).items() if a not in left_out}
    terms = head_terms(name)
    for chosen in [[a] for a in terms] + [[*terms]] * (len(terms) > 1):
        yield random_inputs(name) | {a: terms[a] for a in chosen}


def cases(name: str) -> Iterator[Case]:
    """Yields a variant with all its parameters, with and without padding, and with masks."""
    B, H, L, S = (SIZES[letter] for letter in "BHLS")
    known = known_parameters(name)
    for tensors in inputs_of(name):
        for parameters in known:
            if "rank" in parameters and any("R" in i.letters and i.argument in tensors
                                            for i in VARIANTS[name].inputs.values()):  # fmt: skip
                continue  # the tensors have another rank
            for lengths in lengths_of(name):
                yield Case(tensors | lengths, parameters)
    if "mask" not in VARIANTS[name].inputs:
        return
    for shape in ((B, H, L, S), (1, 1, L, S), (B, 1, 1, S), (1, H, L, 1), (1, 1, 1, 1)):
        added = torch.randn(shape, dtype=torch.float64)
        allowed = torch.rand(shape) < 0.7
        hidden = added.where(allowed, -torch.inf)
        for mask, terms in ((allowed, {}), (added, {}), (hidden, head_terms(name))):
            for parameters in (known[0], known[-1]):
                for lengths in lengths_of(name):
                    tensors = random_inputs(name) | {"mask_BHLS": mask} | terms | lengths
                    yield Case(tensors, parameters)


@pytest.mark.parametrize("name", [n for n, v in VARIANTS.items() if hasattr(v.module, "backward")])
def test_functions_of_a_file_take_its_call(name: str) -> None:
    module, has_state = VARIANTS[name].module, VARIANTS[name].state is not None
    rest = {"attend": ["outputs"], "weights": [], "steps": []}
    rest["backward"] = [f"grad_output_{''.join(VARIANTS[name].outputs['output'].letters)}"]
    rest["backward"] += ["grad_state"] if has_state else []
    for function, others in rest.items():
        assert [*inspect.signature(getattr(module, function)).parameters] == ["call", *others]


def error_and_bound(name: str, case: Case, block: int | None) -> tuple[float, float]:
    """Compares with central differences along a random direction; two steps bound their error."""
    tensors, parameters = case
    names = {i.argument: i.name for i in VARIANTS[name].inputs.values()}
    along = {a: torch.randn_like(t) for a, t in tensors.items() if t.is_floating_point()}
    grad = torch.randn_like(forward_output(name, tensors, parameters))

    def outcome(h: float) -> Tensor:
        moved = {a: t + h * along[a] if a in along else t for a, t in tensors.items()}
        output: Tensor = VARIANTS[name].reference(**moved, **parameters).output
        return output * grad

    step = EPS ** (1 / 3)
    slopes = [float((outcome(h) - outcome(-h)).sum() / (2 * h)) for h in (step, 2 * step)]
    with small_blocks(block):
        result = gradients(name, grad, tensors, parameters)
    found = sum(float((result[names[a]] * way).sum()) for a, way in along.items())
    # the doubled step has four times the error; each outcome has as many roundings as sums
    rounded = 100 * EPS * float(outcome(0.0).abs().sum()) / step
    return abs(found - slopes[0]), abs(slopes[0] - slopes[1]) + rounded


@pytest.mark.parametrize("block", [None, 1, 60])
@every_variant
def test_gradients_are_the_derivatives_of_the_reference(name: str, block: int | None) -> None:
    for case in cases(name):
        error, bound = error_and_bound(name, case, block)
        assert error <= bound, (name, case)


@pytest.mark.parametrize("length", [65, pytest.param(1100, marks=pytest.mark.slow)])
@every_variant
def test_gradients_of_more_than_one_chunk(name: str, length: int) -> None:
    """Chunks have 64 tokens, and 1,024 keys are summed at once."""
    sizes = {"B": 1, "D": 8, "E": 8} | dict.fromkeys("GHJVTZ", 1) | dict.fromkeys("LSN", length)
    for parameters in ({}, CAUSAL):
        if parameters.keys() <= VARIANTS[name].parameters.model_fields.keys():
            inputs, optional = random_inputs(name, SIZES | sizes), optional_arguments(name)
            tensors = {a: t for a, t in inputs.items() if a not in optional}
            error, bound = error_and_bound(name, Case(tensors, parameters), None)
            assert error <= bound, (name, parameters)
