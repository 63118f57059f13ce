"""Intercepts the attention calls of a model, in every thread that runs it."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final, Self

import torch
from torch import nn

from qkv.models import sdpa_calls, torch_modules, transformers_calls
from qkv.models.mixers import ModuleRun
from qkv.models.model_call import Handler
from qkv.models.running_modules import (
    Interception,
    RunningModule,
    is_intercepted,
    is_recomputed,
    paused,
    without_mode,
)
from qkv.models.selection import is_selected

_COMPILED: Final = "a compiled graph runs without Python: use the model before torch.compile"
_WITHOUT_CALLS: Final = "it ran without an attention call that qkv can see"
_MIXES: Final = (
    "mixes positions without an attention call that qkv can see: it computes attention in code of "
    "its own, or has no softmax"
)
_ABSENT: Final = object()
_ENTRIES: Final = "forward", "_compiled_call_impl"
"""Attributes of a module that its call runs."""
_lock: Final = threading.RLock()


class Interceptor(Interception):
    """A context manager that sends each attention call of a model to a handler.

    It replaces `forward` of each module by a wrapper that notes that the module runs. It uses no
    hooks, because torch's fast paths are off for modules with hooks.

    Args:
        model: any torch model.
        handler: handles the calls, in the thread that runs the model.
        is_recorder: the handler returns what `run` returns. Recorders keep torch's fast paths, and
            see the outputs of all other interceptors.
    """

    def __init__(self, model: nn.Module, handler: Handler, *, is_recorder: bool) -> None:
        super().__init__(handler, is_recorder=is_recorder)
        self.is_active = False
        self._model = model
        self._modules: list[nn.Module] = []
        self._closed: list[str] = []
        self.has_run = False

    def __enter__(self) -> Self:
        with _lock:
            self.is_active = True
            transformers_calls.attach()
            try:
                for name, module in _modules_of(self._model):
                    self.names[id(module)] = name
                    self._modules.append(module)
                    self._intercept(name, module)
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, error: object = None, *_: object) -> None:
        if error is None and self.is_recorder and self.has_run and not self.calls:
            self.handler.miss("", _WITHOUT_CALLS)
        with _lock:
            self.is_active = False
            for module in self._modules:
                _remove_wrappers(module)
            self._modules.clear()
            transformers_calls.detach()

    def _intercept(self, name: str, module: nn.Module) -> None:
        """Puts wrappers on a module; reports it if calls inside it cannot be seen."""
        if not (reason := _why_closed(module)):
            module.__dict__["forward"] = _Wrapper(self, name, module, "forward", is_closed=False)
            return
        self.calls += 1
        self._closed.append(name)
        self.handler.miss(name, reason)
        for attribute in _ENTRIES:
            if callable(module.__dict__.get(attribute)):
                wrapper = _Wrapper(self, name, module, attribute, is_closed=True)
                module.__dict__[attribute] = wrapper

    def has_closed(self, name: str) -> bool:
        """True if calls in a module, or in a part of it, cannot be seen, and are reported."""
        return any(not name or is_selected(closed, name) for closed in self._closed)

    def report_mixer(self, name: str, kind: str) -> None:
        """Reports a module of this type that mixes positions."""
        self.calls += 1
        if self.is_active:
            self.handler.miss(name, f"{kind} {_MIXES}")

    def report_graph(self, name: str) -> None:
        """Reports a module of a compiled graph, but none inside a reported one."""
        self.calls += 1
        if self.is_active and not any(not c or is_selected(name, c) for c in self._closed):
            self._closed.append(name)
            self.handler.miss(name, _COMPILED)


class _Wrapper:
    """The code of a module, with a note that the module runs.

    Args:
        interceptor: gets the calls while it is active.
        name: qualified name of the module.
        module: the module.
        attribute: its name of the code.
        is_closed: the code is compiled.
    """

    def __init__(
        self,
        interceptor: Interceptor,
        name: str,
        module: nn.Module,
        attribute: str,
        *,
        is_closed: bool,
    ) -> None:
        original = getattr(module, attribute)
        updated = functools.WRAPPER_UPDATES if is_closed else ()  # torch's mark of compiled code
        functools.update_wrapper(self, original, updated=updated)
        self.interceptor, self.name = interceptor, name
        self.before: Any = module.__dict__.get(attribute, _ABSENT)
        self.original = original
        self._number = next(_numbers)
        _wrappers[self._number] = self
        # the innermost wrapper intercepts modules of torch, for all interceptors
        self._is_innermost = not is_closed and not isinstance(original, _Wrapper)
        self._forward = torch_modules.wrap(module, original) if self._is_innermost else original
        self._module, self._is_closed = module, is_closed
        self._is_examined = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        if self._is_closed:
            with without_mode():  # under it torch would compile the code again
                return self.original(*args, **kwargs)
        interceptor = self.interceptor
        if torch.compiler.is_dynamo_compiling():
            _report_graph(self._number)
            return self.original(*args, **kwargs)
        if not interceptor.is_active:
            return self._forward(*args, **kwargs)
        with RunningModule(interceptor, self.name, sdpa_calls.MODE) as running:
            run, calls = None, interceptor.calls
            if self._is_innermost and not self._is_examined and is_intercepted():
                run = None if is_recomputed() else ModuleRun.begin(self._module, args, kwargs)
            result = self._forward(*args, **kwargs)
            has_calls = interceptor.calls > calls or interceptor.has_closed(self.name)
            self._is_examined |= run is not None
            # convolutions in front of a tower are no layers of it
            if run is not None and not has_calls and (calls or not run.has_channels_first):
                running.silent = [run] if run.end(result) else running.silent  # parts are in it
            if has_calls or running.is_outermost:
                _report_mixers(running.silent)
                running.silent = []
        interceptor.has_run = True
        return result

    def report_graph(self) -> None:
        """Reports that the module becomes part of a compiled graph."""
        self.interceptor.report_graph(self.name)

    def __reduce__(self) -> Any:
        """Returns the module's own `forward`: copies of the module are not intercepted."""
        return _same, (self.original,)


_numbers: Final = itertools.count()
_wrappers: Final = weakref.WeakValueDictionary[int, _Wrapper]()


def _report_graph(number: int) -> None:
    """Reports a module while torch.compile traces it. Dynamo runs this, and traces it not."""
    if (wrapper := _wrappers.get(number)) is not None:
        wrapper.report_graph()


# torch.compiler.assume_constant_result sets this and nothing else, but it imports Dynamo: a second
# or two that only compiled models need.
setattr(_report_graph, "_dynamo_marked_constant", True)  # noqa: B010


def _report_mixers(runs: Iterable[ModuleRun]) -> None:
    """Reports the modules that mix positions without a call, each to all its interceptors."""
    for run in runs:
        with paused(), without_mode():
            parts = run.mixing_parts()
        for module in map(run.module.get_submodule, parts):
            wrapper = module.__dict__.get("forward")
            while isinstance(wrapper, _Wrapper):
                wrapper.interceptor.report_mixer(wrapper.name, type(module).__name__)
                wrapper = wrapper.original


def _same(x: Any) -> Any:
    return x


def _remove_wrappers(module: nn.Module) -> None:
    """Removes a module's wrappers whose interceptors have ended.

    A wrapper below an active one only calls the next. It goes when the active one goes.
    """
    for attribute in _ENTRIES:
        while isinstance(top := module.__dict__.get(attribute), _Wrapper):
            if top.interceptor.is_active:
                break
            if top.before is _ABSENT:
                del module.__dict__[attribute]
            else:
                module.__dict__[attribute] = top.before


def _modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules of a model with their names, but none inside a closed one."""
    seen: set[int] = set()
    stack = [("", model)]
    while stack:
        name, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        is_closed = bool(_why_closed(module))
        yield name, module
        if not is_closed:
            children = [(f"{name}.{n}" if name else n, m) for n, m in module.named_children()]
            stack += reversed(children)


def _why_closed(module: nn.Module) -> str:
    """Returns the reason why calls inside a module cannot be seen; "" if they can."""
    if isinstance(module, torch.jit.ScriptModule):
        return "a TorchScript module runs without Python: use the module that it was made from"
    forward = module.__dict__.get("forward")
    if (
        getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
        or hasattr(forward, "_torchdynamo_orig_callable")
    ):
        return _COMPILED
    if isinstance(module, nn.DataParallel):
        return "DataParallel runs copies of the model: use its attribute `module`"
    return ""
