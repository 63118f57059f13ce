"""Routes that FastAPI documents, and that are called without its routing and dependencies.

`RunRoute` is the class of the routes that run variants, and `DirectRouting` finds them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, ClassVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from qkv.api.error_responses import unknown_path
from qkv.api.job_runner import JobRunner
from qkv.engine.admission import AdmittedBody

Handler = Callable[[Request], Coroutine[Any, Any, Response]]

DirectRoute = tuple[Handler, dict[str, str]]
"""The handler of the route that a path has, and the parameters in that path."""


class RunRoute(APIRoute):
    """A route of runs: admits a request, reads its body, and calls its endpoint with both.

    FastAPI's solver of dependencies takes as long as a small attention. An endpoint has the
    parameters `request`, `body`, and those of the path. The plan of a run validates the body; a
    plan that is known proves it valid.

    Attributes:
        job_runner: admits requests.
        read: returns what the endpoint gets as `body`. The request is admitted until the endpoint
            releases it, or returns.
    """

    job_runner: ClassVar[JobRunner]
    read: ClassVar[Any]

    def get_route_handler(self) -> Handler:
        """Returns the function that FastAPI calls with a request."""
        endpoint, job_runner, read = self.endpoint, self.job_runner, self.read
        worker = job_runner.worker

        async def run(request: Request) -> Response:
            worker.add_in_flight(1)
            try:
                with job_runner.admit() as admission:
                    body = await read(request, admission)
                    parameters = request.scope["path_params"]
                    response: Response = await endpoint(request, body, **parameters)
                    return response
            finally:
                worker.add_in_flight(-1)

        return run


def run_route(
    job_runner: JobRunner, read: Callable[[Request, AdmittedBody], Awaitable[Any]]
) -> type[RunRoute]:
    """Returns the class of the routes of runs whose bodies `read` reads."""
    return type("RunRoute", (RunRoute,), {"job_runner": job_runner, "read": staticmethod(read)})


class DirectRouting:
    """A middleware that finds the handler of a run by its path.

    FastAPI's routing takes about 60 us, more than a small attention.

    Args:
        app: routes all other requests.
        routes: by path.

    Raises:
        NotFound: the path has an encoded slash.
    """

    def __init__(self, app: ASGIApp, routes: Mapping[str, DirectRoute]) -> None:
        self._app, self._routes = app, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = None
        if b"%" in (path := scope.get("raw_path", b"")):
            if b"%2f" in path.lower():
                # it is not the slash of the decoded path, and a gateway's rules tell them apart
                raise unknown_path(scope)
        elif scope["type"] == "http" and scope["method"] == "POST":
            found = self._routes.get(scope["path"])
        if found is None:
            await self._app(scope, receive, send)
        else:
            handle, scope["path_params"] = found
            response = await handle(Request(scope, receive, send))
            await response(scope, receive, send)
