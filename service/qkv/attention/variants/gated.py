"""Gated and delta rules: each head keeps a matrix that tokens decay, correct and write to.

Formula: S_t = exp(g_t) S_(t-1) + k_t (w_t - exp(g_t) S_(t-1)^T e_t)^T, o_t = s S_t^T q_t; e = 0 and
w = v, or e = beta k and w = beta v.
Paper: Yang et al., Gated Delta Networks, arXiv:2412.06464; for decays per channel Kimi Linear,
arXiv:2510.26692; for the rule linear Katharopoulos et al., arXiv:2006.16236.
Cost: O(S D E + S C (D + E)) time for chunks of C tokens; O(S) memory unless weights are requested.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from qkv.attention.common.gated_inputs import GatedInputs, State, run
from qkv.attention.common.guards import are_wide, holds, is_finite
from qkv.attention.common.score_blocks import score_dtype
from qkv.attention.common.score_parameters import Scale
from qkv.attention.common.score_steps import sums_before, zero_padding
from qkv.attention.common.token_gradients import gradients_from
from qkv.attention.common.token_inputs import Chunk, Form, tail_sizes
from qkv.attention.common.token_state import run_from
from qkv.attention.common.token_weights import row_function
from qkv.attention.step import Step
from qkv.errors import InvalidContent

WEIGHTS: Final = "signed; rows do not sum to 1"
_IS_CAUSAL: Final = "a token reads what the tokens up to it wrote, so the rule is always causal"
REFUSES: Final[Mapping[str, str]] = {
    "causal": _IS_CAUSAL,
    "query_offset": "each query is at the position of its key",
    "softcap": "there are no scores to cap",
    "window": "a state has no single keys to drop; a decay forgets them",
    "dropout": "the single weights that dropout needs are never computed",
    "seed": "the single weights that dropout needs are never computed",
    "normalize": "the rules have no normaliser; normalize_qk scales queries and keys",
}

STACKABLE_BELOW: Final = 1e9
MAY_BE_WIDER: Final = ("log_decay", "beta")
STATE_CHANGES_WEIGHTS: Final = False
UNSTABLE: Final = (
    "beta |k|^2 of a token is above 2, so the state may grow with each such token and few digits "
    "may be right"
)

_ERASED: Final = "exp(g_t) S_(t-1)^T e_t"
STEPS: Final = (
    Step("query", "B J S D", "q_t", "The queries.", rows="S"),
    Step("key", "B G S D", "k_t", "The keys; padding is zeros.", rows="S"),
    Step("value", "B V S E", "v", "The values; padding is zeros.", rows="S"),
    Step(
        "unit_query", "B J S D", None, "Each query, divided by its norm.", rows="S",
        needs=("normalize_qk",),
    ),
    Step(
        "unit_key", "B G S D", None, "Each key, divided by its norm.", rows="S",
        needs=("normalize_qk",),
    ),
    Step(
        "decay", "B T S Z", "exp(g_t)", "The factor of the state before the token: e^log_decay.",
        rows="S", needs=("log_decay",),
    ),
    Step(
        "erased", "B T S E", _ERASED, "What the decayed state returns for beta times the key.",
        rows="S", needs=("beta",),
    ),
    Step(
        "written", "B T S E", "w_t", "What the token writes at its key: the value; with beta, beta "
        "times the value minus what was erased.", rows="S",
    ),
    Step(
        "state", "B T S D E", "S_t", "The state after the token: the decayed state before it plus "
        "the key times what was written.", rows="S",
    ),
    Step(
        "weights", "B H S S", None, "What the query reads of the value of each token up to it.",
        rows="S",
    ),
    Step(
        "output", "B H S E", "s S_t^T q_t", "What the state returns for the query, times scale.",
        rows="S",
    ),
)  # fmt: skip

Rule = Literal["linear", "gated", "delta", "gated_delta"]


class Gated(NamedTuple):
    """The outputs of a rule; None for an output that was not requested."""

    output: Float[Tensor, "B H S E"] | None = None
    weights: Float32[Tensor, "B H S S"] | Float64[Tensor, "B H S S"] | None = None
    state_weights: Float32[Tensor, "B H S D"] | Float64[Tensor, "B H S D"] | None = None
    state: State | None = None
    notes: Mapping[str, Bool[Tensor, "B"]] = MappingProxyType({})
    backend: str = "chunks"


def infer_sizes(
    sizes: Mapping[str, int], parameters: Any, inputs: Collection[str]
) -> Mapping[str, int]:
    """Returns the heads of the output and of the state, and the channels of a decay.

    Raises:
        InvalidContent: the numbers of heads do not fit, or the rule needs or does not use an input.
    """
    J, G, V, D = (sizes[letter] for letter in "JGVD")
    T = max(G, V)
    for name, count in (("query", J), ("key", G), ("value", V)):
        if max(J, T) % count or T % min(G, V):
            raise InvalidContent(
                f"{name} has the wrong number of heads: got {count} beside {J} of query, {G} of "
                f"key and {V} of value, expected a divisor of {max(J, T)}",
                pointer=f"/inputs/{name}",
            )
    rule = parameters.rule
    for name, rules in _USED_BY.items():
        if name in inputs and rule not in rules:
            raise InvalidContent(
                f"{name} is not used: got the rule {rule}, expected {' or '.join(rules)}",
                pointer=f"/inputs/{name}",
            )
        if name not in inputs and rule in rules:
            raise InvalidContent(
                f"gated needs {name} for the rule {rule}: missing from inputs", pointer="/inputs"
            )
    if (found := sizes.get("T", T)) != T:
        name = next(n for n in ("log_decay", "beta", "state.sums") if n in inputs)
        raise InvalidContent(
            f"{name} has the wrong number of heads: got {found}, expected {T}, the larger one of "
            "key and value",
            pointer=f"/inputs/{name}",
        )
    if (Z := sizes.get("Z", 1)) not in (1, D):
        raise InvalidContent(
            f"log_decay has the wrong number of channels: got {Z}, expected D={D}, or no axis for "
            "one decay per head",
            pointer="/inputs/log_decay",
        )
    return {"H": max(J, T), "T": T, "Z": Z, **tail_sizes(sizes, parameters)}


_USED_BY: Final[Mapping[str, tuple[str, str]]] = {
    "log_decay": ("gated", "gated_delta"),
    "beta": ("delta", "gated_delta"),
}


def needed_inputs(parameters: Any) -> Collection[str]:
    """Returns the optional inputs that a rule needs."""
    return [name for name, rules in _USED_BY.items() if parameters.rule in rules]


def state_fields(parameters: Any) -> Collection[str]:
    """Returns the fields of a state in the exact form that a rule has."""
    gates = (f"tail_{name}" for name in needed_inputs(parameters))
    return ("sums", "tail_length", "tail_key", "tail_value", *gates)


def flops(sizes: Mapping[str, int]) -> int:
    """Returns the operations of the products of the delta rules, for chunks of 64 tokens."""
    B, S, D, E, H, T = (sizes[letter] for letter in "BSDEHT")
    return 2 * B * S * (H * (D * E + 64 * (D + E)) + T * (2 * D * E + 64 * (D + E)))


@dataclass(frozen=True, eq=False)
class Call:
    """A request for a rule.

    Attributes:
        query_BJSD, key_BGSD, value_BVSE: of J, G and V heads. The output has H heads, the largest
            of the three; head h reads head h // (H / J) of the queries, and so on. The state has T
            heads, the larger one of G and V.
        log_decay_BTSZ: g, per head (Z = 1) or per channel of the keys (Z = D).
        beta_BTS: a delta rule erases along e = beta k, and writes w = beta v. The others write v.
        key_lengths_B: tokens at and after this position are padding: they leave the state as it
            was, and their output is zero.
        past: the state behind the tokens before these. Sums alone are compact.
        rule, scale, normalize_qk, chunk, state: see their descriptions.
    """

    query_BJSD: Float[Tensor, "B J S D"]
    key_BGSD: Float[Tensor, "B G S D"]
    value_BVSE: Float[Tensor, "B V S E"]
    log_decay_BTSZ: Float[Tensor, "B T S #Z"] | None = None
    beta_BTS: Float[Tensor, "B T S"] | None = None
    key_lengths_B: Int64[Tensor, "B"] | None = None
    past: State | None = None
    _: KW_ONLY
    rule: Annotated[
        Rule,
        Field(
            description="linear: nothing decays or is erased. gated: with log_decay. delta: with "
            "beta. gated_delta: with both."
        ),
    ] = "linear"
    scale: Scale = None
    normalize_qk: Annotated[
        bool,
        Field(description="If true, queries and keys x become x / sqrt(sum x^2 + 1e-6)."),
    ] = False
    chunk: Chunk = 64
    state: Form = "exact"


def attend(call: Call, outputs: frozenset[str]) -> Gated:
    """Computes a rule.

    `outputs` are the names of the outputs to return: "output", "weights", "state_weights",
    "state". Weights are those of these tokens, and state_weights those of the rows of the state
    before them.
    """
    inputs = _inputs(call)
    S, dtype = call.query_BJSD.shape[2], call.query_BJSD.dtype
    exact = score_dtype(dtype)
    output = matrix = state_weights = behind = None
    if call.past is not None or "state" in outputs:
        continued = run_from(inputs, call.past, call.chunk, call.state)
        output, behind = continued.output_BHSE, State(**continued.fields)
    elif "output" in outputs:
        output = _output(inputs, exact, call.chunk).to(dtype)
    if "weights" in outputs:
        matrix = row_function(inputs, inputs.sums_of(None), call.chunk)(slice(0, S)).to(exact)
    if "state_weights" in outputs:
        state_weights = _state_weights(inputs, call.chunk).to(exact)
    notes = {UNSTABLE: inputs.is_unstable_B} if inputs.erases else {}
    return Gated(output, matrix, state_weights, behind, notes)


def weights(call: Call) -> Callable[[slice], Tensor]:
    """Returns a function that computes rows of A from a slice of S: (B, H, R, S), in memory O(R S).

    A does not depend on the state before the tokens, nor on the numbers of the values.
    """
    inputs = _inputs(call)
    exact = score_dtype(call.query_BJSD.dtype)
    rows_of = row_function(inputs, inputs.sums_of(None), call.chunk)

    def row_block(rows: slice) -> Float32[Tensor, "B H R S"] | Float64[Tensor, "B H R S"]:
        return rows_of(rows).to(exact)

    return row_block


def _inputs(call: Call) -> GatedInputs:
    """Returns the tokens of a request."""
    return GatedInputs.of(
        call.query_BJSD, call.key_BGSD, call.value_BVSE, call.log_decay_BTSZ, call.beta_BTS,
        call.key_lengths_B, call.rule, call.scale, call.normalize_qk,
    )  # fmt: skip


def _output(inputs: GatedInputs, dtype: torch.dtype, chunk: int) -> Tensor:
    """Returns the output, computed in float64 if float32 overflows."""
    state_XDE = inputs.empty_state(torch.float64 if are_wide() else dtype)
    output = run(inputs, state_XDE, chunk)
    if output.dtype == torch.float32 and not holds(is_finite(output)):
        output = run(inputs, state_XDE.double(), chunk)
    return output


def _state_weights(inputs: GatedInputs, chunk: int) -> Tensor:
    """Returns how much each row reads of each row of the state before the first token.

    It is the output for that state if its rows are the unit vectors and no token writes.
    """
    query, value = inputs.query_BJSD, inputs.value_BVSE
    silent_BVSD = query.new_zeros(*value.shape[:3], query.shape[3])
    silent = replace(inputs, tensors={**inputs.tensors, "value": silent_BVSD})
    state_XDD = silent.empty_state(torch.float64)
    state_XDD.diagonal(dim1=1, dim2=2).fill_(1.0)
    return run(silent, state_XDD, chunk)


# tokens whose small tensors `steps` joins at once: those of all tokens would lie between the large
# states that are freed, and their holes would take 3.4 GB for 4,096 tokens
_JOINED: Final = 64


def steps(call: Call) -> dict[str, Tensor]:
    """Returns the steps by name, from float64 tensors, token by token; and `state_weights`.

    Beside each value the state holds a unit vector of the token, and one of its own first rows:
    what a query reads of them are the weights. Its first rows are those before the first token
    that is not of the tail.
    """
    query = call.query_BJSD
    key, value = (zero_padding(x, call.key_lengths_B) for x in (call.key_BGSD, call.value_BVSE))
    found = {"query": query, "key": key, "value": value}
    if call.normalize_qk:
        query, key = map(_unit, (query, key))
        found |= {"unit_query": query, "unit_key": key}
    (B, G, S, D), (_, V, _, E) = key.shape, value.shape
    T, H = max(G, V), max(G, V, query.shape[1])
    key, value = (x.repeat_interleave(T // x.shape[1], 1) for x in (key, value))
    query = query.repeat_interleave(H // query.shape[1], 1)
    exact: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    value = torch.cat([value, torch.eye(S, S + D, **exact).expand(B, T, -1, -1)], -1)
    decay, beta = key.new_ones(B, T, S, 1), key.new_zeros(B, T, S)
    if call.log_decay_BTSZ is not None and call.rule in _USED_BY["log_decay"]:
        found["decay"] = decay = zero_padding(call.log_decay_BTSZ, call.key_lengths_B).exp()
    if call.rule in _USED_BY["beta"]:
        beta = torch.ones_like(beta) if call.beta_BTS is None else call.beta_BTS
        beta = zero_padding(beta[..., None], call.key_lengths_B)[..., 0]
        value = beta[..., None] * value
    state = pad(sums_before(call.past, key, (D, E)), (0, S + D))
    tokens: list[tuple[Tensor, ...]] = []
    blocks: list[list[Tensor]] = []
    rows, first_B = torch.eye(D, **exact).expand(B, T, -1, -1), torch.zeros(B, **exact)
    if call.past is not None and call.past.tail_length is not None:
        first_B = call.past.tail_length
    for t in range(S):
        begun = torch.cat([state[..., :-D], rows], -1)
        state = torch.where((first_B == t)[:, None, None, None], begun, state)
        state = decay[:, :, t, :, None] * state
        erased = torch.einsum("btd,btde->bte", beta[:, :, t, None] * key[:, :, t], state)
        written = value[:, :, t] - erased
        state = state + key[:, :, t, :, None] * written[:, :, None]
        read = torch.einsum("bhd,bhde->bhe", query[:, :, t], state.repeat_interleave(H // T, 1))
        # copies: a view would keep the columns of all tokens
        tokens.append((*(x[..., :E].clone() for x in (erased, written, state)), read))
        if len(tokens) == _JOINED or t == S - 1:
            blocks.append([torch.stack(x, 2) for x in zip(*tokens, strict=True)])
            tokens = []
    erased, written, states, read = (torch.cat(x, 2) for x in zip(*blocks, strict=True))
    read = zero_padding(read * (D**-0.5 if call.scale is None else call.scale), call.key_lengths_B)
    output, weights, state_weights = read.split([E, S, D], -1)
    return found | {
        "erased": erased, "written": written, "state": states, "weights": weights,
        "state_weights": state_weights, "output": output,
    }  # fmt: skip


def _unit(x: Tensor) -> Tensor:
    """Returns x / sqrt(sum x^2 + 1e-6), from x over its largest number: no square overflows."""
    size = x.detach().abs().amax(-1, keepdim=True).clamp(min=1.0)
    return x / size / ((x / size).square().sum(-1, keepdim=True) + 1e-6 / size**2).sqrt()


def backward(
    call: Call, grad_output_BHSE: Float[Tensor, "B H S E"], grad_state: State | None = None
) -> dict[str, Tensor]:
    """Returns the gradients of sum(grad_output * output), in float64.

    With `grad_state`, sum(grad_state.sums * sums of the compact state behind the tokens) is added.
    """
    inputs = _inputs(call)
    found = gradients_from(inputs, call.past, grad_output_BHSE, grad_state, call.chunk)
    given = {"log_decay": call.log_decay_BTSZ, "beta": call.beta_BTS}
    unused = {
        n: torch.zeros_like(x, dtype=torch.float64)
        for n, x in given.items()
        if x is not None and n not in found
    }
    return found | unused
