"""The parts of a layer around a variant, forward and backward, on the device.

Forward: projection, QK-norm, rotary embedding; then the variant; then the output projection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from qkv.attention.common.guards import Condition, are_wide, holds, is_finite
from qkv.attention.layers import input_norm, projection
from qkv.attention.layers.input_norm import NORM_BIAS, NORM_WEIGHT
from qkv.attention.layers.layer import FREQUENCIES, SLOPES, Layer
from qkv.attention.layers.layer_weights import SINKS
from qkv.attention.layers.qk_norm import normalize, normalize_back
from qkv.attention.layers.rope import rotate
from qkv.jobs.plan import Plan

LayerTensors = Mapping[str, Tensor]
"""The arrays of a layer on the device, by the names of `Layer.arrays`."""

GRADIENT: Final = "gradient of "
"""The beginning of the name of a weight's gradient, before the name of the weight."""


def project(
    plan: Plan, tensors: Mapping[str, Tensor], weights: LayerTensors
) -> Mapping[str, Tensor]:
    """Returns the tensors, with queries, keys and values in place of embeddings.

    If a projection overflows its dtype, all three are float64: the output computed from them may
    still be finite.
    """
    if (layer := plan.inputs.layer) is None:
        return tensors
    used = [role for role in plan.roles if f"{role}.weight" in weights]
    rest = {n: t for n, t in tensors.items() if n != "x" and n not in used}
    if SLOPES in weights:
        rest[SLOPES] = weights[SLOPES]
    if SINKS in weights:  # a variant that changes its inputs must not change a loaded layer
        rest[SINKS] = weights[SINKS].clone()
    if layer.options.alibi == "scaled":  # the biases are added before the scores are scaled
        scale = plan.arguments.get("scale")
        rest[SLOPES] = weights[SLOPES] * (layer.head_width**-0.5 if scale is None else scale)
    for widen in (True,) if are_wide() else (False, True):
        embeddings = _embeddings(layer, used, tensors, weights, widen)
        projected = {}
        for role in used:
            flat = _project_role(layer, role, embeddings[role], weights)
            projected[role] = _position(plan, role, flat, tensors, weights)
        # a sum takes a tenth of the time of `isfinite`, which took a fifth of a projection at M
        if all(holds(_is_finite(t)) for t in projected.values()):
            break
    return rest | projected


def project_output(output_BHLE: Tensor, weights: LayerTensors) -> Tensor:
    """Merges the heads (B, L, H * E), and applies the output projection if there is one."""
    merged_BLX = projection.merge_heads(output_BHLE)
    weight_XM = weights.get("output.weight")
    if weight_XM is None:
        return merged_BLX
    bias_M = weights.get("output.bias")
    return projection.apply(
        merged_BLX,
        weight_XM.to(merged_BLX.dtype),
        None if bias_M is None else bias_M.to(merged_BLX.dtype),
    )


def project_back(
    plan: Plan, tensors: Mapping[str, Tensor], weights: LayerTensors, raw: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the gradients of the embeddings and, unless the layer is loaded, of its weights.

    Args:
        plan: of gradients with a layer.
        tensors: its inputs, with the embedding of each role under the role's name.
        weights: of the layer.
        raw: the gradients of the variant's inputs.
    """
    layer = plan.inputs.layer
    assert layer is not None
    roles = [role for role in plan.roles if f"{role}.weight" in weights]
    from_layer = {*roles, *layer.variant_inputs}
    gradients = {name: tensor for name, tensor in raw.items() if name not in from_layer}
    if SINKS in weights:
        gradients[GRADIENT + SINKS] = raw[SINKS]
    embeddings = _embeddings(layer, roles, tensors, weights)
    for role in roles:
        x_BNM, grad_BHND = embeddings[role], raw[role]
        grad_BHND = _position(plan, role, grad_BHND, tensors, weights, inverse=True)
        norm = weights.get(f"{role}_norm.weight")
        if norm is not None:
            flat = _project_linear(layer, role, x_BNM.to(grad_BHND.dtype), weights)
            grad_BHND, gradients[f"{GRADIENT}{role}_norm.weight"] = normalize_back(
                grad_BHND, flat, norm, layer.options.qk_norm
            )
        grad_BNX, weight_MX = projection.merge_heads(grad_BHND), weights[f"{role}.weight"]
        if layer.loaded is not None:
            x = projection.project_back_to_input(grad_BNX, weight_MX)
            gradients[role] = _leave_norm(layer, x, tensors[role], weights)
            continue
        x, weight, bias = projection.project_back(
            grad_BNX, x_BNM, weight_MX, weights.get(f"{role}.bias")
        )
        gradients[role] = x
        gradients[f"{GRADIENT}{role}.weight"] = weight
        if bias is not None:
            gradients[f"{GRADIENT}{role}.bias"] = bias
    return gradients


def _is_finite(x: Tensor) -> Condition:
    """Returns False if a number is not finite; 16 bits would be too few for the sum."""
    return is_finite(x, torch.promote_types(x.dtype, torch.float32))


def _embeddings(
    layer: Layer,
    roles: Sequence[str],
    tensors: Mapping[str, Tensor],
    weights: LayerTensors,
    widen: bool = False,
) -> Mapping[str, Tensor]:
    """Returns the embedding of each role, after the norm of the model if x is in front of it.

    With `widen`, they are float64.
    """
    names = ["x"] if "x" in tensors else roles
    entered = {}
    for name in names:
        x_BNM = tensors[name].double() if widen else tensors[name]
        if layer.options.input == "residual":
            assert layer.loaded is not None
            assert layer.loaded.norm is not None
            x_BNM = input_norm.normalize(
                x_BNM, layer.loaded.norm, weights[NORM_WEIGHT], weights.get(NORM_BIAS)
            )
        entered[name] = x_BNM
    return {role: entered["x" if "x" in tensors else role] for role in roles}


def _leave_norm(layer: Layer, grad_BNM: Tensor, x_BNM: Tensor, weights: LayerTensors) -> Tensor:
    """Returns the gradient of an embedding from that of the projection's input."""
    if layer.options.input != "residual":
        return grad_BNM
    assert layer.loaded is not None
    assert layer.loaded.norm is not None
    return input_norm.normalize_back(grad_BNM, x_BNM, layer.loaded.norm, weights[NORM_WEIGHT])


def _project_linear(layer: Layer, role: str, x_BNM: Tensor, weights: LayerTensors) -> Tensor:
    """Returns x @ weight + bias in the dtype of x, split into heads."""
    weight, bias = weights[f"{role}.weight"], weights.get(f"{role}.bias")
    projected = projection.apply(
        x_BNM, weight.to(x_BNM.dtype), None if bias is None else bias.to(x_BNM.dtype)
    )
    return projection.split_heads(projected, layer.head_count(role))


def _project_role(layer: Layer, role: str, x_BNM: Tensor, weights: LayerTensors) -> Tensor:
    """Returns queries, keys or values (B, heads, N, D) after the norm."""
    projected = _project_linear(layer, role, x_BNM, weights)
    norm = weights.get(f"{role}_norm.weight")
    return projected if norm is None else normalize(projected, norm, layer.options.qk_norm)


def _position(
    plan: Plan,
    role: str,
    x_BHND: Tensor,
    tensors: Mapping[str, Tensor],
    weights: LayerTensors,
    *,
    inverse: bool = False,
) -> Tensor:
    """Returns queries or keys with their rotary embedding; values unchanged."""
    layer = plan.inputs.layer
    if role == "value" or FREQUENCIES not in weights:
        return x_BHND
    assert layer is not None
    assert layer.options.rope is not None
    positions = torch.arange(x_BHND.shape[2], dtype=torch.float64, device=x_BHND.device)
    if role == "query":
        positions = positions + _query_offset(plan, tensors)
    return rotate(
        x_BHND,
        weights[FREQUENCIES],
        positions,
        layer.rotary_order,
        layer.options.rope.factor,
        inverse=inverse,
    )


def _query_offset(plan: Plan, tensors: Mapping[str, Tensor]) -> Tensor | int:
    """Returns the position of the first query on the key axis: a number, or (B, 1, 1)."""
    offset = plan.arguments.get("query_offset", 0)
    if offset != "end":
        return int(offset)
    sizes = plan.inputs.axes.sizes
    lengths_B = tensors.get("key_lengths")
    if lengths_B is None:
        return sizes["S"] - sizes["L"]
    return (lengths_B - sizes["L"]).view(-1, 1, 1)
