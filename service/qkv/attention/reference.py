"""The float64 reference of a variant: its steps, some items and rows of queries at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from qkv.attention.signature import TAIL, Input, Output, State
from qkv.attention.step import Step

_ROWS: Final = 16  # of queries at a time, at least
_NUMBERS: Final = 1 << 19  # of a step at a time, which may have one for each row, key and channel


@dataclass(frozen=True)
class Reference:
    """The outputs of a variant, read from its steps.

    Autograd may differentiate them.

    Attributes:
        compute: the file's `steps`, of arguments by name.
        steps, inputs, outputs: those of the variant.
        state: what the variant takes of the tokens before; None: nothing.
        has_offset: its rows depend on their place by `query_offset` alone, so they may be computed
            by themselves.
    """

    compute: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    steps: Mapping[str, Step]
    inputs: Mapping[str, Input]
    outputs: Mapping[str, Output]
    state: State | None
    has_offset: bool

    def run(self, arguments: Mapping[str, Any]) -> SimpleNamespace:
        """Returns the outputs by name, without a state.

        Args:
            arguments: as `attend` takes them, in float64, with all tensors that are drawn at random
                and with `plane_BH` if the variant takes it.
        """
        first = next(i for i in self.inputs.values() if not i.is_optional)
        count, size = len(arguments[first.argument]), self._items_at_once(arguments, first)
        parts = [
            self._part(self._cut(arguments, "B", slice(b, b + size))) for b in range(0, count, size)
        ]
        return SimpleNamespace(**{n: _joined([p[n] for p in parts], 0) for n in parts[0]})

    def _items_at_once(self, arguments: Mapping[str, Any], first: Input) -> int:
        """Returns how many items are computed together: 1 behind a state, whose tails differ.

        The last row of each item is that of its last key, with `query_offset="end"`: the offsets
        differ if the lengths do.
        """
        past = None if self.state is None else arguments.get(self.state.argument)
        is_at_end = arguments.get("query_offset") == "end"
        if past is not None or (is_at_end and arguments.get("key_lengths_B") is not None):
            return 1
        tensors = (arguments.get(i.argument) for i in self.inputs.values() if "B" in i.letters)
        largest = max(int(x.numel()) // max(1, len(x)) for x in tensors if x is not None)
        rows: int = math.prod(arguments[first.argument].shape[2:3])
        return max(1, _NUMBERS // max(1, largest * rows))

    def _part(self, arguments: dict[str, Any]) -> dict[str, Tensor]:
        """Returns the outputs of some items. Behind a state, padding has no output."""
        past = None if self.state is None else arguments.get(self.state.argument)
        if past is None:
            return self._by_rows(arguments)
        first = 0 if past.tail_length is None else int(past.tail_length)
        found = self._by_rows(self._behind_tail(arguments, past, first))
        for name, x in found.items():
            for axis, letter in enumerate(self.outputs[name].letters):
                if letter == "S":  # rows and columns of the tail
                    x = x.narrow(axis, first, x.shape[axis] - first)
            if (lengths := arguments.get("key_lengths_B")) is not None:
                place_L1 = torch.arange(x.shape[2], device=x.device)[:, None]
                x = x.masked_fill(place_L1 >= lengths, 0.0)
            found[name] = x
        return found

    def _behind_tail(self, arguments: dict[str, Any], past: Any, first: int) -> dict[str, Any]:
        """Returns the arguments with the tokens of the tail in front of the others."""
        assert self.state is not None
        found = dict(arguments)
        for spec in self.inputs.values():
            x = arguments.get(spec.argument)
            if x is None or "S" not in spec.letters:
                continue
            tail = getattr(past, f"tail_{spec.name}", None)
            tail = x[:, :, :0] if tail is None else tail[:, :, :first]
            missing = x.new_zeros(*x.shape[:2], first - tail.shape[2], *x.shape[3:])
            found[spec.argument] = torch.cat([missing, tail, x], 2)
        if (lengths := arguments.get("key_lengths_B")) is not None:
            found["key_lengths_B"] = lengths + first
        if self.has_offset:
            found["query_offset"] = first
        fields = {n.removeprefix("state."): None for n in self.state.inputs if n.startswith(TAIL)}
        del fields["tail_length"]
        return {**found, self.state.argument: past._replace(**fields)}

    def _by_rows(self, arguments: dict[str, Any]) -> dict[str, Tensor]:
        """Returns the outputs of some items, from blocks of rows of queries."""
        blocks = [self._outputs(self.compute(part)) for part in self._blocks(arguments)]
        return {n: _joined([block[n] for block in blocks], 2) for n in blocks[0]}

    def _blocks(self, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the arguments of blocks of rows; dropout is for all rows at once."""
        if not self.has_offset or arguments.get("dropout"):
            yield arguments
            return
        query = arguments[self.inputs["query"].argument]
        L, offset = query.shape[2], arguments.get("query_offset", 0)
        key = arguments[self.inputs["key"].argument]
        if offset == "end":
            lengths = arguments.get("key_lengths_B")
            offset = (key.shape[2] if lengths is None else int(lengths)) - L
        numbers = query.shape[0] * query.shape[1] * key.shape[2] * key.shape[3]  # of a row
        rows = max(_ROWS, _NUMBERS // max(1, numbers))
        for start in range(0, L, rows):
            part = self._cut(arguments, "L", slice(start, start + rows))
            yield {**part, "query_offset": offset + start}

    def _cut(self, arguments: Mapping[str, Any], letter: str, part: slice) -> dict[str, Any]:
        """Returns the arguments with a part of an axis; tensors that broadcast stay whole."""
        found = dict(arguments)
        for spec in self.inputs.values():
            x = arguments.get(spec.argument)
            if x is None or letter not in spec.letters:
                continue
            # leading axes of a tensor that broadcasts may be absent
            axis = spec.letters.index(letter) - (len(spec.letters) - x.ndim)
            if axis >= 0 and not (spec.broadcasts and x.shape[axis] == 1):
                found[spec.argument] = x.transpose(0, axis)[part].transpose(0, axis)
        if letter == "B" and arguments.get("plane_BH") is not None:
            found["plane_BH"] = arguments["plane_BH"][part]
        name = None if self.state is None else self.state.argument
        if letter == "B" and name is not None and (past := arguments.get(name)) is not None:
            found[name] = type(past)(*(None if x is None else x[part] for x in past))
        return found

    def _outputs(self, found: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns the outputs among the steps: the last one that says so, or that of the name."""
        named = {n: n for n in self.outputs if n in found}
        named |= {
            step.output: step.name
            for step in self.steps.values()
            if step.output is not None and step.name in found
        }
        return {output: found[name] for output, name in named.items()}


def _joined(parts: list[Tensor], axis: int) -> Tensor:
    """Returns the parts as one tensor, without a copy of a single one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)
