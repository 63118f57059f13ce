"""The weights of an attention block in a form that does not depend on the layout.

`Weights` is a mapping from these names to arrays:

- `query.weight`, `key.weight`, `value.weight` (in, out): applied as x @ weight.
- `query.bias`, `key.bias`, `value.bias` (out): optional.
- `output.weight` (H * E, out) and `output.bias` (out): the output projection, optional.
- `query_norm.weight`, `key_norm.weight`: QK-norm, (D) for each head or (heads * D), optional.
- `sinks` (H): attention sinks, optional.

The heads are side by side in an axis of size heads * width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from qkv.errors import InvalidContent

ROLES: Final = ("query", "key", "value")
BIASES: Final = frozenset(f"{role}.bias" for role in ROLES)
SINKS: Final = "sinks"
"""Attention sinks: a weight of a layer, and an input of the variant that it gives."""
OUTPUT: Final = frozenset({"output.weight", "output.bias"})
ALL: Final = BIASES | OUTPUT | {"query_norm.weight", "key_norm.weight", SINKS}
"""All names but those of the three projections' weights, which every layout holds."""

Array = np.ndarray[Any, Any]
Weights = Mapping[str, Array]
Pair = tuple[Array | None, Array | None]


def hollow(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Returns an array of zeros of any size in the memory of one number."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def named(**parts: Array | Pair | None) -> dict[str, Array]:
    """Returns weights from keyword arguments; leaves out what is None.

    A pair is a weight and a bias; a single array has the name of its keyword.
    """
    weights = {}
    for name, part in parts.items():
        if isinstance(part, tuple):
            arrays = {f"{name}.weight": part[0], f"{name}.bias": part[1]}
        else:
            arrays = {name: part}
        weights.update({n: a for n, a in arrays.items() if a is not None})
    return weights


def bias_of(weights: Weights, role: str) -> Array:
    """Returns the bias of a projection, zeros if it has none. Zeros change no result."""
    weight_IO = weights[f"{role}.weight"]
    bias = weights.get(f"{role}.bias")
    return np.zeros(weight_IO.shape[1], weight_IO.dtype) if bias is None else bias


def fused(
    weights_OI: Sequence[Array], bias_O: Array | None, cuts: int | Sequence[int] = 3
) -> dict[str, Pair]:
    """Returns weight (in, out) and bias of each role.

    Args:
        weights_OI: those of query, key and value, each (out, in).
        bias_O: their biases, one after the other, or None.
        cuts: the number of equal parts of the bias, or the first indices of key and value.
    """
    biases = [None] * len(ROLES) if bias_O is None else np.split(bias_O, cuts)
    return {r: (w.T, b) for r, w, b in zip(ROLES, weights_OI, biases, strict=True)}


def concatenated(weights: Weights) -> tuple[Array, Array | None]:
    """Returns the projections side by side: weight (in, sum of out) and bias (sum of out).

    The bias is None if no role has one.

    Raises:
        InvalidContent: the inputs, the dtypes, or the outputs of key and value differ.
    """
    weights_IO = [weights[f"{role}.weight"] for role in ROLES]
    widths = {len(weight) for weight in weights_IO}
    if len(widths) > 1:
        raise InvalidContent(
            "query, key and value have no place in one matrix: got inputs of "
            f"{', '.join(str(len(w)) for w in weights_IO)} channels, expected equal ones"
        )
    key, value = weights_IO[1].shape[1], weights_IO[2].shape[1]
    if key != value:
        raise InvalidContent(
            f"key and value have no place in one matrix: got {key} and {value} outputs, expected "
            "equal ones"
        )
    dtypes = [weight.dtype.name for weight in weights_IO]
    if len(set(dtypes)) > 1:
        raise InvalidContent(
            f"query, key and value have no place in one matrix: got {', '.join(dtypes)}, expected "
            "equal dtypes"
        )
    weight_IO = np.concatenate(weights_IO, axis=1)
    if BIASES.isdisjoint(weights):
        return weight_IO, None
    return weight_IO, np.concatenate([bias_of(weights, role) for role in ROLES])


def fused_tensors(weights: Weights, name: str) -> dict[str, Array]:
    """Returns one nn.Linear for query, key and value, in this order.

    Raises:
        InvalidContent: as `concatenated`.
    """
    weight_IO, bias_O = concatenated(weights)
    tensors = {f"{name}.weight": weight_IO.T}
    return tensors if bias_O is None else tensors | {f"{name}.bias": bias_O}


def gate_problem(weights: Weights) -> str | None:
    """Returns the problem of a query projection that has a gate beside the query; None: it has not.

    Key and value heads are equally wide, so the output projection takes as many channels as the
    query has. Twice as many are a query and a gate of the output, as in Qwen3-Next.
    """
    query, key, value = (weights[f"{role}.weight"].shape[1] for role in ROLES)
    output = weights.get("output.weight")
    if output is None or key != value or query != 2 * len(output):
        return None
    return (
        f"a gate of the output is not supported: got {query} outputs of the query projection, "
        f"expected {len(output)} as the output projection takes"
    )


def linear_tensors(weights: Weights, **names: str) -> dict[str, Array]:
    """Returns the weight (out, in) and the bias of an nn.Linear for each projection.

    Args:
        weights: of the block; an absent projection has no tensors.
        names: the name of the nn.Linear of each projection.
    """
    tensors = {}
    for role, name in names.items():
        if f"{role}.weight" in weights:
            tensors[f"{name}.weight"] = weights[f"{role}.weight"].T
        if f"{role}.bias" in weights:
            tensors[f"{name}.bias"] = weights[f"{role}.bias"]
    return tensors
