"""Calls of softmax that are held against its annotations, and the outputs to ask for."""

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
# every call of these is checked against the shapes and dtypes that the signature promises
attend: Final = typing.cast("Callable[..., softmax.Softmax]", checked(softmax.attend))
weights: Final = typing.cast("Callable[..., Callable[[slice], Tensor]]", checked(softmax.weights))
