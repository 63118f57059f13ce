"""Right functions of the rules of `gated`, in many forms, and draws of how they are verified."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from random import Random
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from qkv.attention.catalogue import find
from qkv.testing import FAMILIES, Report, verify
from qkv.testing.call import STATE
from qkv.testing.families import families_of
from support.chunked_rule import chunked_rule

RULES: Final = ("linear", "gated", "delta", "gated_delta")
Function = Callable[..., Any]


def _with_gates(rule: str, function: Function, lacks: str = "") -> Function:
    """Returns a function of log_decay and beta as one of the gates that a rule has.

    Args:
        rule: of the function.
        function: takes both gates; beta is None without a beta.
        lacks: a keyword that it does not take.
    """

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *gates: Tensor,
        key_lengths: Tensor | None = None,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        normalize_qk: bool = False,
    ) -> Any:
        left = list(gates)
        log_decay = left.pop(0) if "gated" in rule else value.new_zeros(value.shape[:3])
        beta = left.pop(0) if "delta" in rule else None
        options = {"key_lengths": key_lengths, "scale": scale, "initial_state": initial_state}
        return function(query, key, value, log_decay, beta, normalize_qk=normalize_qk, **options)

    signature = inspect.signature(attend)
    kept = [p for p in signature.parameters.values() if p.name != lacks]
    attend.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return attend


def _exact(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _by_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    *,
    key_lengths: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    normalize_qk: bool,
) -> tuple[Tensor, Tensor]:
    """Computes a rule token by token, in float32 or float64."""
    dtype, (B, T, S, E), D = value.dtype, value.shape, key.shape[3]
    query, key, value, log_decay = map(_exact, (query, key, value, log_decay))
    if normalize_qk:
        query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query, key = (x.repeat_interleave(T // x.shape[1], 1) for x in (query, key))
    decay = log_decay.view(B, T, S, -1).exp()
    state = value.new_zeros(B, T, D, E) if initial_state is None else initial_state.to(value.dtype)
    output = torch.zeros_like(value)
    for t in range(S):
        now = torch.ones(B) > 0 if key_lengths is None else t < key_lengths
        after = decay[:, :, t, :, None] * state
        k, written = key[:, :, t], value[:, :, t]
        if beta is not None:
            written = _exact(beta)[:, :, t, None] * (written - (k[:, :, None] @ after)[:, :, 0])
        state = torch.where(now.view(B, 1, 1, 1), after + k[..., None] * written[:, :, None], state)
        output[:, :, t] = (query[:, :, t, None] @ state)[:, :, 0] * now.view(B, 1, 1)
    return (output * (D**-0.5 if scale is None else scale)).to(dtype), state


def _by_matrix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    *,
    key_lengths: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    normalize_qk: bool,
) -> Tensor:
    """Computes a rule by its attention matrix, in float32 or float64, without a state."""
    assert initial_state is None
    dtype, (B, T, S, _), D = value.dtype, value.shape, key.shape[3]
    query, key, value, log_decay = map(_exact, (query, key, value, log_decay))
    if normalize_qk:
        query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query, key = (x.repeat_interleave(T // x.shape[1], 1) for x in (query, key))
    # sums in float64: those of a long sequence would lose the digits of the decays in them
    sums = log_decay.view(B, T, S, -1).double().cumsum(2)
    apart = sums[:, :, :, None] - sums[:, :, None]
    upper = torch.ones(S, S, dtype=torch.bool).triu(1)
    between = apart.masked_fill(upper[..., None], -torch.inf).exp().to(value.dtype)
    between = between.expand(-1, -1, -1, -1, D)
    matrix = torch.einsum("bhid,bhjd,bhijd->bhij", query, key, between)
    if beta is not None:
        beta = _exact(beta)[..., None]
        pairs = torch.einsum("bhid,bhjd,bhijd->bhij", beta * key, key, between).tril(-1)
        eye = torch.eye(S, dtype=value.dtype)
        value = torch.linalg.solve_triangular(eye + pairs, beta * value, upper=False)
    output = matrix @ value * (D**-0.5 if scale is None else scale)
    if key_lengths is not None:
        output = output * (torch.arange(S) < key_lengths[:, None])[:, None, :, None]
    return output.to(dtype)


def _by_chunks(chunk: int, rounds: bool) -> Function:
    """Returns a delta rule by chunks."""
    kernel = chunked_rule(chunk=chunk, rounds=rounds)

    def function(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        assert options.pop("key_lengths") is None
        normalize = options.pop("normalize_qk")
        swapped = [x.transpose(1, 2) for x in (q, k, v, g, beta)]
        options |= {"use_qk_l2norm_in_kernel": normalize, "output_final_state": True}
        output, state = kernel(*swapped, **options)
        return output.transpose(1, 2), state

    return function


def _of_the_service(rule: str) -> Function:
    """Returns the service's own `attend`, with a state in the compact form."""
    variant = find("gated")

    def attend(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, **more: Any
    ) -> tuple[Tensor, Tensor]:
        whole = log_decay if log_decay.ndim == 4 else log_decay[..., None]
        gates = {"log_decay_BTSZ": whole} if "gated" in rule else {}
        tensors = {"query_BJSD": q, "key_BGSD": k, "value_BVSE": v, **gates, "beta_BTS": beta}
        tensors |= {"key_lengths_B": more["key_lengths"], STATE: more["initial_state"]}
        given = variant.with_state({n: x for n, x in tensors.items() if x is not None})
        options = {"rule": rule, "scale": more["scale"], "normalize_qk": more["normalize_qk"]}
        found = variant.attend(
            **given, **options, state="compact", outputs=frozenset({"output", "state"})
        )
        return found.output, found.state.sums.to(torch.promote_types(q.dtype, torch.float32))

    return attend


def right_recurrences(rule: str) -> dict[str, Function]:
    """Returns right functions of a rule by name."""
    found: dict[str, Function] = {
        "tokens": _with_gates(rule, _by_tokens),
        "matrix": _with_gates(rule, _by_matrix, "initial_state"),
        "service": _with_gates(rule, _of_the_service(rule)),
    }
    if "delta" in rule:
        for chunk, rounds in itertools.product((16, 64), (False, True)):
            name = f"chunks of {chunk}{' rounded' if rounds else ''}"
            found[name] = _with_gates(rule, _by_chunks(chunk, rounds), "key_lengths")
    if rule == "gated_delta":
        found |= {
            "qwen chunks": qwen.torch_chunk_gated_delta_rule,
            "qwen tokens": qwen.torch_recurrent_gated_delta_rule,
            "kimi chunks": kimi.chunk_kimi_delta_attention,
            "kimi tokens": kimi.recurrent_kimi_delta_attention,
        }
    return found


class RecurrentDraw(NamedTuple):
    """A right function of a rule, and how it is verified.

    Attributes:
        form: the name of the function.
        function: the function.
        dtype, sizes, parameters, seed: arguments of `verify`.
    """

    form: str
    function: Function
    dtype: str
    sizes: dict[str, int]
    parameters: dict[str, Any]
    seed: int

    @classmethod
    def of(cls, seed: int) -> RecurrentDraw:
        """Returns the draw of a seed; four seeds in a row have every rule."""
        random, rule = Random(seed), RULES[seed % 4]
        forms = right_recurrences(rule)
        form = random.choice(sorted(forms))
        takes_channels = "gated" in rule and "qwen" not in form
        per_channel = "kimi" in form or (takes_channels and random.random() < 0.4)
        dtypes = ["float32", "bfloat16", "float16"]
        dtypes += [] if "qwen" in form or "kimi" in form else ["float64"]
        parameters: dict[str, Any] = {"rule": rule}
        if random.random() < 0.5:
            parameters["normalize_qk"] = True
        sizes = {"Z": 16} if per_channel else {}
        return cls(form, forms[form], random.choice(dtypes), sizes, parameters, seed)

    def verify(self, family_count: int = len(FAMILIES)) -> Report:
        """Returns the oracle's report.

        Args:
            family_count: the number of families of inputs, which the seed chooses.
        """
        names = [n for n in families_of("gated") if not FAMILIES[n].is_strict]
        if "kimi" in self.form:  # as many heads of keys as of values
            names.remove("grouped heads")
        chosen = {*Random(self.seed).sample(names, min(family_count, len(names)))}
        return verify(
            self.function,
            "gated",
            dtype=self.dtype,
            families=[n for n in names if n in chosen],
            sizes=self.sizes,
            gradients=False,
            seed=self.seed,
            **self.parameters,
        )
