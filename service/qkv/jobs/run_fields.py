"""The fields of a run: parameters, outputs, and the form of the weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

import pydantic

from qkv.attention.layers.layer import Layer
from qkv.attention.signature import VERSION
from qkv.attention.variant import Variant
from qkv.errors import InvalidContent, format_value, pointer_to
from qkv.jobs.fields import JobFields
from qkv.jobs.layer_inputs import parse_layer_options
from qkv.jobs.weight_forms import NONE, WeightForm


class RunFields(JobFields):
    """The fields of a run."""

    outputs: Annotated[
        list[str] | None,
        pydantic.Field(
            description="The names of the outputs to return. By default output, and weights if the "
            "variant has them. state and steps stand for all tensors whose names begin with them."
        ),
    ] = None
    weights: Annotated[
        Any, pydantic.Field(description="The form in which the weights are returned.")
    ] = "full"


def parse_parameters(
    variant: Variant, fields: JobFields, loaded: Layer | None = None
) -> pydantic.BaseModel:
    """Returns the parameters of a request, those of its layer included.

    A loaded layer has parameters of its checkpoint, which those of the request replace.

    Raises:
        InvalidContent: a parameter is wrong, or both the request and its layer have it.
    """
    options = parse_layer_options(fields) if loaded is None else loaded.options
    of_layer = {} if options is None else options.parameters
    for name in of_layer:
        if name in fields.parameters:
            raise InvalidContent(
                f"{name} is given twice: in parameters and in layer",
                pointer=pointer_to("layer", name),
            )
    of_checkpoint = {} if loaded is None else _checkpoint_parameters(variant, loaded)
    try:
        return variant.parse({**of_checkpoint, **fields.parameters, **of_layer})
    except InvalidContent as error:
        for name in of_layer:
            place = pointer_to("parameters", name)
            if error.pointer is not None and error.pointer.startswith(place):
                error.pointer = pointer_to("layer", name) + error.pointer.removeprefix(place)
        raise


def unused_parameters(variant: Variant, layer: Layer) -> list[str]:
    """Returns a sentence for each parameter of a loaded layer that the variant lacks."""
    if layer.loaded is None:
        return []
    return [
        f"{name} of {layer.loaded.name} is not applied: {variant.name} has no parameter {name!r}"
        for name in layer.loaded.parameters
        if name not in variant.parameters.model_fields
    ]


def _checkpoint_parameters(variant: Variant, layer: Layer) -> dict[str, Any]:
    assert layer.loaded is not None
    known = variant.parameters.model_fields
    return {name: value for name, value in layer.loaded.parameters.items() if name in known}


def select_outputs(
    variant: Variant,
    parameters: pydantic.BaseModel,
    fields: RunFields,
    form: WeightForm,
    inputs: Collection[str],
) -> frozenset[str]:
    """Returns the names of the outputs that a request asks for.

    `state` and `steps` stand for their tensors. `inputs` are the names of the request's tensors.

    Raises:
        InvalidContent: an output is unknown or named twice, or does not fit the form.
    """
    named = fields.outputs
    if form.is_summary and "weights" not in variant.outputs:
        raise InvalidContent(f"{variant.name} has no weights", pointer="/weights")
    if named is None:
        named = [n for n in ("output", "weights") if n in variant.outputs]
        return frozenset(named) - ({"weights"} if form == NONE else set())
    groups = variant.group_names(parameters, inputs)
    known = [*variant.outputs, *(n for group, names in groups.items() for n in (group, *names))]
    for i, name in enumerate(named):
        if name not in known:
            raise InvalidContent(
                f"{variant.name} has no output {name!r}: expected {', '.join(known)}",
                pointer=pointer_to("outputs", i),
            )
        if name in named[:i]:
            raise InvalidContent(f"{name} is named twice", pointer=pointer_to("outputs", i))
    if not named:
        raise InvalidContent("outputs is empty: expected at least one name", pointer="/outputs")
    if form == NONE and "weights" in named:
        raise InvalidContent('weights is "none", but outputs names weights', pointer="/weights")
    if form.is_summary and "weights" not in named:
        raise InvalidContent(
            f"weights is {format_value(form.as_json)}, but outputs does not name weights",
            pointer="/weights",
        )
    found, state = frozenset(named), groups.get("state", [])
    for group in found & groups.keys():
        found = found - {group} | {*groups[group]}
    if found & {*state} and (missing := [n for n in state if n not in found and n != VERSION]):
        raise InvalidContent(
            f"outputs lacks {missing[0]}, without which the state cannot be continued: expected "
            f"state, or all of {', '.join(state)}",
            pointer="/outputs",
        )
    return found
