"""Runs a job's layer and variant once, forward or backward: named tensors in and out.

The executor calls `call_variant`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qkv.attention.common.guards import are_deferred, are_wide, holds, largest_size
from qkv.attention.layers.layer import project, project_back
from qkv.attention.layers.projections import ROLES, Projection, Projections
from qkv.engine.device.device import Device
from qkv.engine.weight_blocks import compute_weight_form
from qkv.jobs.gradient_job import GRAD_OUTPUT, GradientJob
from qkv.jobs.job import Job
from qkv.jobs.measure.probe_jobs import (
    PEAK_BYTES,
    Float64Job,
    PeakMemoryJob,
    float64_arguments,
    to_float64,
)
from qkv.jobs.measure.row_divergence import RowDivergenceJob, compare_rows

__all__ = ["LayerWeights", "VariantOutput", "call_variant", "can_defer", "in_layout"]

_WEIGHT: Final = "weight of "
_BIAS: Final = "bias of "

LayerWeights = Mapping[str, tuple[Tensor, Tensor | None]]
"""Weight (M, out) and bias (out) of each role that a variant has."""


class VariantOutput(NamedTuple):
    """The outputs of one forward or backward pass.

    Attributes:
        tensors: by name, with the axes of the signature; the heads of a layer are merged. The
            gradients of a layer's tensors are not in its layout yet: see `in_layout`.
        backend: name of the variant's code path that ran.
    """

    tensors: dict[str, Tensor]
    backend: str


def call_variant(
    job: Job,
    tensors: Mapping[str, Tensor],
    weights: LayerWeights,
    plane_BH: Tensor | None,
    device: Device,
) -> VariantOutput:
    """Projects the tensors if the job has a layer, then calls the variant.

    Args:
        job: variant, parameters and outputs; its own tensors are not read.
        tensors: by name, with every axis of the signature.
        weights: of the job's layer; empty without a layer.
        plane_BH: as `softmax.attend` takes it; None: the tensors belong to a single request.
        device: of the tensors.
    """
    if isinstance(job, PeakMemoryJob):
        peak_bytes = device.measure_peak_bytes(
            lambda: _run_forward(job, tensors, weights, plane_BH)
        )
        return VariantOutput({PEAK_BYTES: torch.tensor([peak_bytes])}, "measured")
    return _CALLS.get(type(job), _run_forward)(job, tensors, weights, plane_BH)


def can_defer(job: Job) -> bool:
    """Returns True if no code of the job reads numbers but by `guards`."""
    is_plain = not isinstance(job, PeakMemoryJob | RowDivergenceJob)
    return is_plain and job.variant.stackable_below > 0


def _run_forward(
    job: Job, tensors: Mapping[str, Tensor], weights: LayerWeights, plane_BH: Tensor | None
) -> VariantOutput:
    projected = tensors if job.inputs.layer is None else _project(job, tensors, weights)
    return _attend(job, _arguments(job, projected, plane_BH))


def _run_gradients(
    job: GradientJob, tensors: Mapping[str, Tensor], weights: LayerWeights, plane_BH: Tensor | None
) -> VariantOutput:
    backend = "closed form" if job.variant.has_closed_form_gradients else "autograd"
    arguments = _arguments(job, _project(job, tensors, weights), plane_BH)
    return VariantOutput(_compute_gradients(job, tensors, weights, arguments), backend)


def _run_in_float64(
    job: Float64Job, tensors: Mapping[str, Tensor], weights: LayerWeights, plane_BH: Tensor | None
) -> VariantOutput:
    projected = _project(job, *_to_float64(tensors, weights))
    arguments = float64_arguments(job.variant, projected, job.arguments, job.inputs.dtype)
    if job.variant.takes_plane:
        arguments["plane_BH"] = plane_BH
    return _attend(job, arguments)


def _run_row_divergence(
    job: RowDivergenceJob,
    tensors: Mapping[str, Tensor],
    weights: LayerWeights,
    _plane_BH: Tensor | None,
) -> VariantOutput:
    projected = _project(job, *_to_float64(tensors, weights))
    return VariantOutput(compare_rows(job, projected), "explicit")


_CALLS: Final[Mapping[type[Job], Callable[..., VariantOutput]]] = {
    GradientJob: _run_gradients,
    Float64Job: _run_in_float64,
    RowDivergenceJob: _run_row_divergence,
}


def _arguments(
    job: Job, projected: Mapping[str, Tensor], plane_BH: Tensor | None
) -> dict[str, Any]:
    """Returns tensors and parameters as the variant's functions take them."""
    if are_deferred():
        _defer_size_checks(job, projected)
    arguments: dict[str, Any] = {a: projected[name] for name, a in job.tensor_arguments}
    arguments.update(job.arguments)
    if job.variant.takes_plane:
        arguments["plane_BH"] = plane_BH
    return arguments


def _defer_size_checks(job: Job, projected: Mapping[str, Tensor]) -> None:
    """Defers the check that all numbers are of a size for which the variant may be stacked."""
    for name, spec in job.variant.inputs.items():
        x = projected.get(name)
        if x is None or not x.is_floating_point() or "B" not in spec.letters or spec.broadcasts:
            continue
        holds(largest_size(x) < job.variant.stackable_below)


def _attend(job: Job, arguments: Mapping[str, Any]) -> VariantOutput:
    """Returns the outputs of a job, its form of the weights included."""
    computed, summary, backend = {}, {}, "blocks"
    if job.form.is_summary:
        sizes = job.inputs.axes.sizes
        summary = compute_weight_form(job.variant, job.form, arguments, job.parameters, sizes)
    if job.attend_outputs:
        result = job.variant.attend(**arguments, outputs=frozenset(job.attend_outputs))
        computed = {name: getattr(result, name) for name in job.attend_outputs}
        backend = getattr(result, "backend", "explicit")
    if job.inputs.layer is not None and "output" in computed:
        computed["output"] = _merge_heads(computed["output"])
    return VariantOutput(computed | summary if summary else computed, backend)


def _to_float64(
    tensors: Mapping[str, Tensor], weights: LayerWeights
) -> tuple[dict[str, Tensor], LayerWeights]:
    wide = {
        r: (to_float64(w), None if b is None else to_float64(b)) for r, (w, b) in weights.items()
    }
    return {name: to_float64(tensor) for name, tensor in tensors.items()}, wide


def _compute_gradients(
    job: GradientJob,
    tensors: Mapping[str, Tensor],
    weights: LayerWeights,
    arguments: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Returns the gradients of each input, and of the layer's projections."""
    grad, layer, backward = tensors[GRAD_OUTPUT], job.inputs.layer, job.variant.backward
    assert backward is not None
    if layer is None:
        return backward(grad, **arguments)
    _, heads, *_ = job.variant.outputs["output"].letters
    grad = grad.unflatten(-1, (job.inputs.axes.sizes[heads], -1)).transpose(1, 2).contiguous()
    raw = backward(grad, **arguments)
    gradients = {name: tensor for name, tensor in raw.items() if name not in weights}
    for role in weights:
        name = "x" if "x" in tensors else role
        x, weight, bias = project_back(_merge_heads(raw[role]), tensors[name], *weights[role])
        gradients[name] = gradients[name] + x if name in gradients else x
        gradients[_WEIGHT + role] = weight
        if bias is not None:
            gradients[_BIAS + role] = bias
    return gradients


def in_layout(job: Job, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns a job's outputs on the CPU with the gradients of its layer in the layer's layout."""
    layer = job.inputs.layer
    if layer is None or not isinstance(job, GradientJob):
        return tensors
    projections = []
    for role, p in zip(ROLES, layer.projections, strict=True):
        weight, bias = tensors.get(_WEIGHT + role), tensors.get(_BIAS + role)
        if weight is None:  # the variant does not use this role
            weight = torch.zeros(p.weight.shape)
            bias = None if p.bias is None else torch.zeros(p.bias.shape)
        projections.append(
            Projection(p.name, weight.numpy(), None if bias is None else bias.numpy())
        )
    written = layer.layout.write(Projections(*projections))
    rest = {n: t for n, t in tensors.items() if not n.startswith((_WEIGHT, _BIAS))}
    return rest | {name: torch.from_numpy(array) for name, array in written.items()}


def _merge_heads(x_BHLE: Tensor) -> Tensor:
    """Merges the heads: (B, L, H * E)."""
    return x_BHLE.transpose(1, 2).flatten(2)


def _project(
    job: Job, tensors: Mapping[str, Tensor], weights: LayerWeights
) -> Mapping[str, Tensor]:
    """Returns the tensors, with queries, keys and values in place of embeddings.

    If a projection overflows its dtype, all three are float64: the output computed from them may
    still be finite.
    """
    if (layer := job.inputs.layer) is None:
        return tensors
    embeddings = {role: tensors.get("x", tensors.get(role)) for role in weights}
    rest = {n: t for n, t in tensors.items() if n != "x" and n not in weights}
    for widen in (True,) if are_wide() else (False, True):
        projected = {}
        for role, (weight, bias) in weights.items():
            parts = (embeddings[role], weight, bias)
            x, w, b = (p.double() if widen and p is not None else p for p in parts)
            assert x is not None
            assert w is not None
            projected[role] = project(x, w, b, layer.head_count(role))
        if all(holds(t.isfinite()) for t in projected.values()):
            break
    return rest | projected
