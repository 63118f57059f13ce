"""A chunked gated delta rule in plain torch, as flash-linear-attention has it, with planted bugs.

It takes (B, T, H, D), decays by `g`, and returns the output and the final state (B, H, D, E).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[..., tuple[Tensor, Tensor | None]]


def chunked_rule(*bugs: str, chunk: int = 64, rounds: bool = False) -> Kernel:
    """Returns the kernel.

    Args:
        *bugs: what is wrong, such as "state-transposed"; nothing: it is right.
        chunk: the tokens of a chunk.
        rounds: True to round the parts of a chunk to the dtype of the inputs, as kernels for
            tensor cores do. The state stays float32.
    """

    def rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = q.dtype
        exact = torch.float64 if dtype == torch.float64 else torch.float32

        def narrow(x: Tensor) -> Tensor:
            return x.to(dtype).to(exact) if rounds else x

        V, (T, G, D), E = v.shape[2], k.shape[1:], v.shape[3]
        q, k, v, g, beta = (x.transpose(1, 2).to(exact) for x in (q, k, v, g, beta))
        if "query-key-swapped" in bugs:
            q, k = k, q
        q, k = (
            x.repeat(1, V // G, 1, 1) if "heads-tiled" in bugs else x.repeat_interleave(V // G, 1)
            for x in (q, k)
        )
        if use_qk_l2norm_in_kernel and "keys-not-normalized" not in bugs:
            q, k = (narrow(_unit(x, "epsilon-in-normalizer" in bugs)) for x in (q, k))
        if "scale-missing" not in bugs:
            q = q * (D**-0.5 if scale is None else scale)
        if "beta-not-applied" in bugs:
            beta = torch.ones_like(beta)
        is_per_head = g.ndim == 3
        g = g[..., None] if is_per_head else g
        if "decay-not-logged" in bugs:
            return _by_tokens(q, k, v, g, beta, initial_state, dtype)
        state = q.new_zeros(*q.shape[:2], D, E)
        if initial_state is not None and "initial-state-ignored" not in bugs:
            state = initial_state.to(exact)
            state = state.mT if "state-transposed" in bugs else state
        first, whole = state, T // chunk * chunk
        output = torch.zeros_like(v)
        for start in range(0, whole if "chunk-tail-dropped" in bugs else T, chunk):
            part = slice(start, start + chunk)
            if "history-truncated" in bugs and start:
                state = torch.zeros_like(state)
            if "final-state-stale" in bugs and start:
                first = state
            cut = [x[:, :, part] for x in (q, k, v, g, beta[..., None])]
            output[:, :, part], state = _chunk(cut, state, bugs, narrow)
        state = first if "final-state-stale" in bugs else state
        state = state.mT if "state-transposed" in bugs else state
        return output.transpose(1, 2).to(dtype), state if output_final_state else None

    return rule


def _unit(x: Tensor, has_other_epsilon: bool) -> Tensor:
    if has_other_epsilon:
        return torch.nn.functional.normalize(x, dim=-1)
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _chunk(
    tensors: list[Tensor],
    state: Tensor,
    bugs: tuple[str, ...],
    narrow: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Returns the output of a chunk and the state behind it.

    The decay between two tokens is the difference of two sums, which is masked before its
    exponential.
    """
    q, k, v, g, beta = tensors
    C, D = k.shape[2:]
    sums = g.cumsum(2)
    late = "decay-after-update" in bugs  # a token decays the state after it has written and read
    # what is left of the write of token j, where token i erases and reads
    ends = sums - g if late else sums
    apart = ends[:, :, :, None] - ends[:, :, None]
    upper = torch.ones(C, C, dtype=torch.bool).triu(1)
    between = apart.masked_fill(upper[..., None], -torch.inf).exp().expand(-1, -1, -1, -1, D)
    kb, vb = narrow(beta * k), narrow(beta * v)
    pairs = torch.einsum("bhid,bhjd,bhijd->bhij", kb, k, between)
    system = pairs.tril(-1) + torch.eye(C)
    inverse = torch.linalg.solve_triangular(system, torch.eye(C).to(k), upper=False)
    inverse, held = narrow(inverse), narrow(state)
    written = inverse @ vb - narrow(inverse @ (kb * ends.exp())) @ held
    written = narrow(written)
    weights = torch.einsum("bhid,bhjd,bhijd->bhij", q, k, between)
    weights = weights.tril(-1) if "read-before-write" in bugs else weights.tril()
    output = (q * ends.exp()) @ held + narrow(weights) @ written
    last = sums[:, :, -1:]
    kept = torch.zeros_like(state) if "last-chunk-kept" in bugs else state * last.exp().mT
    state = kept + (k * (last - ends).exp()).mT @ written
    return output, state


def _by_tokens(*tensors: Any) -> tuple[Tensor, Tensor | None]:
    """Multiplies the state by g itself, token by token."""
    q, k, v, g, beta, state, dtype = tensors
    state = torch.zeros_like(k.mT[..., :1] * v[:, :, :1]) if state is None else state.to(k)
    output = torch.zeros_like(v)
    for t in range(k.shape[2]):
        state = g[:, :, t, :, None] * state
        held = (state * k[:, :, t, :, None]).sum(2)
        written = beta[:, :, t, None] * (v[:, :, t] - held)
        state = state + k[:, :, t, :, None] * written[:, :, None]
        output[:, :, t] = (state * q[:, :, t, :, None]).sum(2)
    return output.transpose(1, 2).to(dtype), state
