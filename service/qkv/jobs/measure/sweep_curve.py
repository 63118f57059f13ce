"""A curve of a sweep: a variant, and for decoding what it keeps from token to token."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

from qkv.attention.variant import Variant
from qkv.errors import InvalidContent
from qkv.jobs.measure.variant_choice import VariantChoice

__all__ = ["Curve", "Mode", "Way", "curves_of"]

Mode = Literal["whole", "decode"]
Way = Literal["state", "cache", "recompute"]

_CACHED: Final = frozenset({"query", "key", "value"})


class Curve(NamedTuple):
    """A variant, and how it computes the next token.

    Attributes:
        way: state: from the state behind the tokens before. cache: from their keys and values.
            recompute: from all tokens. None: the sweep times whole calls.
    """

    choice: VariantChoice
    way: Way | None

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of a run: those of the choice, and those that the way needs."""
        own = self.choice.parameters
        if self.way == "cache":  # the only query is behind all keys
            return {**own, "causal": False, "query_offset": "end"}
        needed = self.choice.variant.state_needs if self.way == "state" else {"causal": True}
        return own if self.way is None else {**own, **needed}


def curves_of(choice: VariantChoice, mode: Mode) -> list[Curve]:
    """Returns the curves of a variant: for decoding its state, or both ways without one.

    Raises:
        InvalidContent: the variant cannot compute a token from those before it.
    """
    if mode == "whole":
        return [Curve(choice, None)]
    if choice.variant.state is not None:
        return [Curve(choice, "state")]
    if not _can_decode(choice.variant):
        raise InvalidContent(
            f"{choice.variant.name} cannot decode: got no state and no parameter causal, expected "
            "a variant that computes a token from those before it",
            pointer=choice.pointer,
        )
    return [Curve(choice, "recompute"), Curve(choice, "cache")]


def _can_decode(variant: Variant) -> bool:
    """Returns True if a variant without a state computes a token from keys and values."""
    known = variant.parameters.model_fields
    return variant.inputs.keys() >= _CACHED and {"causal", "query_offset"} <= known.keys()
