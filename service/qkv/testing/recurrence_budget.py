"""Error budgets of gated and delta rules, for each number of the output and of the state.

The written vectors u = T w and the output o = A w are linear in w, and so is the state S = B w. A
scan over unit vectors beside w gives T, A and B exactly. Whatever a right function rounds is then
an error of what a token writes, or of what a query reads. docs/accuracy.md derives it, section
"Recurrences".

- z = |T| |w| + |T_0| |S_0| is the size of the terms of u, and N that of the terms of S: the sum of
  decayed |k| z, with |S_0|. They hold whether a function computes u token by token, by triangular
  systems or by their inverses.
- What a token writes is off by d = c_w z + c_e |e| N, which moves the output by |A| d.
- What a query reads is off by c_q |q| N.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from qkv.testing.budget import gamma, smallest, unit_roundoffs
from qkv.testing.call import STATE, Call
from qkv.testing.recurrence import Tokens, arrange_state, scan

_EXP = 4  # roundings of an exp
_DECAYED = 104.0  # e^-104 is 0 in float32


class _Roundings(NamedTuple):
    """The relative errors that a right function may have.

    Attributes:
        write: c_w, of the terms of w.
        erase: c_e, of the terms of e and S.
        read: c_q, of the terms of q and S.
        output: of the result.
        least: the error of a product by underflow.
    """

    write: float
    erase: float
    read: float
    output: float
    least: float

    @classmethod
    def of(cls, call: Call, tokens: Tokens) -> _Roundings:
        """Counts the roundings of a call.

        A sum has D channels and up to S tokens. A state is rounded twice for each token that
        decays and writes to it. Each decay is an exp, and its exponent is the difference of two
        sums of up to `chunk` numbers, which are at most G.
        """
        u, t = unit_roundoffs(call.dtype)
        narrow = t if t > u else 0.0
        S, D = tokens.key.shape[2:]
        count = 2 * D + 3 * S + 32
        if "log_decay" in call.inputs:
            chunk = min(S, call.chunk)
            G = _largest_sum(call.exact_inputs["log_decay"], chunk)
            count += int(_EXP * S + (2 * chunk + 4) * G)
        wide = float(gamma(count, u))
        if call.dtype == torch.float64:
            wide *= 2  # the reference rounds as often
        erases, unit = "beta" in call.inputs, int(bool(call.parsed.get("normalize_qk")))
        # beta v, T and u; of e and k the norm, the decay and beta, T, u, W = T e and S; of q and k
        # the norm, scale and decay, the weight and S
        return cls(
            wide + (3 if erases else 1) * narrow,
            wide + (7 + 2 * unit) * narrow,
            wide + (5 + 2 * unit) * narrow,
            t,
            _least(call.dtype),
        )


def budgets(call: Call) -> dict[str, Tensor]:
    """Returns the budget of each number of `output` and `state.sums`."""
    tokens = Tokens.of(call)
    roundings = _Roundings.of(call, tokens)
    B, T, S, D = tokens.key.shape
    H = tokens.query.shape[1]

    def unit(n: int, before: int, after: int) -> Tensor:
        eye = torch.eye(n, dtype=torch.float64)
        return pad(eye, (before, after)).expand(B, T, -1, -1)

    # T, A and B: a column for each token, and one for each row of the state before them
    exact = scan(tokens, unit(S, 0, D), unit(D, S, 0))
    terms = tokens.write.abs()
    size = exact.written[..., :S].abs() @ terms
    if tokens.erase.any():
        size = size + exact.written[..., S:].abs() @ tokens.state.abs()
    absolute = replace(
        tokens, query=tokens.query.abs(), key=tokens.key.abs(), erase=tokens.erase.abs(),
        decay=tokens.decay.abs(),
    )  # fmt: skip
    masses = scan(absolute, size, tokens.state.abs(), erases=False)
    written = roundings.write * size + roundings.erase * masses.held
    # underflow of the D products of e and S, and of what the token writes at k
    e, k, q = (x.abs().sum(-1, keepdim=True) for x in (tokens.erase, tokens.key, tokens.query))
    largest = 1 + masses.state.abs().amax() + size.amax()
    written = written + roundings.least * largest * (1 + S * e)
    lost = roundings.least * largest * (S + D)
    output = (
        exact.read[..., :S].abs() @ written.repeat_interleave(H // T, 1)
        + roundings.read * masses.read
        + lost * (1 + q)
    )
    state = (
        exact.state[..., :S].abs() @ written
        + roundings.read * masses.state
        + lost * (1 + k.sum(2, keepdim=True))
    )
    found = scan(tokens, tokens.write, tokens.state)
    return {
        "output": output + roundings.output * found.read.abs(),
        STATE: arrange_state(state + roundings.output * found.state.abs(), call.flags),
    }


def _least(dtype: torch.dtype) -> float:
    """Returns the error of a product by underflow."""
    if dtype == torch.float64:
        return torch.finfo(dtype).smallest_normal
    return smallest(dtype) + torch.finfo(torch.float32).smallest_normal


def _largest_sum(log_decay: Tensor, chunk: int) -> float:
    """Returns the largest sum of decays of a chunk, which starts at any token.

    Beyond 104, nothing is left of what was there before.
    """
    decays = log_decay.abs().clamp(max=_DECAYED).view(*log_decay.shape[:3], -1)
    sums = pad(decays.cumsum(2).mT, (1, 0))
    size = (sums[..., chunk:] - sums[..., :-chunk]).amax()
    return min(float(size), _DECAYED)
