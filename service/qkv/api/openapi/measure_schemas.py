"""JSON schemas of what is measured: comparisons and sweeps, and their answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import pydantic

from qkv.api.openapi.schemas import closed, ref, request
from qkv.attention import catalogue
from qkv.attention.catalogue import Variant
from qkv.jobs.measure.compare_request import CompareFields
from qkv.jobs.measure.sweep_request import SweepFields, has_length
from qkv.wire import json

__all__ = ["EVENTS", "compared", "comparison", "components", "event", "sweep"]

Schema = dict[str, Any]

_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_TIME: Final[Schema] = {"type": "number", "minimum": 0}
_NUMBER: Final[Schema] = {"type": "number"}
_KINDS: Final = ["stochastic", "signed", "unnormalised"]

EVENTS: Final = {
    "progress": "Progress",
    "cell": "Cell",
    "done": "Done",
    "error": "Stopped",
}
"""The component that says what each event of a sweep holds."""

_MEANINGS: Final = {
    "total_variation": "Half the sum of |a - b|, from 0 to 1 where both are stochastic.",
    "kl_divergence": "sum a log(a / b), a the anchor's row; null where it is infinite.",
    "js_divergence": "Jensen-Shannon: the mean of both divergences from (a + b) / 2, to log 2.",
    "rank_correlation": "Spearman's, of the keys that either gives weight; the worst is the least. "
    "Null where no row has an order.",
}


def comparison() -> Schema:
    """The JSON body of a comparison."""
    fields = _fields(CompareFields)
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
    taken = closed(inputs, ()) | {"minProperties": 1}
    unused = {"description": "Changes nothing: no tensor is answered."}
    return closed(
        {"inputs": taken, **fields, "encoding": bodies[0]["encoding"] | unused},
        ["inputs", "variants"],
    )


def compared() -> Schema:
    """The JSON body that a comparison is answered with."""
    notes = {"type": "array", "items": {"type": "string"}}
    timing = closed(
        {
            **dict.fromkeys(("queue_ms", "transfer_ms", "compute_ms", "total_ms"), _TIME),
            "runs": _COUNT | {"minimum": 1, "description": "That this took."},
            "device": {"type": "string", "description": "Where they ran."},
        }
    )
    return closed(
        {
            "anchor": _entry(()),
            "variants": {"type": "array", "minItems": 1, "items": _entry(_MEANINGS)},
            "notes": notes
            | {"description": "What is to be said of it, in a sentence or two each."},
            "timing": timing,
        }
    )


def sweep() -> Schema:
    """The JSON body of a sweep."""
    fields = _fields(SweepFields)
    fields["variants"]["items"] = _choice(v for v in catalogue.variants().values() if has_length(v))
    fields["lengths"]["uniqueItems"] = True
    return closed(fields, ["variants", "lengths"])


def event() -> Schema:
    """One event of a sweep's answer."""
    either = []
    for name, component in EVENTS.items():
        data = {"contentMediaType": json.MEDIA_TYPE, "contentSchema": ref(component)}
        either.append(closed({"event": {"const": name}, "data": {"type": "string"} | data}))
    return {"oneOf": either}


def components() -> dict[str, Schema]:
    """What the others refer to, by name; made of the variants there are."""
    length = _COUNT | {"minimum": 1}
    swept = [variant for variant in catalogue.variants().values() if has_length(variant)]
    place = {"variant": {"enum": [v.name for v in swept]}, "length": length}
    times = _times()["properties"] | _cost()
    named = {"index": _COUNT, "parameters": {"type": "object"}, **place}
    either = [closed(named | times), closed(named | {"problem": ref("Problem")})]
    crossover = closed({"from": _COUNT, "to": _COUNT, "length": _TIME})
    return {
        "Progress": closed({"done": _COUNT, "total": _COUNT, **place}),
        "Cell": {"oneOf": either, "allOf": [_of_one(swept)]},
        "Done": closed(
            {
                "cells": _COUNT,
                "crossovers": {
                    "type": "array",
                    "items": crossover,
                    "description": "Where which variant, by its place in the request, gets quicker "
                    "than which, on straight lines between medians, both axes logarithmic.",
                },
            }
        ),
        "Stopped": closed({"problem": ref("Problem")}),
    }


def _entry(meanings: Iterable[str]) -> Schema:
    """What is answered of a variant."""
    output = closed(
        {
            "relative_error": _or_null(_TIME)
            | {
                "description": "Frobenius norm of the difference over that of what is "
                "right: the anchor's output, and for the anchor its own in float64."
            },
            "largest_error": _or_null(_TIME),
            "cosine": _or_null({"type": "number", "minimum": -1, "maximum": 1}),
        }
    )
    apart = closed({"mean": _NUMBER, "worst": _NUMBER})
    weights = {n: _or_null(apart) | {"description": _MEANINGS[n]} for n in meanings}
    weights["entropy"] = _or_null(closed(dict.fromkeys(("mean", "least", "most"), _TIME)))
    every = list(catalogue.variants().values())
    return closed(
        {
            "variant": {"enum": [variant.name for variant in every]},
            "parameters": {"type": "object", "description": "As they came."},
            "weights_are": {"enum": _KINDS},
            "output": _or_null(output),
            "weights": _or_null(closed(weights)),
            "timing": _times(),
            **_cost(),
        }
    ) | {"allOf": [_of_one(every)]}


def _times() -> Schema:
    repeats = _COUNT | {"minimum": 1}
    return closed(dict.fromkeys(("median_ms", "least_ms", "most_ms"), _TIME) | {"repeats": repeats})


def _cost() -> dict[str, Schema]:
    return {
        "flops": _COUNT | {"description": "Of the matrix products, by the formula."},
        "bytes": _COUNT | {"description": "Of all tensors in, and the output."},
        "peak_bytes": _COUNT
        | {"description": "That torch's allocator held at most in a run, beside the inputs."},
    }


def _choice(variants: Iterable[Variant]) -> Schema:
    """A variant's name, or a variant with its parameters."""
    known = list(variants)
    named = [
        closed({"variant": {"const": v.name}, "parameters": _parameters(v)}, ["variant"])
        for v in known
    ]
    return {"anyOf": [{"type": "string", "enum": [v.name for v in known]}, *named]}


def _of_one(variants: Iterable[Variant]) -> Schema:
    """Parameters that the variant has; their values are as they came."""
    either = []
    for variant in variants:
        known = closed({name: {} for name in variant.parameters.model_fields}, ())
        either.append({"properties": {"variant": {"const": variant.name}, "parameters": known}})
    return {"anyOf": either}


def _parameters(variant: Variant) -> Schema:
    found: Schema = request(variant)["properties"]["parameters"]
    return found


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _fields(model: type[pydantic.BaseModel]) -> dict[str, Schema]:
    """A model's properties, without the titles that only repeat their names."""
    properties: dict[str, Schema] = model.model_json_schema()["properties"]
    return {n: {k: v for k, v in f.items() if k != "title"} for n, f in properties.items()}
