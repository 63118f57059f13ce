"""Hooks for `schemathesis run` that leave out cases which repeat others of the same run.

The hooks of `schemathesis_hooks` are part of them. Only the phase `coverage` has such cases:

- Valid bodies of JSON that are replaced by the same request. `Fitting` replaces all tensors, so
  that valid ones of several forms differ in its random numbers alone.
- Invalid values in a component of the document that several fields or operations have, such as a
  tensor. The first of these places gets all invalid values, each other place one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import schemathesis
from schemathesis.core.parameters import ParameterLocation
from schemathesis.core.transforms import iter_decoded_pointer_segments
from schemathesis.generation.meta import CoveragePhaseData

from qkv.wire import json
from support.fitting_requests import Fitting
from support.schemathesis_hooks import takes_tensors

Case = schemathesis.Case[Any]
_requests: Final[set[tuple[str, ...]]] = set()
_places: Final[dict[tuple[str, str], tuple[str, str]]] = {}
"""The place of each part of a component whose invalid values are all sent."""
_other_places: Final[set[tuple[str, str]]] = set()


@schemathesis.hook
def filter_case(context: schemathesis.HookContext, case: Case) -> bool:
    """Returns False for a case that repeats another."""
    meta = case.meta
    if meta is None or not isinstance(meta.phase.data, CoveragePhaseData):
        return True
    is_of_body = meta.phase.data.parameter_location == ParameterLocation.BODY
    if not is_of_body or case.media_type != json.MEDIA_TYPE:
        return True
    if pointer := meta.phase.data.location:
        return _is_new_place(case, pointer)
    if meta.is_negative_at(ParameterLocation.BODY) or not takes_tensors(case.operation.path):
        return True
    return not isinstance(case.body, dict) or _is_new_request(case, case.body)


def _is_new_request(case: Case, body: dict[str, Any]) -> bool:
    """Returns False for a valid body that another one has been replaced by, but for the seed."""
    replaced = Fitting(case.formatted_path, 0).document(body)
    parts = case.method, case.formatted_path, case.query, case.headers, replaced
    request = tuple(map(repr, parts))
    is_new = request not in _requests
    _requests.add(request)
    return is_new


def _is_new_place(case: Case, pointer: str) -> bool:
    """Returns False for another invalid value at a place of a component that has its own elsewhere.

    Args:
        case: the case.
        pointer: to the keyword of the schema that the body violates.
    """
    place = case.operation.label, pointer
    for component, rest in _components(case, pointer):
        if _places.setdefault((component, rest), place) != place:
            field = case.operation.label, pointer.removesuffix(rest)
            is_first = field not in _other_places
            _other_places.add(field)
            return is_first
    return True


def _components(case: Case, pointer: str) -> Iterator[tuple[str, str]]:
    """Yields the components on the way to a keyword, with the rest of the way from each.

    The request itself is one, which no other operation has.
    """
    (body,) = (b for b in case.operation.body if b.media_type == json.MEDIA_TYPE)
    whole: Any = body.optimized_schema
    schema, passed = whole, 0
    for token in iter_decoded_pointer_segments(pointer):
        schema = schema[int(token)] if isinstance(schema, list) else schema.get(token)
        passed += 1 + len(token.replace("~", "~0").replace("/", "~1"))
        if isinstance(schema, dict) and (reference := schema.get("$ref")):
            name = reference.rpartition("/")[2]
            yield body.name_to_uri[name], pointer[passed:]
            schema = whole["x-bundled"][name]
        if not isinstance(schema, dict | list):
            return
