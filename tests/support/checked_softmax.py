"""Requests that are checked against the annotations of a variant's `Call`; sets of outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from beartype import beartype
from jaxtyping import jaxtyped
from torch import Tensor

from qkv.attention.variants import softmax

ALL: Final = frozenset({"output", "weights", "scores"})
OUTPUT: Final = frozenset({"output"})
checked: Final = jaxtyped(typechecker=beartype)


def checked_call(kind: type[Any]) -> Callable[..., Any]:
    """Returns a constructor of a `Call` that checks shapes and dtypes; the class stays as it is."""
    names = {"__module__": kind.__module__, "__init__": kind.__init__}
    found: Callable[..., Any] = checked(type(kind.__name__, (kind,), names))
    return found


_call: Final = checked_call(softmax.Call)


def attend(*tensors: Any, outputs: frozenset[str] = OUTPUT, **arguments: Any) -> softmax.Softmax:
    """Calls `softmax.attend` with the fields of its `Call`."""
    return softmax.attend(_call(*tensors, **arguments), outputs)


def weights(*tensors: Any, **arguments: Any) -> Callable[[slice], Tensor]:
    """Calls `softmax.weights` with those fields of its `Call` that rows depend on."""
    query, key, *others = tensors
    return softmax.weights(_call(query, key, key, *others, **arguments))
