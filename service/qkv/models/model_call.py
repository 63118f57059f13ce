"""The record of an attention call, and what a handler of the calls of a model does with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from operator import index
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor, nn

from qkv.errors import InvalidContent

Model: TypeAlias = nn.Module
"""A torch model."""


@dataclass(frozen=True, eq=False, repr=False)
class ModelCall:
    """Inputs of an attention call, with positions already applied.

    Attributes:
        layer: qualified name of the module that makes the call; "" is the model itself.
        query: (B, H, L, D).
        key: (B, G, S, D); query head h reads key head h // (H / G).
        value: (B, G, S, E).
        mask: bool (true: may attend) or floating (added to the scores), with four axes that
            broadcast to (B, H, L, S); None: no mask.
        causal: query i sees the keys up to i + query_offset.
        query_offset: position of the first query on the key axis; also for the window.
        scale: factor of the scores; None: 1 / sqrt(D).
        softcap: bound of the scores; None: none.
        window: keys to the left and right that a query sees; None: all.
        sinks: logits of the sinks (H); None: none.
        dropout: probability that the model drops a weight.
        is_self: queries and keys are of one sequence; None: unknown.
    """

    layer: str
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    causal: bool = False
    query_offset: int = 0
    scale: float | None = None
    softcap: float | None = None
    window: tuple[int | None, int | None] | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
    is_self: bool | None = None


class CallOutput(NamedTuple):
    """The output of a call.

    Attributes:
        output: (B, H, L, E).
        weights: (B, H, L, S); None if the model does not read them.
        own: that of the model's own attention, if a handler replaced it.
        is_returned: tells if the module returned what follows from the output; None: nothing is
            known to follow.
    """

    output: Tensor
    weights: Tensor | None = None
    own: Tensor | None = None
    is_returned: Callable[[], bool] | None = None

    def replaced(self, output: Tensor, weights: Tensor | None) -> CallOutput:
        """Returns an output in place of this one."""
        return CallOutput(output, weights, self.output if self.own is None else self.own)


class Missed(NamedTuple):
    """A layer whose attention was not captured.

    Attributes:
        layer: qualified name of the module; "" is the model itself.
        reason: a sentence.
    """

    layer: str
    reason: str


RunOriginal = Callable[[], CallOutput]
"""Runs the model's own attention."""


class Handler(Protocol):
    """A handler of the attention calls of a model."""

    def handle(self, call: ModelCall, run: RunOriginal) -> CallOutput:
        """Returns the output that the model goes on with.

        The model keeps its bits if this is the object that `run` returned.
        """

    def miss(self, layer: str, reason: str) -> None:
        """Receives the name of a layer whose attention cannot be intercepted, and the reason."""


def select_heads(call: ModelCall, heads: Sequence[int], items: slice = slice(None)) -> ModelCall:
    """Returns the record of some query heads, each with a key head of its own.

    Args:
        call: the call.
        heads: indices of the query heads.
        items: the sequences.
    """
    group = call.query.shape[1] // call.key.shape[1]
    chosen, key_heads = list(heads), [head // group for head in heads]
    mask = call.mask
    if mask is not None:
        mask = mask[items] if len(mask) > 1 else mask
        mask = mask[:, chosen] if mask.shape[1] > 1 else mask
    record: dict[str, Any] = {each.name: getattr(call, each.name) for each in fields(ModelCall)}
    record |= {
        "query": call.query[items, chosen],
        "key": call.key[items, key_heads],
        "value": call.value[items, key_heads],
        "mask": mask,
        "sinks": None if call.sinks is None else call.sinks[chosen],
    }
    return ModelCall(**record)


def to_numbers(name: str, values: Iterable[int]) -> list[int]:
    """Returns integers as a list.

    Raises:
        InvalidContent: they are no integers.
    """
    try:
        numbers = list(values)
        if not any(isinstance(n, bool) for n in numbers):
            return [index(n) for n in numbers]
    except TypeError:
        pass  # no list, or no integers
    raise InvalidContent(f"{name} is invalid: got {values!r:.80}, expected a list of integers")


def choose_numbers(
    name: str, values: Iterable[int] | None, known: Sequence[int], layer: str = ""
) -> tuple[int, ...]:
    """Returns chosen numbers, such as those of heads.

    Args:
        name: of the argument, for errors.
        values: different numbers; None: all that are known.
        known: the numbers that exist.
        layer: the layer that has them, for errors.

    Raises:
        InvalidContent: there are none, one is repeated, or one is not known.
    """
    numbers = list(known) if values is None else to_numbers(name, values)
    is_known = all(number in known for number in numbers)
    if not numbers or not is_known or len(set(numbers)) < len(numbers):
        expected = f"0 to {len(known) - 1}" if isinstance(known, range) else f"{list(known)!r:.200}"
        place = f" in {layer}" if layer else ""
        raise InvalidContent(
            f"{name} is invalid: got {numbers!r:.80}, expected different numbers of "
            f"{expected}{place}"
        )
    return tuple(numbers)
