"""Splits the mask of a call into what variants take: padding, causality, a window, and the rest."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import torch
from torch import Tensor

from qkv.models.model_call import ModelCall

_CROSS_ATTENTION: Final = re.compile(
    r"(^|[._])(cross(_?attn|_?attention)?|encoder_attn|encdecattention)($|[._])", re.IGNORECASE
)
"""Names of layers whose queries and keys are other sequences."""
_HIDDEN: Final = -1e4
"""A number so far below the largest of its row hides a key: exp(-1e4) is 0 in every dtype."""
_HIDDEN_ROW: Final = -5e8
"""A row whose numbers are all so low sees no key."""


class Part(NamedTuple):
    """Items of a batch with the same padding, and what they see.

    Attributes:
        items: indices of the items.
        queries: indices of the queries that are no padding; None: all.
        keys: indices of the keys that are no padding; None: all.
        causal, query_offset, window: of the remaining queries and keys.
        mask: what these do not say, (N or 1, H or 1, L or 1, S) of the remaining queries and keys;
            None: nothing.
    """

    items: tuple[int, ...]
    queries: Tensor | None = None
    keys: Tensor | None = None
    causal: bool = False
    query_offset: int = 0
    window: tuple[int | None, int | None] | None = None
    mask: Tensor | None = None

    def select(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """Returns the items of a tensor (B, H, L or S, D) at these positions."""
        x = x if len(self.items) == len(x) else x[list(self.items)]
        return x if positions is None else x[:, :, positions.to(x.device)]

    def is_whole(self, call: ModelCall) -> bool:
        """True if the part is the whole call, without padding."""
        return len(self.items) == len(call.query) and self.queries is None and self.keys is None

    def put(self, into: Tensor, x: Tensor, *, is_weights: bool = False) -> Tensor:
        """Returns a tensor (B, H, L, E) with the part's own in its places.

        Args:
            into: the whole tensor.
            x: that of the part, without padding.
            is_weights: the last axis is that of the keys.
        """
        if is_weights and self.keys is not None:
            wide = x.new_zeros(*x.shape[:3], into.shape[3])
            x = wide.index_copy(3, self.keys.to(x.device), x)
        if self.queries is not None:
            selected = into if len(self.items) == len(into) else into[list(self.items)]
            x = selected.index_copy(2, self.queries.to(x.device), x)
        if x.shape == into.shape:
            return x
        return into.index_copy(0, torch.tensor(self.items, device=x.device), x)


def whole_of(call: ModelCall) -> Part:
    """Returns the whole batch as one part, with the call's own mask."""
    items = tuple(range(len(call.query)))
    return Part(items, None, None, call.causal, call.query_offset, call.window, call.mask)


def is_self_attention(call: ModelCall) -> bool:
    """True if queries and keys are of one sequence; if that is unknown, by the layer's name."""
    if call.is_self is not None:
        return call.is_self
    return not _CROSS_ATTENTION.search(call.layer)


def parts_of(call: ModelCall) -> list[Part]:
    """Returns the parts of a call, without padding.

    A key that no query sees is left out, and so is a query that sees no key. In self-attention the
    query at the position of such a key is padding too, if causality, a window and the hidden keys
    say all of the mask, or if other keys are hidden in other items.
    """
    if call.mask is None:
        return [whole_of(call)]
    visible = [_visible(call, item) for item in range(len(call.mask))]
    seen = [pairs_HLS.any(0).any(0) for pairs_HLS, _ in visible]
    differ = any(not torch.equal(seen[0], other) for other in seen[1:])
    groups: list[tuple[Part, list[int], list[Tensor]]] = []
    for item, (pairs_HLS, bias_HLS) in enumerate(visible):
        part = _part_of(call, pairs_HLS, bias_HLS, differ)
        members = range(len(call.query)) if len(visible) == 1 else [item]
        for other, items, masks in groups:
            if _are_alike(part, other):
                items += members
                masks += [] if part.mask is None else [part.mask]
                break
        else:
            groups.append((part, [*members], [] if part.mask is None else [part.mask]))
    return [
        part._replace(items=tuple(items), mask=_join(masks))
        for part, items, masks in groups
        if part.queries is None or len(part.queries)
    ]


def _join(masks: list[Tensor]) -> Tensor | None:
    """Returns the masks of a part's items as one; None if there are none."""
    if not masks:
        return None
    same = all(torch.equal(masks[0], other) for other in masks[1:])
    return masks[0] if same else torch.cat(masks)


def _visible(call: ModelCall, item: int) -> tuple[Tensor, Tensor | None]:
    """Returns the pairs (H, L, S) that a row of masks shows, and what is added to their scores."""
    L, S = call.query.shape[2], call.key.shape[2]
    assert call.mask is not None
    mask_HLS = call.mask[item].expand(-1, L, S)
    allowed_LS = pairs_in_sight(call, L, S)
    if mask_HLS.dtype == torch.bool:
        return mask_HLS & allowed_LS, None
    largest_HL1 = mask_HLS.amax(-1, keepdim=True)
    lowest = max(_HIDDEN_ROW, torch.finfo(mask_HLS.dtype).min / 2)
    is_level = (mask_HLS == largest_HL1).all(-1, keepdim=True)
    hides_all_HL1 = (largest_HL1 <= lowest) | (is_level & (largest_HL1 <= _HIDDEN))
    pairs_HLS = (mask_HLS > largest_HL1 + _HIDDEN) & ~hides_all_HL1 & allowed_LS
    has_bias = bool(((mask_HLS != 0) & pairs_HLS).any())
    return pairs_HLS, mask_HLS if has_bias else None


def _part_of(call: ModelCall, pairs_HLS: Tensor, bias_HLS: Tensor | None, differ: bool) -> Part:
    """Returns the part of an item.

    Args:
        call: the call.
        pairs_HLS: true where a query sees a key.
        bias_HLS: what is added to scores.
        differ: other items hide other keys from all queries, as padding does.
    """
    seen_LS = pairs_HLS.any(0)
    keys_S, queries_L = seen_LS.any(0), seen_LS.any(1)
    shown_HLS = pairs_HLS[:, queries_L][:, :, keys_S]
    explained = _explain(shown_HLS)
    is_own_key_seen_L = _own_keys(call, seen_LS, keys_S)
    if is_own_key_seen_L is not None and not bool(is_own_key_seen_L[queries_L].all()):
        kept_L = queries_L & is_own_key_seen_L
        without = pairs_HLS[:, kept_L][:, :, keys_S]
        explained_without = _explain(without)
        # with a cache of keys, only causality tells that this is self-attention
        has_cache = len(is_own_key_seen_L) != len(keys_S)
        is_causal = explained_without is not None and explained_without.causal
        if differ or is_causal or (explained_without is not None and not has_cache):
            queries_L, shown_HLS, explained = kept_L, without, explained_without
    queries = None if queries_L.all() else queries_L.nonzero()[:, 0]
    keys = None if keys_S.all() else keys_S.nonzero()[:, 0]
    if bias_HLS is not None:
        bias_HLS = bias_HLS[:, queries_L][:, :, keys_S].masked_fill(~shown_HLS, -torch.inf)
        return Part((), queries, keys, mask=bias_HLS[None])
    if explained is None:
        return Part((), queries, keys, mask=shown_HLS[None])
    return Part((), queries, keys, *explained)


def _own_keys(call: ModelCall, seen_LS: Tensor, keys_S: Tensor) -> Tensor | None:
    """Returns true for each query whose own key some query sees; None if it has no own key.

    With a cache of keys, the last key that a query sees is its own.
    """
    L, S = seen_LS.shape
    if not is_self_attention(call):
        return None
    if L == S:
        return keys_S
    positions_S = torch.arange(S, device=seen_LS.device)
    last_L = torch.where(seen_LS, positions_S, -1).amax(-1)
    first = int((last_L - positions_S[:L]).max()) if 1 < L < S else -1
    return None if first < 0 or first + L > S else keys_S[first : first + L]


def pairs_in_sight(call: ModelCall, L: int, S: int) -> Tensor:
    """Returns the pairs (L, S) that causality and the window of a call show."""
    distance_LS = _distance(L, S, call.query_offset, call.query.device)
    left, right = call.window or (None, None)
    return _band(distance_LS, left, 0 if call.causal else right)


class _Explained(NamedTuple):
    """`causal`, `query_offset` and `window` of a part that say all of its visible pairs."""

    causal: bool
    query_offset: int
    window: tuple[int | None, int | None] | None


def _explain(visible_HLS: Tensor) -> _Explained | None:
    """Returns what the visible pairs are; None if causality and a window do not say it."""
    _, L, S = visible_HLS.shape
    if bool(visible_HLS.all()):
        return _Explained(False, 0, None)
    distance_LS = _distance(L, S, S - L, visible_HLS.device)
    seen_LS = visible_HLS.any(0)
    left = int(distance_LS[seen_LS].max())
    right = int(-distance_LS[seen_LS].min())
    if right < 0 or not bool((visible_HLS == _band(distance_LS, left, right)).all()):
        return None
    window_left = None if left >= S - 1 else left
    window_right = None if right == 0 or right >= L - 1 else right
    window = None if window_left is None and window_right is None else (window_left, window_right)
    return _Explained(right == 0, S - L, window)


def _distance(L: int, S: int, offset: int, device: torch.device) -> Tensor:
    """Returns how far to the left of each query each key is (L, S)."""
    position_L1 = torch.arange(L, device=device)[:, None] + offset
    return position_L1 - torch.arange(S, device=device)


def _band(distance_LS: Tensor, left: int | None, right: int | None) -> Tensor:
    """Returns the pairs whose key is at most so far to the left and to the right; None: any."""
    pairs = torch.ones_like(distance_LS, dtype=torch.bool)
    if left is not None:
        pairs &= distance_LS <= left
    return pairs if right is None else pairs & (distance_LS >= -right)


def _are_alike(one: Part, other: Part) -> bool:
    """True if two parts can be one batch."""
    return (
        one[3:6] == other[3:6]
        and (one.mask is None) == (other.mask is None)
        and all(
            (a is None) == (b is None) and (a is None or (b is not None and torch.equal(a, b)))
            for a, b in ((one.queries, other.queries), (one.keys, other.keys))
        )
    )
