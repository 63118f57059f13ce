"""Runs a job's layer and variant once, forward or backward: named tensors in and out.

The executor calls `call_variant`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qkv.attention.layers.layer import Layer, project, project_back
from qkv.attention.layers.projections import ROLES, Projection, Projections
from qkv.engine.weight_blocks import compute_weight_form
from qkv.jobs.gradient_job import GRAD_OUTPUT, GradientJob
from qkv.jobs.job import Job
from qkv.jobs.measure.probe_jobs import (
    PEAK_BYTES,
    Float64Job,
    PeakMemoryJob,
    float64_arguments,
    measure_peak_bytes,
    to_float64,
)
from qkv.jobs.measure.row_divergence import RowDivergenceJob, compare_rows

__all__ = ["LayerWeights", "VariantOutput", "call_variant"]

_IN_FLOAT64: Final = (RowDivergenceJob, Float64Job)

LayerWeights = Mapping[str, tuple[Tensor, Tensor | None]]
"""Weight (M, out) and bias (out) of each role that a variant has."""


class VariantOutput(NamedTuple):
    """The outputs of one forward or backward pass.

    Attributes:
        tensors: by name, with the axes of the signature; the heads of a layer are merged.
        backend: name of the variant's code path that ran.
    """

    tensors: dict[str, Tensor]
    backend: str


def call_variant(
    job: Job, tensors: Mapping[str, Tensor], weights: LayerWeights, plane_BH: Tensor | None
) -> VariantOutput:
    """Projects the tensors if the job has a layer, then calls the variant.

    Args:
        job: variant, parameters and outputs; its own tensors are not read.
        tensors: by name, with every axis of the signature.
        weights: of the job's layer; empty without a layer.
        plane_BH: as `softmax.attend` takes it; None: the tensors belong to a single request.
    """
    if isinstance(job, PeakMemoryJob):
        device = next(iter(tensors.values())).device
        peak_bytes = measure_peak_bytes(
            lambda: _call_variant(job, tensors, weights, plane_BH), device
        )
        return VariantOutput({PEAK_BYTES: torch.tensor([peak_bytes])}, "measured")
    return _call_variant(job, tensors, weights, plane_BH)


def _call_variant(
    job: Job, tensors: Mapping[str, Tensor], weights: LayerWeights, plane_BH: Tensor | None
) -> VariantOutput:
    layer = job.inputs.layer
    if isinstance(job, _IN_FLOAT64):
        tensors = {name: to_float64(tensor) for name, tensor in tensors.items()}
        weights = {
            r: (to_float64(w), None if b is None else to_float64(b))
            for r, (w, b) in weights.items()
        }
    projected = tensors if layer is None else _project(layer, tensors, weights)
    if isinstance(job, RowDivergenceJob):
        return VariantOutput(compare_rows(job, projected), "explicit")
    arguments: dict[str, Any] = {
        spec.argument: projected[name]
        for name, spec in job.variant.inputs.items()
        if name in projected
    }
    arguments |= job.arguments
    if isinstance(job, Float64Job):
        arguments = float64_arguments(job.variant, projected, job.arguments, job.inputs.dtype)
    if job.variant.takes_plane:
        arguments["plane_BH"] = plane_BH
    if isinstance(job, GradientJob):
        backend = "closed form" if job.variant.has_closed_form_gradients else "autograd"
        return VariantOutput(_compute_gradients(job, tensors, weights, arguments), backend)
    outputs, summary, backend = job.outputs, {}, "blocks"
    if job.form.is_summary:
        outputs -= {"weights"}
        sizes = job.inputs.axes.sizes
        summary = compute_weight_form(job.variant, job.form, arguments, job.parameters, sizes)
    computed = {}
    if outputs:
        result = job.variant.attend(**arguments, outputs=outputs)
        computed = {n: getattr(result, n) for n in job.variant.outputs if n in outputs}
        backend = getattr(result, "backend", "explicit")
    if layer is not None and "output" in computed:
        computed["output"] = _merge_heads(computed["output"])
    return VariantOutput(computed | summary, backend)


def _compute_gradients(
    job: GradientJob,
    tensors: Mapping[str, Tensor],
    weights: LayerWeights,
    arguments: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Returns the gradients of each input, and of the layer's tensors in its layout."""
    grad, layer, backward = tensors[GRAD_OUTPUT], job.inputs.layer, job.variant.backward
    assert backward is not None
    if layer is None:
        return backward(grad, **arguments)
    _, heads, *_ = job.variant.outputs["output"].letters
    grad = grad.unflatten(-1, (job.inputs.axes.sizes[heads], -1)).transpose(1, 2).contiguous()
    raw = backward(grad, **arguments)
    gradients = {name: tensor for name, tensor in raw.items() if name not in weights}
    projections = []
    for role, p in zip(ROLES, layer.projections, strict=True):
        if role in weights:
            name = "x" if "x" in tensors else role
            x, weight, bias = project_back(_merge_heads(raw[role]), tensors[name], *weights[role])
            gradients[name] = gradients[name] + x if name in gradients else x
        else:  # the variant does not use this role
            weight, bias = (
                torch.zeros(p.weight.shape),
                None if p.bias is None else torch.zeros(p.bias.shape),
            )
        projections.append(
            Projection(p.name, weight.cpu().numpy(), None if bias is None else bias.cpu().numpy())
        )
    written = layer.layout.write(Projections(*projections))
    return gradients | {name: torch.from_numpy(array) for name, array in written.items()}


def _merge_heads(x_BHLE: Tensor) -> Tensor:
    """Merges the heads: (B, L, H * E)."""
    return x_BHLE.transpose(1, 2).flatten(2)


def _project(
    layer: Layer, tensors: Mapping[str, Tensor], weights: LayerWeights
) -> dict[str, Tensor]:
    """Returns the tensors, with queries, keys and values in place of embeddings.

    If a projection overflows its dtype, all three are float64: the output computed from them may
    still be finite.
    """
    embeddings = {role: tensors.get("x", tensors.get(role)) for role in weights}
    rest = {n: t for n, t in tensors.items() if n != "x" and n not in weights}
    for widen in (False, True):
        projected = {}
        for role, (weight, bias) in weights.items():
            parts = (embeddings[role], weight, bias)
            x, w, b = (p.double() if widen and p is not None else p for p in parts)
            assert x is not None
            assert w is not None
            projected[role] = project(x, w, b, layer.head_count(role))
        if all(bool(t.isfinite().all()) for t in projected.values()):
            break
    return rest | projected
