"""The `Call` of a variant's file: a dataclass of the arguments that all its functions share.

`signature` finds it, and `variant` creates one for each call of a function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any

from qkv.attention.variant_file import BrokenRule


def call_of(attend: Callable[..., Any], hints: Mapping[str, Any]) -> type[Any] | None:
    """Returns the dataclass that `attend` takes beside `outputs`; None for any other signature.

    Args:
        attend: the file's function.
        hints: its annotations, evaluated.

    Raises:
        BrokenRule: `attend` takes more, or the dataclass has more than fields.
    """
    first, *others = inspect.signature(attend).parameters or [""]
    kind = hints.get(first)
    if not inspect.isclass(kind) or not is_dataclass(kind):
        return None
    if others != ["outputs"]:
        raise BrokenRule(
            f"attend takes {kind.__name__} and {', '.join(others) or 'nothing'}: expected "
            f"{kind.__name__} and outputs"
        )
    if hasattr(kind, "__post_init__") or "__slots__" in vars(kind):
        raise BrokenRule(f"{kind.__name__} has __post_init__ or slots: expected fields alone")
    return kind


def attend_by_fields(
    attend: Callable[[Any, frozenset[str]], Any], kind: type[Any]
) -> Callable[..., Any]:
    """Returns `attend` as a function that takes the fields of the `Call`, by name, and `outputs`.

    The names are not checked: those of a request have been.
    """
    new = object.__new__

    def attend_fields(*, outputs: frozenset[str] = frozenset({"output"}), **fields: Any) -> Any:
        call = new(kind)  # as in `new_call`
        call.__dict__.update(fields)
        return attend(call, outputs)

    return attend_fields


def new_call(kind: type[Any], fields: Mapping[str, Any]) -> Any:
    """Returns a `Call` with these fields; the others have their defaults.

    The constructor of a frozen dataclass sets each field through `object.__setattr__`: with the 15
    of softmax it takes five times as long as this.
    """
    call = object.__new__(kind)
    vars(call).update(fields)
    return call
