"""JSON schemas of the bodies, responses and events of compare and sweep."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from qkv.api.openapi.response_schemas import response_components
from qkv.api.openapi.run_schemas import parameters, request
from qkv.api.openapi.schemas import Schema, closed, model_fields, ref
from qkv.attention import catalogue
from qkv.attention.variant import Variant
from qkv.jobs.measure.compare_request import CompareFields
from qkv.jobs.measure.sweep_request import SweepFields, has_length
from qkv.wire import json
from qkv.wire.responses import Cell, CompareResponse, Done, Progress, Stopped

__all__ = ["EVENTS", "compare_request", "components", "event", "sweep_request"]

EVENTS: Final = {"progress": Progress, "cell": Cell, "done": Done, "error": Stopped}
"""The data of each event of a sweep."""


def compare_request() -> Schema:
    """Returns the schema of the JSON body of a comparison."""
    fields = model_fields(CompareFields)
    every = list(catalogue.variants().values())
    fields["variants"]["items"] = _choice(every)
    fields["anchor"] = _choice(every) | {
        "default": "softmax",
        "description": fields["anchor"]["description"],
    }
    bodies = [request(variant)["properties"] for variant in every]
    inputs: Schema = {}
    for body in sorted(bodies, key=lambda body: "mask" not in body["inputs"]["properties"]):
        inputs = body["inputs"]["properties"] | inputs
    fields["layer"] = next(b["layer"] for b in bodies if "anyOf" in b["layer"])
    tensors = closed(inputs, ()) | {"minProperties": 1}
    unused = {"description": "Has no effect: the response has no tensors."}
    return closed(
        {"inputs": tensors, **fields, "encoding": bodies[0]["encoding"] | unused},
        ["inputs", "variants"],
    )


def sweep_request() -> Schema:
    """Returns the schema of the JSON body of a sweep."""
    fields = model_fields(SweepFields)
    fields["variants"]["items"] = _choice(v for v in catalogue.variants().values() if has_length(v))
    fields["lengths"]["uniqueItems"] = True
    return closed(fields, ["variants", "lengths"])


def event() -> Schema:
    """Returns the schema of one event of a sweep."""
    either = []
    for name, kind in EVENTS.items():
        data = {"contentMediaType": json.MEDIA_TYPE, "contentSchema": ref(kind.__name__)}
        either.append(closed({"event": {"const": name}, "data": {"type": "string"} | data}))
    return {"oneOf": either}


def components() -> dict[str, Schema]:
    """Returns the schemas of the response and of the events, narrowed to the known variants."""
    found = response_components(CompareResponse, *EVENTS.values())
    every = list(catalogue.variants().values())
    swept = [variant for variant in every if has_length(variant)]
    for name, variants in (
        ("BaselineComparison", every),
        ("ComparedVariant", every),
        ("Progress", swept),
        ("Cell", swept),
    ):
        found[name]["properties"]["variant"]["enum"] = [v.name for v in variants]
        if "parameters" in found[name]["properties"]:
            found[name]["allOf"] = [_known_parameters(variants)]
    for name in ("Cell", "Stopped"):
        found[name]["properties"]["problem"] = ref("Problem")
    found["Cell"] = _measured_or_failed(found["Cell"])
    return found


def _measured_or_failed(cell: Schema) -> Schema:
    """Returns the schema of a cell with all its measurements, or with a problem instead."""
    properties = cell["properties"]
    named = {n: s for n, s in properties.items() if n in cell["required"]}
    measured = {n: s for n, s in properties.items() if n != "problem"}
    return {
        "description": cell["description"],
        "oneOf": [closed(measured), closed(named | {"problem": properties["problem"]})],
        "allOf": cell["allOf"],
    }


def _choice(variants: Iterable[Variant]) -> Schema:
    """Returns the schema of a variant's name, or of a variant with its parameters."""
    known = list(variants)
    named = [
        closed({"variant": {"const": v.name}, "parameters": parameters(v)}, ["variant"])
        for v in known
    ]
    return {"anyOf": [{"type": "string", "enum": [v.name for v in known]}, *named]}


def _known_parameters(variants: Iterable[Variant]) -> Schema:
    """Returns a schema that allows only parameters of the variant, with any values."""
    either = []
    for variant in variants:
        known = closed({name: {} for name in variant.parameters.model_fields}, ())
        either.append({"properties": {"variant": {"const": variant.name}, "parameters": known}})
    return {"anyOf": either}
