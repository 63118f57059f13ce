"""Hooks for `schemathesis run`: they generate tensors with matching shapes.

SCHEMATHESIS_HOOKS=schemathesis_hooks schemathesis run <url>/openapi.json
"""

from __future__ import annotations

import math
import zlib
from typing import Any, Final

import httpx
import schemathesis
from schemathesis.core.parameters import ParameterLocation
from schemathesis.transport.requests import REQUESTS_TRANSPORT

from qkv.attention import catalogue
from qkv.wire import json, safetensors
from qkv.wire.open_inference import LENGTH_HEADER
from support.fitting_requests import Fitting

_BINARY: Final = "application/octet-stream"
_DEADLINE: Final = "X-Request-Timeout"
Case = schemathesis.Case[Any]


def _fitting(case: Case) -> Fitting:
    """Returns the generator of fitting bodies for a case, seeded by its body."""
    return Fitting(case.formatted_path, zlib.crc32(repr(case.body).encode()))


def _takes_tensors(path: str) -> bool:
    families = ("attention/", "gradients/", "verify/", "convert", "compare", "sweep")
    return path.startswith(tuple(f"/v1/{f}" for f in families)) or path.endswith("/infer")


def _is_number(value: Any) -> bool:
    try:
        return 0 < float(value) < math.inf
    except (TypeError, ValueError):
        return False


@schemathesis.hook
def map_case(context: schemathesis.HookContext, case: Case) -> Case:
    """Replaces a body that fits the schema by one whose tensors also fit each other.

    Bodies that are generated to violate the schema stay.
    """
    # 504 after a short deadline is no fault
    if _is_number(case.headers and case.headers.get(_DEADLINE)):
        case.headers[_DEADLINE] = "60"
    if case.meta is None or not _takes_tensors(case.operation.path):
        return case
    if str(case.headers.get(LENGTH_HEADER, "")).isdigit():
        # the serializer sets the length of the JSON
        del case.headers[LENGTH_HEADER]
    is_good = not case.meta.is_negative_at(ParameterLocation.BODY)
    if is_good and case.media_type == json.MEDIA_TYPE and isinstance(case.body, dict):
        case.body = _fitting(case).document(case.body)
    return case


# not `schemathesis.serializer`, which cannot set headers
@REQUESTS_TRANSPORT.serializer(safetensors.MEDIA_TYPE, _BINARY)
def in_bytes(context: schemathesis.SerializationContext, value: Any) -> dict[str, Any]:
    """Returns fitting bytes as the body, because the schema of such a body is only "bytes"."""
    body, length = _fitting(context.case).body()
    return {"data": body} | ({} if length is None else {"headers": {LENGTH_HEADER: str(length)}})


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: Case, kwargs: dict[str, Any]) -> None:
    """Puts the variant of a case of /v1/verify into the path, of examples too."""
    body: Any = case.body
    if isinstance(body, dict) and isinstance(body.get("case"), dict):
        named = body["case"].get("variant")
        if isinstance(named, str) and named in catalogue.variants():
            case.path_parameters["variant"] = named


@schemathesis.hook
def after_call(
    context: schemathesis.HookContext, case: Case, response: schemathesis.Response
) -> None:
    """Loads an unloaded model again, so that later requests run instead of getting 404."""
    if case.operation.path.endswith("/unload") and response.status_code == 200:
        httpx.post(str(response.request.url).removesuffix("unload") + "load", timeout=60)
