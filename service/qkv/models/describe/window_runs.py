"""Finds windows that the tokens of a run do not cross, by runs of the model with smaller ones."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from transformers import PretrainedConfig

from qkv.errors import InvalidContent
from qkv.jobs.loaded.config_fields import HARMLESS
from qkv.models.describe.drawn_model import draw, read_config
from qkv.models.describe.layer_fields import window_of
from qkv.models.describe.layer_record import LayerRecord, record
from qkv.models.describe.rotary_angles import Unfit

_SMALL: Final = (8, 16)  # windows that a run crosses
_WINDOWS: Final = re.compile(r".*(window|chunk|local|block|span|segment|sparse|stride|bucket).*")
_SPARSE: Final = re.compile(r".*(sparse|index_(topk|block|head|n_head)|top_?k_block).*")


class Windows:
    """The windows of layers, from runs of the same model with smaller ones.

    Args:
        config: of the model.
        names: as of `record`.
        near: the run with the real windows.
        length: of its sequences of tokens.

    Attributes:
        is_crossed: every field that may be a window was set to smaller numbers, and no other one
            says that queries choose their keys.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        names: Mapping[str, Collection[str]],
        near: Mapping[str, LayerRecord],
        length: int,
    ) -> None:
        document = config.to_dict()
        # which keys a query sees may depend on their numbers, once there are more than some
        self.is_crossed = not any(_SPARSE.fullmatch(name) for name in _names_in(document))
        self._near = near
        self._runs: list[tuple[int, list[dict[str, LayerRecord]]]] = []
        for path, name, value in integers_in(document):
            if value < length or not _WINDOWS.fullmatch(name) or HARMLESS.fullmatch(name):
                continue
            try:
                small = [
                    record(draw(read_config(_changed(document, path, size))), names, length)
                    for size in _SMALL
                ]
            except InvalidContent:
                self.is_crossed = False
                continue
            self._runs.append((value, small))

    def of(self, path: str) -> dict[str, Any]:
        """Returns the field of a layer's window, if the run with the real ones does not show it.

        Raises:
            Unfit: it is no window.
        """
        found: dict[str, Any] = {}
        real = _reach(self._near, path)
        for value, (first, second) in self._runs:
            a, b = _reach(first, path), _reach(second, path)
            if a == b == real:
                continue
            reach = [_extended(*ends, value) for ends in zip(a, b, strict=True)]
            if None in reach or found:
                raise Unfit("a window of one side, or several windows")
            found = {"window": reach}
        return found


def _reach(records: Mapping[str, LayerRecord], path: str) -> tuple[int | None, int | None]:
    if path not in records or (call := records[path].call) is None:
        raise Unfit("no run with smaller windows")
    return window_of(call)


def _extended(first: int | None, second: int | None, value: int) -> int | None:
    """Returns the end of a window of this size, from those of two smaller ones.

    Raises:
        Unfit: it does not grow with the size.
    """
    if first == second:
        return first
    a, b = _SMALL
    if first is None or second is None or second - first not in (b - a, (b - a) // 2):
        raise Unfit("a window that does not grow with its field in config.json")
    return first + (value - a) * (second - first) // (b - a)


def integers_in(value: Any, *path: str) -> Iterator[tuple[tuple[str, ...], str, int]]:
    """Yields path, name and value of each integer in a configuration."""
    for name, each in value.items():
        if isinstance(each, dict):
            yield from integers_in(each, *path, name)
        elif type(each) is int:
            yield (*path, name), str(name), each


def _names_in(value: Any) -> Iterator[str]:
    """Yields the names of the fields of a configuration that say something."""
    for name, each in value.items():
        if isinstance(each, dict):
            yield from _names_in(each)
        if each:
            yield str(name)


def _changed(document: Mapping[str, Any], path: Sequence[str], value: int) -> dict[str, Any]:
    changed = copy.deepcopy(dict(document))
    inner = changed
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return changed
