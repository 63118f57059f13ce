"""Case files: the inputs of one call, and its spec, as a message that any program can read.

The message is the request of a run: inputs, `parameters` and `dtype`. Beside them it has
`grad_output`, and the other fields of the spec in the field `case`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qkv.attention.catalogue import find
from qkv.attention.signature import TAIL, Input
from qkv.attention.variant import Variant
from qkv.client.arrays import from_raw_like, to_raw
from qkv.errors import InvalidContent, format_value, pointer_to
from qkv.jobs.fields import JobFields
from qkv.jobs.inputs import Inputs
from qkv.tensors import RawTensor
from qkv.testing.call import STATE, Call, state_dtype
from qkv.testing.case_limits import check_memory
from qkv.testing.case_spec import CaseSpec
from qkv.testing.judgement import expected_shapes
from qkv.wire.casting import cast_untyped
from qkv.wire.message import Message

FIELD: Final = "case"
"""The field of a request that makes it a case file."""
GRAD_OUTPUT: Final = "grad_output"

_REQUEST_FIELDS: Final = ("parameters", "dtype")
_OPTIONAL_INPUTS: Final = ("mask", "key_lengths", "sinks", STATE)

_to_tensor = from_raw_like(torch.empty(0))


class CaseFile(NamedTuple):
    """The content of a case file.

    Attributes:
        spec: the arguments that drew the call.
        call: the call, with the numbers of the file.
    """

    spec: CaseSpec
    call: Call

    @classmethod
    def draw(cls, spec: CaseSpec) -> CaseFile:
        """Draws a case, if its sizes are not too large for a file.

        Raises:
            QkvError: a field of the spec is invalid, or a size is too large.
        """
        check_memory(find(spec.variant), spec.choose_sizes(), "/sizes")
        return cls(spec, spec.draw())

    def to_message(self) -> Message:
        """Returns the content of the file.

        Raises:
            InvalidContent: the call is too large to be judged.
        """
        check_memory(self.call.variant, self.call.axis_sizes, "/inputs")
        assert self.call.grad_output is not None
        fields = replace(self.spec, parameters=dict(self.call.parameters)).to_json()
        request = {name: fields.pop(name) for name in _REQUEST_FIELDS}
        tensors = {**self.call.inputs, GRAD_OUTPUT: self.call.grad_output}
        return Message(request | {FIELD: fields}, {n: to_raw(x, n) for n, x in tensors.items()})

    @classmethod
    def from_message(cls, message: Message) -> CaseFile:
        """Returns the case in a file. Its numbers need not be those that the spec draws here.

        Raises:
            QkvError: the file is no case, or a field, tensor, dtype, shape or number is wrong.
        """
        spec = _read_spec(message.fields)
        variant = find(spec.variant)
        inputs = _read_inputs(spec, variant, message)
        call = Call(variant, inputs, spec.parameters, getattr(torch, spec.dtype))
        check_memory(variant, call.axis_sizes, "/inputs")
        shape = expected_shapes(call)["output"]
        grad_output = _read(message.tensors, GRAD_OUTPUT, spec.dtype, "inputs")
        if tuple(grad_output.shape) != shape:
            raise InvalidContent(
                f"{GRAD_OUTPUT} has the wrong shape: got {list(grad_output.shape)}, expected "
                f"{list(shape)}",
                pointer=pointer_to("inputs", GRAD_OUTPUT),
            )
        call = replace(call, grad_output=grad_output)
        _check_numbers(call)
        return cls(spec, call)


def read_results(message: Message, call: Call) -> dict[str, Tensor]:
    """Returns the results in a file; `judge` checks their names, shapes and dtypes.

    The variant's other outputs, such as weights, are left out: `qkv attend` writes them too. So is
    a state with a tail, whose sums are not those behind the last token.

    Args:
        message: the content of the file. Numbers without a dtype get that of the call.
        call: the call that the results are of.

    Raises:
        InvalidContent: numbers do not fit the dtype.
    """
    others = {*call.variant.outputs, *call.variant.tensors} - {"output", STATE}
    if any(name.startswith(TAIL) for name in message.tensors):
        others.add(STATE)
    return {
        name: _read(message.tensors, name, _dtype_of(name, call.dtype), "outputs")
        for name in message.tensors
        if name not in others
    }


def _read_spec(fields: Mapping[str, Any]) -> CaseSpec:
    rest = fields.get(FIELD)
    if not isinstance(rest, dict):
        raise InvalidContent(
            f"{FIELD} is missing: got {format_value(rest)}, expected a file that `qkv oracle` "
            "writes",
            pointer=pointer_to(FIELD),
        )
    if unknown := [name for name in fields if name not in (FIELD, *_REQUEST_FIELDS)]:
        raise InvalidContent(
            f"unknown field {unknown[0]!r:.60} of a case; known are {FIELD}, "
            f"{', '.join(_REQUEST_FIELDS)}",
            pointer=pointer_to(unknown[0]),
        )
    return CaseSpec.from_json({n: fields[n] for n in _REQUEST_FIELDS if n in fields} | rest)


def _read_inputs(spec: CaseSpec, variant: Variant, message: Message) -> dict[str, Tensor]:
    """Returns the inputs of a call with every axis, in the order of the signature."""
    tensors = {n: x for n, x in message.tensors.items() if n != GRAD_OUTPUT}
    drawn = {*variant.required_names(variant.parse(spec.parameters))}
    drawn |= variant.random_input_names | ({*_OPTIONAL_INPUTS} & variant.tensors.keys())
    if unknown := [n for n in (*tensors, *message.layer) if n not in drawn]:
        raise InvalidContent(
            f"{unknown[0]!r:.60} is no input of a case: expected {', '.join(sorted(drawn))}",
            pointer=pointer_to("inputs", unknown[0]),
        )
    fields = JobFields.model_validate({"dtype": spec.dtype})
    message = replace(message, tensors=tensors)
    inputs = Inputs.from_message(variant, variant.parse(spec.parameters), fields, message)
    raw = inputs.read_tensors(message)
    inputs.check_key_lengths(raw)
    input_tensors = {
        name: _to_tensor(x).view(_shape(variant.tensors[name], inputs.shapes[name]))
        for name, x in raw.items()
    }
    if STATE in input_tensors:  # numbers of a list are read as float64
        kept = state_dtype(getattr(torch, spec.dtype))
        input_tensors[STATE] = input_tensors[STATE].to(kept)
    for name, x in input_tensors.items():
        expected = _dtype_of(name, getattr(torch, spec.dtype))
        if str(x.dtype)[6:] != expected:
            raise InvalidContent(
                f"{name} has the wrong dtype: got {str(x.dtype)[6:]}, expected {expected}",
                pointer=pointer_to("inputs", name),
            )
    return {n: input_tensors[n] for n in variant.tensors if n in input_tensors}


def _shape(spec: Input, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of an input of a call: without an axis that may be omitted, if it is 1."""
    return shape[:-1] if spec.may_omit_last and shape[-1] == 1 else shape


def _dtype_of(name: str, dtype: torch.dtype) -> str:
    """Returns the dtype of an input or a result of a call."""
    known = {"mask": torch.bool, "key_lengths": torch.int64, STATE: state_dtype(dtype)}
    return str(known.get(name, dtype))[6:]


def _read(tensors: Mapping[str, RawTensor], name: str, dtype: str, group: str) -> Tensor:
    """Returns a floating tensor of a file.

    Raises:
        InvalidContent: it is missing, or its dtype or numbers are wrong.
    """
    pointer = pointer_to(group, name)
    if name not in tensors:
        raise InvalidContent(f"{group}.{name} is missing", pointer=pointer)
    raw = cast_untyped(tensors[name], f"{group}.{name:.60}", [dtype], dtype, pointer)
    tensor: Tensor = _to_tensor(raw)
    return tensor


def _check_numbers(call: Call) -> None:
    """Checks that all numbers are finite; NaN may be in keys and values that may be hidden.

    A decay may be -infinity.

    Raises:
        InvalidContent: a number is infinite or NaN.
    """
    assert call.grad_output is not None
    hides = any(n in call.inputs for n in _OPTIONAL_INPUTS)
    for name, x in {**call.inputs, GRAD_OUTPUT: call.grad_output}.items():
        if not x.is_floating_point():
            continue
        allowed = x.isnan() if hides and name in ("key", "value") else torch.zeros_like(x).bool()
        if name == "log_decay":
            allowed = x == -torch.inf
        if not bool((x.isfinite() | allowed).all()):
            raise InvalidContent(
                f"{name} is not finite: got {float(x[~x.isfinite()][0])}",
                pointer=pointer_to("inputs", name),
            )
