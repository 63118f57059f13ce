"""One token of a running model, and its places in the tensors that depend on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from qkv.models.function_places import Place, is_number, places_in_results, tensors_of

UNKNOWN: Final[Any] = object()
"""The place in a tensor that a function made which cannot be seen."""


class FollowedToken:
    """The places of a token: None for a tensor that does not depend on it."""

    def __init__(self) -> None:
        self._places = WeakTensorKeyDictionary()

    def place_in(self, x: Tensor) -> Any:
        """Returns the place in a tensor, or None, or UNKNOWN."""
        return self._places.get(x, UNKNOWN)

    def put(self, x: Tensor, place: Any) -> None:
        """Notes the place in a tensor, or None, or UNKNOWN."""
        if place is UNKNOWN:
            self._places.pop(x, None)
        else:
            self._places[x] = place

    def ignore(self, x: Tensor) -> None:
        """Notes that a tensor does not depend on the token, unless it is known to."""
        self._places.setdefault(x, None)

    def known(self, values: Any) -> list[tuple[Tensor, Place]]:
        """Returns the tensors in values that depend on the token, with its places."""
        places = ((x, self._places.get(x)) for x in tensors_of(values))
        return [(x, place) for x, place in places if place is not None]

    def find(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        results: Sequence[Tensor],
    ) -> Sequence[Any]:
        """Returns the places in the results of a function."""
        if not (known := self.known([args, kwargs])):
            return [None] * len(results)
        with suppress(Exception):  # such as a lack of memory: the model itself must go on
            return places_in_results(function, args, kwargs, known, results)
        return [UNKNOWN] * len(results)

    def note(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        results: Sequence[Tensor],
    ) -> None:
        """Notes the places in new results of a function."""
        arguments = [x for x in tensors_of([args, kwargs]) if is_number(x)]
        if any(results[0] is x for x in arguments):
            return
        if not self.known(arguments) and (
            "empty" in getattr(function, "__name__", "")
            or any(x not in self._places and not isinstance(x, nn.Parameter) for x in arguments)
        ):
            return  # a kernel that cannot be seen may fill it, or has filled an argument
        for x, place in zip(results, self.find(function, args, kwargs, results), strict=False):
            if place is not UNKNOWN:
                self._places[x] = place

    def note_attention(
        self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, is_length_first: bool
    ) -> None:
        """Notes the place in the output of a call: see `follow_attention`."""
        place = self.place_in(query)
        known = self.known([query, key, value])
        if mixed := [(x, each) for x, each in known if each[-2] is None]:
            self.put(output, _place_of_mixed(mixed, output, is_length_first))
        elif place is None:
            self.put(output, None)
        elif place is not UNKNOWN and len(place) == output.ndim:
            order = (0, 2, 1) if is_length_first else range(output.ndim - 1)
            axes = [
                place[m] if query.shape[m] == n else None
                for m, n in zip(order, output.shape, strict=False)
            ]
            self.put(output, (*axes, None))


def _place_of_mixed(
    mixed: Sequence[tuple[Tensor, Place]], output: Tensor, is_length_first: bool
) -> Place:
    """Returns the place in the output of a call if the token is in all keys or queries.

    Args:
        mixed: those of query, key and value that have it everywhere, with its places.
        output: of the call.
        is_length_first: only its first axis is one of the others.
    """
    shared = slice(0, 1 if is_length_first else output.ndim - 2)
    leading = {place[shared] for x, place in mixed if x.shape[shared] == output.shape[shared]}
    kept = leading.pop() if len(leading) == 1 else ()
    return (*kept, *(None,) * (output.ndim - len(kept)))
