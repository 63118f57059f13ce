"""The check of a detection: reads it from a request, and refuses doubtful results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from qkv.attention.layers.detection import MAX_TOKENS, Check, Detection
from qkv.attention.layers.detection_candidates import Candidate, most_heads
from qkv.attention.layers.detection_outputs import block_scores
from qkv.attention.layers.layer_weights import Array
from qkv.errors import InvalidContent, pointer_to
from qkv.tensors import FLOATING, RawTensor

_COPIES: Final = 5  # at once: of queries and keys as they get positions, of scores
_LARGEST_ERROR: Final = {"float64": 1e-4, "float32": 1e-4, "float16": 0.01, "bfloat16": 0.03}
"""The largest error with which a candidate is converted, by the coarsest dtype of the tensors.

float32: 1000 eps, for modules that round in another order. float16 and bfloat16: 10 and 4 eps, for
modules that round each intermediate result.
"""


def check_bytes(check: Mapping[str, RawTensor], weights: int, fields: Mapping[str, Any]) -> int:
    """Returns the most bytes of projections and of one block of scores in a detection.

    Args:
        check: the tensors of the field.
        weights: numbers in all weights.
        fields: of the request, not validated.
    """
    x = check.get("x")
    if x is None or len(x.shape) < 2 or 0 in x.shape:
        return 0  # is refused
    tokens, width = math.prod(x.shape[:-1]), weights // x.shape[-1]
    if tokens > MAX_TOKENS:
        return 0  # is refused
    heads = fields.get("heads")
    if not isinstance(heads, int) or not 0 < heads <= width:
        heads = min(width, most_heads(width))
    scores = block_scores(heads, x.shape[-2])
    return 8 * (_COPIES * tokens * width + _COPIES * scores)


def read_check(values: Mapping[str, Any], arrays: Mapping[str, Array]) -> Check:
    """Returns the check of a request.

    Args:
        values: members of the field that are no tensors.
        arrays: its tensors.

    Raises:
        InvalidContent: it has not x and y, or more, or they are not floating.
    """
    for name in (*arrays, *values):
        if name not in Check._fields:
            raise InvalidContent(
                f"unknown field {name!r:.60} of check; known are x, y",
                pointer=pointer_to("check", name),
            )
    for name in Check._fields:
        if name not in arrays:
            problem = "is not a tensor" if name in values else "is missing"
            raise InvalidContent(
                f"check.{name} {problem}: check needs the hidden states x and the output y",
                pointer=pointer_to("check", name),
            )
    for name, array in arrays.items():
        if array.dtype.name not in FLOATING:
            raise InvalidContent(
                f"check.{name} has the wrong dtype: got {array.dtype.name}, expected "
                f"{', '.join(FLOATING)}",
                pointer=pointer_to("check", name),
            )
    return Check(**arrays)


def refuse_doubtful(detection: Detection, arrays: Iterable[Array]) -> None:
    """Checks that the best candidate is good enough to be converted.

    Raises:
        InvalidContent: its error is too large, or another one with other heads or another rotary
            order is as good.
    """
    best = detection.candidates[0]
    bound = max(_LARGEST_ERROR[array.dtype.name] for array in arrays)
    if best.error > bound:
        raise InvalidContent(
            f"check fits no candidate: got an error of {best.error:.3g} for the best, "
            f"{_described(best)}, expected at most {bound:g}",
            pointer="/check",
        )
    for other in detection.candidates[1 : detection.tied]:
        if _moves(other) != _moves(best):
            raise InvalidContent(
                f"check does not tell candidates apart: got equal errors of {_described(best)} and "
                f"of {_described(other)}, expected hidden states of more positions",
                pointer="/check",
            )


def _moves(candidate: Candidate) -> tuple[Any, ...]:
    """Returns what decides to which place a conversion moves a number."""
    rope = candidate.variation.rope
    return (*candidate.split[1:], rope and (rope.order, rope.dims))


def _described(candidate: Candidate) -> str:
    split, variation = candidate.split, candidate.variation
    rotary = f"{variation.rope.order} rotary order" if variation.rope else "no rotary embedding"
    causal = "" if variation.causal else "not "
    return (
        f"{split.layout} with heads={split.heads}, kv_heads={split.kv_heads}, {rotary}, "
        f"scale={variation.scale:.4g}, {causal}causal"
    )
