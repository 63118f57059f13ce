"""Files of captured calls: .safetensors, with the facts about each call in the metadata.

docs/models.md describes the format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from uuid import uuid4

from safetensors import SafetensorError, safe_open
from torch import Tensor

from qkv.client.arrays import to_raw
from qkv.errors import InvalidContent
from qkv.models.attention_call import AttentionCall
from qkv.models.call_checks import check_call, check_list, check_missed
from qkv.models.masks import Part, parts_of
from qkv.wire.safetensors import DTYPES

if TYPE_CHECKING:
    from qkv.models.calls import Missed

__all__ = ["load_file", "save_file"]

_SUFFIX: Final = ".safetensors"
_CALLS: Final = "qkv_calls"
_MISSED: Final = "qkv_missed"
_CODES: Final = {f"torch.{dtype}": code for code, dtype in DTYPES.items()}

SavedPart: TypeAlias = tuple[AttentionCall, Part]
"""A part of a call, which becomes one call of the file."""


def save_file(
    path: str | os.PathLike[str], calls: Sequence[AttentionCall], missed: Sequence[Missed]
) -> None:
    """Writes calls to a file, one tensor at a time; the arguments are those of `Calls.save`."""
    target = Path(path)
    if target.suffix != _SUFFIX:
        raise InvalidContent(f"{target} has the wrong suffix: expected {_SUFFIX}")
    saved = [(call, part) for call in calls for part in parts_of(call)]
    metadata = {_CALLS: json.dumps([_fields(*each) for each in saved])}
    if missed:
        metadata[_MISSED] = json.dumps([list(each) for each in missed])
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
) -> tuple[list[AttentionCall], list[tuple[str, str]]]:
    """Reads the calls of a file, and the layers that were not captured.

    Raises:
        InvalidContent: the file is damaged, or no file of calls.
        OSError: the file cannot be read.
    """
    Path(path).open("rb").close()  # raises an error that names the file
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if _CALLS not in metadata:
                raise InvalidContent(f"{path} has no calls: expected a file of Calls.save")
            names = set(file.keys())
            where = f"{path} is no file of calls"
            calls = check_list(where, _CALLS, json.loads(metadata[_CALLS]))
            missed = json.loads(metadata.get(_MISSED, "[]"))
            check_missed(where, missed)
            return [
                _call(index, fields, file, names, where) for index, fields in enumerate(calls)
            ], [(layer, reason) for layer, reason in missed]
    except RecursionError:
        raise InvalidContent(f"{path} is no file of calls: its JSON is nested too deeply") from None
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise InvalidContent(f"{path} is no file of calls: {error}") from None


def _fields(call: AttentionCall, part: Part) -> dict[str, Any]:
    """Returns the facts about a call that its tensors do not show."""
    return {
        "layer": call.layer,
        "causal": part.causal,
        "query_offset": part.query_offset,
        "window": None if part.window is None else list(part.window),
        "scale": call.scale,
        "softcap": call.softcap,
        "heads": list(call.heads),
        "items": [call.items[item] for item in part.items],
        "dropout": call.dropout,
        "is_self": call.is_self,
    }


def _tensors(saved: Sequence[SavedPart]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of the file by name, without padding.

    Those with the widest numbers come first, so that each is aligned to its numbers.
    """
    found: dict[str, tuple[Tensor, Part | None, Tensor | None]] = {}
    for n, (call, part) in enumerate(saved):
        found[f"calls.{n}.query"] = call.query, part, part.queries
        found[f"calls.{n}.key"] = call.key, part, part.keys
        found[f"calls.{n}.value"] = call.value, part, part.keys
        found[f"calls.{n}.output"] = call.output, part, part.queries
        for name, x in (("mask", part.mask), ("sinks", call.sinks)):
            if x is not None:
                found[f"calls.{n}.{name}"] = x, None, None
    for name, (x, own, positions) in sorted(
        found.items(), key=lambda each: -each[1][0].element_size()
    ):
        yield name, x if own is None else own.select(x, positions)


def _call(index: int, fields: Any, file: Any, names: set[str], where: str) -> AttentionCall:
    """Returns a call of an open file."""
    tensors = {
        name: file.get_tensor(f"calls.{index}.{name}")
        for name in ("query", "key", "value", "output")
    }
    for name in ("mask", "sinks"):
        full = f"calls.{index}.{name}"
        tensors[name] = file.get_tensor(full) if full in names else None
    check_call(f"{where}: call {index}", fields, tensors)
    window = fields["window"]
    return AttentionCall(
        index=index,
        layer=fields["layer"],
        **tensors,
        causal=fields["causal"],
        query_offset=fields["query_offset"],
        scale=fields["scale"],
        softcap=fields["softcap"],
        window=None if window is None else (window[0], window[1]),
        heads=tuple(fields["heads"]),
        items=tuple(fields["items"]),
        dropout=fields["dropout"],
        is_self=fields.get("is_self"),  # absent in older files
    )
