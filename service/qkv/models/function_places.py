"""Finds the place of one token in the results of torch's functions.

The place of a token in a tensor is the part that depends on the token: for each axis the indices
where it does, or None for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor

Place: TypeAlias = tuple[frozenset[int] | None, ...]
"""The indices of each axis, or None for all."""
_ELEMENTWISE: Final = frozenset({
    "abs", "add", "addcdiv", "addcmul", "alpha_dropout", "bfloat16", "celu", "clamp", "clone",
    "contiguous", "cos", "detach", "div", "double", "dropout", "elu", "erf", "exp", "expm1",
    "float", "gelu", "half", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "lerp",
    "log", "log1p", "log_sigmoid", "logsigmoid", "masked_fill", "maximum", "minimum", "mish",
    "mul", "multiply", "nan_to_num", "neg", "pow", "radd", "rdiv", "reciprocal", "relu",
    "relu6", "requires_grad", "rmul", "rpow", "rsqrt", "rsub", "rtruediv", "selu", "sigmoid",
    "silu", "sin", "softplus", "softsign", "sqrt", "square", "sub", "tanh", "to",
    "true_divide", "truediv", "type", "type_as", "where", "xlogy",
})  # fmt: skip
"""Functions of elements at the same place, whose arguments broadcast."""
_LAST_AXES: Final = frozenset({
    "layer_norm", "linear", "matmul", "mm", "rms_norm",
})  # fmt: skip
"""Functions of the last axis of the first argument, if no other depends on the token."""
_MOVES: Final = frozenset({
    "cat", "chunk", "expand", "expand_as", "flatten", "flip", "getitem", "gather", "hstack",
    "index_select", "movedim", "narrow", "permute", "repeat", "repeat_interleave", "reshape",
    "reshape_as", "roll", "select", "setitem", "split", "squeeze", "stack", "swapaxes", "tile",
    "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as", "vstack",
})  # fmt: skip
"""Functions that move elements: truth values move as numbers do, and cost less."""
_CHANNELS_FIRST: Final = frozenset({
    "batch_norm", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "group_norm", "instance_norm",
})  # fmt: skip
"""Functions of inputs (B, channels, ...): an index of the second axis is no position."""
_NORMS: Final = frozenset({
    "batch_norm", "group_norm", "instance_norm",
})  # fmt: skip
"""Functions whose statistics may be of several positions; they mix no tokens."""
_FRESH: Final = frozenset({
    "bernoulli", "empty", "exponential", "fill", "full", "new", "normal", "ones", "rand",
    "randint", "randn", "random", "uniform", "zero", "zeros",
})  # fmt: skip
"""First words of the functions whose results do not depend on numbers of their arguments."""


def tensors_of(value: Any) -> list[Tensor]:
    """Returns the tensors of arguments or of a result, also those in lists and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [x for each in value if each is not None for x in tensors_of(each)]


def is_number(x: object) -> TypeGuard[Tensor]:
    """True for a tensor of floating or complex numbers that is not nested."""
    if not isinstance(x, Tensor) or x.is_nested:
        return False
    return x.is_floating_point() or x.is_complex()


def written(function: Callable[..., Any], args: Sequence[Any]) -> Tensor | None:
    """Returns the tensor that a function writes to; None if it writes to none."""
    name = getattr(function, "__name__", "")
    writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return args[0] if writes and args and is_number(args[0]) else None


def places_in_results(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    places: Sequence[tuple[Tensor, Place]],
    results: Sequence[Tensor],
) -> list[Place | None]:
    """Finds the places of a token in the results of a function.

    Functions of a table cost nothing. Others run a second time, with other numbers at the token.

    Args:
        function: of torch. If it writes to its first argument, it has not run yet.
        args, kwargs: its arguments.
        places: the arguments that depend on the token, with its places.
        results: those of numbers, or the argument that it writes to.

    Returns:
        A place for each result; None: the result does not depend on the token.
    """
    name = getattr(function, "__name__", "").strip("_").partition(".")[0]
    if name.split("_")[0] in _FRESH:
        return [None] * len(results)
    if all(index is None for _, place in places for index in place):
        return [(None,) * x.ndim for x in results]
    if name in _ELEMENTWISE:
        return [_broadcast(places, result) for result in results]
    if len(places) == 1:
        x, place = places[0]
        is_first = len(args) > 0 and args[0] is x
        if is_first and name in _NORMS:
            return [place]
        if is_first and name in _CHANNELS_FIRST and x.ndim > 2 and place[1] is not None:
            return [None]
        if place[-1] is None and _keeps_rows(name, x, args, results):
            return [place]
    change = _flags if name in _MOVES else perturbed
    return _repeat(function, args, kwargs, {id(x): p for x, p in places}, results, change)


def _keeps_rows(name: str, x: Tensor, args: Sequence[Any], results: Sequence[Tensor]) -> bool:
    """True if each row of the result is a function of the same row of x alone."""
    if name == "addmm":
        return args[1] is x
    if name not in _LAST_AXES or args[:1] == () or args[0] is not x:
        return False
    weight = args[1] if len(args) > 1 else None
    is_matrix = not isinstance(weight, Tensor) or weight.ndim <= 2
    return is_matrix and results[0].shape[:-1] == x.shape[:-1]


def _broadcast(places: Sequence[tuple[Tensor, Place]], result: Tensor) -> Place:
    """Returns the place in a result of elements that broadcast."""
    axes: list[frozenset[int] | None] = []
    for axis in range(-result.ndim, 0):
        indices = [
            None if -axis > x.ndim or x.shape[axis] < result.shape[axis] else place[axis]
            for x, place in places
        ]
        known = [each for each in indices if each is not None]
        axes.append(frozenset().union(*known) if len(known) == len(indices) else None)
    return tuple(axes)


_Change: TypeAlias = Callable[[Tensor, Place | None], Tensor]


def _repeat(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    places: Mapping[int, Place],
    results: Sequence[Tensor],
    change: _Change,
) -> list[Place | None]:
    """Runs a function again with changed arguments, and compares its results."""

    def changed(value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(map(changed, value))
        return change(value, places.get(id(value))) if is_number(value) else value

    target = written(function, args)
    with without_traces(results[0].device):
        others = [changed(value) for value in args]
        options = {name: changed(value) for name, value in kwargs.items()}
        if target is None:
            kinds = (torch.bool,) if change is _flags else {x.dtype for x in results}
            after = [x for x in tensors_of(function(*others, **options)) if x.dtype in kinds]
            before = list(results)
        else:
            after, before = [others[0].clone()], [target.detach().clone()]
            if change is _flags and not isinstance(args[-1], Tensor):
                others[-1] = False  # a number is no truth value
            function(after[0], *others[1:], **options)
            if change is perturbed:
                function(before[0], *args[1:], **kwargs)
        if change is _flags:
            return [_place(flags) for flags in after]
        return [changed_place(a, b) for a, b in zip(before, after, strict=True)]


def _flags(x: Tensor, place: Place | None) -> Tensor:
    """Returns truth values: true at the place."""
    if place is None:
        return torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    return _mask(x, place).expand(x.shape).contiguous()


def _mask(x: Tensor, place: Place) -> Tensor:
    """Returns truth values that broadcast to the shape of x: true at the place."""
    mask = np.ones((1,) * x.ndim, dtype=np.bool_)
    for axis, indices in enumerate(place):
        if indices is not None:
            line = np.zeros((x.shape[axis], *(1,) * (x.ndim - axis - 1)), dtype=np.bool_)
            line[list(indices)] = True
            mask = mask & line
    return torch.from_numpy(mask).to(x.device)


def perturbed(x: Tensor, place: Place | None) -> Tensor:
    """Returns a tensor with numbers at the place that are larger than all there, of both signs."""
    x = x.detach()
    if place is None or not x.numel():
        return x
    mask = _mask(x, place)
    signs = torch.ones((), dtype=x.dtype, device=x.device)
    for n in x.shape:  # neighbours have different signs: a constant may change nothing
        signs = signs[..., None] * (1 - torch.arange(n, device=x.device) % 2 * 2)
    size = x.abs().where(mask, 0).amax() * 4 + 1
    return torch.where(mask, x * 1.25 + signs * size, x)


def changed_place(before: Tensor, after: Tensor) -> Place | None:
    """Returns the place where two tensors differ by more than rounding; None if they do not."""
    if before.shape != after.shape:
        return (None,) * before.ndim
    differs = after != before
    rounding = torch.finfo(before.dtype).eps ** 0.5
    near = torch.isclose(after[differs], before[differs], rounding, rounding, equal_nan=True)
    differs[differs.clone()] = ~near
    return _place(differs)


def _place(flags: Tensor) -> Place | None:
    """Returns the place of the true values; None if there are none."""
    table = flags.cpu().numpy()
    count = np.count_nonzero(table)
    if not count:
        return None
    if count * 8 < table.size:  # a search for all axes takes 1/20 of the time of one for each
        lines = [np.unique(line) for line in np.unravel_index(np.flatnonzero(table), table.shape)]
    else:
        axes = range(table.ndim)
        lines = [np.flatnonzero(table.any(tuple(m for m in axes if m != n))) for n in axes]
    return tuple(
        None if len(line) == n > 1 else frozenset(line.tolist())
        for line, n in zip(lines, table.shape, strict=True)
    )


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
