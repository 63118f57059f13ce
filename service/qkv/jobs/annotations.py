"""The fields of a response that say what its numbers are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from qkv.attention.layers.layer import Layer
from qkv.jobs.plan import Plan
from qkv.jobs.run_fields import unused_parameters


def annotate(plan: Plan, run_notes: Sequence[str] = ()) -> dict[str, Any]:
    """Returns `weights_are` with weights, `layer` with a layer, and `notes` if there are any.

    Args:
        plan: of the run.
        run_notes: those on the numbers of the run.
    """
    known = plan.derived(_annotations)
    return {**known, "notes": notes_of(plan, run_notes)} if run_notes else known


def notes_of(plan: Plan, run_notes: Sequence[str] = ()) -> list[str]:
    """Returns the notes of a response; arguments as for `annotate`."""
    return [*plan.derived(_notes), *run_notes]


def _annotations(plan: Plan) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if "weights" in plan.outputs:
        fields["weights_are"] = plan.weights_are
    if plan.inputs.layer is not None:
        fields["layer"] = plan.inputs.layer.description
    if known := plan.derived(_notes):
        fields["notes"] = known
    return fields


def _notes(plan: Plan) -> list[str]:
    """Returns the parameters of a loaded layer that the variant lacks, and its proof."""
    layer = plan.inputs.layer
    return [] if layer is None else [*unused_parameters(plan.variant, layer), *_proof(layer)]


def _proof(layer: Layer) -> Iterator[str]:
    """Yields a sentence about a layer whose description was proven."""
    if layer.loaded is not None and (proof := layer.loaded.proof) is not None:
        versions = ", ".join(f"{name} {version}" for name, version in proof["versions"].items())
        yield (
            f"{layer.loaded.name} was compared with the real module: an error of "
            f"{proof['error']:.1e}, for up to {proof['length']} tokens, with {versions}"
        )
