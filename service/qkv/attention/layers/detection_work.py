"""The work of a detection, counted in numbers from the sizes of its candidates.

Counted are the numbers that the candidates read and compute. A weight counts once, and once more
for each 32 hidden states with which it is multiplied. A score counts eight times, because product,
scale, mask and the steps of softmax each write it; so does a channel that a rotary embedding turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_weights import ROLES
from qkv.errors import InvalidContent

MAX_WORK: Final = 2**32
"""Most numbers of a detection. They take 2 to 30 s of one core."""
_STEPS: Final = 8
_BLOCK: Final = 32


class DetectionSize(NamedTuple):
    """The sizes of a check, and how much of it the first pass runs.

    Attributes:
        sequences, length: of the hidden states.
        columns: of the output.
        screened_rows, screened_columns: of one sequence, which every candidate runs.
        exact_runs: the most candidates that run as a whole.
    """

    sequences: int
    length: int
    columns: int
    screened_rows: int
    screened_columns: int
    exact_runs: int


def check_work(layers: Sequence[tuple[Layer, bool, Sequence[int]]], size: DetectionSize) -> None:
    """Checks the work of a detection.

    Args:
        layers: for each split, the layer, which may be blank; True if its projections are those of
            the split before; and the numbers of variations with the same queries and keys.
        size: of the check.

    Raises:
        InvalidContent: it is too much.
    """
    work, whole, projected = 0, 0, []
    for layer, is_shared, groups in layers:
        if not is_shared:
            work += _projection(layer, size.length)
            projected.append(_projection(layer, size.sequences * size.length))
        once, each = _attention(layer, size.length, size.screened_rows, size.screened_columns)
        work += len(groups) * once + sum(groups) * each
        run = size.sequences * sum(_attention(layer, size.length, size.length, size.columns))
        whole = max(whole, min(size.exact_runs, len(layers) * sum(groups)) * run)
    # any candidates may be the best: the largest ones count
    work += whole + sum(sorted(projected)[-size.exact_runs :])
    if work <= MAX_WORK:
        return
    counted = f"got {work} numbers to read and compute, expected at most {MAX_WORK}"
    if len(layers) > 1 and work / len(layers) <= MAX_WORK:
        raise InvalidContent(
            f"heads is missing: {counted}, for {len(layers)} possible splits into heads. Give "
            "heads, kv_heads or the layout, or fewer hidden states",
            pointer="/heads",
        )
    raise InvalidContent(
        f"check.x is too large: {counted}. Give fewer hidden states", pointer="/check/x"
    )


def _projection(layer: Layer, tokens: int) -> int:
    """Returns the numbers of the projections of hidden states."""
    weights = sum(layer.weights[f"{role}.weight"].size for role in ROLES)
    outputs = sum(layer.weights[f"{role}.weight"].shape[1] for role in ROLES)
    return int(weights * (1 + tokens // _BLOCK) + tokens * outputs)


def _attention(layer: Layer, tokens: int, rows: int, columns: int) -> tuple[int, int]:
    """Returns the numbers of attention for one sequence.

    They are those of queries and keys with positions, and those of one variation on them: scores,
    values, and the output projection.
    """
    query, key, value = (layer.weights[f"{role}.weight"].shape[1] for role in ROLES)
    heads = layer.head_count("query")
    merged = heads * (value // layer.head_count("key"))
    projection = merged * columns if "output.weight" in layer.weights else 0
    once = _STEPS * tokens * (query + key)
    each = _STEPS * rows * tokens * heads + tokens * value + rows * merged
    return int(once), int(each + projection * (1 + rows // _BLOCK))
