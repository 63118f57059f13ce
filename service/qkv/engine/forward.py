"""Runs a job's layer and variant once, forward or backward: named tensors in and out.

The executor calls `call_variant`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from qkv.attention.common.guards import are_deferred, holds, largest_size
from qkv.attention.layers import projection
from qkv.attention.signature import STATE, VERSION
from qkv.engine import layer_pass
from qkv.engine.layer_pass import GRADIENT, LayerTensors
from qkv.engine.step_tensors import compute_steps
from qkv.engine.weight_blocks import compute_weight_form
from qkv.jobs.float64 import float64_arguments, to_float64
from qkv.jobs.gradient_plan import GRAD_OUTPUT, GradientPlan
from qkv.jobs.plan import Plan
from qkv.jobs.state import GRAD_SUMS, SUMS, version_of

__all__ = [
    "NOTE",
    "LayerTensors",
    "Outputs",
    "call_variant",
    "can_defer",
    "can_widen",
    "in_layout",
]

NOTE: Final = "note: "
"""The beginning of the names of conditions among the outputs, (B,) or (): a note on an item's
numbers follows."""

Outputs = tuple[dict[str, Tensor], str]
"""Tensors by name, with the axes of the signature, and the name of the code path that ran.

The heads of a layer are merged. The gradients of a layer's tensors are not in its layout yet: see
`in_layout`.
"""


def call_variant(
    plan: Plan,
    tensors: Mapping[str, Tensor],
    weights: LayerTensors,
    plane_BH: Tensor | None,
) -> Outputs:
    """Projects the tensors if the plan has a layer, then calls the variant.

    Args:
        plan: variant, parameters, outputs and layer.
        tensors: by name, with every axis of the signature.
        weights: of the plan's layer; empty without a layer.
        plane_BH: as `softmax.attend` takes it; None: the tensors belong to a single request.
    """
    if isinstance(plan, GradientPlan):
        return _run_gradients(plan, tensors, weights, plane_BH)
    if plan.measurement.float64:
        tensors, weights = (
            {n: to_float64(t) for n, t in group.items()} for group in (tensors, weights)
        )
    projected = layer_pass.project(plan, tensors, weights)
    return _attend(plan, _arguments(plan, projected, plane_BH), weights)


def can_defer(plan: Plan) -> bool:
    """Returns True if no code of a job reads numbers but by `guards`."""
    return not plan.measurement.peak and plan.variant.stackable_below > 0


def can_widen(plan: Plan) -> bool:
    """Returns True if a run in float64 may have a path that the numbers of a job need."""
    is_wide = plan.measurement.float64 or plan.inputs.dtype == "float64"
    return not is_wide and not isinstance(plan, GradientPlan)


def _run_gradients(
    plan: GradientPlan,
    tensors: Mapping[str, Tensor],
    weights: LayerTensors,
    plane_BH: Tensor | None,
) -> Outputs:
    backend = "closed form" if plan.variant.has_closed_form_gradients else "autograd"
    if plan.inputs.layer is not None:
        tensors = _without_hidden(plan, tensors)
    arguments = _arguments(plan, layer_pass.project(plan, tensors, weights), plane_BH)
    return _compute_gradients(plan, tensors, weights, arguments), backend


def _tensor_arguments(plan: Plan) -> Sequence[tuple[str, str]]:
    """Returns the name of each tensor of the variant, and of its argument in the variant's
    functions.

    A layer's embeddings are not among them: it projects them to the roles.
    """
    inputs, names = plan.variant.tensors, set(plan.inputs.specs) - {VERSION}
    if (layer := plan.inputs.layer) is not None:
        names |= layer.variant_inputs.union(plan.roles)
    return [(name, spec.argument) for name, spec in inputs.items() if name in names]


def _attend_outputs(plan: Plan) -> Sequence[str]:
    """Returns the outputs that `attend` computes, in the order of the response."""
    others = {"weights"} if plan.form.is_summary else set()
    names = [name for name in plan.variant.outputs if name in plan.outputs - others]
    return [*names, "state"] if any(n.startswith(STATE) for n in plan.outputs) else names


def _arguments(
    plan: Plan, projected: Mapping[str, Tensor], plane_BH: Tensor | None
) -> dict[str, Any]:
    """Returns tensors and parameters as the variant's functions take them."""
    arguments: dict[str, Any]
    if plan.measurement.float64:
        arguments = float64_arguments(plan.variant, projected, plan.arguments, plan.inputs.dtype)
    else:
        if are_deferred():
            _defer_size_checks(plan, projected)
        arguments = {a: projected[name] for name, a in plan.derived(_tensor_arguments)}
        arguments.update(plan.arguments)
        if plan.variant.state is not None:
            arguments = plan.variant.with_state(arguments)
    if plan.variant.takes_plane:
        arguments["plane_BH"] = plane_BH
    return arguments


def _defer_size_checks(plan: Plan, projected: Mapping[str, Tensor]) -> None:
    """Defers the check that all numbers are of a size for which the variant may be stacked."""
    for name, spec in plan.variant.inputs.items():
        x = projected.get(name)
        if (
            x is None
            or not x.numel()
            or not x.is_floating_point()
            or "B" not in spec.letters
            or spec.broadcasts
        ):
            continue
        holds(largest_size(x) < plan.variant.stackable_below)


def _attend(plan: Plan, arguments: Mapping[str, Any], weights: LayerTensors) -> Outputs:
    """Returns the outputs of a plan, its form of the weights included."""
    computed, summary, sizes = {}, {}, plan.inputs.axes.sizes
    backend = "blocks" if plan.form.is_summary else "steps"
    if plan.form.is_summary:
        known = plan.variant.for_weights(arguments)
        summary = compute_weight_form(plan.variant, plan.form, known, plan.parameters, sizes)
    if names := plan.derived(_attend_outputs):
        result = plan.variant.attend(**arguments, outputs=frozenset(names))
        computed = {name: getattr(result, name) for name in names}
        if "state" in computed:
            computed |= _state_tensors(plan, computed.pop("state"))
        if plan.variant.has_notes:
            computed |= {f"{NOTE}{note}": holds_B for note, holds_B in result.notes.items()}
        backend = getattr(result, "backend", "explicit")
    if plan.inputs.layer is not None and "output" in computed:
        computed["output"] = layer_pass.project_output(computed["output"], weights)
    if plan.has_steps:
        names = [name for name in plan.output_specs if name in plan.variant.steps]
        computed |= compute_steps(plan.variant, names, arguments, sizes)
    return computed | summary if summary else computed, backend


def _state_tensors(plan: Plan, state: Any) -> dict[str, Tensor]:
    """Returns the requested tensors of a state by name, and what the state belongs to."""
    found = {f"{STATE}{field}": x for field, x in state._asdict().items()}
    sums = found[SUMS]
    numbers = version_of(plan.variant, plan.parameters, plan.inputs.dtype)
    version = torch.tensor(numbers).to(sums.device, non_blocking=True)
    found[VERSION] = version.expand(len(sums), -1)
    return {name: found[name] for name in plan.output_specs if name in found}


def _without_hidden(plan: Plan, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns the tensors with one embedding for each role, zeros in place of hidden NaN.

    Keys and values are hidden at and after `key_lengths`, queries where the row of grad_output is
    zeros. The product of NaN with their zero gradients would be NaN.
    """
    grad, lengths_B = tensors[GRAD_OUTPUT], tensors.get("key_lengths")
    shown = {n: t for n, t in tensors.items() if n != "x"}
    for role in plan.roles:
        x_BNM = shown[role] = tensors["x"] if "x" in tensors else tensors[role]
        if role == "query":
            hidden_BN = (grad == 0).all(-1)
        elif lengths_B is not None:
            hidden_BN = torch.arange(x_BNM.shape[1], device=x_BNM.device) >= lengths_B[:, None]
        else:
            continue
        shown[role] = x_BNM.masked_fill(hidden_BN[..., None] & ~x_BNM.isfinite(), 0)
    return shown


def _compute_gradients(
    plan: Plan,
    tensors: Mapping[str, Tensor],
    weights: LayerTensors,
    arguments: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Returns the gradients of each input, and of the weights of a layer that is not loaded."""
    grad, layer, backward = tensors[GRAD_OUTPUT], plan.inputs.layer, plan.variant.backward
    assert backward is not None
    if (state := plan.variant.state) is not None and GRAD_SUMS in tensors:
        backward = partial(backward, grad_state=state.kind(sums=tensors[GRAD_SUMS]))
    if layer is None:
        return backward(grad, **arguments)
    gradients: dict[str, Tensor] = {}
    if layer.output_width is not None:
        grad, gradients = _output_gradients(plan, grad, weights, arguments)
    _, heads, *_ = plan.variant.outputs["output"].letters
    grad = projection.split_heads(grad, plan.inputs.axes.sizes[heads])
    raw = backward(grad, **arguments)
    gradients |= layer_pass.project_back(plan, tensors, weights, raw)
    if "x" in plan.inputs.specs:
        gradients["x"] = torch.stack([gradients.pop(role) for role in plan.roles]).sum(0)
    return gradients


def _output_gradients(
    plan: Plan, grad_BLM: Tensor, weights: LayerTensors, arguments: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the gradient of the output projection's input, and those of its weight and bias."""
    layer = plan.inputs.layer
    if layer is not None and layer.loaded is not None:
        return projection.project_back_to_input(grad_BLM, weights["output.weight"]), {}
    unused_BL = (grad_BLM == 0).all(-1)  # their rows may be NaN
    output_BHLE = plan.variant.attend(**arguments, outputs=frozenset({"output"})).output
    merged_BLX = projection.merge_heads(output_BHLE).masked_fill(unused_BL[..., None], 0)
    grad_BLX, weight, bias = projection.project_back(
        grad_BLM, merged_BLX, weights["output.weight"], weights.get("output.bias")
    )
    named = {"output.weight": weight} | ({} if bias is None else {"output.bias": bias})
    return grad_BLX, {GRADIENT + name: tensor for name, tensor in named.items()}


def in_layout(plan: Plan, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns a plan's outputs on the CPU with the gradients of its layer in the layer's layout."""
    layer = plan.inputs.layer
    if layer is None or not isinstance(plan, GradientPlan):
        return tensors
    rest = {n: t for n, t in tensors.items() if not n.startswith(GRADIENT)}
    if layer.loaded is not None:
        return rest
    gradients = {}
    for name, weight in layer.weights.items():
        gradient = tensors.get(GRADIENT + name)  # None: the variant does not use the weight
        gradients[name] = np.zeros(weight.shape) if gradient is None else gradient.numpy()
    written = layer.with_spelling(layer.layout.write(gradients, layer.heads))
    return rest | {
        name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in written.items()
    }
