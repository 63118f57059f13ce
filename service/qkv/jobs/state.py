"""The tensors of a state in requests and responses: which ones, and what they belong to.

`state.version` has a row of numbers for each sequence: the version of the format, the variant, the
dtype, the form, and the parameters. All but the form must be those of the request.
"""

from __future__ import annotations

import typing
import zlib
from collections.abc import Collection, Mapping
from typing import Any, Final

import pydantic

from qkv.attention import catalogue
from qkv.attention.layers.layer import Layer
from qkv.attention.signature import STATE, TAIL, VERSION
from qkv.attention.variant import Variant
from qkv.errors import InvalidContent, format_value, pointer_to
from qkv.tensors import FLOATING, RawTensor

SUMS: Final = f"{STATE}sums"
GRAD_SUMS: Final = f"grad_{SUMS}"
"""The input of gradients that holds the gradient of the sums of a compact state."""
LENGTH: Final = f"{TAIL}length"
_FORMAT: Final = 1
_FORMS: Final = ("exact", "compact")


def check_tokens(variant: Variant, sizes: Mapping[str, int], wanted: Collection[str]) -> None:
    """Checks that a request without new tokens wants no more than the output and the state.

    Raises:
        InvalidContent: it wants something else of the tokens.
    """
    more = [name for name in wanted if name != "output" and not name.startswith(STATE)]
    for spec in variant.inputs.values() if more else ():
        for letter in spec.letters:
            if sizes.get(letter) == 0:
                raise InvalidContent(
                    f"{spec.name} is empty: got {letter}=0, expected 1 or more for {more[0]}",
                    pointer=pointer_to("inputs", spec.name),
                )


def check_names(variant: Variant, parameters: pydantic.BaseModel, names: Collection[str]) -> None:
    """Checks that a request has a whole state, or sums alone, or none.

    Raises:
        InvalidContent: a tensor is missing, or belongs to another rule.
    """
    given = [n for n in variant.tensors if n in names and n.startswith(STATE)]
    if not given or given == [SUMS]:
        return
    whole = variant.state_names(parameters.model_copy(update={"state": "exact"}))
    compact = variant.state_names(parameters.model_copy(update={"state": "compact"}))
    if set(given) in ({*whole}, {*compact}):
        return
    expected = whole if any(n.startswith(TAIL) for n in given) else compact
    wrong = [n for n in given if n not in expected]
    missing = [n for n in expected if n not in given]
    if wrong:
        raise InvalidContent(
            f"{wrong[0]} is not part of this state: expected {', '.join(expected)}",
            pointer=pointer_to("inputs", wrong[0]),
        )
    raise InvalidContent(
        f"{missing[0]} is missing from inputs: got {', '.join(given)}, expected the whole state, "
        f"{', '.join(expected)}",
        pointer="/inputs",
    )


def input_of_tail(name: str) -> str | None:
    """Returns the name of the input that a tensor of the tail has the dtype of; None: none."""
    return name.removeprefix(TAIL) if name.startswith(TAIL) and name != LENGTH else None


def cast_dtype(name: str, dtypes: Mapping[str, str], dtype: str) -> str:
    """Returns the dtype of a tensor of a state that is sent without one.

    Args:
        name: of the tensor; of other tensors it is the dtype of the request.
        dtypes: those of the inputs.
        dtype: that of the request.
    """
    if (like := input_of_tail(name)) is not None:
        return dtypes.get(like, dtype)
    return "float64" if name.startswith(STATE) or name == GRAD_SUMS else dtype


def check_fit(
    variant: Variant, parameters: pydantic.BaseModel, sizes: Mapping[str, int], layer: Layer | None
) -> None:
    """Checks that a request with a state is one that the next tokens can continue.

    Raises:
        InvalidContent: a parameter, the number of queries or the layer does not fit a state.
    """
    for name, needed in variant.state_needs.items():
        if (value := getattr(parameters, name)) != needed:
            raise InvalidContent(
                f"{name} does not fit a state: got {format_value(value)}, expected "
                f"{format_value(needed)}",
                pointer=pointer_to("parameters", name),
            )
    if (L := sizes.get("L", sizes["S"])) != sizes["S"]:
        raise InvalidContent(
            f"query does not fit a state: got {L} queries beside {sizes['S']} keys, expected as "
            "many",
            pointer="/inputs/query",
        )
    if layer is not None and layer.options.rope is not None:
        raise InvalidContent(
            "rope does not fit a state: got a layer with positions, which count from the first "
            "token of each request, expected one without",
            pointer="/layer",
        )


def version_of(variant: Variant, parameters: pydantic.BaseModel, dtype: str) -> list[int]:
    """Returns the numbers of `state.version` of the state that a request returns."""
    form = parameters.model_dump()["state"]
    return [
        _FORMAT, zlib.crc32(variant.name.encode()), FLOATING.index(dtype), _FORMS.index(form),
        *(_encode(getattr(parameters, n)) for n in _names(variant)),
    ]  # fmt: skip


def check_numbers(
    variant: Variant,
    parameters: pydantic.BaseModel,
    dtype: str,
    tensors: Mapping[str, RawTensor],
) -> None:
    """Checks what a state belongs to, and the lengths of its tails.

    Raises:
        InvalidContent: the state belongs to another variant, dtype or parameter, lacks its tail, or
            has a length that is out of range.
    """
    if (version := tensors.get(VERSION)) is None:
        return
    expected = version_of(variant, parameters, dtype)
    expected[3] = _FORMS.index("exact" if LENGTH in tensors else "compact")
    labels = ["format", "variant", "dtype", "form", *_names(variant)]
    for row in version.numpy().reshape(-1, len(expected)).tolist():
        for label, number, wanted in zip(labels, row, expected, strict=True):
            if number != wanted:
                values = _values(variant, label, {wanted: getattr(parameters, label, wanted)})
                got, right = (format_value(values.get(x, x)) for x in (number, wanted))
                raise InvalidContent(
                    f"{VERSION} belongs to another {label}: got {got}, expected {right} as the "
                    "request has",
                    pointer=pointer_to("inputs", VERSION),
                )
    if (lengths := tensors.get(LENGTH)) is None:
        return
    counts, most = lengths.numpy(), parameters.model_dump()["chunk"] - 1
    if ((counts < 0) | (counts > most)).any():
        raise InvalidContent(
            f"{LENGTH} is out of range: got {', '.join(map(str, counts[:8]))}, expected 0 to "
            f"{most}",
            pointer=pointer_to("inputs", LENGTH),
        )


def _names(variant: Variant) -> list[str]:
    """Returns the parameters that a state belongs to."""
    return [name for name in variant.parameters.model_fields if name != "state"]


def _encode(value: Any) -> int:
    """Returns a parameter as a number that each JSON parser reads exactly; a digest of words."""
    if isinstance(value, int):
        return int(value)
    return zlib.crc32(repr(value).encode())


def _values(variant: Variant, label: str, known: Mapping[int, Any]) -> Mapping[int, Any]:
    """Returns the values of some numbers of a version; `known` are those of the request."""
    if label == "variant":
        return {zlib.crc32(name.encode()): name for name in catalogue.variants()}
    if label in ("dtype", "form"):
        return dict(enumerate(FLOATING if label == "dtype" else _FORMS))
    if (field := variant.parameters.model_fields.get(label)) is None:
        return known
    values = (field.default, *typing.get_args(field.annotation))
    return {**known, **{_encode(x): x for x in (*values, *([False, True] * (values[0] is False)))}}
