"""Finds windows that the tokens of a run do not cross, by runs of the model with smaller ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from transformers import PretrainedConfig, PreTrainedModel

from qkv.errors import InvalidContent
from qkv.jobs.loaded.config_fields import HARMLESS
from qkv.models.describe.attention_run import run_attention
from qkv.models.describe.drawn_model import draw, read_config
from qkv.models.describe.layer_fields import reach_of
from qkv.models.describe.model_run import Arguments, run_model
from qkv.models.describe.rotary_angles import Unfit

_SMALL: Final = (8, 16)  # windows that a run crosses
_WINDOWS: Final = re.compile(r".*(window|chunk|local|block|span|segment|sparse|stride|bucket).*")
_SPARSE: Final = re.compile(r".*(sparse|index_(topk|block|head|n_head)|top_?k_block).*")

_Reach = tuple[int | None, int | None]


class Windows:
    """The windows of layers, from runs of the same model with smaller ones.

    Args:
        config: of the model.
        model: with the real windows.
        received: by its attention modules, by path.
        length: of its sequences of tokens.

    Attributes:
        is_crossed: every field that may be a window was set to smaller numbers, and no other one
            says that queries choose their keys.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        model: PreTrainedModel,
        received: Mapping[str, Arguments],
        length: int,
    ) -> None:
        document = config.to_dict()
        # which keys a query sees may depend on their numbers, once there are more than some
        fields = [(path, value) for path, value in leaves_of(document) if value]
        self.is_crossed = not any(_SPARSE.fullmatch(name) for path, _ in fields for name in path)
        self._small: list[tuple[int, list[dict[str, _Reach]]]] = []
        for path, value in fields:
            if (
                type(value) is not int
                or value < length
                or not _WINDOWS.fullmatch(path[-1])
                or HARMLESS.fullmatch(path[-1])
            ):
                continue
            try:
                models = [draw(read_config(_changed(document, path, n))) for n in _SMALL]
            except InvalidContent:
                self.is_crossed = False
                continue
            reaches = [_reaches(small, run_model(small, received, length)) for small in models]
            self._small.append((value, reaches))
        self._real = _reaches(model, received) if self._small else {}

    def of(self, path: str) -> dict[str, Any]:
        """Returns the field of a layer's window, if the run with the real ones does not show it.

        Raises:
            Unfit: it is no window.
        """
        found: dict[str, Any] = {}
        for value, small in self._small:
            if any(path not in each for each in (self._real, *small)):
                raise Unfit("no run with smaller windows")
            first, second = (each[path] for each in small)
            if first == second == self._real[path]:
                continue
            reach = [_extended(*ends, value) for ends in zip(first, second, strict=True)]
            if None in reach or found:
                raise Unfit("a window of one side, or several windows")
            found = {"window": reach}
        return found


def _reaches(model: PreTrainedModel, received: Mapping[str, Arguments]) -> dict[str, _Reach]:
    """Returns what queries see, by the path of each module where it can be said."""
    reaches = {}
    for path, arguments in received.items():
        try:
            run = run_attention(model.get_submodule(path), arguments, ())
            reaches[path] = reach_of(run.call)
        except Unfit:
            continue
    return reaches


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


def leaves_of(document: Mapping[str, Any], *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the path and the value of each field of a configuration, parts included."""
    for name, value in document.items():
        if isinstance(value, dict):
            yield from leaves_of(value, *path, str(name))
        else:
            yield (*path, str(name)), value


def _changed(document: Mapping[str, Any], path: Sequence[str], value: int) -> dict[str, Any]:
    """Returns a configuration with another value at a path."""
    first, *rest = path
    inner = _changed(document[first], rest, value) if rest else value
    return {**document, first: inner}
