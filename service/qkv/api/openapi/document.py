"""The OpenAPI document: FastAPI's, with the texts, errors, examples and API key of the service.

`create_app` calls `build_document`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from json import dumps
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from qkv import errors
from qkv.api.auth import PUBLIC_PATHS
from qkv.api.openapi import open_inference_operation
from qkv.api.openapi.operation import problem_responses
from qkv.wire import json, safetensors
from qkv.wire.open_inference_responses import ModelError
from qkv.wire.responses import Problem

EXAMPLES_FILE: Final = "examples.json"
"""The examples of requests and responses by operation, beside this module."""

EXAMPLES: Final = json.load(files(__package__).joinpath(EXAMPLES_FILE).read_bytes())
"""By operation id: `request` and `response`, each by name."""
_DATA: Final = ("example", "examples")  # no schemas
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_NAMES: Final = {"oneOf": "anyOf"}  # of keywords that generators support
_ERRORS: Final = {kind.__name__: kind.model_json_schema() for kind in (Problem, ModelError)}
_FASTAPIS: Final = ("HTTPValidationError", "ValidationError")  # components of its own errors

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
    {
        "name": "verification",
        "description": "Tests of attention functions in any language, against float64.",
    },
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
_CONNECTION_ERRORS: Final = (
    errors.MalformedRequest("malformed HTTP/1.1 request"),
    errors.Forbidden(
        "Host is not allowed: got 'pages.example', expected a name of this machine or one of "
        "QKV_ALLOWED_HOSTS"
    ),
    errors.RequestTimeout("the rest of the request did not arrive in time"),
    errors.HeadersTooLarge("the request has too many headers: got 101, expected at most 100"),
    errors.UnsupportedTransferCoding(
        "Transfer-Encoding is not supported: got 'gzip, chunked', expected chunked"
    ),
)
_FRAMING_ERROR: Final = errors.PayloadTooLarge(
    "the request has more than 1048576 bytes beside its body; send larger chunks"
)


def build_document(app: FastAPI, is_guarded: bool) -> dict[str, Any]:
    """Returns FastAPI's document of an application, tidied for people and generators of clients.

    Args:
        app: has the routes, the title and other texts.
        is_guarded: requests need an API key.
    """
    document = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        description=app.description,
        license_info=app.license_info,
        tags=app.openapi_tags,
        routes=app.routes,
        separate_input_output_schemas=False,
    )
    document["paths"] = paths = _tidy(document["paths"])
    components = document["components"]
    components["schemas"] = {
        name: _first_line(_tidy(schema))
        for name, schema in (components["schemas"] | _ERRORS).items()
        if name not in _FASTAPIS
    }
    for path, methods in paths.items():
        for method, operation in methods.items():
            _add_errors(operation, path, method == "post")
            _add_examples(operation)
            for content in operation["responses"]["200"].get("content", {}).values():
                if "anyOf" in content["schema"]:  # FastAPI calls each event of a stream a text
                    content["schema"].pop("type", None)
            for parameter in operation.get("parameters", ()):
                parameter["schema"].pop("description", None)  # the parameter has it too
    key = {"type": "http", "scheme": "bearer", "description": _KEY_DESCRIPTION}
    components["securitySchemes"] = {"key": key}
    if is_guarded:
        _require_key(document)
    return document


def _tidy(node: Any) -> Any:
    """Returns a part of the document without what only repeats a name, or breaks generators.

    FastAPI writes bounds as floats.
    """
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    tidied = {}
    for key, value in _say_default(node).items():
        if key == "title" and isinstance(value, str):
            continue
        if key == "default" and "$ref" in node:  # of a body that may be empty
            continue
        if key in _BOUNDS and isinstance(value, float) and value.is_integer():
            value = int(value)
        tidied[_NAMES.get(key, key)] = value if key in _DATA else _tidy(value)
    return tidied


def _say_default(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema whose default is in its description.

    Some generators require a field that has the keyword `default`, in requests too.
    """
    is_field = any(isinstance(schema.get(key), str) for key in ("description", "title"))
    if "default" not in schema or not is_field:  # a property may have the name "default"
        return schema
    rest = {name: value for name, value in schema.items() if name != "default"}
    if schema["default"] is None:  # the same as to leave the field out
        return rest
    default = f"Default: `{dumps(schema['default'])}`."
    return rest | {"description": f"{schema.get('description', '')} {default}".strip()}


def _first_line(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a component with the first line of the docstring of its class."""
    text = schema.get("description", "")
    return schema | ({"description": text.partition("\n")[0]} if text else {})


def _add_errors(operation: dict[str, Any], path: str, reads_body: bool) -> None:
    """Adds the errors of a connection, which every operation has.

    An operation without a body responds before its request can have a malformed one. FastAPI's own
    error of a parameter has another form than the service's.
    """
    if "HTTPValidationError" in str(operation["responses"].get("422")):
        del operation["responses"]["422"]
    extra = [*_CONNECTION_ERRORS, *([_FRAMING_ERROR] if reads_body else [])]
    if path.startswith("/v2"):
        errors = open_inference_operation.error_responses(*(error.status for error in extra))
    else:
        errors = problem_responses(extra=extra)
    _add_responses(operation, errors)


def _add_responses(operation: dict[str, Any], more: Mapping[int | str, Any]) -> None:
    """Adds responses to those of an operation, by status, in order; those that it has stay."""
    every = {str(status): response for status, response in more.items()} | operation["responses"]
    operation["responses"] = dict(sorted(every.items()))


def _add_examples(operation: dict[str, Any]) -> None:
    """Adds the examples of an operation, which `make docs` has made, to its first format."""
    for name, examples in EXAMPLES.get(operation["operationId"], {}).items():
        part = operation["requestBody"] if name == "request" else operation["responses"]["200"]
        kind = next(iter(part["content"]))
        part["content"][kind] |= {"examples": examples}


def _require_key(document: dict[str, Any]) -> None:
    """Adds the API key to every operation except those on public paths."""
    document["security"] = [{"key": []}]
    (unauthorized,) = problem_responses(extra=[errors.Unauthorized()]).values()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            if path in PUBLIC_PATHS:
                operation["security"] = []
                continue
            response = (
                open_inference_operation.unauthorized() if path.startswith("/v2") else unauthorized
            )
            headers = {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}}
            _add_responses(operation, {401: response | {"headers": headers}})
