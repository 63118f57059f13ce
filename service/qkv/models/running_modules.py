"""The modules of intercepted models that run in a thread, and the calls that they make."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from qkv.models.mixers import ModuleRun
from qkv.models.model_call import CallOutput, Handler, ModelCall, RunOriginal


class Interception:
    """The interception of one model.

    Attributes:
        names: the qualified names of the model's modules, by their `id`.
        calls: the number of attention calls that were handled or reported, in all threads.

    Args:
        handler: handles the calls.
        is_recorder: the handler returns what `run` returns.
    """

    def __init__(self, handler: Handler, *, is_recorder: bool) -> None:
        self.handler, self.is_recorder = handler, is_recorder
        self.names: dict[int, str] = {}
        self.calls = 0

    def name_of(self, module: nn.Module | None) -> str | None:
        """Returns the qualified name of a module of the model; None if it has none."""
        return None if module is None else self.names.get(id(module))


class _Thread(threading.local):
    """The state of one thread.

    Attributes:
        modules: the modules that run, the innermost last.
        mode: sees torch's functions in these modules; None while it is off.
        is_paused: a handler or the model's own attention runs: nothing is intercepted.
    """

    def __init__(self) -> None:
        self.modules: list[RunningModule] = []
        self.mode: TorchFunctionMode | None = None
        self.is_paused = False


_thread: Final = _Thread()


class RunningModule:
    """A context manager inside which a module runs.

    Attributes:
        name: its qualified name in the model.
        children: the modules that it has called so far.
        silent: runs of those in which no attention call was seen.

    Args:
        interception: of the model.
        name: of the module.
        mode: sees torch's functions; it is turned on if no module has done so.
    """

    def __init__(self, interception: Interception, name: str, mode: TorchFunctionMode) -> None:
        self.interception, self.name, self._mode = interception, name, mode
        self.children = 0
        self.silent: list[ModuleRun] = []
        self._turns_on = False

    @property
    def is_outermost(self) -> bool:
        """True if no module in this thread runs around it."""
        return _thread.modules[0] is self

    def __enter__(self) -> Self:
        if _thread.modules:
            _thread.modules[-1].children += 1
        _thread.modules.append(self)
        self._turns_on = _thread.mode is None and not _thread.is_paused
        if self._turns_on:
            self._mode.__enter__()
            _thread.mode = self._mode
        return self

    def __exit__(self, *_: object) -> None:
        if self._turns_on:
            _thread.mode = None
            self._mode.__exit__(None, None, None)
        _thread.modules.pop()
        if _thread.modules:
            _thread.modules[-1].silent += self.silent


@contextmanager
def without_mode() -> Iterator[None]:
    """Turns the mode off inside the block: torch's fast paths are off while a mode is on.

    Below a mode of somebody else it stays on: there the fast paths are off anyway.
    """
    mode = _thread.mode
    if mode is None or _get_current_function_mode() is not mode:
        yield
        return
    _thread.mode = None
    mode.__exit__(None, None, None)
    try:
        yield
    finally:
        mode.__enter__()
        _thread.mode = mode


def is_intercepted() -> bool:
    """True if this thread runs an intercepted model, outside of a handler."""
    return bool(_thread.modules) and not _thread.is_paused


def is_recomputed() -> bool:
    """True inside a backward pass: activation checkpointing repeats a call of the forward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def innermost_module() -> RunningModule:
    """Returns the innermost module that runs."""
    return _thread.modules[-1]


def has_only_recorders() -> bool:
    """True if no interception in this thread changes an output."""
    return all(interception.is_recorder for interception in _interceptions())


def dispatch(call: ModelCall, run: RunOriginal, module: nn.Module | None = None) -> CallOutput:
    """Sends a call through all interceptions of this thread.

    Args:
        call: the call; each handler gets it with the layer's name in its own model.
        run: runs the model's own attention.
        module: the module that makes the call; None: the innermost that runs.

    Returns:
        The output that the model goes on with.
    """
    for interception in _interceptions():
        interception.calls += 1
        layer = interception.name_of(module)
        if layer is None:
            layer = _innermost(interception).name
        run = functools.partial(interception.handler.handle, replace(call, layer=layer), run)
    with paused(), without_mode():  # a compiled function would be compiled again under the mode
        return run()


def report_miss(reason: str) -> None:
    """Reports a call of the innermost module that cannot be intercepted."""
    for interception in _interceptions():
        interception.calls += 1
        interception.handler.miss(_innermost(interception).name, reason)


@contextmanager
def paused() -> Iterator[None]:
    """Intercepts nothing inside the block."""
    before, _thread.is_paused = _thread.is_paused, True
    try:
        yield
    finally:
        _thread.is_paused = before


def _innermost(interception: Interception) -> RunningModule:
    return next(m for m in reversed(_thread.modules) if m.interception is interception)


def _interceptions() -> list[Interception]:
    """Returns the interceptions of this thread, that of the outermost handler last.

    Recorders are outermost, so that they see what the model goes on with. Of the others it is the
    one that began last: the wrappers of its modules are the outermost ones.
    """
    interceptions = list(dict.fromkeys(module.interception for module in reversed(_thread.modules)))
    return sorted(interceptions, key=lambda interception: interception.is_recorder)
