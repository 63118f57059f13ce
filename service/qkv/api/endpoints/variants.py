"""GET /v1/variants: the catalogue, and a picture of each variant."""

from functools import cache
from hashlib import sha256
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from qkv.api.openapi.operation import (
    CACHE_HEADERS,
    NOT_MODIFIED,
    problem_responses,
    unknown_variant,
    variant_name,
)
from qkv.attention import catalogue, variant_file
from qkv.attention.variant import Variant
from qkv.errors import NotFound
from qkv.wire import catalogue_responses as responses

PICTURE_TYPE: Final = "image/svg+xml"

_INERT: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:",
    "X-Content-Type-Options": "nosniff",
}


_SVG: Final = {
    "description": "An SVG without scripts.",
    "headers": CACHE_HEADERS,
    "content": {PICTURE_TYPE: {"schema": {"type": "string"}}},
}


def entry(variant: Variant) -> responses.Variant:
    """Returns the description of a variant, with the path of its picture."""
    drawn = _picture(variant.name) is not None
    picture = f"/v1/variants/{variant.name}/picture" if drawn else None
    return responses.Variant(**catalogue.describe(variant), picture=picture)


@cache
def _picture(name: str) -> bytes | None:
    """Returns the SVG of a variant that `make docs` drew; None if there is none."""
    path = variant_file.FOLDER / "pictures" / f"{name}.svg"
    return path.read_bytes() if path.is_file() else None


def router() -> APIRouter:
    """Returns the routes."""
    routes = APIRouter(tags=["catalogue"])
    name: Any = variant_name()
    unknown = problem_responses(500, 503, extra=[unknown_variant()])

    @routes.get(
        "/v1/variants",
        operation_id="list_variants",
        summary="Lists every variant: formula, inputs, parameters, outputs.",
        response_description="Every variant, sorted by name.",
        responses=problem_responses(500, 503),
    )
    async def every_variant() -> responses.Variants:
        return responses.Variants(variants=[entry(v) for v in catalogue.variants().values()])

    @routes.get(
        "/v1/variants/{variant}",
        operation_id="get_variant",
        summary="Describes one variant.",
        response_description="The variant.",
        responses=unknown,
    )
    async def one_variant(variant: name) -> responses.Variant:
        return entry(catalogue.find(variant))

    @routes.get(
        "/v1/variants/{variant}/picture",
        operation_id="get_picture",
        summary="Returns a picture of a variant's weights.",
        description="The weights for sixteen tokens: b c d occurs three times, and H is large.",
        response_class=Response,
        responses={200: _SVG, 304: NOT_MODIFIED, **unknown},
    )
    async def variant_picture(variant: name, request: Request) -> Response:
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
