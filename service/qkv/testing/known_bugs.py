"""Known bugs of attention kernels, as changes of a call.

A bug is a wrong variant: it computes the right formula on other inputs or parameters, or with a
flag that changes the formula (`plain_softmax`, `recurrence`). `KNOWN_BUGS` has the changes by name.
Where several mistakes have one name, each of them is a change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from qkv.testing import elu_features
from qkv.testing.call import Call, Change
from qkv.testing.plain_softmax import EPSILONS, FORGOTTEN, SENTINEL, evaluate
from qkv.testing.recurrent_bugs import RECURRENT_BUGS
from qkv.testing.truth import has_derivation

LOW_PRECISION: Final = "low-precision-accumulation"
"""The name of sums in float16 or bfloat16; `low_precision` recognizes them by their errors."""


def _set(**parameters: Any) -> Change:
    """Returns the change of parameters that the variant has."""

    def change(call: Call) -> Call:
        if any(n not in call.variant.parameters.model_fields for n in parameters):
            return call
        return replace(call, parameters={**call.parameters, **parameters})

    return change


def _switched_off(name: str, off: Any) -> Change:
    """Returns the change of a parameter to the value that switches it off."""

    def change(call: Call) -> Call:
        model = call.variant.parameters.model_fields
        if name not in model or call.parsed.get(name, model[name].default) == off:
            return call
        return replace(call, parameters={**call.parameters, name: off})

    return change


def _flag(name: str, parameter: str = "") -> Change:
    """Returns the change of the formula; it has no effect without the parameter."""

    def change(call: Call) -> Call:
        if "query" not in call.inputs or (parameter and call.parsed.get(parameter) is None):
            return call
        if call.is_recurrence and name not in OUTPUT_FLAGS:
            return call
        return replace(call, flags=call.flags | {name})

    return change


def _sink_flag(name: str, parameter: str = "") -> Change:
    """Returns the change of the formula of calls with sinks."""
    change = _flag(name, parameter)
    return lambda call: change(call) if "sinks" in call.inputs else call


def _lose_low_rows(call: Call) -> Call:
    """Loses the rows whose scores are all below the number that a maximum begins with."""
    if not has_derivation(call) or not bool((evaluate(call).scores.amax(-1) < SENTINEL).any()):
        return call
    return replace(call, flags=call.flags | {"sentinel"})


def _both(first: Change, second: Change) -> Change:
    return lambda call: second(first(call))


def _features(function: Callable[[Tensor], Tensor]) -> Change:
    """Returns the change of the feature map of `linear` to another positive function.

    Its own map, elu(x) + 1, has an inverse: the queries and keys become those that it maps to the
    other features.
    """

    def as_input(x: Tensor) -> Tensor:
        return elu_features.invert(function(x.double()))

    def change(call: Call) -> Call:
        if call.variant.name != "linear":
            return call
        return _both(_on_input("query", as_input), _on_input("key", as_input))(call)

    return change


def _scale(factor: Callable[[int, int], float]) -> Change:
    """Returns the change of the scale to a function of D and E."""

    def change(call: Call) -> Call:
        if "scale" not in call.variant.parameters.model_fields or "query" not in call.inputs:
            return call
        D, E = call.inputs["query"].shape[-1], call.inputs["value"].shape[-1]
        return _set(scale=factor(D, E))(call)

    return change


def _offset(choose: Callable[[int, int], int]) -> Change:
    """Returns the change of the first query's position to a function of L and S."""

    def change(call: Call) -> Call:
        if not call.parsed.get("causal") or "query" not in call.inputs:
            return call
        _, _, L, S = call.score_shape
        return _set(query_offset=choose(L, S))(call)

    return change


def _shift(keys: int) -> Change:
    """Returns the change of a causal edge by a number of keys; a window keeps its left edge."""

    def change(call: Call) -> Call:
        if not call.parsed.get("causal") or "query" not in call.inputs:
            return call
        _, _, L, S = call.score_shape
        offset = call.parsed.get("query_offset", 0)
        if offset == "end" and "key_lengths" in call.inputs:
            return call
        offset = S - L if offset == "end" else offset
        window = call.parsed.get("window")
        moved = {} if not window else {"window": _widened(window, keys, -keys)}
        return _set(query_offset=offset + keys, **moved)(call)

    return change


def _window(left: int, right: int) -> Change:
    def change(call: Call) -> Call:
        if not (window := call.parsed.get("window")):
            return call
        return _set(window=_widened(window, left, right))(call)

    return change


def _widened(window: Any, left: int, right: int) -> tuple[int | None, int | None]:
    """Returns a window with other edges; none is below 0."""
    first, last = (
        None if edge is None else max(0, edge + more)
        for edge, more in zip(window, (left, right), strict=True)
    )
    return first, last


def _on_input(name: str, function: Callable[[Tensor], Tensor]) -> Change:
    def change(call: Call) -> Call:
        if name not in call.inputs:
            return call
        return replace(call, inputs={**call.inputs, name: function(call.inputs[name])})

    return change


def _without(name: str) -> Change:
    def change(call: Call) -> Call:
        if name not in call.inputs:
            return call
        return replace(call, inputs={n: x for n, x in call.inputs.items() if n != name})

    return change


def _tile(call: Call) -> Call:
    """Gives query head h the key head h mod G."""
    if "query" not in call.inputs:
        return call
    H, G = call.inputs["query"].shape[1], call.inputs["key"].shape[1]
    if G in (1, H):
        return call
    chosen = torch.arange(H) % G
    tiled = {n: call.inputs[n][:, chosen] for n in ("key", "value")}
    return replace(call, inputs={**call.inputs, **tiled})


def _read_transposed(x: Tensor) -> Tensor:
    """Reads the memory of (..., S, E) as (..., E, S)."""
    return x.contiguous().view(*x.shape[:-2], x.shape[-1], x.shape[-2]).mT


def _write_transposed(x: Tensor) -> Tensor:
    """Reads the transposed memory of (..., S, E) as (..., S, E)."""
    return x.mT.contiguous().view(x.shape)


def _heads_as_positions(x: Tensor) -> Tensor:
    """Reads the memory of (B, H, S, D) as (B, S, H, D)."""
    return x.contiguous().view(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


def _positions_as_heads(x: Tensor) -> Tensor:
    """Reads the memory of (B, S, H, D) as (B, H, S, D)."""
    return x.transpose(1, 2).contiguous().view(x.shape)


def _all_inputs(function: Callable[[Tensor], Tensor]) -> Change:
    def change(call: Call) -> Call:
        for name in ("query", "key", "value"):
            call = _on_input(name, function)(call)
        return call

    return change


KNOWN_BUGS: Final[Mapping[str, tuple[Change, ...]]] = {
    "scale-missing": (_set(scale=1.0),),
    "scale-wrong": (
        _scale(lambda D, _: 1 / D),
        _scale(lambda _, E: E**-0.5),
        _scale(lambda D, _: D**0.5),
        _scale(lambda D, _: D**-0.5),
    ),
    "causal-top-left": (_offset(lambda L, S: 0),),
    "causal-bottom-right": (_offset(lambda L, S: S - L),),
    "causal-off-by-one": (_shift(1), _shift(-1)),
    "causal-missing": (_switched_off("causal", False),),
    "mask-inverted": (_on_input("mask", torch.logical_not),),
    "mask-ignored": (_without("mask"),),
    "padding-attended": (_without("key_lengths"),),
    "window-off-by-one": (
        _window(1, 0), _window(-1, 0), _window(0, 1), _window(0, -1), _window(1, 1), _window(-1, -1)
    ),
    "gqa-tiled": (_tile,),
    "sink-ignored": (_without("sinks"),),
    "sink-counted-twice": (_on_input("sinks", lambda x: x.double() + math.log(2)),),
    "sink-as-sigmoid": (_sink_flag("sink-gate"),),
    "sink-capped": (_sink_flag("cap-sink", "softcap"),),
    "finite-sentinel": (_lose_low_rows,),
    "softcap-after-mask": (_flag("cap-after-mask", "softcap"),),
    "softcap-missing": (_switched_off("softcap", None),),
    "normalizer-missing": (
        _flag("no-sum"), _flag("no-sum-no-max"), _switched_off("normalize", False)
    ),
    "epsilon-in-denominator": tuple(map(_flag, EPSILONS)),
    "online-not-rescaled": tuple(map(_flag, FORGOTTEN)),
    "max-not-subtracted": (_flag("no-max"),),
    "nan-from-masked-row": (
        _flag("blind-nan"), _both(_flag("blind-nan"), _flag("nan-spreads"))
    ),
    "nan-from-hidden-value": (_flag("nan-spreads"),),
    "feature-map-wrong": (
        _features(torch.relu), _features(torch.exp), _features(torch.nn.functional.softplus),
        _features(torch.sigmoid), _features(lambda x: x.relu().square()),
    ),
    **RECURRENT_BUGS,
    "value-transposed": (
        _on_input("value", _read_transposed), _on_input("value", _write_transposed)
    ),
    "heads-swapped": (
        _flag("swapped-output"), _flag("unswapped-output"), _all_inputs(_heads_as_positions),
        _all_inputs(_positions_as_heads),
    ),
}  # fmt: skip
"""The changes of each known bug, by the name that a diagnosis states."""

ALONE: Final = {"epsilon-in-denominator", "online-not-rescaled"}
"""The bugs that are in no pair: they have many changes, and would double the number of pairs."""

OUTPUT_FLAGS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "swapped-output": _positions_as_heads,
    "unswapped-output": _heads_as_positions,
}
"""The flags that rearrange an output (B, H, L, E)."""
