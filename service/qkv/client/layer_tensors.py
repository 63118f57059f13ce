"""Selects the tensors of a layer in the tensors of a model, such as a `state_dict()`.

The client and the commands send only what `is_needed` and `select` return.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from qkv.client.arrays import to_raw
from qkv.errors import InvalidContent, pointer_to
from qkv.tensors import FLOATING, RawTensor

MAX_TENSORS: Final = 256
"""The most tensors that are sent as those of a layer: a whole model without a prefix has more."""


def select(tensors: Mapping[str, Any], prefix: object, pointer: str = "") -> dict[str, RawTensor]:
    """Returns the floating tensors below a prefix.

    Args:
        tensors: arrays of numpy or torch, or lists of numbers, by name.
        prefix: of the layer's names; None or "": all names.
        pointer: JSON pointer to the object that has the tensors and the prefix.

    Raises:
        InvalidContent: no name has the prefix, a weight is not floating, or there are too many.
    """
    needed = [
        name
        for name in below(tensors, prefix, pointer)
        if is_needed(name, _dtype_of(tensors[name]), pointer)
    ]
    check_count(needed, prefix, pointer)
    return {name: to_raw(tensors[name], name) for name in needed}


def below(names: Iterable[str], prefix: object, pointer: str = "") -> list[str]:
    """Returns the names below a prefix.

    Raises:
        InvalidContent: there are names, and none has the prefix.
    """
    known = list(names)
    if not known or not prefix or not isinstance(prefix, str):
        return known  # the service rejects a prefix that is no string
    whole = prefix if prefix.endswith(".") else f"{prefix}."
    if selected := [name for name in known if name.startswith(whole)]:
        return selected
    raise InvalidContent(
        f"prefix fits no tensor: got {prefix!r:.200}, expected the beginning of "
        f"{known[0]!r:.200} or another",
        pointer=f"{pointer}/prefix",
    )


def is_needed(name: str, dtype: str, pointer: str = "") -> bool:
    """Returns True if a tensor is floating. Masks and counters of modules are not needed.

    Args:
        name: of the tensor.
        dtype: its name, also one that requests do not support.
        pointer: JSON pointer to the object that has the tensors.

    Raises:
        InvalidContent: a weight has another dtype, such as that of a quantized model.
    """
    if dtype in FLOATING:
        return True
    module = name.rpartition(".")[2]
    if module.endswith("weight") or module.startswith("W_"):
        raise InvalidContent(
            f"{name} has the wrong dtype: got {dtype}, expected {', '.join(FLOATING)}",
            pointer=f"{pointer}/tensors{pointer_to(name)}",
        )
    return False


def check_count(names: list[str], prefix: object, pointer: str = "") -> None:
    """Checks that the tensors may be those of one layer.

    Raises:
        InvalidContent: there are too many.
    """
    if len(names) <= MAX_TENSORS:
        return
    state = "is too short" if prefix else "is missing"
    raise InvalidContent(
        f"prefix {state}: got {len(names)} tensors such as {names[0]!r:.200}, expected one that "
        f"selects at most {MAX_TENSORS}, those of one layer",
        pointer=f"{pointer}/prefix",
    )


def _dtype_of(array: Any) -> str:
    """Returns the name of an array's dtype; that of a supported one if it has no dtype."""
    dtype = getattr(array, "dtype", None)
    if dtype is None:
        return FLOATING[0]  # `to_raw` judges it
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")
