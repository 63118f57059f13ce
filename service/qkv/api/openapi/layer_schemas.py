"""JSON schemas of layers: in a request, their tensors, conversions, and the layers of a model.

They are derived from the layouts and the fields of layers and conversions.
"""

from __future__ import annotations

from typing import Final

from qkv.api.openapi.schemas import COUNT, ENCODING, TEXT, Schema, closed, model_fields, ref, tensor
from qkv.attention.layers import layout_catalogue
from qkv.attention.layers.detection import MAX_DETECTED
from qkv.attention.layers.layer_options import LayerOptions
from qkv.jobs.convert import ConvertFields
from qkv.jobs.layers import LayersFields
from qkv.tensors import FLOATING

__all__ = [
    "convert_request",
    "convert_response",
    "layer",
    "layer_read",
    "layers_request",
    "layers_response",
    "weights",
]

_LAYOUT: Final[Schema] = TEXT | {"enum": list(layout_catalogue.known())}
_AUTO: Final[Schema] = TEXT | {"enum": [*layout_catalogue.known(), layout_catalogue.AUTO]}
_ORDER: Final[Schema] = {"enum": ["half", "interleaved", None]}


def convert_request() -> Schema:
    """Returns the schema of the JSON body of a conversion."""
    fields = model_fields(ConvertFields)
    fields["from"] |= _AUTO
    fields["to"] = {"enum": [*_LAYOUT["enum"], None]} | {
        key: value for key, value in fields["to"].items() if key != "anyOf"
    }
    x, y = tensor(FLOATING, "Hidden states"), tensor(FLOATING, "The module's output")
    check = closed({"x": x, "y": y})
    fields["check"] = fields["check"] | {"anyOf": [check, {"type": "null"}]}
    every = {"from": fields.pop("from"), "to": fields.pop("to"), "tensors": ref("LayerTensors")}
    body = closed(every | fields | {"encoding": ENCODING}, ["from", "tensors"])
    converts = {"to": TEXT, "check": {"type": "null"}, "scale": {"type": "null"}}
    detects = {"check": {"type": "object"}}
    return body | {
        "anyOf": [
            {"properties": converts, "required": ["to"]},
            {"properties": detects, "required": ["check"]},
        ]
    }


def convert_response() -> Schema:
    """Returns the schema of the JSON response of a conversion."""
    size = {"anyOf": [{"type": "number", "minimum": 0}, TEXT | {"enum": ["NaN", "Infinity"]}]}
    check = {
        "largest_absolute_difference": size,
        "largest_absolute_output": size,
        "elements": COUNT,
        "dtype": {"const": "float64"},
    }
    layer = {
        "from": _LAYOUT,
        "prefix": TEXT | {"description": "Of the names of the layer's tensors."},
        "ignored": {
            "type": "array",
            "items": TEXT,
            "description": "Names of tensors that belong to no part of the attention.",
        },
    }
    detected = {
        "detected": {
            "type": "array",
            "items": _detected(),
            "minItems": 1,
            "maxItems": MAX_DETECTED,
            "description": "If the request has `check`: candidates, best first.",
        }
    }
    converted = closed(
        layer
        | detected
        | {
            "to": _LAYOUT,
            "rotary_order": _ORDER | {"description": "Of the response; null if it is unknown."},
            "tensors": ref("LayerTensors"),
            "check": closed(check),
        }
    )
    converted["required"].remove("detected")
    return {"anyOf": [converted, closed(layer | detected)]}


def _detected() -> Schema:
    """Returns the schema of a candidate of a detection."""
    layer = model_fields(LayerOptions)
    return closed(
        {
            "layout": _LAYOUT,
            "heads": COUNT,
            "kv_heads": COUNT,
            "rotary": _ORDER | {"description": "The order of rotary channels; null: not rotary."},
            "scale": {"type": "number", "exclusiveMinimum": 0},
            "causal": {"type": "boolean"},
            "rope": layer["rope"],
            "alibi": {"enum": [True, False, "scaled"]},
            "qk_norm": {"anyOf": [layer["qk_norm"], {"type": "null"}]},
            "error": {
                "type": "number",
                "minimum": 0,
                "description": "Largest absolute difference to `y`, divided by its largest size.",
            },
        }
    )


def layers_request() -> Schema:
    """Returns the schema of the JSON body with the shapes of a model."""
    return closed(model_fields(LayersFields), ["shapes"])


def layers_response() -> Schema:
    """Returns the schema of the JSON response with the layers of a model."""
    positive = {"type": "integer", "minimum": 1}
    heads = closed({"heads": positive, "kv_heads": positive, "width": positive})
    layout = closed(
        {
            "layout": _LAYOUT,
            "summary": TEXT,
            "width": positive | {"description": "M, of the embeddings."},
            "rotary_order": _ORDER
            | {"description": "Of the layout's models; null if they have no rotary embedding."},
            "alibi": {
                "enum": [True, False, "scaled"],
                "description": "`alibi` of a layer whose model has ALiBi; false if none has.",
            },
            "heads": {
                "type": "array",
                "items": heads,
                "description": "Numbers of heads that the shapes allow, the likeliest first. "
                "`width` is that of a head.",
            },
        }
    )
    shape = {"type": "array", "items": COUNT}
    found = {
        "prefix": TEXT | {"description": "Of the names of the layer's tensors, for `prefix`."},
        "layouts": {
            "type": "array",
            "minItems": 1,
            "items": layout,
            "description": "The layouts that names and shapes fit; several if they are ambiguous.",
        },
        "shapes": {
            "type": "object",
            "additionalProperties": shape,
            "description": "Of the layer's tensors, by name without the prefix.",
        },
    }
    limit = COUNT | {"description": "The largest body of a run that this service accepts."}
    return closed({"layers": {"type": "array", "items": closed(found)}, "max_body_bytes": limit})


def layer() -> Schema:
    """Returns the schema of a layer in a request."""
    fields = model_fields(LayerOptions)
    fields["layout"] |= _AUTO
    body = closed(fields | {"tensors": ref("LayerTensors")}, ["layout", "tensors"])
    return body | {"description": "A layer that projects the inputs."}


def layer_read() -> Schema:
    """Returns the schema of the layer in a response: how the service has read its tensors."""
    count = {"type": ["integer", "null"], "minimum": 1}
    body = closed(
        {
            "layout": _LAYOUT,
            "prefix": TEXT,
            "heads": count,
            "kv_heads": count,
            "ignored": {"type": "array", "items": TEXT},
        }
    )
    return body | {
        "description": "The layer of the request: its layout, the prefix of its names, its heads, "
        "and the names of tensors that belong to no part of the attention."
    }


def weights() -> Schema:
    """Returns the schema of a layer's tensors, in any layout."""
    listed = "; ".join(
        f"{name}: {', '.join(layout.modules)}" for name, layout in layout_catalogue.known().items()
    )
    return {
        "type": "object",
        "minProperties": 1,
        "additionalProperties": tensor(FLOATING, "A matrix or a vector"),
        "description": f"The tensors of a layer, by name. The modules of each layout: {listed}.",
    }
