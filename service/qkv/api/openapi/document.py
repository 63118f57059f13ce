"""What the OpenAPI document says of each operation: bodies, answers, faults and examples."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Final

from qkv import errors
from qkv.api import variant_pictures
from qkv.api.auth import PUBLIC_PATHS
from qkv.api.endpoints.metrics import TEXT_TYPE
from qkv.api.endpoints.playground import PAGE_TYPE
from qkv.api.endpoints.variants import PICTURE_TYPE, entry
from qkv.api.openapi import examples, measure, measure_schemas, open_inference, schemas
from qkv.api.openapi.examples import Examples
from qkv.attention import catalogue
from qkv.attention.catalogue import Variant
from qkv.wire import json, safetensors

__all__ = ["DESCRIPTION", "TAGS", "complete_document", "prepare_examples"]

DESCRIPTION: Final = f"""\
**Bodies** are `{json.MEDIA_TYPE}` or `{safetensors.MEDIA_TYPE}`: `Content-Type` says what comes
(JSON if absent), `Accept` what goes (as it came if absent, or if it likes both alike). In JSON a
tensor is nested lists, or `{{"dtype": "float32", "shape": [2, 2], "data": "<base64>"}}` with
little-endian, row-major bytes; `"NaN"`, `"Infinity"` and `"-Infinity"` stand for what JSON lacks.

**Shapes** are letters: B batch, H query heads, G key/value heads (H is a multiple of G),
L query length, S key length, D query and key width, E value width, M model width, I input
features, O output features, R rank, N longest S that a projection is made for; a number is an axis
of that size. In forms of the weights R is the rows asked for, K the keys of a row, and P and Q are
bins of queries and of keys. Heads, or batch and heads, may be left out of all tensors alike, and
are then missing from the answer.

**Errors** are problem documents (RFC 9457, `{json.PROBLEM_TYPE}`): `detail` says what came and
what was expected, `pointer` where. What comes with `Retry-After` may be sent again. Beside those
listed, a path that does not exist is 404, and a method that a path does not have is 405 with
`Allow`.

**Ids**: every answer has an `X-Request-ID`: that of the request, where it is at most 128 letters,
digits and `._:=+/-`, or else a new one.
"""

TAGS: Final = [
    {"name": "attention", "description": "One route for each variant."},
    {"name": "gradients", "description": "One route for each variant that has them."},
    {"name": "layers", "description": "A layer's weights, outside a run."},
    {"name": "catalogue", "description": "What there is, and what each variant takes."},
    {
        "name": "open inference protocol",
        "description": "Every variant as a V2 model, for clients of Triton and KServe. Each path "
        "below `/v2/models/{model}` exists below `/v2/models/{model}/versions/1` too. Errors there "
        'are `{"error": "..."}`.',
    },
    {"name": "operations", "description": "For what runs the service."},
]

_KEY_DESCRIPTION: Final = "One of the keys in `QKV_API_KEYS`; where none is set, nobody needs one."
_FILE_SCHEMA: Final = {"type": "string", "format": "binary"}
_ERROR_STATUSES: Final = (400, 404, 406, 413, 415, 422, 500, 503)
_CONNECTION_ERRORS: Final = (
    errors.MalformedRequest("this is no request of HTTP/1.1"),
    errors.RequestTimeout("the rest of the request did not come in time"),
    errors.HeadersTooLarge("the request has 101 headers; at most 100 are read"),
)
_FRAMING_ERROR: Final = errors.PayloadTooLarge(
    "of the request, more than 1048576 bytes are no body; send larger chunks"
)


def prepare_examples() -> None:
    """Runs the examples and draws the pictures. Both run outside the engine, so that is for before
    it starts."""
    examples.conversions()
    examples.inference()
    measure.examples()
    for variant in catalogue.variants().values():
        examples.attention(variant)
        if variant.backward is not None:
            examples.gradients(variant)
        variant_pictures.draw(variant)


def complete_document(document: dict[str, Any], is_guarded: bool) -> None:
    """Says of every operation what it takes and gives, in place of what FastAPI makes of it:
    FastAPI drops a default of null, writes whole bounds as floats, and knows no such bodies."""
    operations = _operations()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            operation |= operations[path]  # in place
            refused = _connection_errors(path, reads_body=method == "post")
            operation["responses"] = dict(sorted((refused | operation["responses"]).items()))
    document["components"] = {
        "schemas": {
            **schemas.COMPONENTS,
            **measure_schemas.components(),
            **open_inference.COMPONENTS,
        },
        "securitySchemes": {
            "key": {"type": "http", "scheme": "bearer", "description": _KEY_DESCRIPTION}
        },
    }
    if is_guarded:
        _require_key(document)


def _connection_errors(path: str, reads_body: bool) -> dict[str, Any]:
    """What a connection refuses whatever is asked for. What reads no body has answered before too
    much stands around one."""
    extra = [*_CONNECTION_ERRORS, *([_FRAMING_ERROR] if reads_body else [])]
    if path.startswith("/v2"):
        return open_inference.error_responses(*(error.status for error in extra))
    return _error_responses(extra=extra)


def _require_key(document: dict[str, Any]) -> None:
    """Says of every operation but the open ones that it needs a key."""
    document["security"] = [{"key": []}]
    (refused,) = _error_responses(extra=[errors.Unauthorized()]).values()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            if path in PUBLIC_PATHS:
                operation["security"] = []
                continue
            response = open_inference.unauthorized() if path.startswith("/v2") else refused
            headers = {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}}
            every = operation["responses"] | {"401": response | {"headers": headers}}
            operation["responses"] = dict(sorted(every.items()))


def _operations() -> dict[str, dict[str, Any]]:
    every = schemas.ref("Variant")
    listed = schemas.closed({"variants": {"type": "array", "items": every}})
    entries = [entry(v) for v in catalogue.variants().values()]
    names = list(catalogue.variants())
    one = {
        "name": "variant", "in": "path", "required": True, "description": "Its name.",
        "schema": {"type": "string", "enum": names}, "example": names[0],
    }  # fmt: skip
    unknown = errors.NotFound(f"no variant 'sotfmax'; there are {', '.join(names)}")
    return {
        **{f"/v1/attention/{v.name}": _attention(v) for v in catalogue.variants().values()},
        **{
            f"/v1/gradients/{v.name}": _gradients(v)
            for v in catalogue.variants().values()
            if v.backward is not None
        },
        **measure.operations(_error_responses),
        "/v1/convert": _convert(),
        "/v1/variants": _json_operation("All of them, by name.", listed, {"variants": entries}),
        "/v1/variants/{variant}": {"parameters": [one]}
        | _json_operation("That variant.", every, entries[0], unknown),
        "/v1/variants/{variant}/picture": {"parameters": [one]} | _picture(unknown),
        "/": _cacheable("The page.", PAGE_TYPE),
        **dict.fromkeys(("/livez", "/readyz"), _status()),
        "/metrics": _metrics(),
        **open_inference.operations(),
    }


def _attention(variant: Variant) -> dict[str, Any]:
    return _run(
        examples.attention(variant), schemas.request(variant), schemas.answer(variant), "outputs"
    )


def _gradients(variant: Variant) -> dict[str, Any]:
    return _run(
        examples.gradients(variant),
        schemas.gradients_request(variant),
        schemas.gradients_answer(variant),
        "gradients",
    )


def _run(
    cases: Examples, request: dict[str, Any], answer: dict[str, Any], noun: str
) -> dict[str, Any]:
    """An operation that takes inputs, and answers what is made of them."""
    good = _in_both_formats(
        f"The {noun} asked for, and the timing.",
        answer,
        f"The {noun} by name; `variant` and `timing` as JSON under `qkv` in the metadata.",
        cases,
        -1,
    )
    timing = {
        "description": "The times of the timing, as W3C's Server Timing has them.",
        "required": True,
        "schema": {"type": "string"},
        "example": "queue;dur=0.0200, transfer;dur=0.0200, compute;dur=0.1100, total;dur=0.2800",
    }
    body = _in_both_formats(
        "Tensors, and what to do with them.",
        request,
        "The inputs by name, a layer's tensors as `layer.<name>`; all else as JSON under `qkv` in "
        "the metadata.",
        cases,
        1,
    )
    return {
        "parameters": [schemas.TIMEOUT],
        "requestBody": {"required": True} | body,
        "responses": {"200": good | {"headers": {"Server-Timing": timing}}}
        | _error_responses(*_ERROR_STATUSES, 504),
    }


def _convert() -> dict[str, Any]:
    cases = examples.conversions()
    body = _in_both_formats(
        "A layer's tensors, and the layout wanted.",
        schemas.conversion(),
        "The tensors by name; all else as JSON under `qkv` in the metadata.",
        cases,
        1,
    )
    good = _in_both_formats(
        "The tensors in that layout, and how far both layers' outputs on the same random input "
        "lie apart.",
        schemas.converted(),
        "The tensors by name; `from`, `to` and `check` as JSON under `qkv` in the metadata.",
        cases,
        -1,
    )
    error_responses = _error_responses(*(status for status in _ERROR_STATUSES if status != 404))
    return {"requestBody": {"required": True} | body, "responses": {"200": good} | error_responses}


def _picture(unknown: errors.NotFound) -> dict[str, Any]:
    return _cacheable("An SVG without scripts.", PICTURE_TYPE, unknown)


def _cacheable(description: str, media_type: str, *extra: errors.QkvError) -> dict[str, Any]:
    """An operation whose answer may be one that came before."""
    tag = {
        "description": "What `If-None-Match` may say the next time.",
        "required": True,
        "schema": {"type": "string"},
    }
    content = {media_type: {"schema": {"type": "string"}}}
    good = {"description": description, "headers": {"ETag": tag}, "content": content}
    same = {"description": "It is the one that came before.", "headers": {"ETag": tag}}
    return {"responses": {"200": good, "304": same} | _error_responses(500, 503, extra=extra)}


def _metrics() -> dict[str, Any]:
    content = {TEXT_TYPE: {"schema": {"type": "string"}}}
    good = {"description": "The text format 0.0.4 of Prometheus.", "content": content}
    return {"responses": {"200": good} | _error_responses(500, 503)}


def _status() -> dict[str, Any]:
    def content(word: str) -> dict[str, Any]:
        return {json.MEDIA_TYPE: {"schema": schemas.closed({"status": {"const": word}})}}

    return {
        "responses": {
            "200": {"description": "Yes.", "content": content("ok")},
            "503": {"description": "No.", "content": content("down")},
        }
        | _error_responses(500)
    }


def _json_operation(
    description: str, schema: dict[str, Any], example: Any, *extra: errors.QkvError
) -> dict[str, Any]:
    """An operation that takes no body and answers in JSON."""
    content = {json.MEDIA_TYPE: {"schema": schema, "example": example}}
    good = {"description": description, "content": content}
    return {"responses": {"200": good} | _error_responses(500, 503, extra=extra)}


def _error_responses(*statuses: int, extra: Iterable[errors.QkvError] = ()) -> dict[str, Any]:
    """The faults with these statuses, and these faults."""
    responses = {}
    for error in [*(e for e in examples.PROBLEMS if e.status in statuses), *extra]:
        problem = error.problem()
        fixed = {name: {"const": problem[name]} for name in ("type", "title", "status")}
        schema = schemas.ref("Problem") | {"properties": fixed}
        if isinstance(error, errors.InvalidContent):
            schema["required"] = ["pointer"]
        what = (inspect.getdoc(type(error)) or "").partition("\n")[0]
        responses[error.status] = {
            "description": f"{error.title}. {what}",
            "content": {json.PROBLEM_TYPE: {"schema": schema, "example": problem}},
        }
        if isinstance(error, errors.ServiceUnavailable):
            responses[error.status]["headers"] = {
                "Retry-After": {
                    "description": "Seconds after which to send it again.",
                    "required": True,
                    "schema": {"type": "integer", "minimum": 1},
                }
            }
    return {str(status): responses[status] for status in sorted(responses)}


def _in_both_formats(
    description: str, schema: dict[str, Any], file: str, cases: Examples, side: int
) -> dict[str, Any]:
    """A body in both formats; `side` is which part of a pair of examples it is."""
    shown = {n: {"summary": pair[0], "value": pair[side]} for n, pair in cases.items()}
    content = {"schema": schema} | ({"examples": shown} if shown else {})
    return {
        "description": description,
        "content": {
            json.MEDIA_TYPE: content,
            safetensors.MEDIA_TYPE: {"schema": _FILE_SCHEMA | {"description": file}},
        },
    }
