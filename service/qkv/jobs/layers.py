"""A validated request for the layers of a model: finds them by the names and shapes of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final

import pydantic

from qkv.attention.layers import layout_catalogue
from qkv.attention.layers.layer_sizes import head_counts, sizes_of
from qkv.attention.layers.layout_catalogue import FoundLayer
from qkv.errors import InvalidContent, MalformedRequest, PayloadTooLarge, format_value, pointer_to
from qkv.jobs.fields import INTEGER, field_error
from qkv.wire import json
from qkv.wire.plain_json import RepeatedName, load_names

MAX_LIST_BYTES: Final = 16 << 20
"""Most bytes of a list of layers: twice a request of the most bytes."""

_MAX_TENSORS: Final = 65536
_MAX_LAYERS: Final = 4096
_MAX_NAME: Final = 512
_MAX_AXES: Final = 8
_MAX_SIZE: Final = 2**28 - 1

_Size = Annotated[int, pydantic.Field(ge=0, le=_MAX_SIZE), INTEGER]
_Shape = Annotated[list[_Size], pydantic.Field(max_length=_MAX_AXES)]
_Name = Annotated[str, pydantic.Field(max_length=_MAX_NAME)]


class LayersRequest(pydantic.BaseModel):
    """The body of a request for the layers of a model."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    shapes: Annotated[
        dict[_Name, _Shape],
        pydantic.Field(
            min_length=1,
            max_length=_MAX_TENSORS,
            description="The shape of each tensor, by its name in the checkpoint.",
        ),
    ]


def list_layers(
    fields: LayersRequest, raise_if_stopped: Callable[[], object] = lambda: None
) -> bytes:
    """Returns the attention layers of a model, as the response has them: a list in JSON.

    Args:
        fields: of the request.
        raise_if_stopped: called between pieces of the work; it raises to end it.

    Raises:
        InvalidContent: there are too many layers.
        PayloadTooLarge: the list is too long.
    """
    shapes = {name: tuple(shape) for name, shape in fields.shapes.items()}
    raise_if_stopped()
    known_layers = layout_catalogue.find_layers(shapes)
    if len(known_layers) > _MAX_LAYERS:
        raise InvalidContent(
            f"there are too many layers: got {len(known_layers)}, expected at most {_MAX_LAYERS}",
            pointer=pointer_to("shapes"),
        )
    described, size = [], 0
    for layer in known_layers:
        raise_if_stopped()
        description = _describe(layer)
        if not description["layouts"]:
            continue
        described.append(json.dump(description))
        size += len(described[-1])
        if size > MAX_LIST_BYTES:
            raise PayloadTooLarge(
                f"the list of layers is too long: got more than {MAX_LIST_BYTES} bytes for "
                f"{len(known_layers)} layers, expected fewer layers",
                limit=MAX_LIST_BYTES,
            )
    return b"[%b]" % b",".join(described)


def read_document(text: bytes) -> dict[str, Any]:
    """Parses the body of a request, whose shapes may have any number of names.

    Raises:
        MalformedRequest: the text is not a JSON object.
        InvalidContent: a name is repeated.
    """
    try:
        document = load_names(text)
    except RepeatedName as error:
        raise InvalidContent(str(error), pointer=pointer_to("shapes")) from None
    except ValueError as error:
        raise MalformedRequest(f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise MalformedRequest("the body must be a JSON object")
    return document


def shapes_error(error: pydantic.ValidationError, known: list[str], **_: Any) -> InvalidContent:
    """Describes the first error of the fields, with the name of the tensor if it is a shape."""
    fault = error.errors(include_url=False, include_context=False)[0]
    place = fault["loc"]
    if len(place) < 2 or place[0] != "shapes":
        return field_error(error, known)
    name, value = str(place[1]), format_value(fault["input"])
    if place[-1] == "[key]":
        return InvalidContent(
            f"a name is too long: got {value}, expected at most {_MAX_NAME} characters",
            pointer=pointer_to("shapes"),
        )
    return InvalidContent(
        f"the shape of {name!r:.200} is invalid: got {value}, expected a list of at most "
        f"{_MAX_AXES} integers from 0 to {_MAX_SIZE}",
        pointer=pointer_to("shapes", name),
    )


def _describe(layer: FoundLayer) -> dict[str, Any]:
    """Returns a layer with the layouts that its tensors fit."""
    layouts = []
    for name in layer.layouts:
        layout = layout_catalogue.known()[name]
        sizes = sizes_of(layout, layer.shapes)
        if sizes.problem:
            continue
        layouts.append(
            {
                "layout": name,
                "summary": layout.summary,
                "width": sizes.hidden_width,
                "rotary_order": layout.rotary_order,
                "alibi": layout.alibi,
                "heads": [count._asdict() for count in head_counts(layout, sizes)],
            }
        )
    return {
        "prefix": layer.prefix.rstrip("."),
        "layouts": layouts,
        "shapes": {name: list(shape) for name, shape in layer.shapes.items()},
    }
