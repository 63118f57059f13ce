"""The OpenAPI document: its texts, the operations of all routes, their components and API key.

`create_app` calls `build_document`.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from typing import Any, Final

from fastapi import FastAPI
from fastapi.routing import APIRoute

from qkv import errors
from qkv.api.auth import PUBLIC_PATHS
from qkv.api.openapi import open_inference_operation
from qkv.api.openapi.operation import problem_responses
from qkv.api.openapi.schemas import COMPONENT
from qkv.wire import json, safetensors

__all__ = ["DESCRIPTION", "EXAMPLES", "EXAMPLES_FILE", "TAGS", "build_document"]

EXAMPLES_FILE: Final = "examples.json"
"""The examples of requests and responses by operation, beside this module."""

EXAMPLES: Final = json.load(files(__package__).joinpath(EXAMPLES_FILE).read_bytes())
"""By operation id: `request` and `response`, each by name."""
_DATA: Final = ("example", "examples")  # no schemas

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


def build_document(app: FastAPI, routes: Iterable[APIRoute], is_guarded: bool) -> dict[str, Any]:
    """Returns the document of an application.

    FastAPI's own omits a default of null, writes integer bounds as floats, and cannot describe
    these bodies.

    Args:
        app: has the title and other texts.
        routes: `openapi_extra` of each describes its operation.
        is_guarded: requests need an API key.
    """
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if route.include_in_schema:
            method = next(iter(route.methods or ()))
            operations = paths.setdefault(route.path_format, {})
            operations[method.lower()] = _operation(route, method == "POST")
    for operation in (o for methods in paths.values() for o in methods.values()):
        _add_examples(operation)
    schemas: dict[str, Any] = {}
    key = {"type": "http", "scheme": "bearer", "description": _KEY_DESCRIPTION}
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": app.title,
            "summary": app.summary,
            "description": app.description,
            "license": app.license_info,
            "version": app.version,
        },
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": key}},
        "tags": app.openapi_tags,
    }
    if is_guarded:
        _require_key(document)
    document["paths"] = _collect(paths, schemas)
    return document


def _operation(route: APIRoute, reads_body: bool) -> dict[str, Any]:
    about = {"description": route.description} if route.description else {}
    operation = {
        "tags": route.tags,
        "summary": route.summary,
        **about,
        "operationId": route.operation_id or route.unique_id,
        **(route.openapi_extra or {}),
    }
    every = _connection_errors(route.path, reads_body) | operation["responses"]
    return operation | {"responses": dict(sorted(every.items()))}


def _add_examples(operation: dict[str, Any]) -> None:
    """Adds the examples of an operation, which `make docs` has made, to its first format."""
    for name, examples in EXAMPLES.get(operation["operationId"], {}).items():
        part = operation["requestBody"] if name == "request" else operation["responses"]["200"]
        kind = next(iter(part["content"]))
        part["content"][kind] |= {"examples": examples}


def _collect(node: Any, schemas: dict[str, Any]) -> Any:
    """Moves the components in a part of the document to `schemas`.

    Returns:
        The part with references to them.
    """
    if isinstance(node, list):
        return [_collect(item, schemas) for item in node]
    if not isinstance(node, dict):
        return node
    rest = {
        key: value if key in _DATA else _collect(value, schemas)
        for key, value in node.items()
        if key != COMPONENT
    }
    if COMPONENT not in node:
        return rest
    name, schema = node[COMPONENT]
    content = _collect(schema, schemas)
    assert schemas.setdefault(name, content) == content, f"two components have the name {name}"
    return {"$ref": f"#/components/schemas/{name}", **rest}


def _connection_errors(path: str, reads_body: bool) -> dict[str, Any]:
    """Returns the errors of a connection, which are independent of the operation.

    An operation without a body responds before its request can have a malformed one.
    """
    extra = [*_CONNECTION_ERRORS, *([_FRAMING_ERROR] if reads_body else [])]
    if path.startswith("/v2"):
        return open_inference_operation.error_responses(*(error.status for error in extra))
    return problem_responses(extra=extra)


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
            every = operation["responses"] | {"401": response | {"headers": headers}}
            operation["responses"] = dict(sorted(every.items()))
