"""Times `gated` over HTTP beside transformers' function and a loop over tokens in this process.

The contenders take turns, so that a slow moment of the machine affects all of them. The times of a
prompt are CPU times of both processes, on which other work has little effect. A token that
continues a state takes turns with a plain request of as many bytes, by the clock.

    python bench/gated_times.py [--rounds 7] [--tokens 16384] [--threads 1] [--json FILE] [--write]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from service import running_service
from tables import RESULTS, Cell, Results, Table, add_options, describe_machine, finish, spread
from torch import Tensor
from torch.nn.functional import normalize
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from qkv import Client
from qkv.attention.variants import gated

PAGE: Final = RESULTS / "speed.md"
H, D = 8, 64
OUTPUT: Final = frozenset({"output"})
RULE: Final[Mapping[str, Any]] = {"rule": "gated_delta"}
SHORT_ROUNDS: Final = 30  # times more rounds of the short calls
LOOP: Final = "token loop, float64"
LOOP_SHARE: Final = 16  # the loop runs a part of the tokens, and its time is multiplied

Call = Callable[[], Any]


def make_inputs(tokens: int) -> dict[str, Tensor]:
    """Returns random tokens of one sequence in float32: keys of norm 1, mild decays."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, H, tokens, D, generator=generator)
    decay, beta = torch.rand(2, 1, H, tokens, generator=generator)
    return {
        "query": query, "key": normalize(key, dim=-1), "value": value, "log_decay": -0.1 * decay,
        "beta": beta,
    }  # fmt: skip


def run_gated(inputs: Mapping[str, Tensor]) -> Tensor:
    """Returns the output of `attend`, without a service."""
    query, key, value, decay, beta = inputs.values()
    output = gated.attend(
        gated.Call(query, key, value, decay[..., None], beta, rule="gated_delta"), OUTPUT
    ).output
    assert output is not None
    return output


def run_transformers(inputs: Mapping[str, Tensor]) -> Tensor:
    """Returns the output of transformers' chunked function; its layout is made before."""
    output: Tensor = torch_chunk_gated_delta_rule(*inputs.values())[0]
    return output


def run_token_loop(inputs: Mapping[str, Tensor]) -> Tensor:
    """Returns the output of a loop over tokens in float64, all heads at once."""
    query, key, value, decay, beta = (x.double() for x in inputs.values())
    state, outputs = query.new_zeros(1, H, D, D), torch.empty_like(value)
    for t in range(query.shape[2]):
        state = state * decay[:, :, t, None, None].exp()
        read = torch.einsum("bhde,bhd->bhe", state, key[:, :, t])
        new = (value[:, :, t] - read) * beta[:, :, t, None]
        state = state + key[:, :, t, :, None] * new[:, :, None]
        outputs[:, :, t] = torch.einsum("bhde,bhd->bhe", state, query[:, :, t]) / D**0.5
    return outputs


def take_turns(
    calls: Mapping[str, Call], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Returns the milliseconds of each call in each round, forwards and backwards.

    Args:
        calls: by name.
        rounds: the number of calls of each.
        clock: returns seconds.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()  # warm-up
    for turn in range(rounds):
        for name, call in list(calls.items())[:: -1 if turn % 2 else 1]:
            start = clock()
            call()
            times[name].append((clock() - start) * 1e3)
    return times


def prompt_calls(client: Client, tokens: int) -> dict[str, Call]:
    """Returns a whole prompt over HTTP, and its contenders in this process."""
    inputs = make_inputs(tokens)
    arrays: dict[str, Any] = {name: x.numpy() for name, x in inputs.items()}
    few = {name: x[:, :, : tokens // LOOP_SHARE] for name, x in inputs.items()}
    tokens_first = {name: x.transpose(1, 2).contiguous() for name, x in inputs.items()}
    return {
        "`gated` over HTTP": lambda: client.attend("gated", **arrays, **RULE, weights="none"),
        "`gated` in this process": lambda: run_gated(inputs),
        "transformers": lambda: run_transformers(tokens_first),
        LOOP: lambda: run_token_loop(few),
    }


def token_calls(client: Client) -> dict[str, Call]:
    """Returns a token that continues a state, and a plain request with as many bytes."""
    arrays: dict[str, Any] = {name: x.numpy() for name, x in make_inputs(101).items()}
    prompt: dict[str, Any] = {name: x[:, :, :100] for name, x in arrays.items()}
    token: dict[str, Any] = {
        name: np.ascontiguousarray(x[:, :, 100:]) for name, x in arrays.items()
    }
    run = partial(client.attend, "gated", **RULE, outputs=["output", "state"])
    state, short = run(**prompt).state, run(**prompt, chunk=16).state
    numbers = sum(x.nbytes for x in (*state.values(), *token.values())) // 4
    plain = np.ones((1, H, numbers // (H * D), D), np.float32)
    return {
        "a token of `gated`": lambda: run(**token, state=state),
        "the same, `chunk` 16": lambda: run(**token, state=short, chunk=16),
        "`mean` of as many bytes": lambda: client.attend("mean", value=plain, weights="none"),
    }


def table(title: str, times: Mapping[str, Sequence[float]]) -> Table:
    """Returns the times, and the ratio of the first contender to each one in the same round."""
    first = next(iter(times.values()))
    rows: list[list[Cell]] = [
        [name, spread(ms), spread([a / b for a, b in zip(first, ms, strict=True)])]
        for name, ms in times.items()
    ]
    return Table(title, ["", "ms", "first / this"], rows, digits=2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures both comparisons; prints the tables and writes them on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--threads", type=int, default=1)
    add_options(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    settings = {"QKV_THREADS": str(options.threads), "QKV_WORKERS": "1"}
    with (
        running_service(**settings) as service,
        Client("http://{}:{}".format(*service.address), timeout=600) as client,
        torch.inference_mode(),
    ):
        calls = prompt_calls(client, options.tokens)
        cpu_s = lambda: time.process_time() + sum(service.cpu_s)  # noqa: E731
        prompt = take_turns(calls, options.rounds, cpu_s)
        prompt[LOOP] = [ms * LOOP_SHARE for ms in prompt[LOOP]]
        token = take_turns(token_calls(client), options.rounds * SHORT_ROUNDS)
    header = describe_machine(
        prompt=f"{options.tokens} tokens, H={H}, D=E={D}, float32, {options.threads} threads",
        rounds=f"{options.rounds} in turn, {options.rounds * SHORT_ROUNDS} of the token",
    )
    tables = [table("gated, a prompt", prompt), table("gated, a token", token)]
    finish(Results("python bench/gated_times.py", header, tables), PAGE, options)


if __name__ == "__main__":
    main()
