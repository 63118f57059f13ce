"""Outputs of candidates: projections once for each split into heads, then attention.

Norms, rotary embeddings and slopes are those of the service's runs. Attention is not: many
variations of few rows are computed at once.

`check_work` counts the numbers that the candidates read and compute, from their sizes. A weight
counts once, and once more for each 32 hidden states with which it is multiplied. A score counts
eight times, because product, scale, mask and the steps of softmax each write it; so does a channel
that a rotary embedding turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qkv.attention.layers import alibi
from qkv.attention.layers.detection_candidates import Variation
from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_weights import ROLES, SINKS, Array
from qkv.attention.layers.qk_norm import QKNorm, normalize
from qkv.attention.layers.rope import Rope, rotate
from qkv.errors import InvalidContent

_BLOCK: Final = 1 << 22  # numbers of scores at once
_MAX_VARIATIONS: Final = 12  # of one call
MAX_WORK: Final = 2**32
"""Most numbers of a detection. They take 2 to 30 s of one core."""
_STEPS: Final = 8
_TOKENS: Final = 32  # for which a weight counts once


def block_scores(heads: int, length: int) -> int:
    """Returns the most scores at once: a block, or one row if this is larger."""
    row = _MAX_VARIATIONS * heads * length
    return min(max(_BLOCK, row), row * length)


class Projections:
    """Hidden states projected by matrices; one that a split shares with the next is applied once.

    Only the last projection of each role is kept, so that memory does not grow with the splits.

    Args:
        x_NM: the hidden states of all sequences, one after the other.
        raise_if_stopped: called before each product of large matrices; may raise.
    """

    def __init__(self, x_NM: Tensor, raise_if_stopped: Callable[[], object]) -> None:
        self.x_NM, self.raise_if_stopped = x_NM, raise_if_stopped
        self._last: dict[str, tuple[object, Tensor]] = {}

    def tensor(self, array: Array) -> Tensor:
        """Returns a copy in the dtype of x. Torch warns about arrays that are read-only."""
        wide = np.float64 if self.x_NM.dtype == torch.float64 else np.float32
        with np.errstate(invalid="ignore"):  # a signalling NaN warns
            return torch.from_numpy(np.array(array, wide))

    def project(self, layer: Layer, role: str) -> Tensor:
        """Returns x @ weight + bias for a role: (N, heads * width)."""
        weight, bias = layer.weights[f"{role}.weight"], layer.weights.get(f"{role}.bias")
        # a copy that belongs to one split only has an address that may be used again
        is_shared = any(np.may_share_memory(weight, sent) for sent in layer.tensors.values())
        address = (weight.__array_interface__["data"][0], weight.shape, weight.strides)
        key: object = address if is_shared else layer
        last = self._last.pop(role, None)
        if last is None or last[0] != key:
            self.raise_if_stopped()
            last = key, self.x_NM @ self.tensor(weight)
            if bias is not None:
                last[1].add_(self.tensor(bias))
        self._last[role] = last
        return last[1]


class SplitOutputs:
    """Outputs of one sequence for variations of a layer.

    Args:
        layer: with its numbers of heads.
        projections: of hidden states.
        tokens: the sequence's rows among them.
        columns: of the output to compute.
    """

    def __init__(
        self,
        layer: Layer,
        projections: Projections,
        tokens: slice,
        columns: slice | Array = slice(None),
    ) -> None:
        self._layer = layer
        self._tensor, self._raise_if_stopped = projections.tensor, projections.raise_if_stopped
        query, key, value = (
            projections.project(layer, role)[tokens]
            .unflatten(-1, (layer.head_count(role), -1))
            .transpose(0, 1)
            for role in ROLES
        )
        self._query_HLD, self._key_GLD, self._value_GLE = query, key, value
        self._columns = columns
        weight, bias = layer.weights.get("output.weight"), layer.weights.get("output.bias")
        self._weight = None if weight is None else self._tensor(weight[:, columns])
        self._bias = None if bias is None else self._tensor(bias[columns])
        sinks = layer.weights.get(SINKS)
        self._sinks_H = None if sinks is None else self._tensor(sinks)

    def positioned(self, rope: Rope | None, norm: QKNorm | None) -> tuple[Tensor, Tensor]:
        """Returns queries (H, L, D) and keys (G, L, D) after norm and rotary embedding."""
        parts = []
        for role, x in (("query", self._query_HLD), ("key", self._key_GLD)):
            x_BHND = x[None]
            weight = self._layer.weights.get(f"{role}_norm.weight")
            if weight is not None and norm is not None:
                x_BHND = normalize(x_BHND, self._tensor(weight), norm)
            if rope is not None:
                frequencies = torch.from_numpy(rope.radians(x.shape[-1]))
                positions = torch.arange(x.shape[-2], dtype=torch.float64)
                order = rope.order or "half"
                x_BHND = rotate(x_BHND, frequencies, positions, order, rope.factor)
            parts.append(x_BHND[0])
        return parts[0], parts[1]

    def run(
        self, positioned: tuple[Tensor, Tensor], variations: Sequence[Variation], rows_R: Tensor
    ) -> Tensor:
        """Returns the outputs (V, R, columns) of variations with the same queries and keys.

        Args:
            positioned: their queries and keys.
            variations: V of them.
            rows_R: indices of query rows.
        """
        query_HLD, key_GLD = positioned
        V, H, G = len(variations), len(query_HLD), len(key_GLD)
        size = max(1, _BLOCK // (V * H * key_GLD.shape[1]))
        outputs = []
        for rows in rows_R.split(size):
            self._raise_if_stopped()
            query_GCD = query_HLD[:, rows].reshape(G, -1, query_HLD.shape[-1])
            scores_HRL = (query_GCD @ key_GLD.mT).reshape(H, len(rows), -1)
            scores_VHRL = torch.stack([self._varied(scores_HRL, v, rows) for v in variations])
            weights_VGCL = self._softmax(scores_VHRL).reshape(V, G, -1, key_GLD.shape[1])
            merged = (weights_VGCL @ self._value_GLE).reshape(V, H, len(rows), -1)
            outputs.append(self._project(merged.transpose(1, 2).flatten(2)))
        return torch.cat(outputs, dim=1)

    def _varied(self, scores_HRL: Tensor, variation: Variation, rows_R: Tensor) -> Tensor:
        scores = scores_HRL * variation.scale
        keys_L = torch.arange(scores.shape[-1])
        distance_RL = keys_L - rows_R[:, None]
        if variation.alibi:
            factor = variation.scale if variation.alibi == "scaled" else 1.0
            slopes_H = torch.from_numpy(factor * alibi.slopes(len(scores))).to(scores.dtype)
            scores = scores + slopes_H[:, None, None] * distance_RL
        return scores.masked_fill(distance_RL > 0, -torch.inf) if variation.causal else scores

    def _softmax(self, scores_VHRL: Tensor) -> Tensor:
        if self._sinks_H is None:
            return torch.softmax(scores_VHRL, dim=-1)
        sinks = self._sinks_H[:, None, None].expand(*scores_VHRL.shape[:-1], 1)
        return torch.softmax(torch.cat([scores_VHRL, sinks], dim=-1), dim=-1)[..., :-1]

    def _project(self, merged_VRX: Tensor) -> Tensor:
        if self._weight is None:
            return merged_VRX[..., self._columns]
        output = merged_VRX @ self._weight
        return output if self._bias is None else output + self._bias


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
    return int(weights * (1 + tokens // _TOKENS) + tokens * outputs)


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
    return int(once), int(each + projection * (1 + rows // _TOKENS))
