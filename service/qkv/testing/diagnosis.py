"""Names the bug: finds known wrong variants that reproduce the results of a function.

`diagnose` takes what was observed on each call. A bug is named if its wrong variant is within
budget of the function's results on every call that it was observed on. Single bugs come first,
pairs follow. Calls in the widest dtype decide: their budgets are the smallest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from qkv.errors import QkvError
from qkv.testing.call import Change
from qkv.testing.check import error_units
from qkv.testing.known_bugs import ALONE, KNOWN_BUGS, LOW_PRECISION
from qkv.testing.low_precision import sums_are_narrow
from qkv.testing.observation import Observation
from qkv.testing.truth import has_derivation
from qkv.testing.wrong_results import WrongResult, apply_changes

_WIDTH = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class _Hypothesis(NamedTuple):
    """A bug or a pair of bugs, with one of their changes each."""

    names: tuple[str, ...]
    changes: tuple[Change, ...]


def diagnose(observations: Sequence[Observation]) -> list[str]:
    """Returns the names of the bugs that reproduce the results, best first.

    Args:
        observations: of one function with one set of parameters.
    """
    failed = [o for o in observations if o.has_failed]
    if not failed:
        return []
    if any(_is_output_wrong(o) for o in failed):
        names = _find_wrong_outputs(observations)
    else:
        names = _find_wrong_gradients(failed)
    if names:
        return names
    return [LOW_PRECISION] if sums_are_narrow(observations) else []


def _find_wrong_outputs(observations: Sequence[Observation]) -> list[str]:
    """Returns bugs whose outputs are those of the function."""
    wrong = [o for o in observations if _is_output_wrong(o)]
    widest = min(_WIDTH.index(o.call.dtype) for o in wrong)
    wrong = [o for o in wrong if _WIDTH.index(o.call.dtype) == widest]
    same_dtype = [o for o in observations if o.call.dtype == wrong[0].call.dtype]
    right = [o for o in same_dtype if not _is_output_wrong(o)]
    wrong.sort(key=_size)
    active = [h for h in _singles() if any(h.changes[0](o.call) is not o.call for o in wrong)]
    # the reference of other variants is too slow for hundreds of pairs
    pairs = _pairs(active) if has_derivation(wrong[0].call) else ()
    for hypotheses in (active, pairs):
        if kept := _kept(hypotheses, [*wrong, *right], _distance):
            return _ranked(kept)
    return []


def _kept(
    hypotheses: Iterable[_Hypothesis],
    observations: Sequence[Observation],
    distance: Callable[[Observation, _Hypothesis], float],
) -> list[tuple[float, _Hypothesis]]:
    """Returns the hypotheses that are within budget of all observations, with the largest distance.

    The first observations reject nearly all, so they should be small.
    """
    kept = [(0.0, h) for h in hypotheses]
    for observation in observations:
        kept = [
            (max(worst, units), h) for worst, h in kept if (units := distance(observation, h)) <= 1
        ]
    return kept


def _size(observation: Observation) -> int:
    return observation.results["output"].numel()


def _ranked(kept: list[tuple[float, _Hypothesis]]) -> list[str]:
    """Returns the names, nearest first; a pair whose order does not matter is named once."""
    names: dict[frozenset[str], str] = {}
    for _, hypothesis in sorted(kept, key=lambda pair: pair[0]):
        names.setdefault(frozenset(hypothesis.names), "+".join(hypothesis.names))
    return list(names.values())


def _singles() -> Iterator[_Hypothesis]:
    for name, changes in KNOWN_BUGS.items():
        for change in changes:
            yield _Hypothesis((name,), (change,))


def _pairs(singles: Sequence[_Hypothesis]) -> Iterator[_Hypothesis]:
    for first, second in itertools.combinations(singles, 2):
        if first.names != second.names and ALONE.isdisjoint(first.names + second.names):
            yield _Hypothesis(first.names + second.names, first.changes + second.changes)


def _is_output_wrong(observation: Observation) -> bool:
    """True if the output is wrong, or the state of a recurrence."""
    truth = observation.truth
    return any(
        float(error_units(x, truth.results[n], truth.budgets[n]).max()) > 1
        for n, x in observation.results.items()
        if not n.startswith("grad ")
    )


def _distance(observation: Observation, hypothesis: _Hypothesis) -> float:
    """Returns the largest distance of the results from those of the wrong variant, in budgets.

    It is infinite if the bug makes no valid call.
    """
    try:
        result = WrongResult(apply_changes(observation.call, hypothesis.changes))
    except (QkvError, RuntimeError, ValueError):
        return torch.inf
    return result.distance(observation.results)


def _find_wrong_gradients(failed: Sequence[Observation]) -> list[str]:
    """Returns bugs of a backward pass: their gradients are those of the function."""
    widest = min(_WIDTH.index(o.call.dtype) for o in failed)
    chosen = [o for o in failed if _WIDTH.index(o.call.dtype) == widest]
    if not all(any(n.startswith("grad ") for n in o.results) for o in chosen):
        return []
    return _ranked(_kept(_singles(), sorted(chosen, key=_size), _gradient_distance))


def _gradient_distance(observation: Observation, hypothesis: _Hypothesis) -> float:
    """Returns the largest distance of the gradients from those of the wrong variant.

    The budgets are those of the right gradients: a wrong backward pass rounds as often. It is
    infinite if the wrong variant's gradients are right on this call: they explain no failure.
    """
    try:
        result = WrongResult(apply_changes(observation.call, hypothesis.changes))
        gradients = result.gradients()
    except (QkvError, RuntimeError, ValueError):
        return torch.inf
    if not gradients:
        return torch.inf
    distance, change = 0.0, 0.0
    for name, wrong in gradients.items():
        gradient, budget = observation.results[name], observation.truth.budgets[name]
        if wrong.shape != gradient.shape:
            return torch.inf
        right = observation.truth.results[name]
        largest = wrong.abs().amax() + right.abs().amax()
        units = error_units(gradient, wrong, budget + largest * torch.finfo(gradient.dtype).eps)
        distance = max(distance, float(units.max()))
        change = max(change, float(error_units(wrong, right, budget).max()))
    return distance if change > 1 else torch.inf
