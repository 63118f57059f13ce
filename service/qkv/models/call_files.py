"""Files of captured calls: .safetensors, with the facts about each call in the metadata.

docs/models.md describes the format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias
from uuid import uuid4

from safetensors import SafetensorError, safe_open
from torch import Tensor

from qkv.client.arrays import to_raw
from qkv.client.figures.tokens import Tokens
from qkv.errors import InvalidContent, format_value
from qkv.models.attention_call import AttentionCall
from qkv.models.call_checks import (
    CallFacts,
    check_tensors,
    parse_calls,
    parse_missed,
    parse_tokens,
)
from qkv.models.call_tokens import cut_tokens
from qkv.models.masks import Part, parts_of
from qkv.models.model_call import Missed
from qkv.wire.safetensors import DTYPES

__all__ = ["load_file", "save_file"]

_SUFFIX: Final = ".safetensors"
_CALLS: Final = "qkv_calls"
_MISSED: Final = "qkv_missed"
_TOKENS: Final = "qkv_tokens"
_CODES: Final = {f"torch.{dtype}": code for code, dtype in DTYPES.items()}

SavedPart: TypeAlias = tuple[AttentionCall, Part]
"""A part of a call, which becomes one call of the file."""


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
        metadata[_TOKENS] = json.dumps(cut_tokens(saved, tokens))
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
            for _, x in _tensors(saved):
                file.write(to_raw(x).data)
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
            missed = parse_missed(where, metadata.get(_MISSED, "[]"))
            tokens = parse_tokens(where, metadata.get(_TOKENS, "{}"))
            names = set(file.keys())
            loaded = [_call(index, facts, file, names, where) for index, facts in enumerate(calls)]
            return loaded, missed, tokens
    except SafetensorError as error:
        raise InvalidContent(f"{where}: {error}") from None


def _facts(call: AttentionCall, part: Part) -> dict[str, Any]:
    """Returns the facts about a call, as `CallFacts` has them."""
    return {
        "layer": call.layer,
        "causal": part.causal,
        "query_offset": part.query_offset,
        "window": part.window,
        "scale": call.scale,
        "softcap": call.softcap,
        "heads": call.heads,
        "items": [call.items[item] for item in part.items],
        "dropout": call.dropout,
        "is_self": call.is_self,
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


def _call(index: int, facts: CallFacts, file: Any, names: set[str], where: str) -> AttentionCall:
    """Returns a call of an open file."""
    tensors: dict[str, Any] = {}
    for name in ("query", "key", "value", "output", "mask", "sinks"):
        full = f"calls.{index}.{name}"
        tensors[name] = file.get_tensor(full) if full in names else None
    check_tensors(f"{where}: call {index}, {format_value(facts.layer)}", facts, tensors)
    return AttentionCall(index=index, **tensors, **dict(facts))
