"""Imports timm without torchvision.

timm imports torchvision for its image transforms and feature extractors. A build of torchvision
loads only beside the same build of torch: that of pip's default index is for CUDA. Beside a CPU
build of torch it fails, and transformers, which imports it if it is there, fails too. So tests
install timm alone. Its attention uses nothing of torchvision.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

_NAME: Final = "torchvision"


def import_timm(module: str) -> Any:
    """Returns a module of timm, such as "timm.models.vision_transformer"."""
    with contextlib.nullcontext() if find_spec(_NAME) else _stand_in():
        return importlib.import_module(module)


@contextlib.contextmanager
def _stand_in() -> Iterator[None]:
    """Lets imports from torchvision return empty classes."""
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:  # transformers must not find the modules
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.partition(".")[0] == _NAME]:
            del sys.modules[name]


class _Finder(MetaPathFinder, Loader):
    """Finds any module of torchvision, and gives it any attribute that is asked for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != _NAME:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: the module is empty."""


class _Named(type):
    """The type of classes that have every attribute: a class of that name."""

    def __getattr__(cls, name: str) -> Any:
        return _class(name)


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _class(name)


def _class(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Named(name, (), {})
