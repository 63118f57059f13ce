"""Follows one token through the modules of a running model: it tells which of them mix positions.

A module receives the token at one place. If its output depends on the token elsewhere too, the
module mixes positions. The model runs once, on its own numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from qkv.models.function_places import (
    Place,
    changed_place,
    is_number,
    perturbed,
    places_in_results,
    tensors_of,
    without_traces,
    written,
)
from qkv.models.running_modules import is_intercepted, paused, without_mode

__all__ = ["Entry", "enter", "follow", "follow_attention", "following", "leave"]

_UNKNOWN: Final[Any] = object()
"""The place in a tensor that a function made which cannot be seen."""


class Entry(NamedTuple):
    """The token in the input of a module.

    Attributes:
        module: the module.
        args, kwargs: its input.
        x: the first tensor of numbers in it.
        place: of the token in x.
        is_own: the token is followed inside this module only.
        before: then the place that x had until the module began, and has again after it.
    """

    module: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    x: Tensor
    place: Place
    is_own: bool = False
    before: Place | None = None


class _Thread(threading.local):
    """The token that one thread follows.

    Attributes:
        places: of the token in tensors; None for a tensor that does not depend on it. Unknown
            ones are absent. It is None while nothing is followed.
        depth: the number of modules that have received the token.
        has_positions: a module has received the token among others.
    """

    def __init__(self) -> None:
        self.places: WeakTensorKeyDictionary | None = None
        self.depth = 0
        self.has_positions = False


_thread: Final = _Thread()


@contextmanager
def following(is_wanted: bool) -> Iterator[Callable[[], bool]]:
    """Follows a token inside the block, or goes on with one.

    Yields:
        A function: true if the token was followed among others.
    """
    if _thread.places is not None or not is_wanted:
        yield lambda: _thread.has_positions
        return
    _thread.places, _thread.depth, _thread.has_positions = WeakTensorKeyDictionary(), 0, False
    try:
        yield lambda: _thread.has_positions
    finally:
        _thread.places = None


def follow(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs a function of torch, and notes the places of the token in its results."""
    places = _thread.places
    if places is None:
        return function(*args, **kwargs)
    target = written(function, args)
    if target is not None:
        known = _known([args, kwargs])
        new_places = _find(function, args, kwargs, known, [target]) if known else None
        result = function(*args, **kwargs)
        if new_places is not None:
            places[target] = new_places[0]
        return result
    result = function(*args, **kwargs)
    if numbers := [x for x in tensors_of(result) if is_number(x)]:
        _note(function, args, kwargs, numbers)
    return result


def _note(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[Tensor],
) -> None:
    """Notes the places of the token in new results of a function."""
    places = _thread.places
    assert places is not None
    arguments = [x for x in tensors_of([args, kwargs]) if is_number(x)]
    if any(results[0] is x for x in arguments):
        return
    new_places: list[Place | None] | None = [None] * len(results)
    if known := _known(arguments):
        new_places = _find(function, args, kwargs, known, results)
    elif "empty" in getattr(function, "__name__", "") or any(
        x not in places and not isinstance(x, nn.Parameter) for x in arguments
    ):
        return  # a kernel that cannot be seen may fill it, or has filled an argument
    for x, place in zip(results, new_places or (), strict=False):
        places[x] = place


def _known(values: Any) -> list[tuple[Tensor, Place]]:
    """Returns the tensors that depend on the token, with its places."""
    places = _thread.places
    assert places is not None
    return [(x, place) for x in tensors_of(values) if (place := places.get(x)) is not None]


def _find(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    known: Sequence[tuple[Tensor, Place]],
    results: Sequence[Tensor],
) -> list[Place | None] | None:
    """Returns the places in the results; None if the function cannot run again."""
    with suppress(Exception):  # such as a lack of memory: the model itself must go on
        return places_in_results(function, args, kwargs, known, results)
    return None


def follow_attention(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, *, is_length_first: bool = False
) -> None:
    """Notes the place of the token in the output of a call that is handled.

    The call mixes positions, and is no part of what is looked for. Its query, key and value may
    have been mixed before.

    Args:
        query, key, value: (..., L, D), (..., S, D) and (..., S, E).
        output: (..., L, E).
        is_length_first: the output is (B, L, H, E).
    """
    places = _thread.places
    if places is None:
        return
    place = places.get(query)
    if any(known[-2] is None for _, known in _known([query, key, value])):
        places[output] = (None,) * output.ndim
    elif place is not None and len(place) == output.ndim:
        order = (0, 2, 1) if is_length_first else range(output.ndim - 1)
        places[output] = (*(place[axis] for axis in order), None)


def enter(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Entry | None:
    """Notes that a module begins. A token in the middle of its input is followed from here.

    Returns:
        The token in the input; None if none is followed.
    """
    places = _thread.places
    if places is None or not is_intercepted():
        return None
    for buffer in module.buffers(recurse=False):
        places.setdefault(buffer, None)
    numbers = [x for x in tensors_of([args, kwargs]) if is_number(x)]
    known = _known(numbers)
    if known and all(_is_confined(place) for _, place in known):
        _thread.depth += 1
        return Entry(module, args, kwargs, *known[0])
    x = max(filter(_is_sequence, numbers), key=lambda x: x.ndim, default=None)
    if x is None or any(other is not x for other, _ in known):
        return None
    before, is_own = places.get(x, _UNKNOWN), _thread.depth > 0 or x.ndim == 2
    places[x] = (*(frozenset([(n - 1) // 2]) for n in x.shape[:-1]), None)
    _thread.depth += 1
    _thread.has_positions |= x.shape[-2] > 1
    return Entry(module, args, kwargs, x, places[x], is_own, before)


def leave(entry: Entry, result: Any, has_calls: bool, forward: Callable[..., Any]) -> bool:
    """Notes that a module ends.

    Args:
        entry: that `enter` returned.
        result: of the module.
        has_calls: it has made or missed attention calls.
        forward: the code of the module.

    Returns:
        True if the module mixes positions outside of attention calls: it returns the positions
        that it received, and depends on the token elsewhere too.
    """
    _thread.depth -= 1
    if _thread.places is None:
        return False
    is_mixer = False
    for n, y in enumerate(tensors_of(result)):
        place = _thread.places.get(y, _UNKNOWN)
        is_kept = _has_same_positions(entry, y)
        if is_kept:
            if place is _UNKNOWN and not has_calls:
                place = _place_in_repeated(entry, y, n, forward)
            elif place is _UNKNOWN or (place is None and has_calls):
                place = entry.place
            if place is not None and _is_elsewhere(entry.place, place):
                is_mixer, place = True, entry.place
        if entry.is_own and place is not None and place is not _UNKNOWN:
            place = _place_outside(entry, y, is_kept)
        _put(y, place)
    if entry.is_own:
        _put(entry.x, entry.before)
    return is_mixer


def _place_outside(entry: Entry, y: Tensor, is_kept: bool) -> Any:
    """Returns the place in an output y of the token that was followed until the module began.

    Args:
        entry: of the module, inside which another token was followed.
        y: the output.
        is_kept: it has the positions of the input.
    """
    if entry.before is None or entry.before is _UNKNOWN:
        return entry.before
    return (*entry.before[:-1], None) if is_kept else (None,) * y.ndim


def _place_in_repeated(
    entry: Entry, y: Tensor, n: int, forward: Callable[..., Any]
) -> Place | None:
    """Runs a module again that ran code which cannot be seen, such as a kernel of a GPU.

    Returns:
        The place of the token in its output y, the n-th tensor of its result. If the module has a
        state that a second run may change, all of y may depend on the token.
    """

    def changed(value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(map(changed, value))
        if value is not None and not isinstance(value, Tensor | bool | int | float | str):
            raise TypeError(type(value))
        return perturbed(value, entry.place) if value is entry.x else value

    with suppress(Exception), paused(), without_mode(), without_traces(y.device):
        if next(entry.module.buffers(), None) is None:
            args, kwargs = (
                changed(list(entry.args)),
                {k: changed(v) for k, v in entry.kwargs.items()},
            )
            return changed_place(y, list(tensors_of(forward(*args, **kwargs)))[n])
    return (None,) * y.ndim


def _put(x: Tensor, place: Any) -> None:
    """Notes a place, or that it is unknown."""
    places = _thread.places
    assert places is not None
    if place is _UNKNOWN:
        places.pop(x, None)
    else:
        places[x] = place


def _is_confined(place: Place) -> bool:
    """True if a place distinguishes the positions of a sequence."""
    return sum(map(_is_single, place)) >= min(2, len(place) - 1)


def _is_single(indices: frozenset[int] | None) -> bool:
    """True for one index. Several may be features, as of two tensors side by side."""
    return indices is not None and len(indices) == 1


def _has_same_positions(entry: Entry, y: Tensor) -> bool:
    """True if a tensor has the axes of the input that distinguish its positions."""
    return (
        is_number(y)
        and y.ndim == entry.x.ndim
        and all(
            y.shape[axis] == entry.x.shape[axis]
            for axis, indices in enumerate(entry.place)
            if _is_single(indices)
        )
    )


def _is_elsewhere(entered: Place, left: Place) -> bool:
    """True if the token has one index of an axis at first, and others at last."""
    pairs = zip(entered, left, strict=True)
    return any(_is_single(before) and after != before for before, after in pairs)


def _is_sequence(x: Tensor) -> bool:
    """True for (B, L, M), (L, B, M) or (L, M) with numbers that can be read."""
    return (
        type(x) is Tensor  # no weight
        and x.ndim in (2, 3)
        and max(x.shape[:-1]) > 1
        and x.numel() > 0
        and not (x.is_meta or x.is_nested or isinstance(x, FakeTensor))
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )
