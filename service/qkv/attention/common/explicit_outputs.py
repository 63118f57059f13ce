"""Outputs of a softmax or sigmoid by plain products, from blocks of scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qkv.attention.common.score_blocks import ScoreBlock, Scores, score_dtype
from qkv.attention.common.visibility import row_blocks

_SCORE_ELEMENTS = 1 << 23  # of a block's scores: 32 MiB in float32


def explicit_outputs(
    scores: Scores,
    value_BGSE: Tensor,
    outputs: frozenset[str],
    dtype: torch.dtype,
    score_elements: int | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns output, weights and scores, None for those that are not requested.

    Computes plain products in blocks of rows; holds whole matrices only if requested.

    Args:
        scores: of all rows.
        value_BGSE: values in the scores' dtype.
        outputs: the names of the outputs to return.
        dtype: of the output.
        score_elements: the most scores of a block; None: 2**23.
    """
    B, G, K, L, _ = scores.query_BGKLD.shape
    H, S, E = G * K, scores.visible.S, value_BGSE.shape[-1]
    exact, blocks = score_dtype(dtype), row_blocks(L, B * H * S, score_elements or _SCORE_ELEMENTS)
    if len(blocks) == 1:
        block = scores.block(blocks[0])
        if block.keys == slice(0, S):
            return (
                _averaged(scores, block, value_BGSE).to(dtype) if "output" in outputs else None,
                block.weights.to(exact) if "weights" in outputs else None,
                block.scores.to(exact) if "scores" in outputs else None,
            )
    output = value_BGSE.new_zeros(B, H, L, E, dtype=dtype) if "output" in outputs else None
    weights = value_BGSE.new_zeros(B, H, L, S, dtype=exact) if "weights" in outputs else None
    logits = (
        value_BGSE.new_full((B, H, L, S), -torch.inf, dtype=exact) if "scores" in outputs else None
    )
    for rows in blocks:
        block = scores.block(rows)
        if output is not None:
            output[:, :, rows] = _averaged(scores, block, value_BGSE)
        if weights is not None:
            weights[:, :, rows, block.keys] = block.weights
        if logits is not None:
            logits[:, :, rows, block.keys] = block.scores
    return output, weights, logits


def _averaged(scores: Scores, block: ScoreBlock, value_BGSE: Tensor) -> Tensor:
    """Returns A @ value for a block of rows: (B, H, R, E)."""
    weights_BHRS, value = block.weights, value_BGSE[:, :, block.keys]
    (B, H, R, S), (_, G, _, E) = weights_BHRS.shape, value.shape
    weights_BGTS = weights_BHRS.view(
        B, G, H // G * R, S
    )  # T: the rows of all heads that read a key head
    if scores.exponents is None:
        return torch.matmul(weights_BGTS, value).view(B, H, R, E)
    if scores.sigmoid_bias is not None:  # a sum of up to S values, of which parts may overflow
        room = 2.0 ** (S.bit_length() + 1)
        return torch.matmul(weights_BGTS, value / room).view(B, H, R, E).mul_(room)
    # the values are near the end of float64's range: their sum may overflow although their average
    # does not, and weights that are rounded up may make an average larger than its values
    room = 2.0 ** math.ceil(math.log2(4 / (1 - scores.dropout)))
    output_BGTE = torch.matmul(weights_BGTS, value / room)
    if not scores.dropout:
        largest_BG11 = value_BGSE.abs().amax((2, 3), keepdim=True) / room
        largest_BG11 = largest_BG11.nan_to_num(nan=torch.inf, posinf=torch.inf)
        output_BGTE.clamp_(-largest_BG11, largest_BG11)
    return output_BGTE.view(B, H, R, E).mul_(room)
