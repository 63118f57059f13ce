"""Follows one token through the modules of a running model: it tells which of them mix positions.

A module receives the token at one place. If its output depends on the token elsewhere too, the
module mixes positions. The model runs once, on its own numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

from torch import Tensor, nn
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
from qkv.models.positions import (
    has_same_positions,
    is_confined,
    is_elsewhere,
    is_sequence,
    is_spread,
    middle,
    takes_width,
)
from qkv.models.running_modules import is_intercepted, paused, without_mode

__all__ = ["Entry", "enter", "follow", "follow_attention", "following", "leave"]

_UNKNOWN: Final[Any] = object()
"""The place in a tensor that a function made which cannot be seen."""


class Side(NamedTuple):
    """A token of another sequence that a module receives.

    Attributes:
        x: the sequence.
        places: of the token in tensors, as those of `_Thread`.
        is_own: the token is followed inside this module only.
    """

    x: Tensor
    places: WeakTensorKeyDictionary
    is_own: bool


class Entry(NamedTuple):
    """The token in the input of a module.

    Attributes:
        module: the module.
        args, kwargs: its input.
        x: the first tensor of numbers in it.
        place: of the token in x.
        sequences: in the input.
        sides: further tokens in the input.
        is_own: the token is followed inside this module only.
        before: then the place that x had until the module began, and has again after it.
    """

    module: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    x: Tensor
    place: Place
    sequences: Sequence[Tensor]
    sides: Sequence[Side]
    is_own: bool = False
    before: Place | None = None


class _Thread(threading.local):
    """The tokens that one thread follows.

    Attributes:
        tokens: for each token its places in tensors; None for a tensor that does not depend on it.
            Unknown ones are absent. The first token is that of the whole model, the others are
            those of other sequences in the modules that run. Empty while nothing is followed.
        depth: the number of modules that have received the first token.
        has_positions: a module has received the token among others.
    """

    def __init__(self) -> None:
        self.tokens: list[WeakTensorKeyDictionary] = []
        self.depth = 0
        self.has_positions = False


_thread: Final = _Thread()


@contextmanager
def following(is_wanted: bool) -> Iterator[Callable[[], bool]]:
    """Follows a token inside the block, or goes on with one.

    Yields:
        A function: true if the token was followed among others.
    """
    if _thread.tokens or not is_wanted:
        yield lambda: _thread.has_positions
        return
    _thread.tokens, _thread.depth, _thread.has_positions = [WeakTensorKeyDictionary()], 0, False
    try:
        yield lambda: _thread.has_positions
    finally:
        _thread.tokens = []


def follow(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs a function of torch, and notes the places of the tokens in its results."""
    tokens = _thread.tokens
    if not tokens:
        return function(*args, **kwargs)
    target = written(function, args)
    if target is not None:
        found = [
            (places, _find(function, args, kwargs, known, [target]))
            for places in tokens
            if (known := _known(places, [args, kwargs]))
        ]
        result = function(*args, **kwargs)
        for places, new_places in found:
            if new_places is not None:
                places[target] = new_places[0]
        return result
    result = function(*args, **kwargs)
    if numbers := [x for x in tensors_of(result) if is_number(x)]:
        for places in tokens:
            _note(places, function, args, kwargs, numbers)
    return result


def _note(
    places: WeakTensorKeyDictionary,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[Tensor],
) -> None:
    """Notes the places of a token in new results of a function."""
    arguments = [x for x in tensors_of([args, kwargs]) if is_number(x)]
    if any(results[0] is x for x in arguments):
        return
    new_places: list[Place | None] | None = [None] * len(results)
    if known := _known(places, arguments):
        new_places = _find(function, args, kwargs, known, results)
    elif "empty" in getattr(function, "__name__", "") or any(
        x not in places and not isinstance(x, nn.Parameter) for x in arguments
    ):
        return  # a kernel that cannot be seen may fill it, or has filled an argument
    for x, place in zip(results, new_places or (), strict=False):
        places[x] = place


def _known(places: WeakTensorKeyDictionary, values: Any) -> list[tuple[Tensor, Place]]:
    """Returns the tensors that depend on a token, with its places."""
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
    for places in _thread.tokens:
        place = places.get(query, _UNKNOWN)
        if any(known[-2] is None for _, known in _known(places, [query, key, value])):
            places[output] = (None,) * output.ndim
        elif place is None:
            places[output] = None
        elif place is not _UNKNOWN and len(place) == output.ndim:
            order = (0, 2, 1) if is_length_first else range(output.ndim - 1)
            places[output] = (*(place[axis] for axis in order), None)


def enter(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Entry | None:
    """Notes that a module begins. A token in the middle of its input is followed from here.

    Returns:
        The token in the input; None if none is followed.
    """
    if not _thread.tokens or not is_intercepted():
        return None
    places = _thread.tokens[0]
    for token in _thread.tokens:
        for buffer in module.buffers(recurse=False):
            token.setdefault(buffer, None)
    numbers = [x for x in tensors_of([args, kwargs]) if is_number(x)]
    sequences = list({id(x): x for x in numbers if is_sequence(x, module)}.values())
    known = _known(places, numbers)
    before, is_own = None, False
    if known and all(is_confined(place) for _, place in known):
        x, place = known[0]
    else:
        if not sequences:
            return None
        x = max(sequences, key=lambda x: x.ndim)
        if any(other is not x for other, _ in known):
            return None
        before, is_own = places.get(x, _UNKNOWN), _thread.depth > 0 or x.ndim != 3
        place = places[x] = middle(x)
        _thread.has_positions |= x.shape[-2] > 1
    _thread.depth += 1
    sides = _enter_sides(module, numbers, sequences)
    return Entry(module, args, kwargs, x, place, sequences, sides, is_own, before)


def _enter_sides(
    module: nn.Module, numbers: Sequence[Tensor], sequences: Sequence[Tensor]
) -> list[Side]:
    """Follows a token of each sequence without one, such as the encoder's beside the decoder's.

    Returns:
        All tokens in the input but the first.
    """
    sides: list[Side] = []
    for places in _thread.tokens[1:]:
        known = _known(places, numbers)
        if known and all(is_confined(place) for _, place in known):
            sides.append(Side(known[0][0], places, False))
    for x in sequences:
        is_followed = any(places.get(x) is not None for places in _thread.tokens)
        if x.ndim > 2 and not is_followed and takes_width(module, x):
            places = WeakTensorKeyDictionary()
            for other in (*numbers, *module.buffers()):
                places[other] = None
            places[x] = middle(x)
            sides.append(Side(x, places, True))
    _thread.tokens += [side.places for side in sides if side.is_own]
    return sides


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
    if not _thread.tokens:
        return False
    outputs = tensors_of(result)
    is_mixer = _leave_sides(entry, outputs)
    for n, y in enumerate(outputs):
        place = _thread.tokens[0].get(y, _UNKNOWN)
        is_kept = has_same_positions(entry.x, entry.place, y)
        if is_kept:
            if place is _UNKNOWN and not has_calls:
                place = _place_in_repeated(entry, y, n, forward)
            elif place is _UNKNOWN or (place is None and has_calls):
                place = entry.place
            if place is not None and is_elsewhere(entry.place, place):
                is_mixer, place = True, entry.place
        elif place is not _UNKNOWN and _is_in_others(entry, y, place):
            is_mixer, place = True, None
        if entry.is_own and place is not None and place is not _UNKNOWN:
            place = _place_outside(entry, y, is_kept)
        _put(y, place)
    if entry.is_own:
        _put(entry.x, entry.before)
    return is_mixer


def _leave_sides(entry: Entry, outputs: Sequence[Tensor]) -> bool:
    """Ends the module's own tokens; true if one of the other sequences is in several positions."""
    is_mixer = False
    for x, places, is_own in entry.sides:
        for y in outputs:
            place = places.get(y)
            if place is not None and is_spread(x, y, place, entry.sequences):
                is_mixer, places[y] = True, None
        if is_own:
            _thread.tokens = [token for token in _thread.tokens if token is not places]
    return is_mixer


def _is_in_others(entry: Entry, y: Tensor, place: Place | None) -> bool:
    """True if the token is in several positions of an output like another sequence of the input."""
    if place is None or entry.place[-1] is not None:
        return False
    others = [x for x in entry.sequences if x is not entry.x]
    return is_spread(entry.x, y, place, others)


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
    places = _thread.tokens[0]
    if place is _UNKNOWN:
        places.pop(x, None)
    else:
        places[x] = place
