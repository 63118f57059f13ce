"""One token of a running model, and what the model computes if the token is another one.

Each tensor that depends on the token has a twin: the same tensor for another token. A function of
torch runs a second time on the twins of its arguments, so that this needs no knowledge of any
function, and the model itself runs once, on its own numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from qkv.models.places import Place, changed_place, disturbed, is_number, is_single, tensors_of

UNKNOWN: Final[Any] = object()
"""The place in a tensor that a function made which cannot be seen."""
_NORMS: Final = frozenset({"batch_norm", "group_norm", "instance_norm"})
"""Functions whose statistics may be of several positions; they mix no tokens. A second run would
change the statistics that a module keeps."""
_CHANNELS_FIRST: Final = frozenset({
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
})  # fmt: skip
"""Functions of inputs (B, channels, ...): an index of the second axis is no position."""
_WRITING: Final = re.compile(r"__setitem__|__i(?!n)[a-z]+__|\w*[^_]_")
"""Names of functions that write to their first argument, such as __iadd__ and add_."""


class FollowedToken:
    """The twins of the tensors that depend on a token; None for a tensor that does not."""

    def __init__(self) -> None:
        self._twins = WeakTensorKeyDictionary()
        self._places = WeakTensorKeyDictionary()  # that were found, with twins and versions

    def place_in(self, x: Tensor) -> Any:
        """Returns the place in a tensor, or None, or UNKNOWN."""
        twin = self._twins.get(x, UNKNOWN)
        if not isinstance(twin, Tensor):
            return twin
        with suppress(Exception):  # such as a lack of memory: the model itself must go on
            if x.is_inference() or twin.is_inference():  # they have no version
                return changed_place(x, twin)
            versions = x._version, twin._version
            before, at, place = self._places.get(x, (None, versions, None))
            if before is not twin or at != versions:
                place = changed_place(x, twin)
                self._places[x] = twin, versions, place
            return place
        return UNKNOWN

    def put(self, x: Tensor, place: Any) -> None:
        """Notes the place in a tensor, or None, or UNKNOWN."""
        if place is not None and place is not UNKNOWN and place == self.place_in(x):
            return
        self._twins.pop(x, None)
        if place is None:
            self._twins[x] = None
        elif place is not UNKNOWN:
            with suppress(Exception):
                self._twins[x] = disturbed(x, place)

    def ignore(self, x: Tensor) -> None:
        """Notes that a tensor does not depend on the token, unless it is known to."""
        self._twins.setdefault(x, None)

    def known(self, values: Any) -> list[tuple[Tensor, Place]]:
        """Returns the tensors in values that depend on the token, with its places."""
        places = ((x, self.place_in(x)) for x in tensors_of(values) if self._has_twin(x))
        return [(x, place) for x, place in places if place is not None and place is not UNKNOWN]

    def _has_twin(self, x: Tensor) -> bool:
        return self._twins.get(x) is not None

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Notes what a function of torch returned: see `follow`."""
        results = [x for x in tensors_of(result) if is_number(x)]
        arguments = [x for x in tensors_of([args, kwargs]) if is_number(x)]
        if not results or any(results[0] is x for x in arguments):
            return
        name = getattr(function, "__name__", "")
        twins = [x for x in arguments if self._has_twin(x)]
        if "empty" in name or (not twins and not all(map(self._is_known, arguments))):
            return  # a kernel that cannot be seen may fill it, or has filled an argument
        if not twins:
            for x in results:
                self._twins[x] = None
            return
        name = name.strip("_")
        if name in _NORMS:
            self.put(results[0], self.place_in(twins[0]))
            return
        if name in _CHANNELS_FIRST and twins[0].ndim > 2:
            place = self.place_in(twins[0])
            if place is not None and is_single(place[1]):
                self.put(results[0], None)
                return
        others = tensors_of(self._run_on_twins(function, args, kwargs))
        for x, twin in zip(results, filter(is_number, others), strict=True):
            if _is_view(twin, x):  # of an argument that does not depend on the token
                self._twins[x] = None
            elif x.shape == twin.shape:
                self._twins[x] = twin

    def _is_known(self, x: Tensor) -> bool:
        return isinstance(x, nn.Parameter) or x in self._twins

    def write(self, function: Callable[..., Any], args: Any, kwargs: Any, target: Tensor) -> None:
        """Notes what a function is going to write to a tensor."""
        if not any(map(self._has_twin, tensors_of([args, kwargs]))):
            return
        if not self._has_twin(target):
            self._twins[target] = target.detach().clone()
        try:
            self._run_on_twins(function, args, kwargs)
            if any(_is_view(self._twins[target], x) for x in tensors_of([args, kwargs])):
                self.put(target, UNKNOWN)
        except Exception:
            self.put(target, UNKNOWN)

    def _run_on_twins(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        def other(value: Any) -> Any:
            if type(value) in (list, tuple):
                return type(value)(map(other, value))
            if is_number(value) and self._has_twin(value):
                return self._twins[value]
            return value.clone() if is_copied and isinstance(value, Tensor) else value

        is_copied = _may_write_anywhere(function)

        return function(*other(args), **{name: other(value) for name, value in kwargs.items()})

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


def _may_write_anywhere(function: Callable[..., Any]) -> bool:
    """True for a custom operator that writes to an argument, such as to a state."""
    schema = getattr(getattr(function, "default", function), "_schema", None)
    return schema is not None and schema.is_mutable


def _is_view(twin: Tensor, x: Tensor) -> bool:
    """True if what is written to a twin is written to a tensor of the model too."""
    return twin.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def written(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Returns the tensor of numbers that a function of torch writes to; None if there is none."""
    target = kwargs.get("out")
    if target is None and (
        _WRITING.fullmatch(getattr(function, "__name__", "")) or kwargs.get("inplace") is True
    ):
        target = args[0] if args else None
    return target if is_number(target) else None


def follow(
    tokens: Sequence[FollowedToken],
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Runs a function of torch, and also on the twins of each token, with equal random numbers."""
    device = next((x.device for x in tensors_of([args, kwargs])), torch.device("cpu"))
    if (target := written(function, args, kwargs)) is not None:
        for token in tokens:
            with suppress(Exception), without_traces(device):
                token.write(function, args, kwargs, target)
        return function(*args, **kwargs)
    state = torch.empty(0)
    with suppress(Exception):  # such as inside a graph of CUDA
        state = random_state(device)
    result = function(*args, **kwargs)
    if any(map(is_number, tensors_of(result))):
        for token in tokens:
            with suppress(Exception), without_traces(device):
                set_random_state(device, state)
                token.run(function, args, kwargs, result)
    return result


def random_state(device: torch.device) -> Tensor:
    """Returns the state of the random numbers of a device."""
    numbers, place = _random_numbers(device)
    state: Tensor = numbers.get_rng_state(*place)
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Sets the state of the random numbers of a device."""
    numbers, place = _random_numbers(device)
    numbers.set_rng_state(state, *place)


def _random_numbers(device: torch.device) -> tuple[Any, Sequence[torch.device]]:
    """Returns torch's module of the random numbers of a device, and its arguments.

    Without an argument they would be those of the current GPU.
    """
    if device.type in ("cpu", "meta"):
        return torch, ()
    return torch.get_device_module(device), () if device.type == "mps" else (device,)


@contextmanager
def without_traces(device: torch.device) -> Iterator[None]:
    """Leaves no gradients, random numbers and casts of what runs inside the block."""
    devices = [] if device.type == "cpu" else [device]
    caches = torch.is_autocast_cache_enabled()
    # weights cast without gradients would be taken for those of the model
    torch.set_autocast_cache_enabled(False)
    try:
        kind = "cuda" if device.type == "cpu" else device.type
        with torch.no_grad(), torch.random.fork_rng(devices, device_type=kind):
            yield
    finally:
        torch.set_autocast_cache_enabled(caches)
