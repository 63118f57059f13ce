"""GET /v1/variants: the catalogue, and a picture of each variant."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from qkv.api.openapi.operation import (
    CACHE_HEADERS,
    NOT_MODIFIED,
    describe,
    in_json,
    problem_responses,
    unknown_variant,
    variant_parameter,
)
from qkv.api.openapi.schemas import (
    COUNT,
    FLAG,
    TEXT,
    Schema,
    closed,
    enumeration,
    list_of,
    named,
    nullable,
)
from qkv.attention import catalogue, variant_file
from qkv.attention.variant import Variant
from qkv.errors import NotFound, QkvError
from qkv.tensors import DTYPES

__all__ = ["PICTURE_TYPE", "entry", "router"]

PICTURE_TYPE: Final = "image/svg+xml"

_INERT: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:",
    "X-Content-Type-Options": "nosniff",
}


def entry(variant: Variant) -> dict[str, Any]:
    """Returns the description of a variant, with the path of its picture."""
    drawn = _picture(variant.name) is not None
    return catalogue.describe(variant) | {
        "picture": f"/v1/variants/{variant.name}/picture" if drawn else None
    }


@cache
def _picture(name: str) -> bytes | None:
    """Returns the SVG of a variant that `make docs` drew; None if there is none."""
    path = variant_file.FOLDER / "pictures" / f"{name}.svg"
    return path.read_bytes() if path.is_file() else None


def router() -> APIRouter:
    """Returns the routes."""
    routes = APIRouter(tags=["catalogue"])

    @routes.get(
        "/v1/variants",
        operation_id="list_variants",
        summary="Lists every variant: formula, inputs, parameters, outputs.",
        openapi_extra=_describe(
            in_json(
                "Every variant, sorted by name.",
                named("Variants", closed({"variants": list_of(_entry_schema())})),
            )
        ),
    )
    async def every_variant() -> dict[str, list[dict[str, Any]]]:
        return {"variants": [entry(v) for v in catalogue.variants().values()]}

    @routes.get(
        "/v1/variants/{variant}",
        operation_id="get_variant",
        summary="Describes one variant.",
        openapi_extra=_describe(in_json("The variant.", _entry_schema()), unknown_variant()),
    )
    async def one_variant(variant: str) -> dict[str, Any]:
        return entry(catalogue.find(variant))

    @routes.get(
        "/v1/variants/{variant}/picture",
        operation_id="get_picture",
        summary="Returns a picture of a variant's weights.",
        description="The weights for an example input, which docs/variants.md describes.",
        openapi_extra=_describe_picture(),
    )
    async def variant_picture(variant: str, request: Request) -> Response:
        svg = _picture(catalogue.find(variant).name)
        if svg is None:
            raise NotFound(f"{variant} has no picture: `make docs` drew none")
        tag = f'"{sha256(svg).hexdigest()[:16]}"'
        # clients revalidate, because another release may draw another picture
        headers = _INERT | {"ETag": tag, "Cache-Control": "no-cache"}
        known = request.headers.get("If-None-Match", "").split(",")
        if any(k.strip().removeprefix("W/") in (tag, "*") for k in known):
            return Response(status_code=304, headers=headers)
        return Response(svg, media_type=PICTURE_TYPE, headers=headers)

    return routes


def _describe(response: dict[str, Any], *extra: QkvError) -> dict[str, Any]:
    """Returns the description of an operation without a body; errors are those of its path."""
    responses = {"200": response} | problem_responses(500, 503, extra=extra)
    return describe(responses, parameters=[variant_parameter("variant")] if extra else ())


def _describe_picture() -> dict[str, Any]:
    svg = {
        "description": "An SVG without scripts.",
        "headers": CACHE_HEADERS,
        "content": {PICTURE_TYPE: {"schema": TEXT}},
    }
    described = _describe(svg, unknown_variant())
    described["responses"]["304"] = NOT_MODIFIED
    return described


def _entry_schema() -> Schema:
    """Returns the component of a variant in the catalogue."""
    letters = list_of(TEXT, description="One letter per axis.")
    dtypes = list_of(enumeration("Dtype", DTYPES))
    random = FLAG | {"description": "True if a request without it gets one drawn at random."}
    flags = {"broadcasts": FLAG, "optional": FLAG, "random": random}
    tensor = closed({"shape": letters, "dtypes": dtypes, **flags})
    output = closed({"shape": letters, "dtype": TEXT})
    words = ("variant", "summary", "formula", "paper", "cost", "weights")
    return named(
        "Variant",
        closed(
            dict.fromkeys(words, TEXT)
            | {
                "inputs": _by_name(named("InputDescription", tensor)),
                "parameters": {"type": "object", "description": "A JSON schema."},
                "refuses": _by_name(TEXT)
                | {"description": "Parameters that this variant rejects, with the reason."},
                "outputs": _by_name(named("OutputDescription", output)),
                "steps": _steps_schema(),
                "gradients": list_of(
                    TEXT,
                    description="Inputs that have gradients; empty if the variant has none.",
                ),
                "picture": {
                    "type": ["string", "null"],
                    "description": "Path of a picture of its weights; null if there is none.",
                },
            }
        ),
    )


def _steps_schema() -> Schema:
    """Returns the schema of the steps of a variant."""
    step = closed(
        {
            "name": TEXT | {"description": "The output is `steps.<name>`."},
            "axes": list_of(TEXT, description="One letter per axis."),
            "symbol": nullable(TEXT) | {"description": "The part of the formula that it is."},
            "summary": TEXT,
            "rows": nullable(TEXT)
            | {"description": "The axis whose rows a reader follows one by one."},
            "needs": list_of(
                TEXT,
                description="Inputs and parameters: the step exists if a request has one of them. "
                "Empty: it always exists.",
            ),
        }
    )
    fields = {
        "max_tokens": COUNT | {"description": "The most queries, and the most keys."},
        "max_items": COUNT | {"description": "The most items of the batch."},
        "max_bytes": COUNT | {"description": "The most bytes of all steps together."},
        "names": list_of(named("Step", step), description="In the order of computation."),
    }
    return nullable(named("Steps", closed(fields))) | {
        "description": "The tensors between inputs and output that `outputs` may name, and the "
        "bounds of requests for them; null if there are none."
    }


def _by_name(schema: Schema) -> Schema:
    return {"type": "object", "additionalProperties": schema}
