"""Files of captured calls: .safetensors, with the facts about each call in the metadata.

docs/models.md describes the format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, TypeVar
from uuid import uuid4

import pydantic
from pydantic_core import PydanticCustomError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qkv.client.arrays import to_raw
from qkv.client.tokens import Tokens, choose_tokens
from qkv.errors import InvalidContent, format_value
from qkv.jobs.fields import field_error
from qkv.models.attention_call import AttentionCall
from qkv.models.masks import Part, parts_of
from qkv.models.model_call import Missed
from qkv.wire.safetensors import DTYPES

SavedPart: TypeAlias = tuple[AttentionCall, Part]
"""A part of a call, which becomes one call of a file."""
_SUFFIX: Final = ".safetensors"
_CALLS: Final = "qkv_calls"
_MISSED: Final = "qkv_missed"
_TOKENS: Final = "qkv_tokens"
_CODES: Final = {f"torch.{dtype}": code for code, dtype in DTYPES.items()}
_FLOATS: Final = ("float64", "float32", "float16", "bfloat16")
_AXES: Final = {"query": "BHLD", "key": "BGSD", "value": "BGSE", "output": "BHLE"}


def _check_different(numbers: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(numbers)) < len(numbers):
        raise PydanticCustomError("numbers", "expected different numbers")
    return numbers


_Count = Annotated[int, pydantic.Field(ge=0)]
_Numbers = Annotated[tuple[_Count, ...], pydantic.AfterValidator(_check_different)]
_MISSED_LIST: Final = pydantic.TypeAdapter(list[Missed])
_TOKENS_BY_ITEM: Final = pydantic.TypeAdapter(dict[_Count, list[str]])
_T = TypeVar("_T")


class CallFacts(pydantic.BaseModel):
    """The facts about a call that its tensors do not show, as `AttentionCall` has them."""

    model_config = pydantic.ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    layer: str
    causal: bool
    query_offset: Annotated[int, pydantic.Field(ge=-(2**31), lt=2**31)]
    window: tuple[_Count | None, _Count | None] | None
    scale: float
    softcap: Annotated[float, pydantic.Field(gt=0)] | None
    heads: _Numbers
    items: _Numbers
    dropout: Annotated[float, pydantic.Field(ge=0, lt=1)]
    is_self: bool | None = None  # absent in older files


def save_file(
    path: str | os.PathLike[str],
    calls: Sequence[AttentionCall],
    missed: Sequence[Missed],
    tokens: Tokens | Mapping[int, Sequence[str]],
) -> None:
    """Writes calls to a file, one tensor at a time; the arguments are those of `Calls.save`."""
    target = Path(path)
    if target.suffix != _SUFFIX:
        raise InvalidContent(f"{target} has the wrong suffix: expected {_SUFFIX}")
    saved = [(call, part) for call in calls for part in parts_of(call)]
    metadata = {_CALLS: json.dumps([_facts(*each) for each in saved])}
    if missed:
        metadata[_MISSED] = json.dumps(missed)
    if tokens:
        metadata[_TOKENS] = json.dumps(_cut_tokens(saved, tokens))
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, x in _tensors(saved):
        if (code := _CODES.get(str(x.dtype))) is None:
            raise InvalidContent(f"{name} has the dtype {x.dtype}: expected {', '.join(_CODES)}")
        header[name] = {
            "dtype": code,
            "shape": list(x.shape),
            "data_offsets": [end, end + x.nbytes],
        }
        end += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the first tensor is aligned, as the format asks for
    unfinished = target.with_name(f"{target.name}.{uuid4().hex}.part")  # threads may save at once
    try:
        with unfinished.open("xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, x in _tensors(saved):
                file.write(to_raw(x, name).data)
        unfinished.replace(target)
    except OSError as error:  # names the path of the caller, not the unfinished file
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    finally:
        with suppress(OSError):  # such as a folder that is a file
            unfinished.unlink()


def load_file(
    path: str | os.PathLike[str],
) -> tuple[list[AttentionCall], list[Missed], dict[int, list[str]]]:
    """Reads the calls of a file, the layers that were not captured, and the tokens.

    Raises:
        InvalidContent: the file is damaged, or no file of calls.
        OSError: the file cannot be read.
    """
    Path(path).open("rb").close()  # raises an error that names the file
    where = f"{path} is no file of calls"
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if _CALLS not in metadata:
                raise InvalidContent(f"{path} has no calls: expected a file of Calls.save")
            calls = parse_calls(where, metadata[_CALLS])
            missed = _parse(where, _MISSED, metadata.get(_MISSED, "[]"), _MISSED_LIST)
            tokens = _parse(where, _TOKENS, metadata.get(_TOKENS, "{}"), _TOKENS_BY_ITEM)
            names = set(file.keys())
            loaded = [_call(index, facts, file, names, where) for index, facts in enumerate(calls)]
            return loaded, missed, tokens
    except SafetensorError as error:
        raise InvalidContent(f"{where}: {error}") from None


def _facts(call: AttentionCall, part: Part) -> dict[str, Any]:
    """Returns the facts about a call without padding, as `CallFacts` has them."""
    return {name: getattr(call, name) for name in CallFacts.model_fields} | {
        "causal": part.causal,
        "query_offset": part.query_offset,
        "window": part.window,
        "items": [call.items[item] for item in part.items],
    }


def _tensors(saved: Sequence[SavedPart]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of the file by name, without padding.

    Those with the widest numbers come first, so that each is aligned to its numbers.
    """
    tensors: dict[str, tuple[Tensor, Part | None, Tensor | None]] = {}
    for n, (call, part) in enumerate(saved):
        tensors[f"calls.{n}.query"] = call.query, part, part.queries
        tensors[f"calls.{n}.key"] = call.key, part, part.keys
        tensors[f"calls.{n}.value"] = call.value, part, part.keys
        tensors[f"calls.{n}.output"] = call.output, part, part.queries
        for name, x in (("mask", part.mask), ("sinks", call.sinks)):
            if x is not None:
                tensors[f"calls.{n}.{name}"] = x, None, None
    for name, (x, cut, positions) in sorted(
        tensors.items(), key=lambda each: -each[1][0].element_size()
    ):
        yield name, x if cut is None else cut.select(x, positions)


def _cut_tokens(
    parts: Sequence[SavedPart], tokens: Tokens | Mapping[int, Sequence[str]]
) -> dict[int, list[str]]:
    """Returns the tokens of each sequence without its padding, by its number in the model's batch.

    Args:
        parts: of the calls, each a group of sequences with the same padding.
        tokens: as for `Calls.save`, or those of each sequence by its number.

    Raises:
        ValueError: a sequence has no tokens, or as many as no call has keys.
    """
    count = 1 + max((item for call, _ in parts for item in call.items), default=0)
    kept_tokens: dict[int, list[str]] = {}
    lengths: dict[int, list[int]] = {}
    for call, part in parts:
        S = call.key.shape[2]
        for place in part.items:
            item = call.items[place]
            if item in kept_tokens:
                continue
            listed = _of_item(tokens, item, count)
            if len(listed) == S:
                keys = range(S) if part.keys is None else part.keys.tolist()
                kept_tokens[item] = [listed[key] for key in keys]
            lengths.setdefault(item, []).append(S)
    for item in lengths.keys() - kept_tokens.keys():
        expected = " or ".join(map(str, dict.fromkeys(lengths[item])))
        raise ValueError(
            f"tokens of sequence {item} have the wrong length: got "
            f"{len(_of_item(tokens, item, count))}, expected {expected}, with padding"
        )
    return kept_tokens


def _of_item(tokens: Tokens | Mapping[int, Sequence[str]], item: int, count: int) -> Sequence[str]:
    if isinstance(tokens, Mapping):
        return tokens.get(item, ())
    return choose_tokens("tokens", tokens, item, count) or ()


def _call(index: int, facts: CallFacts, file: Any, names: set[str], where: str) -> AttentionCall:
    """Returns a call of an open file."""
    tensors: dict[str, Any] = {}
    for name in ("query", "key", "value", "output", "mask", "sinks"):
        full = f"calls.{index}.{name}"
        tensors[name] = file.get_tensor(full) if full in names else None
    check_tensors(f"{where}: call {index}, {format_value(facts.layer)}", facts, tensors)
    return AttentionCall(index=index, **tensors, **dict(facts))


def parse_calls(where: str, text: str) -> list[CallFacts]:
    """Parses the metadata `qkv_calls` of a file.

    Args:
        where: names the file; it begins each error.
        text: JSON.

    Raises:
        InvalidContent: a fact is missing or wrong.
    """
    return _parse(where, _CALLS, text, pydantic.TypeAdapter(list[CallFacts]))


def _parse(where: str, key: str, text: str, expected: pydantic.TypeAdapter[_T]) -> _T:
    try:
        return expected.validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        invalid = field_error(error, (), key, nested=CallFacts.model_fields)
        raise InvalidContent(f"{where}: {invalid.detail}") from None


def check_tensors(where: str, facts: CallFacts, tensors: Mapping[str, Tensor | None]) -> None:
    """Checks the tensors of a call, but not the numbers in them.

    Args:
        where: names the file and the call; it begins each error.
        facts: about the call.
        tensors: query, key, value and output; mask and sinks may be None.

    Raises:
        InvalidContent: a tensor is missing or wrong.
    """
    sizes = _sizes(where, tensors)
    for name, numbers, size, noun in (
        ("heads", facts.heads, sizes["H"], "query heads"),
        ("items", facts.items, sizes["B"], "sequences"),
    ):
        if len(numbers) != size:
            raise _error(
                where, name, f"{len(numbers)} numbers", f"one for each of the {size} {noun}"
            )
    _check_mask(where, tensors.get("mask"), sizes)
    if (sinks := tensors.get("sinks")) is not None:
        _check_dtype(where, "sinks", sinks, _FLOATS)
        if list(sinks.shape) != [sizes["H"]]:
            raise _error(where, "sinks", f"the shape {list(sinks.shape)}", f"{[sizes['H']]}")


def _sizes(where: str, tensors: Mapping[str, Tensor | None]) -> dict[str, int]:
    """Returns the size of each axis by its letter; the four tensors must agree on it."""
    sizes: dict[str, int] = {}
    dtype = None
    for name, axes in _AXES.items():
        if (x := tensors.get(name)) is None:
            raise InvalidContent(f"{where}: {name} is missing: expected ({','.join(axes)})")
        _check_dtype(where, name, x, _FLOATS if dtype is None else (dtype,))
        dtype = str(x.dtype).removeprefix("torch.")
        got = f"the shape {list(x.shape)}"
        if x.ndim != 4 or 0 in x.shape:
            raise _error(where, name, got, f"({','.join(axes)}) without an axis of size 0")
        for axis, size in zip(axes, x.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                known = ", ".join(f"{a}={sizes[a]}" for a in axes if a in sizes)
                raise _error(where, name, got, f"({','.join(axes)}) with {known}")
    if sizes["H"] % sizes["G"]:
        raise _error(
            where, "key", f"{sizes['G']} heads", f"a divisor of the {sizes['H']} query heads"
        )
    return sizes


def _check_mask(where: str, mask: Tensor | None, sizes: Mapping[str, int]) -> None:
    """Checks that a mask has a dtype of masks and broadcasts to (B,H,L,S)."""
    if mask is None:
        return
    _check_dtype(where, "mask", mask, ("bool", *_FLOATS))
    whole = [sizes[axis] for axis in "BHLS"]
    if mask.ndim != 4 or any(n not in (1, m) for n, m in zip(mask.shape, whole, strict=True)):
        expected = f"four axes that broadcast to {whole}"
        raise _error(where, "mask", f"the shape {list(mask.shape)}", expected)


def _check_dtype(where: str, name: str, x: Tensor, expected: tuple[str, ...]) -> None:
    if (dtype := str(x.dtype).removeprefix("torch.")) not in expected:
        raise _error(where, name, dtype, " or ".join(expected))


def _error(where: str, name: str, got: str, expected: str) -> InvalidContent:
    return InvalidContent(f"{where}: {name} is invalid: got {got}, expected {expected}")
