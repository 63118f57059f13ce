"""GET /v1/variants: the catalogue."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from qkv import catalogue
from qkv.routes import schemas

__all__ = ["router"]


def router() -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["catalogue"])

    @routes.get("/v1/variants", summary="Every variant: formula, inputs, parameters, outputs.")
    async def every_variant() -> dict[str, list[dict[str, Any]]]:
        return {"variants": [v.describe() for v in catalogue.variants().values()]}

    @routes.get("/v1/variants/{variant}", summary="One variant.", responses=schemas.problems(404))
    async def one_variant(variant: str) -> dict[str, Any]:
        return catalogue.find(variant).describe()

    return routes
