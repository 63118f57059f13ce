"""The tokens of captured sequences, which a file keeps beside their calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from qkv.client.tokens import Tokens, choose_tokens
from qkv.models.attention_call import AttentionCall
from qkv.models.masks import Part

SavedPart: TypeAlias = tuple[AttentionCall, Part]
"""A part of a call, which becomes one call of a file."""


def cut_tokens(
    parts: Sequence[SavedPart], tokens: Tokens | Mapping[int, Sequence[str]]
) -> dict[int, list[str]]:
    """Returns the tokens of each sequence without its padding, by its number in the model's batch.

    Args:
        parts: of the calls, each a group of sequences with the same padding.
        tokens: as for `Calls.save`, or those of each sequence by its number.

    Raises:
        ValueError: a sequence has no tokens, or as many as no call has keys.
    """
    count = 1 + max((item for call, _ in parts for item in call.items), default=0)
    kept_tokens: dict[int, list[str]] = {}
    lengths: dict[int, list[int]] = {}
    for call, part in parts:
        S = call.key.shape[2]
        for place in part.items:
            item = call.items[place]
            if item in kept_tokens:
                continue
            listed = _of_item(tokens, item, count)
            if len(listed) == S:
                keys = range(S) if part.keys is None else part.keys.tolist()
                kept_tokens[item] = [listed[key] for key in keys]
            lengths.setdefault(item, []).append(S)
    for item in lengths.keys() - kept_tokens.keys():
        expected = " or ".join(map(str, dict.fromkeys(lengths[item])))
        raise ValueError(
            f"tokens of sequence {item} have the wrong length: got "
            f"{len(_of_item(tokens, item, count))}, expected {expected}, with padding"
        )
    return kept_tokens


def _of_item(tokens: Tokens | Mapping[int, Sequence[str]], item: int, count: int) -> Sequence[str]:
    if isinstance(tokens, Mapping):
        return tokens.get(item, ())
    return choose_tokens("tokens", tokens, item, count) or ()
