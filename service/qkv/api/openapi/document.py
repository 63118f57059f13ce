"""What the OpenAPI document says of each operation: bodies, answers, faults and examples."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Final

from qkv import errors
from qkv.api import variant_pictures as picture
from qkv.api.auth import OPEN
from qkv.api.endpoints.metrics import TEXT_TYPE
from qkv.api.endpoints.playground import PAGE_TYPE
from qkv.api.endpoints.variants import PICTURE_TYPE, entry
from qkv.api.openapi import examples, schemas
from qkv.api.openapi import measure as openapi_compare
from qkv.api.openapi import measure_schemas as schemas_compare
from qkv.api.openapi import open_inference as openapi_v2
from qkv.api.openapi.examples import Pairs
from qkv.attention import catalogue
from qkv.attention.catalogue import Variant
from qkv.wire import json, safetensors

__all__ = ["DESCRIPTION", "TAGS", "complete", "prepare"]

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

_KEY: Final = "One of the keys in `QKV_API_KEYS`; where none is set, nobody needs one."
_FILE: Final = {"type": "string", "format": "binary"}
_FAULTS: Final = (400, 404, 406, 413, 415, 422, 500, 503)
_OF_CONNECTION: Final = (
    errors.Unparseable("this is no request of HTTP/1.1"),
    errors.TooSlow("the rest of the request did not come in time"),
    errors.TooLong("the request has 101 headers; at most 100 are read"),
)
_OF_BODY: Final = errors.TooLarge(
    "of the request, more than 1048576 bytes are no body; send larger chunks"
)


def prepare() -> None:
    """Runs the examples and draws the pictures. Both run outside the engine, so that is for before
    it starts."""
    examples.conversions()
    examples.inference()
    openapi_compare.examples()
    for variant in catalogue.variants().values():
        examples.attention(variant)
        if variant.backward is not None:
            examples.gradients(variant)
        picture.draw(variant)


def complete(document: dict[str, Any], is_guarded: bool) -> None:
    """Says of every operation what it takes and gives, in place of what FastAPI makes of it:
    FastAPI drops a default of null, writes whole bounds as floats, and knows no such bodies."""
    operations = _operations()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            operation |= operations[path]  # in place
            refused = _refused(path, reads_body=method == "post")
            operation["responses"] = dict(sorted((refused | operation["responses"]).items()))
    document["components"] = {
        "schemas": {
            **schemas.COMPONENTS,
            **schemas_compare.components(),
            **openapi_v2.COMPONENTS,
        },
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": _KEY}},
    }
    if is_guarded:
        _guard(document)


def _refused(path: str, reads_body: bool) -> dict[str, Any]:
    """What a connection refuses whatever is asked for. What reads no body has answered before too
    much stands around one."""
    faults = [*_OF_CONNECTION, *([_OF_BODY] if reads_body else [])]
    if path.startswith("/v2"):
        return openapi_v2.faults(*(fault.status for fault in faults))
    return _problems(faults=faults)


def _guard(document: dict[str, Any]) -> None:
    """Says of every operation but the open ones that it needs a key."""
    document["security"] = [{"key": []}]
    (refused,) = _problems(faults=[errors.Unauthorized()]).values()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            if path in OPEN:
                operation["security"] = []
                continue
            said = openapi_v2.unauthorized() if path.startswith("/v2") else refused
            headers = {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}}
            every = operation["responses"] | {"401": said | {"headers": headers}}
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
        **openapi_compare.operations(_problems),
        "/v1/convert": _convert(),
        "/v1/variants": _plain("All of them, by name.", listed, {"variants": entries}),
        "/v1/variants/{variant}": {"parameters": [one]}
        | _plain("That variant.", every, entries[0], unknown),
        "/v1/variants/{variant}/picture": {"parameters": [one]} | _picture(unknown),
        "/": _kept("The page.", PAGE_TYPE),
        **dict.fromkeys(("/livez", "/readyz"), _status()),
        "/metrics": _metrics(),
        **openapi_v2.operations(),
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
    pairs: Pairs, request: dict[str, Any], answer: dict[str, Any], made: str
) -> dict[str, Any]:
    """An operation that takes inputs, and answers what is made of them."""
    good = _both(
        f"The {made} asked for, and the timing.",
        answer,
        f"The {made} by name; `variant` and `timing` as JSON under `qkv` in the metadata.",
        pairs,
        -1,
    )
    timing = {
        "description": "The times of the timing, as W3C's Server Timing has them.",
        "required": True,
        "schema": {"type": "string"},
        "example": "queue;dur=0.0200, transfer;dur=0.0200, compute;dur=0.1100, total;dur=0.2800",
    }
    body = _both(
        "Tensors, and what to do with them.",
        request,
        "The inputs by name, a layer's tensors as `layer.<name>`; all else as JSON under `qkv` in "
        "the metadata.",
        pairs,
        1,
    )
    return {
        "parameters": [schemas.TIMEOUT],
        "requestBody": {"required": True} | body,
        "responses": {"200": good | {"headers": {"Server-Timing": timing}}}
        | _problems(*_FAULTS, 504),
    }


def _convert() -> dict[str, Any]:
    pairs = examples.conversions()
    body = _both(
        "A layer's tensors, and the layout wanted.",
        schemas.conversion(),
        "The tensors by name; all else as JSON under `qkv` in the metadata.",
        pairs,
        1,
    )
    good = _both(
        "The tensors in that layout, and how far both layers' outputs on the same random input "
        "lie apart.",
        schemas.converted(),
        "The tensors by name; `from`, `to` and `check` as JSON under `qkv` in the metadata.",
        pairs,
        -1,
    )
    faults = _problems(*(status for status in _FAULTS if status != 404))
    return {"requestBody": {"required": True} | body, "responses": {"200": good} | faults}


def _picture(unknown: errors.NotFound) -> dict[str, Any]:
    return _kept("An SVG without scripts.", PICTURE_TYPE, unknown)


def _kept(description: str, media_type: str, *faults: errors.QkvError) -> dict[str, Any]:
    """An operation whose answer may be one that came before."""
    tag = {
        "description": "What `If-None-Match` may say the next time.",
        "required": True,
        "schema": {"type": "string"},
    }
    content = {media_type: {"schema": {"type": "string"}}}
    good = {"description": description, "headers": {"ETag": tag}, "content": content}
    same = {"description": "It is the one that came before.", "headers": {"ETag": tag}}
    return {"responses": {"200": good, "304": same} | _problems(500, 503, faults=faults)}


def _metrics() -> dict[str, Any]:
    content = {TEXT_TYPE: {"schema": {"type": "string"}}}
    good = {"description": "The text format 0.0.4 of Prometheus.", "content": content}
    return {"responses": {"200": good} | _problems(500, 503)}


def _status() -> dict[str, Any]:
    def said(word: str) -> dict[str, Any]:
        return {json.MEDIA_TYPE: {"schema": schemas.closed({"status": {"const": word}})}}

    return {
        "responses": {
            "200": {"description": "Yes.", "content": said("ok")},
            "503": {"description": "No.", "content": said("down")},
        }
        | _problems(500)
    }


def _plain(
    description: str, schema: dict[str, Any], example: Any, *faults: errors.QkvError
) -> dict[str, Any]:
    """An operation that takes no body and answers in JSON."""
    content = {json.MEDIA_TYPE: {"schema": schema, "example": example}}
    good = {"description": description, "content": content}
    return {"responses": {"200": good} | _problems(500, 503, faults=faults)}


def _problems(*statuses: int, faults: Iterable[errors.QkvError] = ()) -> dict[str, Any]:
    """The faults with these statuses, and these faults."""
    found = {}
    for error in [*(e for e in examples.PROBLEMS if e.status in statuses), *faults]:
        said = error.problem()
        fixed = {name: {"const": said[name]} for name in ("type", "title", "status")}
        schema = schemas.ref("Problem") | {"properties": fixed}
        if isinstance(error, errors.InvalidContent):
            schema["required"] = ["pointer"]
        what = (inspect.getdoc(type(error)) or "").partition("\n")[0]
        found[error.status] = {
            "description": f"{error.title}. {what}",
            "content": {json.PROBLEM_TYPE: {"schema": schema, "example": said}},
        }
        if isinstance(error, errors.NotNow):
            found[error.status]["headers"] = {
                "Retry-After": {
                    "description": "Seconds after which to send it again.",
                    "required": True,
                    "schema": {"type": "integer", "minimum": 1},
                }
            }
    return {str(status): found[status] for status in sorted(found)}


def _both(
    description: str, schema: dict[str, Any], file: str, pairs: Pairs, side: int
) -> dict[str, Any]:
    """A body in both formats; `side` is which part of a pair of examples it is."""
    shown = {n: {"summary": pair[0], "value": pair[side]} for n, pair in pairs.items()}
    content = {"schema": schema} | ({"examples": shown} if shown else {})
    return {
        "description": description,
        "content": {
            json.MEDIA_TYPE: content,
            safetensors.MEDIA_TYPE: {"schema": _FILE | {"description": file}},
        },
    }
