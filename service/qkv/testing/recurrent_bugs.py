"""Known bugs of recurrences, as changes of a call of `gated`: flags of `recurrence`, or inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch

from qkv.testing.call import STATE, Call, Change
from qkv.testing.recurrence import CHUNKS, NORMALIZERS


def _flags(*names: str, needs: str = "", normalizes: bool = False) -> Change:
    """Returns the change by flags; it has no effect without an input, or without `normalize_qk`."""

    def change(call: Call) -> Call:
        if not call.is_recurrence or (needs and needs not in call.inputs):
            return call
        if normalizes and not call.parsed.get("normalize_qk"):
            return call
        return replace(call, flags=call.flags | {*names})

    return change


def _chunked(name: str) -> tuple[Change, ...]:
    """Returns the changes by a flag with the tokens of a chunk: of `CHUNKS`, or the parameter's."""

    def of_parameter(call: Call) -> Call:
        if not call.is_recurrence or call.chunk in CHUNKS:
            return call
        return replace(call, flags=call.flags | {f"{name}-{call.chunk}"})

    return (*(_flags(f"{name}-{size}") for size in CHUNKS), of_parameter)


def _tile_heads(call: Call) -> Call:
    """Gives value head h the query and the key of head h mod G."""
    if not call.is_recurrence:
        return call
    G, V = call.inputs["key"].shape[1], call.inputs["value"].shape[1]
    if G in (1, V):
        return call
    tiled = {n: call.inputs[n][:, torch.arange(V) % G] for n in ("query", "key")}
    return replace(call, inputs={**call.inputs, **tiled})


def _take_decay_as_given(call: Call) -> Call:
    """Multiplies by the log of the decay; an infinite one would make everything NaN."""
    decay = call.inputs.get("log_decay")
    if decay is None or not bool(decay.isfinite().all()):
        return call
    return _flags("decay-as-given")(call)


def _swap_query_and_key(call: Call) -> Call:
    if not call.is_recurrence:
        return call
    swapped = {"query": call.inputs["key"], "key": call.inputs["query"]}
    return replace(call, inputs={**call.inputs, **swapped})


def _transpose_state(call: Call) -> Call:
    """Reads the state before the tokens with the axis of values first."""
    if STATE not in call.inputs:
        return call
    state = call.inputs[STATE]
    if state.shape[2] != state.shape[3]:
        return call
    return replace(call, inputs={**call.inputs, STATE: state.mT})


def _ignore_state(call: Call) -> Call:
    if STATE not in call.inputs:
        return call
    return replace(call, inputs={n: x for n, x in call.inputs.items() if n != STATE})


def _without_state(change: Change) -> Change:
    """Returns the change, with the state before the tokens ignored too."""

    def both(call: Call) -> Call:
        return call if change(call) is call else _ignore_state(change(call))

    return both


def _transpose_both(call: Call) -> Call:
    return _flags("state-out-transposed")(_transpose_state(call))


RECURRENT_BUGS: Final[Mapping[str, tuple[Change, ...]]] = {
    "history-truncated": (
        *_chunked("truncated"),
        *_chunked("last-chunk-kept"),
        *(_without_state(change) for change in _chunked("truncated")),
    ),
    "chunk-tail-dropped": _chunked("tail-dropped"),
    "state-transposed": (_transpose_state, _flags("state-out-transposed"), _transpose_both),
    "heads-tiled": (_tile_heads,),
    "decay-after-update": (
        _flags("decay-last", needs="log_decay"),
        _flags("decay-last", "read-undecayed", needs="log_decay"),
    ),
    "read-before-write": (_flags("read-before-write"), _flags("read-before-decay")),
    "decay-not-logged": (_take_decay_as_given,),
    "beta-not-applied": (
        _flags("beta-one", needs="beta"), _flags("beta-not-on-erase", needs="beta"),
        _flags("beta-not-on-write", needs="beta"),
    ),
    "query-key-swapped": (_swap_query_and_key,),
    "keys-not-normalized": (
        _flags("not-normalized", normalizes=True), _flags("key-not-normalized", normalizes=True),
        _flags("query-not-normalized", normalizes=True),
    ),
    "initial-state-ignored": (_ignore_state,),
    "final-state-stale": (
        _flags("state-before-all"), _flags("state-before-last"), *_chunked("state-before-chunk"),
        *_chunked("state-of-whole-chunks"),
    ),
    "epsilon-in-normalizer": tuple(_flags(name, normalizes=True) for name in NORMALIZERS),
}  # fmt: skip
"""The changes of each known bug, by the name that a diagnosis states."""
