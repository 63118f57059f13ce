"""The steps in a request: they are for small inputs, and for requests without a state."""

from __future__ import annotations

from collections.abc import Collection

from qkv.attention.signature import STATE
from qkv.attention.step import MAX_BYTES, MAX_ITEMS, MAX_TOKENS
from qkv.errors import InvalidContent

_POINTER = "/outputs"


def check_steps(sizes: dict[str, int], nbytes: int, inputs: Collection[str]) -> None:
    """Checks that a request that wants steps is small and brings no state.

    Args:
        sizes: of the axes.
        nbytes: bytes of all steps that the request may have.
        inputs: the names of its tensors.

    Raises:
        InvalidContent: a bound is exceeded, or there is a state.
    """
    for name in inputs:
        if name.startswith(STATE):
            raise InvalidContent(
                f"outputs names steps beside a state: got {name} among the inputs, expected no "
                "state; the steps of all tokens begin with the first one",
                pointer=_POINTER,
            )
    for letter, most in (("L", MAX_TOKENS), ("S", MAX_TOKENS), ("B", MAX_ITEMS)):
        if (size := sizes.get(letter, 1)) > most:
            raise InvalidContent(
                f"outputs names steps of inputs that are too large: got {letter}={size}, expected "
                f"at most {most}",
                pointer=_POINTER,
            )
    if nbytes > MAX_BYTES:
        raise InvalidContent(
            f"outputs names steps that are too large: got {nbytes} bytes of all steps, expected at "
            f"most {MAX_BYTES}; they grow with the products of the axes",
            pointer=_POINTER,
        )
