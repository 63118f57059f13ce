"""Lists of numbers among the arguments of a client, as arrays.

A list may be an input, such as `key_lengths`, or a parameter, such as `window`. The catalogue has
the names and dtypes of the inputs, so a client reads it from the service before its first list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from qkv.client.arrays import is_array, is_list, list_to_raw, to_raw
from qkv.errors import pointer_to
from qkv.tensors import FLOATING
from qkv.wire.casting import cast_untyped

_EMBEDDINGS: Final = {"x": FLOATING, "grad_output": FLOATING}  # for a layer, and for gradients


def has_lists(arguments: Mapping[str, Any]) -> bool:
    """True if an argument is a list or another sequence of numbers."""
    return any(map(is_list, arguments.values()))


def input_dtypes(
    catalogue: Sequence[Mapping[str, Any]], choices: Sequence[str | Mapping[str, Any]]
) -> dict[str, Sequence[str]]:
    """Returns the dtypes that an input accepts, by its name, for the inputs of some variants.

    Args:
        catalogue: all variants.
        choices: those of the request, the most important one first.
    """
    known = {variant["variant"]: variant["inputs"] for variant in catalogue}
    dtypes: dict[str, Sequence[str]] = dict(_EMBEDDINGS)
    for choice in reversed(choices):
        name = choice if isinstance(choice, str) else choice.get("variant")
        inputs = known.get(name, {})  # of an unknown one: the service refuses it
        dtypes |= {name: spec["dtypes"] for name, spec in inputs.items()}
    return dtypes


def lists_to_arrays(
    arguments: Mapping[str, Any], dtypes: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Returns the arguments, with arrays in place of lists that are inputs.

    Floating inputs get the dtype of the first floating array among the arguments, else float32.

    Args:
        arguments: inputs and parameters by name.
        dtypes: those that each input accepts, by its name.

    Raises:
        InvalidContent: a list is ragged, or its values do not fit the input.
    """
    lists = [name for name, value in arguments.items() if name in dtypes and is_list(value)]
    dtype = _floating_dtype(arguments)
    arrays: dict[str, np.ndarray] = {}
    for name in lists:
        raw = list_to_raw(arguments[name], name)
        pointer = pointer_to("inputs", name)
        arrays[name] = cast_untyped(raw, name, dtypes[name], dtype, pointer).numpy()
    return {**arguments, **arrays}


def _floating_dtype(arguments: Mapping[str, Any]) -> str:
    known = (to_raw(x, n).dtype for n, x in arguments.items() if is_array(x))
    return next((dtype for dtype in known if dtype in FLOATING), "float32")
