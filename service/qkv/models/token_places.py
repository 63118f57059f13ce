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

from qkv.models.followed_token import UNKNOWN, FollowedToken, without_traces
from qkv.models.followed_token import follow as follow_tokens
from qkv.models.places import (
    Place,
    changed_place,
    disturbed,
    has_same_positions,
    is_confined,
    is_elsewhere,
    is_number,
    is_sequence,
    is_single,
    is_spread,
    middle,
    takes_width,
    tensors_of,
)
from qkv.models.running_modules import is_intercepted, paused, without_mode


class Side(NamedTuple):
    """A token of another sequence that a module receives.

    Attributes:
        x: the sequence.
        place: of the token in it.
        token: the token.
        is_own: the token is followed inside this module only.
    """

    x: Tensor
    place: Place
    token: FollowedToken
    is_own: bool


class Entry(NamedTuple):
    """The token in the input of a module.

    Attributes:
        module: the module.
        args, kwargs: its input.
        x: the first tensor of numbers in it.
        place: of the first token in x; None: it is elsewhere.
        sequences: in the input.
        sides: further tokens in the input.
        is_own: the token is followed inside this module only.
        before: then the place that x had until the module began, and has again after it.
    """

    module: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    x: Tensor
    place: Place | None
    sequences: Sequence[Tensor]
    sides: Sequence[Side]
    is_own: bool = False
    before: Place | None = None


class _Thread(threading.local):
    """The tokens that one thread follows.

    Attributes:
        tokens: the first is that of the whole model, the others are those of other sequences in the
            modules that run. Empty while nothing is followed.
        depth: the number of modules that have received the first token.
        has_positions: a module has received the token among others.
    """

    def __init__(self) -> None:
        self.tokens: list[FollowedToken] = []
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
    _thread.tokens, _thread.depth, _thread.has_positions = [FollowedToken()], 0, False
    try:
        yield lambda: _thread.has_positions
    finally:
        _thread.tokens = []


def follow(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs a function of torch, and notes what depends on the tokens in its results."""
    if not _thread.tokens:
        return function(*args, **kwargs)
    return follow_tokens(_thread.tokens, function, args, kwargs)


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
    for token in _thread.tokens:
        token.note_attention(query, key, value, output, is_length_first)


def enter(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Entry | None:
    """Notes that a module begins. A token in the middle of its input is followed from here.

    Returns:
        The token in the input; None if none is followed.
    """
    if not _thread.tokens or not is_intercepted():
        return None
    for token in _thread.tokens:
        for buffer in module.buffers(recurse=False):
            token.ignore(buffer)
    numbers = [x for x in tensors_of([args, kwargs]) if is_number(x)]
    sequences = list({id(x): x for x in numbers if is_sequence(x, module)}.values())
    first = _enter_first(numbers, sequences)
    sides = _enter_sides(module, numbers, sequences, _thread.tokens[: first is not None])
    if first is None and not sides:
        return None
    x, place, is_own, before = first or (sides[0].x, None, False, None)
    return Entry(module, args, kwargs, x, place, sequences, sides, is_own, before)


def _enter_first(
    numbers: Sequence[Tensor], sequences: Sequence[Tensor]
) -> tuple[Tensor, Place, bool, Any] | None:
    """Goes on with the first token, or follows one from here.

    Returns:
        x, place, is_own and before of an `Entry`; None if the first token is elsewhere.
    """
    token = _thread.tokens[0]
    known = token.known(numbers)
    if known and all(is_confined(place) for _, place in known):
        _thread.depth += 1
        return *known[0], False, None
    x = max(sequences, key=lambda x: x.ndim, default=None)
    if x is None or any(other is not x for other, _ in known):
        return None
    before, is_own = token.place_in(x), _thread.depth > 0 or x.ndim != 3
    token.put(x, middle(x))
    _thread.has_positions |= x.shape[-2] > 1
    _thread.depth += 1
    return x, middle(x), is_own, before


def _enter_sides(
    module: nn.Module,
    numbers: Sequence[Tensor],
    sequences: Sequence[Tensor],
    entered: Sequence[FollowedToken],
) -> list[Side]:
    """Follows a token of each sequence without one, such as the encoder's beside the decoder's.

    Args:
        module: the module.
        numbers, sequences: in its input.
        entered: the first token, if the module has received it.

    Returns:
        All tokens in the input but the first.
    """
    sides: list[Side] = []
    for token in _thread.tokens[1:]:
        known = token.known(numbers)
        if known and all(is_confined(place) and place[-1] is None for _, place in known):
            sides.append(Side(*known[0], token, False))
    known = [each for token in entered for each in token.known(sequences)]
    known += [each for side in sides for each in side.token.known(sequences)]
    for x in sequences:
        is_followed = any(other is x and is_confined(place) for other, place in known)
        if x.ndim > 2 and not is_followed and takes_width(module, x):
            token = FollowedToken()
            token.put(x, middle(x))
            for other in (*numbers, *module.buffers()):
                token.ignore(other)
            sides.append(Side(x, middle(x), token, True))
            _thread.tokens.append(token)
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
    if not _thread.tokens:
        return False
    outputs = tensors_of(result)
    is_mixer = _leave_sides(entry, outputs)
    if entry.place is None:
        return is_mixer
    _thread.depth -= 1
    token = _thread.tokens[0]
    entered = tuple(at if is_single(at) else None for at in entry.place)
    for n, y in enumerate(outputs):
        place = token.place_in(y)
        is_kept = has_same_positions(entry.x, entry.place, y)
        if is_kept:
            if place is UNKNOWN and not has_calls:
                place = _place_in_repeated(entry, y, n, forward)
            elif place is UNKNOWN or (place is None and has_calls):
                place = entered
            if place is not None and is_elsewhere(entry.place, place):
                is_mixer, place = True, entered
        elif place is not UNKNOWN and _is_in_others(entry, y, place):
            is_mixer, place = True, None
        if entry.is_own and place is not None and place is not UNKNOWN:
            place = _place_outside(entry, y, is_kept)
        token.put(y, place)
    if entry.is_own:
        token.put(entry.x, entry.before)
    return is_mixer


def _leave_sides(entry: Entry, outputs: Sequence[Tensor]) -> bool:
    """Ends the module's own tokens; true if one of the other sequences is in several positions."""
    is_mixer = False
    for x, entered, token, is_own in entry.sides:
        for y, place in token.known(outputs):
            if is_spread(x, entered, y, place, entry.sequences):
                is_mixer = True
                token.put(y, None)
        if is_own:
            _thread.tokens.remove(token)
    return is_mixer


def _is_in_others(entry: Entry, y: Tensor, place: Place | None) -> bool:
    """True if the token is in several positions of an output like another sequence of the input."""
    if place is None or entry.place is None or entry.place[-1] is not None:
        return False
    others = [x for x in entry.sequences if x is not entry.x]
    return is_spread(entry.x, entry.place, y, place, others)


def _place_outside(entry: Entry, y: Tensor, is_kept: bool) -> Any:
    """Returns the place in an output y of the token that was followed until the module began.

    Args:
        entry: of the module, inside which another token was followed.
        y: the output.
        is_kept: it has the positions of the input.
    """
    if entry.before is None or entry.before is UNKNOWN:
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
        return twin if value is entry.x else value

    with suppress(Exception), paused(), without_mode(), without_traces(y.device):
        if entry.place is not None and next(entry.module.buffers(), None) is None:
            twin = disturbed(entry.x, entry.place)
            args, kwargs = (
                changed(list(entry.args)),
                {k: changed(v) for k, v in entry.kwargs.items()},
            )
            return changed_place(y, list(tensors_of(forward(*args, **kwargs)))[n])
    return (None,) * y.ndim
