"""GET /v1/variants: the catalogue."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from qkv import catalogue

__all__ = ["router"]


def router() -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["catalogue"])

    @routes.get(
        "/v1/variants",
        operation_id="list_variants",
        summary="Every variant: formula, inputs, parameters, outputs.",
    )
    async def every_variant() -> dict[str, list[dict[str, Any]]]:
        return {"variants": [v.describe() for v in catalogue.variants().values()]}

    @routes.get("/v1/variants/{variant}", operation_id="get_variant", summary="One variant.")
    async def one_variant(variant: str) -> dict[str, Any]:
        return catalogue.find(variant).describe()

    return routes
