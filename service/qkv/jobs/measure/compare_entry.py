"""A variant of a comparison with its jobs, and the checks that it can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from qkv.errors import InvalidContent, pointer_to
from qkv.jobs.job import Job
from qkv.jobs.measure.row_divergence import select_inputs
from qkv.jobs.measure.variant_choice import VariantChoice
from qkv.jobs.plan import Plan
from qkv.wire.message import Message

__all__ = [
    "CompareEntry",
    "check_has_heads",
    "check_names",
    "check_positions",
    "check_shapes",
    "full_shape",
]

_TAKEN_BY_ALL: Final = ("mask", "key_lengths")
"""Inputs that every variant must take, because a variant without them computes something else."""
_HEADS: Final = ("H", "G")  # letters of an axis of heads


class CompareEntry(NamedTuple):
    """The runs of a variant that is compared, or of the baseline.

    Attributes:
        choice: the variant.
        timing: the job whose time is measured.
        peak_memory: the same with its peak memory; it runs first, so that no first call is timed.
    """

    choice: VariantChoice
    timing: Job
    peak_memory: Job

    @classmethod
    def of(cls, choice: VariantChoice, job: Job) -> CompareEntry:
        """Returns the entry of a run."""
        timing, peak = job.plan.measured("time"), job.plan.measured("peak")
        return cls(choice, Job(timing, job.tensors, job.layer), Job(peak, job.tensors, job.layer))

    @property
    def plan(self) -> Plan:
        """The plan of the timed run."""
        return self.timing.plan


def check_names(choices: Sequence[VariantChoice], message: Message) -> None:
    """Checks that a variant takes every input, and that all take those in `_TAKEN_BY_ALL`."""
    for name in message.tensors:
        takers = [c for c in choices if name in select_inputs(c.variant, message).tensors]
        pointer = pointer_to("inputs", name)
        if not takers:
            listed = ", ".join(dict.fromkeys(c.variant.name for c in choices))
            raise InvalidContent(f"none of {listed} has an input {name!r:.60}", pointer=pointer)
        if name in _TAKEN_BY_ALL:
            for choice in choices:
                if choice not in takers:
                    hint = (
                        "; to hide padding from all of them, give key_lengths"
                        if name == "mask" and "key_lengths" in choice.variant.inputs
                        else ""
                    )
                    raise InvalidContent(
                        f"{choice.variant.name} takes no {name}: without it, the variant computes "
                        f"something else than the others{hint}",
                        pointer=pointer,
                    )


def check_shapes(entry: CompareEntry, baseline: CompareEntry) -> None:
    """Checks that output and weights have the same shapes as the baseline's."""
    for name in ("output", "weights"):
        if not all(name in e.plan.variant.outputs for e in (entry, baseline)):
            continue  # a variant may have no weights
        shape = full_shape(entry.plan, name)
        baseline_shape = full_shape(baseline.plan, name)
        if shape != baseline_shape:
            raise InvalidContent(
                f"{entry.choice.variant.name} cannot be compared: its {name} has shape "
                f"{list(shape)}, expected {list(baseline_shape)} as the baseline "
                f"({baseline.choice.variant.name}) has",
                pointer=entry.choice.pointer,
            )


def check_has_heads(entry: CompareEntry) -> None:
    """Checks that output and weights of a variant have the same axis of heads.

    Raises:
        InvalidContent: one of them has none, or the axes differ.
    """
    variant = entry.plan.variant
    heads = next((x for x in variant.outputs["output"].letters[1:2] if x in _HEADS), "H")
    for name, axes in (("output", f"B, {heads}, L, E"), ("weights", f"B, {heads}, L, S")):
        if name not in variant.outputs:
            continue  # a variant may have no weights
        letters = variant.outputs[name].letters
        if len(letters) != 4 or letters[1] != heads:
            raise InvalidContent(
                f"per_head is not supported by {variant.name}: its {name} has axes "
                f"({', '.join(letters)}), expected ({axes})",
                pointer="/per_head",
            )


def check_positions(entry: CompareEntry, baseline: CompareEntry) -> None:
    """Checks that a rotary layer gives both variants the same queries.

    Raises:
        InvalidContent: the positions of the queries differ.
    """
    layer = entry.plan.inputs.layer
    if layer is None or layer.options.rope is None:
        return
    offset, baseline_offset = (e.plan.arguments.get("query_offset", 0) for e in (entry, baseline))
    if offset != baseline_offset:
        raise InvalidContent(
            f"{entry.choice.variant.name} cannot be compared: its query_offset is {offset}, "
            f"expected {baseline_offset} as the baseline ({baseline.choice.variant.name}) has, "
            "because the layer rotates queries by their position",
            pointer=entry.choice.pointer,
        )


def full_shape(plan: Plan, output: str) -> tuple[int, ...]:
    """Returns the shape of an output with every axis."""
    letters = plan.variant.outputs[output].letters
    return tuple(plan.inputs.axes.sizes[letter] for letter in letters)
