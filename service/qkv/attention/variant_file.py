"""Loads variant files, and reads and checks their docstrings and constants.

`catalogue` loads the files of `variants/`, and any other file by its path. `variants/README.md`
has the rules; a file that breaks one raises `BrokenVariant`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import textwrap
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Final

FOLDER: Final = Path(__file__).parent / "variants"
"""The folder of the variant files."""
WEIGHT_KINDS: Final = ("stochastic", "signed", "unnormalised")
"""The first word of a file's WEIGHTS."""

_PACKAGE: Final = "qkv.attention.variants"
_OUTSIDE: Final = "qkv_variant_"  # begins the module name of a file outside the package


class BrokenVariant(Exception):
    """A variant file cannot be used. The message has the file, the problem and an example.

    Args:
        path: the file.
        problem: what is missing or wrong, one sentence without a full stop.
    """

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(
            f"{path} is no variant and is not served: {problem}. A complete variant file:\n\n"
            f"{textwrap.indent(example(), '    ')}"
        )
        self.path, self.problem = path, problem


class BrokenRule(Exception):
    """A rule that a file breaks; `catalogue` raises `BrokenVariant` of it."""


def example() -> str:
    """Returns the smallest variant file: the first block of Python in `variants/README.md`."""
    page = FOLDER / "README.md"
    text = page.read_text() if page.exists() else ""
    match = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return "" if match is None else match[1]


def files(folder: Path) -> list[Path]:
    """Returns the variant files in a folder, sorted: all but those whose names begin with "_"."""
    return sorted(f for f in folder.glob("*.py") if not f.stem.startswith("_"))


def load_module(path: Path) -> ModuleType:
    """Imports a variant file, of this package or any other.

    Raises:
        BrokenVariant: the file cannot be imported, or its name is no identifier.
    """
    name = path.stem
    if not name.isidentifier() or path.suffix != ".py":
        raise BrokenVariant(
            path,
            f"the file's name is the variant's name: got {path.name!r}, expected letters, "
            'digits and "_", then ".py"',
        )
    try:
        if path.resolve().parent == FOLDER.resolve():
            return importlib.import_module(f"{_PACKAGE}.{name}")
        return _load_file(path, _OUTSIDE + name)
    except SyntaxError as error:
        reason = f"line {error.lineno} is no Python: {error.msg}"
        raise BrokenVariant(path, reason) from None
    except (Exception, SystemExit) as error:  # the file may raise anything
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename).name == path.name
        ]
        where = f"line {lines[-1]}" if lines else "the file"
        reason = f"{where} raises {type(error).__name__} at import: {one_line(error)}"
        raise BrokenVariant(path, reason) from None


def _load_file(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # annotations of its NamedTuples are looked up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def summary(module: ModuleType) -> str:
    """Returns the first sentence of a file's docstring; empty without one."""
    paragraph = " ".join((inspect.getdoc(module) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", paragraph)[0]


def docstring_field(module: ModuleType, name: str) -> str | None:
    """Returns the text of a `Name: text` paragraph of a file's docstring; None without one.

    It ends before the next such line or an empty line; its last full stop is left out.
    """
    text = inspect.getdoc(module) or ""
    match = re.search(rf"^{name}:(.*(?:\n(?![A-Z]\w*:|\s*$).*)*)", text, re.MULTILINE)
    return None if match is None else " ".join(match[1].split()).removesuffix(".") or None


def check_texts(module: ModuleType) -> None:
    """Checks a file's docstring, constants and names of functions.

    Raises:
        BrokenRule: one of them breaks a rule of `variants/README.md`.
    """
    if not summary(module):
        raise BrokenRule("it has no docstring: expected one sentence that says what the variant is")
    for name in ("FORMULA", "PAPER", "COST", "WEIGHTS"):
        value = getattr(module, name, "some")
        if not isinstance(value, str) or not value.strip():
            raise BrokenRule(f"{name} is no text: got {value!r:.60}")
    kind = getattr(module, "WEIGHTS", None) or docstring_field(module, "Weights")
    if kind is not None and kind.partition(";")[0] not in WEIGHT_KINDS:
        raise BrokenRule(
            f"the weights are of an unknown kind: got {kind!r:.60}, expected "
            f"{', '.join(WEIGHT_KINDS[:-1])} or {WEIGHT_KINDS[-1]}"
        )
    refuses = getattr(module, "REFUSES", {})
    if not isinstance(refuses, Mapping) or not all(
        isinstance(text, str) and text for item in refuses.items() for text in item
    ):
        raise BrokenRule("REFUSES is wrong: expected a dictionary from parameter names to reasons")
    if hasattr(module, "reference"):
        raise BrokenRule(
            "it has `reference`, which nothing calls: expected STEPS and `steps`, whose last step "
            "is the output; delete `reference`, or write it as them"
        )
    for name in ("weights", "steps", "backward", "flops"):
        if not callable(getattr(module, name, len)):
            raise BrokenRule(f"{name} is no function")


def one_line(error: BaseException) -> str:
    """Returns the start of an error's message, without line breaks."""
    return " ".join(str(error).split())[:300]
