"""The candidates of a detection: what positions and scores may be for each split into heads.

`list_variations` lists rotary embeddings, scales, masks, ALiBi and numbers of QK-norm.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from qkv.attention.layers import layout_catalogue
from qkv.attention.layers.detection_splits import Split
from qkv.attention.layers.layer import Layer
from qkv.attention.layers.qk_norm import QKNorm
from qkv.attention.layers.rope import Rope

_BASES: Final = (10000.0, 500000.0, 1000000.0)
_PARTS: Final = (1, 2, 4)  # the divisors of the width of a head that give the rotated channels
_NORMS: Final = tuple(QKNorm(eps=eps, offset=n) for n in (0, 1) for eps in (1e-6, 1e-5))
_MAX_ROTATED: Final = 65536  # the bound of Rope.dims


@dataclass(frozen=True)
class Variation:
    """The numbers of an attention that its tensors do not show.

    Attributes:
        rope: the rotary embedding, with its order; None: there is none.
        norm: the numbers of QK-norm; None: there is none.
        scale: the factor of the scores.
        causal: True if no query attends to later keys.
        alibi: True if ALiBi's biases are added to the scores, "scaled" if before these are scaled.
    """

    rope: Rope | None
    norm: QKNorm | None
    scale: float
    causal: bool
    alibi: bool | Literal["scaled"]


@dataclass(frozen=True)
class Candidate:
    """A way to run a layer, and its error.

    Attributes:
        split: layout and heads.
        variation: all else.
        error: largest absolute difference to the expected output, divided by its largest size.
    """

    split: Split
    variation: Variation
    error: float

    def as_json(self) -> dict[str, Any]:
        """Returns the candidate as the service's response has it."""
        v = self.variation
        return {
            "layout": self.split.layout,
            "heads": self.split.heads,
            "kv_heads": self.split.kv_heads,
            "rotary": v.rope and v.rope.order,
            "scale": v.scale,
            "causal": v.causal,
            "rope": v.rope and v.rope.model_dump(exclude_none=True),
            "alibi": v.alibi,
            "qk_norm": v.norm and v.norm.model_dump(),
            "error": self.error,
        }


def complexity(candidate: Candidate, width: int) -> tuple[Any, ...]:
    """Returns a sort key of candidates with equal errors: the simplest is first.

    It has no or the plainest rotary embedding, is not causal, has no ALiBi, the usual scale and the
    fewest heads. Of several layouts, it is one whose models have such positions and heads.

    Args:
        candidate: to sort.
        width: of its query heads.
    """
    split, v = candidate.split, candidate.variation
    rope = (
        (0,)
        if v.rope is None
        else (1, v.rope.dims is not None, v.rope.order == "interleaved", v.rope.base)
    )
    norm = -1 if v.norm is None else _NORMS.index(v.norm) if v.norm in _NORMS else len(_NORMS)
    unusual = v.scale != width**-0.5
    layout = layout_catalogue.known()[split.layout]
    has_layout_order = layout.rotary_order == (v.rope and v.rope.order)
    general = layout.is_grouped and split.heads == split.kv_heads
    in_layout = not has_layout_order, general, split.layout
    return rope, v.causal, bool(v.alibi), unusual, split.heads, in_layout, norm, split, v.scale


def list_variations(
    layer: Layer, rope: Rope | None, scale: float | None
) -> list[tuple[Rope | None, QKNorm | None, Sequence[Variation]]]:
    """Returns what may be unknown of a layer, grouped by the numbers that queries and keys need.

    Args:
        layer: with its numbers of heads.
        rope: numbers of the rotary embedding that are known.
        scale: one more factor of the scores.
    """
    width = layer.head_width
    scales = dict.fromkeys([*([] if scale is None else [scale]), width**-0.5, 1.0, 1 / width])
    biases = (False, layer.layout.alibi) if layer.layout.alibi else (False,)
    has_norm = not {"query_norm.weight", "key_norm.weight"}.isdisjoint(layer.weights)
    norms: Sequence[QKNorm | None] = _NORMS if has_norm else (None,)
    groups: list[tuple[Rope | None, QKNorm | None, Sequence[Variation]]] = []
    for embedding in (None, *_ropes(rope, width)):
        for norm in norms:
            group = [
                Variation(embedding, norm, factor, causal, alibi)
                for factor in scales
                for causal in (False, True)
                # without later keys, the forms of ALiBi differ by a number for each row only
                for alibi in (biases if causal and embedding is None else (False,))
            ]
            groups.append((embedding, norm, group))
    return groups


def _ropes(given: Rope | None, width: int) -> Iterator[Rope]:
    """Yields rotary embeddings for a width of heads."""
    orders: Sequence[Literal["half", "interleaved"]] = ("half", "interleaved")
    if given is not None and given.order is not None:
        orders = (given.order,)
    if given is not None and given.frequencies is not None:
        yield from (given.model_copy(update={"order": order}) for order in orders)
        return
    bases = _BASES if given is None else (given.base,)
    if given is not None and given.dims is not None:
        dims: Iterable[int | None] = [given.dims] if given.dims <= width else []
    elif width % 2:
        dims = []
    else:
        parts = [width // n for n in _PARTS if width % (2 * n) == 0]
        dims = [
            None if part == width else part
            for part in parts
            if part == width or part <= _MAX_ROTATED
        ]
    for order, base, part in itertools.product(orders, bases, dims):
        known = {"base": base, "order": order, "dims": part}
        yield (given or Rope()).model_copy(update=known)
