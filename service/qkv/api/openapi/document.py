"""The OpenAPI document: its texts, operations, components and API key.

`create_app` calls `prepare_examples`, and `complete_document` with the document of FastAPI.
"""

from __future__ import annotations

from typing import Any, Final

from qkv import errors
from qkv.api.auth import PUBLIC_PATHS
from qkv.api.openapi import examples, measure, measure_schemas, open_inference, verify_schemas
from qkv.api.openapi.components import COMPONENTS
from qkv.api.openapi.operations import operations
from qkv.api.openapi.problem_responses import problem_responses
from qkv.attention import catalogue
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


def prepare_examples() -> None:
    """Runs the examples. Call it before the engine starts: they run outside the engine."""
    examples.conversions()
    examples.inference()
    measure.examples()
    verify_schemas.examples()
    for variant in catalogue.variants().values():
        examples.attention(variant)
        if variant.backward is not None:
            examples.gradients(variant)


def complete_document(document: dict[str, Any], is_guarded: bool) -> None:
    """Replaces the bodies and responses of FastAPI's document, in place.

    FastAPI omits a default of null, writes integer bounds as floats, and cannot describe these
    bodies.

    Args:
        document: FastAPI's document.
        is_guarded: requests need an API key.
    """
    by_path = operations()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            operation |= by_path[path]  # in place
            extra = _connection_errors(path, reads_body=method == "post")
            operation["responses"] = dict(sorted((extra | operation["responses"]).items()))
    document["components"] = {
        "schemas": {
            **COMPONENTS,
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
            response = open_inference.unauthorized() if path.startswith("/v2") else unauthorized
            headers = {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}}
            every = operation["responses"] | {"401": response | {"headers": headers}}
            operation["responses"] = dict(sorted(every.items()))
