"""The operations of the OpenAPI document: parameters, bodies and responses of each path."""

from __future__ import annotations

from typing import Any, Final

from qkv import errors
from qkv.api.endpoints.metrics import TEXT_TYPE
from qkv.api.endpoints.playground import PAGE_TYPE
from qkv.api.endpoints.variants import PICTURE_TYPE, entry
from qkv.api.openapi import (
    examples,
    layer_schemas,
    measure,
    open_inference,
    run_schemas,
    schemas,
    verify_schemas,
)
from qkv.api.openapi.examples import Examples
from qkv.api.openapi.problem_responses import problem_responses
from qkv.attention import catalogue
from qkv.attention.variant import Variant
from qkv.wire import json, safetensors

__all__ = ["operations"]

_FILE_SCHEMA: Final = {"type": "string", "format": "binary"}
_ERROR_STATUSES: Final = (400, 406, 413, 415, 422, 500, 503)


def operations() -> dict[str, dict[str, Any]]:
    """Returns every operation, by path."""
    one_variant = schemas.ref("Variant")
    all_variants = schemas.closed({"variants": {"type": "array", "items": one_variant}})
    entries = [entry(v) for v in catalogue.variants().values()]
    names = list(catalogue.variants())
    parameter = {
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
        **measure.operations(),
        "/v1/convert": _convert(),
        "/v1/layers": _layers(),
        verify_schemas.PATH: verify_schemas.operation(),
        "/v1/variants": _json_operation(
            "Every variant, sorted by name.", all_variants, {"variants": entries}
        ),
        "/v1/variants/{variant}": {"parameters": [parameter]}
        | _json_operation("The variant.", one_variant, entries[0], unknown),
        "/v1/variants/{variant}/picture": {"parameters": [parameter]}
        | _cacheable("An SVG without scripts.", PICTURE_TYPE, unknown),
        "/": _cacheable("The playground.", PAGE_TYPE),
        **dict.fromkeys(("/livez", "/readyz"), _status()),
        "/metrics": _metrics(),
        **open_inference.operations(),
    }


def _attention(variant: Variant) -> dict[str, Any]:
    return _run(
        examples.attention(variant),
        run_schemas.request(variant),
        run_schemas.response(variant),
        "outputs",
    )


def _gradients(variant: Variant) -> dict[str, Any]:
    return _run(
        examples.gradients(variant),
        run_schemas.gradients_request(variant),
        run_schemas.gradients_response(variant),
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
        | problem_responses(*_ERROR_STATUSES, 504),
    }


def _convert() -> dict[str, Any]:
    cases = examples.conversions()
    body = _in_both_formats(
        "The tensors of a layer, and the target layout, or a check to detect their layout.",
        layer_schemas.convert_request(),
        "The tensors by name, those of a check as `check.x` and `check.y`; all other fields as "
        "JSON under `qkv` in the metadata.",
        cases,
        1,
    )
    good = _in_both_formats(
        "The tensors in the target layout, and the difference of both layers' outputs on the same "
        "random input. With a check, the candidates that fit it best.",
        layer_schemas.convert_response(),
        "The tensors by name; all other fields as JSON under `qkv` in the metadata.",
        cases,
        -1,
    )
    return {
        "parameters": [schemas.TIMEOUT],
        "requestBody": {"required": True} | body,
        "responses": {"200": good} | problem_responses(*_ERROR_STATUSES, 504),
    }


def _layers() -> dict[str, Any]:
    request, response = examples.layers()
    not_json = errors.UnsupportedMediaType(
        f"Content-Type is not supported: got 'text/plain', expected {json.MEDIA_TYPE}"
    )
    not_acceptable = errors.NotAcceptable(
        f"Accept excludes every format: got 'text/html', expected {json.MEDIA_TYPE}"
    )
    body = {"schema": layer_schemas.layers_request(), "example": request}
    good = {"schema": layer_schemas.layers_response(), "example": response}
    return {
        "parameters": [schemas.TIMEOUT],
        "requestBody": {
            "required": True,
            "description": "The names and shapes of a model's tensors.",
            "content": {json.MEDIA_TYPE: body},
        },
        "responses": {
            "200": {
                "description": "The attention layers, in the order of their tensors.",
                "content": {json.MEDIA_TYPE: good},
            }
        }
        | problem_responses(400, 413, 422, 500, 503, 504, extra=[not_json, not_acceptable]),
    }


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
    return {"responses": {"200": good, "304": same} | problem_responses(500, 503, extra=extra)}


def _metrics() -> dict[str, Any]:
    content = {TEXT_TYPE: {"schema": {"type": "string"}}}
    good = {"description": "Metrics in the text format 0.0.4 of Prometheus.", "content": content}
    return {"responses": {"200": good} | problem_responses(500, 503)}


def _status() -> dict[str, Any]:
    def content(word: str) -> dict[str, Any]:
        return {json.MEDIA_TYPE: {"schema": schemas.closed({"status": {"const": word}})}}

    return {
        "responses": {
            "200": {"description": "The check passes.", "content": content("ok")},
            "503": {"description": "The check fails.", "content": content("down")},
        }
        | problem_responses(500)
    }


def _json_operation(
    description: str, schema: dict[str, Any], example: Any, *extra: errors.QkvError
) -> dict[str, Any]:
    """Returns an operation without a body, with a JSON response."""
    content = {json.MEDIA_TYPE: {"schema": schema, "example": example}}
    good = {"description": description, "content": content}
    return {"responses": {"200": good} | problem_responses(500, 503, extra=extra)}


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
