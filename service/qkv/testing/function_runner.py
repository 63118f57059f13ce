"""Runs a user's function on a call, and finds faults that need no reference.

The faults are exceptions, wrong shapes, dtypes or devices, and inputs that the function changes.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from qkv.client.arrays import to_raw
from qkv.testing.call import STATE, Call, state_dtype
from qkv.testing.convention import Convention, Layout, arrange, swap_axes

Framework = Literal["torch", "numpy", "jax"]
"""The kind of arrays that the function takes."""

_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


class Outcome(NamedTuple):
    """The results of a function for one call.

    Attributes:
        results: tensors on the CPU: `output`, of a recurrence `state.sums`, and the gradients as
            `grad query` and so on.
        problem: the fault; "" without one.
        not_run: the reason why the function did not run; "" if it ran.
        is_exception: True if `problem` is an exception of the function.
    """

    results: dict[str, Tensor]
    problem: str = ""
    not_run: str = ""
    is_exception: bool = False


def run_function(
    function: Callable[..., Any],
    call: Call,
    *,
    device: str | torch.device = "cpu",
    framework: Framework = "torch",
    gradients: bool = False,
    layout: Layout = "BHTD",
) -> Outcome:
    """Calls the function, with gradients by torch's autograd on request.

    Args:
        function: takes the positional inputs of the call and its keywords.
        call: the inputs and parameters.
        device: of the inputs.
        framework: of the arrays that the function takes; any array may come back.
        gradients: True to compute the gradients too.
        layout: of the axes that the function takes and returns.
    """
    convention = Convention.of(function, call)
    if convention.missing:
        return Outcome({}, not_run=f"the function does not take {convention.missing!r}")
    copies = {n: _copy(arrange(call, n, x, layout)) for n, x in call.inputs.items()}
    sent = {n: x.to(device) for n, x in copies.items()}
    arrays = {n: _to_framework(x, framework) for n, x in sent.items()}
    if gradients:
        for name in call.positional:
            sent[name].requires_grad_()
    values = {**call.parameters, **arrays}
    positional = [arrays[n] for n in convention.positional]
    keywords = {name: values[n] for n, name in convention.keywords.items()}
    try:
        returned = function(*positional, **keywords, **convention.constants)
        output, state = _split(returned, call, convention.asks_for_state)
        if problem := _find_fault(output, call, device, layout):
            return Outcome({}, problem)
        if state is not None and (problem := _find_state_fault(state, call)):
            return Outcome({}, problem)
        output = output.transpose(1, 2) if layout == "BTHD" else output
        results = {"output": output.detach()} | ({} if state is None else {STATE: state.detach()})
        if gradients:
            if not output.requires_grad:
                return Outcome({}, not_run="the output has no gradient (torch autograd)")
            results |= _gradients(output, sent, call, layout)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip()
        unexpected = _UNEXPECTED.search(text) if isinstance(error, TypeError) else None
        if unexpected and unexpected[1] in call.keywords:
            return Outcome({}, not_run=f"the function does not take {unexpected[1]!r}")
        return Outcome({}, f"raises {text[:500]}", is_exception=True)
    for name, x in call.inputs.items():
        if not _same_bits(sent[name].detach().cpu(), arrange(call, name, x, layout)):
            return Outcome({}, f"modifies its inputs: {name}")
    return Outcome({n: x.detach().cpu() for n, x in results.items()})


def _split(returned: Any, call: Call, is_state_asked: bool) -> tuple[Tensor, Tensor | None]:
    """Returns the output, and the state that a function of a recurrence may return beside it.

    Without `output_final_state`, the second value is a state if it has the shape of one.

    Raises:
        TypeError: a value is no array.
    """
    if not call.is_recurrence or not isinstance(returned, tuple):
        return _to_torch(returned), None
    output, state, *_ = (*returned, None)
    if state is None:
        return _to_torch(output), None
    is_state = is_state_asked or tuple(getattr(state, "shape", ())) == call.state_shape
    return _to_torch(output), _to_torch(state) if is_state else None


def _gradients(
    output: Tensor, sent: dict[str, Tensor], call: Call, layout: Layout
) -> dict[str, Tensor]:
    assert call.grad_output is not None
    inputs = {n: sent[n] for n in call.positional}
    gradients = torch.autograd.grad(
        output, list(inputs.values()), call.grad_output.to(output.device), allow_unused=True
    )
    found = {
        f"grad {n}": torch.zeros_like(x) if gradient is None else gradient
        for (n, x), gradient in zip(inputs.items(), gradients, strict=True)
    }
    return {n: swap_axes(x) for n, x in found.items()} if layout == "BTHD" else found


def _copy(x: Tensor) -> Tensor:
    """Copies a tensor with its strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


def _same_bits(after: Tensor, sent: Tensor) -> bool:
    if not sent.is_floating_point():
        return torch.equal(after, sent)
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[sent.element_size()]
    return torch.equal(after.contiguous().view(width), sent.contiguous().view(width))


def _to_framework(x: Tensor, framework: Framework) -> Any:
    if framework == "torch":
        return x
    array = x.numpy() if x.dtype != torch.bfloat16 else _bfloat16_array(x)
    if framework == "numpy":
        return array
    return importlib.import_module("jax.numpy").asarray(array)


def _bfloat16_array(x: Tensor) -> np.ndarray:
    bits: np.ndarray = x.view(torch.int16).numpy()
    return bits.view(ml_dtypes.bfloat16)


def _to_torch(returned: Any) -> Tensor:
    """Returns an array of any library as a tensor.

    Raises:
        TypeError: the value is no array.
    """
    if isinstance(returned, Tensor):
        return returned
    if not hasattr(returned, "__array__") and not hasattr(returned, "__dlpack__"):
        raise TypeError(f"the function returns {type(returned).__name__}, expected an array")
    raw = to_raw(returned, "the output")
    if raw.dtype == "bfloat16":
        bits = np.frombuffer(raw.data, np.int16).reshape(raw.shape).copy()
        return torch.from_numpy(bits).view(torch.bfloat16)
    return torch.from_numpy(raw.numpy().copy())


def _find_fault(
    output: Tensor, call: Call, device: str | torch.device, layout: Layout = "BHTD"
) -> str:
    """Returns the fault of the output's shape, dtype, device or layout; "" without one."""
    assert call.grad_output is not None
    like = call.grad_output.transpose(1, 2) if layout == "BTHD" else call.grad_output
    expected = tuple(like.shape)
    if tuple(output.shape) != expected:
        return f"wrong shape: got {tuple(output.shape)}, expected {expected}"
    if output.dtype != call.dtype:
        return f"wrong dtype: got {str(output.dtype)[6:]}, expected {str(call.dtype)[6:]}"
    if output.device.type != torch.device(device).type:
        return f"wrong device: got {output.device}, expected {torch.device(device)}"
    if output.layout != torch.strided:
        return f"wrong layout: got {str(output.layout)[6:]}, expected a dense tensor"
    return ""


def _find_state_fault(state: Tensor, call: Call) -> str:
    """Returns the fault of the shape or the dtype of a state; "" without one.

    It is float32 or the dtype of the inputs; float64 for float64 inputs.
    """
    expected = call.state_shape
    if tuple(state.shape) != expected:
        return f"wrong shape of the state: got {tuple(state.shape)}, expected {expected}"
    allowed = {call.dtype, state_dtype(call.dtype)}
    if state.dtype not in allowed:
        names = " or ".join(sorted(str(x)[6:] for x in allowed))
        return f"wrong dtype of the state: got {str(state.dtype)[6:]}, expected {names}"
    return ""
