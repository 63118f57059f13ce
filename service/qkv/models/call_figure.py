"""The figure of one sequence of a captured call, without its padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from qkv.client.client import Client
from qkv.client.figures.run_figure import draw_run
from qkv.client.figures.tokens import Tokens, choose_tokens
from qkv.errors import InvalidContent
from qkv.models.masks import is_self_attention, parts_of
from qkv.models.model_call import ModelCall, select_heads
from qkv.models.selection import to_numbers
from qkv.models.variant_signature import VariantSignature, variant_run

__all__ = ["draw_call"]

_HEADS: Final = 16  # drawn by default
_LONG: Final = 1024  # queries or keys, beyond which weights are pooled
_POOLED: Final = {"pool": 128}


def draw_call(
    call: ModelCall,
    numbers: tuple[int, ...],
    *,
    tokens: Tokens | None,
    key_tokens: Tokens | None,
    batch: int,
    heads: Sequence[int] | None,
    variant: str,
    weights: str | Mapping[str, Any] | None,
    shared_scale: bool,
    title: str | None,
    ax: Axes | None,
    client: Client | None,
    parameters: Mapping[str, Any],
) -> Figure:
    """Returns the figure; the other arguments are those of `AttentionCall.figure`.

    Args:
        call: the call.
        numbers: those of its heads in the model.
    """
    chosen = numbers[:_HEADS] if heads is None else tuple(to_numbers("heads", heads))
    single = _select(call, numbers, batch, chosen)
    parts = parts_of(single)
    if not parts:
        raise InvalidContent(f"sequence {batch} of {call.layer} is all padding")
    (part,) = parts
    L, S = single.query.shape[2], single.key.shape[2]
    if key_tokens is None and L == S and is_self_attention(call):
        key_tokens = tokens
    if weights is None:
        weights = _POOLED if tokens is None and max(L, S) > _LONG else "full"
    run = variant_run(
        variant,
        {**VariantSignature.find(variant, client).arguments(single, part), **parameters},
        outputs=["weights"],
        weights=weights,
        client=client,
    )
    if title is None:
        title = f"{call.layer}, {variant}"
        if chosen != tuple(range(len(chosen))):
            title += f", heads {', '.join(map(str, chosen))}"
    B = len(call.query)
    return draw_run(
        run.outputs,
        run.form,
        subject=run.variant,
        tokens=_tokens_at("tokens", choose_tokens("tokens", tokens, batch, B), part.queries, L),
        key_tokens=_tokens_at(
            "key_tokens", choose_tokens("key_tokens", key_tokens, batch, B), part.keys, S
        ),
        heads=range(len(chosen)),
        head_names=chosen,
        shared_scale=shared_scale,
        title=title,
        ax=ax,
    )


def _select(
    call: ModelCall, numbers: tuple[int, ...], batch: int, heads: tuple[int, ...]
) -> ModelCall:
    """Returns these heads of one sequence of a call.

    Raises:
        InvalidContent: the call has no such sequence or head.
    """
    B = len(call.query)
    if not B:
        raise InvalidContent(f"{call.layer} has no sequences: expected at least one to draw")
    if not 0 <= batch < B:
        raise InvalidContent(f"batch is invalid: got {batch}, expected 0 to {B - 1}")
    if not heads or set(heads) - set(numbers):
        raise InvalidContent(
            f"heads is invalid: got {list(heads)}, expected some of {list(numbers)!r:.200}"
        )
    index = [numbers.index(head) for head in heads]
    return select_heads(call, index, slice(batch, batch + 1))


def _tokens_at(
    name: str, tokens: Sequence[str] | None, positions: Tensor | None, length: int
) -> list[str] | None:
    """Returns the tokens at the positions that are no padding.

    Raises:
        InvalidContent: their number is not the length of the sequence.
    """
    if tokens is None:
        return None
    if len(tokens) != length:
        raise InvalidContent(
            f"{name} has the wrong length: got {len(tokens)}, expected {length}, with padding"
        )
    return list(tokens) if positions is None else [tokens[n] for n in positions.tolist()]
