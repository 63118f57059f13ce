"""The part of the OpenAPI document about verify: its operation, schemas and examples."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from qkv import errors
from qkv.api.case_messages import (
    AXES,
    FIGURES,
    CaseFields,
    DrawFields,
    draw_case,
    judge_case,
)
from qkv.api.openapi.problem_responses import problem_responses
from qkv.api.openapi.schemas import (
    COUNT,
    ENCODING,
    NON_FINITE,
    TEXT,
    TIMEOUT,
    Schema,
    closed,
    model_fields,
    tensor,
)
from qkv.attention import catalogue
from qkv.engine import local
from qkv.tensors import FLOATING
from qkv.testing.families import FAMILIES
from qkv.testing.judgement import GRADIENT
from qkv.wire import json, safetensors

__all__ = ["PATH", "examples", "operation"]

PATH: Final = "/v1/verify/{variant}"
_FILE: Final = {"type": "string", "format": "binary"}
_SIZES: Final = {"B": 1, "H": 1, "L": 2, "S": 2, "D": 2}


@cache
def examples() -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    """Returns a request of each kind with its response."""
    drawn = {"family": "normal", "seed": 1, "sizes": _SIZES, "parameters": {"causal": True}}
    case = draw_case("softmax", json.decode(json.dump(drawn), "outputs"))
    text = b"".join(json.encode(case, "inputs"))
    run = json.decode(text, "inputs")
    run.fields = {"parameters": drawn["parameters"], "outputs": ["output"]}
    output = local.attend("softmax", run).tensors["output"].numpy().tolist()
    outputs = {"case": case.fields["case"], "outputs": {"output": output}}
    verdict = judge_case("softmax", json.decode(json.dump(outputs), "outputs"))
    return {
        "draw": ("Inputs for a causal softmax", drawn, json.load(text)),
        "judge": ("The outputs for these inputs", outputs, json.load(json.dump(verdict))),
    }


def operation() -> dict[str, Any]:
    """Returns the operation."""
    names = list(catalogue.variants())
    parameter = {
        "name": "variant", "in": "path", "required": True, "description": "The variant's name.",
        "schema": TEXT | {"enum": names}, "example": "softmax",
    }  # fmt: skip
    unknown = errors.NotFound(f"no variant 'sotfmax'; there are {', '.join(names)}")
    request = {"anyOf": [_draw_request(), _judge_request()]}
    response = {"anyOf": [_drawn_case(), _verdict()]}
    sent = "The outputs by name; all other fields as JSON under `qkv` in the metadata."
    received = "The inputs by name; all other fields as JSON under `qkv`. A verdict is JSON only."
    return {
        "parameters": [parameter, TIMEOUT],
        "requestBody": {
            "required": True,
            "description": "Without `case` the service draws a case; with it, it judges outputs.",
            "content": _content(request, sent, 1, "draw", "judge"),
        },
        "responses": {
            "200": {
                "description": "A case: its inputs, and the specification that draws them. Or "
                "the verdict on outputs.",
                "content": _content(response, received, 2, "draw", "judge"),
            }
        }
        | problem_responses(400, 406, 413, 415, 422, 500, 503, 504, extra=[unknown]),
    }


def _content(schema: Schema, file: str, side: int, *names: str) -> dict[str, Any]:
    every = examples()
    shown = {n: {"summary": every[n][0], "value": every[n][side]} for n in names}
    return {
        json.MEDIA_TYPE: {"schema": schema, "examples": shown},
        safetensors.MEDIA_TYPE: {"schema": _FILE | {"description": file}},
    }


def _draw_request() -> Schema:
    return closed({**_spec(DrawFields), "encoding": ENCODING}, ())


def _judge_request() -> Schema:
    outputs = {n: tensor(FLOATING, "In the dtype of the case") for n in _result_names()}
    every = {"case": _case(), "outputs": closed(outputs, ["output"]), "encoding": ENCODING}
    return closed(every, ["case", "outputs"])


def _case() -> Schema:
    return closed(_spec(CaseFields), ["variant", "seed", "digest"])


def _spec(model: type[DrawFields] | type[CaseFields]) -> dict[str, Schema]:
    fields = model_fields(model)
    fields["family"] |= {"enum": list(FAMILIES)}
    fields["sizes"] = _sizes() | {"default": {}, "description": fields["sizes"]["description"]}
    fields["parameters"] |= _parameters()
    return fields


def _drawn_case() -> Schema:
    specs = [i for v in catalogue.variants().values() for i in v.inputs.values()]
    dtypes = {i.name: FLOATING if "float32" in i.dtypes else i.dtypes for i in specs}
    dtypes |= {"mask": ("bool",), "grad_output": FLOATING}
    inputs = {n: tensor(d, f"The input `{n}`") for n, d in dtypes.items()}
    return closed(
        {
            "case": closed(_spec(CaseFields)),
            "inputs": closed(inputs, ()),
            "encoding": {"enum": ["lists", "base64"]},
        }
    )


def _verdict() -> Schema:
    figures = _figures()
    whole = {
        "passed": {"type": "boolean", "description": "True if every number is within budget."},
        "diagnosis": {
            "type": "array",
            "items": TEXT,
            "description": "Names of known bugs that give these outputs, best first.",
        },
        "result": TEXT
        | {"enum": _result_names(), "description": "The result of the figures: the worst."},
    }
    results = dict.fromkeys(_result_names(), closed(figures))
    return closed({**figures, **whole, "results": closed(results, ["output"])})


def _figures() -> dict[str, Schema]:
    texts = {
        "passed": "True if every number of the result is within budget.",
        "error": "The absolute error at the worst index.",
        "budget": "The error allowed there.",
        "units": "error / budget, the largest of the result.",
        "worst_index": "The index of the worst number.",
        "expected": "The float64 result there.",
        "got": "The number sent there.",
        "cosine": "Of the whole result with the expected one; null if a number is not finite.",
        "torch_error": "The largest error of torch's own kernel; null if there is none.",
        "torch_units": "The same in units of the budget.",
    }
    number: Schema = {"anyOf": [{"type": "number"}, {"enum": NON_FINITE}]}
    maybe: Schema = {"anyOf": [*number["anyOf"], {"type": "null"}]}
    kinds: dict[str, Schema] = {
        "passed": {"type": "boolean"},
        "worst_index": {"type": "array", "items": COUNT},
        **dict.fromkeys(("cosine", "torch_error", "torch_units"), maybe),
    }
    return {n: kinds.get(n, number) | {"description": texts[n]} for n in FIGURES}


def _result_names() -> list[str]:
    gradients = {
        GRADIENT + i.name
        for v in catalogue.variants().values()
        for i in v.inputs.values()
        if not i.is_optional
    }
    return ["output", *sorted(gradients)]


def _sizes() -> Schema:
    return closed({x: {"type": "integer", "minimum": 1} for x in AXES}, ())


def _parameters() -> Schema:
    names = {n for v in catalogue.variants().values() for n in v.parameters.model_fields}
    return closed({n: {} for n in sorted(names)}, ())
