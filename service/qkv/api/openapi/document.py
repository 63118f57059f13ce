"""The OpenAPI document: bodies, responses, errors and examples of each operation.

`create_app` calls `prepare_examples`, and `complete_document` with the document of FastAPI.
"""

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
from qkv.attention.variant import Variant
from qkv.wire import json, safetensors

__all__ = ["DESCRIPTION", "TAGS", "complete_document", "prepare_examples"]

DESCRIPTION: Final = f"""\
**Bodies** are `{json.MEDIA_TYPE}` or `{safetensors.MEDIA_TYPE}`. `Content-Type` is the format of
the request (default: JSON). `Accept` chooses the format of the response (default: that of the
request). In JSON a tensor is nested lists, or an object
`{{"dtype": "float32", "shape": [2, 2], "data": "<base64>"}}` with little-endian, row-major bytes.
The strings `"NaN"`, `"Infinity"` and `"-Infinity"` are numbers.

**Shapes** have a letter for each axis: B batch, H query heads, G key/value heads (H is a multiple
of G), L query length, S key length, D query and key width, E value width, M model width, I input
features, O output features, R rank, N longest S of a projection. A number is an axis of that size.
In forms of the weights, R is the requested rows, K the keys of a row, and P and Q are bins of
queries and of keys. All tensors of a request may omit the axes of heads, or of batch and heads. The
response then omits them too.

**Errors** are problem documents (RFC 9457, `{json.PROBLEM_TYPE}`). `detail` has the received and
the expected value, `pointer` the position in the body. A client may retry after an error with
`Retry-After`. An unknown path is 404; a method that a path does not have is 405 with `Allow`.

**Ids**: every response has an `X-Request-ID`. It is that of the request if that has at most 128
letters, digits and `._:=+/-`; otherwise it is new.
"""

TAGS: Final = [
    {"name": "attention", "description": "Runs of variants, one path for each variant."},
    {"name": "gradients", "description": "Gradients, one path for each variant that has them."},
    {"name": "layers", "description": "The weights of layers."},
    {"name": "catalogue", "description": "The variants and their inputs."},
    {
        "name": "open inference protocol",
        "description": "Every variant as a V2 model, for clients of Triton and KServe. Each path "
        "below `/v2/models/{model}` exists below `/v2/models/{model}/versions/1` too. Errors are "
        '`{"error": "..."}`.',
    },
    {"name": "operations", "description": "Probes and metrics."},
]

_KEY_DESCRIPTION: Final = (
    "One of the keys in `QKV_API_KEYS`. Without that setting, no key is needed."
)
_FILE_SCHEMA: Final = {"type": "string", "format": "binary"}
_ERROR_STATUSES: Final = (400, 406, 413, 415, 422, 500, 503)
_CONNECTION_ERRORS: Final = (
    errors.MalformedRequest("malformed HTTP/1.1 request"),
    errors.RequestTimeout("the rest of the request did not arrive in time"),
    errors.HeadersTooLarge("the request has too many headers: got 101, expected at most 100"),
)
_FRAMING_ERROR: Final = errors.PayloadTooLarge(
    "the request has more than 1048576 bytes beside its body; send larger chunks"
)


def prepare_examples() -> None:
    """Runs the examples and draws the pictures. Call it before the engine starts: both run
    outside the engine."""
    examples.conversions()
    examples.inference()
    measure.examples()
    for variant in catalogue.variants().values():
        examples.attention(variant)
        if variant.backward is not None:
            examples.gradients(variant)
        variant_pictures.draw(variant)


def complete_document(document: dict[str, Any], is_guarded: bool) -> None:
    """Replaces the bodies and responses of FastAPI's document, in place.

    FastAPI omits a default of null, writes integer bounds as floats, and cannot describe these
    bodies.

    Args:
        document: FastAPI's document.
        is_guarded: requests need an API key.
    """
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
            **open_inference.components(),
        },
        "securitySchemes": {
            "key": {"type": "http", "scheme": "bearer", "description": _KEY_DESCRIPTION}
        },
    }
    if is_guarded:
        _require_key(document)


def _connection_errors(path: str, reads_body: bool) -> dict[str, Any]:
    """Returns the errors of a connection, which are independent of the operation.

    An operation without a body responds before its request can have a malformed one.
    """
    extra = [*_CONNECTION_ERRORS, *([_FRAMING_ERROR] if reads_body else [])]
    if path.startswith("/v2"):
        return open_inference.error_responses(*(error.status for error in extra))
    return _error_responses(extra=extra)


def _require_key(document: dict[str, Any]) -> None:
    """Adds the API key to every operation except those on public paths."""
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
        "name": "variant", "in": "path", "required": True, "description": "The variant's name.",
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
        "/v1/variants": _json_operation(
            "Every variant, sorted by name.", listed, {"variants": entries}
        ),
        "/v1/variants/{variant}": {"parameters": [one]}
        | _json_operation("The variant.", every, entries[0], unknown),
        "/v1/variants/{variant}/picture": {"parameters": [one]} | _picture(unknown),
        "/": _cacheable("The playground.", PAGE_TYPE),
        **dict.fromkeys(("/livez", "/readyz"), _status()),
        "/metrics": _metrics(),
        **open_inference.operations(),
    }


def _attention(variant: Variant) -> dict[str, Any]:
    return _run(
        examples.attention(variant), schemas.request(variant), schemas.response(variant), "outputs"
    )


def _gradients(variant: Variant) -> dict[str, Any]:
    return _run(
        examples.gradients(variant),
        schemas.gradients_request(variant),
        schemas.gradients_response(variant),
        "gradients",
    )


def _run(
    cases: Examples, request: dict[str, Any], response: dict[str, Any], noun: str
) -> dict[str, Any]:
    """Returns an operation that runs a variant; `noun` is the field of its tensors."""
    good = _in_both_formats(
        f"The requested {noun}, and the timing.",
        response,
        f"The {noun} by name; `variant` and `timing` as JSON under `qkv` in the metadata.",
        cases,
        -1,
    )
    timing = {
        "description": "The times of `timing`, in the format of Server-Timing (W3C).",
        "required": True,
        "schema": {"type": "string"},
        "example": "queue;dur=0.0200, transfer;dur=0.0200, compute;dur=0.1100, total;dur=0.2800",
    }
    body = _in_both_formats(
        "Tensors, parameters, and the requested outputs.",
        request,
        "The inputs by name, the tensors of a layer as `layer.<name>`; all other fields as JSON "
        "under `qkv` in the metadata.",
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
        "The tensors of a layer, and the target layout.",
        schemas.convert_request(),
        "The tensors by name; all other fields as JSON under `qkv` in the metadata.",
        cases,
        1,
    )
    good = _in_both_formats(
        "The tensors in the target layout, and the difference of both layers' outputs on the same "
        "random input.",
        schemas.convert_response(),
        "The tensors by name; `from`, `to` and `check` as JSON under `qkv` in the metadata.",
        cases,
        -1,
    )
    return {
        "requestBody": {"required": True} | body,
        "responses": {"200": good} | _error_responses(*_ERROR_STATUSES),
    }


def _picture(unknown: errors.NotFound) -> dict[str, Any]:
    return _cacheable("An SVG without scripts.", PICTURE_TYPE, unknown)


def _cacheable(description: str, media_type: str, *extra: errors.QkvError) -> dict[str, Any]:
    """Returns an operation whose response clients may cache."""
    tag = {
        "description": "For `If-None-Match` in the next request.",
        "required": True,
        "schema": {"type": "string"},
    }
    content = {media_type: {"schema": {"type": "string"}}}
    good = {"description": description, "headers": {"ETag": tag}, "content": content}
    same = {"description": "The cached response is current.", "headers": {"ETag": tag}}
    return {"responses": {"200": good, "304": same} | _error_responses(500, 503, extra=extra)}


def _metrics() -> dict[str, Any]:
    content = {TEXT_TYPE: {"schema": {"type": "string"}}}
    good = {"description": "Metrics in the text format 0.0.4 of Prometheus.", "content": content}
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
    """Returns an operation without a body, with a JSON response."""
    content = {json.MEDIA_TYPE: {"schema": schema, "example": example}}
    good = {"description": description, "content": content}
    return {"responses": {"200": good} | _error_responses(500, 503, extra=extra)}


def _error_responses(*statuses: int, extra: Iterable[errors.QkvError] = ()) -> dict[str, Any]:
    """Returns the error responses with these statuses, and those of these errors."""
    responses = {}
    for error in [*(e for e in examples.PROBLEMS if e.status in statuses), *extra]:
        problem = error.problem()
        fixed = {name: {"const": problem[name]} for name in ("type", "title", "status")}
        schema = schemas.ref("Problem") | {"properties": fixed}
        if isinstance(error, errors.InvalidContent):
            schema["required"] = ["pointer"]
        summary = (inspect.getdoc(type(error)) or "").partition("\n")[0]
        responses[error.status] = {
            "description": f"{error.title}. {summary}",
            "content": {json.PROBLEM_TYPE: {"schema": schema, "example": problem}},
        }
        if isinstance(error, errors.ServiceUnavailable):
            responses[error.status]["headers"] = {
                "Retry-After": {
                    "description": "Seconds until the client may retry.",
                    "required": True,
                    "schema": {"type": "integer", "minimum": 1},
                }
            }
    return {str(status): responses[status] for status in sorted(responses)}


def _in_both_formats(
    description: str, schema: dict[str, Any], file: str, cases: Examples, side: int
) -> dict[str, Any]:
    """Returns a body in both formats.

    Args:
        description: of the body.
        schema: of the JSON.
        file: description of the safetensors file.
        cases: the examples.
        side: the index of the body in an example: 1 for requests, -1 for responses.
    """
    shown = {n: {"summary": pair[0], "value": pair[side]} for n, pair in cases.items()}
    content = {"schema": schema} | ({"examples": shown} if shown else {})
    return {
        "description": description,
        "content": {
            json.MEDIA_TYPE: content,
            safetensors.MEDIA_TYPE: {"schema": _FILE_SCHEMA | {"description": file}},
        },
    }
