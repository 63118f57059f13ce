"""Outputs of candidates: projections once for each split into heads, then attention.

Norms, rotary embeddings and slopes are those of the service's runs. Attention is not: many
variations of few rows are computed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from qkv.attention.layers import alibi
from qkv.attention.layers.detection_candidates import Variation
from qkv.attention.layers.layer import Layer
from qkv.attention.layers.layer_weights import ROLES, SINKS, Array
from qkv.attention.layers.qk_norm import QKNorm, normalize
from qkv.attention.layers.rope import Rope, rotate

_BLOCK: Final = 1 << 22  # numbers of scores at once
_MAX_VARIATIONS: Final = 12  # of one call


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
