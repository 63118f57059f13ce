"""Converts arrays of numpy, torch and other libraries to raw tensors, and back.

`request_builders` uses `to_raw` for inputs and `from_raw_like` for outputs. A list of numbers may
be an input, such as `key_lengths`, or a parameter, such as `window`. The catalogue has the names
and dtypes of the inputs, so a client reads it from the service before its first list.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from qkv.errors import InvalidContent, pointer_to
from qkv.tensors import DTYPES, FLOATING, RawTensor
from qkv.wire.casting import cast_untyped

FromRaw = Callable[[RawTensor], Any]
"""Converts a raw tensor to an array of the same kind as the inputs."""
_EMBEDDINGS: Final = {"x": FLOATING, "grad_output": FLOATING}  # for a layer, and for gradients


def is_array(value: object) -> bool:
    """True if the value is an array of numpy or torch, or converts to one."""
    if isinstance(value, np.generic):  # one number, such as 1 / np.sqrt(8)
        return False
    return hasattr(value, "__array__") or hasattr(value, "__dlpack__")


def is_list(value: object) -> bool:
    """True if the value is a list, a tuple or another sequence, which numpy makes an array of."""
    if is_array(value) or isinstance(value, str | bytes | bytearray):
        return False
    return isinstance(value, Sequence)


def list_to_raw(value: Sequence[Any], name: str) -> RawTensor:
    """Returns the array that numpy makes of a list, as numbers without a dtype.

    Args:
        value: nested lists or tuples of numbers or of booleans.
        name: its name in error messages.

    Raises:
        InvalidContent: lists have different lengths, or values are no numbers; or an array in them
            has no numbers, or masks some.
    """
    try:
        array = np.asarray(_plain(value, name))
    except ValueError:
        raise InvalidContent(
            f"{name} is ragged: got {value!r:.60}, expected lists of equal lengths"
        ) from None
    if array.dtype.kind not in "biuf":
        raise InvalidContent(
            f"{name} is invalid: got {value!r:.60}, expected nested lists of numbers, or of "
            "booleans"
        )
    exact = {"b": "bool", "i": "int64"}.get(array.dtype.kind, "float64")  # u: above int64
    return RawTensor.from_numpy(array.astype(DTYPES[exact]), is_untyped=True)


def to_raw(array: Any, name: str = "the tensor") -> RawTensor:
    """Returns an array as a raw tensor. Copies it only from another device or if not contiguous.

    Numbers in lists are float32.

    Args:
        array: of numpy, torch or another library, or nested lists.
        name: its name in error messages.

    Raises:
        InvalidContent: requests do not support its dtype; or the array has no numbers, such as one
            on the device meta, is not dense, or masks some of its numbers.
    """
    if is_list(array):
        raw = list_to_raw(array, name)
        dtypes = (*FLOATING, "bool") if raw.dtype == "bool" else FLOATING
        return cast_untyped(raw, name, dtypes, "float32", pointer_to("tensors", name))
    return RawTensor.from_numpy(_as_numpy(array, name), name)


def from_raw_like(array: Any) -> FromRaw:
    """Returns a function that converts to torch, on the array's device, or to numpy."""
    if not _is_torch(array):
        return lambda raw: raw.numpy().copy()
    torch, device = sys.modules["torch"], array.device

    def from_raw(raw: RawTensor) -> Any:
        if raw.dtype == "bfloat16":
            bits = np.frombuffer(raw.data, np.int16).reshape(raw.shape).copy()
            return torch.from_numpy(bits).view(torch.bfloat16).to(device)
        return torch.from_numpy(raw.numpy().copy()).to(device)

    return from_raw


def _as_numpy(array: Any, name: str) -> np.ndarray:
    """Returns an array of any library as one of numpy; bfloat16 is that of ml_dtypes."""
    try:
        if _is_torch(array):
            found = _torch_to_numpy(array)
        elif hasattr(array, "__array__"):
            found = np.asanyarray(array)  # keeps the mask of a masked array
        else:
            found = np.from_dlpack(array)
    except Exception as error:  # each library has its own
        raise InvalidContent(
            f"{name} has no numbers that can be sent: got {_describe(array)} "
            f"({str(error).partition(chr(10))[0]:.200}), expected a dense array of "
            f"{', '.join(DTYPES)}"
        ) from error
    if np.ma.is_masked(found):
        masked = int(np.ma.getmaskarray(found).sum())
        raise InvalidContent(
            f"{name} is a masked array: got {masked} masked numbers, expected none"
        )
    return np.asarray(found)


def _torch_to_numpy(array: Any) -> np.ndarray:
    torch = sys.modules["torch"]
    if array.dtype != torch.bfloat16:
        return array.numpy(force=True)  # type: ignore[no-any-return]
    bits = array.detach().cpu().resolve_neg().view(torch.int16).numpy()
    return bits.view(DTYPES["bfloat16"])  # type: ignore[no-any-return]


def _describe(array: Any) -> str:
    """Returns the type of an array; of torch's also dtype, layout and device."""
    kind = type(array).__name__
    if not _is_torch(array):
        return kind
    dtype, layout = (str(x).removeprefix("torch.") for x in (array.dtype, array.layout))
    return f"a {kind} of {dtype}, {layout}, on {array.device}"


def _plain(value: Any, name: str) -> Any:
    """Returns nested lists and tuples with every array in them as one of numpy."""
    if isinstance(value, list | tuple):
        return [_plain(x, name) for x in value]
    if isinstance(value, int | float) or not is_array(value):
        return value
    array = _as_numpy(value, name)
    # numpy joins bfloat16 with no other dtype; float32 has all its numbers
    return array.astype(np.float32) if array.dtype == DTYPES["bfloat16"] else array


def _is_torch(array: object) -> bool:
    """True if the value is a torch tensor. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


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
