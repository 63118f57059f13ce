"""Attention rollout: the product of the attention of all layers, for chosen rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Final

import torch
from torch import Tensor

from qkv.client.client import Client
from qkv.errors import InvalidContent
from qkv.models.attention_call import AttentionCall
from qkv.models.masks import Part, parts_of
from qkv.models.model_call import choose_numbers
from qkv.models.selection import check_chain
from qkv.models.variants import VariantSignature, variant_run

_BLOCK_BYTES: Final = 1 << 24  # of the weights of a block of rows
_BATCH_BYTES: Final = 1 << 25  # of the rows of the sequences that are multiplied together
_OVER_HEADS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "mean": lambda weights_BHRS: weights_BHRS.mean(1),
    "max": lambda weights_BHRS: weights_BHRS.amax(1),
    "min": lambda weights_BHRS: weights_BHRS.amin(1),
}


def rollout_of(
    chain: Sequence[AttentionCall],
    *,
    rows: Sequence[int] | None,
    items: Sequence[int] | None,
    residual: float,
    heads: str,
    variant: str,
    client: Client | None,
    parameters: Mapping[str, Any],
) -> Tensor:
    """Returns the rollout (B, R, S) of calls in order; the arguments are those of `Calls.rollout`.

    It multiplies from the last layer to the first, so that the product never has more rows than
    asked for.
    """
    B, _, S, _ = chain[0].query.shape
    if not B or not S:
        raise InvalidContent(
            f"{chain[0].layer} has {B} sequences of {S} tokens: expected at least one of each"
        )
    chosen = choose_numbers("items", items, chain[0].items)
    row_R = choose_numbers("rows", rows, range(S))
    check_chain(chain, chosen)
    if not isinstance(heads, str) or heads not in _OVER_HEADS:
        raise InvalidContent(f"heads is invalid: got {heads!r:.60}, expected mean, max or min")
    if not _is_share(residual):
        raise InvalidContent(f"residual is invalid: got {residual!r:.60}, expected 0 to 1")
    signature = VariantSignature.find(variant, client)
    dtype = torch.float64 if chain[0].query.dtype == torch.float64 else torch.float32
    result_BRS = torch.zeros(len(chosen), len(row_R), S, dtype=dtype)
    at_once = max(1, _BATCH_BYTES // max(1, result_BRS[:1].nbytes))
    for depth, call in enumerate(reversed(chain)):
        for part in parts_of(call):
            item_of = {call.items[item]: item for item in part.items}
            places = [chosen.index(item) for item in item_of if item in chosen]
            for start in range(0, len(places), at_once):
                some = places[start : start + at_once]
                smaller = _with_items(part, [item_of[chosen[n]] for n in some])
                layer = _Layer(call, smaller, signature, client, parameters, heads, residual)
                left_NRS = layer.identity(row_R, S, dtype) if depth == 0 else result_BRS[some]
                result_BRS[some] = layer.multiply(left_NRS)
    return result_BRS


class _Layer:
    """The matrix of some sequences of a layer, whose rows are r I + (1 - r) A, divided by sums.

    Args:
        call, part: sequences of a call with the same padding.
        signature: of the variant.
        client, parameters, heads, residual: those of `Calls.rollout`.
    """

    def __init__(
        self,
        call: AttentionCall,
        part: Part,
        signature: VariantSignature,
        client: Client | None,
        parameters: Mapping[str, Any],
        heads: str,
        residual: float,
    ) -> None:
        self._name, self._client = signature.name, client
        self._arguments = {**signature.arguments(call, part), **parameters}
        self._over_heads, self._residual = _OVER_HEADS[heads], residual
        everything = torch.arange(call.query.shape[2])
        self._query_L = everything if part.queries is None else part.queries
        self._key_S = everything if part.keys is None else part.keys
        self._row_bytes = len(part.items) * call.query.shape[1] * len(self._key_S) * 4
        self._count = len(part.items)

    def identity(self, row_R: Sequence[int], S: int, dtype: torch.dtype) -> Tensor:
        """Returns these rows of the identity (N, R, S); rows of padding are zero."""
        rows_RS = torch.zeros(len(row_R), S, dtype=dtype)
        rows_RS[torch.arange(len(row_R)), list(row_R)] = 1.0
        is_token_S = torch.zeros(S, dtype=dtype)
        is_token_S[self._query_L] = is_token_S[self._key_S] = 1.0
        return (rows_RS * is_token_S).expand(self._count, -1, -1)

    def multiply(self, left_NRS: Tensor) -> Tensor:
        """Returns the product of rows (N, R, S) and the matrix, in blocks of its rows."""
        product_NRS = left_NRS.clone()
        # a query that sees no key keeps what the residual connection brings
        product_NRS[..., self._query_L] = 0.0
        # in the last layer only the chosen rows are needed
        used = left_NRS[..., self._query_L].any(1).any(0).nonzero()[:, 0]
        for index_K in used.split(max(1, _BLOCK_BYTES // self._row_bytes)):
            position_K = self._query_L[index_K]
            weights_NKS = self._over_heads(self._rows(index_K)).to(left_NRS.dtype)
            weights_NKS = weights_NKS * (1.0 - self._residual)
            total_NK = weights_NKS.sum(-1) + self._residual
            if len(self._key_S) < left_NRS.shape[-1]:
                whole = weights_NKS.new_zeros(*weights_NKS.shape[:2], left_NRS.shape[-1])
                weights_NKS = whole.index_copy_(2, self._key_S, weights_NKS)
            share_NRK = left_NRS[..., position_K]
            share_NRK = share_NRK / total_NK.masked_fill(total_NK == 0, torch.inf)[:, None]
            product_NRS.baddbmm_(share_NRK, weights_NKS)
            product_NRS.index_add_(2, position_K, share_NRK * self._residual)
        return product_NRS

    def _rows(self, index_K: Tensor) -> Tensor:
        """Returns rows of the weights of all heads, (N, H, K, S)."""
        form = {"rows": index_K.tolist()}
        run = variant_run(
            self._name, self._arguments, outputs=["weights"], weights=form, client=self._client
        )
        weights_NHKS: Tensor = run.weights
        return weights_NHKS


def _with_items(part: Part, items: Sequence[int]) -> Part:
    """Returns some sequences of a part."""
    mask = part.mask
    if mask is not None and len(mask) > 1:
        mask = mask[[part.items.index(item) for item in items]]
    return part._replace(items=tuple(items), mask=mask)


def _is_share(x: object) -> bool:
    """True for a number from 0 to 1."""
    return isinstance(x, Real) and 0 <= float(x) <= 1
