"""The body of an inference request: its models, and its fields as those of the native API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple

import pydantic

from qkv.api.endpoints.open_inference_repository import Model, default_output
from qkv.attention import catalogue
from qkv.attention.variant import Variant
from qkv.errors import InvalidContent, QkvError, format_value, pointer_to
from qkv.jobs.fields import field_error
from qkv.tensors import RawTensor
from qkv.wire import json
from qkv.wire.message import Message
from qkv.wire.open_inference_responses import InferTensor

_MAX_TIMEOUT_US: Final = (1 << 63) - 1
_MAX_QUOTED_LENGTH: Final = 4096  # no list or object that a variant takes is near it
_SEQUENCE_PARAMETERS: Final = ("sequence_id", "sequence_start", "sequence_end")


class BinaryOutput(pydantic.BaseModel):
    """Parameters of a requested output."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    binary_data: bool = False

    @pydantic.model_validator(mode="before")
    @classmethod
    def _refuse_others(cls, value: Any) -> Any:
        for name in value if isinstance(value, dict) else ():
            if name not in cls.model_fields:
                raise InvalidContent(
                    f"an output has an unknown parameter: got {name!r:.60}, expected binary_data; "
                    "classification and shared memory are not supported"
                )
        return value


class RequestedOutput(pydantic.BaseModel):
    """An output that a request names."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    name: str
    parameters: BinaryOutput | None = None


_ECHOED: Final = "If present, the same as in the path."  # KServe's client repeats them


class InferRequest(pydantic.BaseModel):
    """The body of a request: tensors, parameters and the requested outputs."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    inputs: Annotated[
        Mapping[str, RawTensor],
        pydantic.PlainValidator(
            lambda value: value,  # the codec has read them
            json_schema_input_type=Annotated[list[InferTensor], pydantic.Field(max_length=256)],
        ),
    ]
    id: Annotated[str | None, pydantic.Field(description="The response repeats it.")] = None
    model_name: Annotated[str | None, pydantic.Field(description=_ECHOED)] = None
    model_version: Annotated[str | None, pydantic.Field(description=_ECHOED)] = None
    parameters: Annotated[
        dict[str, Any] | None,
        pydantic.Field(
            description="Parameters of the variant; lists and objects may be JSON in a string. "
            "`variant` of a model that is a layer (default `softmax`). Also `binary_data_output` "
            "(default of `binary_data` of each output), `priority` (1 first, 3 last, default 2) "
            "and `timeout` (microseconds in the queue)."
        ),
    ] = None
    outputs: Annotated[
        list[RequestedOutput] | None,
        pydantic.Field(description="The outputs to return; default: `output`."),
    ] = None


class _ProtocolParameters(pydantic.BaseModel):
    """The parameters of the protocol; all others are the variant's."""

    model_config = pydantic.ConfigDict(strict=True)

    binary_data_output: bool = False
    priority: Annotated[int, pydantic.Field(ge=0, le=_MAX_TIMEOUT_US)] = 0
    timeout: Annotated[int, pydantic.Field(ge=0, le=_MAX_TIMEOUT_US)] = 0  # microseconds; 0: none


class InferFields(NamedTuple):
    """The fields of a request but its id, validated.

    Attributes:
        variant: the name of the variant.
        run_fields: the fields of the same run as a request of the native API.
        outputs: the names of the outputs to return, in order.
        binary: the names of the outputs that are sent as bytes.
        priority: as for `Engine.submit`.
        timeout_s: seconds that it may be queued; None: no limit.
    """

    variant: str
    run_fields: dict[str, Any]
    outputs: list[str]
    binary: set[str]
    priority: int
    timeout_s: float | None


def parse_fields(message: Message, model: Model, version: str) -> tuple[str | None, InferFields]:
    """Returns the id of a request, and its other fields translated into those of the native API.

    Raises:
        InvalidContent: a field or a parameter is unknown or invalid.
    """
    try:
        fields = InferRequest.model_validate({**message.fields, "inputs": message.tensors})
    except pydantic.ValidationError as error:
        nested = {*RequestedOutput.model_fields, *BinaryOutput.model_fields}
        raise field_error(error, list(InferRequest.model_fields), nested=nested) from None
    expected_values = {"model_name": model.name, "model_version": version}
    for field, expected in expected_values.items():
        if (value := getattr(fields, field)) not in (None, "", expected):
            raise InvalidContent(
                f"{field} is wrong: got {value!r:.60}, expected {expected!r} as in the path"
            )
    parameters = dict(fields.parameters or {})
    variant = model.variant
    if model.layer is not None:
        variant = _find_variant(parameters.pop("variant", variant.name))
    protocol_parameters = _parse_protocol_parameters(
        {n: v for n, v in parameters.items() if n in _ProtocolParameters.model_fields}
    )
    variant_parameters = {
        n: _unquote(n, v)
        for n, v in parameters.items()
        if n not in _ProtocolParameters.model_fields
    }
    requested = fields.outputs or [RequestedOutput(name=default_output(variant))]
    outputs = [output.name for output in requested]
    for group, specs in variant.groups.items():
        if group in outputs:
            raise InvalidContent(
                f"outputs names {group}: expected each of its tensors, such as {', '.join(specs)}"
            )
    binary = {o.name for o in requested if _is_binary(o, protocol_parameters.binary_data_output)}
    run_fields: dict[str, Any] = {"parameters": variant_parameters, "outputs": outputs}
    if model.layer is not None:
        run_fields["layer"] = {"name": model.name}
    timeout_s = protocol_parameters.timeout / 1e6 or None
    return fields.id, InferFields(
        variant.name, run_fields, outputs, binary, protocol_parameters.priority, timeout_s
    )


def _find_variant(name: object) -> Variant:
    """Returns the variant that a request to a layer names.

    Raises:
        InvalidContent: there is no such variant.
    """
    known = catalogue.variants()
    if not isinstance(name, str) or name not in known:
        raise InvalidContent(
            f"variant is unknown: got {format_value(name)}, expected {', '.join(known)}",
            pointer=pointer_to("parameters", "variant"),
        )
    return known[name]


def _parse_protocol_parameters(given: dict[str, Any]) -> _ProtocolParameters:
    try:
        return _ProtocolParameters.model_validate(given)
    except pydantic.ValidationError as error:
        raise field_error(error, list(_ProtocolParameters.model_fields), "parameters") from None


def _unquote(name: str, value: Any) -> Any:
    """Returns a parameter's value. Lists and objects may be JSON in a string, because Triton's
    clients send scalars only."""
    if name in _SEQUENCE_PARAMETERS:
        raise InvalidContent(f"{name} is not supported: no model keeps state between requests")
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    pointer = pointer_to("parameters", name)
    if len(value) > _MAX_QUOTED_LENGTH:
        raise InvalidContent(
            f"parameter {name!r:.60} is too long: got {len(value)} characters of JSON, expected "
            f"at most {_MAX_QUOTED_LENGTH}",
            pointer=pointer,
        )
    try:  # with the limits of any value
        return json.decode_fields(b'{"value":%b}' % value.encode())["value"]
    except (QkvError, UnicodeEncodeError) as error:
        raise InvalidContent(
            f"parameter {name!r:.60} is invalid: got {format_value(value)}, expected JSON: {error}",
            pointer=pointer,
        ) from None


def _is_binary(output: RequestedOutput, default: bool) -> bool:
    given = output.parameters
    return default if given is None or not given.model_fields_set else given.binary_data
