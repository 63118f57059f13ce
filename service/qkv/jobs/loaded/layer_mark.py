"""The mark of a described layer: that its description was proven by running the real module.

A table of qkv.toml that `qkv describe` wrote has a digest of its fields and of the names and shapes
of the tensors. A changed line loses the mark. This guards against mistakes, not against forgery.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Final

import pydantic

from qkv.attention.layers.layout_catalogue import Shapes

_NOT_DESCRIBED: Final = ("mark", "longer", "blocks")
_CHARACTERS: Final = 32


class Mark(pydantic.BaseModel):
    """The proof of a description.

    Attributes:
        digest: of names, shapes, fields, and the other members of the mark.
        error: the largest one, relative to the largest number of an output.
        length: the longest sequence for which the description holds.
        versions: of the packages that ran the model.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    digest: str
    error: Annotated[float, pydantic.Field(ge=0)]
    length: Annotated[int, pydantic.Field(ge=1)]
    versions: dict[str, str]


def digest_of(fields: Mapping[str, Any], mark: Mapping[str, Any], shapes: Shapes) -> str:
    """Returns the digest of a description.

    Args:
        fields: of the table.
        mark: with or without a digest.
        shapes: of the layer's tensors, by name without the prefix.
    """
    described = {name: value for name, value in fields.items() if name not in _NOT_DESCRIBED}
    proved = {name: value for name, value in mark.items() if name != "digest"}
    tensors = sorted((name, list(shape)) for name, shape in shapes.items())
    document = [described, proved, tensors]
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:_CHARACTERS]
