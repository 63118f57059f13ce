"""What runs the service asks of it: /livez, /readyz, and at / where to go."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Response

from qkv import __version__
from qkv.engine import Engine
from qkv.fleet import Fleet
from qkv.remote import Remote

__all__ = ["INDEX", "router"]

INDEX: Final = {
    "service": "qkv",
    "version": __version__,
    "variants": "/v1/variants",
    "docs": "/docs",
    "openapi": "/openapi.json",
}


def router(engine: Engine | Remote, fleet: Fleet) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["operations"])

    @routes.get("/", operation_id="index", summary="Where to go.")
    async def index() -> dict[str, str]:
        return INDEX

    @routes.get(
        "/livez",
        operation_id="livez",
        summary="Whether every worker lives: none is stuck.",
    )
    async def livez(response: Response) -> dict[str, str]:
        return _status(response, engine.alive and not fleet.stuck)

    @routes.get(
        "/readyz",
        operation_id="readyz",
        summary="Whether every worker takes requests.",
    )
    async def readyz(response: Response) -> dict[str, str]:
        return _status(response, engine.ready and fleet.ready)

    return routes


def _status(response: Response, good: bool) -> dict[str, str]:
    response.status_code = 200 if good else 503
    return {"status": "ok" if good else "down"}
