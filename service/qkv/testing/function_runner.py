"""Runs a user's function on a call, and finds faults that need no reference.

The faults are exceptions, wrong shapes, dtypes or devices, and inputs that the function changes.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from qkv.client.arrays import to_raw
from qkv.testing.call import Call

Framework = Literal["torch", "numpy", "jax"]
"""The kind of arrays that the function takes."""

_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


class Outcome(NamedTuple):
    """The results of a function for one call.

    Attributes:
        results: tensors on the CPU: `output`, and the gradients as `grad query` and so on.
        problem: the fault; "" without one.
        not_run: the reason why the function did not run; "" if it ran.
        is_exception: True if `problem` is an exception of the function.
    """

    results: dict[str, Tensor]
    problem: str = ""
    not_run: str = ""
    is_exception: bool = False


def missing_keyword(function: Callable[..., Any], call: Call) -> str:
    """Returns the first keyword of the call that the function does not take; "" if it takes all.

    One with `**keywords` takes those that every kernel may have; it has to name `sinks`.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function of C has no signature
        return ""
    takes = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        takes |= {*call.keywords} - {"sinks"}
    return next((name for name in call.keywords if name not in takes), "")


def run_function(
    function: Callable[..., Any],
    call: Call,
    *,
    device: str | torch.device = "cpu",
    framework: Framework = "torch",
    gradients: bool = False,
) -> Outcome:
    """Calls the function, with gradients by torch's autograd on request.

    Args:
        function: takes the positional inputs of the call and its keywords.
        call: the inputs and parameters.
        device: of the inputs.
        framework: of the arrays that the function takes; any array may come back.
        gradients: True to compute the gradients too.
    """
    if name := missing_keyword(function, call):
        return Outcome({}, not_run=f"the function does not take {name!r}")
    sent = {n: _copy(x).to(device) for n, x in call.inputs.items()}
    arrays = {n: _to_framework(x, framework) for n, x in sent.items()}
    if gradients:
        for name in call.positional:
            sent[name].requires_grad_()
    positional = [arrays[n] for n in call.positional]
    keywords = {n: arrays[n] for n in call.keywords if n in arrays} | dict(call.parameters)
    try:
        returned = function(*positional, **keywords)
        output = _to_torch(returned)
        if problem := _find_fault(output, call, device):
            return Outcome({}, problem)
        results = {"output": output.detach()}
        if gradients:
            if not output.requires_grad:
                return Outcome({}, not_run="the output has no gradient (torch autograd)")
            results |= _gradients(output, sent, call)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip()
        unexpected = _UNEXPECTED.search(text) if isinstance(error, TypeError) else None
        if unexpected and unexpected[1] in call.keywords:
            return Outcome({}, not_run=f"the function does not take {unexpected[1]!r}")
        return Outcome({}, f"raises {text[:500]}", is_exception=True)
    for name, x in call.inputs.items():
        if not _same_bits(sent[name].detach().cpu(), x):
            return Outcome({}, f"modifies its inputs: {name}")
    return Outcome({n: x.detach().cpu() for n, x in results.items()})


def _gradients(output: Tensor, sent: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
    assert call.grad_output is not None
    inputs = {n: sent[n] for n in call.positional}
    gradients = torch.autograd.grad(
        output, list(inputs.values()), call.grad_output.to(output.device), allow_unused=True
    )
    return {
        f"grad {n}": torch.zeros_like(x) if gradient is None else gradient
        for (n, x), gradient in zip(inputs.items(), gradients, strict=True)
    }


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


def _find_fault(output: Tensor, call: Call, device: str | torch.device) -> str:
    """Returns the fault of the output's shape, dtype, device or layout; "" without one."""
    assert call.grad_output is not None
    expected = tuple(call.grad_output.shape)
    if tuple(output.shape) != expected:
        return f"wrong shape: got {tuple(output.shape)}, expected {expected}"
    if output.dtype != call.dtype:
        return f"wrong dtype: got {str(output.dtype)[6:]}, expected {str(call.dtype)[6:]}"
    if output.device.type != torch.device(device).type:
        return f"wrong device: got {output.device}, expected {torch.device(device)}"
    if output.layout != torch.strided:
        return f"wrong layout: got {str(output.layout)[6:]}, expected a dense tensor"
    return ""
