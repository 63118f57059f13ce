"""Linear attention: weights are products of positive features, so that sums over keys are shared.

Formula: A_ij = phi(q_i) . phi(k_j) / sum_l phi(q_i) . phi(k_l), phi(x) = elu(x) + 1, output = A V.
Paper: Katharopoulos et al., Transformers are RNNs (arXiv:2006.16236), section 3.2.
Cost: O((L + S) D E) time, causal too; memory O(L + S) unless weights are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from pydantic import Field
from torch import Tensor

from qkv.attention.common.feature_sums import Phi, State, apply_state, feature_sums
from qkv.attention.common.gradients import (
    gradients_by_features,
    gradients_by_heads,
    normalize_size,
    scale_back,
)
from qkv.attention.common.row_masks import (
    Causal,
    QueryOffset,
    item_offsets,
    mask_padding,
    padding_mask,
    rows_to_redo,
    visible_keys,
    zero_hidden,
)
from qkv.attention.common.score_blocks import largest_size, score_dtype
from qkv.attention.common.visibility import row_blocks

FORMULA: Final = "A_ij = phi(q_i) . phi(k_j) / sum_l phi(q_i) . phi(k_l), phi(x) = elu(x) + 1"
PAPER: Final = "Katharopoulos et al., Transformers are RNNs, arXiv:2006.16236, section 3.2"
COST: Final = "O((L + S) D E) time, causal too; O(L + S) memory unless weights are asked for"
WEIGHTS: Final = "stochastic; unnormalised where normalize is false"
REFUSES: Final[Mapping[str, str]] = {
    "scale": "a factor inside phi is another feature map: scale the queries instead",
    "softcap": "there are no scores that could be capped",
    "window": "what all keys share is one sum: a window has no such sum",
    "dropout": "no single weight is ever made that could be dropped",
    "seed": "no single weight is ever made that could be dropped",
}

STACKABLE_BELOW: Final = (
    8.0  # from there on a whole call may take another path: see _FAINT and logs
)

_ELEMENTS = 1 << 22  # of a block of rows of A, and of the features' sums behind it
_NORMAL = 1e-31  # products above it are rounded as all are, and so are their sums
_FAINT = 1e-7  # above it, what float32 rounds of values of 2**-110 and more is as for any others
_TINY = 1e-250  # a row sum below it may have lost its smaller terms


class Linear(NamedTuple):
    """What linear attention answers; None where it was not asked for."""

    output: Float[Tensor, "B H L E"] | None = None
    weights: Float32[Tensor, "B H L S"] | Float64[Tensor, "B H L S"] | None = None
    backend: str = "features"


class _Features(NamedTuple):
    """phi of queries and keys, or what it is still to be made of.

    Attributes:
        query_BGKLD: of the queries, each row over e^its shift.
        key_BGSD: of the keys, all of a head over e^its shift; zero for padding.
        phi: what makes features of the two; None: they are.
        shift_BGKL1: the shifts of row and head together; None where there are none.
        logs: log phi of both, where sums of products may underflow; else None.
        least: no product of the two is less, but for padding; None where there are logs.
    """

    query_BGKLD: Tensor
    key_BGSD: Tensor
    phi: Phi | None
    shift_BGKL1: Tensor | None
    logs: tuple[Tensor, Tensor] | None
    least: float | None

    @classmethod
    def of(cls, query_BHLD: Tensor, key_BGSD: Tensor, padding_BS: Tensor | None) -> _Features:
        """In float32 or float64 where phi is of ordinary size; else in float64, from its logarithm.

        Never elu(x) + 1, which is exactly 0 from x = -30 on in float32.
        """
        compute = score_dtype(query_BHLD.dtype)
        query = query_BHLD.unflatten(1, (key_BGSD.shape[1], -1)).to(compute)
        key = mask_padding(padding_BS, key_BGSD.to(compute))
        if (least := _least_product(query, key)) is not None:
            return cls(query, mask_padding(padding_BS, key, -torch.inf), _phi, None, None, least)
        logs = (
            _log_phi(query.double()),
            mask_padding(padding_BS, _log_phi(key.double()), -torch.inf),
        )
        query_shift = logs[0].amax(-1, keepdim=True)
        key_shift = logs[1].amax((-1, -2), keepdim=True)
        key_shift = key_shift.masked_fill(key_shift == -torch.inf, 0.0)  # all are padding
        query, key = (logs[0] - query_shift).exp(), (logs[1] - key_shift).exp()
        return cls(query, key, None, query_shift + key_shift[:, :, None], logs, None)

    def made(self) -> _Features:
        """The same with nothing left to be made."""
        if self.phi is None:
            return self
        return self._replace(
            query_BGKLD=self.phi(self.query_BGKLD), key_BGSD=self.phi(self.key_BGSD), phi=None
        )


def weights_are(parameters: Any) -> str:
    """What the weights are with these parameters."""
    return "stochastic" if parameters.normalize else "unnormalised"


def flops(sizes: Mapping[str, int]) -> int:
    """The products that are not causal: keys with values, queries with their sum."""
    B, H, G, L, S, D, E = (sizes[letter] for letter in "BHGLSDE")
    return 2 * B * D * (E + 1) * (G * S + H * L)


def attend(
    query_BHLD: Float[Tensor, "B H L D"],
    key_BGSD: Float[Tensor, "B G S D"],
    value_BGSE: Float[Tensor, "B G S E"],
    key_lengths_B: Int64[Tensor, "B"] | None = None,
    *,
    causal: Causal = False,
    query_offset: QueryOffset = 0,
    normalize: Annotated[
        bool, Field(description="Rows are divided by their sum; false: they are not.")
    ] = True,
    outputs: frozenset[str],
) -> Linear:
    """Attends by features.

    Args:
        query_BHLD, key_BGSD, value_BGSE: query head h reads key head h // (H / G).
        key_lengths_B: keys at and past this index are padding.
        causal, query_offset, normalize: see their descriptions.
        outputs: which of "output" and "weights" to return.
    """
    (B, H, L, _), S, dtype = query_BHLD.shape, key_BGSD.shape[2], query_BHLD.dtype
    padding = padding_mask(S, key_lengths_B)
    features = _Features.of(query_BHLD, key_BGSD, padding)
    offsets = item_offsets(B, L, S, key_lengths_B, causal, query_offset)
    output = weights = None
    if "output" in outputs:
        output = _output(features, value_BGSE, padding, offsets, normalize).to(dtype)
    if "weights" in outputs:
        weights, features = (
            query_BHLD.new_zeros(B, H, L, S, dtype=score_dtype(dtype)),
            features.made(),
        )
        for rows in row_blocks(L, B * H * S, _ELEMENTS):
            weights[:, :, rows] = _block(features, rows, offsets, normalize)
    return Linear(output, weights)


def weights(
    query_BHLD: Float[Tensor, "B H L D"],
    key_BGSD: Float[Tensor, "B G S D"],
    key_lengths_B: Int64[Tensor, "B"] | None = None,
    *,
    causal: bool = False,
    query_offset: int | Literal["end"] = 0,
    normalize: bool = True,
) -> Callable[[slice], Tensor]:
    """What makes blocks of rows of A: from a slice of L to (B, H, R, S), in memory O(R S). The
    arguments are `attend`'s."""
    (B, _, L, _), S = query_BHLD.shape, key_BGSD.shape[2]
    features = _Features.of(query_BHLD, key_BGSD, padding_mask(S, key_lengths_B)).made()
    offsets = item_offsets(B, L, S, key_lengths_B, causal, query_offset)
    exact = score_dtype(query_BHLD.dtype)

    def row_block(rows: slice) -> Float32[Tensor, "B H R S"] | Float64[Tensor, "B H R S"]:
        return _block(features, rows, offsets, normalize).to(exact)

    return row_block


def _least_product(query: Tensor, key: Tensor) -> float | None:
    """What products of phi are at least; None where their sums may overflow or underflow."""
    lowest, most = (-30.0, 1e6) if query.dtype == torch.float32 else (-250.0, 1e60)
    product = 1.0
    for x in (query, key):
        low, high = torch.aminmax(x)
        if not (low.item() >= lowest and high.item() <= most):
            return None
        product *= math.exp(min(0.0, low.item()))
    return product


def _is_faint(features: _Features, value: Tensor) -> bool:
    """Whether float32 may be too narrow for products of features and values."""
    if value.dtype != torch.float32 or features.least is None or features.least >= _FAINT:
        return False
    size = value.abs()
    smallest = size.masked_fill_(size == 0, torch.inf).amin().item()
    return smallest * features.least < _NORMAL


def _phi(x: Tensor) -> Tensor:
    """1 + max(0, x) times elu's slope, e^x where x <= 0: the fewest passes over x."""
    made: Tensor = x.relu().add_(1)
    torch.ops.aten.elu_backward.grad_input(made, 1, 1, 1, False, x, grad_input=made)
    return made


def _log_phi(x: Tensor) -> Tensor:
    return torch.where(x > 0, x.clamp(min=0).log1p(), x)


def _output(
    features: _Features,
    value_BGSE: Tensor,
    padding_BS: Tensor | None,
    offsets: list[int] | None,
    normalize: bool,
) -> Tensor:
    """A @ value, (B, H, L, E), by sums that queries share."""
    value = mask_padding(padding_BS, value_BGSE.to(features.key_BGSD.dtype))
    query, key, phi = features.query_BGKLD, features.key_BGSD, features.phi
    if _is_faint(features, value):
        query, key, value = query.double(), key.double(), value.double()
    narrow, most, room = value.dtype == torch.float32, 0.0, 1.0
    state = State.of(key, value, phi) if narrow and offsets is None else None
    if (
        state is None or not largest_size(state.values_BGEF) <= 1e25
    ):  # queries of up to 1e6 have room
        state, most = None, largest_size(value)
    if most > 1e15 and narrow:  # its sums may pass float32's range
        query, key, value = query.double(), key.double(), value.double()
    elif most > 1e150:
        room = 2.0 ** (np.frexp(most)[1] - 500)
        value = value / room
    made = (
        feature_sums(query, key, value, offsets, phi)
        if state is None
        else apply_state(query, state, phi)
    )
    output, total = made
    if normalize:
        output.div_(total.clamp(min=torch.finfo(total.dtype).tiny))  # 0 where nothing is seen
        if features.logs is not None:
            _redo(output, total, features.logs, value, offsets)
        if room != 1.0:  # an average is no larger than what it averages, however it is rounded
            output = output.clamp(-most / room, most / room)
    elif features.shift_BGKL1 is not None:
        output = output * features.shift_BGKL1.exp()
    return (output if room == 1.0 else output * room).flatten(1, 2)


def _redo(
    output_BGKLE: Tensor,
    total_BGKL1: Tensor,
    logs: tuple[Tensor, Tensor],
    value_BGSE: Tensor,
    offsets: list[int] | None,
) -> None:
    """Rows whose sum has underflowed, once more from the logarithms of their weights."""
    query, key = logs
    for (b, g, k), rows in rows_to_redo(
        total_BGKL1[..., 0] < _TINY, _ELEMENTS // key[0, 0].numel()
    ):
        own = visible_keys(rows, key.shape[2], None if offsets is None else offsets[b])
        made = _from_logs(query[b, g, k, rows], key[b, g], own)
        output_BGKLE[b, g, k, rows] = made @ value_BGSE[b, g]


def _from_logs(query_RD: Tensor, key_SD: Tensor, seen_RS: Tensor | None) -> Tensor:
    """Rows of A, (R, S), normalised; a row that sees nothing is zeros."""
    made_RS = _terms(query_RD, key_SD, seen_RS).sum(-1)
    total_R1 = made_RS.sum(-1, keepdim=True)
    return made_RS / total_R1.masked_fill(total_R1 == 0, 1.0)


def _terms(query_RD: Tensor, key_SD: Tensor, seen_RS: Tensor | None) -> Tensor:
    """What rows of A sum up, (R, S, D), each row over its largest; zeros for what is not seen."""
    logs_RSD = query_RD[:, None] + key_SD
    if seen_RS is not None:
        logs_RSD = logs_RSD.masked_fill(~seen_RS[..., None], -torch.inf)
    most_R11 = logs_RSD.amax((1, 2), keepdim=True)
    most_R11 = most_R11.masked_fill(most_R11 == -torch.inf, 0.0)
    return (logs_RSD - most_R11).exp()


def _block(features: _Features, rows: slice, offsets: list[int] | None, normalize: bool) -> Tensor:
    """Rows of A, (B, H, R, S)."""
    query = features.query_BGKLD[:, :, :, rows]
    block = torch.einsum("bgkld,bgsd->bgkls", query, features.key_BGSD)
    S, row_R = block.shape[-1], torch.arange(rows.start, rows.stop, device=block.device)
    zero_hidden(block, rows, offsets)
    if not normalize:
        if features.shift_BGKL1 is not None:
            block = block * features.shift_BGKL1[:, :, :, rows].exp()
        return block.flatten(1, 2)
    total = block.sum(-1, keepdim=True)
    block = block / total.masked_fill(total == 0, 1.0)
    if features.logs is not None:
        query, key = features.logs
        for (b, g, k), at in rows_to_redo(total[..., 0] < _TINY, _ELEMENTS // key[0, 0].numel()):
            own = visible_keys(row_R[at], S, None if offsets is None else offsets[b])
            block[b, g, k, at] = _from_logs(query[b, g, k, row_R[at]], key[b, g], own)
    return block.flatten(1, 2)


def reference(
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    key_lengths_B: Tensor | None = None,
    *,
    causal: bool = False,
    query_offset: int | Literal["end"] = 0,
    normalize: bool = True,
) -> Linear:
    """The same in plain float64 numpy, one head at a time, as a textbook writes it."""
    query, key, value = (x.double().numpy() for x in (query_BHLD, key_BGSD, value_BGSE))
    (B, H, L, _), (_, G, S, _) = query.shape, key.shape

    def phi(x: np.ndarray) -> np.ndarray:
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    weights, output = np.zeros((B, H, L, S)), np.zeros((B, H, L, value.shape[-1]))
    for b, h in np.ndindex(B, H):
        valid = S if key_lengths_B is None else int(key_lengths_B[b])
        a = phi(query[b, h]) @ phi(key[b, h * G // H, :valid]).T
        if causal:
            offset = valid - L if query_offset == "end" else query_offset
            a = np.where(np.arange(valid) <= np.arange(L)[:, None] + offset, a, 0)
        if normalize:
            total = a.sum(1, keepdims=True)
            a = a / np.where(total == 0, 1, total)
        weights[b, h, :, :valid] = a
        output[b, h] = a @ value[b, h * G // H, :valid]
    return Linear(torch.from_numpy(output), torch.from_numpy(weights), backend="reference")


def backward(
    grad_output_BHLE: Float[Tensor, "B H L E"],
    query_BHLD: Float[Tensor, "B H L D"],
    key_BGSD: Float[Tensor, "B G S D"],
    value_BGSE: Float[Tensor, "B G S E"],
    key_lengths_B: Int64[Tensor, "B"] | None = None,
    *,
    causal: bool = False,
    query_offset: int | Literal["end"] = 0,
    normalize: bool = True,
) -> dict[str, Tensor]:
    """Gradients of sum(grad_output * output), by sums over keys that all queries share and over
    queries that all keys share (Katharopoulos et al., arXiv:2006.16236, section 3.3.1, with the
    division that it leaves out). In float64; the arguments are `attend`'s.
    """
    (B, _, L, _), S = query_BHLD.shape, key_BGSD.shape[2]
    backward = partial(
        _gradients if normalize else _gradients_of_sums,
        padding_BS=padding_mask(S, key_lengths_B),
        offsets=item_offsets(B, L, S, key_lengths_B, causal, query_offset),
    )
    return gradients_by_heads(backward, grad_output_BHLE, query_BHLD, key_BGSD, value_BGSE)


def _gradients(
    grad_BHLE: Tensor,
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    *,
    padding_BS: Tensor | None,
    offsets: list[int] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of query, key and value, through the gradients of log phi: what phi has been divided by
    cancels in them."""
    query, key = query_BHLD.double(), mask_padding(padding_BS, key_BGSD.double())
    value, v = normalize_size(mask_padding(padding_BS, value_BGSE.double()))
    grad, g = normalize_size(grad_BHLE.double().unflatten(1, (key.shape[1], -1)))
    features = _Features.of(query, key, padding_BS).made()
    output, total = feature_sums(features.query_BGKLD, features.key_BGSD, value, offsets)
    lost = total == 0 if features.logs is None else total < _TINY
    divided = (output, total.masked_fill(lost, torch.inf))
    made = gradients_by_features(
        features.query_BGKLD, features.key_BGSD, value, grad, divided, offsets
    )
    made[0].mul_(features.query_BGKLD)
    made[1].mul_(features.key_BGSD)
    if features.logs is not None:
        _add_lost(made, lost[..., 0], features.logs, value, grad, offsets)
    made[1].div_(key.clamp(min=0).add_(1.0))
    query_gradient = made[0].flatten(1, 2).div_(query.clamp(min=0).add_(1.0))
    return scale_back(query_gradient, g + v), scale_back(made[1], g + v), scale_back(made[2], g)


def _add_lost(
    gradients: tuple[Tensor, Tensor, Tensor],
    lost_BGKL: Tensor,
    logs: tuple[Tensor, Tensor],
    value_BGSE: Tensor,
    grad_BGKLE: Tensor,
    offsets: list[int] | None,
) -> None:
    """Adds what rows whose sum has underflowed give: A is a softmax over all pairs of a key and a
    feature, by the logarithms."""
    query, key = logs
    for (b, g, k), rows in rows_to_redo(lost_BGKL, _ELEMENTS // key[0, 0].numel()):
        own = visible_keys(rows, key.shape[2], None if offsets is None else offsets[b])
        share_RSD = _terms(query[b, g, k, rows], key[b, g], own)
        total_R11 = share_RSD.sum((1, 2), keepdim=True)
        share_RSD /= total_R11.masked_fill_(total_R11 == 0, 1.0)
        share_RS, grad_RE = share_RSD.sum(-1), grad_BGKLE[b, g, k, rows]
        slope_RS = grad_RE @ value_BGSE[b, g].mT
        slope_RS -= (slope_RS * share_RS).sum(-1, keepdim=True)
        slope_RSD = share_RSD.mul_(slope_RS[..., None])
        gradients[0][b, g, k, rows] += slope_RSD.sum(1)
        gradients[1][b, g] += slope_RSD.sum(0)
        gradients[2][b, g] += share_RS.mT @ grad_RE


def _gradients_of_sums(
    grad_BHLE: Tensor,
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSE: Tensor,
    *,
    padding_BS: Tensor | None,
    offsets: list[int] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of query, key and value where rows are not divided by their sum."""
    query, key = query_BHLD.double(), mask_padding(padding_BS, key_BGSD.double())
    value, v = normalize_size(mask_padding(padding_BS, value_BGSE.double()))
    grad, g = normalize_size(grad_BHLE.double().unflatten(1, (key.shape[1], -1)))
    query_phi, q = normalize_size(_phi(query).unflatten(1, (key.shape[1], -1)))
    key_phi, k = normalize_size(mask_padding(padding_BS, _phi(key)))
    made = gradients_by_features(query_phi, key_phi, value, grad, None, offsets)
    query_gradient = made[0].flatten(1, 2).mul_(query.clamp(max=0).exp_())
    key_gradient = mask_padding(padding_BS, made[1]).mul(key.clamp(max=0).exp_())
    return (
        scale_back(query_gradient, g + v + k),
        scale_back(key_gradient, g + v + q),
        scale_back(made[2], g + q + k),
    )
