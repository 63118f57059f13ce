"""Softmax with its calls checked against its annotations, and sets of outputs."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Final

from beartype import beartype
from jaxtyping import jaxtyped
from torch import Tensor

from qkv.attention.variants import softmax

ALL: Final = frozenset({"output", "weights", "scores"})
OUTPUT: Final = frozenset({"output"})

checked: Final = jaxtyped(typechecker=beartype)
# every call is checked against the shapes and dtypes of the signature
attend: Final = typing.cast("Callable[..., softmax.Softmax]", checked(softmax.attend))
weights: Final = typing.cast("Callable[..., Callable[[slice], Tensor]]", checked(softmax.weights))
