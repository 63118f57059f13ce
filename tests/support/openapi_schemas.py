"""What the OpenAPI document says of a value or an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema


def fits(value: Any, schema: dict[str, Any], document: dict[str, Any]) -> bool:
    """Whether a schema whose references lead into the document takes a value."""
    whole = {"components": document["components"], **schema}
    return bool(jsonschema.Draft202012Validator(whole).is_valid(value))


def response_content(document: dict[str, Any], response: httpx.Response) -> dict[str, Any]:
    """What the document says of the content of an answer, which must have the headers it names."""
    request = response.request
    operation = document["paths"][request.url.path][request.method.lower()]
    found: dict[str, Any] = operation["responses"][str(response.status_code)]
    assert all(name in response.headers for name in found.get("headers", {}))
    assert ("Retry-After" in response.headers) == ("Retry-After" in found.get("headers", {}))
    content: dict[str, Any] = found["content"][response.headers["content-type"]]
    return content


def with_renamed_fields(value: Any) -> Iterator[Any]:
    """A value with one name changed, wherever there is one."""
    if isinstance(value, dict):
        for name, inner in value.items():
            rest = {n: v for n, v in value.items() if n != name}
            yield rest | {f"{name}_": inner}
            for other in with_renamed_fields(inner):
                yield value | {name: other}


def assert_matches_document(document: dict[str, Any], response: httpx.Response) -> None:
    """Holds a JSON answer against the document, and the document against near misses."""
    answer, schema = response.json(), response_content(document, response)["schema"]
    assert fits(answer, schema, document), answer
    for other in with_renamed_fields(answer):
        assert not fits(other, schema, document), other
