"""The proof of a recorded call: its weights times its values are what the model computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.models.masks import pairs_in_sight
from qkv.models.model_call import ModelCall

_BLOCK: Final = 1 << 22  # scores that are held at a time
_NEAR: Final = 100.0  # so much less in a mask leaves a score no weight
_MATMUL_BITS: Final = {"high": 10, "medium": 7}  # of float32, as torch may shorten it


@torch.no_grad()
def is_proved(call: ModelCall, output: Tensor) -> bool:
    """Tells if the weights of a call times its values are an output, within its rounding.

    Queries that see no key prove nothing, because models define their output differently. Neither
    do calls that drop weights.

    Args:
        call: each query head has a key head of its own.
        output: (B, H, L, E), as the model's attention returned it.
    """
    if call.dropout:
        return True
    B, H, L, _ = call.query.shape
    S = call.key.shape[2]
    rows = max(1, _BLOCK // max(1, B * H * S))
    with torch.autocast(call.query.device.type, enabled=False):
        return all(
            _has_proved_rows(call, output, slice(start, start + rows))
            for start in range(0, L, rows)
        )


def _has_proved_rows(call: ModelCall, output: Tensor, rows: slice) -> bool:
    """Tells if some rows of a call are those of an output."""
    numbers = (call.query, call.key, call.value, output)
    dtype = torch.promote_types(torch.float32, call.query.dtype)
    query, key, value, output = (x.to(dtype) for x in numbers)
    query, output = query[:, :, rows], output[:, :, rows]
    scores, size = _scores(call, query, key, rows)
    if call.sinks is not None:
        sinks = call.sinks.to(dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    D, S = key.shape[-1], key.shape[2]
    expected = scores.softmax(-1)[..., :S] @ value
    bound = _shift(numbers, dtype, size, D, S) * value.abs().amax(2, keepdim=True)
    differs = ~((output - expected).abs() <= bound)
    return not bool((differs & expected.isfinite() & bound.isfinite()).any())


def _scores(call: ModelCall, query: Tensor, key: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Returns the scores of some rows, and for each row the size of the numbers in their sums."""
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    query = query * scale
    scores = query @ key.mT
    longest = key.norm(dim=-1).amax(-1)[..., None, None]
    size = scores.abs().amax(-1, keepdim=True)
    size = size + query.norm(dim=-1, keepdim=True) * longest * query.shape[-1] ** -0.5
    if call.softcap is not None:
        scores = (scores / call.softcap).tanh() * call.softcap
    mask = call.mask
    if mask is not None and mask.shape[2] > 1:
        mask = mask[:, :, rows]
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
        size = size + _size_of_mask(mask)
    if call.causal or call.window is not None:
        sight = pairs_in_sight(call, call.query.shape[2], key.shape[2])[rows]
        scores = scores.masked_fill(~sight, -torch.inf)
    return scores, size


def _shift(numbers: Sequence[Tensor], dtype: torch.dtype, size: Tensor, D: int, S: int) -> Tensor:
    """Returns the rounding of rows of weights times values, as a share of the largest value."""
    # a score is rounded some four times, its weight and the output once each; sums are wider
    return _eps(numbers) * (4 * size + 8) + torch.finfo(dtype).eps * (D * size + S)


def _size_of_mask(mask: Tensor) -> Tensor:
    """Returns the size of the numbers that a mask adds to scores, for each row."""
    is_far = mask < mask.amax(-1, keepdim=True) - _NEAR
    return mask.abs().masked_fill(is_far, 0).amax(-1, keepdim=True)


@torch.no_grad()
def is_projected(
    module: nn.MultiheadAttention,
    call: ModelCall,
    output: Tensor,
    inputs: Sequence[Tensor],
    result: object,
) -> bool:
    """Tells if a module returned the projected outputs of its heads, within their rounding.

    The heads are those of a second run, which rounds in another order. What is compared and bounded
    are Euclidean norms: of the vectors of each head, and of the rows of the result. Calls that drop
    weights prove nothing.

    Args:
        module: of torch.
        call, output: of the heads in the second run.
        inputs: query, key and value of the module.
        result: what the module returned in the first run.
    """
    if call.dropout:
        return True
    if not isinstance(result, Tensor) or result.shape != inputs[0].shape:
        return False
    numbers = (*inputs, call.query, output, result, module.out_proj.weight)
    dtype = torch.promote_types(torch.float32, result.dtype)
    with torch.autocast(result.device.type, enabled=False):
        heads_BLM = output.transpose(1, 2).flatten(2).to(dtype)
        weight = module.out_proj.weight.to(dtype)
        bias = None if module.out_proj.bias is None else module.out_proj.bias.to(dtype)
        expected = F.linear(heads_BLM, weight, bias)
        error = (_batch_first(module, result).to(dtype) - expected).norm(dim=-1)
        bound = _difference_of_heads(module, call, inputs, numbers)
        rounding, _ = _projection_rounding(
            heads_BLM[:, None], weight[None], bias, expected.norm(dim=-1)[:, None, :, None], numbers
        )
        rounding = rounding[:, 0, :, 0]
        is_known = expected.isfinite().all(-1)

        def is_near(norm: Tensor) -> bool:
            limit = norm * bound + rounding
            return not bool((~(error <= limit) & is_known & limit.isfinite()).any())

        # the norm of a matrix takes long to find, and is at least that of each row
        return is_near(weight.norm(dim=1).amax()) or is_near(torch.linalg.matrix_norm(weight, 2))


def _difference_of_heads(
    module: nn.MultiheadAttention,
    call: ModelCall,
    inputs: Sequence[Tensor],
    numbers: Sequence[Tensor],
) -> Tensor:
    """Returns how much the outputs of all heads of two runs may differ: (B, L)."""
    dtype = torch.promote_types(torch.float32, call.query.dtype)
    H, D, S = module.num_heads, call.query.shape[-1], call.key.shape[2]
    norms = [x.to(dtype).norm(dim=-1, keepdim=True) for x in (call.query, call.key, call.value)]
    query, key, value = norms[0], norms[1].amax(2, True), norms[2].amax(2, True)
    if module._qkv_same_embed_dim:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    (d_query, of_query), (d_key, of_key), (d_value, _) = (
        _projection_rounding(
            _batch_first(module, x)[:, None], weight.unflatten(0, (H, -1)), bias, size, numbers
        )
        for x, weight, bias, size in zip(inputs, weights, biases, (query, key, value), strict=True)
    )
    d_key, of_key, d_value = (x.amax(2, keepdim=True) for x in (d_key, of_key, d_value))
    size = 2 * D**-0.5 * query * key
    if call.mask is not None and call.mask.dtype != torch.bool:
        size = size + _size_of_mask(call.mask)
    scores = D**-0.5 * (of_query * key + query * of_key + d_query * d_key)
    # weights whose scores differ by x differ by a factor of at most exp(2x)
    share = 2 * _shift(numbers, dtype, size, D, S) + torch.expm1(2 * scores)
    difference: Tensor = (share * value + d_value).norm(dim=1)[..., 0]
    return difference


def _projection_rounding(
    x: Tensor, weight: Tensor, bias: Tensor | None, size: Tensor, numbers: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns how much the projections of vectors by two runs may differ, (B, H, L, 1).

    A run rounds by half an eps the product, its sum with the bias, and a scaled one. Its sums of n
    terms err by at most n eps, in any order. Where roundings are independent, it is more than
    8 sqrt(n) eps with a probability of 2 n exp(-32) (Higham and Mary, A New Approach to
    Probabilistic Rounding Error Analysis, 2019). The same holds for all roundings behind a product
    with another vector: the error of its sum is that of the widest channel.

    Args:
        x: (B, 1, L, M).
        weight: (H, D, M) of each head.
        bias: (H D).
        size: norms of the projections (B, H, L, 1).
        numbers: the tensors that the runs compute with.

    Returns:
        The norm of the difference, and its product with another vector, for each unit of its norm.
    """
    n = x.shape[-1]
    dtype = torch.promote_types(torch.float32, x.dtype)
    bias = weight.new_zeros(weight.shape[:2]) if bias is None else bias.view(weight.shape[:2])
    rows = weight.to(dtype).norm(dim=-1), bias.to(dtype).abs()
    length = x.to(dtype).norm(dim=-1, keepdim=True)
    added = rows[1].norm(dim=-1)[:, None, None]
    whole = length * rows[0].norm(dim=-1)[:, None, None] + added
    widest = length * rows[0].amax(-1)[:, None, None] + rows[1].amax(-1)[:, None, None]
    eps = _eps(numbers)
    is_exact = torch.get_float32_matmul_precision() == "highest"
    fine = torch.finfo(dtype).eps if is_exact else eps
    stored = eps * (3 * size + added)
    vector, product = (torch.minimum(n * whole, 8 * n**0.5 * x) for x in (whole, widest))
    return stored + fine * vector, stored + fine * product


def _batch_first(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """Returns an input or the output of a module as (B, L, M)."""
    if x.ndim == 2:
        return x[None]
    return x if module.batch_first else x.transpose(0, 1)


def _eps(numbers: Sequence[Tensor]) -> float:
    """Returns the rounding of the steps between the numbers of tensors."""
    # models of transformers compute the softmax of float64 in float32
    eps = max(torch.finfo(x.dtype).eps for x in (*numbers, torch.empty(0, dtype=torch.float32)))
    bits = _MATMUL_BITS.get(torch.get_float32_matmul_precision())
    return eps if bits is None else max(eps, 2.0**-bits)
