"""Gated and delta rules as a plain loop over tokens in float64, changed by the flags of a call.

`evaluate` is the truth of the variant `gated`. `recurrence_budget` derives bounds from its tokens,
and `recurrent_bugs` changes the loop by flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from qkv.testing.call import STATE, Call

CHUNKS: Final = (16, 32, 64, 128)
"""The tokens of a chunk that a wrong function may have; that of the parameter `chunk` is one."""

NORMALIZERS: Final[Mapping[str, tuple[float, float, float]]] = {
    "norm-without-epsilon": (0.0, 0.0, 0.0),
    **{f"norm-epsilon-1e-{n}": (10.0**-n, 0.0, 0.0) for n in (12, 8, 7, 5, 4, 3)},
    **{f"norm-least-1e-{n}": (0.0, 10.0**-n, 0.0) for n in (12, 8, 6, 5)},
    **{f"norm-epsilon-1e-{n}-after-root": (0.0, 0.0, 10.0**-n) for n in (12, 8, 6, 5, 4, 3)},
}
"""Flags: what is added to the sum of squares of a key or a query, the least root, and what is added
to the root. That of `torch.nn.functional.normalize` is at least 1e-12."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of a call in float64; T heads have a state, and H read them.

    Attributes:
        query: (B, H, S, D), times the scale.
        key, erase: k and e, (B, T, S, D).
        write: w, (B, T, S, E).
        decay: the factor of each row of the state, (B, T, S, D) or (B, T, S, 1).
        state: the state before the first token, (B, T, D, E).
        is_token: False for padding, (B, S).
        flags: of the call.
    """

    query: Tensor
    key: Tensor
    erase: Tensor
    write: Tensor
    decay: Tensor
    state: Tensor
    is_token: Tensor
    flags: frozenset[str]

    @classmethod
    def of(cls, call: Call) -> Tokens:
        """Returns the tokens of a call."""
        inputs, flags = call.exact_inputs, call.flags
        query, key, value = (inputs[n] for n in ("query", "key", "value"))
        (B, J, S, D), E = query.shape, value.shape[3]
        T = max(key.shape[1], value.shape[1])
        rule, scale = call.parsed.get("rule", "linear"), call.parsed.get("scale")
        if call.parsed.get("normalize_qk") and "not-normalized" not in flags:
            query = query if "query-not-normalized" in flags else _normalized(query, flags)
            key = key if "key-not-normalized" in flags else _normalized(key, flags)
        query = query.repeat_interleave(max(J, T) // J, 1) * (D**-0.5 if scale is None else scale)
        key, value = (x.repeat_interleave(T // x.shape[1], 1) for x in (key, value))
        decay, beta = torch.ones(B, T, S, 1).double(), torch.ones(B, T, S, 1).double()
        if "gated" in rule:
            log_decay = inputs["log_decay"].view(B, T, S, -1)
            decay = log_decay if "decay-as-given" in flags else log_decay.exp()
        if "delta" in rule and "beta-one" not in flags:
            beta = inputs["beta"][..., None]
        lengths = inputs.get("key_lengths", torch.full((B,), S))
        return cls(
            query,
            key,
            (key if "beta-not-on-erase" in flags else beta * key) * ("delta" in rule),
            value if "beta-not-on-write" in flags else beta * value,
            decay,
            inputs.get(STATE, torch.zeros(B, T, D, E).double()),
            torch.arange(S) < lengths[:, None],
            flags,
        )


class Scan(NamedTuple):
    """What the tokens do to a state, and read of it.

    Attributes:
        held: what the decayed state returns for e, (B, T, S, W).
        written: what the tokens write at k, (B, T, S, W).
        read: what the queries read, (B, H, S, W).
        state: behind the tokens, (B, T, D, W).
    """

    held: Tensor
    written: Tensor
    read: Tensor
    state: Tensor


def evaluate(call: Call) -> dict[str, Tensor]:
    """Returns `output`, and the state behind the tokens as `state.sums`."""
    tokens = Tokens.of(call)
    found = scan(tokens, tokens.write, tokens.state)
    return {"output": found.read, STATE: arrange_state(found.state, call.flags)}


def arrange_state(state: Tensor, flags: frozenset[str]) -> Tensor:
    """Returns a state as a call with these flags returns it."""
    return state.mT if "state-out-transposed" in flags else state


def scan(tokens: Tokens, write: Tensor, state: Tensor, erases: bool = True) -> Scan:
    """Runs the recurrence token by token.

    Args:
        tokens: with the keys, queries and decays.
        write: w of each token, (B, T, S, W): any columns, which do not act on each other.
        state: before the first token, (B, T, D, W).
        erases: False to write w as it is.
    """
    flags, (B, T, S, W) = tokens.flags, write.shape
    is_token, ends = tokens.is_token, _returned_tokens(tokens)
    if size := size_of(flags, "tail-dropped"):
        is_token = is_token & (torch.arange(S) < S // size * size)
    truncated, kept = size_of(flags, "truncated"), size_of(flags, "last-chunk-kept")
    decays_last = "decay-last" in flags

    def by_token(x: Tensor) -> tuple[Tensor, ...]:
        return x.flatten(0, 1).unbind(-3)  # a product of N = B T matrices is quicker than of B by T

    # (N, r, D) of the r heads that read a state, (N, D, 1), (N, 1, D), (N, 1, W), (N, D or 1, 1)
    of_tokens = zip(
        by_token(tokens.query.view(B, T, -1, S, tokens.query.shape[3]).transpose(2, 3)),
        by_token(tokens.key[..., None]),
        by_token(tokens.erase[..., None, :]),
        by_token(write[..., None, :]),
        by_token(tokens.decay[..., None]),
        is_token.repeat_interleave(T, 0).view(B * T, S, 1, 1).unbind(1),
        is_token.all(0).tolist(),
        strict=True,
    )
    ends = ends.repeat_interleave(T).view(-1, 1, 1)
    returning = {*ends.flatten().tolist()}
    state = returned = state.flatten(0, 1)
    recent, found = torch.zeros_like(state), []
    for t, (query, key, erase, write, decay, is_one, are_all) in enumerate(of_tokens):
        if truncated and t and t % truncated == 0:
            state = torch.zeros_like(state)
        if kept and t and t % kept == 0:
            state, recent = recent, torch.zeros_like(state)
        decayed = state if decays_last else decay * state
        held = erase @ decayed
        written = write - held if erases else write
        after = decayed + key * written
        if kept:
            recent = decay * recent + key * written  # what this chunk wrote
        read = query @ _seen(state, decayed, after, decay, flags)
        after = decay * after if decays_last else after
        state = after if are_all else torch.where(is_one, after, state)
        if t + 1 in returning:
            returned = torch.where(ends == t + 1, recent if kept else state, returned)
        found.append((held, written, read))
    held, written, read = (torch.stack(x, 2).view(B, -1, S, W) for x in zip(*found, strict=True))
    read = read * is_token[:, None, :, None]
    return Scan(held, written, read, returned.view(B, T, -1, W))


def size_of(flags: frozenset[str], name: str) -> int:
    """Returns the number behind a flag such as `truncated-64`; 0 without one."""
    found = (flag.rpartition("-") for flag in flags)
    return next((int(size) for flag, _, size in found if flag == name), 0)


def _seen(
    before: Tensor, decayed: Tensor, after: Tensor, decay: Tensor, flags: frozenset[str]
) -> Tensor:
    """Returns the state that the query of a token reads: the one after its write."""
    if "read-before-decay" in flags:
        return before
    if "read-before-write" in flags:
        return decayed
    return decay * after if "decay-last" in flags and "read-undecayed" not in flags else after


def _returned_tokens(tokens: Tokens) -> Tensor:
    """Returns how many tokens of each sequence the returned state has seen, (B)."""
    flags, length = tokens.flags, tokens.is_token.sum(1)
    if "state-before-all" in flags:
        return torch.zeros_like(length)
    if "state-before-last" in flags:
        return (length - 1).clamp(min=0)
    if size := size_of(flags, "state-before-chunk"):
        return (length - 1).clamp(min=0) // size * size
    if size := size_of(flags, "state-of-whole-chunks"):
        return length // size * size
    return length


def _normalized(x: Tensor, flags: frozenset[str]) -> Tensor:
    """Returns x / sqrt(sum x^2 + 1e-6), or with another divisor."""
    right = (1e-6, 0.0, 0.0)
    added, least, after = next((NORMALIZERS[f] for f in flags if f in NORMALIZERS), right)
    divisor = (x.square().sum(-1, keepdim=True) + added).sqrt().clamp(min=least) + after
    return x / torch.where(divisor == 0, 1.0, divisor)
