"""A job's pass through its layer and its variant, forward or backward: named tensors in and out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

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

LayerWeights = Mapping[str, tuple[Tensor, Tensor | None]]
"""Weight (M, out) and bias (out) of each role that a variant has."""


class VariantOutput(NamedTuple):
    """The outputs of one forward or backward pass.

    Attributes:
        tensors: by name, as many axes as the signature has; a layer's heads side by side.
        backend: which of the variant's paths ran.
    """

    tensors: dict[str, Tensor]
    backend: str


def call_variant(
    job: Job, tensors: Mapping[str, Tensor], weights: LayerWeights, plane_BH: Tensor | None
) -> VariantOutput:
    """Calls the variant, behind its layer if there is one.

    Args:
        job: says what to call, and for what; the only thing it is asked is that.
        tensors: by name, every axis there.
        weights: of its layer; empty where there is none.
        plane_BH: as `softmax.attend` takes it; None: the tensors are one request's.
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
    if isinstance(job, RowDivergenceJob | Float64Job):
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
        return VariantOutput(_compute_gradients(job, tensors, weights, arguments), "closed form")
    outputs, summary, backend = job.outputs, {}, "blocks"
    if job.form.is_summary:
        outputs -= {"weights"}
        sizes = job.inputs.axes.sizes
        summary = compute_weight_form(job.variant, job.form, arguments, job.parameters, sizes)
    made = {}
    if outputs:
        result = job.variant.attend(**arguments, outputs=outputs)
        made = {n: getattr(result, n) for n in job.variant.outputs if n in outputs}
        backend = getattr(result, "backend", "explicit")
    if layer is not None and "output" in made:
        made["output"] = _merge_heads(made["output"])
    return VariantOutput(made | summary, backend)


def _compute_gradients(
    job: GradientJob,
    tensors: Mapping[str, Tensor],
    weights: LayerWeights,
    arguments: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Of each input, and of the layer's tensors as its layout has them."""
    grad, layer, backward = tensors[GRAD_OUTPUT], job.inputs.layer, job.variant.backward
    assert backward is not None
    if layer is None:
        return backward(grad, **arguments)
    _, heads, *_ = job.variant.outputs["output"].letters
    grad = grad.unflatten(-1, (job.inputs.axes.sizes[heads], -1)).transpose(1, 2).contiguous()
    made = backward(grad, **arguments)
    gradients = {name: tensor for name, tensor in made.items() if name not in weights}
    projections = []
    for role, p in zip(ROLES, layer.projections, strict=True):
        if role in weights:
            name = "x" if "x" in tensors else role
            x, weight, bias = project_back(_merge_heads(made[role]), tensors[name], *weights[role])
            gradients[name] = gradients[name] + x if name in gradients else x
        else:  # the variant does not look at it
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
    """Heads side by side: (B, L, H * E)."""
    return x_BHLE.transpose(1, 2).flatten(2)


def _project(
    layer: Layer, tensors: Mapping[str, Tensor], weights: LayerWeights
) -> dict[str, Tensor]:
    """The tensors with queries, keys and values in place of embeddings.

    Where a projection overflows its dtype all three are float64: what is made of them may be
    finite all the same.
    """
    embeddings = {role: tensors.get("x", tensors.get(role)) for role in weights}
    rest = {n: t for n, t in tensors.items() if n != "x" and n not in weights}
    for widen in (False, True):
        made = {}
        for role, (weight, bias) in weights.items():
            parts = (embeddings[role], weight, bias)
            x, w, b = (p.double() if widen and p is not None else p for p in parts)
            assert x is not None
            assert w is not None
            made[role] = project(x, w, b, layer.head_count(role))
        if all(bool(t.isfinite().all()) for t in made.values()):
            break
    return rest | made
