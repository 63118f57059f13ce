"""A request as calls of a definition: one head at a time, padding cut, the tail in front."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Final

import numpy as np

from definitions.efficient import efficient
from definitions.gated import gated
from definitions.linear import linear
from definitions.linear_layer import linear_layer
from definitions.linformer import linformer
from definitions.mean import mean
from definitions.sigmoid import sigmoid
from definitions.softmax import softmax
from definitions.taylor import taylor

Arrays = Mapping[str, Any]

_SUMMED: Final[Mapping[str, Callable[..., Arrays]]] = {
    "efficient": efficient, "gated": gated, "linear": linear, "mean": mean, "taylor": taylor,
}  # fmt: skip
DEFINITIONS: Final[Mapping[str, Callable[..., Arrays]]] = {
    "linear_layer": linear_layer, "linformer": linformer, "sigmoid": sigmoid, "softmax": softmax,
    **_SUMMED,
}  # fmt: skip
"""The definition of each variant."""
_OF_KEYS: Final = ("key", "value", "log_decay", "beta")
_UNREAD: Final = ("chunk", "state", "method", "rank", "query_offset")  # they change no result


def define(name: str, inputs: Arrays, **parameters: Any) -> dict[str, Any]:
    """Returns the outputs of a request by its definition.

    Args:
        name: of the variant.
        inputs: float64 arrays by name, those of a state among them; lengths are integers.
        parameters: those of the request.
    """
    if name == "linear_layer":
        items = [linear_layer(x, inputs["weight"]) for x in inputs["x"]]
        return {n: np.stack([item[n] for item in items]) for n in items[0]}
    known = {n: x for n, x in parameters.items() if n not in _UNREAD}
    B, _, S, _ = inputs["value"].shape
    L = inputs["query"].shape[2] if "query" in inputs else S
    H = max(inputs[n].shape[1] for n in ("query", "key", "value") if n in inputs)
    found: dict[str, Any] = {}
    for b, h in np.ndindex(B, H):
        head = _head(name, inputs, b, Fraction(h, H), parameters.get("query_offset", 0))
        if name == "softmax":
            head["plane"] = b * H + h
        for n, x in DEFINITIONS[name](**head, **known).items():
            columns = S if n in ("weights", "scores") else x.shape[1]
            empty = np.full((B, H, L, columns), -np.inf if n == "scores" else 0.0)
            found.setdefault(n, empty)[b, h, : len(x), : x.shape[1]] = x
    return found


def _head(name: str, inputs: Arrays, b: int, share: Fraction, query_offset: Any) -> dict[str, Any]:
    """Returns the arguments of a definition for the head at this share of all heads."""

    def of_head(x: Any) -> Any:
        return x[b, int(share * x.shape[1])]

    S = inputs["value"].shape[2]
    L = inputs["query"].shape[2] if "query" in inputs else S
    valid = int(inputs["key_lengths"][b]) if "key_lengths" in inputs else S
    rows = valid if name == "gated" or any(n.startswith("state.") for n in inputs) else L
    head = {n: of_head(inputs[n])[:valid] for n in _OF_KEYS if n in inputs}
    if "query" in inputs:
        head["query"] = of_head(inputs["query"])[:rows]
    if name in _SUMMED:
        head |= _state(name, inputs, head, b, of_head)
    if name == "mean":
        head["L"] = rows
    elif name not in ("gated", "linformer"):
        head["offset"] = valid - L if query_offset == "end" else query_offset
    for n in {"alibi_slopes", "sinks"} & inputs.keys():
        head[n] = inputs[n][int(share * len(inputs[n]))]
    if "mask" in inputs:
        shape = (len(inputs["value"]), inputs["query"].shape[1], L, S)
        head["mask"] = of_head(np.broadcast_to(inputs["mask"], shape))[:, :valid]
    for n in {"key_projection", "value_projection"} & inputs.keys():
        head[n] = inputs[n][:, :S][:, :valid]
    return head


def _state(
    name: str, inputs: Arrays, head: Arrays, b: int, of_head: Callable[[Any], Any]
) -> dict[str, Any]:
    """Returns the sums of the tokens before a head's, and its tensors behind those of the tail."""
    E, F = inputs["value"].shape[3], 1
    if name != "mean":
        F = inputs["key"].shape[3] + (name == "taylor")
    found = {"sums": np.zeros((F, E + (name != "gated"))), "first": 0}
    found |= {"largest": np.zeros(F)} if name == "efficient" else {}
    for n in {"sums", "largest"} & found.keys():
        if f"state.{n}" in inputs:
            found[n] = of_head(inputs[f"state.{n}"])
    if "state.tail_length" in inputs:
        found["first"] = first = int(inputs["state.tail_length"][b])
        for n in head.keys() & {*_OF_KEYS}:
            tail = of_head(inputs[f"state.tail_{n}"])[:first]
            found[n] = np.concatenate([tail, head[n].reshape(-1, *tail.shape[1:])])
    return found
